"""The contract of a method: two halves in one file.

The server half (`Method`) says which architecture a device gets, what it is sent, and what becomes of what it returns.
The client step (`ClientStep`) trains. The engine (`rounds`) and the client (`client_app`) do everything else, and know
no method by name. Neither half imports Flower.

Around it: `client_context` (what a client step works with), `contract_values` (what engine and method hand to one
another), `traits` (what a run may ask of the method), `on_devices` (models and answers that stay on devices),
`pricing`, `training_steps` (ready-made client steps). What a method usually needs of them is imported from here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Generic

import numpy as np
from typing_extensions import TypeVar

from wildflower.devices.budget import Budget
from wildflower.messages.frozen_parts import frozen_nbytes
from wildflower.messages.tensor_sets import TensorSets, Weights
from wildflower.models.architecture import Architecture
from wildflower.models.cost import Cost, cost
from wildflower.strategies.aggregation import CoordinateMean, running_mean
from wildflower.strategies.client_context import ClientContext
from wildflower.strategies.client_step import Answer, ClientStep, client_step_of
from wildflower.strategies.contract_values import (
    LEADING,
    Contribution,
    Group,
    Model,
    Order,
    Selection,
    Setup,
    State,
    Stopwatch,
    Trained,
    of_one_device,
)
from wildflower.strategies.on_devices import OnDevices
from wildflower.strategies.params import HasParams, Params
from wildflower.strategies.pricing import Means, tensor_set_bytes
from wildflower.strategies.private_mean import PrivateMean
from wildflower.strategies.training_steps import Training
from wildflower.strategies.traits import Traits

P = TypeVar("P", bound=Params, default=Any)
"""The class of a method's settings."""


