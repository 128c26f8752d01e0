"""Dynamic model search (Yao 2024, arXiv:2409.08858).

Titled "Exploring System-Heterogeneous Federated Learning with Dynamic Model Selection" there, and "Revisiting
System-Heterogeneous Federated Learning through Dynamic Model Search" elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from wildflower.devices.budget import Budget
from wildflower.models.architecture import Architecture
from wildflower.models.base import VARIANCE
from wildflower.models.cost import Cost
from wildflower.models.space import Space
from wildflower.plugins.flower_log import log
from wildflower.strategies.ascent_search import AscentSearch
from wildflower.strategies.fleet_search import find_priced
from wildflower.strategies.method import ClientStep, Order, Selection, Setup, State, Trained, Training
from wildflower.strategies.model_search_params import ModelSearchParams, layer_shares
from wildflower.strategies.pricing import fits, in_floats
from wildflower.strategies.search import ExactSearch, PoolSearch
from wildflower.strategies.static_norm import MaskedTraining, StaticNormMethod


class ModelSearch(StaticNormMethod[ModelSearchParams]):
    """Every device gets the largest sub-model, layer by layer, that its memory and its link allow in this round.

    Element-wise aggregation: W[j] <- mean over the devices that have coordinate j, else W[j] stays. Sub-models are
    leading cuts, and devices train as in FedAvg. With `norm = "batch"` they return the running statistics of batch
    norms, which are averaged like weights (the paper, section 4.5). There is no scaler, which is made for one width
    everywhere: behind a layer of few channels that reads many it would make too much of them.

    The client step is `wildflower.strategies.method.Training`, or with `masked_loss` HeteroFL's `MaskedTraining`.

    weighting: of a device in a coordinate's mean over its owners.
    """

    weighting: ClassVar[Literal["uniform", "examples"]] = "uniform"

    family_options: ClassVar[Mapping[str, Any]] = {}
    distillation_steps: ClassVar[int] = 100

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
            return PoolSearch(self.space, self.cost, p.epsilon, p.max_draws, p.criterion)
        batch_size, optimizer = settings.training.examples_at_once, settings.optimizer
        if p.criterion == "flops" or p.criterion == "balanced":
            return AscentSearch(self.space, batch_size, optimizer, p.criterion)
        try:
            return ExactSearch(self.space, batch_size=batch_size, optimizer=optimizer, tolerance=p.tolerance)
        except ValueError as error:
            raise ValueError(f"model-search.searcher = 'exact': {error}; 'pool' needs no chain of blocks") from None

    def start(self) -> None:
        """Make the searcher, and log what it is: a space that cannot be searched ends the run before round 1."""
        super().start()
        if self.space.size == 1:
            log.warning("There is one architecture to choose from: model-search.shares leave no layer a choice")
        own = layer_shares(self.params.layer_shares).values()
        narrower = any(0 < share < 1 for shares in (self.params.shares, *own) for share in shares)
        if narrower and any(name.endswith(VARIANCE) for name in self.family.tensors(self.family.full())):
            log.warning(
                "Running statistics of batch norms are averaged over sub-models of unlike widths, as in the paper, and "
                "may fit none of them: where scores stay near chance, set model-search.norm = 'static'"
            )
        searcher = self.searcher
        if isinstance(searcher, ExactSearch):
            how = "exact" if searcher.exact else "thinned out, so that a little more may fit than is found"
            log.info("The frontier of %.3g architectures is %s", self.space.size, how)

    @property
    def remedy(self) -> str:
        """Smaller shares."""
        return f"smaller shares in model-search.shares = {', '.join(f'{share:g}' for share in self.params.shares)!r}"

    @override
    def client_step(self, order: Order) -> ClientStep:
        kind = MaskedTraining if self.params.masked_loss else Training
        return kind(weighting=self.weighting)

    def assign(self, device: int, budget: Budget) -> Architecture | None:
        """Return what the search finds; if not even the smallest fits, `below-smallest` says what to do."""
        return self.search(budget, self.rng(4, device)) or self.below_the_smallest

    def search(self, budget: Budget, rng: np.random.Generator) -> Architecture | None:
        """Return what the search finds under a budget; None if not even the smallest fits."""
        searcher = self.searcher
        if isinstance(searcher, PoolSearch):
            return searcher.find(budget, rng)
        smallest = self.space.smallest()
        ends = (smallest, self.space.largest())
        part = in_floats(budget, self.client_step(Order(0, smallest)), self.family, ends, self.settings)
        found = find_priced(lambda left: searcher.find(left, rng), self.price_of_found, budget, part)
        if found is not None:
            return found
        # The search found nothing that fits on the wire: the smallest alone, or the device is left out.
        return smallest if fits(self.cost(smallest), budget) else None

    def price_of_found(self, found: Architecture) -> Cost:
        """Return what an architecture that the search found costs."""
        return self.cost(found)

    def personal(self, device: int, budget: Budget) -> tuple[Architecture, Selection] | None:
        """Return what the search would find, but a pool does not grow by it: training is the same without this
        evaluation."""
        if not isinstance(self.searcher, PoolSearch):
            return super().personal(device, budget)
        architecture = self.searcher.largest(budget) or self.below_the_smallest
        return None if architecture is None else (architecture, self.scored_selection(architecture))

    @override
    def subnet(self, rng: np.random.Generator) -> Architecture:
        return self.space.sample(rng)

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

    @override
    def state(self) -> State:
        state = super().state()
        if isinstance(self.searcher, PoolSearch):
            state.values["search"] = self.searcher.state_dict()
        return state

    @override
    def load(self, state: State) -> None:
        super().load(state)
        if isinstance(self.searcher, PoolSearch):
            self.searcher.load_state_dict(state.values["search"])
