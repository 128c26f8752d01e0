"""Described layers that compute for a stack of devices: each device's channels stand behind those of the one before.

`torch.func.vmap` stacks any network, but every operator then takes several times as long as alone, which is most of the
time of a small one. Here an operator takes as long as in a network with more channels: convolutions have a group per
device, and pools, activations and norms see channels. A pixel's channels lie side by side in memory, because
convolutions with many groups and pools then take about half of the time on processors.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wildflower.models.layers import BatchNorm, Scaler
from wildflower.models.max_pool import HalvingMaxPool, MaxOfFour
from wildflower.models.network import BlockModule, Network
from wildflower.strategies.nested import LeadingCut
from wildflower.strategies.static_norm import Masked

# What these compute of a channel does not depend on which other channels there are.
BY_CHANNEL = (
    *(Network, nn.Sequential, nn.Identity, nn.ReLU, nn.ReLU6, nn.Hardswish),
    *(nn.MaxPool2d, HalvingMaxPool, MaxOfFour, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Flatten),
)


def takes_rows(network: nn.Module) -> bool:
    """Say whether all layers of a network are such that `RowLayers` can compute it."""
    return all(_takes_rows(module) for module in network.modules())


def _takes_rows(module: nn.Module) -> bool:
    if type(module) is nn.Conv2d:
        return module.padding_mode == "zeros"
    if isinstance(module, BlockModule):
        return not module.concat  # which would put channels of one device between those of another
    return type(module) in (*BY_CHANNEL, *_FORWARD)


class RowLayers:
    """A loss's networks, whose layers compute for a stack, as long as a `with` block lasts.

    Args:
        loss: a module around networks that `takes_rows`; what it has of tensors is not read.
        names: of the trained model's tensors, as the loss names them.
    """

    def __init__(self, loss: nn.Module, names: Mapping[str, str]) -> None:
        self._loss, self._names = loss, names
        self._tensors: dict[str, Tensor] = {}
        self._weights: Tensor | None = None

    def __enter__(self) -> Self:
        for name, module in self._loss.named_modules():
            if (compute := _FORWARD.get(type(module))) is not None:
                module.forward = partial(compute, self, module, f"{name}.")
        return self

    def __exit__(self, *_: object) -> None:
        for module in self._loss.modules():
            module.__dict__.pop("forward", None)

    def outputs(
        self, network: nn.Module, tensors: Mapping[str, Tensor], inputs: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """Return what a network makes of inputs (rows, batch, channels, *sides): (rows, batch, classes, ...).

        Args:
            tensors: by the loss's names, (rows, *shape).
            weights: of the examples, (rows, batch), as norms are to count them; None: all alike.
        """
        self._tensors, self._weights = dict(tensors), weights
        rows = len(inputs)
        x = inputs.transpose(0, 1).flatten(1, 2)
        if x.dim() == 4 and x.device.type == "cpu":
            x = x.contiguous(memory_format=torch.channels_last)
        outputs: Tensor = network(x)
        return outputs.unflatten(1, (rows, -1)).transpose(0, 1)

    def _convolution(self, layer: nn.Conv2d, name: str, x: Tensor) -> Tensor:
        kernel, bias = self._tensors[f"{name}weight"], self._tensors.get(f"{name}bias")
        flat = None if bias is None else bias.flatten()
        groups = len(kernel) * layer.groups
        return F.conv2d(x, kernel.flatten(0, 1), flat, layer.stride, layer.padding, layer.dilation, groups)

    def _linear(self, layer: nn.Linear, name: str, x: Tensor) -> Tensor:
        kernel, bias = self._tensors[f"{name}weight"], self._tensors.get(f"{name}bias")
        if x.dim() != 2:
            raise ValueError("a linear layer over positions")
        of_rows = x.view(len(x), len(kernel), -1).transpose(0, 1)
        found = of_rows @ kernel.mT if bias is None else torch.baddbmm(bias.unsqueeze(1), of_rows, kernel.mT)
        return found.transpose(0, 1).flatten(1)

    def _scaled(self, layer: Scaler, name: str, x: Tensor) -> Tensor:
        rates = self._tensors.get(f"{name}rate")  # of rows of unequal widths
        if rates is None:
            return x / layer.rate
        of_channels = rates.to(x.dtype).repeat_interleave(x.shape[1] // len(rates))
        return x / of_channels.view(-1, *[1] * (x.dim() - 2))

    def _masked(self, layer: Masked, name: str, x: Tensor) -> Tensor:
        return layer.model(x).masked_fill(self._tensors[f"{name}absent"].flatten(), 0.0)

    def _cut(self, layer: LeadingCut, name: str, x: Tensor) -> Tensor:
        for own, (known, coordinates) in layer.parts.items():
            self._tensors[f"{name}cut.{own}"] = self._tensors[self._names[known]][(slice(None), *coordinates)]
        outputs: Tensor = layer.cut(x)
        return outputs

    def _norm(self, norm: BatchNorm, name: str, x: Tensor) -> Tensor:
        names = ("weight", "bias", "running_mean", "running_var")
        found = [self._tensors.get(name + each) for each in names]
        scale, shift, mean, variance = (None if each is None else each.flatten() for each in found)
        by_batch = norm.training or mean is None
        if self._weights is not None and by_batch:
            return self._weighted_norm(norm, x, scale, shift, mean, variance)
        return F.batch_norm(x, mean, variance, scale, shift, by_batch, norm.momentum or 0.0, norm.eps)

    def _weighted_norm(
        self,
        norm: BatchNorm,
        x: Tensor,
        scale: Tensor | None,
        shift: Tensor | None,
        mean: Tensor | None,
        variance: Tensor | None,
    ) -> Tensor:
        """Return a batch norm's result for training, in which examples of weight 0 do not count."""
        assert self._weights is not None
        assert scale is not None
        assert shift is not None
        rows, batch = self._weights.shape
        by_row = x.movedim(1, -1).reshape(batch, x.shape[2:].numel(), rows, -1)
        share = (self._weights / (self._weights.sum(1, keepdim=True) * by_row.shape[1])).t().view(batch, 1, rows, 1)
        of_channels = rows, by_row.shape[3]
        found, means, variances = _NormByShare.apply(
            by_row, share, scale.view(of_channels), shift.view(of_channels), norm.eps
        )
        if mean is not None and variance is not None:
            assert norm.momentum is not None
            count = (self._weights > 0).sum(1, keepdim=True) * by_row.shape[1]
            mean.lerp_(means.flatten(), norm.momentum)
            variance.lerp_((variances * count / (count - 1)).flatten(), norm.momentum)
        normalized: Tensor = found.view(batch, *x.shape[2:], x.shape[1]).movedim(-1, 1)
        return normalized