class Method(OnDevices, HasParams, ABC, Generic[P]):
    """The server half of a method. The engine calls it; it never builds messages.

    Class attributes that a method sets:
        shared_params: settings of parts that several methods share and that this one reads, by their group's name.
        family_options: how the method wants its family built, such as HeteroFL's static batch norm.
        fit_for: what the run may ask of it, whatever its settings.

    Everything that a resumed run needs is in `state`; all else follows from seed and round.
    """

    shared_params: ClassVar[Mapping[str, type[Params]]] = {}
    family_options: ClassVar[Mapping[str, Any]] = {}
    fit_for: ClassVar[Traits] = Traits()

    def __init__(self, setup: Setup, params: P) -> None:
        self.family, self.settings, self.params = setup.family, setup.settings, params
        self.below_smallest = setup.below_smallest
        self.round = 0
        self.stopwatch = Stopwatch()

    @classmethod
    def name(cls) -> str:
        """Return the method's name in the run configuration: that of its file."""
        return cls.__module__.rsplit(".", 1)[-1].replace("_", "-")

    @classmethod
    def family_defaults(cls, params: P) -> dict[str, Any]:
        """Return arguments that the method gives a family that has them, where `family-arguments` say nothing else."""
        return {}

    @classmethod
    def traits(cls, params: P) -> Traits:
        """Return what the run may ask of the method with these settings; by default `fit_for`."""
        return cls.fit_for

    @property
    def needs_classes(self) -> bool:
        """Return whether the method goes only with tasks that have one class per example; by default what devices
        need."""
        halves = [self.client_step(Order(0, self.scored_architecture)), self.first_question]
        return any(half.needs_classes for half in halves if half is not None)

    def start(self) -> None:
        """Make what takes long, and log what the user should know; called once, before the first round."""

    def survey(self, fleet: Iterable[Means]) -> None:
        """Read what each device that is there, or some of very many, may spend now; called once, in the first round.

        A method that is made for its fleet reads the budgets; they are not worked out for one that does not.
        """

    # What devices get

    @abstractmethod
    def assign(self, device: int, budget: Budget) -> Architecture | None:
        """Return the architecture of a device under its budget; None if the device cannot take part.

        It is asked for several budgets before one is found that leaves room for the message: answers depend on the
        round, the device and the budget only, and nothing is logged.
        """

    def extra_architectures(self, device: int, budget: Budget, architecture: Architecture) -> list[Architecture]:
        """Return what else a device trains in the same round, after the architecture of `assign` and in this order.

        Nothing by default. The device trains one after the other, and is sent all weights at once: its memory must hold
        the largest of them, its link their sum.
        """
        return []

    def after(self, device: int, place: int) -> int | None:
        """Return the place of the earlier order whose trained model the order at `place` reads; None by default."""
        return None

    def selection(self, device: int, architecture: Architecture) -> Selection:
        """Return which channels the device's sub-model takes; the leading ones by default."""
        return LEADING

    @abstractmethod
    def client_step(self, order: Order) -> ClientStep:
        """Return the client step of an order, with its settings."""

    def begin_round(self, orders: Sequence[Order]) -> None:
        """Prepare a round; called when its orders are known and before the first payload is asked for."""

    @abstractmethod
    def payload(self, group: Group) -> TensorSets:
        """Return the tensor sets that the devices of a group are sent (never asked where nothing is sent).

        Before the first round they are asked for once and dropped (`wildflower.rounds.layout_check`), after `start` and
        before any `begin_round`: what later rounds do must not depend on that.
        """

    # What comes back

    @abstractmethod
    def absorb(self, contribution: Contribution) -> None:
        """Take in tensor sets as they arrive; they are dropped afterwards. MessageError refuses them."""

    @abstractmethod
    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        """Turn what was absorbed into the next global model.

        Args:
            trained: every order that was done, sorted by device.

        Returns:
            Figures of the method's own for the journal.
        """

    # What is scored and kept

    @property
    @abstractmethod
    def smallest_architecture(self) -> Architecture:
        """The smallest architecture that a device may get: who cannot afford it does not take part."""

    @property
    @abstractmethod
    def scored_architecture(self) -> Architecture:
        """The architecture of the global model as it is scored."""

    @abstractmethod
    def models(self, architectures: Collection[Architecture]) -> dict[Architecture, Model]:
        """Return the models of some architectures, to be scored on the server; {} if models live on devices only."""

    @property
    def deliverable(self) -> list[Architecture]:
        """The architectures that any device may be given which affords them, where a run delivers the best that fits.

        By default the smallest, and the one that is scored. Those that devices trained last come beside them.
        """
        return list(dict.fromkeys([self.scored_architecture, self.smallest_architecture]))

    def personal(self, device: int, budget: Budget) -> tuple[Architecture, Selection] | None:
        """Return what a device is scored with on its own test shard; None where it cannot take part.

        By default the architecture of `assign`, cut from the leading channels. This is asked of every device after a
        round, and must not change what later rounds do.
        """
        architecture = self.assign(device, budget)
        return None if architecture is None else (architecture, LEADING)

    def frozen_weights(self) -> Weights:
        """Return the tensors of the global model that the run freezes; {} if it freezes none."""
        return {}

    @abstractmethod
    def state(self) -> State:
        """Return everything a resumed run needs beside the configuration and the round's number."""

    @abstractmethod
    def load(self, state: State) -> None:
        """Restore `state`; ValueError where it is of another model."""

    # What it costs

    def training_cost(self, architecture: Architecture) -> Cost:
        """Return what training an architecture costs a device; by default by its plain loss."""
        batch_size, optimizer = self.settings.training.examples_at_once, self.settings.optimizer
        return cost(self.family, architecture, batch_size=batch_size, optimizer=optimizer)

    def cost(self, architecture: Architecture) -> Cost:
        """`training_cost`, with the bytes of the tensor sets that travel."""
        down, up = tensor_set_bytes(self.priced_step(architecture), self.family, architecture, self.settings.wire)
        # A device that gets an architecture for the first time is sent what is frozen of it, too.
        down += frozen_nbytes(self.family, architecture)
        up = self.settings.upload_bytes(up)
        return replace(self.training_cost(architecture), download_bytes=down, upload_bytes=up)

    def priced_step(self, architecture: Architecture) -> ClientStep:
        """Return the client step whose tensor sets are priced: that of any device, or of one's first round."""
        return self.client_step(Order(0, architecture))

    def order_cost(self, order: Order) -> Cost:
        """Return what one order costs its device: `cost`, unless a device's orders over one architecture differ."""
        return self.cost(order.architecture)

    @property
    def remedy(self) -> str | None:
        """Return what would let devices train that cannot afford the smallest architecture.

        None: smaller widths, or a smaller family.
        """
        return None

    # Services

    def running_mean(self, weights: Weights) -> CoordinateMean:
        """Return what aggregates values at the coordinates of some tensors over devices, as the run wants it.

        Raises ValueError where nobody could tell which of them are frozen, and get no noise.
        """
        privacy = self.settings.privacy
        if privacy is None:
            return running_mean(weights, self.settings.aggregation)
        frozen = [name for name in weights if self.family.is_frozen(name)]
        if self.family.freeze and not frozen:
            raise ValueError(f"freeze does not go with differential privacy under {self.name()}: leave one of them out")
        return PrivateMean(weights, privacy, frozen, partial(getattr, self, "round"), self.settings.rng)

    def rng(self, purpose: int, *more: int) -> np.random.Generator:
        """Return a generator that depends on the seed, the round and the given numbers only.

        Args:
            purpose: tells one kind of draw from another: 0 to 99 are the project's own, methods from outside take
                numbers from 100 on.
            more: such as the number of a device.
        """
        return self.settings.rng(self.round, purpose, *more)

    def describe(self, architecture: Architecture) -> str:
        """Return what a log calls an architecture: its lists of widths are long, and say little."""
        if architecture == self.family.full():
            return f"the whole {self.family.name}"
        return f"the {self.family.name} of {self.cost(architecture).parameters:,} parameters"
