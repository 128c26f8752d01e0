"""The placement of a sub-model: how it is cut out of the global model, and how what returns is added into it.

1. `kept_channels`: a width rate says how many channels a sub-model keeps of every channel group.
2. `leading`, `rolling` or `chosen` select which ones: HeteroFL (Diao et al. 2021), FedRolex (Alam et al. 2022) and
   Federated Dropout (Caldas et al. 2018). All tensors that share a group are cut alike.
3. `place` says of every tensor which coordinates of the global tensor of the same name it is: a `Placement`.
4. `Placement.gather` copies the sub-model's tensors. `add_to` adds what a device returns to the sums of its
   coordinates, and `add_weight` counts them: the new global model is sum / count where the count is above 0.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

Coordinates = slice | Tensor
"""Of one dimension: a slice with unit step, or a 1-D LongTensor of distinct indices."""

Select = Callable[[str, int, int], Coordinates]
"""(group, full size, kept size) -> which channels of the group."""

CLASSES = "classes"
"""The group of the classifier's outputs. It is never cut."""

INPUT = "input"
"""The group of what a network reads, such as an image's channels. It is never cut."""


@dataclass(frozen=True)
class Axis:
    """The channel group of one dimension of a tensor.

    `repeat` is the number of consecutive entries that belong to one channel: 1, or the number of positions after an
    image was flattened, channels first.
    """

    group: str
    repeat: int = 1


@dataclass(frozen=True)
class Joined:
    """The channel groups of a dimension that is stretches one behind another, such as a recurrent layer's gates.

    Of each stretch: its group ("" where it is not cut), how often it comes, the group's full size, and the consecutive
    entries of a channel.
    """

    stretches: tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True)
class Window:
    """One spatial dimension of an elastic kernel: a smaller kernel is the centre of the whole one, in any selection."""

    kept: int
    full: int

    @property
    def coordinates(self) -> slice:
        """Return the centre."""
        start = (self.full - self.kept) // 2
        return slice(start, start + self.kept)


AnyAxis = Axis | Joined | Window | None
"""What is known of one dimension of a tensor."""


def groups_of(axis: AnyAxis) -> set[str]:
    """Return the channel groups of a dimension."""
    if isinstance(axis, Joined):
        return {group for group, *_ in axis.stretches if group}
    return {axis.group} if isinstance(axis, Axis) else set()


def kept_channels(full: int, rate: float) -> int:
    """Return how many of `full` channels a width rate keeps, at least 1."""
    return max(1, math.ceil(round(rate * full, 9)))  # a hair's breadth of rounding error adds and loses no channel


def leading(group: str, full: int, kept: int) -> Coordinates:
    """Select the first `kept` channels."""
    return slice(0, kept)


def rolling(offset: int) -> Select:
    """Select a window that starts at channel `offset` (modulo the group's size) and wraps around."""

    def select(group: str, full: int, kept: int) -> Coordinates:
        if kept == full:
            return slice(0, full)
        start = offset % full
        if start + kept <= full:
            return slice(start, start + kept)
        return torch.arange(start, start + kept) % full

    return select


def chosen(generator_seed: int) -> Select:
    """Select a random subset in ascending order: the same one for the same seed (>= 0), group and sizes."""

    def select(group: str, full: int, kept: int) -> Coordinates:
        if kept == full:
            return slice(0, full)
        # Not torch's generator: on the CPU it takes in only 32 bits of a seed.
        rng = np.random.default_rng([generator_seed, zlib.crc32(group.encode())])
        return torch.from_numpy(np.sort(rng.permutation(full)[:kept]))

    return select


def spread(coordinates: Coordinates, repeat: int) -> Coordinates:
    """Turn coordinates of channels into coordinates of a dimension that holds `repeat` entries per channel."""
    if repeat == 1:
        return coordinates
    if isinstance(coordinates, slice):
        return slice(coordinates.start * repeat, coordinates.stop * repeat)
    return (coordinates.unsqueeze(1) * repeat + torch.arange(repeat)).flatten()


