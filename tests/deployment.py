"""A SuperLink and SuperNodes on this machine, as processes of their own, for the time of a test or a benchmark."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from wildflower.launch.superlink import flower_environment

ROOT = Path(__file__).parents[1]
START_SECONDS = 120.0
STOP_SECONDS = 3.0
AGAIN = 'while :; do "$@"; sleep 15; done'  # a shell that starts a command again whenever it ends, as systemd does


class Deployment:
    """The processes of a deployment; `close` stops all of them, and whatever they started.

    Attributes:
        database: the SuperLink's file, in a folder of its own.
        started: its processes, the SuperLink first where that was started first.
        secrets: the folder of `deploy/certs`, where the SuperLink has TLS and knows its nodes by their keys.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None, *, key_count: int = 0) -> None:
        """With `key_count` keys of nodes, node-0 and on, everything is signed and encrypted; without, nothing is."""
        self.folder = folder
        self.secrets = folder / "secrets" if key_count else None
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.started: list[subprocess.Popen[bytes]] = []
        (folder / "here").mkdir(parents=True)
        self.database = folder / "database" / "state.db"
        self.database.parent.mkdir(exist_ok=True)
        self._environment = {
            **flower_environment(os.environ, folder),
            # Flower's is 1. At 0.05 an idle SuperLink and its nodes keep a core of a small machine busy with questions.
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",
            **(environment or {}),
        }
        if self.secrets:
            subprocess.run([ROOT / "deploy/certs", "--out", self.secrets, "--nodes", str(key_count)], check=True)

    def start_superlink(self, *options: str) -> subprocess.Popen[bytes]:
        """Start the SuperLink on the database that an earlier one left; returns when it answers."""
        process = self._start(
            "superlink.log",
            *("wildflower-superlink", "--isolation", "subprocess", "--disable-runtime-dependency-installation"),
            *("--host", "127.0.0.1", "--port", str(self.port), *self._server_trust()),
            *("--database", str(self.database), *options),
        )
        self._wait(process, self.port, self.secrets)
        return process

    def enroll(self) -> str:
        """Register all keys with the SuperLink; what that printed."""
        assert self.secrets is not None
        command = [ROOT / "deploy/enroll", self.address, self.secrets / "ca.crt", self.secrets / "public"]
        done = subprocess.run([sys.executable, *command], env=self._environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start_node(
        self,
        device: int,
        of: int,
        *,
        again: bool = False,
        environment: Mapping[str, str] | None = None,
        log: str = "",
        key: int | None = None,
        options: Sequence[str] = (),
        **config: str | float,
    ) -> subprocess.Popen[bytes]:
        """Start the SuperNode of a device.

        Args:
            device: also the number of its key, unless `key` is another.
            of: how many devices there are.
            again: it is started again whenever it ends, and is not waited for.
            environment: more of it.
            log: the name of the file for what it prints; "" names it after the device.
            options: more of the command.
            config: more of its node config.
        """
        port = free_port()
        own = {"state-dir": str(self.folder / f"node-{device}"), **config}
        words = [f"partition-id={device}", f"num-partitions={of}", *(f"{k}={json.dumps(v)}" for k, v in own.items())]
        process = self._start(
            log or f"node-{device}.log",
            *(("sh", "-c", AGAIN, "sh") if again else ()),
            *("wildflower-node", "--isolation", "subprocess"),
            *("--superlink", self.address, "--host", "127.0.0.1", "--port", str(port)),
            *self._node_trust(device if key is None else key),
            *options,
            *("--node-config", " ".join(words)),
            environment=environment,
        )
        if not again:
            self._wait(process, port)
        return process

    def run(self, *arguments: str) -> subprocess.Popen[str]:
        """`wildflower run ... --superlink` of this deployment; its output is one pipe."""
        command = [sys.executable, "-m", "wildflower", "run", *arguments, *self.connection]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    @property
    def connection(self) -> tuple[str, ...]:
        """The words of a command that say where the SuperLink is."""
        trust = ("--root-certificates", str(self.secrets / "ca.crt")) if self.secrets else ("--insecure",)
        return "--superlink", self.address, *trust

    def _server_trust(self) -> tuple[str, ...]:
        if self.secrets is None:
            return ("--insecure",)
        certificates = {"ca-certfile": "ca.crt", "certfile": "server.crt", "keyfile": "server.key"}
        return ("--enable-supernode-auth", *(f"--ssl-{k}={self.secrets / name}" for k, name in certificates.items()))

    def _node_trust(self, key: int) -> tuple[str, ...]:
        if self.secrets is None:
            return ("--insecure",)
        private = self.secrets / "nodes" / f"node-{key}"
        return "--root-certificates", str(self.secrets / "ca.crt"), "--auth-supernode-private-key", str(private)

    def close(self) -> None:
        """Stop everything."""
        stop_everything(self.started, self.folder)

    def _start(self, log: str, *command: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("ab") as file:
            process = subprocess.Popen(
                command,
                env=self._environment | dict(environment or {}),
                cwd=self.folder / "here",
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def _wait(self, process: subprocess.Popen[bytes], port: int, secrets: Path | None = None) -> None:
        trust = ssl.create_default_context(cafile=secrets / "ca.crt") if secrets else None
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            assert process.poll() is None, f"{process.args!r} ended with code {process.returncode}"
            connection = (
                http.client.HTTPSConnection("127.0.0.1", port, timeout=1.0, context=trust)
                if trust
                else http.client.HTTPConnection("127.0.0.1", port, timeout=1.0)
            )
            with suppress(OSError, http.client.HTTPException):
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            connection.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.1)
        raise AssertionError(f"{process.args} did not answer within {START_SECONDS:.0f} s")


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it started, as a machine that loses its power does."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def stop_everything(started: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """Stop the processes, their descendants, and whatever else has `folder` as its Flower home; kill what resists."""
    ours = _ours(started, folder)
    # A server that loses what it works with would take its run for failed. So it ends first.
    servers = [process for process in ours if _is_command(process, "flwr-serverapp")]
    for process in (*servers, *ours):
        with suppress(psutil.NoSuchProcess):
            process.terminate()
        if process in servers:
            psutil.wait_procs([process], timeout=STOP_SECONDS)
    psutil.wait_procs(ours, timeout=STOP_SECONDS)
    deadline = time.monotonic() + STOP_SECONDS
    # More than once: a process may have started another one while it was being stopped.
    while (ours := {p for p in ours | _ours(started, folder) if p.is_running()}) and time.monotonic() < deadline:
        for process in ours:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(ours, timeout=0.5)
    for child in started:
        child.wait()


def _ours(started: Sequence[subprocess.Popen[bytes]], folder: Path) -> set[psutil.Process]:
    found: set[psutil.Process] = set()
    for child in started:
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(child.pid)
            found |= {parent, *parent.children(recursive=True)}
    # A process whose parent has died is nobody's descendant any more, but still has its environment.
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("FLWR_HOME") == str(folder / "home"):
                found.add(process)
    return found


def _is_command(process: psutil.Process, name: str) -> bool:
    """Return whether a process runs a command, which Python may run as a script."""
    with suppress(psutil.Error):
        return any(Path(part).name == name for part in process.cmdline()[:2])
    return False
