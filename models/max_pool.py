"""Max pooling of windows of four values, in less time than PyTorch's and to the same bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# A pool that trains is faster by slices for tensors of at least so many values: at 100,000 it is level with PyTorch's.
LEAST_BY_SLICES = 2**17
SLICED_TOGETHER = 2**18  # values whose gradients are made at a time


class HalvingMaxPool(nn.MaxPool2d):
    """`nn.MaxPool2d(2)` that trains in less time.

    For finite values the bits are PyTorch's: of equal values in a window the first in row-major order takes the
    gradient. Where tensors are large and contiguous, the places of the maxima are not kept, so that a step takes less
    memory than its price, which is that of PyTorch's pool. That one is used for tensors with the channels of a pixel
    side by side; its way back takes five times as long for a gradient that is not laid out so.
    """

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) -> half the sides; a rest at the border is dropped."""
        trains = x.requires_grad and torch.is_grad_enabled() and x.device.type == "cpu"
        even = x.shape[2] % 2 == x.shape[3] % 2 == 0
        if trains and x.numel() >= LEAST_BY_SLICES and even and x.is_contiguous():
            return _MaxOfFourToTrain.apply(x)
        pooled: Tensor = super().forward(x)
        if trains and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
            pooled.register_hook(lambda gradient: gradient.contiguous(memory_format=torch.channels_last))
        return pooled


class _MaxOfFourToTrain(torch.autograd.Function):
    """The maximum of four slices, each of which has one value of every window, and its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        maxima = _max_of_four(x)
        ctx.save_for_backward(x, maxima.clone())  # the next layer may change its input in place
        return maxima

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, maxima = ctx.saved_tensors
        found = torch.empty_like(x)
        # A few examples at a time, so that what is made on the way stays in the cache and is little.
        size = max(1, SLICED_TOGETHER * len(x) // x.numel())
        pieces = (tensor.split(size) for tensor in (x, maxima, gradient, found))
        for values, largest, gradients, part in zip(*pieces, strict=True):
            left = gradients.clone()  # of each window, until one of its values has taken it
            for row in (0, 1):
                for column in (0, 1):
                    taken = left * (values[:, :, row::2, column::2] == largest)
                    left -= taken
                    part[:, :, row::2, column::2] = taken
        return found


class MaxOfFour(nn.Module):
    """`nn.MaxPool2d(2)` by the maximum of slices, without the places of the maxima that a gradient would need."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) -> half the sides; a rest at the border is dropped."""
        return _max_of_four(x)


def _max_of_four(x: Tensor) -> Tensor:
    height, width = (side // 2 * 2 for side in x.shape[2:])
    columns = torch.maximum(x[..., :width:2], x[..., 1:width:2])
    return torch.maximum(columns[:, :, :height:2], columns[:, :, 1:height:2])
