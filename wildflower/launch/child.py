"""A run in a process of its own, for whoever goes on meanwhile: a sweep, a notebook."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn

import psutil

from wildflower.launch.process_ends import run_and_leave
from wildflower.launch.starting import loading_modules

GRACE_SECONDS = 20.0  # in which a run ends by itself once it is interrupted


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


def stop(processes: Sequence[subprocess.Popen[bytes]], grace_seconds: float = GRACE_SECONDS) -> None:
    """End runs that still go on: as by Ctrl-C, after the grace time by SIGTERM, after another one by SIGKILL.

    Who interrupts this too does not want to wait, and goes on to the next step. What a run has written is whole at any
    time. SIGKILL goes to all that a run has started as well, because Flower's processes do not end with it.
    """
    left = list(processes)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        for process in left:
            started = _descendants(process.pid) if number == signal.SIGKILL else []
            process.send_signal(number)
            for one in started:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
        with suppress(KeyboardInterrupt):
            _wait(left, grace_seconds)
        left = [process for process in left if process.returncode is None]
        if not left:
            return


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Until all have ended, but not longer than this."""
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