class _NormByShare(torch.autograd.Function):
    """A batch norm over examples and pixels that have shares in its statistics.

    Its way back is written out, because PyTorch's own takes twice as many operators.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, share: Tensor, scale: Tensor, shift: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return x (examples, pixels, rows, channels) normalized, and means and variances (rows, channels).

        Args:
            share: of an example's pixels in a row's statistics, (examples, 1, rows, 1).
            scale, shift: (rows, channels).
        """
        means = (x.sum(1, keepdim=True) * share).sum((0, 1))
        centered = x - means
        variances = (centered.square().sum(1, keepdim=True) * share).sum((0, 1))
        deviation = (variances + eps).rsqrt()
        ctx.save_for_backward(centered, share, scale, deviation)
        ctx.mark_non_differentiable(means, variances)
        return torch.addcmul(shift, centered, deviation * scale), means, variances

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor, None, Tensor, Tensor, None]:
        """Return the gradients by x, scale and shift."""
        centered, share, scale, deviation = ctx.saved_tensors
        of_shift = gradient.sum((0, 1))
        of_centered = (gradient * centered).sum((0, 1))
        of_x = torch.addcmul(gradient, centered, share * (of_centered * deviation.square()), value=-1)
        of_x.sub_(share * of_shift).mul_(deviation * scale)
        return of_x, None, of_centered * deviation, of_shift, None


_FORWARD: Mapping[type[nn.Module], Any] = {
    nn.Conv2d: RowLayers._convolution,
    nn.Linear: RowLayers._linear,
    BatchNorm: RowLayers._norm,
    Scaler: RowLayers._scaled,
    Masked: RowLayers._masked,
    LeadingCut: RowLayers._cut,
}
