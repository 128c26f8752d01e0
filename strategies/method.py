"""The contract of a method: two halves in one file.

The server half (`Method`) says which architecture a device gets, what it is sent, and what becomes of what it returns.
The client step (`ClientStep`) trains. The engine (`rounds`) and the client (`client_app`) do everything else, and know
no method by name. Neither half imports Flower.

What travels are named tensor sets (`wildflower.messages.tensor_sets`). The client step lists them, in `ClientStep.sent`
and `ClientStep.returned`, so that server and device derive the same layouts; bytes, budgets and lateness follow from
them.
"""

from __future__ import annotations

import json
import random
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from wildflower.devices.budget import Budget
from wildflower.devices.validation import MAX_WHOLE, shown
from wildflower.messages.encoding import Wire
from wildflower.messages.error import MessageError
from wildflower.messages.frozen_parts import frozen_nbytes
from wildflower.messages.orders import LocalTraining, Merge, StepReference
from wildflower.messages.sums import WeightedSum
from wildflower.messages.tensor_sets import TensorSet, TensorSets, Weights, nbytes
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.cost import FLOAT_BYTES, Cost, cost
from wildflower.models.layers import Network
from wildflower.models.placement import Placement, Select, leading
from wildflower.plugins.reference import PluginError, class_of
from wildflower.strategies.aggregation import CoordinateMean, running_mean
from wildflower.strategies.params import Params
from wildflower.strategies.privacy import PrivateMean
from wildflower.strategies.run_settings import RoundSettings
from wildflower.strategies.shared_losses import Loss, Regularizer
from wildflower.tasks.public import PublicData
from wildflower.tasks.task import Task

# The client step ------------------------------------------------------------------------------------------------------


