"""The strongest channels of a network, by the norm of the filters that make them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.block_family import BlockFamily
from wildflower.models.group_family import GroupFamily, cut_by_groups
from wildflower.models.layers import Channels, TensorSpec
from wildflower.models.placement import AnyAxis, Axis, Coordinates, Joined, Select, groups_of
from wildflower.models.traced.family import Traced

MAX_GROUPS = 5  # An error names no more of them.


def channel_norms(family: Family, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The L2 norm of every channel of every group: group -> vector of the group's full size (float64).

    Groups are those of the family, and those whose size follows from another's (MobileNetV3's squeezes).

    What counts are the filters that make a channel: its rows in all tensors of two or more dimensions whose first
    dimension is the group. For a residual stream these are the rows of every layer that adds to it, so that one order
    holds for all of them, for the norms behind them and for the layers that read them. Biases, norms, position
    embeddings, and the weights with which later layers read a channel do not count.

    Raises ValueError for a group that no filters make, and for a family of several networks.
    """
    if len(family.alternatives) > 1:
        raise ValueError(
            f"channels are ranked here within one network, and {family.name} is a choice among several: take one "
            "of its members as the family"
        )
    sizes = dict(family.groups)
    if isinstance(family, GroupFamily):
        sizes = {group: channels.full for group, channels in family.channels(family.full()).items()}
    tables = family.embeddings if isinstance(family, Traced) else {}
    squares: dict[str, Tensor] = {}
    for name, spec in family.tensors(family.full()).items():
        dimension = 1 if name in tables else 0  # a table of embeddings has a column per channel
        axis = spec.axes[dimension] if len(spec.axes) > 1 else None
        entries = weights[name].to(torch.float64).square().transpose(0, dimension)
        for group, of_channels in _by_channel(axis, entries):
            if group in sizes:
                squares[group] = squares[group] + of_channels if group in squares else of_channels
    missing = [group for group in sizes if group not in squares]
    if missing:
        names = ", ".join(missing[:MAX_GROUPS])
        raise ValueError(
            f"channels are ranked here by the norm of the filters that make them, and those of {family.name} that are "
            f"called {names} are made by none: take another family, such as cnn3, resnet18 "
            "or vit-tiny"
        )
    return {group: square.sqrt() for group, square in squares.items()}


def _by_channel(axis: AnyAxis, entries: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield each group of the first dimension, and the sums of what belongs to each of its channels."""
    if isinstance(axis, Axis):
        yield axis.group, entries.reshape(entries.shape[0] // axis.repeat, -1).sum(dim=1)
    elif isinstance(axis, Joined):
        sizes = [times * full * repeat for _, times, full, repeat in axis.stretches]
        for (group, times, full, _), part in zip(axis.stretches, entries.split(sizes), strict=True):
            if group:
                yield group, part.reshape(times, full, -1).sum(dim=(0, 2))


def strongest(norms: Mapping[str, Tensor]) -> Select:
    """Select the channels of largest norm, in ascending order; of equal ones, the first."""
    order = {group: torch.sort(norm, descending=True, stable=True).indices for group, norm in norms.items()}

    def select(group: str, full: int, kept: int) -> Coordinates:
        if kept == full:
            return slice(0, full)
        return order[group][:kept].sort().values

    return select


def encoder_of(family: Family, architecture: Architecture) -> dict[str, TensorSpec]:
    """Return the tensors of a network without its predictor.

    That is its last block, and the heads of early exits; of a user's module, what has an entry per class.
    """
    tensors = family.tensors(architecture)
    if not isinstance(family, BlockFamily):
        return {name: spec for name, spec in tensors.items() if not spec.of_classes}
    blocks = family.blocks(architecture)
    predictors = tuple(f"{block.name}." for block in blocks if block.exit or block is blocks[-1])
    return {name: spec for name, spec in tensors.items() if not name.startswith(predictors)}


def encoder_groups(family: Family, architecture: Architecture) -> dict[str, Channels]:
    """The channel groups of the encoder, and what of each an architecture keeps."""
    axes = [axis for spec in encoder_of(family, architecture).values() for axis in spec.axes]
    groups = {group for axis in axes for group in groups_of(axis)}
    found = cut_by_groups(family, "spatl").channels(architecture)
    return {group: channels for group, channels in found.items() if group in groups}


def numbers(coordinates: Coordinates, count: int) -> Tensor:
    """The numbers of the channels that a selection takes, as they travel."""
    found = torch.arange(coordinates.start, coordinates.stop) if isinstance(coordinates, slice) else coordinates
    assert len(found) == count
    return found.to(torch.int32)
