"""Runs whose parcels travel as float32, float16 and int8: bytes and accuracy; resumable, one run after the other.

python -m benchmarks.wire.run          # runs what results.json lacks; --tasks names some
python -m benchmarks.wire.run --table  # the table alone
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import server_app.app
from benchmarks.runs import summary_of
from client_app.app import app as client
from server_app.config import RunConfig
from tests.grid import InProcessGrid

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
SEEDS = (1, 2, 3)
COMMON: dict[str, Any] = {
    "fleet": str(HERE / "fleet.toml"),
    "widths": "1, 0.5, 0.25",
    "devices": 50,
    "devices-per-round": 10,
    "partition": "dirichlet",
    "alpha": 0.5,
    "batch-size": 32,
    "strategy": "heterofl",
    "evaluate-every": 4,
    "evaluate-tiers": False,
    "workers": 1,
}
TASKS: dict[str, dict[str, Any]] = {
    "lenet5": {
        "task": "fashion-mnist",
        "family": "lenet5",
        "rounds": 60,
        "local-steps": 20,
        "learning-rate": 0.05,
        "decay-rounds": "40, 52",
        # Of ten devices all that they hold, which was the default when the rows were recorded.
        "statistics-devices": 10,
        "statistics-examples": 0,
    },
    # The model and the optimizer of benchmarks/model_search/vit.toml.
    "vit twin": {
        "task": "fashion-mnist",
        "family": "vit-tiny",
        "family-arguments": "hidden = 48, depth = 6, heads = 3, mlp = 96",
        "rounds": 52,
        "local-steps": 10,
        "optimizer": "adamw",
        "learning-rate": 0.001,
        "weight-decay": 0.01,
        "decay-rounds": "34, 44",
    },
    "digits": {
        "task": "digits",
        "family": "cnn3",
        "devices": 20,
        "devices-per-round": 5,
        "batch-size": 16,
        "rounds": 40,
        "local-steps": 10,
        "evaluate-every": 2,
        "decay-rounds": "28, 36",
        "learning-rate": 0.05,
        # As many as a round has devices, and all that they hold, which was the default when the rows were recorded.
        "statistics-devices": 5,
        "statistics-examples": 0,
    },
}
WIRES = ("float32", "int8", "float16")


def run_one(task: str, wire: str, seed: int) -> dict[str, Any]:
    """Bytes of a whole run, and its accuracy: the mean of the last fifth of the evaluations."""
    with tempfile.TemporaryDirectory() as folder:
        own = {"wire": wire, "seed": seed, "output-dir": folder, "run-name": "run"}
        run_dir = server_app.app.run(InProcessGrid(client, 1), RunConfig.from_run_config(COMMON | TASKS[task] | own))
        summary = summary_of(run_dir)
    return {key: summary[key] for key in ("bytes_down", "bytes_up", "final_score", "best_score")}


def table(results: dict[str, Any]) -> str:
    """Means over the seeds, and how many times fewer bytes than as float32."""
    lines = [
        "| | | MB down | times fewer | MB up | times fewer | accuracy | by seed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for task in TASKS:
        for wire in WIRES:
            seeds = [seed for seed in SEEDS if f"{task} {wire} {seed}" in results]
            if not seeds:
                continue
            found = [results[f"{task} {wire} {seed}"] for seed in seeds]
            full = [results[f"{task} float32 {seed}"] for seed in seeds]
            cells = []
            for way in ("bytes_down", "bytes_up"):
                own, before = (mean(run[way] for run in runs) for runs in (found, full))
                cells += [f"{own / 1e6:.2f}", f"{before / own:.2f}"]
            scores = [run["final_score"] for run in found]
            by_seed = ", ".join(f"{100 * score:.2f}" for score in scores)
            lines.append(f"| {task} | {wire} | {' | '.join(cells)} | {100 * mean(scores):.2f} % | {by_seed} |")
    return "\n".join(lines)


def main() -> None:
    """Do the runs that are missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    wanted = [(task, wire, seed) for wire in WIRES for seed in SEEDS for task in arguments.tasks]
    wanted.sort(key=lambda one: (one[1] == "float16", one[0], one[2]))
    for task, wire, seed in () if arguments.table else wanted:
        key = f"{task} {wire} {seed}"
        if key not in results:
            results[key] = run_one(task, wire, seed)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
