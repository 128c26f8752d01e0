"""The gate under many devices that ask for work, all behind one address.

python -m benchmarks.trust.pollers                 # writes pollers.json: 1,000 devices for a minute, twice
python -m benchmarks.trust.pollers --table         # the table alone

A SuperLink and nginx with deploy/gate.conf are processes of this machine. The second time a server that answers at once
and says nothing stands in for the SuperLink, so that the gate is measured alone. Devices are threads of four processes
with Flower's client, a key and a connection of their own; each asks and says that it is there as often as
`wildflower-node` does that has had no message for five minutes, or with --ask 3 as one that is in a round. All of it
goes over the loopback, and ends by itself after the time that --seconds says.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.common.constant import HEARTBEAT_BASE_MULTIPLIER, HEARTBEAT_CALL_TIMEOUT, HEARTBEAT_DEFAULT_INTERVAL

from tests.deployment import Deployment, free_port
from wildflower.client_app.starter import POLL
from wildflower.client_app.supernode import LONGEST_POLL_SECONDS

RESULTS = Path(__file__).with_name("pollers.json")
GATE = Path(__file__).parents[2] / "deploy" / "gate.conf"
PROCESSES, START_SECONDS = 4, 60.0
HEARTBEAT_SECONDS = HEARTBEAT_BASE_MULTIPLIER * (HEARTBEAT_DEFAULT_INTERVAL - HEARTBEAT_CALL_TIMEOUT)
MOST_DEVICES, MOST_SECONDS = 2000, 300.0


def _device(
    key: Any, address: str, authority: Path, begin: float, end: float, ask_seconds: float, found: dict[str, Any]
) -> None:
    """Ask for work as a SuperNode does until it is time to end."""
    from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
    from flwr.proto.node_pb2 import Node
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    time.sleep(max(0.0, begin - time.time()))
    public = key.public_key()
    client = FleetHttpClient.from_server_address(
        address,
        False,
        authority.read_bytes(),
        [RuntimeVersionHttpInterceptor(component_name="SuperNode"), NodeAuthHttpInterceptor(key, public)],
    )

    def timed(what: str, call: Any, request: Any) -> Any:
        began = time.monotonic()
        try:
            answer = call(request)
            found["seconds"][what].append(time.monotonic() - began)
            return answer
        except Exception as error:
            status = getattr(getattr(error, "response", None), "status_code", type(error).__name__)
            found["errors"][f"{what} {status}"] += 1
            return None

    def later(seconds: float) -> float:
        return time.time() + seconds * random.uniform(0.8, 1.2)

    node, next_ask, next_beat = None, 0.0, 0.0
    with client:
        while time.time() < end:
            if node is None:
                request = ActivateNodeRequest(
                    public_key=public_key_to_bytes(public), heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL
                )
                activated = timed("activate", client.ActivateNode, request)
                node = Node(node_id=activated.node_id) if activated else None
                next_ask, next_beat = later(ask_seconds), later(HEARTBEAT_SECONDS)
            elif time.time() >= next_ask:
                timed("ask", client.PullMessages, PullMessagesRequest(node=node))
                next_ask = later(ask_seconds)
            elif time.time() >= next_beat:
                beat = SendNodeHeartbeatRequest(node=node, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
                timed("heartbeat", client.SendNodeHeartbeat, beat)
                next_beat = later(HEARTBEAT_SECONDS)
            time.sleep(max(0.0, min(next_ask, next_beat, end) - time.time()))
    found["let in"] += node is not None


def _devices(keys: list[bytes], address: str, authority: Path, end: float, ask_seconds: float, results: Any) -> None:
    """Be a part of the devices, a thread each."""
    from cryptography.hazmat.primitives.serialization import load_der_private_key

    found = {"seconds": {"activate": [], "ask": [], "heartbeat": []}, "errors": Counter(), "let in": 0}
    now = time.time()
    threads = [
        threading.Thread(
            target=_device,
            args=(
                load_der_private_key(key, None),
                address,
                authority,
                now + START_SECONDS * place / len(keys),
                end,
                ask_seconds,
                found,
            ),
        )
        for place, key in enumerate(keys)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found["processor seconds"] = time.process_time()
    results.put(found)


def gate(folder: Path, secrets: Path, superlink: int, alone: bool) -> tuple[subprocess.Popen[bytes], int]:
    """Start the gate of the deployment on a port of this machine; `alone` with what stands in for the SuperLink."""
    port = free_port()
    places = {
        "/tmp/": f"{folder}/",
        "/run/secrets/ca_certificate": str(secrets / "ca.crt"),
        "/run/secrets/server_certificate": str(secrets / "server.crt"),
        "/run/secrets/server_key": str(secrets / "server.key"),
        "https://superlink:8000": f"https://127.0.0.1:{superlink}",
        "listen 8000": f"listen 127.0.0.1:{port}",
    }
    text = GATE.read_text()
    for there, here in places.items():
        text = text.replace(there, here)
    text = "\n".join(line for line in text.splitlines() if "resolver " not in line)
    if alone:
        certificates = f"ssl_certificate {secrets}/server.crt; ssl_certificate_key {secrets}/server.key;"
        answer = 'location / { default_type application/x-protobuf; return 200 ""; }'
        stand_in = f"server {{ listen 127.0.0.1:{superlink} ssl; {certificates} {answer} }}"
        text = f"{text.rstrip().removesuffix('}')}{stand_in}\n}}"
    (folder / "gate.conf").write_text(f"user root;\n{text}\n" if os.geteuid() == 0 else f"{text}\n")
    nginx = shutil.which("nginx") or "/usr/sbin/nginx"
    with (folder / "gate.log").open("wb") as log:
        command = [nginx, "-c", str(folder / "gate.conf"), "-g", "daemon off;"]
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT), port


def measure(folder: Path, devices: int, seconds: float, ask_seconds: float, alone: bool) -> dict[str, Any]:
    """Let devices ask for work through the gate for some seconds; `alone` without a SuperLink."""
    from cryptography.hazmat.primitives.serialization import NoEncryption, PrivateFormat

    folder.mkdir()
    deployment = Deployment(folder / "flower", {POLL: "0.25"}, key_count=1)  # as deploy/Dockerfile says
    assert deployment.secrets is not None
    keys = [ec.generate_private_key(ec.SECP384R1()) for _ in range(devices)]
    for place, key in enumerate(keys):
        text = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        (deployment.secrets / "public" / f"device-{place}.pub").write_bytes(text)
    texts = [key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption()) for key in keys]
    nginx = None
    try:
        began = time.monotonic()
        if not alone:
            deployment.start_superlink()
            began = time.monotonic()
            deployment.enroll()
        enrolled = time.monotonic() - began
        nginx, port = gate(folder, deployment.secrets, deployment.port, alone)
        watched = psutil.Process(nginx.pid if alone else deployment.started[0].pid)
        results: Any = multiprocessing.get_context("spawn").Queue()
        end = time.time() + START_SECONDS + seconds
        before = _processor_seconds(watched)
        parts = [
            multiprocessing.get_context("spawn").Process(
                target=_devices,
                args=(
                    texts[part::PROCESSES],
                    f"127.0.0.1:{port}",
                    deployment.secrets / "ca.crt",
                    end,
                    ask_seconds,
                    results,
                ),
            )
            for part in range(PROCESSES)
        ]
        for part in parts:
            part.start()
        found = [results.get(timeout=START_SECONDS + seconds + 120) for _ in parts]
        for part in parts:
            part.join()
        spent = _processor_seconds(watched) - before
        return {
            "devices": devices,
            "seconds between requests": ask_seconds,
            "let in": sum(part["let in"] for part in found),
            "seconds": START_SECONDS + seconds,
            "enrolled in seconds": round(enrolled, 1),
            "answers": {
                what: _figures([value for part in found for value in part["seconds"][what]])
                for what in ("activate", "ask", "heartbeat")
            },
            "errors": dict(sum((part["errors"] for part in found), Counter())),
            "gate log": Counter(
                line.split("] ", 1)[-1].split(", client")[0].split("while")[0].split(": ", 1)[-1].lstrip("*0123456789 ")
                for line in (folder / "gate.log").read_text(errors="replace").splitlines()
            ).most_common(5),
            "processor seconds of it": round(spent, 1),
            "processor seconds of the devices": round(sum(part["processor seconds"] for part in found), 1),
            "load of the machine": round(os.getloadavg()[0], 1),
        }
    finally:
        if nginx is not None:
            nginx.terminate()
            nginx.wait()
        deployment.close()


def _processor_seconds(process: psutil.Process) -> float:
    """Return those of a process and its children: nginx works in a child."""
    times = [member.cpu_times() for member in (process, *process.children())]
    return sum(time.user + time.system for time in times)


def _figures(seconds: list[float]) -> dict[str, float]:
    if len(seconds) < 2:
        return {"count": len(seconds)}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {
        "count": len(seconds),
        "median": round(cuts[49], 4),
        "99 %": round(cuts[98], 4),
        "most": round(max(seconds), 3),
    }


def table(found: dict[str, Any]) -> str:
    """The answers as a table for the page."""
    lines = ["| | request | answers | median | 99 % | longest | errors |", "|---|---|---|---|---|---|---|"]
    for name, run in found.items():
        for what, figures in run["answers"].items():
            errors = sum(count for error, count in run["errors"].items() if error.startswith(f"{what} "))
            cells = [f"{figures[key]:.3g} s" if key in figures else "" for key in ("median", "99 %", "most")]
            lines.append(f"| {name} | {what} | {figures['count']:,} | {' | '.join(cells)} | {errors:,} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1000, choices=range(1, MOST_DEVICES + 1), metavar="COUNT")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--ask", type=float, default=LONGEST_POLL_SECONDS, metavar="SECONDS", help="between requests")
    parser.add_argument("--table", action="store_true", help="print the table of what was measured before")
    given = parser.parse_args()
    if not given.table:
        found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        which = f"{given.devices:,} devices every {given.ask:g} s, "
        for name, alone in (("gate and SuperLink", False), ("gate alone", True)):
            with tempfile.TemporaryDirectory() as folder:
                seconds = min(given.seconds, MOST_SECONDS)
                found[which + name] = measure(Path(folder) / "pollers", given.devices, seconds, given.ask, alone)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(table(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
