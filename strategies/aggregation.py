"""The running per-coordinate mean, the aggregation of every method that averages sub-models, and its robust kin."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import Literal

import torch
from torch import Tensor

from wildflower.messages.packing import Layout
from wildflower.messages.sums import CACHED, SCALE, WeightedSum, new_bound, split
from wildflower.models.placement import Placement

Kind = Literal["mean", "trimmed-mean", "median", "norm-bounded-mean"]
MIN_OWNERS = 3  # of a coordinate, for a majority of right ones
_PIECE = 2**18  # coordinates that are sorted at once


@dataclass(frozen=True)
class Aggregation:
    """The rule by which what devices return becomes one value per coordinate.

    kind: "mean" weighs devices as the method says. "trimmed-mean" and "median" count every owner of a coordinate alike,
        whatever it says of its examples (Yin et al. 2018, "Byzantine-Robust Distributed Learning", Definitions 1, 2).
        "norm-bounded-mean" is the mean after every change that is larger than the median one of the round in the same
        tensor set was scaled down to it. The other two do that as well where a coordinate has fewer than three owners.
    trim: the share of a coordinate's owners that "trimmed-mean" leaves out at each end.
    """

    kind: Kind = "mean"
    trim: float = 0.2

    @property
    def adds_up(self) -> bool:
        """Return whether it can be made from sums; else each device's values are wanted by themselves."""
        return self.kind == "mean"


MEAN = Aggregation()


def running_mean(weights: Mapping[str, Tensor], aggregation: Aggregation = MEAN) -> CoordinateMean:
    """Return what aggregates values at the coordinates of some tensors, as the run wants it."""
    return CoordinateMean(weights) if aggregation.adds_up else RobustMean(weights, aggregation)


class CoordinateMean:
    """Mean of every coordinate of the global model over the devices that trained it (HeteroFL, Eq. 4-6).

    Holds one sum and one count per coordinate of the tensors that were added since the last mean, whatever the number
    of devices. Sums and counts are 64-bit integers (`wildflower.messages.sums`), so the order of additions does not
    matter.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._shapes = {name: value.shape for name, value in weights.items()}
        self._totals: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        self._bound = 0.0  # of any total

    def add(self, placement: Placement, layout: Layout, added: WeightedSum, tensor_set: str = "") -> None:
        """Add the sum of some devices' weights, of tensors `layout` at the coordinates `placement`.

        Args:
            placement: where they lie in the global model.
            layout: which tensors these are.
            added: the sum.
            tensor set: what devices sent them in. The robust means compare the sizes of changes within one tensor set.

        Raises MessageError, and changes nothing, where the total could overflow.
        """
        self._bound = new_bound(self._bound, added.largest)
        placement = placement.of(entry.name for entry in layout.entries)
        for sums in (self._totals, self._counts):
            self._begin(sums, placement.coordinates)
        placement.add_to(self._totals, split(added.total, layout))
        placement.add_weight(self._counts, added.weight, added.class_weight)

    def _begin(self, sums: dict[str, Tensor], names: Iterable[str]) -> None:
        """Zeros for the tensors to which nothing was added yet."""
        for name in names:
            if name not in sums:
                sums[name] = torch.zeros(self._shapes[name], dtype=torch.int64)

    def check(self, added: WeightedSum) -> None:
        """Raise MessageError where `add` would."""
        new_bound(self._bound, added.largest)

    @property
    def empty(self) -> bool:
        """Return whether nothing was added since the last mean."""
        return not any(bool(count.any()) for count in self._counts.values())

    def weight(self) -> dict[str, Tensor]:
        """A copy of the weight that was added at every coordinate so far, 0 where nobody trained."""
        counts = {name: count.clone() for name, count in self._counts.items()}
        self._begin(counts, self._shapes)
        return counts

    def mean(self, previous: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The mean where somebody trained, the previous value where nobody did; then start over."""
        result: dict[str, Tensor] = {}
        for name, old in previous.items():
            if name not in self._counts:
                result[name] = old.clone(memory_format=torch.contiguous_format)
                continue
            # Each tensor's sum and count go as its mean is made, so that the whole mean is not held beside all of them.
            total, count = self._totals.pop(name), self._counts.pop(name)
            result[name] = torch.empty_like(old, memory_format=torch.contiguous_format)
            flat = (tensor.reshape(-1).split(CACHED) for tensor in (result[name], total, count, old))
            for into, added, weight, before in zip(*flat, strict=True):
                mean = added.to(torch.float64) / (weight.clamp(min=1).to(torch.float64) * SCALE)
                torch.where(weight > 0, mean.to(old.dtype), before, out=into)
        self._start_over()
        return result

    def _start_over(self) -> None:
        self._totals.clear()
        self._counts.clear()
        self._bound = 0.0


@dataclass(frozen=True)
class _Own:
    """What one device returned in a tensor set: its weighted values of the tensors of a layout, and where they lie."""

    tensor_set: str
    placement: Placement
    layout: Layout
    values: WeightedSum

    def at(self, name: str, like: Tensor) -> Tensor:
        """Its values of one global tensor (float64), NaN where the device does not own the coordinate."""
        entry = self.placement.of([name])
        total, count = (torch.zeros(like.shape, dtype=torch.int64) for _ in range(2))
        entry.add_to({name: total}, {name: split(self.values.total, self.layout)[name]})
        entry.add_weight({name: count}, self.values.weight, self.values.class_weight)
        values = total.to(torch.float64) / (count.clamp(min=1).to(torch.float64) * SCALE)
        return torch.where(count > 0, values, torch.nan)


