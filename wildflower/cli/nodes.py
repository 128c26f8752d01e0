"""`wildflower nodes`: the nodes that a SuperLink knows, each with its last report."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wildflower.cli.options import Insecure, RootCertificates, deployment_at, print_table
from wildflower.cli.probe_command import report_rows
from wildflower.plugins.user_error import UserError

if TYPE_CHECKING:
    from wildflower.launch.before import Deployment
    from wildflower.launch.known_nodes import KnownNode
    from wildflower.server_app.node_records import LastReport

HEADERS = ("node", "status", "device", "kind", "memory", "down", "up", "reported")


def nodes(
    superlink: Annotated[str, typer.Option(metavar="HOST:PORT", help="The SuperLink that the nodes are connected to.")],
    run_dir: Annotated[
        Path | None, typer.Option("--run", metavar="RUN_DIR", help="The folder of a run, for its nodes' last reports.")
    ] = None,
    root_certificates: RootCertificates = None,
    insecure: Insecure = False,
    release: Annotated[
        int | None, typer.Option(metavar="NODE", help="Release a node from quarantine before the run's next round.")
    ] = None,
) -> None:
    """List the nodes that a SuperLink knows, and with --run what each said last."""
    from wildflower.server_app.node_records import ask_release

    if release is not None and run_dir is None:
        raise UserError("--release needs --run RUN_DIR, the run in which the node is quarantined")
    deployment = deployment_at(superlink, root_certificates, insecure)
    if release is not None and run_dir is not None:
        ask_release(run_dir, release)
    print_table(HEADERS, node_rows(deployment, run_dir))


def node_rows(deployment: "Deployment", run_dir: Path | None) -> list[list[str]]:
    """Return every node that the SuperLink knows, with what it said last in the run of a folder, if one is given.

    Raises FlowerError where the SuperLink does not answer, JournalError where the folder holds no reports.
    """
    from wildflower.launch.known_nodes import known_nodes
    from wildflower.server_app.node_records import read_nodes

    reports = {} if run_dir is None else {report.node: report for report in read_nodes(run_dir)}
    return table(known_nodes(deployment), reports, time.time())


def table(nodes: "Mapping[int, KnownNode]", reports: Mapping[int, "LastReport"], now: float) -> list[list[str]]:
    """Return one row per node: those that are connected first, then by device."""
    rows = []
    order = sorted(nodes, key=lambda n: (nodes[n].status != "online", reports[n].device if n in reports else 2**63, n))
    for node in order:
        last = reports.get(node)
        status = nodes[node].status + (f", quarantined: {last.quarantined}" if last and last.quarantined else "")
        rows.append(
            [
                f"{node} {nodes[node].name}".rstrip(),
                status,
                *(_cells(last, now) if last else ["", "", "", "", "", "no report"]),
            ]
        )
    return rows


def _cells(last: "LastReport", now: float) -> Sequence[str]:
    from wildflower.server_app.units import seconds_text

    values = dict(report_rows(last.report))
    memory = values["memory"]
    if last.memory_factor < 1:
        memory += f", budget lowered to {last.memory_factor:.0%} after an overrun"
    age = f"{seconds_text(round(max(0.0, now - last.reported_at)))} ago"
    return [str(last.device), values["kind"], memory, values["link down"], values["link up"], age]
