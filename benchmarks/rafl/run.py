"""RaFL against methods with one uniform model on label-skewed images.

python -m benchmarks.rafl.run [--jobs 2] [--seeds 1 2 3] [--layout LAYOUT] [--methods NAME ...]   # "rafl a 0.5"
"""

from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.rafl.public import once_for_all, pretrained, scores_on_digits, write_digits
from benchmarks.runs import config_of, rounds_of
from benchmarks.studies import Figures, Study, main
from benchmarks.tables import markdown

HERE = Path(__file__).resolve().parent
ALPHAS = (0.5, 0.1)
TARGET = 0.7  # accuracy whose price in bytes is compared
# The public data are digits (public.py), which the server holds without labels.
DIGITS = "<digits>"
PUBLIC = ["public.task=npz", f"public.data-dir={DIGITS}", "ensemble.steps=100", "ensemble.batch-size=32"]
# A supernet that was trained on the digits, with their labels; its classifier is drawn anew.
SUPERNET = "<supernet of the digits>"
NEW_CLASSIFIER = "initial.names='head.classifier' = false"
PRETRAINED = [f"initial.weights={SUPERNET}", NEW_CLASSIFIER]
# As RaFL makes it: its supernet and the network of the others have the same tensors.
SUPERNETS_FAMILY = {"name": "resnet18", "first_channels": 8, "norm": "batch", "scaler": False}
MOBILE_SUPERNET = "<MobileNetV3 of the digits>"
ONCE_FOR_ALL_SUPERNET = "<once-for-all supernet of the digits>"
# MobileNetV3 with the shortest of its stages and kernels of 3x3, of 2,498,202 parameters. It halves the image five
# times, as the networks do whose multiplications the paper counts. Tensor sets are about fifteen times as large, and
# may travel ten times as long.
MOBILENET_ARGUMENTS: dict[str, Any] = {"kernel_sizes": [3], "depths": [2], "expand_ratios": [3, 4], "halvings": 5}
MOBILENET = [
    "family=mobilenet-v3",
    f"family-arguments={', '.join(f'{key} = {value}' for key, value in MOBILENET_ARGUMENTS.items())}",
    f"fleet={HERE / 'mobilenet-fleet.toml'}",
    "budget.transfer-seconds=10",
]
# The paper's space: depth, expand ratio and kernel of every block are searched. The smallest network, which travels,
# has 2.1 million parameters, the largest 6.4 million. The predictor learns from accuracies of sub-networks on digits.
ONCE_FOR_ALL = {"name": "mobilenet-v3", "halvings": 5}
IN_ONCE_FOR_ALL = [
    "family=mobilenet-v3",
    "family-arguments=halvings = 5",
    f"fleet={HERE / 'mobilenet-fleet.toml'}",
    "budget.transfer-seconds=120",
    f"initial.weights={ONCE_FOR_ALL_SUPERNET}",
    NEW_CLASSIFIER,
]
SMALL_CNN = ["rafl.knowledge-family=cnn3", "rafl.knowledge-width=0.125"]
# Methods with one uniform model train it on every device, whatever its budget.
METHODS = {
    "rafl a": ["strategy=rafl"],
    # Ours: devices draw the first weights of their models, which are random in any case, and never receive any.
    "rafl a, drawn": ["strategy=rafl", "rafl.first=drawn"],
    "rafl b": ["strategy=rafl", "rafl.fusion=ensemble", *PUBLIC],
    "rafl c": ["strategy=rafl", *PRETRAINED],
    "fedavg": ["strategy=fedavg"],
    "fedavg, pretrained": ["strategy=fedavg", *PRETRAINED],
    "fedprox": ["strategy=fedprox", "fedprox.mu=0.01"],
    "fednova": ["strategy=fednova"],
    "scaffold": ["strategy=scaffold"],
    "feddf": ["strategy=feddf", *PUBLIC],
    "spatl": ["strategy=spatl"],
    # Ours: the knowledge network is a CNN of three convolutions of an eighth of their width (3,010 parameters), no
    # part of the supernet. The last row is this network by itself, trained by FedAvg.
    "rafl a, small CNN": ["strategy=rafl", *SMALL_CNN],
    "rafl a, drawn, small CNN": ["strategy=rafl", "rafl.first=drawn", *SMALL_CNN],
    "fedavg, the small CNN alone": [
        "strategy=fedavg",
        "fedavg.use=all-small",
        "family=cnn3",
        "family-arguments=norm = 'batch'",
        "widths=0.125",
    ],
    # Ours: values travel as int8, which every method can.
    "rafl a, drawn, int8": ["strategy=rafl", "rafl.first=drawn", "wire=int8"],
    "fedavg, int8": ["strategy=fedavg", "wire=int8"],
    "rafl a, MobileNetV3": ["strategy=rafl", *MOBILENET],
    "rafl a, drawn, MobileNetV3": ["strategy=rafl", "rafl.first=drawn", *MOBILENET],
    "fedavg, MobileNetV3": ["strategy=fedavg", *MOBILENET],
    "fedprox, MobileNetV3": ["strategy=fedprox", "fedprox.mu=0.01", *MOBILENET],
    "fednova, MobileNetV3": ["strategy=fednova", *MOBILENET],
    "scaffold, MobileNetV3": ["strategy=scaffold", *MOBILENET],
    "feddf, MobileNetV3": ["strategy=feddf", *PUBLIC, *MOBILENET],
    "spatl, MobileNetV3": ["strategy=spatl", *MOBILENET],
    "rafl b, MobileNetV3": ["strategy=rafl", "rafl.fusion=ensemble", *PUBLIC, *MOBILENET],
    "rafl c, once-for-all": [
        "strategy=rafl",
        "rafl.space=once-for-all",
        "rafl.searcher=evolution",
        *IN_ONCE_FOR_ALL,
    ],
    "fedavg, once-for-all": ["strategy=fedavg", *IN_ONCE_FOR_ALL],
    "rafl c, MobileNetV3": ["strategy=rafl", f"initial.weights={MOBILE_SUPERNET}", NEW_CLASSIFIER, *MOBILENET],
}


