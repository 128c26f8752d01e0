"""SCAFFOLD and FedNova against FedAvg on label-skewed Fashion-MNIST.

python -m benchmarks.label_skew.run [--jobs 2] [--seeds 1 2 3] [--methods NAME ...]   # "drift scaffold", "steps *"
"""

from pathlib import Path
from statistics import mean

from benchmarks.runs import first_round_with, rounds_of
from benchmarks.studies import Figures, Study, main
from benchmarks.tables import markdown

HERE = Path(__file__).resolve().parent
# "drift": many local steps over few classes, as many on every device.
# "steps": whole epochs over shards of very different sizes, so that devices take different numbers of steps.
SETTINGS = {
    "drift": ["examples-per-device=600", "rounds=40", "local-steps=30", "batch-size=32", "learning-rate=0.05"],
    "steps": ["rounds=20", "local-epochs=1", "batch-size=128", "learning-rate=0.1"],
}
TARGETS = {"drift": 0.7, "steps": 0.6}  # the accuracy to which rounds are counted
METHODS = {"drift": ("fedavg", "scaffold"), "steps": ("fedavg", "fednova")}


def figures(folder: Path) -> dict:
    """The test accuracy after every evaluated round."""
    return {"curve": {r["round"]: r["score"] for r in rounds_of(folder) if r["score"] is not None}}


def table(_study: Study, results: dict[str, Figures]) -> str:
    """Mean of the last fifth of the evaluations of every seed, the best one, and the rounds to a target."""
    targets = " and ".join(f"{100 * target:.0f} % ({setting})" for setting, target in TARGETS.items())
    heads = ["setting", "method", "mean of the last fifth, by seed", "mean", "best, mean", f"rounds to {targets}"]
    rows = []
    for name, seeds in results.items():
        setting, method = name.split()
        runs = [[*run["curve"].values()] for run in seeds.values()]
        last = [100 * mean(run[-len(run) // 5 :]) for run in runs]
        best = mean(100 * max(run) for run in runs)
        each = " / ".join(f"{value:.1f}" for value in last)
        reached = " / ".join(first_round_with(run["curve"], TARGETS[setting]) for run in seeds.values())
        rows.append([setting, method, each, f"{mean(last):.1f}", f"{best:.1f}", reached])
    return markdown(heads, rows)


STUDY = Study(
    HERE / "table.toml",
    {
        f"{setting} {method}": [f"strategy={method}", *SETTINGS[setting]]
        for setting, methods in METHODS.items()
        for method in methods
    },
    figures=figures,
    table=table,
)

if __name__ == "__main__":
    main([STUDY], __doc__ or "")
