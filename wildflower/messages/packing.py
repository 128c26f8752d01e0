"""Packed weights: the bytes of all tensors of a model in one array.

Flower's cost of a message follows the number of tensors, not their bytes, so a model travels as one array. Both sides
derive the layout of that array from the architecture, and only a digest of the layout travels with it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from wildflower.messages.error import MessageError


class HasShape(Protocol):
    """A tensor, or a description of one."""

    @property
    def shape(self) -> Sequence[int]:
        """Sizes of the dimensions."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the elements."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a packed model: its name, shape, dtype and the byte where it starts."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset_bytes: int

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensor."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """The places of a model's tensors in its packed array."""

    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, tensors: Mapping[str, HasShape]) -> Layout:
        """Return the layout of a state dict, or of a description of one, in its own order.

        A tensor starts at a multiple of its item size, because a view of another dtype has to be aligned.
        """
        entries: list[Entry] = []
        end = 0
        for name, tensor in tensors.items():
            item = tensor.dtype.itemsize
            start = -(-end // item) * item
            entries.append(Entry(name, tuple(tensor.shape), tensor.dtype, start))
            end = start + entries[-1].nbytes
        return cls(tuple(entries))

    @cached_property
    def nbytes(self) -> int:
        """Return the bytes of the packed array."""
        return self.entries[-1].offset_bytes + self.entries[-1].nbytes if self.entries else 0

    @cached_property
    def numel(self) -> int:
        """Elements of all tensors together."""
        return sum(entry.numel for entry in self.entries)

    @cached_property
    def digest(self) -> str:
        """Eight bytes, as hex, that tell two layouts apart."""
        return hashlib.sha256(json.dumps(self.to_json()).encode()).hexdigest()[:16]

    def to_json(self) -> list[list[Any]]:
        """`[[name, shape, dtype], ...]`, of which the digest is made."""
        return [[e.name, list(e.shape), str(e.dtype).removeprefix("torch.")] for e in self.entries]

    def difference(self, other: Layout) -> str:
        """Return what `other` has otherwise than this layout, in words; empty where they are equal."""
        mine = {e.name: e for e in self.entries}
        theirs = {e.name: e for e in other.entries}
        found = [f"missing tensor {name!r}" for name in mine if name not in theirs]
        found += [f"extra tensor {name!r}" for name in theirs if name not in mine]
        for name in mine.keys() & theirs.keys():
            if mine[name].shape != theirs[name].shape:
                found.append(
                    f"tensor {name!r} has shape {list(theirs[name].shape)} instead of {list(mine[name].shape)}"
                )
            elif mine[name].dtype != theirs[name].dtype:
                found.append(f"tensor {name!r} has dtype {theirs[name].dtype} instead of {mine[name].dtype}")
        if not found and [e.name for e in self.entries] != [e.name for e in other.entries]:
            found.append("the tensors come in another order")
        shown = "; ".join(sorted(found)[:5])
        return shown + (f"; and {len(found) - 5} more" if len(found) > 5 else "")


def pack(state: Mapping[str, Tensor], layout: Layout) -> bytes:
    """Return the packed bytes of `state`, whose tensors must be those of `layout` (MessageError otherwise)."""
    if difference := layout.difference(Layout.of(state)):
        raise MessageError(f"cannot pack weights: {difference}")
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for entry in layout.entries:
        _view(buffer, entry).copy_(state[entry.name].detach())
    return buffer.numpy().tobytes()


def unpack(data: bytes, layout: Layout) -> dict[str, Tensor]:
    """Return the tensors of packed bytes, as views of one new buffer (MessageError where the length is wrong)."""
    if len(data) != layout.nbytes:
        raise MessageError(f"packed weights have {len(data)} bytes instead of {layout.nbytes}")
    if not data:
        return {entry.name: torch.empty(entry.shape, dtype=entry.dtype) for entry in layout.entries}
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return {entry.name: _view(buffer, entry) for entry in layout.entries}


def _view(buffer: Tensor, entry: Entry) -> Tensor:
    flat = buffer[entry.offset_bytes : entry.offset_bytes + entry.nbytes].view(entry.dtype)
    return flat.view(entry.shape)


def pick(arrays: Sequence[bytes], index: int, owner: str) -> bytes:
    """Return the array that a field of the message points to."""
    if index >= len(arrays):
        raise MessageError(f"{owner}: points to array {index}, but the message carries {len(arrays)}")
    return arrays[index]


def int64_bytes(values: Tensor) -> bytes:
    """Return a flat int64 vector as little-endian bytes."""
    return values.numpy().astype("<i8", copy=False).tobytes()


def int64_vector(data: bytes, numel: int, owner: str) -> Tensor:
    """Return the vector of `int64_bytes`; MessageError where its length is not `numel`."""
    if len(data) != 8 * numel:
        raise MessageError(f"{owner}: a sum of {numel} values has {8 * numel} bytes, got {len(data)}")
    return torch.from_numpy(np.frombuffer(data, dtype="<i8").astype(np.int64))