def figures(folder: Path) -> dict:
    """Accuracy, bytes and simulated hours up to every evaluation, the mean use of budgets, and the last scores of what
    devices hold.
    """
    records = rounds_of(folder)
    bytes_so_far, rows = 0, []
    for record in records:
        bytes_so_far += record["bytes_down"] + record["bytes_up"]
        if record["score"] is not None:
            rows.append([record["round"], record["score"], bytes_so_far, record["simulated_seconds"] / 3600])
    used = [record["bandwidth_utilisation"] for record in records if record["bandwidth_utilisation"]]
    weights = config_of(folder).initial.weights
    return {
        "rounds": rows,
        "bandwidth_utilisation": mean(used) if used else None,
        "personal_score": records[-1]["personal_score"],
        **({"accuracy_on_digits": scores_on_digits(Path(weights))} if weights else {}),
    }


def bytes_to(rows: list[list[float]], target: float) -> float | None:
    """Bytes until an accuracy is reached; None where it never is."""
    return next((row[2] for row in rows if row[1] >= target), None)


def table(_study: Study, results: dict[str, Figures]) -> str:
    """Per alpha and method: accuracy early and at the end, bytes in all and to the target, simulated minutes, use of
    links, and what devices' own models score on their own test examples.
    """
    heads = ["alpha", "method", "seeds", "accuracy after round 5", "accuracy, mean of the last fifth", "MB in all"]
    heads += [f"MB to {TARGET:.0%}", "simulated minutes", "link budget used", "personal accuracy"]
    rows = []
    for name, seeds in results.items():
        method, _, alpha = name.rpartition(" ")
        runs = [*seeds.values()]
        last = mean(mean(row[1] for row in r["rounds"][-max(1, len(r["rounds"]) // 5) :]) for r in runs)
        to_target = [bytes_to(r["rounds"], TARGET) for r in runs]
        reached = [value for value in to_target if value is not None]
        price = f"{mean(reached) / 1e6:.0f}" if len(reached) == len(runs) else f"{len(reached)} of {len(runs)}"
        used = [r["bandwidth_utilisation"] for r in runs if r["bandwidth_utilisation"]]
        own = [r["personal_score"] for r in runs if r["personal_score"] is not None]
        cells = [alpha, method, str(len(runs)), f"{100 * mean(r['rounds'][0][1] for r in runs):.1f}"]
        cells += [f"{100 * last:.1f}", f"{mean(r['rounds'][-1][2] for r in runs) / 1e6:.0f}", price]
        cells += [f"{60 * mean(r['rounds'][-1][3] for r in runs):.1f}", f"{mean(used):.0%}" if used else ""]
        rows.append([*cells, f"{100 * mean(own):.1f}" if own else ""])
    return markdown(heads, rows)


STUDY = Study(
    HERE / "table.toml",
    {f"{method} {alpha}": [*sets, f"alpha={alpha}"] for alpha in ALPHAS for method, sets in METHODS.items()},
    places={
        DIGITS: lambda _: str(write_digits(STUDY.runs / "digits")),
        # One for each seed.
        SUPERNET: lambda seed: str(pretrained(STUDY.runs, SUPERNETS_FAMILY, seed)),
        MOBILE_SUPERNET: lambda seed: str(
            pretrained(STUDY.runs / "mobilenet-v3", {"name": "mobilenet-v3"} | MOBILENET_ARGUMENTS, seed)
        ),
        ONCE_FOR_ALL_SUPERNET: lambda seed: str(once_for_all(STUDY.runs / "once-for-all", ONCE_FOR_ALL, seed)),
    },
    figures=figures,
    table=table,
)

if __name__ == "__main__":
    main([STUDY], __doc__ or "")
