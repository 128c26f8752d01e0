"""FjORD (Horvath et al., NeurIPS 2021): ordered dropout.

A device that affords width p_max trains, in every batch, the leading cut of a width drawn uniformly from the candidates
up to p_max; all cuts share their parameters, so that the leading channels learn to do without the others. With
`distillation` every batch trains the whole sub-model too, and the cut learns what the whole one says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

from messages.orders import Merge, Objective
from models.architecture import Architecture
from models.cost import (
    CONVOLUTION_KERNEL_BYTES,
    FLOAT_BYTES,
    OPTIMIZERS,
    Convolution,
    Cost,
    cost,
    distinct_convolutions,
)
from models.family import Family
from strategies.base import Setup
from strategies.heterofl import HeteroFL, HeteroFLParams
from strategies.work import RoundSettings


@dataclass(frozen=True)
class FjORDParams:
    """distillation: the paper's self-distillation. statistics_devices: as in HeteroFL."""

    distillation: bool = False
    statistics_devices: int = 0


class FjORD(HeteroFL):
    """w <- mean over the devices with p_max >= p, weighted by examples, of what belongs to width p.

    Devices minimize E_p L_p, one p drawn per batch: L_p = CE(F_p(x), y), or with distillation
    L_p = CE(F(x), y) + CE(F_p(x), softmax F(x)), F being the device's whole sub-model of width p_max and the softmax
    constant; with p = p_max the first term alone (`client_app.objectives._ordered_dropout`, "ordered dropout").
    """

    merge = Merge(weighting="examples")

    def __init__(self, setup: Setup, params: FjORDParams) -> None:
        super().__init__(setup, HeteroFLParams(statistics_devices=params.statistics_devices))
        self.params = params
        self.widths = tuple(sorted(setup.widths, reverse=True))  # of the candidates

    @classmethod
    def family_defaults(cls, params: Any) -> dict[str, Any]:
        """No scaler."""
        return {}

    def objective(self, device: int, architecture: Architecture) -> Objective:
        """Ordered dropout among the candidates up to the device's own."""
        widths = self.widths[self.candidates.index(architecture) :]
        return Objective(kind="ordered dropout", widths=widths[::-1], distillation=self.params.distillation)

    @classmethod
    def price(
        cls,
        family: Family,
        architecture: Architecture,
        settings: RoundSettings,
        widths: tuple[float, ...],
        params: FjORDParams,
    ) -> Cost:
        """`training_cost`."""
        batch_size = settings.training.batch_size
        return training_cost(family, architecture, widths, params.distillation, batch_size, settings.optimizer)


@lru_cache(maxsize=4096)
def training_cost(
    family: Family,
    architecture: Architecture,
    widths: tuple[float, ...],
    distillation: bool,
    batch_size: int,
    optimizer: str,
) -> Cost:
    """What ordered dropout among the `widths` up to an architecture costs: more than training it alone.

    Memory is that of the dearest step, the whole sub-model's or a narrower cut's. A cut has the activations of its
    width, but weights, gradients and optimizer state of the whole, and two tensors as large as the largest parameter
    while a slice's gradient is written into the whole one's. With distillation all gradients of the whole are there
    before the cut begins, and so is the target; the activations of both are never held at a time. Compiled convolutions
    of all widths are kept.

    FLOPs are the mean over the draws. Parameters and payload are the architecture's.
    """

    def alone(a: Architecture) -> Cost:
        return cost(family, a, batch_size=batch_size, optimizer=optimizer)

    whole = alone(architecture)
    narrower = [a for a in map(family.width, widths) if a.widths < architecture.widths]
    convolutions = {a: distinct_convolutions(family, a) for a in (architecture, *narrower)}
    largest = max(prod(spec.shape) for spec in family.tensors(architecture).values())
    copies = 1 + OPTIMIZERS[optimizer].state  # of all parameters: the weights themselves, and what the optimizer keeps
    steps_bytes = [_without_kernels(whole, convolutions[architecture])]
    for a in narrower:
        cut = alone(a)
        beyond = whole.parameters - cut.parameters
        extra = (copies + 1) * beyond + 2 * largest
        if (
            distillation
        ):  # `cost` has let the cut's gradients pile up; here they are added to those of the whole at once
            extra += cut.parameters + batch_size * family.classes
        steps_bytes.append(_without_kernels(cut, convolutions[a]) + FLOAT_BYTES * extra)
    kernel_bytes = CONVOLUTION_KERNEL_BYTES * len(set().union(*convolutions.values()))
    cut_flops = sum(alone(a).training_flops for a in narrower)
    draws = 1 + len(narrower)
    mean_flops = (
        whole.training_flops + cut_flops // draws if distillation else (whole.training_flops + cut_flops) // draws
    )
    return replace(whole, peak_training_memory_bytes=kernel_bytes + max(steps_bytes), training_flops=mean_flops)


def _without_kernels(price: Cost, convolutions: set[Convolution]) -> int:
    return price.peak_training_memory_bytes - CONVOLUTION_KERNEL_BYTES * len(convolutions)
