"""Dynamic model search (Yao 2024, arXiv:2409.08858).

Titled "Exploring System-Heterogeneous Federated Learning with Dynamic Model Selection" there, and "Revisiting
System-Heterogeneous Federated Learning through Dynamic Model Search" elsewhere.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from wildflower.devices.budget import Budget
from wildflower.models.architecture import Architecture
from wildflower.models.base import STATISTICS
from wildflower.models.cost import Cost
from wildflower.models.network import Network
from wildflower.models.space import Space
from wildflower.strategies.fleet_search import find_priced, fleet_options
from wildflower.strategies.method import ClientContext, ClientStep, Order, Selection, Setup, State, Trained, Training
from wildflower.strategies.model_search_params import ModelSearchParams, layer_shares
from wildflower.strategies.nested import NestedTraining, below, fitted_levels, levels_loss, training_cost
from wildflower.strategies.params import Params
from wildflower.strategies.pricing import Means, fits, in_floats
from wildflower.strategies.search import AscentSearch, ExactSearch, PoolSearch
from wildflower.strategies.shared_losses import Loss
from wildflower.strategies.static_norm import MaskedTraining, StaticNormMethod

log = logging.getLogger("flwr")  # what Flower's own log is called

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

    def loss(self, context: ClientContext, model: Network) -> Loss:
        """The sum; all terms but the last are differentiated already."""
        loss_of_logits = self.loss_of_logits(context)

        def criterion(logits: Tensor, labels: Tensor, own: Tensor | None) -> Tensor:
            if own is not None and self.teacher == "own":
                return F.cross_entropy(logits, own.softmax(dim=1))
            return loss_of_logits(logits, labels)

        return levels_loss(context, model, self.lower, criterion)


# The server half ------------------------------------------------------------------------------------------------------


class ModelSearch(StaticNormMethod[ModelSearchParams]):
    """Every device gets the largest sub-model, layer by layer, that its memory and its link allow in this round.

    Element-wise aggregation: W[j] <- mean over the devices that have coordinate j, else W[j] stays. Sub-models are
    leading cuts, and devices train as in FedAvg. With `norm = "batch"` they return the running statistics of batch
    norms, which are averaged like weights (the paper, section 4.5). There is no scaler, which is made for one width
    everywhere: behind a layer of few channels that reads many it would make too much of them.

    The client step is `wildflower.strategies.method.Training`, or with `masked_loss` HeteroFL's `MaskedTraining`.
    """

    params_type: ClassVar[type[Params]] = ModelSearchParams
    family_options: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, setup: Setup, params: ModelSearchParams) -> None:
        own = layer_shares(params.layer_shares)
        try:
            self.space = Space.of(setup.family, sorted(params.shares), own, params.min_blocks)
        except ValueError as error:
            given: dict[str, Any] = {"shares": list(params.shares), "layer-shares": params.layer_shares}
            if params.min_blocks > 1:
                given["min-blocks"] = params.min_blocks
            settings = ", ".join(f"model-search.{key} = {value!r}" for key, value in given.items() if value)
            raise ValueError(f"{settings}: {error}") from None
        super().__init__(setup, params, [self.space.largest(), self.space.smallest()])
        if params.sandwich != "none" and any(name.endswith(STATISTICS) for name in self.weights):
            raise ValueError(
                f"model-search.sandwich = {params.sandwich!r} needs model-search.norm = 'static', because the "
                "sub-models of a step would mix their batch norm statistics"
            )
        self.chosen: list[Architecture] = []  # where there are few, largest first

    @classmethod
    def family_defaults(cls, params: ModelSearchParams) -> dict[str, Any]:
        """No scaler, and the batch norm of `norm`.

        Where layers may be left out, what passes through their place is bounded, as in the paper (section 3.4).
        """
        shares = (*params.shares, *(share for own in layer_shares(params.layer_shares).values() for share in own))
        return {"norm": params.norm, "scaler": False, **({"activation": "relu6"} if 0 in shares else {})}

    @cached_property
    def searcher(self) -> ExactSearch | PoolSearch | AscentSearch:
        """Made when it is first asked, for the frontier of a large space takes a while."""
        p, settings = self.params, self.settings
        if p.searcher == "pool":
            return PoolSearch(self.space, self.cost, epsilon=p.epsilon, max_draws=p.max_draws)
        batch_size, optimizer = settings.training.examples_at_once, settings.optimizer
        if p.criterion != "parameters":
            return AscentSearch(self.space, batch_size, optimizer, p.criterion)
        return ExactSearch(self.space, batch_size=batch_size, optimizer=optimizer, tolerance=p.tolerance)

    def start(self) -> None:
        """Make the searcher, and log what it is: a space that cannot be searched ends the run before round 1."""
        super().start()
        if self.space.size == 1:
            log.warning("There is one architecture to choose from: model-search.shares leave no layer a choice")
        searcher = self.searcher
        if isinstance(searcher, ExactSearch):
            how = "exact" if searcher.exact else "thinned out, so that a little more may fit than is found"
            log.info("The frontier of %.3g architectures is %s", self.space.size, how)

    @property
    def remedy(self) -> str:
        """Smaller shares."""
        return f"smaller shares in model-search.shares = {', '.join(f'{share:g}' for share in self.params.shares)!r}"

    @property
    def below_the_smallest(self) -> Architecture | None:
        """The smallest of the space, also where the few that were chosen for other devices are larger."""
        return None if self.below_smallest == "skip" else self.space.smallest()

    def survey(self, fleet: Iterable[Means]) -> None:
        """Choose few architectures for what the devices of the fleet may spend now, where few are wanted.

        They are chosen among what the search finds for the fleet (`wildflower.strategies.fleet_search.fleet_options`).
        """
        if not self.params.architectures:
            return
        fleet, rng = list(fleet), self.rng(6)
        options = fleet_options(self.space, fleet, lambda budget: self._search(budget, rng))
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

    def client_step(self, order: Order) -> ClientStep:
        """HeteroFL's, or plain training, or either of several cuts at once."""
        p = self.params
        if lower := self._beside(order.architecture):
            return SandwichTraining(
                weighting=p.weighting,
                lower=lower,
                teacher="own" if p.sandwich == "own" else "labels",
                masked=p.masked_loss,
            )
        kind = MaskedTraining if p.masked_loss else Training
        return kind(weighting=p.weighting)

    def _beside(self, architecture: Architecture) -> tuple[Architecture, ...]:
        """The cuts that a device trains beside its own architecture, largest first."""
        if self.params.sandwich == "none":
            return ()
        return below(self.family, architecture, self.chosen or [self.space.smallest()])

    def training_cost(self, architecture: Architecture) -> Cost:
        """That of the architecture and of what is trained beside it."""
        return self._training_cost(architecture, self._beside(architecture))

    def price(self, architecture: Architecture, lower: Sequence[Architecture]) -> Cost:
        """The cost of an architecture if these were the chosen ones below it, largest first."""
        beside = () if self.params.sandwich == "none" else tuple(lower)
        alone, training = self.cost(architecture), self._training_cost(architecture, beside)
        return replace(training, download_bytes=alone.download_bytes, upload_bytes=alone.upload_bytes)

    def _training_cost(self, architecture: Architecture, lower: tuple[Architecture, ...]) -> Cost:
        batch_size, optimizer = self.settings.training.examples_at_once, self.settings.optimizer
        return training_cost(self.family, architecture, lower, batch_size, optimizer)

    def assign(self, device: int, budget: Budget) -> Architecture | None:
        """What the search finds; where not even the smallest fits, `below-smallest` says what to do."""
        if self.params.architectures:
            return super().assign(device, budget)
        return self._search(budget, self.rng(4, device)) or self.below_the_smallest

    def _search(self, budget: Budget, rng: np.random.Generator) -> Architecture | None:
        """What the search finds under a budget, with what is trained beside it."""
        searcher = self.searcher
        if isinstance(searcher, PoolSearch):
            return searcher.find(budget, rng)
        smallest = self.space.smallest()
        ends = (smallest, self.space.largest())
        part = in_floats(budget, self.client_step(Order(0, smallest)), self.family, ends, self.settings)

        def price(found: Architecture) -> Cost:
            beside = [] if self.params.sandwich == "none" else below(self.family, found, [smallest])
            return self.price(found, beside)

        found = find_priced(lambda left: searcher.find(left, rng), price, budget, part)
        if found is not None:
            return found
        # The search found nothing that fits on the wire and beside the smallest: that alone, or the device is left out.
        return smallest if fits(self.cost(smallest), budget) else None

    def personal(self, device: int, budget: Budget) -> tuple[Architecture, Selection] | None:
        """What the search would find, but a pool does not grow by it: training is the same without this evaluation."""
        if self.params.architectures or not isinstance(self.searcher, PoolSearch):
            return super().personal(device, budget)
        architecture = self.searcher.largest(budget) or self.below_the_smallest
        return None if architecture is None else (architecture, self.scored_selection(architecture))

    def subnet(self, rng: np.random.Generator) -> Architecture:
        """A random architecture of the space, for distillation, or of the few."""
        return self.chosen[int(rng.integers(len(self.chosen)))] if self.chosen else self.space.sample(rng)

    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        """HeteroFL's, and how many devices trained a coordinate, rows of classes that a device lacks included.

        `effective_owners` is the harmonic mean over the coordinates that anybody had: a mean over n devices has a
        variance of 1 / n of theirs, and so the mean of 1 / n is that of the variances. `untouched_share` is the share
        of coordinates that nobody trained.
        """
        figures = dict(super().finish_round(trained))
        counts = torch.cat([count.flatten() for count in self._owners(trained).values()])
        owned = counts[counts > 0].to(torch.float64)
        figures["effective_owners"] = float(len(owned) / owned.reciprocal().sum()) if len(owned) else None
        figures["untouched_share"] = 1 - len(owned) / len(counts)
        return figures

    def _owners(self, trained: Sequence[Trained]) -> dict[str, Tensor]:
        """How many devices trained each coordinate of the global model.

        One that trained two models counts by the larger, of which the other is a cut.
        """
        largest: dict[int, Architecture] = {}
        for done in sorted(trained, key=lambda done: self.cost(done.order.architecture).parameters):
            largest[done.device] = done.order.architecture
        owners = {name: torch.zeros(value.shape, dtype=torch.int32) for name, value in self.weights.items()}
        for architecture, devices in Counter(largest.values()).items():
            self.family.place(architecture).add_weight(owners, devices)
        return owners

    def state(self) -> State:
        """HeteroFL's, and what the search has seen."""
        state = super().state()
        state.values["search"] = self.searcher.state_dict()
        state.values["architectures"] = [architecture.to_json() for architecture in self.chosen]
        return state

    def load(self, state: State) -> None:
        """Restore `state`."""
        super().load(state)
        self.searcher.load_state_dict(state.values["search"])
        self.chosen = [Architecture.from_json(value) for value in state.values["architectures"]]
        for architecture in self.chosen:
            self.family.validate(architecture)
        if self.params.architectures and not self.chosen:
            raise ValueError("the checkpoint holds no architectures")
        self.candidates = self.chosen or self.candidates
