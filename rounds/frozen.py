"""What is frozen of the global model: it travels to a device once, under the hash of its contents."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch import Tensor

from messages.packing import pack
from messages.parcels import frozen_layout
from models.architecture import Architecture
from models.family import Family
from models.placement import leading
from strategies.method import LEADING, Selection

MAX_CACHED_BYTES = 256 * 2**20


class Frozen:
    """The frozen tensors of a global model, by architecture, and which devices hold which of them.

    weights: all frozen tensors of the global model; they never change.
    """

    def __init__(self, family: Family, weights: Mapping[str, Tensor]) -> None:
        self.family, self.weights = family, weights
        self.held: dict[int, set[str]] = {}
        self._names: dict[tuple[Architecture, Selection], str] = {}
        self._packed: dict[str, bytes] = {}

    def name(self, architecture: Architecture, selection: Selection) -> str:
        """The hash of an architecture's frozen tensors; "" where it has none."""
        if not frozen_layout(self.family, architecture).entries:
            return ""
        key = _key(architecture, selection)
        if key not in self._names:
            self.packed(architecture, selection)
        return self._names[key]

    def packed(self, architecture: Architecture, selection: Selection) -> bytes:
        """An architecture's frozen tensors as they travel."""
        key = _key(architecture, selection)
        name = self._names.get(key, "")
        if name not in self._packed:
            layout = frozen_layout(self.family, architecture)
            placement = self.family.place(architecture, selection.select).of(e.name for e in layout.entries)
            data = pack(placement.gather(self.weights), layout)
            name = hashlib.sha256(data).hexdigest()
            if sum(map(len, self._packed.values())) + len(data) > MAX_CACHED_BYTES:
                self._packed.clear()
            self._names[key] = name
            self._packed[name] = data
        return self._packed[name]

    def owed_bytes(self, device: int, architecture: Architecture, selection: Selection) -> int:
        """What a device still has to be sent before it can train an architecture."""
        if self.name(architecture, selection) in self.held.get(device, {""}):
            return 0
        return frozen_layout(self.family, architecture).nbytes

    def has(self, device: int, name: str) -> None:
        """A device has worked with these: it keeps them."""
        if name:
            self.held.setdefault(device, set()).add(name)

    def lost(self, device: int) -> None:
        """A device did not do its work, maybe because it has them no more: it is sent all of them again."""
        self.held.pop(device, None)

    def state(self) -> dict[str, list[str]]:
        """Who holds what, as JSON."""
        return {str(device): sorted(names) for device, names in sorted(self.held.items())}

    def load(self, state: Mapping[str, list[str]]) -> None:
        """Restore `state`."""
        self.held = {int(device): set(names) for device, names in state.items()}


def _key(architecture: Architecture, selection: Selection) -> tuple[Architecture, Selection]:
    """One key for all selections of the leading channels, such as those that make each device a group of its own."""
    return architecture, LEADING if selection.select is leading else selection
