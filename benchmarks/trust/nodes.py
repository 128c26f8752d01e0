"""Secure aggregation over real nodes: seconds per round against without, where one device of ten is lost each time.

python -m benchmarks.trust.nodes            # writes nodes.json; runs what it lacks
python -m benchmarks.trust.nodes --table    # the table alone

A SuperLink and ten SuperNodes are processes of this machine. The lost device makes keys and shares its seeds like the
others, and then its training fails.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import psutil

from benchmarks.trust.privacy import digest
from benchmarks.trust.small_runs import small_run
from tests.deployment import Deployment
from wildflower.launch.experiment_file import write_toml
from wildflower.server_app import checkpoint
from wildflower.server_app.run_folder import read_devices, read_rounds

RESULTS = Path(__file__).with_name("nodes.json")
DEVICES, ROUNDS, LOST = 10, 3, 9
IS_LOST = "WILDFLOWER_BENCHMARK_LOST"  # set in the environment of the lost device's node
METHOD = f'''
"""FedAvg, whose devices fail to train where the environment says so."""

import os

from wildflower.strategies.fedavg import FedAvg
from wildflower.strategies.method import Training


class Half(Training):
    """L = CE(f(x), y), or no loss."""

    def loss(self, bench, model):
        if {IS_LOST!r} in os.environ:
            raise RuntimeError("this device is lost")
        return super().loss(bench, model)


class PartlyLost(FedAvg):
    def client_step(self, order):
        return Half()
'''
EXPERIMENT = small_run(DEVICES, ROUNDS) | {
    "task": "digits",
    "strategy": "partly_lost:PartlyLost",
    "local-steps": 5,
    "seed": 1,
}


def run_both(folder: Path, results: dict[str, Any]) -> None:
    """The runs that `results` lacks, over the same nodes."""
    (folder / "partly_lost.py").write_text(METHOD)
    # Ten nodes that look for work 20 times a second each, as tests let them, would keep a small machine busy.
    deployment = Deployment(folder / "flower", {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5"})
    try:
        deployment.start_superlink()
        for device in range(DEVICES):
            deployment.start_node(device, DEVICES, environment={IS_LOST: "1"} if device == LOST else {})
        for name, secure in (("every update seen", False), ("sums only", True)):
            if name in results:
                continue
            keys = {
                "output-dir": str(folder),
                "run-name": f"secure-{secure}",
                "secure-aggregation.minimum": 5 if secure else 0,
            }
            (folder / "experiment.toml").write_text(write_toml(EXPERIMENT | keys))
            process = deployment.run(str(folder / "experiment.toml"))
            said = process.communicate()[0]
            if process.returncode:
                raise RuntimeError(said)
            results[name] = figures(folder / f"secure-{secure}")
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    finally:
        deployment.close()


def figures(run_dir: Path) -> dict[str, Any]:
    """What the journal of a run says, and the SHA-256 of its model."""
    rounds = read_rounds(run_dir)
    return {
        "devices": [record.devices_replied for record in rounds],
        "outcomes_of_the_lost": [line.outcome for line in read_devices(run_dir) if line.device == LOST],
        "round_seconds": [record.wall_seconds for record in rounds],
        "bytes_down": [record.training_bytes_down + record.statistics_bytes_down for record in rounds],
        "bytes_up": [record.training_bytes_up + record.statistics_bytes_up for record in rounds],
        "digest": digest(checkpoint.load(run_dir).state.tensors),
        "load_of_the_machine": psutil.getloadavg()[1],
    }


def table(results: dict[str, Any]) -> str:
    """A row per run in Markdown."""
    lines = ["| | devices | kB down | kB up | seconds of each round | load | model |", "|---" * 7 + "|"]
    for name, found in results.items():
        down, up = (f"{found[way][-1] / 1000:,.0f}" for way in ("bytes_down", "bytes_up"))
        seconds = ", ".join(f"{value:.0f}" for value in found["round_seconds"])
        load = f"{found['load_of_the_machine']:.0f}"
        lines.append(
            f"| {name} | {found['devices'][-1]} | {down} | {up} | {seconds} | {load} | {found['digest'][:8]} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not arguments.table:
        with tempfile.TemporaryDirectory() as folder:
            run_both(Path(folder), results)
    print(table(results))


if __name__ == "__main__":
    main()
