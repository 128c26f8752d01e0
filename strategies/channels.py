"""Which channels of a network are the strongest, by the norm of the filters that make them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from wildflower.models.base import Family
from wildflower.models.block_family import BlockFamily
from wildflower.models.placement import Axis, Coordinates, Select

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
    sizes = dict(family.groups)
    if isinstance(family, BlockFamily):
        found = family.channels(family.full())
        if not all(channels.kept for channels in found.values()):
            raise ValueError(
                f"channels are ranked here within one network, and {family.name} is a choice among several: take one "
                "of its members as the family"
            )
        sizes = {group: channels.full for group, channels in found.items()}
    squares: dict[str, Tensor] = {}
    for name, spec in family.tensors(family.full()).items():
        axis = spec.axes[0] if len(spec.axes) > 1 else None
        if isinstance(axis, Axis) and axis.group in sizes:
            rows = weights[name].to(torch.float64).square().reshape(sizes[axis.group], -1).sum(dim=1)
            squares[axis.group] = squares[axis.group] + rows if axis.group in squares else rows
    missing = [group for group in sizes if group not in squares]
    if missing:
        names = ", ".join(missing[:MAX_GROUPS])
        raise ValueError(
            f"channels are ranked here by the norm of the filters that make them, and those of {family.name} that are "
            f"called {names} are made by none: take a family of described layers, such as cnn3, resnet18 "
            "or vit-tiny"
        )
    return {group: square.sqrt() for group, square in squares.items()}


def strongest(norms: Mapping[str, Tensor]) -> Select:
    """Select the channels of largest norm, in ascending order; of equal ones, the first."""
    order = {group: torch.sort(norm, descending=True, stable=True).indices for group, norm in norms.items()}

    def select(group: str, full: int, kept: int) -> Coordinates:
        if kept == full:
            return slice(0, full)
        return order[group][:kept].sort().values

    return select
