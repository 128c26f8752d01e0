"""Dynamic model search with few nested architectures, as a plug-in: `strategy = "nested_search:NestedSearch"`.

Experiments of this folder find the file beside them. It has model search's settings, and two more, as
`nested-search.KEY`. What wildflower is compared with: the same architectures, trained as a sum in place of a mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from wildflower.devices.budget import Budget
from wildflower.models.architecture import Architecture
from wildflower.models.base import STATISTICS
from wildflower.models.cost import Cost
from wildflower.models.network import Network
from wildflower.plugins.flower_log import log
from wildflower.strategies.fitted_levels import below, fitted_levels
from wildflower.strategies.fleet_search import fleet_options
from wildflower.strategies.method import ClientContext, ClientStep, Order, Selection, Setup, State
from wildflower.strategies.model_search import ModelSearch
from wildflower.strategies.model_search_params import ModelSearchParams
from wildflower.strategies.nested import MOST_LEVELS, NestedTraining, cuts_below, training_cost
from wildflower.strategies.params import CountOrZero, Params
from wildflower.strategies.pricing import Means
from wildflower.strategies.shared_losses import Loss
from wildflower.strategies.submodel import CandidateMethod

# The client step ------------------------------------------------------------------------------------------------------


class SandwichTraining(NestedTraining):
    """L = CE(m(f(x)), y) + sum over smaller cuts c of the own sub-model f of what each minimizes in the same step.

    That is CE(m(f_c(x)), y) with the labels, and CE(f_c(x), softmax f(x)) with the own sub-model's answers, which are
    constant. Without `masked` there is no m, which sets the logits of classes that the device does not hold to 0.
    """

    teacher: Literal["labels", "own"]

    @property
    def needs_classes(self) -> bool:
        """Where it masks, or minimizes a loss that is made for classes."""
        return self.masked or self.teacher == "own"

    @override
    def loss(self, context: ClientContext, model: Network) -> Loss:
        cuts = cuts_below(context, model, self.lower, "levels")
        absent = (context.class_counts == 0).to(context.device) if self.masked else None

        def of_labels(logits: Tensor, labels: Tensor) -> Tensor:
            return context.task.loss(logits if absent is None else logits.masked_fill(absent, 0.0), labels)

        def loss(inputs: Tensor, labels: Tensor) -> Tensor:
            logits = model(inputs)
            value, target = of_labels(logits, labels), logits.detach().softmax(dim=1)
            del logits
            done = torch.zeros((), device=inputs.device)
            for cut in cuts:  # each is differentiated before the next is computed
                value.backward()
                done = done + value.detach()
                logits = cut(inputs)
                value = F.cross_entropy(logits, target) if self.teacher == "own" else of_labels(logits, labels)
                del logits
            return done + value

        return loss


# The server half ------------------------------------------------------------------------------------------------------


class NestedSearchParams(ModelSearchParams):
    """Model search's settings, and what is trained beside an architecture."""

    architectures: CountOrZero = Field(
        0,
        le=MOST_LEVELS,
        description="Nested architectures at most, chosen in the first round for the fleet's budgets, of which each "
        "device gets the largest that it affords; 0: every budget has its own",
    )
    sandwich: Literal["none", "labels", "own"] = Field(
        "none",
        description="Whether smaller cuts of a device's architecture learn in each of its steps, from the labels or "
        "from its own answers: of a few chosen architectures all smaller ones, else the smallest of the space; needs "
        "`norm` static where there is batch norm",
    )