def place(axes: Mapping[str, tuple[AnyAxis, ...]], sizes: Mapping[str, tuple[int, int]], select: Select) -> Placement:
    """Return where a sub-model's tensors lie in the global ones.

    Args:
        axes: tensor -> the axis of each of its dimensions.
        sizes: channel group -> its full and its kept size. Groups that are not here, of inputs and classes, are whole.
    """
    selected = {group: select(group, full, kept) for group, (full, kept) in sizes.items() if kept > 0}

    @cache
    def coordinates(axis: AnyAxis) -> Coordinates:
        if isinstance(axis, Window):
            return axis.coordinates
        if isinstance(axis, Joined):
            return _of_stretches(axis, selected)
        if axis is None or axis.group not in selected:
            return slice(None)
        return spread(selected[axis.group], axis.repeat)

    return Placement({name: tuple(map(coordinates, of)) for name, of in axes.items()}, dict(axes))


def _of_stretches(axis: Joined, selected: Mapping[str, Coordinates]) -> Coordinates:
    """Return the coordinates of a dimension of several stretches."""
    if all(not group or selected.get(group) == slice(0, full) for group, _, full, _ in axis.stretches):
        return slice(None)
    found, offset = [], 0
    for group, times, full, repeat in axis.stretches:
        kept = selected.get(group, slice(0, 0)) if group else slice(0, 1)
        index = torch.arange(kept.start, kept.stop) if isinstance(kept, slice) else kept
        for number in range(times):
            entries = (index.unsqueeze(1) * repeat + torch.arange(repeat)).flatten()
            found.append(offset + number * full * repeat + entries)
        offset += times * full * repeat
    return torch.cat(found)


