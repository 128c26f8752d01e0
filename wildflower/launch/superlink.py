"""A deployment's SuperLink: a run that is submitted there, followed and stopped; and signals while processes start."""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from wildflower.devices.private import private_open
from wildflower.plugins.user_error import UserError

CONNECTION = "wildflower"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class FlowerError(UserError):
    """Flower did not do what it was asked to; the text holds what it said."""


@dataclass(frozen=True)
class SuperLink:
    """A running SuperLink: a folder of ours, and the environment to talk to it."""

    folder: Path
    environment: dict[str, str]

    def submit(self, app_dir: Path, config_file: Path, *options: str) -> str:
        """Start the app in `app_dir` under a configuration file and return the run's id. Raises FlowerError."""
        answer = self._ask("run", str(app_dir), CONNECTION, "--run-config", str(config_file), *options)
        if not answer.get("success") or not answer.get("run-id"):
            raise FlowerError(f"Flower did not start the app: {_told(answer)}")
        return str(answer["run-id"])

    def status(self, run_id: str) -> tuple[str, str]:
        """Ask how a run is doing: "pending", "starting", "running" or "finished:completed", ":failed", ":stopped".

        Details come second. Raises FlowerError when the SuperLink does not answer.
        """
        answer = self._ask("list", CONNECTION, "--run-id", run_id)
        if not answer.get("success"):
            raise FlowerError(f"Flower does not say how run {run_id} is doing: {_told(answer)}")
        runs = [run for run in answer["runs"] if str(run.get("run-id")) == run_id]
        if not runs:
            raise FlowerError(f"Flower knows nothing of run {run_id}")
        return str(runs[0]["status"]), str(runs[0]["status-details"])

    def stop(self, run_id: str) -> None:
        """End a run. Raises FlowerError when the SuperLink does not answer."""
        self._ask("stop", run_id, CONNECTION)

    @contextmanager
    def follow_log(self, run_id: str, to: Path) -> Iterator[subprocess.Popen[bytes]]:
        """For the time of a `with` block a process appends what the app prints to a file; it ends with the run."""
        # With a session of its own Ctrl-C reaches this command alone.
        options: dict[str, Any] = {"env": self.environment, "cwd": self.folder, "start_new_session": True}
        command = ["flwr", "log", run_id, CONNECTION, "--stream"]
        started: list[subprocess.Popen[bytes]] = []
        try:
            with private_open(to, "ab") as file, interrupted_later():
                options |= {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
                started.append(subprocess.Popen(command, **options))
            yield started[0]
        finally:
            for process in started:
                process.kill()
                process.wait()

    def _ask(self, *arguments: str) -> dict[str, Any]:
        # flwr's exit code is 0 even when it failed, so only its answer counts.
        done = subprocess.run(
            ["flwr", *arguments, "--format", "json"],
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            start_new_session=True,
        )
        try:
            answer = json.loads(done.stdout)
        except json.JSONDecodeError:
            said = (done.stdout + done.stderr).strip()
            raise FlowerError(f"`flwr {arguments[0]}` gave no answer (exit code {done.returncode}): {said}") from None
        if not isinstance(answer, dict):
            raise FlowerError(f"`flwr {arguments[0]}` answered {answer!r}, not an object")
        return answer


def _told(answer: Mapping[str, Any]) -> str:
    """What Flower says went wrong, and what that mostly means where it says nothing."""
    told = str(answer.get("error-message", answer)).strip()
    if "Internal server error" in told:
        told += (
            " The SuperLink's own log says why. Mostly the disk of its database is full: make room, and start the "
            "SuperLink anew. If the log says `no such table`, there is a space in the path of Flower's Python, where "
            "it makes no database: install it elsewhere"
        )
    return told


@contextmanager
def connected(address: str, root_certificates: Path | None) -> Iterator[SuperLink]:
    """A SuperLink that runs elsewhere, for the time of a `with` block; it is left as it is.

    Args:
        address: host:port.
        root_certificates: PEM file of the authority that signed its certificate; None talks to it without TLS.

    Raises FlowerError where the address is none, the file is missing or Flower is not installed.
    """
    check_address(address)
    if root_certificates is not None and not root_certificates.is_file():
        raise FlowerError(f"there are no root certificates at {root_certificates}")
    with tempfile.TemporaryDirectory(prefix="wf-", ignore_cleanup_errors=True) as made:
        environment = flower_environment(os.environ, Path(made))
        if shutil.which("flwr", path=environment["PATH"]) is None:
            raise FlowerError(f"Flower's command flwr was not found: install Wildflower anew into {sys.prefix}")
        _write_connection(environment, address, root_certificates)
        yield SuperLink(Path(made), environment)


def _write_connection(environment: Mapping[str, str], address: str, root_certificates: Path | None) -> None:
    """Tell Flower's commands which SuperLink they talk to; without root certificates they do so without TLS."""
    trust = "insecure = true"
    if root_certificates is not None:
        trust = f"root-certificates = {json.dumps(str(root_certificates.absolute()))}"
    home = Path(environment["FLWR_HOME"])
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "{CONNECTION}"\n\n'
        f"[superlink.{CONNECTION}]\naddress = {json.dumps(address)}\n{trust}\n",
        encoding="utf-8",
    )


def check_address(address: str) -> None:
    """Raise FlowerError unless an address is HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise FlowerError(f"--superlink {address}: must be HOST:PORT, such as 127.0.0.1:8000")


def flower_environment(outer: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the environment of everything that is started: no telemetry, no installations, one thread per worker."""
    scripts = sysconfig.get_path("scripts")
    environment = {
        # Two threads per worker on busy cores are several times slower than one. Whoever sets these knows better.
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        **outer,
        # Flower's commands start each other by name.
        "PATH": os.pathsep.join([scripts, str(Path(sys.executable).parent), outer.get("PATH", "")]),
        "FLWR_HOME": str(folder / "home"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PYTHONUNBUFFERED": "1",
    }
    for name in ("NO_PROXY", "no_proxy"):
        environment[name] = ",".join(part for part in (outer.get(name, ""), "127.0.0.1,localhost") if part)
    return environment


@contextmanager
def uninterrupted() -> Iterator[None]:
    """A second Ctrl-C must not interrupt the clean-up after the first."""
    with _handling(signal.SIG_IGN):
        yield


@contextmanager
def interrupted_later() -> Iterator[None]:
    """For the time of a `with` block signals that stop this process are held back; what came is raised at its end.

    So that no interrupt comes between the start of a process and the note that it must be ended. Outside the main
    thread, which no signal interrupts, nothing is done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    with _handling(lambda number, frame: came.append(number)):
        yield
    for number in came[:1]:
        signal.raise_signal(number)


@contextmanager
def stop_signals_interrupt() -> Iterator[None]:
    """For the time of a `with` block SIGTERM and SIGHUP do what Ctrl-C does: raise KeyboardInterrupt."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handling(interrupt):
        yield


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    # Under nohup SIGHUP is ignored, and should be.
    numbers = [n for n in STOP_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def last_lines(path: Path, count: int, start: int = 0) -> str:
    """The last lines of a log behind its first `start` bytes, read from its last 64 kB; "" where there is no file."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(start, path.stat().st_size - 65536))
        text = file.read().decode("utf-8", errors="replace")
    return "\n".join(text.splitlines()[-count:])
