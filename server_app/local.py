"""Flower's grid without Flower's engine: workers on this machine, each behind a socket of its own (docs/design.md)."""

from __future__ import annotations

import itertools
import select
import socket
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from logging import WARNING
from typing import NoReturn

import safetensors.torch
from flwr.app import Error, Message, MessageType
from flwr.common import log
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.supercore.task_identity import TaskIdentity

from client_app import worker
from client_app.simulation import SCORE, BatchScores, Nursery, ToScore
from messages.records import make_records, read_records, release
from rounds.engine import Scorer
from rounds.exchange import WaitingGrid
from server_app.scoring import SCORED_TOGETHER, has_exits, scorer_of
from strategies.method import Model
from tasks.scoring import Scored, TestPart, add_up, test_part
from tasks.task import TaskSpec, load_task

SCORE_TYPE = f"{MessageType.EVALUATE}.{SCORE}"
KINDS = {
    MessageType.TRAIN: "train",
    MessageType.EVALUATE: "evaluate",
    MessageType.QUERY: "query",
    SCORE_TYPE: SCORE,
}
MAX_TRIES = 3  # to have a part of the test set scored, where workers are killed


@dataclass
class _Worker:
    """One worker: its link, the message that it works on, and those that wait for it."""

    link: socket.socket
    asked: tuple[str, Message] | None = None
    waiting: deque[tuple[str, Message]] = field(default_factory=deque)


class LocalGrid(WaitingGrid):
    """Nodes 1 to `workers`, each a process that does one message after the other.

    A worker that is lost costs the message that it worked on, whose reply is an error. Another one takes its place.
    """

    def __init__(self, nursery: Nursery, workers: int) -> None:
        # Every message says who sent it: a process that Flower starts is told who it is.
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, SUPERLINK_NODE_ID
        self._nursery = nursery
        self._workers = {number: _Worker(nursery.worker(number)) for number in range(1, workers + 1)}
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
            self._take_replies(None)
        return self.pull_messages(ids)

    def wait(self, message_ids: Collection[str], seconds: float) -> None:
        """Until a reply to one of these messages has come, but not longer than this."""
        if self._replies.keys().isdisjoint(message_ids):
            self._take_replies(seconds)

    def close(self) -> None:
        """Let the workers end."""
        for one in self._workers.values():
            one.link.close()

    def _take_replies(self, seconds: float | None) -> None:
        """Take what has come; where nothing has, wait so long for it."""
        busy = {one.link: number for number, one in self._workers.items() if one.asked is not None}
        for link in select.select(list(busy), [], [], seconds)[0]:
            self._take_reply(busy[link])

    def _take_reply(self, number: int) -> None:
        one = self._workers[number]
        assert one.asked is not None
        (message_id, message), one.asked = one.asked, None
        try:
            answer, arrays = worker.receive(one.link)
        except (OSError, EOFError):
            self._replies[message_id] = _error(message, ErrorCode.CLIENT_APP_CRASHED, f"worker {number} was killed")
            self._replace(number)
        else:
            if "error" in answer:
                code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
                self._replies[message_id] = _error(message, code, str(answer["error"]))
            else:
                self._replies[message_id] = Message(make_records(str(answer["text"]), arrays), reply_to=message)
        self._send_next(number)

    def _send_next(self, number: int) -> None:
        one = self._workers[number]
        if one.asked is not None or not one.waiting:
            return
        message_id, message = one.waiting.popleft()
        kind = KINDS[message.metadata.message_type]
        # A query for a report has no content.
        text, arrays = read_records(message.content, f"the {kind} message") if len(message.content) else ("", [])
        for last in (False, True):
            try:
                worker.send(self._workers[number].link, {"kind": kind, "text": text}, arrays)
                break
            except OSError:
                # It was lost before this message, which it cannot have begun: the next one gets it.
                self._replace(number)
                if last:
                    self._replies[message_id] = _error(message, ErrorCode.CLIENT_APP_CRASHED, "two workers were killed")
                    self._send_next(number)
                    return
        release(message.content)
        self._workers[number].asked = message_id, message

    def _replace(self, number: int) -> None:
        one = self._workers[number]
        one.link.close()
        one.link = self._nursery.worker(number)
        log(WARNING, "Worker %s was killed: another one takes its place", number)


@contextmanager
def local_grid(workers: int) -> Iterator[LocalGrid]:
    """A grid with that many workers for the time of a `with` block. This process must not have threads yet."""
    with closing(Nursery()) as nursery, closing(LocalGrid(nursery, workers)) as grid:
        yield grid


def scorer_on(grid: LocalGrid, spec: TaskSpec, *, held_out: bool = False) -> Scorer:
    """Scores a model on all workers at once, each on its part of the test set; the bits are those of one process.

    With `held_out` also on both parts of `tasks.scoring.test_part`.

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
