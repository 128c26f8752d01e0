"""Work: what a round asks of its devices, and how it becomes messages."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Message, MessageType
from torch import Tensor

from devices.budget import Budget
from devices.clock import Timing
from messages.layouts import class_spans, returned_layout, sent_layout
from messages.orders import Batch, LocalTraining, Merge, Objective, Update, WorkOrder
from messages.packing import Layout, pack
from messages.sums import WeightedSum
from messages.wire import to_records
from models.architecture import Architecture
from models.cost import Cost
from models.family import Family
from models.placement import Placement, Select, leading

MESSAGE_BYTES = 32 * 2**20  # of distinct payloads in one message; a round's further batches wait for their turn
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class RoundSettings:
    """What every method's round is told by the run configuration (units in the names, `server_app/config.py`)."""

    run: str
    task: dict[str, Any]
    task_name: str
    seed: int
    rounds: int
    devices_per_round: int
    sampled_devices: int
    training: LocalTraining
    decay_rounds: tuple[int, ...] = ()
    decay_factor: float = 1.0
    schedule: str = "steps"
    memory_fraction: float = 1.0
    transfer_seconds: float | None = None
    deadline_seconds: float | None = None
    evaluate_every: int = 1
    evaluate_tiers: bool = True
    personal_every: int = 0
    personal_epochs: int = 1
    personal_from: int = 1
    state_dir: str = ""
    norm_bound: float = 0.0

    def rate_factor_in(self, round_number: int) -> float:
        """What is left of learning rates in one round: they fall at every decay round passed, or along a cosine."""
        if self.schedule == "cosine":
            return (1 + math.cos(math.pi * (round_number - 1) / self.rounds)) / 2
        passed = sum(round_number > r for r in self.decay_rounds)
        return float(self.decay_factor**passed)

    def training_in(self, round_number: int) -> LocalTraining:
        """The local training of one round, with its learning rate."""
        rate = self.training.learning_rate * self.rate_factor_in(round_number)
        return self.training.model_copy(update={"learning_rate": rate})

    def personal_in(self, round_number: int) -> bool:
        """Whether devices are scored on their own test shards after a round."""
        if not self.personal_every or round_number < self.personal_from:
            return False
        return round_number % self.personal_every == 0 or round_number == self.rounds

    def personal_training_in(self, round_number: int) -> LocalTraining | None:
        """What devices then do with the model before it is scored; None: nothing."""
        if not self.personal_epochs:
            return None
        return self.training_in(round_number).model_copy(update={"epochs": self.personal_epochs, "steps": 0})

    @property
    def optimizer(self) -> str:
        """The optimizer as the cost model names it: momentum keeps a state per parameter."""
        training = self.training
        return "sgd-momentum" if training.optimizer == "sgd" and training.momentum else training.optimizer

    def rng(self, round_number: int, purpose: int, *more: int) -> np.random.Generator:
        """A generator that depends on the seed, the round and the given numbers only."""
        return np.random.default_rng([self.seed, round_number, purpose, *more])


@dataclass(frozen=True)
class Selection:
    """Which channels a sub-model takes: a rule of `models.placement` and its number. Hashable, so it can be shared."""

    rule: Callable[[int], Select] | None = None
    number: int = 0

    @property
    def select(self) -> Select:
        """The rule as a placement wants it; the leading channels where there is none."""
        return self.rule(self.number) if self.rule else leading


LEADING = Selection()


@dataclass(frozen=True)
class Group:
    """Updates of the same tensors at the same coordinates: one architecture under one selection.

    `layout` is that of what is returned, `class_spans` are the elements of the flat update whose first dimension is the
    classes.
    """

    architecture: Architecture
    selection: Selection
    layout: Layout
    placement: Placement
    class_spans: tuple[tuple[int, int], ...]


def fits(cost: Cost, budget: Budget) -> bool:
    """Whether a device can train an architecture of this cost, and its weights can travel."""
    return fit_in_turn([cost], budget)


def fit_in_turn(costs: Sequence[Cost], budget: Budget) -> bool:
    """Whether a device can train these one after the other, and all their weights can travel at once."""
    within_link = budget.payload_bytes is None or sum(cost.payload_bytes for cost in costs) <= budget.payload_bytes
    return all(cost.peak_training_memory_bytes <= budget.memory_bytes for cost in costs) and within_link


