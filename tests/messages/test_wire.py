import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.supercore.task_identity import TaskIdentity

from wildflower.messages.flower_records import STYPE
from wildflower.messages.orders import NodeReport, Reply, Update
from wildflower.messages.packing import MessageError, int64_bytes, int64_vector, pick
from wildflower.messages.wire import from_records, to_records

REPLY = Reply(run="a run", round=2, updates=[Update(order=0, device=3, outcome="trained", payloads={"weights": 1})])


def test_a_message_comes_back_through_flowers_own_bytes():
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    arrays = [bytes(range(256)), b"", b"\x00\xff"]
    message = Message(to_records(REPLY, arrays), 7, "train")
    back = message_from_proto(message_to_proto(message))
    assert from_records(Reply, back.content) == (REPLY, arrays)


def test_a_message_without_arrays_comes_back():
    assert from_records(Reply, to_records(REPLY)) == (REPLY, [])


def test_more_than_ten_arrays_keep_their_order():
    arrays = [bytes([i]) for i in range(12)]
    assert from_records(Reply, to_records(REPLY, arrays))[1] == arrays


def records(json: object, arrays: dict[str, Array] | None = None) -> RecordDict:
    content = RecordDict({"wildflower": ConfigRecord({"json": json})})
    if arrays is not None:
        content["weights"] = ArrayRecord(arrays)
    return content


def packed(stype: str = STYPE) -> Array:
    return Array(dtype="uint8", shape=(2,), stype=stype, data=b"ab")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (RecordDict(), "no 'wildflower' record"),
        (RecordDict({"wildflower": MetricRecord({"json": 1})}), "no 'wildflower' record"),
        (RecordDict({"wildflower": ConfigRecord({"text": "{}"})}), "expected JSON text, got NoneType"),
        (records(b"{}"), "expected JSON text, got bytes"),
        (records("not json"), "Invalid JSON"),
        (records(NodeReport(device=1, report={}).model_dump_json()), "run: Field required"),
        (records(REPLY.model_dump_json(), {"0": packed("numpy.ndarray")}), "travel as 'wildflower.packed'"),
        (records(REPLY.model_dump_json(), {"conv1.weight": packed()}), r"got \['conv1.weight'\]"),
        (records(REPLY.model_dump_json(), {"1": packed(), "2": packed()}), r"got \['1', '2'\]"),
    ],
)
def test_foreign_records_are_refused(content, words):
    with pytest.raises(MessageError, match=words):
        from_records(Reply, content)


def test_a_payload_that_points_nowhere_is_refused():
    assert pick([b"a", b"b"], 1, "device 3") == b"b"
    with pytest.raises(MessageError, match="device 3: points to array 2, but the message carries 2"):
        pick([b"a", b"b"], 2, "device 3")


def test_whole_numbers_travel_as_little_endian_bytes():
    values = torch.tensor([1, -2, 2**62, -(2**63)])
    data = int64_bytes(values)
    assert data[:16].hex() == "0100000000000000" + "feffffffffffffff"
    back = int64_vector(data, 4, "a sum")
    assert torch.equal(back, values)
    back += 1  # its own memory, not the message's
    assert int64_bytes(values) == data


@pytest.mark.parametrize("numel", [3, 5])
def test_a_sum_of_another_length_is_refused(numel):
    with pytest.raises(MessageError, match=f"a sum: a sum of {numel} values has {8 * numel} bytes, got 32"):
        int64_vector(bytes(32), numel, "a sum")
