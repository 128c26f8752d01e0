from collections import deque

import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict

from tests.grid import InProcessGrid
from tests.small_run import FakeTime
from wildflower.rounds.exchange import Failure, exchange, failure_of


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    fake = FakeTime()
    monkeypatch.setattr("wildflower.rounds.exchange.time", fake)
    return fake


def echo(message, context):
    return Message(message.content, reply_to=message)


def make(node: int, batch: str) -> Message:
    return Message(RecordDict({"batch": ConfigRecord({"name": batch})}), node, "train")


def name_of(message: Message) -> str:
    return str(message.content.config_records["batch"]["name"])


def run(grid, queues, *, deadline=None, busy=None):
    return exchange(
        grid,
        {node: deque(batches) for node, batches in queues.items()},
        make,
        deadline_seconds=deadline,
        busy=set() if busy is None else busy,
        poll_seconds=0.5,
    )


def test_every_batch_comes_back_with_its_own_reply():
    grid = InProcessGrid(echo, 3)
    pairs = list(run(grid, {1: "ab", 2: "c", 3: "def"}))
    assert sorted(batch for batch, _ in pairs) == list("abcdef")
    assert all(name_of(reply) == batch for batch, reply in pairs)


def test_a_nodes_next_batch_is_made_only_when_it_has_answered_the_one_before():
    grid = InProcessGrid(echo, 2)
    grid.silent = {2}
    made: list[str] = []

    def noting(node, batch):
        made.append(batch)
        return make(node, batch)

    pairs = exchange(
        grid,
        {1: deque("abc"), 2: deque("xy")},
        noting,
        deadline_seconds=None,
        busy=set(),
        poll_seconds=0.5,
    )
    assert made == []
    assert next(pairs)[0] == "a"
    assert made == ["a", "x"]
    assert [next(pairs)[0], next(pairs)[0]] == ["b", "c"]
    assert made == ["a", "x", "b", "c"]  # node 2 has not answered x
    grid.silent = set()
    assert [next(pairs)[0], next(pairs)[0]] == ["x", "y"]
    assert made == ["a", "x", "b", "c", "y"]
    assert next(pairs, None) is None


def test_a_node_that_never_answers_is_late_at_the_deadline_and_busy_after(clock):
    grid = InProcessGrid(echo, 2)
    grid.silent = {2}
    busy: set[int] = set()
    pairs = list(run(grid, {1: "a", 2: "xyz"}, deadline=2.0, busy=busy))
    assert pairs[0][0] == "a"
    assert [batch for batch, _ in pairs[1:]] == ["x", "y", "z"]
    assert all(failure == Failure("no reply within the deadline of 2 s", late=True) for _, failure in pairs[1:])
    assert busy == {2}
    assert sum(clock.slept) == pytest.approx(2.0, abs=0.6)


def test_what_arrives_with_the_deadline_still_counts(clock):
    grid = InProcessGrid(echo, 1)
    grid.silent = {1}
    pairs = run(grid, {1: "a"}, deadline=1.0)

    def speak(messages):
        if clock.now >= 1001.0:
            grid.silent = set()
        return messages

    grid.seen = speak
    [(batch, reply)] = list(pairs)
    assert (batch, name_of(reply)) == ("a", "a")


def test_a_caller_that_has_enough_leaves_the_rest_busy(clock):
    grid = InProcessGrid(echo, 3)
    grid.silent = {3}
    busy: set[int] = set()
    pairs = run(grid, {1: "a", 2: "b", 3: "c"}, busy=busy)
    next(pairs)
    next(pairs)
    pairs.close()
    assert busy == {3}
    assert clock.slept == []


def test_replies_are_taken_in_any_order():
    grid = InProcessGrid(echo, 3)
    grid.turn = lambda messages: messages[::-1]
    assert [batch for batch, _ in run(grid, {1: "a", 2: "b", 3: "c"})] == ["c", "b", "a"]


def test_a_duplicate_reply_is_read_once():
    grid = InProcessGrid(echo, 2)
    grid.duplicate = True
    assert sorted(batch for batch, _ in run(grid, {1: "ab", 2: "c"})) == ["a", "b", "c"]


def test_a_reply_that_cannot_be_read_costs_its_node_only():
    grid = InProcessGrid(echo, 3)

    def garbage(messages):
        if messages[0].metadata.dst_node_id == 2:
            grid.waiting.pop(messages[0].metadata.message_id)  # Flower gives a reply once
            raise KeyError("a child that was never sent")
        return messages

    grid.seen = garbage
    found = dict(run(grid, {1: "ab", 2: "c", 3: "d"}))
    assert found["c"] == Failure("the reply cannot be read: KeyError: 'a child that was never sent'")
    assert sorted(name_of(reply) for batch, reply in found.items() if batch != "c") == ["a", "b", "d"]


