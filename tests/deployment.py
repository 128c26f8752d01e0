"""A SuperLink and SuperNodes on this machine, as processes of their own, for the time of a test or a benchmark."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from wildflower.flower import flower_environment, stop_everything

START_SECONDS = 120.0


class Deployment:
    """The processes of a deployment; `close` stops all of them, and whatever they started."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._started: list[subprocess.Popen[bytes]] = []
        (folder / "here").mkdir(parents=True)
        self._environment = {
            **flower_environment(os.environ, folder),
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",
            **(environment or {}),
        }

    def start_superlink(self) -> subprocess.Popen[bytes]:
        """Start the SuperLink on the database that an earlier one left; returns when it answers."""
        process = self._start(
            "superlink.log",
            "flower-superlink --insecure --isolation subprocess --disable-runtime-dependency-installation",
            *("--host", "127.0.0.1", "--port", str(self.port), "--database", str(self.folder / "state.db")),
        )
        self._wait(process, self.port)
        return process

    def start_node(self, device: int, of: int, **config: str) -> subprocess.Popen[bytes]:
        """Start the SuperNode of a device."""
        port = free_port()
        own = {"state-dir": str(self.folder / f"node-{device}"), **config}
        words = [f"partition-id={device}", f"num-partitions={of}", *(f'{key}="{value}"' for key, value in own.items())]
        process = self._start(
            f"node-{device}.log",
            "wildflower-node --insecure --isolation subprocess",
            *("--superlink", self.address, "--host", "127.0.0.1", "--port", str(port)),
            *("--node-config", " ".join(words)),
        )
        self._wait(process, port)
        return process

    def run(self, *arguments: str) -> subprocess.Popen[str]:
        """`wildflower run ... --superlink` of this deployment; its output is one pipe."""
        command = [sys.executable, "-m", "wildflower", "run", *arguments, "--superlink", self.address, "--insecure"]
        return subprocess.Popen(
            command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def close(self) -> None:
        """Stop everything."""
        stop_everything(self._started, self.folder)

    def _start(self, log: str, command: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("ab") as file:
            process = subprocess.Popen(
                [*command.split(), *arguments],
                env=self._environment,
                cwd=self.folder / "here",
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def _wait(self, process: subprocess.Popen[bytes], port: int) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            assert process.poll() is None, f"{process.args} ended with code {process.returncode}"
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1.0)
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
