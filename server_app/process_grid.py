"""Flower's grid without Flower's engine: workers on this machine, each behind a socket of its own (docs/design.md)."""

from __future__ import annotations

import itertools
import json
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import psutil
import safetensors.torch
from flwr.app import Error, Message, MessageType
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.supercore.task_identity import TaskIdentity

from wildflower.client_app import frames, worker
from wildflower.client_app.simulation import (
    SCORE,
    WRITES,
    BatchScores,
    ForkServer,
    ForkServerError,
    ToScore,
    own_fork_server,
)
from wildflower.client_app.undo import Written
from wildflower.messages.flower_records import make_records, read_records, release
from wildflower.plugins.flower_log import log
from wildflower.rounds.evaluation import Scorer
from wildflower.rounds.exchange import WaitingGrid
from wildflower.server_app.server_scoring import SCORED_TOGETHER, has_exits, scorer_of
from wildflower.strategies.method import Model
from wildflower.tasks.scoring import Scored, TestPart, add_up, test_part
from wildflower.tasks.task import TaskSpec, load_task

SCORE_TYPE = f"{MessageType.EVALUATE}.{SCORE}"
KINDS = {
    MessageType.TRAIN: "train",
    MessageType.EVALUATE: "evaluate",
    MessageType.QUERY: "query",
    SCORE_TYPE: SCORE,
}
MAX_TRIES = 3  # to have a part of the test set scored, where workers are killed
MAX_STARTS = 3  # of workers that end before they begin, in a row
LOOK_SECONDS = 10.0  # after which workers that do not answer are looked at


@dataclass
class _Worker:
    """One worker and its messages.

    Attributes:
        begun: it has said that it is there.
        asked: the message that it works on.
        written: the files of devices that it has told of while it worked.
        told_stopped: the log says that it is stopped.
        waiting: messages for it.
    """

    link: socket.socket
    process: int
    begun: bool = False
    asked: tuple[str, Message] | None = None
    written: list[Written] = field(default_factory=list)
    told_stopped: bool = False
    waiting: deque[tuple[str, Message]] = field(default_factory=deque)


