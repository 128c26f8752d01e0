"""What is frozen of the global model: every tensor of it travels to a device once, under the hash of its contents."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from messages.frozen import Part, name_of, packed_nbytes, packed_part
from messages.packing import Layout, pack
from messages.parcels import frozen_layout
from models.architecture import Architecture
from models.family import Family
from models.placement import leading
from strategies.method import LEADING, Selection

MAX_CACHED_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Owed:
    """What a device is sent of an architecture's frozen part.

    Attributes:
        name: of the part; "" where nothing is frozen.
        places: the tensors that the device lacks, by their place in the part's layout.
        nbytes: what travels; 0 where the device holds the part.
    """

    name: str = ""
    places: tuple[int, ...] = ()
    nbytes: int = 0


class Frozen:
    """The frozen tensors of a global model, by architecture, and which devices hold which of them.

    weights: all frozen tensors of the global model; they never change.
    """

    def __init__(self, family: Family, weights: Mapping[str, Tensor]) -> None:
        self.family, self.weights = family, weights
        self.held: dict[int, set[str]] = {}  # device -> names of parts, of whose tensors it has each
        self._parts: dict[str, Part] = {}
        self._names: dict[tuple[Architecture, Selection], str] = {}
        self._packed: dict[tuple[str, tuple[int, ...]], bytes] = {}

    def name(self, architecture: Architecture, selection: Selection) -> str:
        """The name of an architecture's frozen part; "" where it has none."""
        layout = frozen_layout(self.family, architecture)
        if not layout.entries:
            return ""
        key = _key(architecture, selection)
        if key not in self._names:
            contents = self._contents(architecture, selection, range(len(layout.entries)))
            # Architectures share most of their tensors: one text for each is enough.
            part = Part(tuple(sys.intern(name_of(data)) for _, data in contents))
            self._names[key] = part.name
            self._parts[part.name] = part
        return self._names[key]

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
        """What a device still has to be sent before it can train an architecture."""
        name = self.name(architecture, selection)
        held = self.held.get(device, set())
        if not name or name in held:
            return Owed(name)
        known = {tensor for part in held for tensor in self._parts[part].tensors}
        # Tensors of equal bytes, such as biases of zeros, are one.
        first = {tensor: place for place, tensor in reversed([*enumerate(self._parts[name].tensors)])}
        places = tuple(sorted(place for tensor, place in first.items() if tensor not in known))
        return Owed(name, places, packed_nbytes(frozen_layout(self.family, architecture), places))

    def packed(self, architecture: Architecture, selection: Selection, places: tuple[int, ...]) -> bytes:
        """An architecture's frozen part as it travels with these of its tensors."""
        name = self.name(architecture, selection)
        if (name, places) not in self._packed:
            data = packed_part(self._parts[name], dict(self._contents(architecture, selection, places)))
            if sum(map(len, self._packed.values())) + len(data) > MAX_CACHED_BYTES:
                self._packed.clear()
            self._packed[name, places] = data
        return self._packed[name, places]

    def has(self, device: int, name: str) -> None:
        """A device has worked with these: it keeps them."""
        if name:
            self.held.setdefault(device, set()).add(name)

    def lost(self, device: int) -> None:
        """A device did not do its work, maybe because it has them no more: it is sent all of them again."""
        self.held.pop(device, None)

    def state(self) -> dict[str, Any]:
        """Who holds what, as JSON: parts by device, and of every part its tensors, which are listed once."""
        parts = sorted(set().union(*self.held.values()))
        tensors = list(dict.fromkeys(tensor for part in parts for tensor in self._parts[part].tensors))
        numbers = {tensor: number for number, tensor in enumerate(tensors)}
        return {
            "held": {str(device): sorted(names) for device, names in sorted(self.held.items())},
            "parts": {part: [numbers[tensor] for tensor in self._parts[part].tensors] for part in parts},
            "tensors": tensors,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore `state`. Checkpoints of earlier versions name no tensors: devices are sent what is frozen again."""
        if "parts" not in state:
            return
        tensors = state["tensors"]
        self._parts |= {part: Part(tuple(tensors[n] for n in numbers)) for part, numbers in state["parts"].items()}
        self.held = {int(device): set(names) for device, names in state["held"].items()}


def _key(architecture: Architecture, selection: Selection) -> tuple[Architecture, Selection]:
    """One key for all selections of the leading channels, such as those that make each device a group of its own."""
    return architecture, LEADING if selection.select is leading else selection
