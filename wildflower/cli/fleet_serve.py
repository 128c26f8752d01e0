"""`wildflower fleet --serve`: the fleet as a page for browsers that changes nothing, and figures for Prometheus."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from wildflower.cli.bounded_server import BoundedServer
from wildflower.cli.fleet_history import DAY_HEADERS, days_of, ends_of, history_at, remember
from wildflower.cli.fleet_page import page
from wildflower.cli.fleet_state import HEADERS, State, fleet_rows, state_of
from wildflower.launch.known_nodes import heard_at
from wildflower.plugins.raised_as import raised_as
from wildflower.plugins.user_error import UserError
from wildflower.server_app.run_folder import is_run, read_rounds
from wildflower.server_app.units import seconds_text

if TYPE_CHECKING:
    from wildflower.launch.before import Deployment
    from wildflower.launch.known_nodes import KnownNode
    from wildflower.server_app.node_records import LastReport
    from wildflower.server_app.run_records import DeviceRecord

KEEP_SECONDS = 60.0  # between two looks for the history
LOOK_SECONDS = 10.0  # between two looks at the run's folder, however many ask
CLIENT_SECONDS = 10.0  # that a client may say nothing, or read nothing
SILENT_SECONDS, REFUSALS = 1800.0, 3  # without contact, and in a row, from which on a device is an alert
LOW_DISK_BYTES = 500e6  # where a node keeps its state: a few models
# Flower refuses what is signed 5 s ahead (wildflower.client_app.server_clock). A clock that is behind looks like a
# report that took a while to come; from 5 min on Flower refuses it, and there is no contact.
AHEAD_SECONDS = 2.0
DEVICE = re.compile(r"/device/(0|[1-9]\d{0,18})")


@dataclass(frozen=True)
class Look:
    """The state of a fleet: the table's rows, the devices of the first of them, what is wrong in sentences, and figures
    as Prometheus reads them."""

    rows: Sequence[Sequence[str]]
    devices: Sequence[int]
    alerts: Sequence[str]
    metrics: str


def alerts_of(
    reports: Sequence[LastReport], records: Sequence[DeviceRecord], known: Mapping[int, KnownNode], now: float
) -> list[str]:
    """Return which devices somebody should look after, in sentences: silent, refused again and again, quarantined, with
    a full disk or a wrong clock."""
    outcomes: dict[int, list[str]] = {}
    for record in records:
        outcomes.setdefault(record.device, []).append(record.outcome)
    found = []
    for last in reports:
        who = f"Device {last.device} {last.name}".rstrip()
        node, newest = known.get(last.node), outcomes.get(last.device)
        silent_seconds = now - heard_at(last, node)
        if silent_seconds > SILENT_SECONDS:
            found.append(f"{who}: no contact for {seconds_text(round(silent_seconds))}")
        if newest and len(newest) >= REFUSALS and all(o.startswith("refused") for o in newest[-REFUSALS:]):
            found.append(f"{who}: {newest[-1]}, {REFUSALS} times in a row")
        if last.quarantined:
            found.append(f"{who}: quarantined: {last.quarantined}")
        disk_bytes, ahead = last.report.disk_free_bytes, clock_ahead_seconds(last)
        if disk_bytes is not None and disk_bytes < LOW_DISK_BYTES:
            found.append(f"{who}: {disk_bytes / 1e6:,.0f} MB of its disk are free")
        if ahead is not None and ahead > AHEAD_SECONDS:
            found.append(f"{who}: its clock is {ahead:,.0f} s ahead of the server's; Flower refuses it from 5 s on")
    return found


def clock_ahead_seconds(last: LastReport) -> float | None:
    """Return how far a device's clock was ahead of the server's when its report came; None if it did not say.

    The time that the report took is subtracted, which is why most are a little below 0.
    """
    return None if last.report.clock_seconds is None else last.report.clock_seconds - last.reported_at


def metrics_of(
    reports: Sequence[LastReport], records: Sequence[DeviceRecord], known: Mapping[int, KnownNode], alerts: int
) -> str:
    """Return the figures of devices in Prometheus' text format."""
    figures: dict[str, list[tuple[str, float]]] = {}
    trained = Counter(record.device for record in records if record.outcome == "trained")

    def add(name: str, labels: str, value: float | None) -> None:
        if value is not None:
            figures.setdefault(name, []).append((labels, float(value)))

    for last in reports:
        report, node = last.report, known.get(last.node)
        labels = f'{{device="{last.device}",name="{_escaped(last.name)}",kind="{_escaped(report.kind)}"}}'
        add("device_seen_timestamp_seconds", labels, heard_at(last, node))
        add("device_online", labels, None if node is None else node.status == "online")
        add("device_memory_available_bytes", labels, report.memory_available_bytes)
        add("device_disk_free_bytes", labels, report.disk_free_bytes)
        add("device_clock_ahead_seconds", labels, clock_ahead_seconds(last))
        add("device_memory_factor", labels, last.memory_factor)
        add("device_down_mbit_per_s", labels, report.down_mbit_per_s)
        add("device_up_mbit_per_s", labels, report.up_mbit_per_s)
        add("device_temperature_celsius", labels, report.temperature_celsius)
        add("device_throttled", labels, report.throttled)
        add("device_resting", labels, report.resting is not None)
        add("device_quarantined", labels, last.quarantined is not None)
        add("device_rounds_trained", labels, trained[last.device])
    add("alerts", "", alerts)
    lines = []
    for name, values in figures.items():
        lines.append(f"# TYPE wildflower_{name} gauge")
        lines += [f"wildflower_{name}{labels} {value!r}" for labels, value in values]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def serve_fleet(address: str, run_dir: Path, deployment: Deployment | None) -> None:
    """Serve a run's devices until Ctrl-C, and keep their history in fleet.sqlite of the folder where runs lie."""
    place = run_dir.absolute()
    file = (place.parent if is_run(place) else place) / "fleet.sqlite"
    stopped, lock = threading.Event(), threading.Lock()

    def state() -> State:
        with lock:  # a run's own modules are looked for in one place at a time
            return state_of(run_dir, deployment)

    def look() -> Look:
        return look_at(state(), time.time())

    def keep() -> None:
        """Keep a history also while nobody looks."""
        told = ""
        while not stopped.wait(KEEP_SECONDS):
            try:
                keep_state(file, state(), time.time())
                told = ""
            except (UserError, OSError) as error:  # the run's folder or the SuperLink is away for now
                if str(error) != told:
                    told = str(error)
                    print(f"No history is kept: {told}", file=sys.stderr, flush=True)

    def days(device: int) -> list[list[str]]:
        with history_at(file) as history:
            return days_of(history, device)

    with history_at(file):
        pass  # what is wrong with it is told now
    with server_at(address, f"Fleet of {place.name}", look, days) as server:
        print(f"http://{address}/ and http://{address}/metrics", flush=True)
        threading.Thread(target=keep, daemon=True).start()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass
        finally:
            stopped.set()


