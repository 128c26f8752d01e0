"""Workers of a simulation on this machine: forked from one process that has torch and the data loaded.

A server that trains and writes files gets threads, and a process with threads must not be forked. So a fork server is
forked from the server before that, and keeps doing nothing but forking workers: the first ones, and one for each that
was lost, of which it says how it ended. A worker says when it begins, then answers the messages of its link one after
the other, and ends with its server. While it answers it says which files of devices it is about to write
(`wildflower.client_app.undo`). Messages are those of `wildflower.client_app.worker`, without Flower.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import struct
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict

from wildflower.client_app import frames, undo, work, worker
from wildflower.devices.validation import one_line
from wildflower.models.architecture import Architecture
from wildflower.models.network import lighten
from wildflower.models.weights import with_weights
from wildflower.plugins.flower_log import log
from wildflower.tasks.scoring import TestPart, score_batches, score_exit_batches, test_part
from wildflower.tasks.task import TaskSpec, load_task

SCORE = "score"  # the kind of a message that no device knows: the server lets its workers score its models
WRITES = "writes"  # the header of a worker that is about to write a file has its path here
NUMBER = struct.Struct("<I")  # of a worker
FORKED = struct.Struct("<I?i")  # a worker's process; whether it takes the place of another, and that one's exit code
ENDING_SECONDS = 5.0  # that a worker whose link has ended has to end itself
NO_WORKER = "the process that workers are forked from is gone; short of memory, the system may have killed it"
LINK_BYTES = 2**20  # on their way: the system's 200 kB let the two ends wait for each other more often

forking = multiprocessing.get_context("fork")


class ToScore(BaseModel):
    """The part of the task's test set that a model is scored on; its weights come beside it, as safetensors.

    part, first, last: of the test set or a part of it, the examples from one to another.
    exits: all exits are scored, and what they say together.
    """

    task: dict[str, Any]
    family: dict[str, Any]
    architecture: dict[str, Any]
    exits: bool
    part: TestPart
    first: int
    last: int
    batch_size: int


class BatchScores(BaseModel):
    """Sums of every batch, for each exit: the fields of `wildflower.tasks.scoring.Scored`."""

    model_config = ConfigDict(ser_json_inf_nan="strings")  # the loss of a model that has diverged

    batches: list[list[tuple[list[float], float, int, list[int]]]]


class ForkServerError(RuntimeError):
    """There are no workers to be had any more. Its text is all there is to know: no frame tells more."""


@dataclass(frozen=True)
class Forked:
    """A worker that was just forked.

    replaced: the exit code of the one whose place it takes, as of `subprocess`; None where there was none.
    """

    link: socket.socket
    process: int
    replaced: int | None


class ForkServer:
    """The server's end of a process that forks workers. To be made before the process has any threads."""

    def __init__(self) -> None:
        self._link, theirs = socket.socketpair()
        self._process = forking.Process(target=_fork_workers, args=(theirs, self._link), name="fork server")
        self._process.start()
        theirs.close()

    def worker(self, number: int) -> Forked:
        """Return a new worker; the one of the same number is ended, if it has not ended yet. Raises ForkServerError."""
        try:
            self._link.sendall(NUMBER.pack(number))
            said, handles, _, _ = socket.recv_fds(self._link, FORKED.size, 1)
        except OSError as error:
            raise ForkServerError(f"{NO_WORKER} ({error.strerror})") from None
        if not handles:
            raise ForkServerError(NO_WORKER)
        process, replaces, code = FORKED.unpack(said)
        return Forked(socket.socket(fileno=handles[0]), process, code if replaces else None)

    def close(self) -> None:
        """End the fork server and its workers, in the middle of whatever they do."""
        self._link.close()
        self._process.join()


def _fork_workers(link: socket.socket, servers_end: socket.socket) -> None:
    servers_end.close()
    worker.end_with(os.getppid())
    forked: dict[int, multiprocessing.process.BaseProcess] = {}
    while len(asked := link.recv(NUMBER.size)) == NUMBER.size:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LINK_BYTES)
        (number,) = NUMBER.unpack(asked)
        code = _exit_code(forked.pop(number)) if number in forked else None
        new = forked[number] = forking.Process(
            target=_work, args=(theirs, (link, ours), number), name=f"worker {number}"
        )
        new.start()
        theirs.close()
        socket.send_fds(link, [FORKED.pack(new.pid, code is not None, code or 0)], [ours.fileno()])
        ours.close()
    for child in multiprocessing.active_children():
        child.terminate()


def _exit_code(one: multiprocessing.process.BaseProcess) -> int | None:
    """Return how a worker has ended whose link has."""
    one.join(ENDING_SECONDS)
    if one.exitcode is None:
        one.kill()
        one.join()
    return one.exitcode


def _work(link: socket.socket, others: tuple[socket.socket, ...], number: int) -> None:
    """A worker: answer one message after the other until the server closes the link."""
    for other in others:
        other.close()
    worker.end_with(os.getppid())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if gpus := torch.cuda.device_count():
        torch.cuda.set_device(number % gpus)

    def tell(written: undo.Written) -> None:
        frames.send(link, {WRITES: str(written.path)}, [] if written.before is None else [written.before])

    undo.tell_with(tell)
    with suppress(ConnectionError):
        frames.send(link, {"begun": True}, [])
    while True:
        try:
            header, arrays = frames.receive(link)
        except (EOFError, ConnectionError):
            return
        out: list[bytes] = []
        try:
            kind, text = str(header["kind"]), str(header["text"])
            reply, out = (score(text, arrays), []) if kind == SCORE else work.do(kind, text, arrays, {})
            answer = {"text": reply}
        except Exception as error:  # told to the server, as a SuperNode does
            log.error("A worker failed:\n%s", traceback.format_exc())
            answer = {"error": one_line(f"{type(error).__name__}: {error}")}
        del header, arrays
        with suppress(ConnectionError):  # the server is gone, which the next receive finds
            frames.send(link, answer, out)


def score(text: str, arrays: list[bytes]) -> str:
    """Score a model on a part of the task's test set, batch by batch."""
    asked = ToScore.model_validate_json(text)
    work.use_one_core()
    task, family = load_task(TaskSpec.from_json(asked.task)), work.family_of(json.dumps(asked.family))
    weights = safetensors.torch.load(arrays[0])
    module = with_weights(family, Architecture.from_json(asked.architecture), weights)
    lighten(module)
    inputs, labels = (tensor[asked.first : asked.last] for tensor in test_part(task, asked.part))
    scored = score_exit_batches if asked.exits else score_batches
    return BatchScores(
        batches=scored(module, task, inputs, labels, batch_size=asked.batch_size, device=work.compute_device())
    ).model_dump_json()
