"""nodes.json: what the nodes of real devices said last, for `wildflower fleet`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from wildflower.devices.checked import STRICT, AtLeast0, Text, Whole, checked
from wildflower.devices.private import private_open
from wildflower.devices.resource_report import DeviceReport
from wildflower.devices.validation import MAX_LETTERS, one_line
from wildflower.rounds.population import NodeState
from wildflower.server_app.run_folder import JournalError
from wildflower.server_app.whole_files import write_whole

FILE = "nodes.json"
RELEASES = "release"  # the nodes that are to be released from quarantine, one a line


@dataclass(config=STRICT, frozen=True)
class LastReport:
    """A node's last report; `reported_at` is seconds since 1970, `memory_factor` the share of its budget it gets.

    quarantined: why it is asked nothing any more; None where it is. name: under which its key was enrolled; "" unknown.
    """

    node: Annotated[int, Field(ge=0, lt=2**64)]  # Flower's numbers have 64 bits, the highest included
    device: Whole
    report: DeviceReport
    reported_at: AtLeast0
    memory_factor: Annotated[float, Field(ge=0, le=1)]
    quarantined: Text | None
    name: Annotated[str, Field(max_length=MAX_LETTERS)] = ""


def write_nodes(run_dir: Path, nodes: Sequence[NodeState], quarantined: Mapping[int, str] | None = None) -> None:
    """Write nodes.json anew: beside, then renamed.

    Nodes that are quarantined, each with the reason, stay in it also where a resumed run has not heard of them.
    """
    now, quarantined = time.time(), quarantined or {}
    unheard = quarantined.keys() - {state.node for state in nodes}
    earlier = (
        [last for last in read_nodes(run_dir) if last.node in unheard] if unheard and (run_dir / FILE).exists() else []
    )
    lines: list[dict[str, Any]] = [
        {
            "node": state.node,
            "device": state.device,
            "report": state.report.to_json(),
            "reported_at": now - state.age_seconds,
            "memory_factor": state.memory_factor,
            "quarantined": quarantined.get(state.node),
            "name": one_line(state.name),
        }
        for state in nodes
    ]
    lines += [asdict(last) | {"quarantined": quarantined[last.node]} for last in earlier]
    write_whole(run_dir / FILE, json.dumps(lines, indent=1))


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
    line = {**value, "report": DeviceReport.from_json(value.get("report"))} if isinstance(value, dict) else value
    return checked(LastReport, line, "a node")


def ask_release(run_dir: Path, node: int) -> None:
    """Have the run release a node from quarantine before its next round. Raises JournalError where it holds no such."""
    held = {report.node for report in read_nodes(run_dir) if report.quarantined is not None}
    if node not in held:
        there = ", ".join(map(str, sorted(held))) or "none"
        raise JournalError(f"node {node} is not quarantined in {run_dir}; quarantined: {there}")
    with private_open(run_dir / RELEASES, "a") as file:
        file.write(f"{node}\n")


def take_releases(run_dir: Path) -> list[int]:
    """The nodes that were asked to be released since the last call."""
    taken = run_dir / f"{RELEASES}.taken"
    try:
        os.replace(run_dir / RELEASES, taken)  # what is written from now on is of the next call
    except FileNotFoundError:
        return []
    lines = taken.read_text().split()
    taken.unlink()
    return [int(line) for line in lines if line.isascii() and line.isdecimal()]
