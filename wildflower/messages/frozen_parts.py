"""The frozen part of a sub-model, as it travels: the digests of all its tensors, and those tensors that a device lacks.

A sub-model's frozen part is named by the hash of its list of digests. Tensors are known by themselves, so that a device
that holds them of one sub-model is sent none of them again for another one that is a cut of it, or shares layers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from wildflower.messages.error import MessageError
from wildflower.messages.packing import Layout
from wildflower.messages.tensor_sets import frozen_layout
from wildflower.models.architecture import Architecture
from wildflower.models.family import Family

DIGEST_BYTES = 32
# Beside the tensors that are sent, every tensor of the part takes its digest and a byte that says whether it is sent.
BYTES_PER_TENSOR = DIGEST_BYTES + 1


def frozen_nbytes(family: Family, architecture: Architecture) -> int:
    """Return the most bytes that the frozen part of a sub-model takes: those for a device that has nothing of it."""
    layout = frozen_layout(family, architecture)
    return layout.nbytes + BYTES_PER_TENSOR * len(layout.entries)


def name_of(data: bytes | memoryview) -> str:
    """Return what bytes are known by: their SHA-256, as hex."""
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Part:
    """The frozen part of a sub-model: the names of its tensors' bytes, in the order of its layout."""

    tensors: tuple[str, ...]

    @property
    def listed(self) -> bytes:
        """Return the list of digests as bytes."""
        return b"".join(map(bytes.fromhex, self.tensors))

    @cached_property
    def name(self) -> str:
        """Return the hash of the list."""
        return name_of(self.listed)

    @classmethod
    def read(cls, listed: bytes, layout: Layout) -> Part:
        """Return the part of a list of digests; MessageError where it is not of as many tensors as the layout."""
        if len(listed) != DIGEST_BYTES * len(layout.entries):
            raise MessageError(f"a list of {len(layout.entries)} frozen tensors has {len(listed)} bytes")
        return cls(tuple(listed[at : at + DIGEST_BYTES].hex() for at in range(0, len(listed), DIGEST_BYTES)))


def packed_part(part: Part, contents: Mapping[int, bytes]) -> bytes:
    """Return a part as it travels, with the bytes of some of its tensors by their place in it."""
    flags = bytes(place in contents for place in range(len(part.tensors)))
    return b"".join((part.listed, flags, *(contents[place] for place in sorted(contents))))


def packed_nbytes(layout: Layout, places: Sequence[int]) -> int:
    """Return the bytes of `packed_part` with the tensors of these places."""
    return BYTES_PER_TENSOR * len(layout.entries) + sum(layout.entries[place].nbytes for place in places)


def read_part(data: bytes, name: str, layout: Layout) -> tuple[Part, dict[str, memoryview]]:
    """Return the part of this name and layout that a message brought, and the bytes of its tensors by their names.

    They are views: a frozen part may be most of a model, and a small device holds the message already.

    MessageError where lengths are wrong, or where a hash is not that of what came.
    """
    count = len(layout.entries)
    if len(data) < BYTES_PER_TENSOR * count:
        raise MessageError(f"what is frozen of the model came in {len(data)} bytes, too few for {count} tensors")
    part = Part.read(data[: DIGEST_BYTES * count], layout)
    flags = data[DIGEST_BYTES * count : BYTES_PER_TENSOR * count]
    places = [place for place, flag in enumerate(flags) if flag]
    if max(flags, default=0) > 1 or len(data) != packed_nbytes(layout, places):
        raise MessageError("what is frozen of the model came with other tensors than it says")
    if part.name != name:
        raise MessageError("what is frozen of the model came with a hash that is not its own")
    contents: dict[str, memoryview] = {}
    start = BYTES_PER_TENSOR * count
    for place in places:
        end = start + layout.entries[place].nbytes
        content = memoryview(data)[start:end]
        if name_of(content) != part.tensors[place]:
            raise MessageError(f"{layout.entries[place].name}, which is frozen, came with a hash that is not its own")
        contents[part.tensors[place]] = content
        start = end
    return part, contents