def look_at(state: State, now: float) -> Look:
    """Return what the pages show of a state of the fleet."""
    alerts = alerts_of(state.reports, state.records, state.known, now)
    alerts += state.plan.warnings if state.plan else ()
    metrics = metrics_of(state.reports, state.records, state.known, len(alerts))
    return Look(fleet_rows(state, now), sorted(last.device for last in state.reports), alerts, metrics)


def keep_state(file: Path, state: State, now: float) -> None:
    """Add what a state of the fleet shows to its history."""
    if state.run_dir is not None:
        journal = state.run_dir / "rounds.jsonl"
        rounds = read_rounds(state.run_dir)
        ended = ends_of(state.records, rounds, journal.stat().st_mtime if rounds else now)
        with history_at(file) as history:
            remember(history, state.run_dir.name, state.reports, state.known, ended, now)


def server_at(
    address: str, title: str, look: Callable[[], Look], days: Callable[[int], list[list[str]]]
) -> BoundedServer:
    """Return a server that answers /, /device/NUMBER and /metrics. UserError where it cannot listen at host:port."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"--serve {address!r}: expected HOST:PORT, such as 127.0.0.1:9464")
    lock, seen = threading.Lock(), dict[str, tuple[float, Look]]()

    def newest() -> Look:
        with lock:
            if "look" not in seen or time.monotonic() - seen["look"][0] > LOOK_SECONDS:
                found = look()
                seen["look"] = time.monotonic(), found
            return seen["look"][1]

    def answer(path: str) -> str | None:
        if path == "/metrics":
            return newest().metrics
        if path == "/":
            now = newest()
            return page(title, HEADERS, now.rows, now.alerts, now.devices)
        if (asked := DEVICE.fullmatch(path)) and (device := int(asked[1])) in (now := newest()).devices:
            name = now.rows[now.devices.index(device)][0]
            return page(f"{title}: device {name}", DAY_HEADERS, days(device), [], [])
        return None

    class Handler(BaseHTTPRequestHandler):
        timeout = CLIENT_SECONDS

        def do_GET(self) -> None:
            try:
                text = answer(self.path)
            except (UserError, OSError) as error:  # the run's folder or the SuperLink is away for now
                self.send_error(503, explain=str(error))
                return
            if text is None:
                self.send_error(404)
                return
            data = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", f"text/{'plain' if self.path == '/metrics' else 'html'}; charset=utf-8")
            self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        @override
        def log_message(self, format: str, *args: object) -> None:
            """Nothing: whoever asks every few seconds would fill the terminal."""

    with raised_as(UserError, f"--serve {address}: ", (OSError, OverflowError)):
        return BoundedServer((host, int(port)), Handler)
