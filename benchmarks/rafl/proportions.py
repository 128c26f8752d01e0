"""RaFL and FedAvg at the proportions of RaFL's paper, from the same start.

python -m benchmarks.rafl.proportions [--jobs 2] [--seeds 1 2 3] [--methods NAME ...]
"""

from pathlib import Path
from statistics import mean

from benchmarks.rafl.public import pretrained, write_resized
from benchmarks.rafl.run import NEW_CLASSIFIER, figures
from benchmarks.studies import Figures, Study, accuracy, main
from benchmarks.tables import markdown

HERE = Path(__file__).resolve().parent
SIDE = 14
CLOTHES, SUPERNET = "<Fashion-MNIST at 14x14>", "<supernet of the digits at 14x14>"
FAMILY = {"name": "cnn3", "norm": "batch", "scaler": False}
FEDAVG = ["strategy=fedavg"]
RAFL = ["strategy=rafl", "rafl.knowledge-width=0.8"]
START = [f"initial.weights={SUPERNET}", NEW_CLASSIFIER]
METHODS = {
    "rafl": RAFL,
    "fedavg": FEDAVG,
    "rafl, trained supernet": [*RAFL, *START],
    "fedavg, trained supernet": [*FEDAVG, *START],
    # What the knowledge network learns without a personal model beside it.
    "fedavg, the knowledge network alone": [*FEDAVG, "fedavg.use=all-small", "widths=0.8"],
}


def table(_study: Study, results: dict[str, Figures]) -> str:
    """Per method: the model that travels after a tenth of the rounds and at the end, its bytes, and personal models."""
    heads = ["method", "seeds", "accuracy after round 20", "after round 200", "best", "MB in all", "personal accuracy"]
    rows = []
    for method, seeds in results.items():
        runs = [*seeds.values()]
        curves = [[row[1] for row in run["rounds"]] for run in runs]
        parts = [[curve[0] for curve in curves], [curve[-1] for curve in curves], [max(curve) for curve in curves]]
        megabytes = f"{mean(run['rounds'][-1][2] for run in runs) / 1e6:.0f}"
        own = accuracy([run["personal_score"] for run in runs])
        rows.append([method, str(len(runs)), *map(accuracy, parts), megabytes, own])
    return markdown(heads, rows)


STUDY = Study(
    HERE / "proportions.toml",
    {method: [f"data-dir={CLOTHES}", *sets] for method, sets in METHODS.items()},
    places={
        CLOTHES: lambda _: str(write_resized(STUDY.runs / "clothes", "fashion-mnist", 255, SIDE)),
        # One for each seed.
        SUPERNET: lambda seed: str(pretrained(STUDY.runs, FAMILY, seed, side=SIDE)),
    },
    figures=figures,
    table=table,
)

if __name__ == "__main__":
    main([STUDY], __doc__ or "")
