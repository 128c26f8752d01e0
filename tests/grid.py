"""An in-process Flower grid: nodes run the ClientApp in this process, one message after the other, without Ray."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

Handler = Callable[[Message, Context], Message]


class InProcessGrid(Grid):
    """Nodes with the ids 1..n. Each pull answers what was pushed since.

    Faults are set by test code: `silent` nodes never answer; `broken` node -> error code; `tamper` changes a reply;
    `seen` is given the messages that a pull asks for and returns those that are answered. `turn` puts the messages that
    are asked for in the order in which they are answered, one at a time, once each has been asked for in vain.
    """

    def __init__(self, app: Handler, nodes: int, node_config: Callable[[int], dict] | None = None) -> None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1  # a Flower process sets them
        self.app = app
        self.contexts = {
            n: Context(1, n, node_config(n) if node_config else {}, RecordDict(), {}) for n in range(1, nodes + 1)
        }
        self.silent: set[int] = set()
        self.broken: dict[int, int] = {}
        self.tamper: Callable[[Message], Message] = lambda reply: reply
        self.seen: Callable[[list[Message]], list[Message]] = lambda messages: messages
        self.turn: Callable[[list[str]], list[str]] | None = None
        self.duplicate = False
        self.sent: list[Message] = []
        self.waiting: dict[str, Message] = {}
        self._asked: dict[str, int] = {}  # message -> the newest question for it
        self._questions = 0

    def set_run(self, run: object) -> None: ...

    @property
    def run(self) -> object:
        return None

    def create_message(self, *args: object, **kwargs: object) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid.uuid4())
            self.sent.append(message)
            self.waiting[message.metadata.message_id] = message
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = []
        for message in self.seen([self.waiting[i] for i in message_ids if i in self.waiting]):
            node = message.metadata.dst_node_id
            if node in self.silent or not self._is_its_turn(message.metadata.message_id):
                continue
            del self.waiting[message.metadata.message_id]
            if node in self.broken:
                replies.append(Message(Error(self.broken[node], "as the test asked"), reply_to=message))
                continue
            try:
                reply = self.tamper(self.app(message, self.contexts[node]))
            except Exception as error:  # as a SuperNode does
                reply = Message(Error(2, repr(error)), reply_to=message)
            replies += [reply, reply] if self.duplicate else [reply]
        return replies

    def _is_its_turn(self, message_id: str) -> bool:
        if self.turn is None:
            return True
        again = message_id in self._asked
        self._questions += 1
        self._asked[message_id] = self._questions
        # Nobody asks any more for what a deadline has passed over.
        newest = [i for i, asked in self._asked.items() if asked > self._questions - 2 * len(self._asked)]
        if not again or self.turn(newest)[0] != message_id:
            return False
        del self._asked[message_id]
        return True

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))
