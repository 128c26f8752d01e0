"""A run in a process of its own, for whoever goes on meanwhile: a sweep, a notebook.

Hooks that Python gives are objects of this process: their run is forked from it, and nothing of them is ever pickled.
The command forks the runs of its sweeps, because to load PyTorch takes as long as several rounds of a small run.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, NoReturn

import psutil

from wildflower.devices.private import private_open
from wildflower.launch.experiment_file import SettingsError
from wildflower.launch.forked_server import prepare_to_fork, print_to
from wildflower.launch.process_ends import run_and_leave
from wildflower.launch.starting import loading_modules
from wildflower.launch.superlink import interrupted_later

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from wildflower.client_app.simulation import ForkServer
    from wildflower.rounds.hooks import RoundHook

GRACE_SECONDS = 20.0  # in which a run ends by itself once it is interrupted


class Forked:
    """The process of a run that was forked from this one, with the part of `subprocess.Popen` that runs are asked."""

    def __init__(self, process: BaseProcess) -> None:
        assert process.pid is not None
        self._process = process
        self.pid: int = process.pid

    @property
    def returncode(self) -> int | None:
        """The code with which it has ended; None as long as it goes on."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the code with which it has ended; None as long as it goes on."""
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """Send it a signal, as long as it goes on."""
        if self._process.exitcode is None:
            os.kill(self.pid, sig)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("wildflower", timeout or 0.0)
        return self._process.exitcode


Child = subprocess.Popen[bytes] | Forked


def begin(
    experiment: Path,
    overrides: Sequence[str],
    output: Path,
    hooks: Sequence[RoundHook],
    forked: bool = False,
    shared: Sequence[ForkServer] = (),
) -> Child:
    """Start a run, by a fork where asked or where it has hooks; what it prints goes to the end of a file.

    shared: its end of a process whose workers it shares, then those of runs that are still to be started.
    """
    if hooks or forked:
        return fork(experiment, overrides, output, hooks, shared)
    with private_open(output, "ab") as file:
        return start(experiment, overrides, file)


@contextmanager
def running(experiment: Path, overrides: Sequence[str], output: Path, hooks: Sequence[RoundHook]) -> Iterator[Child]:
    """Start a run as `begin` does; it is stopped where the `with` block is left before its end."""
    started: list[Child] = []
    try:
        with interrupted_later():
            started.append(begin(experiment, overrides, output, hooks))
        yield started[0]
    finally:
        stop(started)


def fork(
    experiment: Path,
    overrides: Sequence[str],
    output: Path,
    hooks: Sequence[RoundHook],
    shared: Sequence[ForkServer] = (),
) -> Forked:
    """Start a run as a fork of this process, whose hooks it can have; what it prints goes to the end of a file.

    It is stopped when this process ends, as one of `start` is. `shared` is as of `begin`.
    """
    arguments = (os.getpid(), experiment, overrides, output, hooks, shared)
    process = multiprocessing.get_context("fork").Process(target=_run_forked, args=arguments, name="run")
    process.start()
    return Forked(process)


def load_for_forks() -> bool:
    """Load what runs need, before some are forked from this process; False where none can be.

    The process may do nothing else: PyTorch computes on one thread from now on.
    """
    if _why_not_fork():
        return False
    prepare_to_fork()
    with loading_modules():
        import wildflower.server_app.app  # noqa: F401
        from wildflower.server_app.journal import load_writers

        load_writers()
    return True


def _why_not_fork() -> str:
    """Return why no run can be forked from this process; "" where one can."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return "this system does not fork processes"
    torch = sys.modules.get("torch")
    if torch is None:
        return ""
    if torch.cuda.is_initialized():
        return "this process has used a GPU, which a process that is forked from it cannot use any more"
    trying = os.fork()
    if trying == 0:  # PyTorch keeps threads for gradients from the first time on, and a forked process has none
        try:
            torch.ones(1, requires_grad=True).sum().backward()
            os._exit(0)
        except BaseException:
            os._exit(1)
    if os.waitpid(trying, 0)[1] != 0:
        return "this process has trained with PyTorch, and a process that is forked from it cannot train any more"
    return ""


def check_hooks(hooks: Sequence[RoundHook]) -> None:
    """Raise SettingsError unless a run can have hooks that are objects of this process."""
    from wildflower.rounds.hooks import RoundHook

    if not isinstance(hooks, list | tuple):
        raise SettingsError(f"hooks = {hooks!r}: must be a list of hooks, such as [EarlyStop(patience=5)]")
    in_a_file = "put the class into a file beside the experiment and name it: hooks = 'my_hooks:EarlyStop'"
    for hook in hooks:
        if not isinstance(hook, RoundHook):
            raise SettingsError(f"hooks: {hook!r} is no value of a class of wildflower.rounds.hooks.RoundHook")
    if hooks and (why := _why_not_fork()):
        raise SettingsError(f"hooks: {why}: {in_a_file}")


def _run_forked(
    parent: int,
    experiment: Path,
    overrides: Sequence[str],
    output: Path,
    hooks: Sequence[RoundHook],
    shared: Sequence[ForkServer],
) -> NoReturn:
    from rich.console import Console

    from wildflower.client_app.worker import end_with
    from wildflower.launch.experiment import run_experiment

    os.setsid()  # Ctrl-C at the terminal reaches the parent alone, which then stops its runs in order
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with(parent, signal.SIGTERM)
    for of_others in shared[1:]:
        of_others.close()
    print_to(output)
    # Not `terminal`, which would take a notebook's output for this process's own.
    console = Console(file=sys.stdout, emoji=False, force_jupyter=False, force_terminal=False)
    sys.exit(run_experiment(experiment, overrides, None, console, hooks=hooks, shared=shared[0] if shared else None))


def start(experiment: Path, overrides: Sequence[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a run as `wildflower run` does; what that prints goes to `output`.

    It is stopped when this process ends, however that ends, and it can be resumed then.
    """
    # In a group of its own: a Ctrl-C at the terminal reaches this process alone, which then stops its runs in order.
    return subprocess.Popen(
        [sys.executable, "-m", "wildflower.launch.child", str(os.getpid()), str(experiment), *overrides],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def stop(processes: Sequence[Child], grace_seconds: float = GRACE_SECONDS) -> None:
    """End runs that still go on: as by Ctrl-C, after the grace time by SIGTERM, after another one by SIGKILL.

    Who interrupts this too does not want to wait, and goes on to the next step. What a run has written is whole at any
    time. SIGKILL goes to all that a run has started as well, because Flower's processes do not end with it.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        left = [process for process in processes if process.returncode is None]
        for process in left:
            started: list[psutil.Process] = []
            with suppress(psutil.NoSuchProcess):
                started = psutil.Process(process.pid).children(recursive=True) if number == signal.SIGKILL else []
            process.send_signal(number)
            for one in started:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
        with suppress(KeyboardInterrupt):
            _wait(left, grace_seconds)


def _wait(processes: Sequence[Child], seconds: float) -> None:
    """Wait until all have ended, but not longer than this."""
    end = time.monotonic() + seconds
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.0, end - time.monotonic()))


def _main(parent: int, experiment: Path, overrides: Sequence[str]) -> NoReturn:
    from wildflower.client_app.worker import end_with

    end_with(parent, signal.SIGTERM)  # which the command takes as Ctrl-C

    with loading_modules():
        from wildflower.launch.experiment import run_experiment
        from wildflower.launch.terminal import terminal

    sys.exit(run_experiment(experiment, overrides, None, terminal()))


if __name__ == "__main__":
    run_and_leave(lambda: _main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
