"""SCAFFOLD and FedNova against FedAvg on label-skewed Fashion-MNIST; resumable, one run after the other.

python -m benchmarks.label_skew.run          # runs what results.json lacks, and writes the table
python -m benchmarks.label_skew.run --table  # the table in README.md alone
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
from benchmarks.tables import markdown, write_between
from client_app.app import app as client
from server_app.config import RunConfig
from tests.grid import InProcessGrid

RESULTS, README = (Path(__file__).with_name(name) for name in ("results.json", "README.md"))
SEEDS = (1, 2, 3)
EVERY = 2  # rounds between two evaluations
COMMON: dict[str, Any] = {
    "task": "fashion-mnist",
    "family": "lenet5",
    "partition": "dirichlet",
    "fleet": "plenty",
    "workers": 1,
    "optimizer": "sgd",
    "momentum": 0.0,
    "weight-decay": 0.0,
    "evaluate-tiers": False,
    "evaluate-every": EVERY,
}
# "drift": many local steps over few classes, as many on every device, half of the devices in a round.
# "steps": whole epochs over shards of very different sizes, so that devices take different numbers of steps.
SETTINGS: dict[str, dict[str, Any]] = {
    "drift": COMMON
    | {
        "alpha": 0.1,
        "devices": 20,
        "devices-per-round": 10,
        "examples-per-device": 600,
        "rounds": 40,
        "local-steps": 30,
        "batch-size": 32,
        "learning-rate": 0.05,
    },
    "steps": COMMON
    | {
        "alpha": 0.1,
        "devices": 20,
        "devices-per-round": 10,
        "rounds": 20,
        "local-epochs": 1,
        "batch-size": 128,
        "learning-rate": 0.1,
    },
}
TARGETS = {"drift": 0.7, "steps": 0.6}  # the accuracy to which rounds are counted
METHODS = {"drift": ("fedavg", "scaffold"), "steps": ("fedavg", "fednova")}
FLEET = '[[group]]\nname = "all"\nshare = 1.0\nmemory = "8 GB"\n'


def accuracies(setting: str, method: str, seed: int) -> list[float]:
    """The test accuracy after every second round of one run."""
    with tempfile.TemporaryDirectory() as folder:
        fleet = Path(folder) / "plenty.toml"
        fleet.write_text(FLEET)
        own = {"fleet": str(fleet), "strategy": method, "seed": seed, "output-dir": folder, "run-name": "run"}
        config = RunConfig.from_run_config(SETTINGS[setting] | own)
        run_dir = server_app.app.run(InProcessGrid(client, 1), config)
        lines = (run_dir / "rounds.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    found = [record["score"] if "score" in record else record["accuracy"] for record in records]
    return [accuracy for accuracy in found if accuracy is not None]


def table(results: dict[str, list[float]]) -> str:
    """Mean of the last fifth of the evaluations of every seed, the best one, and the rounds to a target."""
    targets = " and ".join(f"{100 * target:.0f} % ({setting})" for setting, target in TARGETS.items())
    heads = ["setting", "method", "mean of the last fifth, seeds 1 to 3", "mean", "best, mean", f"rounds to {targets}"]
    rows = []
    for setting, methods in METHODS.items():
        for method in methods:
            runs = [results[key] for seed in SEEDS if (key := f"{setting} {method} {seed}") in results]
            if runs:
                last = [100 * mean(run[-len(run) // 5 :]) for run in runs]
                best = mean(100 * max(run) for run in runs)
                each = " / ".join(f"{value:.1f}" for value in last)
                reached = " / ".join(rounds_to(TARGETS[setting], run) for run in runs)
                rows.append([setting, method, each, f"{mean(last):.1f}", f"{best:.1f}", reached])
    return markdown(heads, rows)


def rounds_to(target: float, accuracies: list[float]) -> str:
    """The first evaluated round whose accuracy reaches the target."""
    reached = [number for number, accuracy in enumerate(accuracies, 1) if accuracy >= target]
    return str(EVERY * reached[0]) if reached else "never"


def main() -> None:
    """Do the runs that are missing, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, list[float]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for seed in () if arguments.table else SEEDS:
        for setting, methods in METHODS.items():
            for method in methods:
                key = f"{setting} {method} {seed}"
                if key not in results:
                    results[key] = accuracies(setting, method, seed)
                    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    write_between(README, "table", table(results))


if __name__ == "__main__":
    main()