@dataclass(frozen=True)
class Given:
    """What one device is asked: an architecture under a selection, and what it costs."""

    architecture: Architecture
    selection: Selection
    cost: Cost


@dataclass
class Assignment:
    """One order of one device in one round: what it may spend, what it was given (None: nothing), what came of it.

    number: of the order in its exchange, which `Work` gives. teacher: an earlier order of the same device, whose
    trained model teaches in this one.
    """

    device: int
    tier: str
    budget: Budget
    given: Given | None
    timing: Timing | None = None
    node: int | None = None
    group: int = 0
    outcome: str = ""
    update: Update | None = None
    number: int = 0
    teacher: Assignment | None = None

    @property
    def task(self) -> Given:
        """What it was given; only for devices that were given something."""
        assert self.given is not None
        return self.given

    @property
    def flops_per_example(self) -> float:
        """Of its training; of a teacher's forward passes beside it, which are a third of what training that takes."""
        taught = 0.0 if self.teacher is None else self.teacher.task.cost.training_flops / 3
        return self.task.cost.training_flops + taught

    @property
    def simulated_seconds(self) -> float:
        """Download, training and upload by the virtual clock; 0 on hardware."""
        return self.timing.total_seconds if self.timing is not None else 0.0

    @property
    def limit_bytes(self) -> int:
        """Memory the device may use; 0, no limit, where it was given on purpose what its budget does not allow."""
        needed = self.task.cost.peak_training_memory_bytes
        return self.budget.memory_bytes if needed <= self.budget.memory_bytes else 0


def by_device(assignments: Iterable[Assignment]) -> dict[int, list[Assignment]]:
    """The orders of every device, as they were assigned."""
    found: dict[int, list[Assignment]] = {}
    for a in assignments:
        found.setdefault(a.device, []).append(a)
    return found


def devices_that_trained(assignments: Iterable[Assignment]) -> int:
    """How many devices did at least one of their orders."""
    return len({a.device for a in assignments if a.outcome == "trained"})


@dataclass
class Contribution:
    """What a strategy absorbs: the sum of some orders' updates, or one order's weights where nothing is merged.

    `devices` are those of `orders` (`Assignment.number`), in the same order.
    """

    group: Group
    orders: list[int]
    devices: list[int]
    examples: int
    total: WeightedSum | None
    weights: Weights | None


def seed_of(settings: RoundSettings, round_number: int, device: int, place: int = 0) -> int:
    """The seed of a device's order in a round; `place` counts the orders of one device."""
    return int(settings.rng(round_number, 1, device, *([place] if place else [])).integers(2**63))


@dataclass(kw_only=True)
class Orders:
    """What some devices are asked in one exchange, and how their weights get to them.

    Attributes:
        objective: what a device computes.
        payload: the weights to send to a group; None where devices keep their own models.
        keeps_statistics: of every order (`messages.orders.WorkOrder`).
    """

    round: int
    assignments: list[Assignment]
    family: Family
    objective: Callable[[Assignment], Objective]
    payload: Callable[[Group], Weights] | None
    keeps_statistics: bool = False
    groups: list[Group] = field(init=False, default_factory=list)
    _packed: dict[int, bytes] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Number the orders, and collect those whose updates are of the same tensors at the same coordinates."""
        index: dict[tuple[Architecture, Selection], int] = {}
        for number, a in enumerate(self.assignments):
            a.number = number
            if a.given is None:
                continue
            architecture, selection = a.given.architecture, a.given.selection
            if (architecture, selection) not in index:
                index[architecture, selection] = len(self.groups)
                layout = returned_layout(self.family, architecture, self.objective(a).kind)
                placement = self.family.place(architecture, selection.select)
                spans = class_spans(self.family, architecture, layout)
                self.groups.append(Group(architecture, selection, layout, placement, spans))
            a.group = index[architecture, selection]

    def batches(self) -> dict[int, deque[list[Assignment]]]:
        """The batches of every node in order; a batch's distinct payloads stay under MESSAGE_BYTES.

        All orders of a device are in one batch, which may be larger where they alone are.
        """
        by_node: dict[int, list[list[Assignment]]] = defaultdict(list)
        for orders in by_device(a for a in self.assignments if a.node is not None).values():
            assert orders[0].node is not None
            by_node[orders[0].node].append(orders)
        queues: dict[int, deque[list[Assignment]]] = {}
        for node, mine in by_node.items():
            mine.sort(key=lambda orders: [a.group for a in orders])
            queue: deque[list[Assignment]] = deque()
            size, groups = 0, set[int]()
            for orders in mine:
                added = self._added_bytes(orders, groups)
                if not queue or (added and size + added > MESSAGE_BYTES):
                    queue.append([])
                    size, groups = 0, set()
                    added = self._added_bytes(orders, groups)
                queue[-1] += orders
                groups |= {a.group for a in orders}
                size += added
            queues[node] = queue
        return queues

    def _added_bytes(self, orders: list[Assignment], groups: set[int]) -> int:
        """What orders add to a message that holds some groups' payloads."""
        return sum(self.groups[group].layout.nbytes for group in {a.group for a in orders} - groups)

    def arrays(self, batch: list[Assignment]) -> tuple[list[bytes], dict[int, int]]:
        """The packed weights of a batch, those that several devices share once, and where each group's are."""
        groups = sorted({a.group for a in batch}) if self.payload is not None else []
        return [self.packed(group) for group in groups], {group: place for place, group in enumerate(groups)}

    def packed(self, group: int) -> bytes:
        """The packed payload of a group, kept while it is small because other nodes want it too."""
        if group not in self._packed:
            assert self.payload is not None
            wanted = self.groups[group]
            data = pack(self.payload(wanted), sent_layout(self.family, wanted.architecture))
            if sum(map(len, self._packed.values())) + len(data) > MESSAGE_BYTES:
                self._packed.clear()
            self._packed[group] = data
        return self._packed[group]


