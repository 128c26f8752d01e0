"""FjORD (Horvath et al., NeurIPS 2021): ordered dropout.

A device that affords width p_max trains, in every batch, the leading cut of a width drawn uniformly from the candidates
up to p_max; all cuts share their parameters, so that the leading channels learn to do without the others. With
`distillation` every batch trains the whole sub-model too, and the cut learns what the whole one says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from wildflower.models.architecture import Architecture
from wildflower.models.cost import CONVOLUTION_KERNEL_BYTES, FLOAT_BYTES, Cost, cost
from wildflower.models.family import Family
from wildflower.models.network import Network
from wildflower.strategies.fitted_levels import are_nested, below
from wildflower.strategies.method import ClientContext, ClientStep, Order, Setup, Training, Traits
from wildflower.strategies.nested import MOST_LEVELS, check_no_statistics, cuts_below, step_bytes
from wildflower.strategies.params import Params
from wildflower.strategies.shared_losses import Loss, soft_cross_entropy, tags_of
from wildflower.strategies.static_norm import StaticNormMethod

# The client step ------------------------------------------------------------------------------------------------------


class OrderedDropout(Training):
    """Devices minimize E_p L_p, one width p drawn uniformly per batch, of shared parameters.

    L_p = CE(F_p(x), y), or with distillation L_p = CE(F(x), y) + CE(F_p(x), softmax F(x)), F being the device's whole
    sub-model of width p_max and the softmax constant; with p = p_max the first term alone (the paper's alpha = T = 1).
    The first term is differentiated before the second is computed: a device never holds the activations of both. Of
    tags both are means over the tokens that have one.

    Of a family that names its own candidates, such as depths, these take the place of widths.

    lower: the candidates below the device's own, largest first; each is a cut of the one before.
    """

    lower: tuple[Architecture, ...] = Field(max_length=MOST_LEVELS - 1)
    distillation: bool

    @property
    def needs_classes(self) -> bool:
        """It does with distillation."""
        return self.distillation

    def loss(self, context: ClientContext, model: Network) -> Loss:
        """Cross-entropy of the leading cut of a width that is drawn for every batch."""
        narrower = cuts_below(context, model, self.lower, "widths of ordered dropout")
        cuts: list[Callable[[Tensor], Tensor]] = [*reversed(narrower), model]

        def loss(inputs: Tensor, labels: Tensor) -> Tensor:
            cut = context.chance.choice(cuts)
            if not self.distillation:
                return context.task.loss(cut(inputs), labels)
            logits = model(inputs)
            own = context.task.loss(logits, labels)
            if cut is model:  # it agrees with itself
                return own
            target = logits.detach().softmax(dim=1)
            del logits
            own.backward()
            return own.detach() + soft_cross_entropy(cut(inputs), target, tags_of(context.task, labels))

        return loss


# The server half ------------------------------------------------------------------------------------------------------


class FjORDParams(Params):
    """FjORD's settings."""

    distillation: bool = Field(
        True, description="Whether every batch trains the widest model too, and the narrower one learns what that says"
    )


class FjORD(StaticNormMethod[FjORDParams]):
    """w <- mean over the devices with p_max >= p, weighted by examples, of what belongs to width p."""

    fit_for: ClassVar[Traits] = replace(StaticNormMethod.fit_for, takes_tokens=True)

    def __init__(self, setup: Setup, params: FjORDParams) -> None:
        super().__init__(setup, params)
        if are_nested(self.family, self.candidates):
            check_no_statistics(self.family, self.scored_architecture, "widths of ordered dropout")

    def client_step(self, order: Order) -> ClientStep:
        """Ordered dropout among the candidates up to the device's own."""
        lower = below(self.family, order.architecture, self.candidates)
        return OrderedDropout(lower=lower, distillation=self.params.distillation)

    def training_cost(self, architecture: Architecture) -> Cost:
        """More than training the architecture alone: see the function `training_cost`."""
        batch_size, distillation = self.settings.training.examples_at_once, self.params.distillation
        lower = below(self.family, architecture, self.candidates)
        return training_cost(self.family, architecture, lower, distillation, batch_size, self.settings.optimizer)


@lru_cache(maxsize=4096)
def training_cost(
    family: Family,
    architecture: Architecture,
    lower: tuple[Architecture, ...],
    distillation: bool,
    batch_size: int,
    optimizer: str,
) -> Cost:
    """Return what ordered dropout among an architecture and its `lower` cuts costs: more than training it alone.

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
    convolutions = {a: set(family.convolutions(a)) for a in (architecture, *lower)}
    target_bytes = (
        FLOAT_BYTES * batch_size * prod(family.answer(architecture, batch_size)) if distillation and lower else 0
    )
    steps_bytes = [whole.peak_training_memory_bytes - CONVOLUTION_KERNEL_BYTES * len(convolutions[architecture])]
    for a in lower:
        cut_bytes = step_bytes(
            family, architecture, a, batch_size=batch_size, optimizer=optimizer, gradients_held=distillation
        )
        steps_bytes.append(cut_bytes + target_bytes)
    kernel_bytes = CONVOLUTION_KERNEL_BYTES * len(set().union(*convolutions.values()))
    cut_flops = sum(alone(a).training_flops for a in lower)
    draws = 1 + len(lower)
    mean_flops = (
        whole.training_flops + cut_flops // draws if distillation else (whole.training_flops + cut_flops) // draws
    )
    return replace(whole, peak_training_memory_bytes=kernel_bytes + max(steps_bytes), training_flops=mean_flops)
