"""Workers of a simulation on this machine: forked from one process that has torch and the data loaded.

A server that trains and writes files gets threads, and a process with threads must not be forked. So a fork server is
forked from the server before that, and keeps doing nothing but forking workers: the first ones, and one for each that
was lost, of which it says how it ended. A worker says when it begins, then answers the messages of its link one after
the other, and ends with its server. While it answers it says which files of devices it is about to write
(`wildflower.client_app.undo`). Messages are those of `wildflower.client_app.worker`, without Flower.

Runs of a sweep that differ in the seed alone may have one fork server, and then each worker has a link to every run's
server. A worker that is lost costs each of them the message that it worked on.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import signal
import socket
import struct
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict

from wildflower.client_app import frames, inbox, undo, work, worker
from wildflower.client_app.prepared import compute_device, family_of, use_one_core
from wildflower.client_app.training_message import train_together
from wildflower.devices.validation import one_line
from wildflower.models.architecture import Architecture
from wildflower.models.network import lighten
from wildflower.models.weights import with_weights
from wildflower.plugins.flower_log import log
from wildflower.tasks.scoring import TestPart, score_batches, test_part
from wildflower.tasks.task import TaskSpec, load_task

SCORE = "score"  # the kind of a message that no device knows: the server lets its workers score its models
WRITES = "writes"  # the header of a worker that is about to write a file has its path here
NUMBER = struct.Struct("<I")  # of a worker
FORKED = struct.Struct("<I?i")  # a worker's process; whether it takes the place of another, and that one's exit code
ENDING_SECONDS = 5.0  # that a worker whose link has ended has to end itself
NO_WORKER = "the process that workers are forked from is gone; short of memory, the system may have killed it"
LINK_BYTES = 2**20  # on their way: the system's 200 kB let the two ends wait for each other more often
EVERYWHERE = Path("/")

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
    """One run's end of a process that forks workers. To be made before the process has any threads."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link

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
        """Leave the fork server, which ends with its workers, in the middle of whatever they do, when all have left."""
        self._link.close()


def fork_server(
    folders: Sequence[Path] = (EVERYWHERE,), around: Callable[[], AbstractContextManager[None]] = nullcontext
) -> tuple[BaseProcess, list[ForkServer]]:
    """Start a process that forks workers for one run, or for several that train together.

    Args:
        folders: of each run; what its devices write lies there.
        around: what that process has around all that it does.

    Returns:
        The process, and the end of each run.
    """
    pairs = [socket.socketpair() for _ in folders]
    ours, theirs = [one for one, _ in pairs], [other for _, other in pairs]
    process = forking.Process(target=_fork_workers, args=(theirs, ours, folders, around), name="fork server")
    process.start()
    for link in theirs:
        link.close()
    return process, [ForkServer(link) for link in ours]


@contextmanager
def own_fork_server() -> Iterator[ForkServer]:
    """One run's own fork server, for the time of a `with` block."""
    process, [server] = fork_server()
    try:
        yield server
    finally:
        server.close()
        process.join()


@dataclass
class _Worker:
    """A worker as its fork server knows it.

    ends: of its links, those that their runs have not asked for yet, by run.
    replaced: the exit code of the one before.
    """

    process: BaseProcess
    ends: dict[int, socket.socket]
    replaced: int | None


def _fork_workers(
    links: list[socket.socket],
    servers_ends: list[socket.socket],
    folders: Sequence[Path],
    around: Callable[[], AbstractContextManager[None]],
) -> None:
    for end in servers_ends:
        end.close()
    worker.end_with(os.getppid())
    with around():
        _serve_forks(dict(enumerate(links)), folders)
    for child in multiprocessing.active_children():
        child.terminate()


