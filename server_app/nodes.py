"""nodes.json: what the nodes of real devices said last, for `wildflower nodes`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devices.report import DeviceReport
from devices.validation import check_number, check_whole, json_object
from rounds.population import NodeState
from server_app.journal import JournalError

FILE = "nodes.json"
KEYS = ("node", "device", "report", "reported_at", "memory_factor")


@dataclass(frozen=True)
class LastReport:
    """A node's last report; `reported_at` is seconds since 1970, `memory_factor` the share of its budget it gets."""

    node: int
    device: int
    report: DeviceReport
    reported_at: float
    memory_factor: float


def write_nodes(run_dir: Path, nodes: Sequence[NodeState]) -> None:
    """Write nodes.json anew: beside, then renamed."""
    now = time.time()
    lines: list[dict[str, Any]] = [
        {
            "node": state.node,
            "device": state.device,
            "report": state.report.to_json(),
            "reported_at": now - state.age_seconds,
            "memory_factor": state.memory_factor,
        }
        for state in nodes
    ]
    beside = run_dir / f"{FILE}.part"
    beside.write_text(json.dumps(lines, indent=1))
    os.replace(beside, run_dir / FILE)


def read_nodes(run_dir: Path) -> list[LastReport]:
    """The last reports that a run has left. Raises JournalError where there are none, or they are damaged."""
    path = run_dir / FILE
    try:
        lines = json.loads(path.read_text())
        if not isinstance(lines, list):
            raise ValueError(f"expected a list, got {type(lines).__name__}")
        return [_read(line) for line in lines]
    except FileNotFoundError:
        raise JournalError(
            f"{path} does not exist: {run_dir} is no run with real devices, or has no round yet"
        ) from None
    except (OSError, ValueError) as error:
        raise JournalError(f"{path} cannot be read: {error}") from None


def _read(value: object) -> LastReport:
    line = json_object(value, "a node", KEYS)
    return LastReport(
        _node(line["node"]),
        check_whole(line["device"], "device"),
        DeviceReport.from_json(line["report"]),
        check_number(line["reported_at"], "reported_at"),
        check_number(line["memory_factor"], "memory_factor", maximum=1.0),
    )


def _node(value: object) -> int:
    """Flower's numbers of nodes have 64 bits, the highest included."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
        raise ValueError(f"node = {value!r}: must be a whole number below 2^64")
    return value
