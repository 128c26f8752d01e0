"""Wildflower, a method of this project: few nested levels, each of which learns in every step.

A level is a cut of the next larger one. Levels are chosen once, in the first round, for the budgets of the fleet, and
stay. A device gets the largest level that it affords, and in every local step it trains all smaller levels as well,
with the labels of the classes that it holds. Each coordinate of the global model is the mean over the devices that
trained it, and on a device its gradient is the mean over the levels that have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Literal

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor
from typing_extensions import override

from wildflower.devices.budget import Budget
from wildflower.messages.tensor_sets import Weights, parameters_of
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.cost import Cost
from wildflower.models.network import Network
from wildflower.models.space import Space
from wildflower.plugins.flower_log import log
from wildflower.strategies.fitted_levels import FittedMethod, are_nested, below, fitted_levels, level_cost
from wildflower.strategies.fleet_search import find_priced, fleet_options
from wildflower.strategies.level_options import DEPTHS, searcher_of, sizes_between, space_within
from wildflower.strategies.method import Answer, ClientContext, ClientStep, Order, Setup, Trained, Traits
from wildflower.strategies.nested import MOST_LEVELS, NestedTraining, check_no_statistics, cuts_below
from wildflower.strategies.params import CountOrZero, Decay, Numbers, Params, possible_shares
from wildflower.strategies.pricing import Means, in_floats
from wildflower.strategies.shared_losses import Loss, PureLoss
from wildflower.strategies.submodel import learned, zeros

# The client step ------------------------------------------------------------------------------------------------------


class LevelTraining(NestedTraining):
    """g_j = 1/n_j sum over the n_j levels l with coordinate j of dL_l/dW_j, L_l = CE(m(f_l(x)), y).

    g_j is what takes the place of the gradient of coordinate j, and L_l what level l minimizes. m sets the logits of
    classes that the device does not hold to 0, as HeteroFL's does; without `masked` there is none.

    With a mean in place of a sum, tensors that all levels share take steps as large as when one level is trained alone.
    Because only levels that have a coordinate count, coordinates of the larger levels alone do so too. The reported
    loss is the mean of all levels' losses.

    The own level's term is differentiated first, and each before the next is computed: a device never holds the
    activations of two levels, and those of its own level go before all gradients are there.
    """

    def loss(self, context: ClientContext, model: Network) -> Loss:
        """The mean of the levels' losses; all terms but the last are differentiated already."""
        cuts = cuts_below(context, model, self.lower, "levels")
        return PureLoss(context.task, self.masking(context, model), more=[self.masking(context, cut) for cut in cuts])

    def train(self, context: ClientContext) -> Answer:
        """Train all levels and return the weights."""
        model = self.model(context)
        loss = self.loss(context, model)
        factors = gradient_factors(context.family, context.architecture, self.lower) if self.lower else {}
        return Answer(model, {"weights": dict(model.state_dict())}, context.fit(model, loss, factors=factors))


def gradient_factors(family: Family, own: Architecture, lower: Sequence[Architecture]) -> dict[str, Tensor]:
    """Return what makes the gradients of a mean over all levels those of means over the levels that have a coordinate.

    By parameter and coordinate it is the number of levels over the number of those that have the coordinate.
    """
    counts = {name: torch.ones(spec.shape) for name, spec in parameters_of(family.tensors(own)).items()}
    for level in lower:
        for name, coordinates in family.place(level).within(family.place(own)).items():
            if name in counts:
                counts[name][coordinates] += 1
    return {name: (1 + len(lower)) / count for name, count in counts.items()}


# The server half ------------------------------------------------------------------------------------------------------


class WildflowerParams(Params):
    """Wildflower's settings."""

    levels: CountOrZero = Field(
        4,
        le=MOST_LEVELS,
        description="Levels at most, chosen in the first round for the fleet's budgets between the smallest and the "
        "largest of `widths`; 0: the levels are `widths` themselves",
    )
    shares: Numbers = Field(
        (0.0, 0.125, 0.25, 0.5, 1.0),
        description="Shares of its channels that a layer may keep where levels are searched layer by layer; 0 removes "
        "layers that may go; empty: levels are cuts of one width and of the depth alone",
    )
    criterion: Literal["parameters", "balanced"] = Field(
        "parameters",
        description="What is searched layer by layer for each budget: the most parameters, or the largest sum over the "
        "blocks of log(1 + parameters), which spreads parameters over the blocks",
    )
    masked_loss: bool = Field(
        True,
        description="Whether devices minimize HeteroFL's masked cross-entropy; false: the task's own loss, also where "
        "labels are not one class per example",
    )
    momentum: Decay = Field(
        0.5, description="Share of its last step that the server adds to the next one, at coordinates that were trained"
    )

    @field_validator("shares")
    @classmethod
    def _possible_shares(cls, shares: tuple[float, ...]) -> tuple[float, ...]:
        return possible_shares(shares) if shares else shares

    @model_validator(mode="after")
    def _searched(self) -> WildflowerParams:
        if self.criterion != "parameters" and not (self.levels and self.shares):
            raise ValueError("criterion = 'balanced' is for levels that are searched: set levels above 0, and shares")
        return self


