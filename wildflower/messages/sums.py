"""Exact sums of model weights.

Floating-point addition depends on its order, and replies arrive in any order. Here every value is multiplied by its
integer weight, rounded to a multiple of 2^-28 and added as a 64-bit integer: the sum is the same whichever reply comes
first and however many workers share a round, so that a resumed run ends with the same bits. With weights of at least
`UNIT` / 64 the rounding is below 2^-33 of a model's weight, less than a 32-bit float keeps of a weight near 0.001.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from wildflower.messages.orders import Merge
from wildflower.messages.packing import Layout, MessageError

SCALE = 2**28
UNIT = 1024  # the weight of one device where all devices count alike
ADDABLE = 2.0**62  # half the range of a 64-bit integer
CACHED = 2**16  # elements whose values in between stay in a processor's cache
_SMALL = 2**14  # elements, below which a tensor is added together with others
# A way to round many numbers to integers at once. The shift plus a number of at most 2^51 in size lies between 2^52
# and 2^53. There float64 holds whole numbers only, so that the addition rounds to the nearest one, halves to even as
# `round` does. Read as an integer, the bits of that sum are the bits of the shift plus the rounded number. This is
# faster than `round` and a conversion, and gives the same result where the product before it is exact: float32 has 24
# bits, and a weight at most 29.
_SHIFT = torch.tensor(1.5 * 2.0**52, dtype=torch.float64)
_SHIFT_BITS = int(_SHIFT.view(torch.int64))
_MAX_SHIFTED = 2.0**51
_MAX_EXACT_WEIGHT = 2**29  # 24 and 29 bits are the 53 of a float64
MASKED = "masked"  # what the one array of an update under masks is called
ClassSpan = tuple[int, int, int]
"""Where a tensor that has a dimension of classes lies in a flat vector: its first element, the one behind its last, and
how many elements each class has next to one another, as many as the dimensions behind that of the classes hold."""


@dataclass
class WeightedSum:
    """The sum of `weight x value` over devices that trained the same tensors.

    Attributes:
        total: flat int64 vector, all tensors of the layout in order, in multiples of 1 / SCALE.
        weight: the sum of the devices' weights.
        class_weight: the sum of the devices' weights per class, where rows of absent classes do not count; None where
            every row counts.
    """

    total: Tensor
    weight: int = 0
    class_weight: Tensor | None = None
    largest: float = 0.0  # bound of any element of `total`, so that no addition can overflow

    @classmethod
    def zeros(cls, layout: Layout, classes: int | None = None) -> WeightedSum:
        """Return an empty sum over the tensors of `layout`; with `classes` it counts every class apart."""
        class_weight = None if classes is None else torch.zeros(classes, dtype=torch.int64)
        return cls(torch.zeros(layout.numel, dtype=torch.int64), 0, class_weight)

    def add(
        self,
        values: Tensor | Sequence[Tensor],
        weight: int,
        present: Tensor | None = None,
        class_spans: tuple[ClassSpan, ...] = (),
    ) -> None:
        """Add one device's weights.

        Args:
            values: its tensors in one vector (`flatten`) or one vector after the other (`vectors`), any float dtype.
            weight: its weight, a positive integer.
            present: the classes it holds (bool, one per class); the others' rows do not count for this device.
            class_spans: where the tensors that have a dimension of classes lie in `values`.

        Raises:
            MessageError: a value is not finite, or too large to be added exactly.
            ValueError: there are more or fewer values than the sum has; nothing is added then.
        """
        parts = _parts(values)
        factor, bound = float(weight) * SCALE, self.check(parts, weight)
        if sum(part.numel() for part in parts) != self.total.numel():
            raise ValueError(f"the values are not {self.total.numel()}, which is how many the sum has")
        small = weight <= _MAX_EXACT_WEIGHT and bound - self.largest < _MAX_SHIFTED
        if present is not None and self.class_weight is not None:
            parts = _without_absent(parts, present, class_spans)
            self.class_weight += weight * present.to(torch.int64)
        between = torch.empty(min(CACHED, self.total.numel()), dtype=torch.float64)
        bits, start, totals = between.view(torch.int64).numpy(), 0, self.total.numpy()
        for part in parts:
            for piece in part.split(CACHED):
                count = piece.numel()
                wide, whole = between[:count].copy_(piece), bits[:count]
                if small and part.dtype == torch.float32:
                    torch.add(_SHIFT, wide, alpha=factor, out=wide)
                    np.subtract(whole, _SHIFT_BITS, out=whole)
                else:
                    whole = wide.mul_(factor).round_().to(torch.int64).numpy()
                # NumPy, which was measured to add integers faster than PyTorch does.
                total = totals[start : start + count]
                np.add(total, whole, out=total)
                start += count
        self.weight += weight
        self.largest = bound

    def check(self, values: Tensor | Sequence[Tensor], weight: int) -> float:
        """Return the bound of the sum after `add`. Raises MessageError as `add` does, and changes nothing."""
        if weight < 1:
            raise MessageError(f"the weight of an update is a positive integer, got {weight}")
        factor = float(weight) * SCALE
        bounds = (new_bound(self.largest, magnitude(part) * factor) for part in _parts(values))
        return max(bounds, default=self.largest)

    def weight_at(self, class_spans: tuple[ClassSpan, ...] = ()) -> Tensor:
        """(elements,) int64, the weight of every element: in rows of the classes that of the class."""
        weight = torch.full((self.total.numel(),), self.weight, dtype=torch.int64)
        if self.class_weight is not None:
            for start, stop, inner in class_spans:
                weight[start:stop].view(-1, len(self.class_weight), inner)[:] = self.class_weight[:, None]
        return weight

    def moved(self, by: Tensor, times: int, class_spans: tuple[ClassSpan, ...] = ()) -> WeightedSum:
        """Return the sum of what the devices would have returned from another start, with weights `times` as large.

        The way is rounded before it is weighed, so that sums over parts of the devices add up to the bit.

        Args:
            by: (elements,) float64, how far that start lies from the one that they had.
            times: a positive integer.
            class_spans: as of `add`.

        Raises MessageError where the sum could overflow.
        """
        largest = new_bound(0.0, times * (self.largest + magnitude(by) * self.weight * SCALE))
        moved = (by * SCALE).round_().to(torch.int64) * self.weight_at(class_spans)
        class_weight = None if self.class_weight is None else times * self.class_weight
        return WeightedSum(times * (self.total + moved), times * self.weight, class_weight, largest)

    def include(self, other: WeightedSum) -> None:
        """Add another sum over the same tensors. Raises MessageError, and changes nothing, where it is too large."""
        self.largest = new_bound(self.largest, other.largest)
        self.total += other.total
        self.weight += other.weight
        if self.class_weight is not None and other.class_weight is not None:
            self.class_weight += other.class_weight


def new_bound(bound: float, largest: float) -> float:
    """Return the bound of a sum after an addition of at most `largest`; MessageError where the sum could overflow."""
    if not bound + largest < ADDABLE:  # false for NaN too
        raise MessageError(
            "weights must be finite and small enough to add exactly, and some are not: where training has diverged, a "
            "smaller learning-rate or clip-norm helps"
        )
    return bound + largest


def magnitude(values: Tensor) -> float:
    """Return the largest absolute value of a tensor, in one pass; NaN if one value is, and 0 of an empty tensor."""
    if not values.numel():
        return 0.0
    # PyTorch finds no extremes of floats of 8 bits.
    lowest, highest = torch.aminmax(values.float() if values.dtype.itemsize == 1 else values)
    return max(-float(lowest), float(highest))


def not_finite(tensors: Mapping[str, Tensor]) -> str:
    """Return the name of the first tensor that holds a value that is not finite; "" where there is none.

    It takes no memory beside the tensors, because a device may have none left after its training.
    """
    floats = ((name, value.detach()) for name, value in tensors.items() if value.is_floating_point())
    return next((name for name, value in floats if not math.isfinite(magnitude(value))), "")


def _parts(values: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return [values] if isinstance(values, Tensor) else values


def _without_absent(parts: Sequence[Tensor], present: Tensor, class_spans: tuple[ClassSpan, ...]) -> list[Tensor]:
    """Return the vectors with zeros in the rows of classes that are not `present`."""
    found, offset = [], 0
    for part in parts:
        inside = [span for span in class_spans if offset <= span[0] < offset + part.numel()]
        if inside:
            part = part.clone()
            for start, stop, inner in inside:
                part[start - offset : stop - offset].view(-1, len(present), inner)[:, ~present] = 0.0
        found.append(part)
        offset += part.numel()
    return found


def vectors(state: Mapping[str, Tensor], layout: Layout) -> list[Tensor]:
    """Return all floating-point tensors of `layout`, one after the other (float32, or float64 where one of them is).

    Large tensors are vectors of their own, and views where that is possible. Small ones that follow each other are one.
    """
    found: list[Tensor] = []
    for small, run in groupby(_each(state, layout), key=lambda tensor: tensor.numel() < _SMALL):
        together = list(run)
        found += [torch.cat(together)] if small else together
    return found


def flatten(state: Mapping[str, Tensor], layout: Layout) -> Tensor:
    """Return all floating-point tensors of `layout` in one vector, of the type that `vectors` has."""
    return torch.cat(_each(state, layout))


def _each(state: Mapping[str, Tensor], layout: Layout) -> list[Tensor]:
    wide = any(entry.dtype == torch.float64 for entry in layout.entries)
    dtype = torch.float64 if wide else torch.float32
    return [state[e.name].detach().reshape(-1).to("cpu", dtype) for e in layout.entries]


def split(flat: Tensor, layout: Layout) -> dict[str, Tensor]:
    """Return the views of a flat vector that belong to every tensor of `layout`."""
    views: dict[str, Tensor] = {}
    start = 0
    for entry in layout.entries:
        views[entry.name] = flat[start : start + entry.numel].view(entry.shape)
        start += entry.numel
    return views


def mean_of(total: WeightedSum, layout: Layout, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weighted mean that a sum over tensors of `layout` stands for, in the types of `like`."""
    mean = total.total.to(torch.float64) / (total.weight * SCALE)
    return {name: value.to(like[name].dtype) for name, value in split(mean, layout).items()}


