"""The traffic of a round: messages out in waves, replies in one by one, nothing held that has been dealt with."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from flwr.app import Message
from flwr.serverapp import Grid

from wildflower.devices.validation import MAX_LETTERS, one_line
from wildflower.messages.flower_records import release
from wildflower.plugins.flower_log import log

B = TypeVar("B")
T = TypeVar("T")
MAX_WAIT_SECONDS = 1.0
DIED = 8  # Flower's code of a message whose process has died

# Flower's error codes (flwr.common.constant.ErrorCode), in words for the journal.
_ERRORS = {
    1: "the client's app could not be loaded",
    2: "the client raised an exception",
    3: "no reply before the deadline",
    5: "the node is offline",
    DIED: "the client process died",
}


class WaitingGrid(Grid):
    """A grid that knows when a reply comes, so that nobody has to look for it again and again."""

    @abstractmethod
    def wait(self, message_ids: Collection[str], seconds: float) -> None:
        """Until a reply to one of these messages has come, but not longer than this."""


@dataclass(frozen=True)
class Failure:
    """Why a message has no usable reply.

    late: it may only have come too late. died: the process that worked on it is gone.
    """

    why: str
    late: bool = False
    died: bool = False


def failure_of(reply: Message) -> Failure | None:
    """The failure that an error reply stands for; None for a reply with content."""
    if not reply.has_error():
        return None
    why = _ERRORS.get(reply.error.code, f"Flower error {reply.error.code}")
    # The reason may be as long as its sender likes: only its end is looked at.
    lines = (reply.error.reason or "")[-MAX_LETTERS:].strip().splitlines()
    code = reply.error.code
    return Failure(one_line(f"{why}: {lines[-1]}") if lines else why, late=code == 3, died=code == DIED)


def stranger(reply: Message, node: int) -> Failure | None:
    """The failure of a reply that another node sent than the one that was asked."""
    sender = reply.metadata.src_node_id
    return None if sender == node else Failure(f"the reply is of node {sender}, node {node} was asked")


def pull(grid: Grid, asked: Mapping[str, int]) -> Iterator[tuple[str, Message | Failure]]:
    """Yield the replies that have come, each with the message that it answers; a Failure where one may not be read.

    `asked` says which node each message was sent to: what another node answers to it is a Failure. Error replies are
    not held to that, because the SuperLink makes some itself, in its own name.

    They are fetched one by one: a node of the federation can send what Flower cannot make a message of, which must cost
    neither the run nor the others' replies that would have come with it.

    Raises:
        What Flower raises where the SuperLink cannot be reached or has ended the run.
    """
    for message_id, node in asked.items():
        try:
            replies = list(grid.pull_messages([message_id]))
        except Exception as error:  # of many kinds, by what is wrong with the reply
            grid.get_node_ids()  # fails likewise where it is not the reply's fault
            yield message_id, Failure(one_line(f"the reply cannot be read: {type(error).__name__}: {error}"))
            continue
        # Flower may deliver a reply twice.
        yield from ((message_id, failure_of(reply) or stranger(reply, node) or reply) for reply in replies[:1])


def each_by_itself(batch: list[T]) -> list[list[T]]:
    """The parts of a batch of which each order can be done without the others."""
    return [[order] for order in batch]


def exchange(
    grid: Grid,
    queues: Mapping[int, deque[B]],
    make: Callable[[int, B], Message],
    *,
    deadline_seconds: float | None,
    busy: set[int],
    poll_seconds: float,
    parts: Callable[[B], list[B]] | None = None,
) -> Generator[tuple[B, Message | Failure], None, None]:
    """Send every node its batches one after the other, and yield each batch with its reply or its failure.

    A node's next batch is made and sent only when it has answered the one before, so that neither side holds a whole
    round. Flower cannot cancel: nodes that still work when the deadline passes, or when the caller stops iterating,
    are added to `busy`, and their late replies are never read.

    Args:
        queues: node -> its batches in order; emptied here.
        make: builds the message of a batch (called just before it is sent).
        deadline_seconds: for the whole exchange; None waits for ever.
        parts: what a batch can be parted into. A batch whose process has died is done again in these parts, so that
            only the part over which a process dies once more fails. None: nothing is done again.
    """
    open_batches: dict[str, tuple[int, B, bool]] = {}  # message -> its node, its batch, and whether it is done again
    again: defaultdict[int, deque[B]] = defaultdict(deque)  # node -> what is done again, before what it has not begun
    end = None if deadline_seconds is None else time.monotonic() + deadline_seconds

    def push(node: int) -> B | None:
        """Send a node's next batch; the batch itself where Flower does not take the message."""
        redone = bool(again[node])
        batch = (again if redone else queues)[node].popleft()
        message_ids = [i for i in grid.push_messages([make(node, batch)]) if i]
        if not message_ids:
            return batch
        open_batches[message_ids[0]] = node, batch, redone
        return None

    waiting_since = time.monotonic()
    try:
        todo = [node for node, queue in queues.items() if queue]
        while True:
            for node in todo:
                while (again[node] or queues[node]) and (refused := push(node)) is not None:
                    yield refused, Failure("Flower did not take the message for this node")
            todo = []
            if not open_batches:
                return
            asked_at = time.monotonic()
            asking_seconds = 0.0
            for message_id, reply in pull(grid, {i: node for i, (node, *_) in open_batches.items()}):
                asking_seconds += time.monotonic() - asked_at
                node, batch, redone = open_batches.pop(message_id)
                todo.append(node)
                if isinstance(reply, Failure) and reply.died and not redone and parts is not None:
                    again[node] += parts(batch)
                    log.info("What node %s had to do is done again, in %s messages", node, len(again[node]))
                elif isinstance(reply, Failure) and reply.died and redone:
                    yield batch, replace(reply, why=one_line(f"{reply.why}, for the second time over this work"))
                else:
                    yield batch, reply
                if isinstance(reply, Message) and reply.has_content():
                    release(reply.content)
                asked_at = time.monotonic()
            asking_seconds += time.monotonic() - asked_at
            if end is not None and time.monotonic() >= end:
                break
            if todo:
                waiting_since = time.monotonic()
            elif isinstance(grid, WaitingGrid):
                left_seconds = MAX_WAIT_SECONDS if end is None else max(0.0, end - time.monotonic())
                grid.wait(open_batches.keys(), min(MAX_WAIT_SECONDS, left_seconds))
            else:
                # The longer the work, the less often it is looked for: that adds 2 % to the wait at most. To look after
                # many nodes takes long: for most of the time the SuperLink is left to them.
                waited_seconds = time.monotonic() - waiting_since
                pause = max(min(max(poll_seconds, waited_seconds / 50), 10 * poll_seconds), 4 * asking_seconds)
                time.sleep(pause if end is None else max(0.0, min(pause, end - time.monotonic())))
        left = [*again.values(), *queues.values()]
        late = [batch for _, batch, _ in open_batches.values()] + [batch for queue in left for batch in queue]
        busy.update(node for node, *_ in open_batches.values())
        open_batches.clear()
        for batch in late:
            yield batch, Failure(f"no reply within the deadline of {deadline_seconds:g} s", late=True)
    finally:
        busy.update(node for node, *_ in open_batches.values())