@dataclass(kw_only=True)
class Work(Orders):
    """Orders to train, and what is done with the updates.

    Attributes:
        merge: how updates add up; None where every update is wanted by itself.
        absorb: takes in what comes back.
        enough: devices that trained, after which the rest is not waited for.
        asks_class_counts: of every order.
        norm_bound: how far an update may be from what its device was sent (`messages.bound`); 0: as far as it likes.
    """

    merge: Merge | None
    absorb: Callable[[Contribution], None]
    enough: int
    asks_class_counts: bool = False
    norm_bound: float = 0.0

    def bytes_down(self, a: Assignment) -> int:
        """Bytes of the weights that a device is sent."""
        return sent_layout(self.family, a.task.architecture).nbytes if self.payload is not None else 0

    def bytes_up(self, a: Assignment) -> int:
        """Bytes of the weights that a device returns."""
        return self.groups[a.group].layout.nbytes if self.payload is not None else 0

    def _added_bytes(self, orders: list[Assignment], groups: set[int]) -> int:
        """Replies to orders that are not merged hold every update."""
        if self.merge is None:
            return sum(self.groups[a.group].layout.nbytes for a in orders)
        return super()._added_bytes(orders, groups)

    def message(self, settings: RoundSettings, simulated: bool, node: int, batch: list[Assignment]) -> Message:
        """The message that carries a batch to its node."""
        arrays, position = self.arrays(batch)
        places = {a.number: place for orders in by_device(batch).values() for place, a in enumerate(orders)}
        orders = [
            WorkOrder(
                order=a.number,
                device=a.device,
                tier=a.tier,
                architecture=a.task.architecture.to_json(),
                payload=position.get(a.group),
                group=a.group,
                digest=self.groups[a.group].layout.digest,
                objective=self.objective(a),
                seed=seed_of(settings, self.round, a.device, places[a.number]),
                memory_bytes=a.limit_bytes,
                predicted_memory_bytes=a.task.cost.peak_training_memory_bytes,
                teacher=None if a.teacher is None else a.teacher.number,
                keeps_statistics=self.keeps_statistics,
                asks_class_counts=self.asks_class_counts,
            )
            for a in batch
        ]
        content = Batch(
            run=settings.run,
            round=self.round,
            task=settings.task,
            family=self.family.spec(),
            training=settings.training_in(self.round),
            merge=self.merge,
            shared_process=simulated,
            norm_bound=self.norm_bound,
            state_dir=settings.state_dir,
            orders=orders,
        )
        ttl = None if simulated else settings.deadline_seconds
        return Message(to_records(content, arrays), node, MessageType.TRAIN, ttl=ttl, group_id=str(self.round))