def test_a_superlink_that_is_gone_is_no_nodes_fault():
    grid = InProcessGrid(echo, 2)

    def gone(*_):
        raise ConnectionError("no SuperLink")

    grid.seen = grid.get_node_ids = gone
    with pytest.raises(ConnectionError, match="no SuperLink"):
        list(run(grid, {1: "a", 2: "b"}))


def test_a_message_that_flower_does_not_take_fails_and_the_next_is_tried():
    grid = InProcessGrid(echo, 2)
    push = grid.push_messages

    def refusing(messages):
        return ["" if name_of(m) in "ax" else next(iter(push([m]))) for m in messages]

    grid.push_messages = refusing
    pairs = dict(run(grid, {1: "ab", 2: "x"}))
    assert pairs["a"] == pairs["x"] == Failure("Flower did not take the message for this node")
    assert name_of(pairs["b"]) == "b"


@pytest.mark.parametrize(
    ("code", "words", "late"),
    [
        (2, "the client raised an exception", False),
        (3, "no reply before the deadline", True),
        (5, "the node is offline", False),
        (8, "the client process died", False),
        (99, "Flower error 99", False),
    ],
)
def test_error_replies_are_understood(code, words, late):
    grid = InProcessGrid(echo, 1)
    grid.broken = {1: code}
    [(_, failure)] = run(grid, {1: "a"})
    assert failure == Failure(f"{words}: as the test asked", late, died=code == 8)


def test_only_the_last_line_of_a_traceback_is_told():
    message = make(1, "a")
    message.metadata.__dict__["_message_id"] = "m"
    reply = Message(Error(2, "Traceback ...\n  File ...\nValueError: no data\n"), reply_to=message)
    assert failure_of(reply) == Failure("the client raised an exception: ValueError: no data")
    assert failure_of(Message(Error(5, ""), reply_to=message)) == Failure("the node is offline")
    assert failure_of(message) is None


def dies_over(batches: set[str], deaths: list[str]):
    """A node's app whose process dies over batches that hold one of these, after which another takes its place."""

    def handle(message, context):
        if batches & set(name_of(message)):
            deaths.append(name_of(message))
            return Message(Error(8, "killed"), reply_to=message)
        return echo(message, context)

    return handle


def done_again(grid, batches, *, parts=list, busy=None):
    return list(
        exchange(
            grid,
            {1: deque(batches)},
            make,
            deadline_seconds=None,
            busy=set() if busy is None else busy,
            poll_seconds=0.5,
            parts=parts,
        )
    )


def test_a_batch_whose_process_has_died_is_done_again_in_parts_of_which_only_the_deadly_one_fails():
    deaths: list[str] = []
    pairs = done_again(InProcessGrid(dies_over({"b", "e"}, deaths), 1), ["abc", "de", "f"])
    failed = {batch: reply for batch, reply in pairs if isinstance(reply, Failure)}
    assert [batch for batch, _ in pairs] == ["a", "b", "c", "d", "e", "f"]
    why = "the client process died: killed, for the second time over this work"
    assert failed == {"b": Failure(why, died=True), "e": Failure(why, died=True)}
    assert deaths == ["abc", "b", "de", "e"]


def test_where_nothing_may_be_done_again_a_death_is_the_failure_of_its_batch():
    [(batch, failure)] = done_again(InProcessGrid(dies_over({"b"}, []), 1), ["abc"], parts=None)
    assert (batch, failure) == ("abc", Failure("the client process died: killed", died=True))


def test_a_failure_of_another_kind_is_not_done_again():
    grid = InProcessGrid(echo, 1)
    grid.broken = {1: 2}
    assert [batch for batch, _ in done_again(grid, ["abc"])] == ["abc"]
    assert len(grid.sent) == 1


def test_what_is_to_be_done_again_is_late_too_at_the_deadline(clock):
    grid = InProcessGrid(dies_over({"a"}, []), 1)
    grid.turn = lambda messages: messages  # answered one at a time, each once it was asked for in vain
    pairs = exchange(
        grid, {1: deque(["ab", "c"])}, make, deadline_seconds=1.0, busy=set(), poll_seconds=1.0, parts=list
    )
    assert [(batch, reply.late) for batch, reply in pairs] == [("a", True), ("b", True), ("c", True)]
