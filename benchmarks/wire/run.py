"""Runs whose tensor sets travel as float32, float16 and int8: bytes and accuracy.

python -m benchmarks.wire.run [--jobs 2] [--seeds 1 2 3] [--methods NAME ...]   # "lenet5 int8", "digits *"
"""

from pathlib import Path
from statistics import mean

from benchmarks.runs import summary_of
from benchmarks.studies import Figures, Study, main
from benchmarks.tables import markdown

HERE = Path(__file__).resolve().parent
FIFTY = ["devices=50", "devices-per-round=10", "batch-size=32", "evaluate-every=4"]
TASKS = {
    "lenet5": [
        *("task=fashion-mnist", "family=lenet5", *FIFTY),
        *("rounds=60", "local-steps=20", "learning-rate=0.05", "schedule.decay-rounds=40, 52"),
        # Of ten devices all that they hold, which was the default when the rows were recorded.
        *("statistics.devices=10", "statistics.examples=0"),
    ],
    # The model and the optimizer of benchmarks/model_search/vit.toml.
    "vit twin": [
        *("task=fashion-mnist", "family=vit-tiny", *FIFTY),
        "family-arguments=hidden = 48, depth = 6, heads = 3, mlp = 96",
        *("rounds=52", "local-steps=10", "schedule.decay-rounds=34, 44"),
        *("optimizer=adamw", "learning-rate=0.001", "weight-decay=0.01"),
    ],
    "digits": [
        *("task=digits", "family=cnn3", "devices=20", "devices-per-round=5", "batch-size=16", "evaluate-every=2"),
        *("rounds=40", "local-steps=10", "learning-rate=0.05", "schedule.decay-rounds=28, 36"),
        # As many as a round has devices, and all that they hold, which was the default when the rows were recorded.
        *("statistics.devices=5", "statistics.examples=0"),
    ],
}
WIRES = ("float32", "int8", "float16")


def figures(folder: Path) -> dict:
    """Bytes of a whole run, and its accuracy: the mean of the last fifth of the evaluations."""
    summary = summary_of(folder)
    return {key: summary[key] for key in ("bytes_down", "bytes_up", "final_score", "best_score")}


def table(_study: Study, results: dict[str, Figures]) -> str:
    """Means over the seeds, and how many times fewer bytes than as float32."""
    heads = ["", "", "MB down", "times fewer", "MB up", "times fewer", "accuracy", "by seed"]
    rows = []
    for name, seeds in results.items():
        task, _, wire = name.rpartition(" ")
        whole = results.get(f"{task} float32", {})
        cells = []
        for way in ("bytes_down", "bytes_up"):
            own = mean(run[way] for run in seeds.values())
            before = [whole[seed][way] for seed in seeds if seed in whole]
            times = f"{mean(before) / own:.2f}" if len(before) == len(seeds) else ""
            cells += [f"{own / 1e6:.2f}", times]
        scores = [100 * run["final_score"] for run in seeds.values()]
        by_seed = ", ".join(f"{score:.2f}" for score in scores)
        rows.append([task, wire, *cells, f"{mean(scores):.2f} %", by_seed])
    return markdown(heads, rows)


STUDY = Study(
    HERE / "table.toml",
    {f"{task} {wire}": [*sets, f"wire={wire}"] for task, sets in TASKS.items() for wire in WIRES},
    figures=figures,
    table=table,
)

if __name__ == "__main__":
    main([STUDY], __doc__ or "")
