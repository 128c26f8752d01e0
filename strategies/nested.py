"""Training sub-models of a sub-model that share its parameters: how they compute, and what a step of one takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod

import torch
from torch import Tensor
from torch.func import functional_call

from models.architecture import Architecture
from models.base import Family
from models.cost import CONVOLUTION_KERNEL_BYTES, FLOAT_BYTES, OPTIMIZERS, Convolution, cost
from models.layers import Network


def leading_cut(
    model: Network, family: Family, whole: Architecture, architecture: Architecture
) -> Callable[[Tensor], Tensor]:
    """A smaller sub-model that computes with the leading slices of the model's parameters.

    It has no tensors of its own, so that its gradients arrive in those of the model.
    """
    with torch.device("meta"):
        cut = family.build(architecture)
    coordinates = family.place(architecture).within(family.place(whole))

    def compute(inputs: Tensor) -> Tensor:
        slices = {name: p[coordinates[name]] for name, p in model.named_parameters() if name in coordinates}
        logits: Tensor = functional_call(cut, slices, (inputs,))
        return logits

    return compute


@lru_cache(maxsize=4096)
def convolutions(family: Family, architecture: Architecture) -> frozenset[Convolution]:
    """The distinct convolutions of an architecture, for each of which code is compiled."""
    return frozenset(family.convolutions(architecture))


@lru_cache(maxsize=16384)
def step_bytes(
    family: Family,
    whole: Architecture,
    cut: Architecture,
    *,
    batch_size: int,
    optimizer: str,
    gradients_held: bool,
) -> int:
    """Peak memory in bytes of one step of a `leading_cut`, without the compiled convolutions.

    A cut has the activations of its own size, but weights, gradients and optimizer state of the whole, and two tensors
    as large as the largest parameter while a slice's gradient is written into the whole one's.

    Args:
        gradients_held: whether all gradients of the whole are there before the cut begins. `cost` has let the cut's
            pile up; here they are added to those of the whole at once.
    """
    own = cost(family, cut, batch_size=batch_size, optimizer=optimizer)
    parameters = cost(family, whole, batch_size=batch_size, optimizer=optimizer).parameters
    largest = max(prod(spec.shape) for spec in family.tensors(whole).values())
    copies = 1 + OPTIMIZERS[optimizer].state  # of all parameters: the weights themselves, and what the optimizer keeps
    extra = (copies + 1) * (parameters - own.parameters) + 2 * largest
    if gradients_held:
        extra += own.parameters
    kernels = len(convolutions(family, cut))
    return own.peak_training_memory_bytes - CONVOLUTION_KERNEL_BYTES * kernels + FLOAT_BYTES * extra