class ClientContext(Protocol):
    """What a client step works with: one order of one device.

    Attributes:
        family, architecture: the model of the order.
        received: the tensor sets that the server sent, by name.
        training: epochs or steps, batch size, optimizer and learning rate of this round.
        task: the task, with its loss.
        earlier: the model that this device trained in the order that `Method.after` named; None without one.
        chance: the only source of chance that a loss may use, seeded by the order. A backend that computes one graph
            for all batches cannot take a loss that draws from it.
        device: where to compute.
        keeps: whether the device keeps what the order comes to; False in an evaluation.
        steps_taken: optimizer steps so far.
    """

    family: Family
    architecture: Architecture
    received: TensorSets
    training: LocalTraining
    task: Task
    earlier: Network | None
    chance: random.Random
    device: torch.device
    keeps: bool
    steps_taken: int

    @property
    def examples(self) -> int:
        """How many training examples the device holds."""

    @property
    def class_counts(self) -> Tensor:
        """(classes,), how many training examples of each class the device holds.

        MessageError where the task does not have one class per example; `ClientStep.needs_classes` says it beforehand.
        """

    def build(self, weights: Weights | None = None) -> Network:
        """The order's sub-model over these tensors, which training then changes; None: freshly initialized."""

    def kept(self, name: str, *, per_architecture: bool = True, recent: bool = False) -> Weights | None:
        """Tensors that this device kept under a name in an earlier round; None where it has none.

        Args:
            name: as given to `keep`.
            per_architecture: whether each architecture has tensors of its own under this name.
            recent: in an evaluation, only what was kept in the round that is evaluated.
        """

    def keep(self, name: str, tensors: Mapping[str, Tensor], *, per_architecture: bool = True) -> None:
        """Keep tensors on the device, for later rounds and across restarts, once the order is done."""

    def steps(
        self, *models: torch.nn.Module, share: tuple[float, float] = (0.0, 1.0)
    ) -> Iterator[Iterator[tuple[Tensor, Tensor, float]]]:
        """The batch of every optimizer step that `training` asks for, for a loop of one's own over some models.

        A batch comes as the parts that the device computes with at once. Without micro-batches it is a single part.
        Each part has inputs and labels on `device`, and its weight, which is its share of the batch's examples. The
        loop adds up the gradients of `weight * loss` over the parts and then takes its step. A part is made when it is
        asked for, so that one is held at a time, and all parts have to be used before the next batch. Where
        `training.micro_batch_size` is 2 or more, a part of one example is left out. The memory that the loop holds is
        bounded and metered.

        Args:
            models: what the loop trains or reads.
            share: of the device's examples, from one share to another of a fixed order that chance has made, so that
                (0, 0.5) and (0.5, 1) are the same two halves in every round.
        """

    def one_pass(self, *models: torch.nn.Module, most: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """All training examples once, shuffled and without augmentation, for a look at them without an optimizer step.

        Inputs and labels on `device` come in batches of as many examples as the device computes with at once. Memory is
        bounded and metered.

        Args:
            models: what the pass reads.
            most: how many batches the pass has at most; 0: no limit.
        """

    def optimizer(self, model: torch.nn.Module, rate: float = 1.0) -> torch.optim.Optimizer:
        """The run's optimizer of a model's parameters, with `rate` times its learning rate."""

    def fit(
        self,
        model: Network,
        loss: Loss,
        *,
        regularizer: Regularizer | None = None,
        new_statistics: bool = False,
        rate: float = 1.0,
    ) -> float | None:
        """Train a model, on the board's GPU where the node has one that can compute the loss.

        Args:
            model: changed in place.
            loss: mean loss of a batch, from inputs and labels.
            regularizer: is added to the loss.
            new_statistics: batch norm's running statistics begin as the mean over the first batches.
            rate: how many times the run's learning rate it is trained with.

        Returns:
            The mean loss over the examples seen.
        """


@dataclass
class Answer:
    """What a client step comes to.

    Attributes:
        model: the trained model, which a later order of the device may read, and which personal evaluations score.
        tensor sets: contents of all tensor sets of `ClientStep.returned`.
        loss: mean training loss; None where nothing was trained.
        facts: numbers beside the tensor sets, such as steps taken: those that `ClientStep.facts` lists.
    """

    model: Network | None = None
    tensor_sets: TensorSets = field(default_factory=dict)
    loss: float | None = None
    facts: dict[str, list[float]] = field(default_factory=dict)


class ClientStep(BaseModel, ABC):
    """The client step of a method. Its fields are its settings, which travel with the work order.

    What a device reads is validated by the fields' types and bounds. Values must be hashable: tuples in place of lists.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    trains: ClassVar[bool] = True  # False: the order costs no training memory, and is not refused for lack of it

    @property
    def needs_classes(self) -> bool:
        """Whether it goes only with tasks that have one class per example, such as where it softens what models say."""
        return False

    def sent(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        """The tensor sets that the server sends: by default the sub-model's tensors as "weights"."""
        return {"weights": TensorSet.of(family.tensors(architecture))}

    def returned(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        """The tensor sets that the device returns: by default "weights", averaged by examples."""
        return {"weights": TensorSet.of(family.tensors(architecture), Merge())}

    def facts(self, family: Family) -> dict[str, int]:
        """The facts that the device returns: name -> how many numbers it has. None by default."""
        return {}

    def check_facts(self, facts: Mapping[str, Sequence[float]], examples: int) -> None:
        """Raise ValueError where a device's facts cannot be right: the server then refuses its whole update.

        Args:
            facts: as `facts` lists them, finite numbers.
            examples: how many training examples the device says it has trained on.
        """

    def model(self, context: ClientContext) -> Network:
        """The model as training begins, and as it is scored where nothing is trained."""
        return context.build(context.received["weights"])

    @abstractmethod
    def train(self, context: ClientContext) -> Answer:
        """Do the work on the device."""

    def scored(self, context: ClientContext, model: Network) -> torch.nn.Module:
        """The module that is scored on the device's own examples; by default the model itself."""
        return model

    @property
    def scored_beside(self) -> tuple[str, ...]:
        """Names of further networks that are scored on the device's own examples; by default there are none."""
        return ()

    def beside(self, context: ClientContext, answer: Answer | None) -> list[torch.nn.Module]:
        """The networks that `scored_beside` names, in its order.

        answer: what the training before came to; None where nothing is trained before devices are scored.
        """
        return []

    def reference(self) -> StepReference:
        """This client step as it travels."""
        kind = type(self)
        return StepReference(name=f"{kind.__module__}:{kind.__qualname__}", settings=self.model_dump(mode="json"))


class Training(ClientStep):
    """Devices minimize one model's loss, by default the task's, such as L = CE(f(x), y).

    A method that changes only the loss overrides `loss`.

    weighting: of the device's weights in the server's mean.
    """

    weighting: Literal["examples", "uniform"] = "examples"

    def returned(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        """All tensors of the sub-model, averaged."""
        return {"weights": TensorSet.of(family.tensors(architecture), Merge(weighting=self.weighting))}

    def loss(self, context: ClientContext, model: Network) -> Loss:
        """The loss that the device minimizes; by default the task's."""
        return lambda inputs, labels: context.task.loss(model(inputs), labels)

    def train(self, context: ClientContext) -> Answer:
        """Train and return the weights."""
        model = self.model(context)
        loss = context.fit(model, self.loss(context, model))
        return Answer(model, {"weights": dict(model.state_dict())}, loss)


class ClassCounts(ClientStep):
    """No training: the device says how many training examples of each class it holds."""

    trains: ClassVar[bool] = False

    @property
    def needs_classes(self) -> bool:
        """It does."""
        return True

    def sent(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        """Nothing."""
        return {}

    def returned(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        """Nothing."""
        return {}

    def facts(self, family: Family) -> dict[str, int]:
        """`class_counts`, one number per class."""
        return {"class_counts": family.classes}

    def check_facts(self, facts: Mapping[str, Sequence[float]], examples: int) -> None:
        """Class counts are whole numbers, and not all of them 0."""
        check_class_counts(facts["class_counts"])

    def train(self, context: ClientContext) -> Answer:
        """Count."""
        return Answer(facts={"class_counts": context.class_counts.tolist()})


def check_class_counts(counts: Sequence[float]) -> None:
    """Raise ValueError where these cannot be a device's numbers of examples per class."""
    if not any(counts) or not all(0 <= count < 2**31 and float(count).is_integer() for count in counts):
        raise ValueError(f"class_counts must be whole numbers from 0, not all of them 0, and not be {shown(counts)}")


def client_step_of(reference: StepReference) -> ClientStep:
    """The client step that a work order names, with its settings. Raises MessageError where there is none such."""
    return _client_step(reference.name, json.dumps(reference.settings))


@lru_cache(maxsize=64)
def _client_step(name: str, settings: str) -> ClientStep:
    try:
        kind = class_of(name, ClientStep, "the client step of a method")
    except PluginError as error:
        raise MessageError(f"this device cannot train as it is asked to: {error}. Is its app the server's?") from None
    try:
        return kind.model_validate_json(settings)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise MessageError(f"{name}: setting {where}: {first['msg']}") from None


# The server half ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Selection:
    """Which channels a sub-model takes: a rule of `wildflower.models.placement` and its number. Hashable."""

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
    """What a method absorbs: tensor sets of one device, or sums of the tensor sets of several.

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
    """What one device did in the round that ends: one of its orders, its examples, its loss and its facts."""

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
    """What a method needs to go on after a restart: tensors by name, and JSON values by name."""

    tensors: Weights
    values: dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """What every method is made of.

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
    """How the server's time of a round is spent, by the names of the parts."""

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


class Method(ABC):
    """The server half of a method. The engine calls it; it never builds messages.

    Class attributes that a method sets:
        params_type: the class of its settings.
        shared_params: settings of parts that several methods share and that this one reads, by their group's name.
        family_options: how the method wants its family built, such as HeteroFL's static batch norm.
        takes_initial_weights: whether its global model begins with `Setup.initial`, as by
            `wildflower.strategies.submodel.first_weights`.
        public_when: the values that its settings have where it learns from `Setup.public`, by their fields' names: {}
            where it always does, None where it never does. A run whose public data nothing would read is refused.
        first_question: what a device is asked before it trains for the first time; its facts go to `introduce`. Who
            gives no answer does not train in that round, and is asked again.

    Everything that a resumed run needs is in `state`; all else follows from seed and round.
    """

    params_type: ClassVar[type[Params]] = Params
    shared_params: ClassVar[Mapping[str, type[Params]]] = {}
    family_options: ClassVar[Mapping[str, Any]] = {}
    takes_initial_weights: ClassVar[bool] = False
    public_when: ClassVar[Mapping[str, Any] | None] = None
    first_question: ClientStep | None = None

    def __init__(self, setup: Setup, params: Params) -> None:
        self.family, self.settings = setup.family, setup.settings
        self.below_smallest = setup.below_smallest
        self.round = 0
        self.stopwatch = Stopwatch()

    @classmethod
    def name(cls) -> str:
        """The method's name in the run configuration: that of its file."""
        return cls.__module__.rsplit(".", 1)[-1].replace("_", "-")

    @classmethod
    def family_defaults(cls, params: Any) -> dict[str, Any]:
        """Arguments that the method gives a family that has them, where `family-arguments` say nothing else."""
        return {}

    @classmethod
    def check(cls, params: Any, *, both_models: bool) -> None:
        """Raise ValueError where the method's settings do not go together, or not with `both-models`."""

    @classmethod
    def averages(cls, params: Any) -> bool:
        """Whether all that devices return goes into a `running_mean`, and nothing relies on its being the mean.

        Then the run's `aggregation.rule` may be another one; by default it may not.
        """
        return False

    @classmethod
    def tells_means_only(cls, params: Any) -> bool:
        """Whether all that a round tells of a device is its share of means that are each of other coordinates.

        Then noise on those makes the method differentially private. By default where it `averages`: a method that also
        looks at who trained, or at how many own a coordinate, says that it may not.
        """
        return cls.averages(params)

    @classmethod
    def depends_on_rounds(cls, params: Any) -> bool:
        """Whether what is done in a round depends on how many the run has (`settings.rounds`).

        Then the run is not resumed for more rounds: those that are done would have been others.
        """
        return False

    @property
    def needs_classes(self) -> bool:
        """Whether the method goes only with tasks that have one class per example; by default what devices need."""
        halves = [self.client_step(Order(0, self.scored_architecture)), self.first_question]
        return any(half.needs_classes for half in halves if half is not None)

    def start(self) -> None:
        """Called once before the first round: make what takes long, and log what the user should know."""

    def survey(self, fleet: Iterable[Means]) -> None:
        """Called once, in the first round: what each device that is there, or some of very many, may spend now.

        A method that is made for its fleet reads the budgets; they are not worked out for one that does not.
        """

    # What devices get

    @abstractmethod
    def assign(self, device: int, budget: Budget) -> Architecture | None:
        """The architecture of a device under its budget; None where the device cannot take part.

        It is asked for several budgets before one is found that leaves room for the message: answers depend on the
        round, the device and the budget only, and nothing is logged.
        """

    def extra_architectures(self, device: int, budget: Budget, architecture: Architecture) -> list[Architecture]:
        """What else a device trains in the same round, after the architecture of `assign` and in this order.

        Nothing by default. The device trains one after the other, and is sent all weights at once: its memory must hold
        the largest of them, its link their sum.
        """
        return []

    def after(self, device: int, place: int) -> int | None:
        """The place of the earlier order whose trained model the device's order at `place` reads; None by default."""
        return None

    def selection(self, device: int, architecture: Architecture) -> Selection:
        """Which channels the device's sub-model takes; the leading ones by default."""
        return LEADING

    @abstractmethod
    def client_step(self, order: Order) -> ClientStep:
        """The client step of an order, with its settings."""

    def begin_round(self, orders: Sequence[Order]) -> None:
        """Called when a round's orders are known and before the first payload is asked for."""

    @abstractmethod
    def payload(self, group: Group) -> TensorSets:
        """The contents of the tensor sets that the devices of a group are sent (never asked where nothing is sent).

        Before the first round they are asked for once and dropped (`wildflower.rounds.layout_check`), after `start` and
        before any `begin_round`: what later rounds do must not depend on that.
        """

    def introduce(self, device: int, facts: Mapping[str, Sequence[float]]) -> None:
        """Take in a device's answer to `first_question`."""

    def lost(self, device: int) -> None:
        """Take note that what a device kept is gone; it began anew."""

    def left(self, device: int) -> None:
        """Drop what is held of a device that has left the fleet for good, also where nothing is."""

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
        """The models of some architectures, to be scored on the server; {} where models live on devices only."""

    @property
    def deliverable(self) -> list[Architecture]:
        """The architectures that any device may be given which affords them, where a run delivers the best that fits.

        By default the smallest, and the one that is scored. Those that devices trained last come beside them.
        """
        return list(dict.fromkeys([self.scored_architecture, self.smallest_architecture]))

    def has_model(self, device: int) -> bool:
        """Whether a device has a model that it could use now; by default whoever would be assigned one has.

        A method that leaves models on devices says here who has not trained one yet.
        """
        return True

    def scored_on_devices(self) -> list[tuple[int, Architecture, Selection]] | None:
        """The devices that score a model of their own on the task's test set; None: models are scored on the server.

        Where `models` has the global model all the same, that one's score is the round's, and those of devices are the
        tiers'.
        """
        return None

    def personal(self, device: int, budget: Budget) -> tuple[Architecture, Selection] | None:
        """What a device is scored with on its own test shard; None where it cannot take part.

        By default the architecture of `assign`, cut from the leading channels. This is asked of every device after a
        round, and must not change what later rounds do.
        """
        architecture = self.assign(device, budget)
        return None if architecture is None else (architecture, LEADING)

    def frozen_weights(self) -> Weights:
        """The tensors of the global model that the run freezes; {} where it freezes none."""
        return {}

    @abstractmethod
    def state(self) -> State:
        """Everything a resumed run needs beside the configuration and the round's number."""

    @abstractmethod
    def load(self, state: State) -> None:
        """Restore `state`; ValueError where it is of another model."""

    # What it costs

    def training_cost(self, architecture: Architecture) -> Cost:
        """What training an architecture costs a device; by default by its plain loss."""
        batch_size, optimizer = self.settings.training.examples_at_once, self.settings.optimizer
        return cost(self.family, architecture, batch_size=batch_size, optimizer=optimizer)

    def cost(self, architecture: Architecture) -> Cost:
        """`training_cost`, with the bytes of the tensor sets that travel."""
        down, up = tensor_set_bytes(
            self.client_step(Order(0, architecture)), self.family, architecture, self.settings.wire
        )
        # A device that gets an architecture for the first time is sent what is frozen of it, too.
        down += frozen_nbytes(self.family, architecture)
        up = self.settings.upload_bytes(up)
        return replace(self.training_cost(architecture), download_bytes=down, upload_bytes=up)

    def order_cost(self, order: Order) -> Cost:
        """What one order costs its device: `cost`, unless a device's orders over one architecture differ."""
        return self.cost(order.architecture)

    @property
    def remedy(self) -> str | None:
        """What would let devices train that cannot afford the smallest architecture.

        None: smaller widths, or a smaller family.
        """
        return None

    @property
    def helps_below_smallest(self) -> bool:
        """Whether devices below the smallest architecture train where `below-smallest` is "smallest"."""
        return True

    # Services

    def running_mean(self, weights: Weights) -> CoordinateMean:
        """What aggregates values at the coordinates of some tensors over devices, as the run wants it.

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
        """A generator that depends on the seed, the round and the given numbers only.

        Args:
            purpose: tells one kind of draw from another: 0 to 99 are the project's own, methods from outside take
                numbers from 100 on.
            more: such as the number of a device.
        """
        return self.settings.rng(self.round, purpose, *more)

    def describe(self, architecture: Architecture) -> str:
        """An architecture as a log names it: its lists of widths are long, and say little."""
        if architecture == self.family.full():
            return f"the whole {self.family.name}"
        return f"the {self.family.name} of {self.cost(architecture).parameters:,} parameters"


def with_parameter_copies(price: Cost, copies: int) -> Cost:
    """The cost with the memory of further tensors as large as all parameters, which a client step holds."""
    return replace(
        price, peak_training_memory_bytes=price.peak_training_memory_bytes + copies * FLOAT_BYTES * price.parameters
    )


@lru_cache(maxsize=4096)
def tensor_set_bytes(
    local: ClientStep, family: Family, architecture: Architecture, wire: Wire = "float32"
) -> tuple[int, int]:
    """Bytes that travel to and from a device for one order."""
    return nbytes(local.sent(family, architecture), wire), nbytes(local.returned(family, architecture), wire)


def in_floats(
    budget: Budget, local: ClientStep, family: Family, ends: tuple[Architecture, Architecture], settings: RoundSettings
) -> Budget:
    """A budget for a search that prices weights as 32-bit floats, where they travel in fewer bytes or in more.

    Under int8 architectures have more or fewer scales for their weights, so that the bytes of some shrink more than
    those of others. This goes by the one of `ends`, the smallest and the largest of a space, whose bytes shrink more.
    What is found may be a little too large for the wire, which `wildflower.strategies.search.find_priced` corrects.
    Under masks more bytes travel up than down.
    """
    if settings.wire == "float32" and not settings.secure_minimum:
        return budget
    down, up = Fraction(10**9), Fraction(10**9)
    for architecture in ends:
        floats = tensor_set_bytes(local, family, architecture)
        encoded = tensor_set_bytes(local, family, architecture, settings.wire)
        down = min(down, Fraction(encoded[0], floats[0]) if floats[0] else Fraction(1))
        up = min(up, Fraction(settings.upload_bytes(encoded[1]), floats[1]) if floats[1] else Fraction(1))

    def as_floats(limit_bytes: int | None, ratio: Fraction) -> int | None:
        return None if limit_bytes is None else min(int(limit_bytes / ratio), MAX_WHOLE)

    return replace(
        budget,
        download_bytes=as_floats(budget.download_bytes, down),
        upload_bytes=as_floats(budget.upload_bytes, up),
        seconds_per_byte_down=float(budget.seconds_per_byte_down * down),
        seconds_per_byte_up=float(budget.seconds_per_byte_up * up),
    )


def nothing_beside(architecture: Architecture) -> int:
    """No message lies in the memory that trains."""
    return 0


@dataclass(frozen=True)
class Means:
    """What a device may spend in a round, before anything is chosen for it.

    Attributes:
        budget: its message included.
        message_bytes: what the message that brings an architecture takes of its memory beside the training.
    """

    budget: Budget
    message_bytes: Callable[[Architecture], int] = nothing_beside

    def afford(self, architecture: Architecture, price: Cost) -> bool:
        """Whether the device can train an architecture at this price beside the message that brings it."""
        beside_bytes = self.message_bytes(architecture)
        if beside_bytes:
            price = replace(price, peak_training_memory_bytes=price.peak_training_memory_bytes + beside_bytes)
        return fits(price, self.budget)


def fits(price: Cost, budget: Budget) -> bool:
    """Whether a device can train an architecture of this cost, its tensors can travel, and there is time for both."""
    return fit_in_turn([price], budget)


def fit_in_turn(prices: Sequence[Cost], budget: Budget) -> bool:
    """Whether a device can train these one after the other, all their tensors can travel at once, and there is time."""
    down_bytes, up_bytes = sum(p.download_bytes for p in prices), sum(p.upload_bytes for p in prices)
    in_memory = all(p.peak_training_memory_bytes <= budget.memory_bytes for p in prices)
    in_time = budget.in_time(down_bytes, up_bytes, sum(p.training_flops for p in prices))
    return in_memory and budget.can_travel(down_bytes, up_bytes) and in_time
