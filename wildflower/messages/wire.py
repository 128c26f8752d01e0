"""Flower records <-> (validated model, packed arrays)."""

from __future__ import annotations

from collections.abc import Sequence

from flwr.app import RecordDict
from pydantic import BaseModel

from wildflower.messages.flower_records import Limits, make_records, read_records
from wildflower.messages.orders import M, parse
from wildflower.tasks.device_data import MAX_CHANNELS, MAX_NAME_LETTERS, MAX_NAMES
from wildflower.tasks.remarks import MAX_EXAMPLE_LETTERS, MAX_REMARKS, MAX_WHAT_LETTERS

# What the JSON text of an honest reply needs at most, with texts of four bytes per letter: for its own fields, for each
# order's outcome and report, for each of an order's classes in its three lists by class, and for a number.
_BASE_BYTES, _ORDER_BYTES, _CLASS_BYTES, _NUMBER_BYTES = 8 * 2**10, 16 * 2**10, 40, 25
_SHARE_BYTES = 300  # two sealed shares as hex and the hashes of both, or less
NODE_REPORT_LIMITS = Limits(_ORDER_BYTES, 0)
DELIVERED_LIMITS = NODE_REPORT_LIMITS
# Of a thousand labels of a hundred letters, which JSON may write in six bytes each, of remarks in as many bytes per
# letter, and of sums of 256 channels, their squares and their centers.
_REMARK_BYTES = 6 * (MAX_WHAT_LETTERS + MAX_EXAMPLE_LETTERS) + 3 * _NUMBER_BYTES
DATA_ANSWER_LIMITS = Limits(
    _BASE_BYTES
    + MAX_NAMES * (6 * MAX_NAME_LETTERS + 4)
    + MAX_REMARKS * _REMARK_BYTES
    + 3 * MAX_CHANNELS * _NUMBER_BYTES,
    0,
)


def reply_limits(orders: int, groups: int, classes: int, tensor_sets: int = 1) -> Limits:
    """Return the limits of a reply to work orders: tensors of each order, and sums of each group."""
    return Limits(_BASE_BYTES + orders * (_ORDER_BYTES + classes * _CLASS_BYTES), (orders + groups) * tensor_sets)


def evaluation_limits(orders: int, sums: int) -> Limits:
    """Return the limits of a reply to evaluation orders, with so many sums of metrics for each."""
    return Limits(_BASE_BYTES + orders * (_ORDER_BYTES + sums * _NUMBER_BYTES), 0)


def key_limits(orders: int, members: int) -> Limits:
    """Return the limits of a reply to steps of secure aggregation, among so many members."""
    return Limits(_BASE_BYTES + orders * (_ORDER_BYTES + members * _SHARE_BYTES), 0)


def to_records(model: BaseModel, arrays: Sequence[bytes] = ()) -> RecordDict:
    """Return the records of one message: the model as JSON, and the packed arrays in order."""
    return make_records(model.model_dump_json(), arrays)


def from_records(model: type[M], records: RecordDict, limits: Limits | None = None) -> tuple[M, list[bytes]]:
    """Read one message. Raises MessageError where it is not one of ours.

    The server gives limits for all that it reads; a node, which trusts its server with all its work, needs none.
    """
    text, arrays = read_records(records, model.__name__, limits)
    return parse(model, text), arrays
