"""Dynamic model search (Yao 2024, arXiv:2409.08858).

Titled "Exploring System-Heterogeneous Federated Learning with Dynamic Model Selection" there, and "Revisiting
System-Heterogeneous Federated Learning through Dynamic Model Search" elsewhere.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator

from devices.budget import Budget
from models.architecture import Architecture
from models.space import Space
from strategies.heterofl import HeteroFL, MaskedTraining, StatisticsParams
from strategies.method import Local, Order, Selection, Setup, State, Training, in_floats
from strategies.params import Count, Numbers, Params
from strategies.search import ExactSearch, PoolSearch

log = logging.getLogger("flwr")  # what Flower's own log is called


class ModelSearchParams(StatisticsParams):
    """Settings of dynamic model search; the searchers are in `strategies.search`."""

    searcher: Literal["exact", "pool"] = Field(
        "exact", description="How architectures are found: by the exact search (ours), or by the paper's pool"
    )
    shares: Numbers = Field(
        (0.0, 0.5, 1.0), description="Shares of its channels that a layer may keep (S); 0 removes layers that may go"
    )
    layer_shares: str = Field(
        "",
        description="Shares of single layers instead, such as \"stem = [1], 'stage3_*' = [0, 0.5]\"",
    )
    min_blocks: Count = Field(1, description="Blocks that stay of each stage of a ResNet, or of a transformer")
    tolerance: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.02, description="Share of the optimum's parameters that an architecture drawn by the exact search may lack"
    )
    epsilon: Annotated[float, Field(gt=0, le=1)] = Field(
        0.8, description="Probability with which the pool's search stops after each draw"
    )
    max_draws: Count = Field(5, description="Maximum draws of the pool's search for one device (T_max)")
    weighting: Literal["uniform", "examples"] = Field(
        "uniform", description="Weight of a device in a coordinate's mean over its owners: uniform, or by examples"
    )
    masked_loss: bool = Field(
        True, description="Whether devices minimize HeteroFL's masked cross-entropy; false: plain cross-entropy"
    )

    @field_validator("shares")
    @classmethod
    def _possible_shares(cls, shares: tuple[float, ...]) -> tuple[float, ...]:
        if not all(0 <= share <= 1 for share in shares) or max(shares, default=0) <= 0:
            raise ValueError("every share lies in [0, 1], and one is above 0")
        return shares

    @field_validator("layer_shares")
    @classmethod
    def _possible_layer_shares(cls, text: str) -> str:
        layer_shares(text)
        return text


class ModelSearch(HeteroFL):
    """Every device gets the largest sub-model, layer by layer, that its memory and its link allow in this round.

    Element-wise aggregation: W[j] <- mean over the devices that have coordinate j, else W[j] stays. Sub-models are
    leading cuts; local training and scoring are HeteroFL's but for the scaler, which is made for one width everywhere:
    behind a layer of few channels that reads many it would make too much of them. `family-arguments` may say `norm =
    'batch'`: devices then keep running statistics, which are averaged like weights (the paper, section 4.5).

    The device half is HeteroFL's `MaskedTraining`, or without `masked_loss` `strategies.method.Training`.
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

    @classmethod
    def family_defaults(cls, params: ModelSearchParams) -> dict[str, Any]:
        """HeteroFL's static batch norm, but no scaler.

        Where layers may be left out, what passes through their place is bounded, as in the paper (section 3.4).
        """
        shares = (*params.shares, *(share for own in layer_shares(params.layer_shares).values() for share in own))
        return {"norm": "static", "scaler": False, **({"activation": "relu6"} if 0 in shares else {})}

    @cached_property
    def searcher(self) -> ExactSearch | PoolSearch:
        """Made when it is first asked, for the frontier of a large space takes a while."""
        p, settings = self.params, self.settings
        if p.searcher == "pool":
            return PoolSearch(self.space, self.cost, epsilon=p.epsilon, max_draws=p.max_draws)
        return ExactSearch(
            self.space,
            batch_size=settings.training.batch_size,
            optimizer=settings.optimizer,
            tolerance=p.tolerance,
        )

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

    def local(self, order: Order) -> Local:
        """HeteroFL's, or plain training."""
        kind = MaskedTraining if self.params.masked_loss else Training
        return kind(weighting=self.params.weighting)

    def assign(self, device: int, budget: Budget) -> Architecture | None:
        """What the search finds; where not even the smallest fits, `below-smallest` says what to do."""
        if isinstance(self.searcher, ExactSearch):
            smallest = self.space.smallest()
            local = self.local(Order(device, smallest))
            budget = in_floats(budget, local, self.family, smallest, self.settings.wire)
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

    def state(self) -> State:
        """HeteroFL's, and what the search has seen."""
        state = super().state()
        state.values["search"] = self.searcher.state_dict()
        return state

    def load(self, state: State) -> None:
        """Restore `state`."""
        super().load(state)
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
