"""A run without Flower's engine: its server is forked from this process, which has built what the run stands on."""

from __future__ import annotations

import gc
import io
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

from wildflower.devices.private import private_open
from wildflower.launch.superlink import STOP_SIGNALS, interrupted_later, uninterrupted

if TYPE_CHECKING:
    from wildflower.client_app.simulation import ForkServer
    from wildflower.rounds.engine import Engine
    from wildflower.rounds.evaluation import Scorer
    from wildflower.server_app.config import RunConfig

ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def prepare_to_fork() -> None:
    """Before anything is built in a process that is to fork a server: no threads, and nothing of CUDA begun."""
    for name in ONE_THREAD:
        os.environ.setdefault(name, "1")
    # CUDA's own count of devices begins CUDA, after which forked processes cannot use it.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    torch.set_num_threads(1)


@contextmanager
def told_later() -> Iterator[list[logging.LogRecord]]:
    """For the time of a `with` block Flower's logger writes into a list; all at once where the block fails."""
    logger, records = logging.getLogger("flwr"), list[logging.LogRecord]()

    def hold_back(record: logging.LogRecord) -> bool:
        records.append(record)
        return False

    logger.addFilter(hold_back)
    try:
        yield records
    except BaseException:
        logger.removeFilter(hold_back)
        for record in records:
            logger.handle(record)
        raise
    logger.removeFilter(hold_back)


@contextmanager
def local_server(
    config: RunConfig,
    built: tuple[Engine, Scorer | None],
    said: list[logging.LogRecord],
    log: Path,
    shared: ForkServer | None = None,
) -> Iterator[BaseProcess]:
    """The process of a run's server, for the time of a `with` block.

    What it and its workers print goes to `log`, and what was `said` while the run was built before that.
    Workers that it shares with other runs are forked by `shared`.

    However the block is left, all these processes are killed: what they write of a run is whole at any time.
    """
    # What is there now is looked at by no collection of garbage in the processes to come, which then share its memory.
    gc.freeze()
    server = multiprocessing.get_context("fork").Process(
        target=_serve, args=(config, built, said, log, os.getpid(), shared), name="server"
    )
    try:
        with interrupted_later():
            server.start()
        yield server
    finally:
        with uninterrupted():
            if server.pid is not None:
                with suppress(ProcessLookupError):  # it has ended, or not yet made its own group
                    os.killpg(server.pid, signal.SIGKILL)
                server.kill()
                server.join()
            gc.unfreeze()


def _serve(
    config: RunConfig,
    built: tuple[Engine, Scorer | None],
    said: list[logging.LogRecord],
    log: Path,
    parent: int,
    shared: ForkServer | None,
) -> None:
    from wildflower.client_app.worker import end_with
    from wildflower.models.allocator import keep_freed_memory
    from wildflower.server_app.app import run
    from wildflower.server_app.process_grid import local_grid, scorer_on
    from wildflower.tasks.task import TaskSpec

    os.setsid()  # Ctrl-C at the terminal reaches the command alone, which then ends this group of processes
    end_with(parent)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    keep_freed_memory()
    print_to(log)
    for record in said:
        logging.getLogger("flwr").handle(record)
    if shared is None:
        load_compiler(config)
    engine, scorer = built
    with local_grid(config.workers, shared) as grid:
        if engine.own is None:  # where devices have their own data, workers have no test set to share
            spec = TaskSpec.from_json(engine.settings.task)
            scorer = scorer_on(grid, spec, held_out=engine.settings.deliver == "best")
        run(grid, config, (engine, scorer))


def load_compiler(config: RunConfig) -> None:
    """Load PyTorch's compiler once for all workers, in 1 to 4 s, where they take its optimizers, which import it."""
    import torch

    if config.optimizer != "sgd" or torch.cuda.is_available():
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)


def print_to(log: Path) -> None:
    """Let this process print to the end of a file, Flower's logger too."""
    with private_open(log, "ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # somebody may have put something else in their place
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace", line_buffering=True)
    for handler in logging.getLogger("flwr").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
