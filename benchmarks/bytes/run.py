"""Bytes that one device receives and sends in a round, against the bytes of its parameters and buffers.

    python -m benchmarks.bytes.run

Every family at five widths does one real round of FedAvg over images of CIFAR-10's shape, with one device on one node,
over a grid in this process. Both
messages are taken as they are handed to Flower and turned into the objects that Flower transfers; counted are the
contents of all of a message's objects (`content`: the RecordDict, which is ours) and of the message around it
(`metadata`, which is Flower's and the same for every app).
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from flwr.app import Message
from flwr.supercore.inflatable.inflatable_object import InflatableObject, get_all_nested_objects

from benchmarks.random_images import write_copy
from benchmarks.tables import write_between
from tests.grid import InProcessGrid
from wildflower.client_app.app import app
from wildflower.models.family import FAMILIES
from wildflower.rounds.evaluation import Scores
from wildflower.server_app.app import build
from wildflower.server_app.config import RunConfig

HERE = Path(__file__).resolve().parent
RESULTS, TABLE = HERE / "results.json", HERE / "README.md"
WIDTHS = (1.0, 0.5, 0.25, 0.125, 0.0625)


def main() -> None:
    """Measure all families; write results.json and the table in README.md."""
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_copy(Path(folder) / "data", train=40, test=10)
        for name, family in FAMILIES.items():
            if not family.input_dtype.is_floating_point:
                continue  # over tokens, where the data here are images
            for width in WIDTHS:
                rows.append(measure(name, width, Path(folder)))
                print(rows[-1], file=sys.stderr)
    versions = {package: version(package) for package in ("flwr", "torch")}
    RESULTS.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")
    write_table(rows, versions)


def measure(name: str, width: float, folder: Path) -> dict[str, Any]:
    """One round of one device with the sub-model of a width."""
    config = RunConfig.from_run_config(
        {
            "task": "cifar10",
            "data-dir": str(folder / "data"),
            "partition": "iid",
            "family": name,
            "strategy": "fedavg",
            "widths": f"{width:g}",
            "fleet": "",
            "devices": 1,
            "devices-per-round": 1,
            "rounds": 2,
            "evaluate-every": 2,
            "local-steps": 1,
            "batch-size": 2,
            "output-dir": str(folder),
            "run-name": f"{name}-{width:g}",
        }
    )
    state_dir = str(folder / "state")
    grid = InProcessGrid(app, 1, lambda node: {"partition-id": node - 1, "state-dir": state_dir})
    sizes: dict[str, tuple[int, int]] = {}  # direction -> bytes of the content, and of the message around it

    def weigh(direction: str, message: Message) -> None:
        content_bytes = object_bytes(message.content)
        sizes[direction] = content_bytes, object_bytes(message) - content_bytes

    # Both at once: the client lets go of the arrays of a message, the server of those of a reply.
    def ask(messages: list[Message]) -> list[Message]:
        for message in messages:
            weigh("down", message)  # the last one is what trains
        return messages

    def keep(reply: Message) -> Message:
        weigh("up", reply)
        return reply

    grid.seen, grid.tamper = ask, keep
    engine, _ = build(config)
    record = engine.run_round(grid, 1, lambda model: Scores(0.0, 0.0)).record
    assert record["devices_replied"] == 1, record
    tensors = engine.method.family.tensors(engine.method.family.width(width)).values()
    payload_bytes = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in tensors)
    result: dict[str, Any] = {"family": name, "width": width, "payload_bytes": payload_bytes}
    for direction in ("down", "up"):
        content_bytes, metadata_bytes = sizes[direction]
        result[direction] = {
            "content_bytes": content_bytes,
            "metadata_bytes": metadata_bytes,
            "ratio": content_bytes / payload_bytes,
        }
    return result


def object_bytes(root: InflatableObject) -> int:
    """Bytes of an object and of all objects below it, as Flower pushes them."""
    return sum(len(part.deflate()) for part in get_all_nested_objects(root).values())


def write_table(rows: list[dict[str, Any]], versions: dict[str, str]) -> None:
    """The table in README.md, between its two marks."""
    lines = [
        "| family | width | parameters and buffers, bytes | down, bytes | down, ratio | up, bytes | up, ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        down, up = row["down"], row["up"]
        lines.append(
            f"| {row['family']} | {row['width']:g} | {row['payload_bytes']:,} "
            f"| {down['content_bytes']:,} | {down['ratio']:.4f} | {up['content_bytes']:,} | {up['ratio']:.4f} |"
        )
    metadata = sorted({row[d]["metadata_bytes"] for row in rows for d in ("down", "up")})
    packages = ", ".join(f"{package} {number}" for package, number in versions.items())
    lines += ["", f"Flower's own metadata around each message: {metadata[0]} to {metadata[-1]} bytes. With {packages}."]
    write_between(TABLE, "table", "\n".join(lines))


if __name__ == "__main__":
    main()
