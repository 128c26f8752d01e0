"""`wildflower nodes`: the nodes that a SuperLink knows, each with its last report."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from wildflower.cli.probe_command import report_rows
from wildflower.launch.superlink import connected
from wildflower.server_app.node_records import LastReport, read_nodes
from wildflower.server_app.units import seconds_text

HEADERS = ("node", "status", "device", "kind", "memory", "down", "up", "reported")


def node_rows(address: str, root_certificates: Path | None, run_dir: Path | None) -> list[list[str]]:
    """Every node that the SuperLink knows, with what it said last in the run of a folder, if one is given.

    Raises FlowerError where the SuperLink does not answer, JournalError where the folder holds no reports.
    """
    reports = {} if run_dir is None else {report.node: report for report in read_nodes(run_dir)}
    with connected(address, root_certificates) as flower:
        found = flower.nodes()
    return table(found, reports, time.time())


def table(nodes: Mapping[int, str], reports: Mapping[int, LastReport], now: float) -> list[list[str]]:
    """One row per node: those that are connected first, then by device."""
    rows = []
    order = sorted(nodes, key=lambda n: (nodes[n] != "online", reports[n].device if n in reports else 2**63, n))
    for node in order:
        last = reports.get(node)
        status = nodes[node] + (f", quarantined: {last.quarantined}" if last and last.quarantined else "")
        rows.append([str(node), status, *(_cells(last, now) if last else ["", "", "", "", "", "no report"])])
    return rows


def _cells(last: LastReport, now: float) -> Sequence[str]:
    values = dict(report_rows(last.report))
    memory = values["memory"]
    if last.memory_factor < 1:
        memory += f", budget lowered to {last.memory_factor:.0%} after an overrun"
    age = f"{seconds_text(round(max(0.0, now - last.reported_at)))} ago"
    return [str(last.device), values["kind"], memory, values["link down"], values["link up"], age]
