"""Flower records <-> (JSON, packed arrays). The only file that knows how a message of ours looks to Flower."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from pydantic import BaseModel

from messages.orders import M, parse
from messages.packing import STYPE, MessageError

_TEXT, _ARRAYS = "wildflower", "weights"


def to_records(model: BaseModel, arrays: Sequence[bytes] = ()) -> RecordDict:
    """The records of one message: the model as JSON, and the packed arrays in order."""
    records = RecordDict({_TEXT: ConfigRecord({"json": model.model_dump_json()})})
    if arrays:
        records[_ARRAYS] = ArrayRecord(
            {str(i): Array(dtype="uint8", shape=(len(data),), stype=STYPE, data=data) for i, data in enumerate(arrays)}
        )
    return records


def from_records(model: type[M], records: RecordDict) -> tuple[M, list[bytes]]:
    """Read one message. Raises MessageError where it is not one of ours."""
    text = records.config_records.get(_TEXT)
    if text is None:
        raise MessageError(f"{model.__name__}: the message has no {_TEXT!r} record")
    parsed = parse(model, text.get("json"))
    record = records.array_records.get(_ARRAYS)
    found = dict(record) if record is not None else {}
    names = [str(i) for i in range(len(found))]
    if set(found) != set(names):
        raise MessageError(f"{model.__name__}: arrays are named '0', '1', ... in order, got {sorted(found)[:5]}")
    arrays = [found[name] for name in names]
    for array in arrays:
        if array.stype != STYPE:
            raise MessageError(f"{model.__name__}: weights travel as {STYPE!r}, got {array.stype!r}")
    return parsed, [array.data for array in arrays]


def release(records: RecordDict) -> None:
    """Let go of the arrays of a message that has been dealt with.

    A reply of Flower's simulation is part of a reference cycle: its arrays would stay until Python looks for cycles,
    which is seldom, and a server of many devices would hold dozens of replies.
    """
    for record in records.array_records.values():
        record.clear()


def pick(arrays: Sequence[bytes], index: int, owner: str) -> bytes:
    """The array that a field of the message points to."""
    if index >= len(arrays):
        raise MessageError(f"{owner}: points to array {index}, but the message carries {len(arrays)}")
    return arrays[index]


def int64_bytes(values: torch.Tensor) -> bytes:
    """A flat int64 vector as little-endian bytes."""
    return values.numpy().astype("<i8", copy=False).tobytes()


def int64_vector(data: bytes, numel: int, owner: str) -> torch.Tensor:
    """The vector of `int64_bytes`; MessageError where its length is not `numel`."""
    if len(data) != 8 * numel:
        raise MessageError(f"{owner}: a sum of {numel} values has {8 * numel} bytes, got {len(data)}")
    return torch.from_numpy(np.frombuffer(data, dtype="<i8").astype(np.int64))
