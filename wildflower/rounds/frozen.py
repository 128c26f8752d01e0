"""The frozen part of the global model: every tensor of it travels to a device once, under the hash of its contents.

A device is known to hold the parts that it used last. Where selections change every round, parts are without number: of
those that it used long ago nothing is remembered, and it is sent them again if it ever comes back to them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from wildflower.messages.frozen_parts import Part, name_of, packed_nbytes, packed_part
from wildflower.messages.packing import Layout, pack
from wildflower.messages.tensor_sets import frozen_layout
from wildflower.models.architecture import Architecture
from wildflower.models.family import Family
from wildflower.models.placement import leading
from wildflower.strategies.method import LEADING, Selection

MAX_CACHED_BYTES = 256 * 2**20
MAX_HELD = 8  # parts that are remembered of a device; of more models than these it seldom trains in turn
MAX_NAMED = 256  # parts whose hashes are kept though no device holds them; others are hashed again when asked for


@dataclass(frozen=True)
class Owed:
    """The part that a device is sent of an architecture's frozen part.

    Attributes:
        name: of the part; "" where nothing is frozen.
        places: the tensors that the device lacks, by their place in the part's layout.
        nbytes: what travels; 0 where the device holds the part.
        part: keeps the part in memory until the order is done, and it is known whether the device holds it.
    """

    name: str = ""
    places: tuple[int, ...] = ()
    nbytes: int = 0
    part: Part | None = field(default=None, compare=False, repr=False)


class Frozen:
    """The frozen tensors of a global model, by architecture, and which devices hold which of them.

    weights: all frozen tensors of the global model; they never change.
    held: the parts of whose tensors a device has each, by device and name; those that it used last come last.
    """

    def __init__(self, family: Family, weights: Mapping[str, Tensor]) -> None:
        self.family, self.weights = family, weights
        self.held: dict[int, dict[str, Part]] = {}
        # Parts are there while a device holds them, an order is out for them, or they were asked for lately.
        self._parts: WeakValueDictionary[str, Part] = WeakValueDictionary()
        self._names: dict[tuple[Architecture, Selection], Part] = {}
        self._packed: dict[tuple[str, tuple[int, ...]], bytes] = {}

    def name(self, architecture: Architecture, selection: Selection) -> str:
        """The name of an architecture's frozen part; "" where it has none."""
        part = self._part(architecture, selection)
        return part.name if part else ""

    def _part(self, architecture: Architecture, selection: Selection) -> Part | None:
        layout = frozen_layout(self.family, architecture)
        if not layout.entries:
            return None
        key = _key(architecture, selection)
        part = self._names.pop(key, None)
        if part is None:
            contents = self._contents(architecture, selection, range(len(layout.entries)))
            # Architectures share most of their tensors: one text for each is enough.
            part = Part(tuple(sys.intern(name_of(data)) for _, data in contents))
            part = self._parts.setdefault(part.name, part)
        self._names[key] = part  # the last, because the first is forgotten
        if len(self._names) > MAX_NAMED:
            del self._names[next(iter(self._names))]
        return part

    def _contents(
        self, architecture: Architecture, selection: Selection, places: Iterable[int]
    ) -> Iterator[tuple[int, bytes]]:
        """The bytes of some of an architecture's frozen tensors with their places, one after the other."""
        entries = frozen_layout(self.family, architecture).entries
        placement = self.family.place(architecture, selection.select)
        for place in places:
            tensor = placement.of([entries[place].name]).gather(self.weights)
            yield place, pack(tensor, Layout.of(tensor))

    def owed(self, device: int, architecture: Architecture, selection: Selection) -> Owed:
        """Return what a device still has to be sent before it can train an architecture."""
        part = self._part(architecture, selection)
        if part is None:
            return Owed()
        held = self.held.get(device, {})
        if part.name in held:
            return Owed(part.name, part=part)
        known = {tensor for other in held.values() for tensor in other.tensors}
        # Tensors of equal bytes, such as biases of zeros, are one.
        first = {tensor: place for place, tensor in reversed([*enumerate(part.tensors)])}
        places = tuple(sorted(place for tensor, place in first.items() if tensor not in known))
        return Owed(part.name, places, packed_nbytes(frozen_layout(self.family, architecture), places), part)

    def packed(self, architecture: Architecture, selection: Selection, places: tuple[int, ...]) -> bytes:
        """An architecture's frozen part as it travels with these of its tensors."""
        part = self._part(architecture, selection)
        assert part is not None, "what is packed is owed to a device"
        key = part.name, places
        if key not in self._packed:
            data = packed_part(part, dict(self._contents(architecture, selection, places)))
            if sum(map(len, self._packed.values())) + len(data) > MAX_CACHED_BYTES:
                self._packed.clear()
            self._packed[key] = data
        return self._packed[key]

    def has(self, device: int, name: str) -> None:
        """A device has worked with these: it keeps them. Of many the one that it used least lately is forgotten."""
        part = self._parts.get(name)
        if part is None:  # nothing is frozen, or nobody has asked for it lately: then it is sent again
            return
        held = self.held.setdefault(device, {})
        held.pop(name, None)
        held[name] = part
        if len(held) > MAX_HELD:
            del held[next(iter(held))]

    def lost(self, device: int) -> None:
        """A device did not do its work, maybe because it has them no more: it is sent all of them again."""
        self.held.pop(device, None)

    def state(self) -> dict[str, Any]:
        """Return who holds what, as JSON: parts by device, and of every part its tensors, which are listed once."""
        parts = {name: part for held in self.held.values() for name, part in held.items()}
        parts = dict(sorted(parts.items()))
        tensors = list(dict.fromkeys(tensor for part in parts.values() for tensor in part.tensors))
        numbers = {tensor: number for number, tensor in enumerate(tensors)}
        return {
            # In the order of their use, so that a run that resumes forgets the same ones.
            "held": {str(device): list(held) for device, held in sorted(self.held.items())},
            "parts": {name: [numbers[tensor] for tensor in part.tensors] for name, part in parts.items()},
            "tensors": tensors,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore `state`."""
        tensors = [sys.intern(tensor) for tensor in state["tensors"]]
        parts = {name: Part(tuple(tensors[n] for n in numbers)) for name, numbers in state["parts"].items()}
        # A part that has been asked for already is one with what is read.
        parts = {name: self._parts.setdefault(name, part) for name, part in parts.items()}
        self.held = {
            int(device): {name: parts[name] for name in names[-MAX_HELD:]} for device, names in state["held"].items()
        }


def _key(architecture: Architecture, selection: Selection) -> tuple[Architecture, Selection]:
    """One key for all selections of the leading channels, such as those that make each device a group of its own."""
    return architecture, LEADING if selection.select is leading else selection
