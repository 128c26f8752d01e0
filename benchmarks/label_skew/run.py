"""SCAFFOLD and FedNova against FedAvg on label-skewed Fashion-MNIST; resumable, one run after the other.

python -m benchmarks.label_skew.run          # runs what results.json lacks
python -m benchmarks.label_skew.run --table  # the table alone
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
from client_app.app import app as client
from server_app.config import RunConfig
from tests.grid import InProcessGrid

RESULTS = Path(__file__).with_name("results.json")
SEEDS = (1, 2, 3)
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
    "evaluate-every": 2,
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
    """Mean of the last fifth of the rounds, and the best, of every seed."""
    lines = [
        "| setting | method | mean of the last fifth, seeds 1 to 3 | mean | best round, mean |",
        "|---|---|---|---|---|",
    ]
    for setting, methods in METHODS.items():
        for method in methods:
            runs = [results[key] for seed in SEEDS if (key := f"{setting} {method} {seed}") in results]
            if runs:
                last = [100 * mean(run[-len(run) // 5 :]) for run in runs]
                best = mean(100 * max(run) for run in runs)
                each = " / ".join(f"{value:.1f}" for value in last)
                lines.append(f"| {setting} | {method} | {each} | {mean(last):.1f} | {best:.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Do the runs that are missing, and print the table."""
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
    print(table(results))


if __name__ == "__main__":
    main()
