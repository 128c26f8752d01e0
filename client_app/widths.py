"""Networks of unequal widths in one stack: the narrower ones have zeros behind their channels.

With zeros a channel stays absent by itself: what it gets and gives is 0, so that all of its gradients are 0, too. A
stack then computes more for its narrow rows, which costs less than a stack of their own where networks are small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch
from torch import Tensor, nn

from wildflower.models.layers import BatchNorm, Scaler
from wildflower.models.max_pool import HalvingMaxPool
from wildflower.models.network import BlockModule, Network
from wildflower.strategies.shared_losses import PureLoss
from wildflower.strategies.static_norm import Masked

# What these make of zeros is zero, and of one channel does not depend on the others.
KEEPS_ZEROS = (
    *(PureLoss, Masked, Network, nn.ModuleList, nn.Sequential, nn.Identity, nn.Flatten, nn.Linear, BatchNorm, Scaler),
    *(nn.ReLU, nn.ReLU6, nn.Hardswish, nn.MaxPool2d, HalvingMaxPool, nn.AvgPool2d, nn.AdaptiveAvgPool2d),
)


def can_be_filled(losses: Sequence[nn.Module]) -> bool:
    """Say whether losses of networks of several widths can be computed at once, with zeros for what lacks."""
    if any(not parameter.requires_grad for loss in losses for parameter in loss.parameters()):
        return False  # what is frozen is not stacked
    return all(map(_alike, zip_longest(*(loss.modules() for loss in losses))))


def _alike(modules: tuple[nn.Module | None, ...]) -> bool:
    """Say whether the modules at one place of the networks differ in their numbers of channels alone."""
    first = modules[0]
    if any(type(module) is not type(first) for module in modules):
        return False
    if isinstance(first, nn.Conv2d):
        return len({_convolution(module) for module in modules}) == 1 and first.groups == 1  # type: ignore[arg-type]
    if isinstance(first, BlockModule):
        return not first.concat and all(module.order == first.order for module in modules)  # type: ignore[union-attr]
    return type(first) in KEEPS_ZEROS and (not isinstance(first, PureLoss) or not (first.criterion or first.more))


def _convolution(layer: nn.Conv2d) -> tuple[object, ...]:
    return layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups


def rates(losses: Sequence[nn.Module]) -> Mapping[str, Tensor]:
    """Return what scalers divide each row by, as tensors of the scalers: (rows,)."""
    of_losses = [{n: m.rate for n, m in loss.named_modules() if isinstance(m, Scaler)} for loss in losses]
    return {
        f"{name}.rate": torch.tensor([rates[name] for rates in of_losses], dtype=torch.float64) for name in of_losses[0]
    }


def filled(rows: Sequence[Tensor]) -> Tensor:
    """Stack tensors whose sides may differ, with zeros behind the shorter ones."""
    if all(row.shape == rows[0].shape for row in rows):
        return torch.stack(list(rows))
    sides = map(max, zip(*(row.shape for row in rows), strict=True))
    found = rows[0].new_zeros(len(rows), *sides)
    for into, row in zip(found, rows, strict=True):
        own(into, row).copy_(row)
    return found


def own(row: Tensor, like: Tensor) -> Tensor:
    """Return the part of a row that is no filling: what has the shape of `like`."""
    return row[tuple(map(slice, like.shape))]