def _serve_forks(runs: dict[int, socket.socket], folders: Sequence[Path]) -> None:
    """Fork the workers that runs ask for, until the last run is over."""
    forked: dict[int, _Worker] = {}

    def fork(number: int, replaced: int | None) -> _Worker:
        pairs = {run: socket.socketpair() for run in runs}
        ours, theirs = ({run: pair[side] for run, pair in pairs.items()} for side in (0, 1))
        for end in (*ours.values(), *theirs.values()):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LINK_BYTES)
        others = [*runs.values(), *ours.values(), *(end for one in forked.values() for end in one.ends.values())]
        of_runs = [(folders[run], end) for run, end in theirs.items()]
        process = forking.Process(target=_work, args=(of_runs, others, number), name=f"worker {number}")
        process.start()
        for end in theirs.values():
            end.close()
        return _Worker(process, ours, replaced)

    while runs:
        ready = select.select(list(runs.values()), [], [])[0]
        for run, link in [each for each in runs.items() if each[1] in ready]:
            try:
                asked = link.recv(NUMBER.size)
            except ConnectionError:
                asked = b""
            if len(asked) < NUMBER.size:  # the run is over
                del runs[run]
                for each in (link, *(one.ends.pop(run) for one in forked.values() if run in one.ends)):
                    each.close()
                continue
            (number,) = NUMBER.unpack(asked)
            if number not in forked:
                forked[number] = fork(number, None)
            elif run not in forked[number].ends:  # it had this one's, which has ended
                one = forked.pop(number)
                code = _exit_code(one.process)
                for end in one.ends.values():
                    end.close()
                forked[number] = fork(number, code)
            one = forked[number]
            end = one.ends.pop(run)
            told = FORKED.pack(one.process.pid, one.replaced is not None, one.replaced or 0)
            with suppress(ConnectionError):  # which the next look at its link finds
                socket.send_fds(link, [told], [end.fileno()])
            end.close()


def _exit_code(one: BaseProcess) -> int | None:
    """Return how a worker has ended whose link has."""
    one.join(ENDING_SECONDS)
    if one.exitcode is None:
        one.kill()
        one.join()
    return one.exitcode


def _work(of_runs: list[tuple[Path, socket.socket]], others: list[socket.socket], number: int) -> None:
    """A worker: answer the messages of each run one after the other, until the servers have closed all links."""
    for other in others:
        other.close()
    worker.end_with(os.getppid())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if gpus := torch.cuda.device_count():
        torch.cuda.set_device(number % gpus)

    def tell(written: undo.Written) -> None:
        link = next(link for folder, link in of_runs if written.path.absolute().is_relative_to(folder))
        frames.send(link, {WRITES: str(written.path)}, [] if written.before is None else [written.before])

    undo.tell_with(tell)
    links = [link for _, link in of_runs]
    for link in links:
        with suppress(ConnectionError):
            frames.send(link, {"begun": True}, [])
    for messages in inbox.messages_of(links):
        asked = list(messages)
        answers = _answers([messages.pop(link) for link in asked])  # nothing else holds their arrays
        for link, (answer, out) in zip(asked, answers, strict=True):
            with suppress(ConnectionError):  # the server is gone, which the inbox finds
                frames.send(link, answer, out)


def _answers(messages: list[inbox.Received]) -> list[tuple[dict[str, str], list[bytes]]]:
    """Return the headers and arrays that answer a message, or training messages of several runs."""
    try:
        if len(messages) > 1:
            found = train_together([(str(header["text"]), arrays) for header, arrays in messages], {})
        else:
            [(header, arrays)] = messages
            kind, text = str(header["kind"]), str(header["text"])
            found = [(score(text, arrays), []) if kind == SCORE else work.do(kind, text, arrays, {})]
    except Exception as error:
        found = [error] * len(messages)
    answers = list[tuple[dict[str, str], list[bytes]]]()
    for each in found:
        if isinstance(each, Exception):  # told to the server, as a SuperNode does
            log.error("A worker failed:\n%s", "".join(traceback.format_exception(each)))
            answers.append(({"error": one_line(f"{type(each).__name__}: {each}")}, []))
        else:
            answers.append(({"text": each[0]}, each[1]))
    return answers


def score(text: str, arrays: list[bytes]) -> str:
    """Score a model on a part of the task's test set, batch by batch."""
    asked = ToScore.model_validate_json(text)
    use_one_core()
    task, family = load_task(TaskSpec.from_json(asked.task)), family_of(json.dumps(asked.family))
    weights = safetensors.torch.load(arrays[0])
    module = with_weights(family, Architecture.from_json(asked.architecture), weights)
    lighten(module)
    inputs, labels = (tensor[asked.first : asked.last] for tensor in test_part(task, asked.part))
    size, device = asked.batch_size, compute_device()
    batches = score_batches(module, task, inputs, labels, batch_size=size, device=device, exits=asked.exits)
    return BatchScores(batches=batches).model_dump_json()
