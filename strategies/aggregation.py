"""The running per-coordinate mean: the aggregation of every method that averages sub-models."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from messages.packing import Layout
from messages.sums import SCALE, WeightedSum, new_bound, split
from models.placement import Placement


class CoordinateMean:
    """Mean of every coordinate of the global model over the devices that trained it (HeteroFL, Eq. 4-6).

    Holds one sum and one count per coordinate, whatever the number of devices. Sums and counts are 64-bit integers
    (`messages.sums`), so the order of additions does not matter.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._totals = {name: torch.zeros(value.shape, dtype=torch.int64) for name, value in weights.items()}
        self._counts = {name: torch.zeros(value.shape, dtype=torch.int64) for name, value in weights.items()}
        self._bound = 0.0  # of any total

    def add(self, placement: Placement, layout: Layout, added: WeightedSum) -> None:
        """Add the sum of some devices' weights, of tensors `layout` at the coordinates `placement`.

        Raises MessageError, and changes nothing, where the total could overflow.
        """
        self._bound = new_bound(self._bound, added.largest, added.weight)
        placement = placement.of(entry.name for entry in layout.entries)
        placement.add_to(self._totals, split(added.total, layout))
        placement.add_weight(self._counts, added.weight, added.class_weight)

    def check(self, added: WeightedSum) -> None:
        """Raise MessageError where `add` would."""
        new_bound(self._bound, added.largest, added.weight)

    def weight(self) -> dict[str, Tensor]:
        """A copy of the weight that was added at every coordinate so far, 0 where nobody trained."""
        return {name: count.clone() for name, count in self._counts.items()}

    def mean(self, previous: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The mean where somebody trained, the previous value where nobody did; then start over."""
        result: dict[str, Tensor] = {}
        for name, old in previous.items():
            total, count = self._totals[name], self._counts[name]
            mean = (total.to(torch.float64) / (count.clamp(min=1).to(torch.float64) * SCALE)).to(old.dtype)
            result[name] = torch.where(count > 0, mean, old)
            total.zero_()
            count.zero_()
        self._bound = 0.0
        return result
