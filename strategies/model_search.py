"""Dynamic model search (Yao 2024, arXiv:2409.08858).

Titled "Exploring System-Heterogeneous Federated Learning with Dynamic Model Selection" there, and "Revisiting
System-Heterogeneous Federated Learning through Dynamic Model Search" elsewhere.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from logging import INFO, WARNING
from typing import Any, Literal

import numpy as np
from flwr.common import log

from devices.budget import Budget
from messages.orders import Merge, Objective
from models.architecture import Architecture
from models.space import Space
from strategies.base import Setup, State
from strategies.heterofl import HeteroFL, HeteroFLParams
from strategies.search import ExactSearch, PoolSearch
from strategies.work import Selection


@dataclass(frozen=True)
class ModelSearchParams:
    """searcher: "exact" (ours) or "pool" (the paper's); see `strategies.search`.

    shares: S, the share of its channels that a layer may keep; 0 removes a layer that may be removed.
    layer_shares: of single layers instead, as `layer_shares` reads them.
    least_blocks: how many blocks of every stack (a ResNet's stages, a transformer's encoder) stay.
    tolerance: "exact" draws among architectures whose parameters are within this share of the optimum's.
    epsilon, most_draws: of "pool": the probability to stop after each draw, and T_max.
    weighting: of a coordinate's mean over its owners: "uniform" as in the paper, or by "examples".
    masked_loss: HeteroFL's masked cross-entropy, with its mean over the devices that hold a class; or plain
        cross-entropy.
    statistics_devices: as in HeteroFL.
    """

    searcher: Literal["exact", "pool"] = "exact"
    shares: tuple[float, ...] = (0.0, 0.5, 1.0)
    layer_shares: str = ""
    least_blocks: int = 1
    tolerance: float = 0.02
    epsilon: float = 0.8
    most_draws: int = 5
    weighting: Literal["uniform", "examples"] = "uniform"
    masked_loss: bool = True
    statistics_devices: int = 0


class ModelSearch(HeteroFL):
    """Every device gets the largest sub-model, layer by layer, that its memory and its link allow in this round.

    Element-wise aggregation: W[j] <- mean over the devices that have coordinate j, else W[j] stays. Sub-models are
    leading cuts; local training and scoring are HeteroFL's but for the scaler, which is made for one width everywhere:
    behind a layer of few channels that reads many it would make too much of them.

    Devices minimize HeteroFL's L = CE(m(f(x)), y) (`client_app.objectives.Masked`, "masked cross entropy"), or without
    `masked_loss` L = CE(f(x), y) (`client_app.objectives.local_loss`, "cross entropy").
    """

    def __init__(self, setup: Setup, params: ModelSearchParams) -> None:
        own = layer_shares(params.layer_shares)
        try:
            self.space = Space.of(setup.family, sorted(params.shares), own, params.least_blocks)
        except ValueError as error:
            given: dict[str, Any] = {"shares": list(params.shares), "layer-shares": params.layer_shares}
            if params.least_blocks > 1:
                given["least-blocks"] = params.least_blocks
            told = ", ".join(f"model-search.{key} = {value!r}" for key, value in given.items() if value)
            raise ValueError(f"{told}: {error}") from None
        ends = [self.space.largest(), self.space.smallest()]
        super().__init__(setup, HeteroFLParams(statistics_devices=params.statistics_devices), ends)
        self.search_params = params
        self.merge = Merge(weighting=params.weighting, present_classes=params.masked_loss)

    @classmethod
    def family_defaults(cls, params: ModelSearchParams) -> dict[str, Any]:
        """No scaler. Where layers may be left out, what passes through their place is bounded, as in the paper."""
        shares = (*params.shares, *(share for own in layer_shares(params.layer_shares).values() for share in own))
        return {"scaler": False, **({"activation": "relu6"} if 0 in shares else {})}

    @cached_property
    def searcher(self) -> ExactSearch | PoolSearch:
        """Made when it is first asked, for the frontier of a large space takes a while."""
        p, settings = self.search_params, self.settings
        if p.searcher == "pool":
            return PoolSearch(self.space, self.cost, epsilon=p.epsilon, most_draws=p.most_draws)
        return ExactSearch(
            self.space,
            batch_size=settings.training.batch_size,
            optimizer=settings.optimizer,
            tolerance=p.tolerance,
        )

    def summary(self) -> None:
        """Log what runs, and make the searcher: a space that cannot be searched ends the run before round 1."""
        super().summary()
        if self.space.size == 1:
            log(WARNING, "There is one architecture to choose from: model-search.shares leave no layer a choice")
        searcher = self.searcher
        if isinstance(searcher, ExactSearch):
            how = "exact" if searcher.exact else "thinned out, so that a little more may fit than is found"
            log(INFO, "The frontier of %.3g architectures is %s", self.space.size, how)

    def objective(self, device: int, architecture: Architecture) -> Objective:
        """HeteroFL's, or plain cross-entropy."""
        return super().objective(device, architecture) if self.search_params.masked_loss else Objective()

    def assign(self, device: int, budget: Budget) -> Architecture | None:
        """What the search finds; where not even the smallest fits, `below-smallest` says what to do."""
        return self.searcher.find(budget, self.rng(4, device)) or self.below_the_smallest

    def personal(self, device: int, budget: Budget) -> tuple[Architecture, Selection] | None:
        """What the search would find, but a pool does not grow by it: training is the same without this evaluation."""
        if not isinstance(self.searcher, PoolSearch):
            return super().personal(device, budget)
        architecture = self.searcher.largest(budget) or self.below_the_smallest
        return None if architecture is None else (architecture, self.scored_selection(architecture))

    def subnet(self, rng: np.random.Generator) -> Architecture:
        """A random architecture of the space, for distillation."""
        return self.space.sample(rng)

    def state_dict(self) -> State:
        """HeteroFL's, and what the search has seen."""
        state = super().state_dict()
        state.values["search"] = self.searcher.state_dict()
        return state

    def load_state_dict(self, state: State) -> None:
        """Restore `state_dict`."""
        super().load_state_dict(state)
        self.searcher.load_state_dict(state.values["search"])


def layer_shares(text: str) -> dict[str, tuple[float, ...]]:
    """Read shares of single layers: the inside of an inline TOML table, such as "stem = [1], 'stage3_*' = [0, 0.5]".

    Names are those of `models.space.Space.of`; a dot in a name needs no quotes, a star does.

    Raises:
        ValueError: it is no such table, or a value is no list of numbers.
    """
    example = "must be like \"stem = [1], 'stage3_*' = [0, 0.5]\""
    try:
        table = tomllib.loads(f"shares = {{{text}}}")["shares"]
    except tomllib.TOMLDecodeError as error:
        # tomllib's words for a key that stands there twice.
        if "immutable namespace" in str(error) or "Duplicate" in str(error):
            raise ValueError(f"{example}: a layer is named twice; give each its shares once") from None
        raise ValueError(f"{example}: {error}") from None
    found = {}
    for name, values in _flat(table):
        if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
            raise ValueError(f"{example}: {name} is no list of numbers, but {values!r}")
        found[name] = tuple(sorted(float(value) for value in values))
    return found


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """TOML reads `stage1.stream = ...` as a table in a table."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
