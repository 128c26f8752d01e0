"""Flower records <-> (JSON text, packed arrays). The only file that knows how a message of ours looks to Flower.

Imports neither torch nor pydantic: a device starts a new process for every message, which hands it on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from wildflower.devices.validation import shown
from wildflower.messages.error import MessageError

STYPE = "wildflower.packed"  # the serialization type that Flower's Array carries beside our bytes
_TEXT, _ARRAYS = "wildflower", "weights"


@dataclass(frozen=True)
class Limits:
    """The limits of a message: bytes of JSON text, and how many arrays. Whoever sends more is not read."""

    text_bytes: int
    arrays: int


def make_records(text: str, arrays: Sequence[bytes] = ()) -> RecordDict:
    """Return the records of one message: its JSON, and the packed arrays in order."""
    records = RecordDict({_TEXT: ConfigRecord({"json": text})})
    if arrays:
        records[_ARRAYS] = ArrayRecord(
            {str(i): Array(dtype="uint8", shape=(len(data),), stype=STYPE, data=data) for i, data in enumerate(arrays)}
        )
    return records


def read_records(records: RecordDict, what: str, limits: Limits | None = None) -> tuple[str, list[bytes]]:
    """Return the JSON text and the arrays of one message. Raises MessageError, with `what` the message should be.

    Whatever a stranger could make large is counted before anything goes through it.
    """
    # Not `config_records` and `array_records`: these make a new dict of all records whenever they are read.
    record, packed = records.get(_TEXT), records.get(_ARRAYS)
    if not isinstance(record, ConfigRecord):
        raise MessageError(f"{what}: the message has no {_TEXT!r} record")
    text = record.get("json")
    if not isinstance(text, str):
        raise MessageError(f"{what}: expected JSON text, got {type(text).__name__}")
    count = len(packed) if isinstance(packed, ArrayRecord) else 0
    if limits is not None:
        # Letters first: a text that has too many of them is not even encoded.
        nbytes = len(text) if len(text) > limits.text_bytes else len(text.encode(errors="replace"))
        if nbytes > limits.text_bytes:
            raise MessageError(f"{what}: a text of {nbytes} bytes or more, at most {limits.text_bytes} are expected")
        if count > limits.arrays:
            raise MessageError(f"{what}: {count} arrays, at most {limits.arrays} are expected")
    found = dict(packed) if isinstance(packed, ArrayRecord) else {}
    names = [str(i) for i in range(len(found))]
    if set(found) != set(names):
        raise MessageError(f"{what}: arrays are named '0', '1', ... in order, got {shown(sorted(found)[:5])}")
    arrays = [found[name] for name in names]
    for array in arrays:
        if array.stype != STYPE:
            raise MessageError(f"{what}: weights travel as {STYPE!r}, got {shown(array.stype)}")
    return text, [array.data for array in arrays]


def release(records: RecordDict) -> None:
    """Let go of the arrays of a message that has been dealt with.

    A reply of Flower's simulation is part of a reference cycle: its arrays would stay until Python looks for cycles,
    which is seldom, and a server of many devices would hold dozens of replies.
    """
    # The record is taken out and not cleared: Flower's records clear themselves name by name, which takes time with the
    # square of their number.
    records.pop(_ARRAYS, None)
