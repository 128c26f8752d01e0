"""A run in a process of its own, for whoever goes on meanwhile: a sweep, a notebook."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO


def start(experiment: Path, overrides: Sequence[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a run as `wildflower run` does; what that prints goes to `output`.

    It is stopped when this process ends, however that ends, and it can be resumed then.
    """
    # In a group of its own: a Ctrl-C at the terminal reaches this process alone, which then stops its runs in order.
    return subprocess.Popen(
        [sys.executable, "-m", "wildflower.child", str(os.getpid()), str(experiment), *overrides],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Interrupt runs that still go on, as by Ctrl-C, and wait for their end."""
    for process in processes:
        process.send_signal(signal.SIGINT)
    for process in processes:
        process.wait()


def _main(parent: int, experiment: Path, overrides: Sequence[str]) -> int:
    from client_app.worker import end_with

    end_with(parent, signal.SIGTERM)  # which the command takes as Ctrl-C

    from rich.console import Console

    from wildflower.experiment import run_experiment

    return run_experiment(experiment, overrides, None, Console())


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