def device_weight(merge: Merge, examples: int, *, alike: bool = False) -> int:
    """Return the weight of one device's update in a sum; `alike`: that of every other, whatever the tensor set says."""
    return examples if merge.weighting == "examples" and not alike else UNIT


def present_mask(present: Iterable[int] | None, classes: int, owner: str) -> Tensor:
    """Return the classes that a device holds, as bools; MessageError for a class that does not exist, or none."""
    indices = sorted(set(present or ()))
    if not indices or indices[-1] >= classes:
        raise MessageError(f"{owner}: present classes {indices} are not some of 0..{classes - 1}")
    mask = torch.zeros(classes, dtype=torch.bool)
    mask[indices] = True
    return mask


def joined(sums: Mapping[str, WeightedSum]) -> Tensor:
    """Sums of several tensor sets in one int64 vector: by name, each with the weights of its classes behind it."""
    parts: list[Tensor] = []
    for name in sorted(sums):
        found = sums[name]
        parts += [found.total] if found.class_weight is None else [found.total, found.class_weight]
    return torch.cat(parts)


def disjoined(vector: Tensor, like: Mapping[str, WeightedSum], weights: Mapping[str, int]) -> dict[str, WeightedSum]:
    """Return the sums that `joined` has put together.

    Args:
        like: empty sums of the same tensor sets.
        weights: of the sums.

    Raises:
        MessageError: the weights of classes cannot be right.
    """
    found: dict[str, WeightedSum] = {}
    start = 0
    for name in sorted(like):
        total, counts = like[name].total, like[name].class_weight
        values = vector[start : start + total.numel()]
        start += total.numel()
        class_weight = None
        if counts is not None:
            class_weight = vector[start : start + counts.numel()]
            start += counts.numel()
            if not 0 <= int(class_weight.min()) <= int(class_weight.max()) <= weights[name]:
                raise MessageError(f"the sum of {name!r}: weights of classes are not within 0 and {weights[name]}")
        found[name] = WeightedSum(values, weights[name], class_weight, magnitude(values))
    return found