class Wildflower(FittedMethod[WildflowerParams]):
    """v_j <- beta v_j + (mean over the devices that trained coordinate j, unweighted - W_j);  W_j <- W_j + v_j.

    Untouched coordinates keep W_j and v_j. beta is `momentum`; with beta = 0 every coordinate becomes the mean.

    Batch norm is HeteroFL's: devices normalize by their batch, each level by its own, and statistics are taken for
    every level that is scored.
    """

    def __init__(self, setup: Setup, params: WildflowerParams) -> None:
        super().__init__(setup, params)
        self.widths = setup.widths
        self.steps = self.settings.training.examples_at_once, self.settings.optimizer
        if params.levels != 1 and are_nested(self.family, self.candidates):
            check_no_statistics(self.family, self.scored_architecture, "levels of wildflower")
        self.velocity = zeros(learned(self.weights)) if params.momentum else {}

    @override
    @classmethod
    def traits(cls, params: WildflowerParams) -> Traits:
        # Momentum looks at who owns a coordinate.
        return replace(super().traits(params), tells_more=params.momentum > 0)

    @property
    def below_the_smallest(self) -> Architecture | None:
        """The smallest of `widths`: the smallest level, which was chosen for other devices, may be a large model."""
        return None if self.below_smallest == "skip" else self.family.candidates(self.widths)[-1]

    def survey(self, fleet: Iterable[Means]) -> None:
        """Choose the levels for what the devices of the fleet may spend now."""
        if not self.params.levels:
            return
        named = self.family.candidates(self.widths)
        if len(named) > 1 and not are_nested(self.family, named):
            log.info("Wildflower: no candidate of %s lies inside another, so each is a level", self.family.name)
            return
        fleet, smallest = list(fleet), self.cost(named[-1]).parameters
        # No block is left out for another one where all are to keep a part.
        depths = DEPTHS if self.params.criterion == "parameters" else ()
        options = [*sizes_between(self.family, self.widths, depths), *self.searched(fleet)]
        options = [option for option in options if self.cost(option).parameters >= smallest]
        found = fitted_levels(self.family, options, fleet, self.params.levels, self.price)
        if not found:
            log.warning("Wildflower: no device affords any level now, so the levels are those of `widths`")
            return
        self.candidates = found
        parameters = ", ".join(f"{self.cost(level).parameters:,}" for level in self.candidates)
        log.info("Wildflower: levels of %s parameters", parameters)

    @cached_property
    def space(self) -> Space | None:
        """The architectures from which levels are searched layer by layer; None: they are not."""
        return space_within(self.family, max(self.widths), self.params.shares)

    def searched(self, fleet: Sequence[Means]) -> list[Architecture]:
        """Return what the search finds for the budgets of a fleet
        (`wildflower.strategies.fleet_search.fleet_options`)."""
        if self.space is None or (searcher := searcher_of(self.space, self.params.criterion, *self.steps)) is None:
            return []
        rng, smallest = self.rng(6), self.space.smallest()
        order, ends = Order(0, smallest), (smallest, self.space.largest())

        def price(found: Architecture) -> Cost:
            lower = [] if self.params.levels == 1 else [smallest]
            return self.price(found, below(self.family, found, lower))

        def find(budget: Budget) -> Architecture | None:
            part = in_floats(budget, self.client_step(order), self.family, ends, self.settings)
            return find_priced(lambda left: searcher.find(left, rng), price, budget, part)

        return fleet_options(self.space, fleet, find)

    def client_step(self, order: Order) -> ClientStep:
        """Training of the device's level and of all below."""
        lower = below(self.family, order.architecture, self.candidates)
        return LevelTraining(weighting="uniform", lower=lower, masked=self.params.masked_loss)

    def training_cost(self, architecture: Architecture) -> Cost:
        """That of the architecture and of all levels below it."""
        return level_cost(self.family, architecture, below(self.family, architecture, self.candidates), *self.steps)

    def price(self, architecture: Architecture, lower: Sequence[Architecture]) -> Cost:
        """The cost of an architecture if these were the levels below it, largest first."""
        alone, training = self.cost(architecture), level_cost(self.family, architecture, tuple(lower), *self.steps)
        return replace(training, download_bytes=alone.download_bytes, upload_bytes=alone.upload_bytes)

    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        """The mean where somebody trained, and what is kept of the steps of earlier rounds there."""
        old, weight = self.weights, self.mean.weight() if self.velocity else {}
        metrics = super().finish_round(trained)
        for name, velocity in self.velocity.items():
            somebody, step = weight[name] > 0, self.params.momentum * velocity + (self.weights[name] - old[name])
            self.velocity[name] = torch.where(somebody, step, velocity)
            self.weights[name] = torch.where(somebody, old[name] + step, old[name])
        return metrics

    @override
    def beside_weights(self) -> Mapping[str, Weights]:
        return {"velocity": self.velocity}
