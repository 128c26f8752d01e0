"""Flower's own processes: a private SuperLink, one submitted run, and an end after which nothing is left running."""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from wildflower.devices.private import private_open
from wildflower.plugins.user_error import UserError

CONNECTION = "wildflower"
START_SECONDS = 60.0
STOP_SECONDS = 3.0
SERVERS = {"flwr-serverapp": signal.SIGTERM, "flwr-simulation": signal.SIGKILL}  # commands, and what ends them
MAX_PORTS = 3
# Ray puts sockets 80 letters deeper, and the path of a socket has at most 104 letters on some systems.
LONGEST_FOLDER = 24
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class FlowerError(UserError):
    """Flower did not do what it was asked to; the text holds what it said."""


@dataclass(frozen=True)
class RunStatus:
    """Flower's words for a run: "pending", "starting", "running" or "finished:completed", ":failed", ":stopped"."""

    status: str
    details: str

    @property
    def ended(self) -> bool:
        """Return whether the run is over, in whatever way."""
        return self.status.startswith("finished")

    @property
    def completed(self) -> bool:
        """Return whether the run is over and Flower knows of no failure."""
        return self.status == "finished:completed"


@dataclass(frozen=True)
class SuperLink:
    """A running SuperLink: its process if it is our own, a folder of ours, and the environment to talk to it."""

    process: subprocess.Popen[bytes] | None
    folder: Path
    environment: dict[str, str]

    def submit(self, app_dir: Path, config_file: Path, federation: Mapping[str, int | float]) -> str:
        """Start the app in `app_dir` under a configuration file and return the run's id. Raises FlowerError."""
        settings = " ".join(f"{key}={value}" for key, value in federation.items())
        options = ["--federation-config", settings] if settings else []
        answer = self._ask("run", str(app_dir), CONNECTION, "--run-config", str(config_file), *options)
        if not answer.get("success") or not answer.get("run-id"):
            raise FlowerError(f"Flower did not start the app: {_told(answer)}")
        return str(answer["run-id"])

    def status(self, run_id: str) -> RunStatus:
        """Ask how a run is doing. Raises FlowerError when the SuperLink does not answer."""
        answer = self._ask("list", CONNECTION, "--run-id", run_id)
        if not answer.get("success"):
            raise FlowerError(f"Flower does not say how run {run_id} is doing: {_told(answer)}")
        runs = [run for run in answer["runs"] if str(run.get("run-id")) == run_id]
        if not runs:
            raise FlowerError(f"Flower knows nothing of run {run_id}")
        return RunStatus(str(runs[0]["status"]), str(runs[0]["status-details"]))

    def stop(self, run_id: str) -> None:
        """End a run. Raises FlowerError when the SuperLink does not answer."""
        self._ask("stop", run_id, CONNECTION)

    def follow_log(self, run_id: str, to: Path) -> subprocess.Popen[bytes]:
        """Start a process that appends what the app prints to a file, and that ends when the run ends."""
        return _begun(["flwr", "log", run_id, CONNECTION, "--stream"], self.environment, self.folder, to)

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


