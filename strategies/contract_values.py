"""Values that the engine and a method hand to one another: orders and groups of them, contributions, models, states."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from wildflower.messages.error import MessageError
from wildflower.messages.sums import WeightedSum
from wildflower.messages.tensor_sets import TensorSet, TensorSets, Weights
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.placement import Placement, Select, leading
from wildflower.strategies.params import Params
from wildflower.strategies.run_settings import RoundSettings
from wildflower.tasks.public import PublicData


@dataclass(frozen=True)
class Selection:
    """The channels that a sub-model takes: a rule of `wildflower.models.placement` and its number. Hashable."""

    rule: Callable[[int], Select] | None = None
    number: int = 0

    @property
    def select(self) -> Select:
        """The rule as a placement wants it; the leading channels where there is none."""
        return self.rule(self.number) if self.rule else leading


LEADING = Selection()


def of_one_device(device: int) -> Select:
    """The rule of a selection that makes each device a group of its own: the leading channels, whatever its number."""
    return leading


@dataclass(frozen=True)
class Order:
    """One of the things that a device is asked in a round: which architecture it trains.

    Attributes:
        place: 0 for the architecture of `Method.assign`, then those of `Method.extra_architectures`.
        after: the place of an earlier order of the device, whose trained model this one reads
            (`ClientContext.earlier`).
    """

    device: int
    architecture: Architecture
    place: int = 0
    after: int | None = None


@dataclass(frozen=True)
class Group:
    """Orders whose tensor sets are of the same tensors at the same coordinates: one architecture under one selection.

    sent, returned: the tensor sets by name, as the client step lists them.
    """

    architecture: Architecture
    selection: Selection
    sent: Mapping[str, TensorSet]
    returned: Mapping[str, TensorSet]
    placement: Placement


@dataclass
class Contribution:
    """Values that a method absorbs: tensor sets of one device, or sums of the tensor sets of several.

    Where a node adds up, the sums of its devices' tensor sets are one contribution, and what each device sends beside
    them is another. A device that answers by itself makes one contribution of both.

    Attributes:
        group: of all the devices.
        orders, devices: whose tensor sets these are, in the same order; one device where it answered by itself.
        examples: training examples of all of them together.
        sums: tensor sets that are merged, as exact sums.
        each: tensor sets that are not merged, of one device.
    """

    group: Group
    orders: list[int]
    devices: list[int]
    examples: int
    sums: dict[str, WeightedSum]
    each: TensorSets

    def sum_of(self, tensor_set: str) -> WeightedSum:
        """The sum of a merged tensor set; MessageError where the device sent it by itself."""
        if tensor_set not in self.sums:
            raise MessageError(f"the update holds no sum of the tensor set {tensor_set!r}")
        return self.sums[tensor_set]

    def own(self, tensor_set: str) -> Weights:
        """A tensor set of one device; MessageError where there is a sum in its place."""
        if tensor_set not in self.each:
            raise MessageError(f"the update holds a sum, and not one device's {tensor_set!r}")
        return self.each[tensor_set]


@dataclass(frozen=True)
class Trained:
    """Work of one device in the round that ends: one of its orders, its examples, its loss and its facts."""

    order: Order
    tier: str
    examples: int
    loss: float | None
    facts: Mapping[str, Sequence[float]]

    @property
    def device(self) -> int:
        """The device's number."""
        return self.order.device


@dataclass(frozen=True)
class Model:
    """A model to score: weights of one architecture of a family.

    Attributes:
        weights: tensors by name. Where batch norm's running statistics are missing, devices take them first.
        exits: what a model with several exits says: what its "deepest" says, or the "mean" of the exits' logits.
    """

    family: Family
    architecture: Architecture
    weights: Weights
    exits: Literal["deepest", "mean"] = "deepest"


@dataclass
class State:
    """Values that a method needs to go on after a restart: tensors by name, and JSON values by name."""

    tensors: Weights
    values: dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """The parts that every method is made of.

    Attributes:
        widths: the candidate widths; a device gets the widest that fits its budget.
        below_smallest: "skip" a device whose budget is below the narrowest, or give it the "smallest" all the same.
        both_models: devices that can afford more than the smallest candidate train the smallest as well.
        shared: the settings of `Method.shared_params`, by their group.
        initial: tensors that the global model begins with, by name; the others are drawn.
        initial_file: where these were read from, beside which more may lie; None where the run has no such file.
        public: unlabelled inputs of the server's own (`public.task`); None where the run has none.
    """

    family: Family
    settings: RoundSettings
    widths: tuple[float, ...]
    below_smallest: str = "skip"
    both_models: bool = False
    shared: Mapping[str, Params] = field(default_factory=dict)
    initial: Mapping[str, Tensor] = field(default_factory=dict)
    public: PublicData | None = None
    initial_file: Path | None = None


class Stopwatch:
    """The server's time of a round, by the names of the parts."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Note the time of a part of the round, without that of parts which are noted by themselves inside it."""
        started, noted = time.perf_counter(), sum(self.seconds.values())
        try:
            yield
        finally:
            inside = sum(self.seconds.values()) - noted
            self.seconds[part] += max(0.0, time.perf_counter() - started - inside)
