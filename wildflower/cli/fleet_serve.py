"""`wildflower fleet --serve`: the fleet as a page for browsers that changes nothing, and figures for Prometheus."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from jinja2 import Environment, StrictUndefined
from typing_extensions import override

from wildflower.launch.known_nodes import heard_at
from wildflower.plugins.user_error import UserError
from wildflower.server_app.units import seconds_text

if TYPE_CHECKING:
    from wildflower.launch.known_nodes import KnownNode
    from wildflower.server_app.node_records import LastReport
    from wildflower.server_app.run_records import DeviceRecord

LOOK_SECONDS = 10.0  # between two looks at the run's folder, however many ask
CLIENT_SECONDS = 10.0  # that a client may say nothing, or read nothing
SILENT_SECONDS, REFUSALS = 1800.0, 3  # without contact, and in a row, from which on a device is an alert
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="30">
<title>{{ title }}</title>
<style>body{font:15px sans-serif;margin:2em}td,th{padding:.3em .8em;text-align:left;border-bottom:1px solid #ccc}
.alert{color:#a00}</style>
<h1>{{ title }}</h1>
{% for alert in alerts %}<p class="alert">{{ alert }}</p>{% endfor %}
<table><tr>{% for name in headers %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</table>
<p>As of {{ at }}. <a href="/metrics">Figures for Prometheus</a></p></html>"""
TEMPLATE = Environment(autoescape=True, undefined=StrictUndefined).from_string(PAGE)


@dataclass(frozen=True)
class Look:
    """The state of a fleet: the table's rows, what is wrong in sentences, and figures as Prometheus reads them."""

    rows: Sequence[Sequence[str]]
    alerts: Sequence[str]
    metrics: str


def alerts_of(
    reports: Sequence[LastReport], records: Sequence[DeviceRecord], known: Mapping[int, KnownNode], now: float
) -> list[str]:
    """Return which devices somebody should look after, in sentences: silent, refused again and again, quarantined."""
    outcomes: dict[int, list[str]] = {}
    for record in records:
        outcomes.setdefault(record.device, []).append(record.outcome)
    found = []
    for last in reports:
        who, node, newest = (
            f"Device {last.device} {last.name}".rstrip(),
            known.get(last.node),
            outcomes.get(last.device),
        )
        silent_seconds = now - heard_at(last, node)
        if silent_seconds > SILENT_SECONDS:
            found.append(f"{who}: no contact for {seconds_text(round(silent_seconds))}")
        if newest and len(newest) >= REFUSALS and all(o.startswith("refused") for o in newest[-REFUSALS:]):
            found.append(f"{who}: {newest[-1]}, {REFUSALS} times in a row")
        if last.quarantined:
            found.append(f"{who}: quarantined: {last.quarantined}")
    return found


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


def server_at(address: str, title: str, headers: Sequence[str], look: Callable[[], Look]) -> ThreadingHTTPServer:
    """Return a server that answers / and /metrics. UserError where it cannot listen at host:port."""
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

    class Handler(BaseHTTPRequestHandler):
        timeout = CLIENT_SECONDS

        def do_GET(self) -> None:
            if self.path not in ("/", "/metrics"):
                self.send_error(404)
                return
            try:
                now = newest()
            except (UserError, OSError) as error:  # the run's folder or the SuperLink is away for now
                self.send_error(503, explain=str(error))
                return
            if self.path == "/":
                at = time.strftime("%Y-%m-%d %H:%M:%S")
                text = TEMPLATE.render(title=title, headers=headers, rows=now.rows, alerts=now.alerts, at=at)
            else:
                text = now.metrics
            data = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", f"text/{'html' if self.path == '/' else 'plain'}; charset=utf-8")
            self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        @override
        def log_message(self, format: str, *args: object) -> None:
            """Nothing: whoever asks every few seconds would fill the terminal."""

    try:
        return ThreadingHTTPServer((host, int(port)), Handler)
    except (OSError, OverflowError) as error:
        raise UserError(f"--serve {address}: {error}") from None