def _begun(command: list[str], environment: dict[str, str], folder: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start a process whose output is appended to a log.

    It has a session of its own, so that Ctrl-C reaches this command alone, which can stop the others in order.
    """
    options: dict[str, Any] = {"env": environment, "cwd": folder, "start_new_session": True}
    with private_open(log, "ab") as file:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, **options)


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
def superlink(log: Path) -> Iterator[SuperLink]:
    """Run a SuperLink for simulations for the time of a `with` block; what it prints is appended to `log`.

    It has its own port, Flower home and Ray folder, so several can run at once, and it starts in an empty folder,
    because workers would import the app's packages from its working directory instead of from the submitted app.
    However the block is left, every process that the SuperLink started is stopped and its folder removed.
    Raises FlowerError when it does not come up.
    """
    usual = tempfile.gettempdir()
    with _own_folder(usual if len(usual) <= LONGEST_FOLDER else "/tmp") as (folder, environment, started):
        (folder / "here").mkdir()
        yield _start(folder, environment, log, started)


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
    with _own_folder() as (folder, environment, _):
        _write_connection(environment, address, root_certificates)
        yield SuperLink(None, folder, environment)


@contextmanager
def _own_folder(
    parent: str | None = None,
) -> Iterator[tuple[Path, dict[str, str], list[subprocess.Popen[bytes]]]]:
    """Make a folder for Flower, with the environment to use it and a list for the processes that are started there.

    However the block is left, every process that was started is stopped, and the folder removed.
    """
    folder = Path(tempfile.mkdtemp(prefix="wf-", dir=parent))
    started: list[subprocess.Popen[bytes]] = []
    try:
        environment = flower_environment(os.environ, folder)
        for command in ("flower-superlink", "flwr"):
            if shutil.which(command, path=environment["PATH"]) is None:
                where = f"install Wildflower anew into {sys.prefix}"
                raise FlowerError(f"Flower's command {command} was not found: {where}")
        yield folder, environment, started
    finally:
        with uninterrupted():
            stop_everything(started, folder)
            shutil.rmtree(folder, ignore_errors=True)


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
        "RAY_TMPDIR": str(folder / "ray"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "PYTHONUNBUFFERED": "1",
    }
    # A Ray cluster that is already running is not ours to use.
    environment.pop("RAY_ADDRESS", None)
    for name in ("NO_PROXY", "no_proxy"):
        environment[name] = ",".join(part for part in (outer.get(name, ""), "127.0.0.1,localhost") if part)
    return environment


def _start(folder: Path, environment: dict[str, str], log: Path, started: list[subprocess.Popen[bytes]]) -> SuperLink:
    for _ in range(MAX_PORTS):
        port = _free_port()
        _write_connection(environment, f"127.0.0.1:{port}", None)
        command = ["flower-superlink", "--insecure", "--simulation", "--isolation", "subprocess"]
        command += ["--disable-runtime-dependency-installation", "--host", "127.0.0.1", "--port", str(port)]
        process = _begun(command, environment, folder / "here", log)
        started.append(process)
        if _comes_up(process, port):
            return SuperLink(process, folder, environment)
        # Most likely another process took the port between our choice and its use.
    raise FlowerError(f"flower-superlink did not start; the end of {log}:\n{last_lines(log, 20)}")


def _comes_up(process: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until the SuperLink answers; False when it ended before."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1.0)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return process.poll() is None
        except (OSError, http.client.HTTPException):
            pass  # not up yet
        finally:
            connection.close()
        try:
            process.wait(timeout=0.2)
            return False
        except subprocess.TimeoutExpired:
            pass
    raise FlowerError(f"flower-superlink did not answer on port {port} within {START_SECONDS:.0f} seconds")


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def stop_everything(started: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """Stop the processes, their descendants, and whatever else has `folder` as its Flower home; kill what resists."""
    ours = _ours(started, folder)
    # A server that loses what it works with would take its run for failed. So it ends first. That of a simulation is a
    # thread, which goes on while its process ends in order.
    for name, number in SERVERS.items():
        servers = [process for process in ours if _is_command(process, name)]
        for process in servers:
            _signal(process, number)
        psutil.wait_procs(servers, timeout=STOP_SECONDS)
    for process in sorted(_running(ours), key=_age_seconds):
        _signal(process, signal.SIGTERM)
    psutil.wait_procs(ours, timeout=STOP_SECONDS)
    deadline = time.monotonic() + STOP_SECONDS
    # More than once: a process may have started another one while it was being stopped.
    while (ours := _running([*ours, *_ours(started, folder)])) and time.monotonic() < deadline:
        for process in ours:
            _signal(process, signal.SIGKILL)
        psutil.wait_procs(ours, timeout=0.5)
    for child in started:
        child.wait()


def _ours(started: list[subprocess.Popen[bytes]], folder: Path) -> list[psutil.Process]:
    found: set[psutil.Process] = set()
    for child in started:
        try:
            parent = psutil.Process(child.pid)
            found |= {parent, *parent.children(recursive=True)}
        except psutil.NoSuchProcess:
            continue
    # A process whose parent has died is nobody's descendant any more, but still has its environment.
    home = str(folder / "home")
    for process in psutil.process_iter():
        try:
            if process.environ().get("FLWR_HOME") == home:
                found.add(process)
        except psutil.Error:
            continue
    return _running(list(found))


def _running(processes: list[psutil.Process]) -> list[psutil.Process]:
    running = []
    for process in set(processes):
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
        except psutil.NoSuchProcess:
            continue
    return running


def _age_seconds(process: psutil.Process) -> float:
    with suppress(psutil.NoSuchProcess):
        return time.time() - process.create_time()
    return 0.0


def _is_command(process: psutil.Process, name: str) -> bool:
    """Return whether a process runs a command, which Python may run as a script."""
    with suppress(psutil.Error):
        return any(Path(part).name == name for part in process.cmdline()[:2])
    return False


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)


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
