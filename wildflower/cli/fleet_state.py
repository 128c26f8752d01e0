"""A fleet as it is now, as rows of a table."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from wildflower.cli.options import wrong_values_told

if TYPE_CHECKING:
    from wildflower.cli.plan import Plan
    from wildflower.launch.before import Deployment
    from wildflower.launch.known_nodes import KnownNode
    from wildflower.server_app.node_records import LastReport
    from wildflower.server_app.run_records import DeviceRecord

HEADERS = ("device", "node", "status", "seen", "memory", "down", "up", "model", "binds", "last outcome", "trained in")


@dataclass(frozen=True)
class State:
    """A fleet as it is now: last reports and all records of a run, what each device gets, the SuperLink's nodes.

    run_dir: None, and plan as well, where only the SuperLink was asked.
    """

    run_dir: Path | None
    reports: "Sequence[LastReport]"
    records: "Sequence[DeviceRecord]"
    plan: "Plan | None"
    known: "Mapping[int, KnownNode]"


def state_of(run_dir: Path | None, deployment: "Deployment | None") -> State:
    """Read what a run's folder and a SuperLink say now; FlowerError or JournalError where they do not."""
    from wildflower.cli.plan import make_plan
    from wildflower.launch.experiment_file import of_run
    from wildflower.launch.known_nodes import known_nodes
    from wildflower.server_app.models import modules_of
    from wildflower.server_app.node_records import read_nodes
    from wildflower.server_app.run_folder import read_devices

    known = {} if deployment is None else known_nodes(deployment)
    if run_dir is None:
        return State(None, [], [], None, known)
    run_dir = newest_run(run_dir)
    reports, records = read_nodes(run_dir), list(read_devices(run_dir))
    with wrong_values_told(), modules_of(run_dir):
        return State(run_dir, reports, records, make_plan(of_run(run_dir, []), run_dir), known)


def newest_run(folder: Path) -> Path:
    """Return the run of a folder of runs whose devices reported last; the folder itself if it is a run, or has none."""
    from wildflower.server_app.node_records import FILE
    from wildflower.server_app.run_folder import is_run

    reports = [] if is_run(folder) else list(folder.glob(f"*/{FILE}"))
    return max(reports, key=lambda file: file.stat().st_mtime).parent if reports else folder


def fleet_rows(state: State, now: float) -> list[list[str]]:
    """Return a row per device in the order of their numbers, and then one per node that has never reported.

    `now` is seconds since 1970.
    """
    from wildflower.launch.known_nodes import heard_at

    reports, records, known = state.reports, state.records, state.known
    whole = state.plan.whole_parameters if state.plan else 1
    plans = {device.device: device for device in state.plan.devices} if state.plan else {}
    last_of = {record.device: record for record in records}
    got = {record.device: record.parameters for record in records if record.parameters}
    trained = Counter(record.device for record in records if record.outcome == "trained")
    rounds = len({record.round for record in records})
    rows = []
    for last in sorted(reports, key=lambda report: report.device):
        node, record, planned = known.get(last.node), last_of.get(last.device), plans.get(last.device)
        why = last.quarantined
        model = f"{got[last.device]:,} ({got[last.device] / whole:.0%})" if last.device in got else ""
        binds = ", ".join(planned.binds) or "nothing" if planned else ""
        rows.append(
            [
                f"{last.device} {(node and node.name) or last.name or last.report.kind}",
                str(last.node),
                ", ".join([*([node.status] if node else []), *([f"quarantined: {why}"] if why else [])]),
                _ago(heard_at(last, node), now),
                _memory(last),
                _link(last.report.down_mbit_per_s),
                _link(last.report.up_mbit_per_s),
                "none: plan --run says why" if planned and not planned.parameters else model,
                binds,
                f"{record.outcome} (round {record.round})" if record else "",
                f"{trained[last.device]} of {rounds}",
            ]
        )
    reported = {last.node for last in reports}
    for number, node in sorted(known.items(), key=lambda item: item[1].name):
        if number not in reported:
            rows.append(
                [
                    node.name or "unknown",
                    str(number),
                    node.status,
                    "never" if node.seen is None else _ago(node.seen, now),
                    *[""] * 5,
                    "no report",
                    "",
                ]
            )
    return rows


def _ago(when: float, now: float) -> str:
    from wildflower.server_app.units import seconds_text

    return f"{seconds_text(round(max(0.0, now - when)))} ago"


def _memory(last: "LastReport") -> str:
    report = last.report
    text = f"{report.memory_available_bytes / 1e6:,.0f} MB of {report.memory_total_bytes / 1e6:,.0f} MB"
    if report.memory_limit_bytes is not None:
        text += f", limit {report.memory_limit_bytes / 1e6:,.0f} MB"
    return text if last.memory_factor == 1 else f"{text}, budget lowered to {last.memory_factor:.0%}"


def _link(mbit_per_s: float | None) -> str:
    return "?" if mbit_per_s is None else f"{mbit_per_s:.3g} Mbit/s"
