"""One hostile device of ten against every aggregation: accuracy after 30 rounds; resumable, one run after the other.

python -m benchmarks.trust.attack fashion-mnist --seeds 3    # runs what attack.json lacks, then prints the table
python -m benchmarks.trust.attack digits --table             # the table alone
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

import numpy as np
from flwr.app import Message

import wildflower.server_app.app
from benchmarks.trust.small_runs import small_run
from tests.grid import InProcessGrid
from tests.small_run import changed_reply
from wildflower.client_app import context, work, worker
from wildflower.client_app.app import app as client
from wildflower.messages.orders import Batch
from wildflower.messages.wire import from_records
from wildflower.server_app.config import RunConfig
from wildflower.server_app.run_folder import read_rounds
from wildflower.tasks.task import Task

RESULTS = Path(__file__).with_name("attack.json")
AGGREGATIONS = ("mean", "trimmed-mean", "median", "norm-bounded-mean")
ATTACKS = ("none", "scaled", "sign-flipped", "label-flipped")
ROUNDS, DEVICES = 30, 10
COMMON = small_run(DEVICES, ROUNDS)
TASKS: dict[str, dict[str, Any]] = {
    "digits": COMMON | {"task": "digits"},
    "fashion-mnist": COMMON | {"task": "fashion-mnist", "local-steps": 20, "batch-size": 32},
}
FACTORS = {"scaled": 10.0, "sign-flipped": -1.0}  # of the hostile device's change


def hostile_grid(attack: str, folder: Path) -> InProcessGrid:
    """Ten nodes, of which the first is hostile. It trains, and then lies."""
    sent: dict[int, list[bytes]] = {}

    def answer(message: Message, context: Any) -> Message:
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 1:
            sent[1] = from_records(Batch, message.content)[1]
            if attack == "label-flipped":
                with flipped_labels():
                    return client(message, context)
        return client(message, context)

    def lie(reply: dict[str, Any], arrays: list[bytes]) -> None:
        start, trained = (np.frombuffer(data, np.float32) for data in (sent[1][0], arrays[0]))
        arrays[0] = (start + np.float32(FACTORS[attack]) * (trained - start)).tobytes()

    grid = InProcessGrid(
        answer,
        DEVICES,
        lambda node: {"partition-id": node - 1, "num-partitions": DEVICES, "state-dir": str(folder / f"node-{node}")},
    )
    if attack in FACTORS:
        grid.tamper = lambda m: (
            changed_reply(lie)(m) if (m.metadata.message_type, m.metadata.src_node_id) == ("train", 1) else m
        )
    return grid


def flipped_labels() -> Any:
    """For a `with` block every label y is taught as classes - 1 - y."""
    honest = context.batch_of

    def wrong(task: Task, *arguments: Any) -> Any:
        inputs, labels = honest(task, *arguments)
        return inputs, task.classes - 1 - labels

    return patch.object(context, "batch_of", wrong)


def run_one(task: str, attack: str, aggregation: str, seed: int) -> dict[str, Any]:
    """One run; the accuracy of its last round."""
    # Devices work in this process, which is as good and faster than a worker of their own.
    with tempfile.TemporaryDirectory() as folder, patch.object(worker, "ask", work.do):
        keys = {"aggregation.rule": aggregation, "seed": seed, "output-dir": folder, "run-name": "one"}
        config = RunConfig.from_run_config(TASKS[task] | keys)
        run_dir = wildflower.server_app.app.run(hostile_grid(attack, Path(folder)), config)
        return {"accuracy": read_rounds(run_dir)[-1].score}


def table(results: dict[str, Any], task: str) -> str:
    """Rows of attacks, columns of aggregations, in Markdown: accuracy in percent, its mean and range over seeds."""
    lines = [f"| attack | {' | '.join(AGGREGATIONS)} |", "|---" * (1 + len(AGGREGATIONS)) + "|"]
    for attack in ATTACKS:
        cells = []
        for aggregation in AGGREGATIONS:
            prefix = f"{task} {attack} {aggregation} "
            found = [100 * run["accuracy"] for key, run in results.items() if key.startswith(prefix)]
            spread = f" ({min(found):.1f} to {max(found):.1f})" if len(found) > 1 else ""
            cells.append(f"{mean(found):.1f}{spread}" if found else "")
        lines.append(f"| {attack} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, one result at a time, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("task", nargs="?", choices=list(TASKS), default="digits")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for seed in range(1, arguments.seeds + 1) if not arguments.table else ():
        for attack in ATTACKS:
            for aggregation in AGGREGATIONS:
                key = f"{arguments.task} {attack} {aggregation} {seed}"
                if key not in results:
                    results[key] = run_one(arguments.task, attack, aggregation, seed)
                    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results, arguments.task))


if __name__ == "__main__":
    main()
