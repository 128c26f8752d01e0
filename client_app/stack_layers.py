"""Modules that compute otherwise where one of them computes for a stack of devices: dropout, batch norms, pools."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from wildflower.client_app.stack_operators import InTurn
from wildflower.models.max_pool import HalvingMaxPool


@dataclass
class Computed:
    """The part of a stack that is being computed.

    Attributes:
        generators: of all rows, from which their dropout draws.
        rows: the places of those whose batches are computed.
        sizes: of their batches.
        weights: of their examples, under vmap; None: all alike.
    """

    generators: Sequence[torch.Generator]
    rows: Sequence[int] = ()
    sizes: Sequence[int] = ()
    weights: Tensor | None = None


@contextmanager
def for_rows(network: nn.Module, now: Computed | None) -> Iterator[None]:
    """Let a network's layers compute for a stack, for the time of a `with` block; None: in evaluation mode alone."""
    changed = []
    for module in network.modules():
        if isinstance(module, HalvingMaxPool):
            module.forward = partial(nn.MaxPool2d.forward, module)  # type: ignore[method-assign]
        elif now is None:
            continue
        elif isinstance(module, nn.Dropout):
            module.forward = partial(_dropout, module, now)  # type: ignore[method-assign]
        elif isinstance(module, _BatchNorm):
            module.forward = partial(_norm, module, now)  # type: ignore[method-assign]
        else:
            continue
        changed.append(module)
    try:
        yield
    finally:
        for module in changed:
            del module.forward


def _dropout(dropout: nn.Dropout, now: Computed, x: Tensor) -> Tensor:
    if not dropout.training or not 0 < dropout.p < 1:
        return F.dropout(x, dropout.p, dropout.training)
    noise: Tensor = _Noise.apply(x.detach(), dropout.p, now)
    return x.mul_(noise) if dropout.inplace else x * noise


class _Noise(torch.autograd.Function):
    """What dropout multiplies by: each row's as its device draws it alone, on a processor to the bit."""

    @staticmethod
    def forward(x: Tensor, p: float, now: Computed) -> Tensor:
        raise InTurn("dropout of what all devices have alike")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, p: float, now: Computed) -> tuple[Tensor, int]:
        noise = torch.zeros_like(x.movedim(in_dims[0], 0))  # a convolution puts the rows behind the examples
        for into, row, size in zip(noise, now.rows, now.sizes, strict=True):
            part = into if now.weights is None else into[:size]  # without weights any side may be the batch's
            part.copy_(torch.empty_like(part).bernoulli_(1 - p, generator=now.generators[row]))
        return noise.div_(1 - p), 0


def _norm(norm: _BatchNorm, now: Computed, x: Tensor) -> Tensor:
    """Return a batch norm's result (batch, channels, *sides), in which padded examples do not count."""
    if now.weights is None or not (norm.training or norm.running_mean is None):
        found: Tensor = type(norm).forward(norm, x)
        return found
    share = now.weights / now.weights.sum()
    sides = list(range(2, x.dim()))
    of_examples = [1, -1, *[1] * len(sides)]

    def mean_of(values: Tensor) -> Tensor:
        return (share.unsqueeze(0) @ (values.mean(sides) if sides else values)).squeeze(0)

    mean = mean_of(x)
    centered = x - mean.view(of_examples)
    variance = mean_of(centered.square())
    if norm.running_mean is not None and norm.running_var is not None:
        if norm.momentum is None or norm.num_batches_tracked is not None:
            raise InTurn("a batch norm counts its batches")
        count = (now.weights > 0).sum() * x.shape[2:].numel()
        with torch.no_grad():
            norm.running_mean.mul_(1 - norm.momentum).add_(norm.momentum * mean)
            norm.running_var.mul_(1 - norm.momentum).add_(norm.momentum * variance * count / (count - 1))
    scale = (variance + norm.eps).rsqrt()
    if norm.weight is None:
        return centered * scale.view(of_examples)
    return centered * (scale * norm.weight).view(of_examples) + norm.bias.view(of_examples)
