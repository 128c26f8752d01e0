"""What an enrolled device may send to hurt: it is refused before it is read, at a cost that does not depend on it."""

import json
import re
import time
import tracemalloc
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict

from tests.grid import InProcessGrid
from tests.small_run import changed_reply, connected_grid, same_bits, simulated_grid
from tests.strategies.test_contract import HARDWARE, LENET, check_refusal, run_rounds
from wildflower.messages.flower_records import STYPE
from wildflower.messages.orders import EvaluationReply, NodeReport, Reply
from wildflower.messages.packing import Layout, MessageError, int64_bytes
from wildflower.messages.wire import NODE_REPORT_LIMITS, evaluation_limits, from_records, to_records
from wildflower.rounds.exchange import Failure, pull
from wildflower.rounds.replies import read_reply

SECONDS, FREE_BYTES = 0.05, 2**20  # what reading a reply may cost, beside twice its own size


@dataclass
class Costs:
    """What reading node 1's replies cost: the best of three, and the peak of memory above what was held before."""

    seconds: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    reply_bytes: list[int] = field(default_factory=list)

    def read(self, *args, **kwargs):
        message = args[3]
        if message.metadata.src_node_id == 1:
            self.measure(message, lambda: read_reply(*args, **kwargs))
        return read_reply(*args, **kwargs)

    def measure(self, message, read):
        took = []
        for _ in range(3):
            started = time.process_time()  # a busy machine takes no part in it
            with suppress(MessageError):
                read()
            took.append(time.process_time() - started)
        self.seconds.append(min(took))
        tracemalloc.start()
        with suppress(MessageError):
            read()
        self.peak_bytes.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        text, packed = message.content["wildflower"]["json"], message.content.get("weights", {})
        self.reply_bytes.append(len(text) + sum(len(array.data) for array in packed.values()))

    def check(self):
        assert self.seconds
        assert max(self.seconds) < SECONDS
        for peak, size in zip(self.peak_bytes, self.reply_bytes, strict=True):
            assert peak <= FREE_BYTES + 2 * size


@pytest.fixture
def costs(monkeypatch):
    found = Costs()
    monkeypatch.setattr("wildflower.rounds.sending.read_reply", found.read)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("dead")


def in_text(make):
    """A tamper that changes the JSON text of a reply."""

    def tamper(message):
        message.content["wildflower"] = ConfigRecord({"json": make(message.content["wildflower"]["json"])})
        return message

    return tamper


def in_report(value):
    """The text of a reply with `value`, itself JSON, in its report: written by hand, as `json` could not."""
    return in_text(lambda text: text.replace('"kind":', f'"more":{value},"kind":', 1))


def with_field(**fields):
    return changed_reply(lambda reply, arrays: reply["updates"][0].update(fields))


def many_arrays(message):
    one, record = Array("uint8", (1,), STYPE, b"a"), ArrayRecord()
    record.__dict__["_data"].update({str(i): one for i in range(10**6)})  # Flower's own way takes half a minute
    message.content["weights"] = record
    return message


def many_records(message):
    one = ConfigRecord({})
    message.content.__dict__["_data"].update({f"record {i}": one for i in range(10**6)})
    return message