class LocalGrid(WaitingGrid):
    """Nodes 1 to `workers`, each a process that does one message after the other.

    A worker that is lost costs the message that it worked on, whose reply is an error. What its devices have written
    meanwhile is undone, and another worker takes its place. All methods raise ForkServerError where there are none
    left.
    """

    def __init__(self, fork_server: ForkServer, workers: int) -> None:
        # Every message says who sent it: a process that Flower starts is told who it is.
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, SUPERLINK_NODE_ID
        self._fork_server = fork_server
        self._kills = worker.oom_kills()
        self._lost: ForkServerError | None = None  # why there are no workers any more
        self._looked_at = time.monotonic()
        self._workers = {number: self._new(number) for number in range(1, workers + 1)}
        self._ids = (str(number) for number in itertools.count(1))
        self._replies: dict[str, Message] = {}

    def set_run(self, run: object) -> None:
        """Nothing: there is one run."""

    @property
    def run(self) -> NoReturn:
        """A run of Flower's, which this is not."""
        raise NotImplementedError("Flower knows nothing of this run")

    def create_message(self, *args: object, **kwargs: object) -> NoReturn:
        """An old way of Flower's to make messages."""
        raise NotImplementedError("messages are made by flwr.app.Message")

    def get_node_ids(self) -> Iterable[int]:
        """The numbers of the workers."""
        if self._lost is not None:
            raise self._lost
        return list(self._workers)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages to workers, as soon as each has done the ones before. Their arrays are let go when sent."""
        ids = []
        for message in messages:
            ids.append(next(self._ids))
            number = message.metadata.dst_node_id
            self._workers[number].waiting.append((ids[-1], message))
            self._send_next(number)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies that have come to these messages, each once."""
        self._take_replies(0.0)
        return [self._replies.pop(i) for i in message_ids if i in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and wait for all replies, in the messages' order; `timeout` is none of a simulation's."""
        ids = list(self.push_messages(messages))
        while not all(i in self._replies for i in ids):
            self._take_replies(LOOK_SECONDS)
        return self.pull_messages(ids)

    def wait(self, message_ids: Collection[str], seconds: float) -> None:
        """Until a reply to one of these messages has come, but not longer than this."""
        if self._replies.keys().isdisjoint(message_ids):
            self._take_replies(seconds)

    def close(self) -> None:
        """Let the workers end."""
        for one in self._workers.values():
            one.link.close()

    def _take_replies(self, seconds: float) -> None:
        """Take what has come; where nothing has, wait so long for it."""
        busy = {one.link: number for number, one in self._workers.items() if one.asked is not None}
        ready = select.select(list(busy), [], [], seconds)[0]
        for link in ready:
            self._take_reply(busy[link])
        if ready:
            self._looked_at = time.monotonic()
        elif time.monotonic() - self._looked_at >= LOOK_SECONDS:
            self._tell_stopped(busy.values())

    def _take_reply(self, number: int) -> None:
        one = self._workers[number]
        assert one.asked is not None
        message_id, message = one.asked
        try:
            answer, arrays = frames.receive(one.link)
        except (OSError, EOFError):
            one.asked = None
            for written in reversed(one.written):
                written.undo()
            how = self._replace(number, f" while it worked{_devices_text(message)}")
            self._replies[message_id] = _error(message, ErrorCode.CLIENT_APP_CRASHED, how)
        else:
            if WRITES in answer:
                one.written.append(Written(Path(str(answer[WRITES])), arrays[0] if arrays else None))
                return
            one.asked = None
            one.written.clear()
            if "error" in answer:
                code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
                self._replies[message_id] = _error(message, code, str(answer["error"]))
            else:
                self._replies[message_id] = Message(make_records(str(answer["text"]), arrays), reply_to=message)
        self._send_next(number)

    def _send_next(self, number: int) -> None:
        if self._workers[number].asked is not None or not self._workers[number].waiting:
            return
        message_id, message = self._workers[number].waiting.popleft()
        kind = KINDS[message.metadata.message_type]
        # A query for a report has no content.
        text, arrays = read_records(message.content, f"the {kind} message") if len(message.content) else ("", [])
        for last in (False, True):
            self._await_begin(number)
            try:
                frames.send(self._workers[number].link, {"kind": kind, "text": text}, arrays)
                break
            except OSError:
                # It was lost before this message, which it cannot have begun: the next one gets it.
                how = self._replace(number)
                if last:
                    self._replies[message_id] = _error(message, ErrorCode.CLIENT_APP_CRASHED, how)
                    self._send_next(number)
                    return
        release(message.content)
        self._workers[number].asked = message_id, message

    def _await_begin(self, number: int) -> None:
        """Wait until a worker is there; ForkServerError where several in its place have ended before that."""
        for _ in range(MAX_STARTS):
            if self._workers[number].begun:
                return
            link = self._workers[number].link
            while not select.select([link], [], [], LOOK_SECONDS)[0]:
                self._tell_stopped([number])
            try:
                frames.receive(link)
                self._workers[number].begun = True
                return
            except (OSError, EOFError):
                how = self._replace(number, " before it began")
        self._lost = ForkServerError(
            f"{MAX_STARTS} workers in a row have ended before they began, the last of them so: {how}; what they said "
            "stands in the log"
        )
        raise self._lost

    def _new(self, number: int) -> _Worker:
        forked = self._fork_server.worker(number)
        return _Worker(forked.link, forked.process)

    def _replace(self, number: int, when: str = "") -> str:
        """Put another worker in the place of one that has ended. -> how that has ended."""
        one = self._workers[number]
        one.link.close()
        try:
            forked = self._fork_server.worker(number)
        except ForkServerError as error:
            self._lost = error
            raise
        self._workers[number] = _Worker(forked.link, forked.process, waiting=one.waiting)
        kills, before = worker.oom_kills(), self._kills
        self._kills = kills
        how = _how(forked.replaced, kills != before)
        log.warning("Worker %s %s%s: another one takes its place", number, how, when)
        return f"worker {number} {how}"

    def _tell_stopped(self, numbers: Iterable[int]) -> None:
        """Say which of the busy workers somebody has stopped: a simulation waits for them."""
        self._looked_at = time.monotonic()
        for number in numbers:
            one = self._workers[number]
            with suppress(psutil.NoSuchProcess):
                if psutil.Process(one.process).status() == psutil.STATUS_STOPPED and not one.told_stopped:
                    one.told_stopped = True
                    text = "Worker %s is stopped, and the run waits for it: kill -CONT %s lets it go on, kill -KILL %s "
                    log.warning(text + "lets another one do its work", number, one.process, one.process)


def _how(code: int | None, memory: bool) -> str:
    """How a worker has ended.

    Args:
        code: as of `subprocess`; None where nobody knows.
        memory: the kernel has killed a process for want of memory meanwhile.
    """
    if code == -signal.SIGKILL:
        if memory:
            return "was killed by the kernel because memory ran out (fewer workers need less)"
        return "was killed (SIGKILL), most likely because memory ran out (fewer workers need less)"
    if code is not None and code < 0:
        return f"was ended by signal {-code} ({signal.strsignal(-code)})"
    return f"ended with code {code}"


def _devices_text(message: Message) -> str:
    """Which devices a message is about, for the log; "" of one that is about none."""
    if message.metadata.message_type == SCORE_TYPE or not len(message.content):
        return ""
    batch = json.loads(read_records(message.content, "the message")[0] or "{}")
    devices = list(dict.fromkeys(order["device"] for order in batch.get("orders", [])))
    return f" for devices {devices} in round {batch['round']}" if devices else ""


@contextmanager
def local_grid(workers: int, shared: ForkServer | None = None) -> Iterator[LocalGrid]:
    """A grid with that many workers for the time of a `with` block. This process must not have threads yet.

    shared: forks workers that this run shares with others.
    """
    with (
        own_fork_server() if shared is None else closing(shared) as forks,
        closing(LocalGrid(forks, workers)) as grid,
    ):
        yield grid


def scorer_on(grid: LocalGrid, spec: TaskSpec, *, held_out: bool = False) -> Scorer:
    """Scores a model on all workers at once, each on its part of the test set; the bits are those of one process.

    With `held_out` also on both parts of `wildflower.tasks.scoring.test_part`.

    Raises RuntimeError where a worker cannot score the model, or several in a row are killed over it.
    """
    task, nodes = load_task(spec), list(grid.get_node_ids())

    def score_part(model: Model, of_test: TestPart) -> list[Scored]:
        batches = -(-len(test_part(task, of_test)[1]) // SCORED_TOGETHER)
        edges = [SCORED_TOGETHER * (batches * part // len(nodes)) for part in range(len(nodes) + 1)]
        weights = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.weights.items()}
        data = safetensors.torch.save(weights)
        texts = [
            ToScore(
                task=spec.to_json(),
                family=model.family.spec(),
                architecture=model.architecture.to_json(),
                exits=has_exits(model),
                part=of_test,
                first=first,
                last=last,
                batch_size=SCORED_TOGETHER,
            ).model_dump_json()
            for first, last in pairwise(edges)
        ]
        found: list[list[list[Scored]]] = [[] for _ in nodes]  # by part, batch and exit
        todo = list(range(len(nodes)))
        for _ in range(MAX_TRIES):
            questions = [Message(make_records(texts[part], [data]), nodes[part], SCORE_TYPE) for part in todo]
            replies = dict(zip(todo, grid.send_and_receive(questions), strict=True))
            todo = [part for part, reply in replies.items() if reply.has_error()]
            for part, reply in replies.items():
                if part not in todo:
                    answer = BatchScores.model_validate_json(read_records(reply.content, "the scores")[0])
                    found[part] = [[Scored(*scored) for scored in batch] for batch in answer.batches]
                elif reply.error.code != ErrorCode.CLIENT_APP_CRASHED:
                    raise RuntimeError(f"a worker cannot score {model.architecture}: {reply.error.reason}")
            if not todo:
                by_exit = zip(*(batch for part in found for batch in part), strict=True)
                return [add_up(task, batches) for batches in by_exit]
        raise RuntimeError(f"{MAX_TRIES} workers in a row were killed while they scored {model.architecture}")

    return scorer_of(task, score_part, held_out=held_out)


def _error(message: Message, code: int, why: str) -> Message:
    return Message(Error(code, why), reply_to=message)
