"""Runs of a sweep that differ in the seed alone train side by side: in the same workers, in larger stacks."""

from __future__ import annotations

import gc
import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from wildflower.launch.experiment_file import beside, resolve
from wildflower.launch.forked_server import load_compiler, prepare_to_fork, print_to
from wildflower.launch.superlink import STOP_SIGNALS

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from wildflower.client_app.simulation import ForkServer
    from wildflower.server_app.config import RunConfig

MOST_TOGETHER = 8  # runs, each of which has a server and its models; `load_task` keeps as many tasks
OF_EACH_RUN = ("seed", "run-name", "resume")


@dataclass(frozen=True)
class Planned:
    """One run of a sweep.

    Attributes:
        run_dir: its folder.
        rounds: how many it is to have.
        overrides: what makes it out of the experiment.
        seed: its seed.
        row: the name of its row; "" in a sweep without rows.
        alike: what runs have in common that may share their workers; "" where it has its own.
    """

    run_dir: Path
    rounds: int
    overrides: tuple[str, ...]
    seed: int
    row: str
    alike: str = ""

    @property
    def name(self) -> str:
        """The run's name."""
        return self.run_dir.name


def alike(config: RunConfig) -> str:
    """Return what runs have in common that may share their workers; "" for one that has its own."""
    way = config.compute.side_by_side
    if not config.fleet or config.engine != "local" or way in ("off", "1"):
        return ""
    if way == "auto":
        import torch

        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # else no process could be forked from this one
        if not torch.cuda.is_available():
            return ""
    return json.dumps({key: value for key, value in config.to_dict().items() if key not in OF_EACH_RUN})


def next_of(waiting: list[Planned], share: bool) -> list[Planned]:
    """Take the first run that waits, and where runs can share workers those that are alike, out of what waits."""
    first = waiting[0]
    alike_runs = [run for run in waiting if share and first.alike and (run.row, run.alike) == (first.row, first.alike)]
    found = alike_runs[:MOST_TOGETHER] or [first]
    waiting[:] = [run for run in waiting if run not in found]
    return found


def shared_workers(experiment: Path, runs: Sequence[Planned], log: Path) -> tuple[BaseProcess | None, list[ForkServer]]:
    """Start a process that forks the workers of some runs, and ends with the last of them; return the runs' ends too.

    One run by itself has its own workers.

    What the workers print goes to the end of `log`.
    """
    if len(runs) == 1:
        return None, []
    from wildflower.client_app.simulation import fork_server

    with beside(experiment):
        load_compiler(resolve(experiment, runs[0].overrides).config)
    return fork_server([run.run_dir for run in runs], partial(_prepared, experiment, runs, log))


@contextmanager
def _prepared(experiment: Path, runs: Sequence[Planned], log: Path) -> Iterator[None]:
    """Have in the process that forks the workers what all of them need, for the time of a `with` block."""
    from wildflower.models.allocator import keep_freed_memory
    from wildflower.server_app.inputs import task_spec
    from wildflower.tasks.task import load_task

    os.setsid()  # Ctrl-C at the terminal reaches the command alone, which stops the runs; this ends with the last one
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    print_to(log)
    prepare_to_fork()
    keep_freed_memory()
    with beside(experiment):
        for run in runs:
            config = resolve(experiment, run.overrides).config
            with suppress(Exception):  # of any kind, which the run finds too, and tells
                load_task(task_spec(config))
        gc.freeze()
        yield
