"""What privacy costs: accuracy by epsilon, and secure aggregation in bytes and seconds; resumable, one after the other.

python -m benchmarks.trust.privacy            # runs what privacy.json lacks, then prints the tables
python -m benchmarks.trust.privacy --table    # the tables alone
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from flwr.app import Context, Message

import wildflower.server_app.app
from benchmarks.runs import with_traffic
from tests.grid import InProcessGrid
from wildflower.client_app import work, worker
from wildflower.client_app.app import app as client
from wildflower.messages.orders import KeyBatch
from wildflower.messages.wire import from_records
from wildflower.rounds.evaluation import Scores
from wildflower.server_app.app import build
from wildflower.server_app.config import RunConfig
from wildflower.server_app.run_folder import read_rounds

RESULTS = Path(__file__).with_name("privacy.json")
EPSILONS = (0.0, 8.0, 2.0, 4.0)  # 0: clipped, with no noise to speak of
DP: dict[str, Any] = {
    "task": "fashion-mnist",
    "strategy": "fedavg",
    "family": "lenet5",
    "family-arguments": "conv_channels = [4, 8], hidden = [16], norm = 'static'",
    "partition": "iid",
    "fleet": "uniform",
    "devices": 1000,
    "devices-per-round": 60,
    "rounds": 15,
    "evaluate-every": 5,
    "evaluate-tiers": False,
    "local-epochs": 1,
    "batch-size": 20,
    "learning-rate": 0.1,
    "momentum": 0.9,
    "augment": False,
    "workers": 1,
    "dp.clip": 0.5,
    "dp.delta": 1e-4,
}
DEVICES, LOST, SECURE_ROUNDS = 30, (3, 13, 23), 3  # nodes; one in ten is lost
SECURE: dict[str, Any] = {
    "task": "fashion-mnist",
    "strategy": "fedavg",
    "family": "lenet5",
    "partition": "iid",
    "fleet": "",
    "devices": DEVICES,
    "devices-per-round": DEVICES,
    "rounds": SECURE_ROUNDS,
    "evaluate-every": SECURE_ROUNDS,
    "local-steps": 5,
    "batch-size": 32,
}


def fleet_file(folder: Path) -> str:
    """A fleet of devices that can all afford the model."""
    path = folder / "uniform.toml"
    path.write_text('[[group]]\nname = "device"\nshare = 1.0\nfits_width = 1.0\nlink = "100 Mbit/s"\nspeed = 1.0\n')
    return str(path)


def run_private(epsilon: float, seed: int) -> dict[str, Any]:
    """One run; its accuracy at every evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        noise = {"dp.epsilon": epsilon} if epsilon else {"dp.noise-multiplier": 1e-3}
        keys = {"fleet": fleet_file(Path(folder)), "output-dir": folder, "run-name": "one", "seed": seed}
        config = RunConfig.from_run_config(DP | keys | noise)
        started = time.perf_counter()
        run_dir = wildflower.server_app.app.run(InProcessGrid(client, 1), config)
        rounds = read_rounds(run_dir)
        return {
            "accuracy": {record.round: record.score for record in rounds if record.score is not None},
            "epsilon": rounds[-1].epsilon if epsilon else None,
            "devices_bounded": sum(record.devices_bounded for record in rounds),
            "devices_trained": sum(record.devices_replied for record in rounds),
            "seconds": time.perf_counter() - started,
        }


def kind_of(message: Message) -> str:
    """Which step a message asks a node for."""
    if message.metadata.message_type != "query":
        return "train"
    if not len(message.content):
        return "report"
    order = from_records(KeyBatch, message.content)[0].orders[0]
    return "reveal" if order.sealed else "share" if order.members else "make keys"


def run_secure(secure: bool, lost: bool) -> dict[str, Any]:
    """Some rounds over nodes of one device each; where some are lost, they share keys and then fail to train."""
    seconds: defaultdict[str, list[float]] = defaultdict(list)

    def answer(message: Message, context: Context) -> Message:
        kind = kind_of(message)
        if lost and kind == "train" and message.metadata.dst_node_id in LOST:
            raise RuntimeError("this node is lost")
        started = time.process_time()
        reply = client(message, context)
        seconds[kind].append(time.process_time() - started)
        return reply

    with tempfile.TemporaryDirectory() as folder, patch.object(worker, "ask", work.do):
        grid = InProcessGrid(
            answer,
            DEVICES,
            lambda n: {"partition-id": n - 1, "num-partitions": DEVICES, "state-dir": f"{folder}/node-{n}"},
        )
        keys = {"output-dir": folder, "run-name": "one", "secure-aggregation.minimum": 5 if secure else 0}
        engine, _ = build(RunConfig.from_run_config(SECURE | keys))
        engine.start()
        records = []
        for number in range(1, SECURE_ROUNDS + 1):
            before = sum(map(sum, seconds.values()))
            started = time.process_time()
            records.append(with_traffic(engine.run_round(grid, number, lambda model: Scores(0.0, 0.0)).record))
            took = time.process_time() - started - (sum(map(sum, seconds.values())) - before)
            seconds["server"].append(took)
        trained = records[0]["devices_replied"]
        return {
            "digest": digest(engine.state().tensors),
            "devices": trained,
            "bytes_down": sum(r["bytes_down"] for r in records) / SECURE_ROUNDS,
            "bytes_up": sum(r["bytes_up"] for r in records) / SECURE_ROUNDS,
            "cpu_seconds": {kind: sum(values) / len(values) for kind, values in seconds.items()},
        }


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 of all tensors."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].contiguous().numpy().tobytes())
    return found.hexdigest()


def tables(results: dict[str, Any]) -> str:
    """Both tables in Markdown."""
    lines = ["| epsilon | accuracy after 5, 10, 15 rounds | changes clipped |", "|---|---|---|"]
    for epsilon in sorted(EPSILONS):
        if (found := results.get(f"dp {epsilon:g} 1")) is not None:
            accuracy = ", ".join(f"{100 * value:.1f}" for value in found["accuracy"].values())
            share = found["devices_bounded"] / found["devices_trained"]
            lines.append(f"| {f'{epsilon:g}' if epsilon else 'no noise'} | {accuracy} | {share:.0%} |")
    kinds = ("train", "make keys", "share", "reveal", "server")
    lines += [
        "",
        f"| | devices | kB down | kB up | {' | '.join(f'{k} ms' for k in kinds)} | model |",
        "|---" * 10 + "|",
    ]
    for secure in (False, True):
        for lost in (False, True):
            if (found := results.get(f"secure {secure} {lost}")) is not None:
                name = f"{'sums only' if secure else 'every update'}{', 3 of 30 lost' if lost else ''}"
                per = [f"{found[way] / 1000:,.0f}" for way in ("bytes_down", "bytes_up")]
                spent = [f"{1000 * found['cpu_seconds'][k]:.0f}" if k in found["cpu_seconds"] else "" for k in kinds]
                lines.append(f"| {name} | {found['devices']} | {' | '.join(per + spent)} | {found['digest'][:8]} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, one result at a time, and print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    jobs: dict[str, Any] = {
        f"secure {secure} {lost}": (lambda s=secure, x=lost: run_secure(s, x))
        for secure in (False, True)
        for lost in (False, True)
    }
    jobs |= {f"dp {epsilon:g} 1": (lambda e=epsilon: run_private(e, 1)) for epsilon in EPSILONS}
    for key, job in jobs.items():
        if key not in results and not arguments.table:
            results[key] = job()
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(tables(results))


if __name__ == "__main__":
    main()