@dataclass(frozen=True, eq=False)
class Placement:
    """Where each tensor of a sub-model lies in the global tensor of the same name.

    `coordinates` and `axes` hold one entry per dimension of each tensor, in the order of the sub-model's state. An axis
    is a `Window` for the sides of an elastic kernel and None for other dimensions without channels.
    """

    coordinates: dict[str, tuple[Coordinates, ...]]
    axes: dict[str, tuple[AnyAxis, ...]]

    def of(self, names: Iterable[str]) -> Placement:
        """Return the placement of some of the sub-model's tensors."""
        names = list(names)
        return Placement({name: self.coordinates[name] for name in names}, {name: self.axes[name] for name in names})

    def within(self, outer: Placement) -> dict[str, tuple[Coordinates, ...]]:
        """Return where this sub-model's tensors lie in those of a larger sub-model that holds all of them."""
        found = {}
        for name, coordinates in self.coordinates.items():
            pairs = zip(coordinates, outer.coordinates[name], strict=True)
            found[name] = tuple(
                torch.searchsorted(there, here) if isinstance(here, Tensor) and isinstance(there, Tensor) else here
                for here, there in pairs
            )
        return found

    def gather(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy the sub-model's tensors out of global `weights`.

        Tensors of `weights` that the sub-model has not are left out. Raises ValueError for tensors that are missing.
        """
        self._require(weights, "global weights")
        gathered = {}
        for name, coordinates in self.coordinates.items():
            cut = _narrow(weights[name], coordinates)
            for dimension, index in enumerate(coordinates):
                if isinstance(index, Tensor):
                    cut = cut.index_select(dimension, index)
            gathered[name] = cut.clone(memory_format=torch.contiguous_format)
        return gathered

    def write_into(self, weights: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        """Write sub-model sized `values` over global `weights`, in place; all channels are selected by slices."""
        for name, value in values.items():
            _narrow(weights[name], self.coordinates[name]).copy_(value)

    def add_to(self, totals: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        """Add sub-model sized `values` into global `totals`, in place, in the type of `totals`.

        Only tensors named in `values` are added. Raises ValueError for names and shapes that do not belong here, before
        anything has been added.
        """
        unknown = sorted(set(values) - set(self.coordinates))
        if unknown:
            raise ValueError(f"the sub-model has no tensors {unknown[:5]}")
        self._require(totals, "totals", values)
        for name, value in values.items():
            expected = _shape(totals[name], self.coordinates[name])
            if tuple(value.shape) != expected:
                raise ValueError(f"{name}: values have shape {tuple(value.shape)}, the placement {expected}")
        for name, value in values.items():
            self._add(name, totals[name], value)

    def add_weight(self, counts: Mapping[str, Tensor], weight: int, class_weight: Tensor | None = None) -> None:
        """Add `weight` to every coordinate of this placement in the global `counts`, in place.

        With `class_weight` (one entry per class), a tensor that has a dimension of classes gets that class's entry
        along it instead of `weight`: so a device can count only for the classes that it has. Raises ValueError for
        missing tensors and a `class_weight` of another size, before anything has been added.
        """
        self._require(counts, "counts")
        addends = {}
        for name, axes in self.axes.items():
            total = counts[name]
            addends[name] = torch.tensor(weight, dtype=total.dtype)
            if class_weight is not None and (dimension := class_dimension(axes)) is not None:
                given, classes = tuple(class_weight.shape), total.shape[dimension]
                if given != (classes,):
                    raise ValueError(f"{name}: {classes} classes, but class_weight has shape {given}")
                addends[name] = class_weight.to(total.dtype).reshape([-1] + [1] * (total.dim() - dimension - 1))
        for name, addend in addends.items():
            self._add(name, counts[name], addend.expand(_shape(counts[name], self.coordinates[name])))

    def _add(self, name: str, total: Tensor, value: Tensor) -> None:
        coordinates = self.coordinates[name]
        view = _narrow(total, coordinates)
        indexed = {dimension: index for dimension, index in enumerate(coordinates) if isinstance(index, Tensor)}
        if not indexed:
            view.add_(value)
            return
        # All dimensions up to the last indexed one are indexed, so that the result keeps the order of dimensions.
        entries = [indexed.get(number, torch.arange(view.shape[number])) for number in range(max(indexed) + 1)]
        # Coordinates are distinct, so reading, adding and writing back loses nothing.
        view[torch.meshgrid(*entries, indexing="ij")] += value

    def _require(self, tensors: Mapping[str, Tensor], what: str, names: Iterable[str] | None = None) -> None:
        missing = [name for name in (self.coordinates if names is None else names) if name not in tensors]
        if missing:
            raise ValueError(f"{what}: tensors {missing[:5]} are missing")


def class_dimension(axes: tuple[AnyAxis, ...]) -> int | None:
    """Return the dimension of a tensor that holds the classes, as a head's do; None: no dimension does."""
    groups = [axis.group if isinstance(axis, Axis) else None for axis in axes]
    return groups.index(CLASSES) if CLASSES in groups else None


def whole(tensors: Mapping[str, Tensor]) -> Placement:
    """Return the placement of tensors that are not cut at all, and have no channels."""
    return Placement(
        {name: (slice(None),) * value.dim() for name, value in tensors.items()},
        {name: (None,) * value.dim() for name, value in tensors.items()},
    )


def _narrow(tensor: Tensor, coordinates: tuple[Coordinates, ...]) -> Tensor:
    """Return a view with the slices applied; indexed dimensions stay whole."""
    return tensor[tuple(slice(None) if isinstance(index, Tensor) else index for index in coordinates)]


def _shape(tensor: Tensor, coordinates: tuple[Coordinates, ...]) -> tuple[int, ...]:
    return tuple(
        len(index) if isinstance(index, Tensor) else len(range(*index.indices(size)))
        for index, size in zip(coordinates, tensor.shape, strict=True)
    )