# More than 4 MB of text; its first 250 are about as many as the limit lets through.
HUGE_SHAPES = [[f"w{i}", [2**62] * 2, "float32"] for i in range(70_000)]
assert len(json.dumps(HUGE_SHAPES)) > 4 * 10**6
ATTACKS = {
    "huge shapes in a long index": (with_field(index=HUGE_SHAPES), "a text of"),
    "huge shapes in a short index": (with_field(index=HUGE_SHAPES[:250]), "index: Extra inputs are not permitted"),
    "a long text": (with_field(outcome="failed: " + "x" * 10**7), "a text of"),
    "an outcome above its limit": (with_field(outcome="failed: " + "x" * 1001), "outcome: String should have at most"),
    "a list of wrong elements": (with_field(present_classes=[-1] * 5000), "present_classes.0: "),
    "many unknown fields": (with_field(**{f"f{i}": 0 for i in range(2000)}), "2000 fields are wrong or unknown"),
    "an unknown field with a long name": (with_field(**{"\x1b[2J" + "x" * 10**4: 0}), "Extra inputs are not permitted"),
    "many updates": (changed_reply(lambda reply, arrays: reply.update(updates=[{}] * 6000)), "updates.0.order"),
    "deep lists": (in_report("[" * 10**4), "recursion limit"),
    "deep objects": (in_report('{"a":' * 3000), "recursion limit"),
    "nested in a report": (in_report("[" * 100 + "]" * 100), "must be a number below 2^63"),
    "wide in a report": (in_report("[" + "[]," * 6000 + "[]]"), "must be a number below 2^63"),
    "a huge number": (in_report("9" * 10**4), "number out of range"),
    "a large number": (in_report("9" * 4000), "must be a number below 2^63"),
    "a long text in a report": (in_report('"' + "x" * 10**4 + '"'), "must be a number below 2^63"),
    "many keys in a report": (
        with_field(report={f"k{i}": 0 for i in range(1000)}),
        "report: Dictionary should have at most 64 items",
    ),
    "a million arrays": (many_arrays, "1000000 arrays, at most 2 are expected"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("attack", ATTACKS)
def test_whatever_a_reply_holds_it_is_refused_at_once(attack, costs, folder, tmp_path):
    tamper, words = ATTACKS[attack]
    [why] = check_refusal(folder, tmp_path, "heterofl", tamper, on_hardware=True)
    assert why.startswith("refused: ")
    assert words in why
    assert len(why) <= 1020
    assert why.isprintable()
    costs.check()


@pytest.mark.thorough
def test_records_that_nobody_asked_for_are_not_even_gone_through(costs, tmp_path):
    grid = connected_grid(4, tmp_path)
    grid.tamper = lambda message: many_records(message) if message.metadata.message_type == "train" else message
    _, [result] = run_rounds(tmp_path, "heterofl", grid, number=1, **HARDWARE)
    assert {line["outcome"] for line in result.devices} == {"trained"}
    costs.check()


def test_an_honest_reply_costs_no_more_than_a_hostile_one(costs, tmp_path):
    grid = connected_grid(4, tmp_path)
    run_rounds(tmp_path, "heterofl", grid, number=1, **HARDWARE)
    costs.check()


# Sums.


def a_huge_sum(reply, arrays):
    """As a worker of a simulation sends it, of an update that is far beyond any norm bound."""
    layout, update = Layout.of(LENET.tensors(LENET.full())), reply["updates"][0]
    assert len(arrays[0]) == layout.nbytes
    weight = update["examples"]
    header = {"group": 0, "tensor_set": "weights", "orders": [update["order"]], "weight": weight, "payload": 0}
    update["payloads"], reply["sums"] = {}, [header]
    arrays[0] = int64_bytes(torch.full((layout.numel,), 2**28 * weight * 1000))


def in_training(tamper):
    return lambda message: (
        tamper(message) if (message.metadata.message_type, message.metadata.src_node_id) == ("train", 1) else message
    )


def test_a_device_cannot_pass_the_norm_bound_with_a_sum(costs, tmp_path):
    states = []
    for name in ("dead", "hostile"):
        grid = connected_grid(4, tmp_path / f"states-{name}")

        def die(message):
            raise RuntimeError("as the test asked")

        grid.tamper = in_training(die if name == "dead" else changed_reply(a_huge_sum))
        engine, [result] = run_rounds(
            tmp_path / name, "all-large", grid, 1, **HARDWARE | {"aggregation.norm-bound": 0.5}
        )
        states.append(engine.state().tensors)
    assert same_bits(*states)
    assert {line["device"]: line["outcome"] for line in result.devices} == {
        0: "refused: it holds a sum of updates, which only a worker of a simulation sends",
        1: "trained",
        2: "trained",
        3: "trained",
    }
    costs.check()


def test_a_device_cannot_say_that_it_held_itself_to_the_bound(folder, tmp_path):
    [why] = check_refusal(folder, tmp_path, "heterofl", with_field(bounded=True), on_hardware=True)
    assert why == "refused: device 0 says that it held itself to the norm bound, as the server does"


def test_workers_of_a_simulation_send_sums(tmp_path):
    grid, sums = simulated_grid(2), []

    def look(message):
        if message.metadata.message_type == "train":
            sums.extend(from_records(Reply, message.content)[0].sums)
        return message

    grid.tamper = look
    _, [result] = run_rounds(tmp_path, "all-large", grid, number=1)
    assert sums
    assert {line["outcome"] for line in result.devices} == {"trained"}


# Senders.


def as_of(node):
    def tamper(message):
        message.metadata.__dict__["_src_node_id"] = node
        return message

    return tamper


def test_a_reply_in_another_nodes_name_changes_nothing(folder, tmp_path):
    [why] = check_refusal(folder, tmp_path, "heterofl", as_of(2), on_hardware=True)
    assert why == "failed: the reply is of node 2, node 1 was asked"


def test_a_report_in_another_nodes_name_is_not_learned(tmp_path):
    grid = connected_grid(4, tmp_path)
    grid.tamper = lambda message: as_of(3)(message) if message.metadata.src_node_id == 1 else message
    _, [result] = run_rounds(tmp_path, "heterofl", grid, 1, **HARDWARE)
    assert {line["device"] for line in result.devices} == {1, 2, 3}


def test_what_the_superlink_answers_for_a_node_is_told_as_before():
    def offline(message, context):
        return as_of(1)(Message(Error(5, "gone"), reply_to=message))

    grid = InProcessGrid(offline, 3)
    [message_id] = grid.push_messages([Message(RecordDict(), 3, "train")])
    assert list(pull(grid, {message_id: 3})) == [(message_id, Failure("the node is offline: gone"))]


def test_of_a_long_reason_only_the_end_is_told():
    grid = InProcessGrid(lambda message, context: Message(Error(2, "x\n" * 10**6 + "why"), reply_to=message), 1)
    [message_id] = grid.push_messages([Message(RecordDict(), 1, "train")])
    assert list(pull(grid, {message_id: 1})) == [(message_id, Failure("the client raised an exception: why"))]


# Scores and reports.


@pytest.mark.parametrize(
    ("model", "limits", "value", "words"),
    [
        (EvaluationReply, evaluation_limits(1, 1), {"scores": [{"error": "x" * 10**6}]}, "a text of"),
        (EvaluationReply, evaluation_limits(1, 1), {"scores": [{"device": 0, "error": "x" * 1001}]}, "scores.0.error"),
        (EvaluationReply, evaluation_limits(1, 1), {"run": "x" * 1001}, "run: String should have at most"),
        (EvaluationReply, evaluation_limits(1, 1), {"scores": [{}] * 5000}, "scores.0.device"),
        (NodeReport, NODE_REPORT_LIMITS, {"report": {"kind": "x" * 10**6}}, "a text of"),
        (NodeReport, NODE_REPORT_LIMITS, {"report": {"kind": "x" * 1001}}, "must be a number below 2^63"),
        (NodeReport, NODE_REPORT_LIMITS, {"report": {"x" * 1001: 1}}, "String should have at most 64"),
        (NodeReport, NODE_REPORT_LIMITS, {"report": {"kind": 2**63}}, "must be a number below 2^63"),
    ],
)
def test_other_replies_have_limits_too(model, limits, value, words):
    honest = {"run": "r", "round": 1, "scores": []} if model is EvaluationReply else {"device": 0, "report": {}}
    message = Message(RecordDict({"wildflower": ConfigRecord({"json": json.dumps(honest | value)})}), 1, "query")
    with pytest.raises(MessageError, match=words.replace("^", r"\^")):
        from_records(model, message.content, limits)
    costs = Costs()
    costs.measure(message, lambda: from_records(model, message.content, limits))
    costs.check()


def test_a_reply_without_weights_carries_none():
    content = to_records(NodeReport(device=0, report={}), [b"a"])
    with pytest.raises(MessageError, match="NodeReport: 1 arrays, at most 0 are expected"):
        from_records(NodeReport, content, NODE_REPORT_LIMITS)


def of_negative_variances(reply, arrays):
    """All values below 0, which weights may be."""
    arrays[0] = (-np.abs(np.frombuffer(arrays[0], np.float32)) - 1).tobytes()


def test_variances_below_zero_are_refused(tmp_path):
    """A mean with one of them would make every later model answer NaN."""
    grid = connected_grid(4, tmp_path)
    grid.tamper = in_training(changed_reply(of_negative_variances))
    _, [result] = run_rounds(tmp_path / "one", "all-large", grid, 1, **HARDWARE)
    outcomes = {line["device"]: line["outcome"] for line in result.devices}
    assert re.fullmatch(
        r"refused: device 0: tensor '\S+\.running_var' of 'weights' holds variances below 0", outcomes.pop(0)
    )
    assert set(outcomes.values()) == {"trained"}