class RobustMean(CoordinateMean):
    """An aggregation that a few wrong devices cannot move far. Every addition must be of one device.

    It holds what every device of the round returned until the round ends: 8 bytes per parameter and device. The result
    does not depend on the order of additions either.
    """

    def __init__(self, weights: Mapping[str, Tensor], aggregation: Aggregation) -> None:
        super().__init__(weights)
        self.aggregation = aggregation
        self._own: list[_Own] = []

    def add(self, placement: Placement, layout: Layout, added: WeightedSum, tensor_set: str = "") -> None:
        """Keep one device's weights, of tensors `layout` at the coordinates `placement`.

        Raises MessageError, and changes nothing, where a total of all could overflow.
        """
        self._bound = new_bound(self._bound, added.largest)
        placement = placement.of(entry.name for entry in layout.entries)
        self._begin(self._counts, placement.coordinates)
        placement.add_weight(self._counts, added.weight, added.class_weight)
        self._own.append(_Own(tensor_set, placement, layout, added))

    def mean(self, previous: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The aggregate where somebody trained, the previous value where nobody did; then start over."""
        factors = self._factors(previous)
        result: dict[str, Tensor] = {}
        self._begin(self._counts, previous)
        for name, old in previous.items():
            values, start = self._values(name, old), old.double()
            bounded = [start + factor * (value - start) for value, factor in zip(values, factors, strict=True)]
            found = self._weighted_mean(name, bounded, old)
            if self.aggregation.kind != "norm-bounded-mean" and values:
                pieces = zip(*(value.flatten().split(_PIECE) for value in values), strict=True)
                middle = torch.cat([self._middle(torch.stack(piece)) for piece in pieces]).reshape(old.shape)
                found = torch.where(middle.isnan(), found, middle)
            result[name] = torch.where(self._counts[name] > 0, found.to(old.dtype), old)
        self._own.clear()
        self._start_over()
        return result

    def _values(self, name: str, like: Tensor) -> list[Tensor]:
        """What every device says of one tensor, NaN where it owns nothing."""
        nothing = torch.full(like.shape, torch.nan, dtype=torch.float64)
        return [own.at(name, like) if name in own.placement.coordinates else nothing for own in self._own]

    def _factors(self, previous: Mapping[str, Tensor]) -> list[float]:
        """What every device's change is multiplied by, so that none is larger than the median one (the lower of two).

        The size of a change is its root mean square over the coordinates that the device owns, so that small
        sub-models are held to the same bound as large ones. The median is that of one tensor set: another holds other
        quantities, such as batch norm's statistics beside changes of weights.
        """
        sizes: list[float] = []
        for own in self._own:
            squares, owned = 0.0, 0
            for entry in own.layout.entries:
                change = own.at(entry.name, previous[entry.name]) - previous[entry.name].double()
                squares += float(change.square().nansum())
                owned += int((~change.isnan()).sum())
            sizes.append((squares / max(1, owned)) ** 0.5)
        of_tensor_set: defaultdict[str, list[float]] = defaultdict(list)
        for own, size in zip(self._own, sizes, strict=True):
            of_tensor_set[own.tensor_set].append(size)
        middle = {tensor_set: median_low(found) for tensor_set, found in of_tensor_set.items()}
        return [
            min(1.0, middle[own.tensor_set] / size) if size else 1.0 for own, size in zip(self._own, sizes, strict=True)
        ]

    def _weighted_mean(self, name: str, values: list[Tensor], old: Tensor) -> Tensor:
        """The mean by the devices' weights (float64), as exact a sum as any: the order of devices does not matter."""
        total = torch.zeros(old.shape, dtype=torch.int64)
        for own, value in zip(self._own, values, strict=True):
            weight = own.values.weight * SCALE
            total += torch.where(value.isnan(), 0.0, value * weight).round().to(torch.int64)
        return total.double() / (self._counts[name].clamp(min=1).double() * SCALE)

    def _middle(self, values: Tensor) -> Tensor:
        """(coordinates,), the mean of what is left of (devices, coordinates) after trimming.

        NaN where a coordinate has fewer than three owners, of whom nobody can say which one is wrong.
        """
        ordered = values.sort(dim=0).values  # NaN come last
        owners = (~ordered.isnan()).sum(dim=0)
        most = (owners - 1).clamp(min=0) // 2  # so that one owner is left, or two of an even number
        wanted = torch.ceil(self.aggregation.trim * owners - 1e-9).to(torch.int64)
        cut = most if self.aggregation.kind == "median" else torch.minimum(wanted, most)
        place = torch.arange(len(values)).unsqueeze(1)
        kept = (place >= cut) & (place < owners - cut)
        middle = torch.where(kept, ordered, 0.0).sum(dim=0) / kept.sum(dim=0)
        return torch.where(owners >= MIN_OWNERS, middle, torch.nan)