class NestedSearch(ModelSearch):
    """Model search whose devices get one of few nested architectures, and train smaller ones in the same steps."""

    params_type: ClassVar[type[Params]] = NestedSearchParams
    params: NestedSearchParams
    distillation_steps: ClassVar[int] = 0

    def __init__(self, setup: Setup, params: NestedSearchParams) -> None:
        super().__init__(setup, params)
        if params.sandwich != "none" and any(name.endswith(STATISTICS) for name in self.weights):
            raise ValueError(
                f"nested-search.sandwich = {params.sandwich!r} needs nested-search.norm = 'static', because the "
                "sub-models of a step would mix their batch norm statistics"
            )
        self.chosen: list[Architecture] = []  # largest first

    @property
    def below_the_smallest(self) -> Architecture | None:
        """The smallest of the space, also where the few that were chosen for other devices are larger."""
        return None if self.below_smallest == "skip" else self.space.smallest()

    @override
    def survey(self, fleet: Iterable[Means]) -> None:
        if not self.params.architectures:
            return
        fleet, rng = list(fleet), self.rng(6)
        options = fleet_options(self.space, fleet, lambda budget: self.search(budget, rng))
        size = "training_flops" if self.params.criterion == "flops" else "parameters"
        self.chosen = fitted_levels(
            self.family, options, fleet, self.params.architectures, self.price, lambda cost: int(getattr(cost, size))
        )
        if not self.chosen:
            log.warning("Model search: no device affords any architecture now, so the smallest is all there is")
            self.chosen = [self.space.smallest()]
        self.candidates = self.chosen
        parameters = ", ".join(f"{self.cost(level).parameters:,}" for level in self.chosen)
        log.info("Model search: architectures of %s parameters", parameters)

    @override
    def client_step(self, order: Order) -> ClientStep:
        p = self.params
        lower = self.beside(order.architecture)
        if not lower:
            return super().client_step(order)
        teacher: Literal["labels", "own"] = "own" if p.sandwich == "own" else "labels"
        return SandwichTraining(weighting=self.weighting, lower=lower, teacher=teacher, masked=p.masked_loss)

    def beside(self, architecture: Architecture) -> tuple[Architecture, ...]:
        """Return the cuts that a device trains beside its own architecture, largest first."""
        if self.params.sandwich == "none":
            return ()
        return below(self.family, architecture, self.chosen or [self.space.smallest()])

    @override
    def training_cost(self, architecture: Architecture) -> Cost:
        return self._training_cost(architecture, self.beside(architecture))

    def price(self, architecture: Architecture, lower: Sequence[Architecture]) -> Cost:
        """Return the cost of an architecture if these were the chosen ones below it, largest first."""
        beside = () if self.params.sandwich == "none" else tuple(lower)
        alone, training = self.cost(architecture), self._training_cost(architecture, beside)
        return replace(training, download_bytes=alone.download_bytes, upload_bytes=alone.upload_bytes)

    def _training_cost(self, architecture: Architecture, lower: tuple[Architecture, ...]) -> Cost:
        batch_size, optimizer = self.settings.training.examples_at_once, self.settings.optimizer
        return training_cost(self.family, architecture, lower, batch_size, optimizer)

    @override
    def price_of_found(self, found: Architecture) -> Cost:
        beside = [] if self.params.sandwich == "none" else below(self.family, found, [self.space.smallest()])
        return self.price(found, beside)

    @override
    def assign(self, device: int, budget: Budget) -> Architecture | None:
        if self.params.architectures:
            return CandidateMethod.assign(self, device, budget)
        return super().assign(device, budget)

    @override
    def personal(self, device: int, budget: Budget) -> tuple[Architecture, Selection] | None:
        if not self.params.architectures:
            return super().personal(device, budget)
        found = self.assign(device, budget)
        return None if found is None else (found, self.scored_selection(found))

    @override
    def subnet(self, rng: np.random.Generator) -> Architecture:
        return self.chosen[int(rng.integers(len(self.chosen)))] if self.chosen else super().subnet(rng)

    @override
    def state(self) -> State:
        state = super().state()
        state.values["architectures"] = [architecture.to_json() for architecture in self.chosen]
        return state

    @override
    def load(self, state: State) -> None:
        super().load(state)
        self.chosen = [Architecture.from_json(value) for value in state.values["architectures"]]
        for architecture in self.chosen:
            self.family.validate(architecture)
        if self.params.architectures and not self.chosen:
            raise ValueError("the checkpoint holds no architectures")
        self.candidates = self.chosen or self.candidates
