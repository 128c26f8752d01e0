"""The round, once for all methods.

A strategy says what is its own: which architecture a device gets, which weights it is sent, what is done with each
update as it arrives, and what happens at the end of a round. The base does the rest: sampling, reports, budgets,
messages in waves, deadlines, validation of replies, and the figures of the journal.
"""

from __future__ import annotations

import resource
import sys
import time
from abc import abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from logging import INFO, WARNING
from typing import Any, ClassVar

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy as FlowerStrategy
from models.cost import Cost, cost
from torch import Tensor

from devices.budget import Budget, budget_of
from devices.clock import Timing
from devices.report import DeviceReport
from messages.layouts import class_spans, returned_layout, sent_layout
from messages.orders import Batch, LocalTraining, Merge, Objective, Reply, Update, WorkOrder
from messages.packing import Layout, MessageError, pack, unpack
from messages.sums import WeightedSum, device_weight, flatten, present_mask
from messages.wire import from_records, int64_vector, pick, to_records
from models.architecture import Architecture
from models.family import Family
from models.placement import Placement, Select, leading
from strategies.exchange import Failure, exchange, failure_of
from strategies.population import Population

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
    memory_fraction: float = 1.0
    transfer_seconds: float | None = None
    deadline_seconds: float | None = None
    evaluate_every: int = 1
    state_dir: str = ""

    def training_in(self, round_number: int) -> LocalTraining:
        """The local training of one round, with the learning rate decayed at every decay round passed."""
        passed = sum(round_number > r for r in self.decay_rounds)
        rate = self.training.learning_rate * self.decay_factor**passed
        return self.training.model_copy(update={"learning_rate": rate})

    @property
    def optimizer(self) -> str:
        """The optimizer as the cost model names it: momentum keeps a state per parameter."""
        return (
            "sgd-momentum" if self.training.optimizer == "sgd" and self.training.momentum else self.training.optimizer
        )


@dataclass(frozen=True)
class Setup:
    """What every strategy is made of.

    widths: the candidate widths; a device gets the widest that fits its budget.
    below_smallest: "skip" a device whose budget is below the narrowest, or give it the "smallest" all the same.
    """

    family: Family
    population: Population
    settings: RoundSettings
    widths: tuple[float, ...]
    below_smallest: str = "skip"


@dataclass(frozen=True)
class Selection:
    """Which channels a sub-model takes: a rule of `models.placement` and its number, hashable so that it can be shared."""

    rule: Callable[[int], Select] | None = None
    number: int = 0

    @property
    def select(self) -> Select:
        """The rule as a placement wants it; the leading channels where there is none."""
        return self.rule(self.number) if self.rule else leading


LEADING = Selection()


@dataclass
class State:
    """What a strategy needs to go on after a restart: tensors by name, and JSON values by name."""

    tensors: Weights
    values: dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A model to score: weights of one architecture of a family."""

    family: Family
    architecture: Architecture
    weights: Weights


@dataclass(frozen=True)
class Evaluation:
    """The scores of a round: of the global model on the task's test set, and of every tier's sub-model."""

    accuracy: float
    loss: float
    accuracy_by_tier: dict[str, float]


Scorer = Callable[[Model], tuple[float, float]]  # -> accuracy (0..1), mean loss


@dataclass
class Assignment:
    """One device in one round: what it may spend, what it was given, what came of it."""

    device: int
    tier: str
    budget: Budget
    architecture: Architecture | None = None
    selection: Selection = LEADING
    cost: Cost | None = None
    timing: Timing | None = None
    node: int | None = None
    group: int = 0
    outcome: str = ""
    update: Update | None = None


@dataclass(frozen=True)
class Group:
    """Updates of the same tensors at the same coordinates: one architecture under one selection."""

    architecture: Architecture
    selection: Selection
    layout: Layout  # of what is returned
    placement: Placement
    class_spans: tuple[tuple[int, int], ...]  # elements of the flat update whose first dimension is the classes


@dataclass
class Contribution:
    """What a strategy absorbs: the sum of some devices' updates, or one device's weights where nothing is merged."""

    group: Group
    devices: list[int]
    examples: int
    total: WeightedSum | None
    weights: Weights | None


@dataclass
class Work:
    """One exchange with the devices of a round: who does what, how updates are merged, what is sent.

    `payload` gives the weights to send to a group, or is None where devices keep their own model.
    """

    round: int
    assignments: list[Assignment]
    objective: Callable[[Assignment], Objective]
    merge: Merge | None
    family: Family
    payload: Callable[[Group], Weights] | None
    absorb: Callable[[Contribution], None]
    enough: int  # updates after which the rest is not waited for
    groups: list[Group] = field(default_factory=list)
    packed: dict[int, bytes] = field(default_factory=dict)
    packed_bytes: int = 0


@dataclass
class RoundResult:
    """A finished round, as the journal writes it."""

    record: dict[str, Any]
    devices: list[dict[str, Any]]


class Strategy(FlowerStrategy):
    """Base of all methods. State that a resumed run needs is in `state_dict`; all else follows from (seed, round).

    Class attributes that a method sets:
        family_options: how the method wants its family built, such as HeteroFL's scaler and static batch norm.
        merge: how updates add up, or None where the method wants each device's weights by themselves.
        keeps_models: devices train models of their own, and no weights travel.
    """

    family_options: ClassVar[dict[str, Any]] = {}
    merge: ClassVar[Merge | None] = Merge()
    keeps_models: ClassVar[bool] = False

    def __init__(self, setup: Setup) -> None:
        self.family, self.population, self.settings = setup.family, setup.population, setup.settings
        self.round = 0
        self.assignments: list[Assignment] = []  # of the round that runs
        self.tier_architectures: dict[str, Architecture] = {}  # the newest of every tier
        self._seconds: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._open: tuple[Work, list[tuple[list[Assignment], Message]]] | None = None

    # What a method says of itself ------------------------------------------------------------------------------------

    @abstractmethod
    def assign(self, device: int, budget: Budget) -> Architecture | None:
        """The architecture of a device under its budget; None where the device cannot take part."""

    def selection(self, device: int, architecture: Architecture) -> Selection:
        """Which channels the device's sub-model takes; the leading ones by default."""
        return LEADING

    def objective(self, device: int, architecture: Architecture) -> Objective:
        """What the device computes; plain cross-entropy by default."""
        return Objective()

    @abstractmethod
    def payload(self, group: Group) -> Weights:
        """The weights to send to the devices of a group (never asked where `keeps_models`)."""

    @abstractmethod
    def absorb(self, contribution: Contribution) -> None:
        """Take in a reply as it arrives; it is dropped afterwards."""

    @abstractmethod
    def finish_round(self) -> None:
        """Turn what was absorbed into the next global model."""

    @abstractmethod
    def models(self, grid: Grid) -> dict[str, Model]:
        """The models to score, by name: "global", and every tier seen so far."""

    def state_dict(self) -> State:
        """Everything a resumed run needs beside the configuration and the round's number."""
        return State({}, {"tiers": {tier: a.to_json() for tier, a in self.tier_architectures.items()}})

    def load_state_dict(self, state: State) -> None:
        """Restore `state_dict`; ValueError where it is of another model."""
        self.tier_architectures = {t: Architecture.from_json(a) for t, a in state.values["tiers"].items()}

    # The round -------------------------------------------------------------------------------------------------------

    def rng(self, purpose: int, *more: int) -> np.random.Generator:
        """A generator that depends on the seed, the round and the given numbers only."""
        return np.random.default_rng([self.settings.seed, self.round, purpose, *more])

    def run_round(self, grid: Grid, number: int, scorer: Scorer) -> RoundResult:
        """One whole round: sample, assign, train, absorb, finish, evaluate."""
        started = time.perf_counter()
        self.round, self._seconds, self._bytes = number, Counter(), Counter()
        work = self._plan(grid)
        self._run(grid, work)
        with self._timed("finish"):
            self.finish_round()
        self.population.advance(self._simulated_seconds(work), time.perf_counter() - started)
        evaluation: Evaluation | None = None
        if number % self.settings.evaluate_every == 0 or number == self.settings.rounds:
            with self._timed("evaluate"):
                evaluation = self.evaluate(grid, scorer)
        wall_seconds = time.perf_counter() - started
        return self._result(work, evaluation, wall_seconds)

    def evaluate(self, grid: Grid, scorer: Scorer) -> Evaluation:
        """Score the global model and every tier's sub-model on the task's test set."""
        scores: dict[Architecture, tuple[float, float]] = {}
        models = self.models(grid)
        for model in models.values():
            if model.architecture not in scores:
                scores[model.architecture] = scorer(model)
        accuracy, loss = scores[models["global"].architecture]
        tiers = {tier: scores[m.architecture][0] for tier, m in models.items() if tier != "global"}
        return Evaluation(accuracy, loss, tiers)

    def _plan(self, grid: Grid) -> Work:
        """Sample devices, read their reports, and give each the architecture that its budget allows."""
        settings = self.settings
        with self._timed("assign"):
            devices = self.population.sample(grid, self.rng(0), settings.sampled_devices)
            assignments = self.assignments = [self._assignment(device) for device in devices]
            self._drop_late(assignments)
            work = Work(
                round=self.round,
                assignments=assignments,
                objective=lambda a: self.objective(a.device, _given(a)),
                merge=self.merge,
                family=self.family,
                payload=None if self.keeps_models else self.payload,
                absorb=self.absorb,
                enough=self.settings.devices_per_round,
            )
            self._group(work)
            self._route(grid, work)
        return work

    def budget(self, device: int) -> Budget:
        """What a device may spend in this round."""
        settings = self.settings
        return budget_of(
            self.population.report(device),
            memory_fraction=settings.memory_fraction,
            transfer_seconds=settings.transfer_seconds,
            deadline_seconds=settings.deadline_seconds,
        )

    def _assignment(self, device: int) -> Assignment:
        budget = self.budget(device)
        architecture = self.assign(device, budget)
        if architecture is None:
            reason = "skipped: no architecture of this strategy fits the budget"
            return Assignment(device, self.population.tier(device), budget, outcome=reason)
        result = self.ask(device, architecture, budget)
        result.selection = self.selection(device, architecture)
        self.tier_architectures[result.tier] = architecture
        return result

    def ask(self, device: int, architecture: Architecture, budget: Budget) -> Assignment:
        """An assignment of an architecture to a device."""
        return Assignment(device, self.population.tier(device), budget, architecture, cost=self.cost(architecture))

    def cost(self, architecture: Architecture) -> Cost:
        """What training this architecture costs a device of this run."""
        return cost(
            self.family,
            architecture,
            batch_size=self.settings.training.batch_size,
            optimizer=self.settings.optimizer,
        )

    def examples_trained(self, device: int) -> int:
        """Examples that a device's local training goes through in this round (simulations only)."""
        training = self.settings.training
        shard = self.population.examples(device)
        return training.steps * min(training.batch_size, shard) if training.steps else training.epochs * shard

    def _drop_late(self, assignments: list[Assignment]) -> None:
        """In a simulation the clock says beforehand who misses the deadline or comes after enough others."""
        settings = self.settings
        for a in assignments:
            if a.architecture is None:
                continue
            assert a.cost is not None
            bytes_each = 0 if self.keeps_models else a.cost.payload_bytes
            flops = float(a.cost.training_flops) * self.examples_trained(a.device)
            a.timing = self.population.timing(a.device, bytes_down=bytes_each, flops=flops, bytes_up=bytes_each)
        timed = sorted((a for a in assignments if a.timing is not None), key=lambda a: (_seconds(a), a.device))
        for place, a in enumerate(timed):
            over = settings.deadline_seconds is not None and _seconds(a) > settings.deadline_seconds
            if over or place >= settings.devices_per_round or _seconds(a) == float("inf"):
                a.outcome = "late"

    def _group(self, work: Work) -> None:
        """Collect devices whose updates are of the same tensors at the same coordinates."""
        index: dict[tuple[Architecture, Selection], int] = {}
        for a in work.assignments:
            if a.architecture is None:
                continue
            key = (a.architecture, a.selection)
            if key not in index:
                index[key] = len(work.groups)
                layout = returned_layout(work.family, a.architecture, work.objective(a).kind)
                placement = work.family.place(a.architecture, a.selection.select)
                spans = class_spans(work.family, a.architecture, layout)
                work.groups.append(Group(a.architecture, a.selection, layout, placement, spans))
            a.group = index[key]

    def _route(self, grid: Grid, work: Work) -> None:
        asked = [a for a in work.assignments if a.architecture is not None and not a.outcome]
        loads = [float(_cost(a).training_flops) * max(1, self.population.examples(a.device)) for a in asked]
        if asked:
            for a, node in zip(asked, self.population.nodes(grid, [a.device for a in asked], loads), strict=True):
                a.node = node

    def exchange_work(self, grid: Grid, work: Work) -> None:
        """Group, route and exchange further work of a round, such as statistics."""
        self._group(work)
        self._route(grid, work)
        self._run(grid, work)

    def _run(self, grid: Grid, work: Work) -> None:
        """Exchange the work with the nodes, absorbing every reply as it arrives."""
        queues = self._batches(work)
        deadline = None if self.population.simulated else self.settings.deadline_seconds
        replies = exchange(
            grid,
            queues,
            partial(self._message, work),
            deadline_seconds=deadline,
            busy=self.population.busy,
            poll_seconds=self.population.poll_seconds,
        )
        trained = 0
        for batch, reply in replies:
            with self._timed("absorb"):
                self._take(work, batch, reply)
            trained += sum(a.outcome == "trained" for a in batch)
            if trained >= work.enough:
                break
        replies.close()
        for a in work.assignments:
            if not a.outcome:
                a.outcome = "late"
            if a.outcome != "trained" and not a.outcome.startswith("skipped"):
                self.population.failed(a.device)
            if work.payload is not None and a.node is not None:
                group = work.groups[a.group]
                self._bytes["down"] += sent_layout(work.family, group.architecture).nbytes
                self._bytes["up"] += group.layout.nbytes if a.outcome == "trained" else 0

    def _batches(self, work: Work) -> dict[int, deque[list[Assignment]]]:
        """The batches of every node in order; a batch's distinct payloads stay under MESSAGE_BYTES."""
        by_node: dict[int, list[Assignment]] = defaultdict(list)
        for a in work.assignments:
            if a.node is not None and not a.outcome:
                by_node[a.node].append(a)
        queues: dict[int, deque[list[Assignment]]] = {}
        for node, mine in by_node.items():
            mine.sort(key=lambda a: a.group)
            queue: deque[list[Assignment]] = deque()
            size, groups = 0, set[int]()
            for a in mine:
                nbytes = work.groups[a.group].layout.nbytes
                distinct = work.merge is None or a.group not in groups
                if not queue or (distinct and size + nbytes > MESSAGE_BYTES):
                    queue.append([])
                    size, groups, distinct = 0, set(), True
                queue[-1].append(a)
                groups.add(a.group)
                size += nbytes if distinct else 0
            queues[node] = queue
        return queues

    def _message(self, work: Work, node: int, batch: list[Assignment]) -> Message:
        arrays: list[bytes] = []
        position: dict[int, int] = {}
        with self._timed("payload"):
            if work.payload is not None:
                for group in sorted({a.group for a in batch}):
                    position[group] = len(arrays)
                    arrays.append(self._packed(work, group))
        orders = [
            WorkOrder(
                device=a.device,
                tier=a.tier,
                architecture=_given(a).to_json(),
                payload=position.get(a.group),
                group=a.group,
                digest=work.groups[a.group].layout.digest,
                objective=work.objective(a),
                seed=int(self.rng(1, a.device).integers(2**63)),
                memory_bytes=_limit_bytes(a),
                predicted_memory_bytes=_cost(a).peak_training_memory_bytes,
            )
            for a in batch
        ]
        content = Batch(
            run=self.settings.run,
            round=work.round,
            task=self.settings.task,
            family=work.family.spec(),
            training=self.settings.training_in(work.round),
            merge=work.merge,
            shared_process=self.population.simulated,
            state_dir=self.settings.state_dir,
            orders=orders,
        )
        ttl = None if self.population.simulated else self.settings.deadline_seconds
        return Message(to_records(content, arrays), node, MessageType.TRAIN, ttl=ttl, group_id=str(work.round))

    def _packed(self, work: Work, group: int) -> bytes:
        """The packed payload of a group, kept while it is small because other nodes want it too."""
        if group not in work.packed:
            assert work.payload is not None
            wanted = work.groups[group]
            data = pack(work.payload(wanted), sent_layout(work.family, wanted.architecture))
            if work.packed_bytes + len(data) > MESSAGE_BYTES:
                work.packed.clear()
                work.packed_bytes = 0
            work.packed[group] = data
            work.packed_bytes += len(data)
        return work.packed[group]

    # Replies ---------------------------------------------------------------------------------------------------------

    def _take(self, work: Work, batch: list[Assignment], reply: Message | Failure) -> None:
        """Absorb one reply. Whatever is wrong with it is counted and changes nothing."""
        if isinstance(reply, Failure):
            for a in batch:
                a.outcome = "late" if reply.late else f"failed: {reply.why}"
            return
        try:
            contributions = self._read(work, batch, reply)
        except MessageError as error:
            log(
                WARNING,
                "Round %s: the reply for devices %s is refused: %s",
                work.round,
                [a.device for a in batch],
                error,
            )
            for a in batch:
                a.outcome = f"refused: {error}"
            return
        for contribution in contributions:
            work.absorb(contribution)

    def _read(self, work: Work, batch: list[Assignment], message: Message) -> list[Contribution]:
        """Check a reply in full before anything of it is used."""
        reply, arrays = from_records(Reply, message.content)
        if (reply.run, reply.round) != (self.settings.run, work.round):
            raise MessageError(
                f"the reply is for round {reply.round} of run {reply.run!r}, not round {work.round} of {self.settings.run!r}"
            )
        asked = {a.device: a for a in batch}
        answered: dict[int, Update] = {}
        for update in reply.updates:
            if update.device not in asked:
                raise MessageError(f"device {update.device} was not asked; the batch was for {sorted(asked)}")
            if update.device in answered:
                raise MessageError(f"device {update.device} answered twice")
            answered[update.device] = update
        contributions: list[Contribution] = []
        outcomes: dict[int, str] = {}
        reports: dict[int, DeviceReport] = {}
        for device, update in answered.items():
            outcomes[device] = update.outcome
            if update.outcome != "trained":
                continue
            if update.examples < 1:
                raise MessageError(f"device {device} trained on {update.examples} examples")
            if update.report is not None:
                try:
                    reports[device] = DeviceReport.from_json(update.report)
                except ValueError as error:
                    raise MessageError(f"device {device}: report: {error}") from None
            if update.payload is not None:
                try:
                    contributions.append(self._own(work, asked[device], update, arrays))
                except MessageError as error:
                    outcomes[device] = f"refused: {error}"
                    log(WARNING, "Round %s: the update of device %s is refused: %s", work.round, device, error)
        summed = self._sums(work, asked, answered, reply, arrays)
        contributions += summed
        covered = {device for c in contributions for device in c.devices}
        for device, outcome in outcomes.items():
            if outcome == "trained" and work.payload is not None and device not in covered:
                raise MessageError(f"device {device} says it trained, but no weights came with it")
        for a in batch:
            update_ = answered.get(a.device)
            a.outcome = outcomes.get(a.device, "failed: the node's reply says nothing of this device")
            if a.outcome != "trained" and not a.outcome.startswith(("refused: ", "failed: ")):
                raise MessageError(
                    f"device {a.device}: outcome {a.outcome!r} is not one of trained, refused: ..., failed: ..."
                )
            a.update = update_
            if a.device in reports:
                self.population.replied(a.device, reports[a.device])
        return contributions

    def _own(self, work: Work, a: Assignment, update: Update, arrays: list[bytes]) -> Contribution:
        """One device's weights, as an update of its own."""
        group = work.groups[a.group]
        who = f"device {a.device}"
        assert update.payload is not None
        data = pick(arrays, update.payload, who)
        if update.index is not None:
            theirs = Layout.from_json(update.index)
            raise MessageError(f"{who}: {group.layout.difference(theirs) or 'sent an index that was not needed'}")
        weights = unpack(data, group.layout)
        flat = flatten(weights, group.layout)
        if not bool(torch.isfinite(flat).all()):
            bad = next(n for n, w in weights.items() if not bool(torch.isfinite(w.float()).all()))
            raise MessageError(f"{who}: tensor {bad!r} holds values that are not finite")
        if work.merge is None:
            return Contribution(group, [a.device], update.examples, None, weights)
        classes = work.family.classes if work.merge.present_classes else None
        total = WeightedSum.zeros(group.layout, classes)
        present = present_mask(update.present_classes, classes, who) if classes is not None else None
        total.add(flat, device_weight(work.merge, update.examples), present, group.class_spans)
        return Contribution(group, [a.device], update.examples, total, None)

    def _sums(
        self, work: Work, asked: dict[int, Assignment], answered: dict[int, Update], reply: Reply, arrays: list[bytes]
    ) -> list[Contribution]:
        """The sums that a node with many simulated devices made."""
        result: list[Contribution] = []
        seen: set[int] = set()
        for header in reply.sums:
            who = f"the sum over devices {header.devices}"
            if work.merge is None:
                raise MessageError(f"{who}: this strategy wants every update by itself")
            wrong = [
                d
                for d in header.devices
                if d in seen
                or d not in asked
                or asked[d].group != header.group
                or d not in answered
                or answered[d].outcome != "trained"
                or answered[d].payload is not None
            ]
            if wrong or len(set(header.devices)) != len(header.devices):
                raise MessageError(f"{who}: devices {wrong} are not of group {header.group}, or are counted twice")
            seen.update(header.devices)
            group = work.groups[header.group]
            if header.digest != group.layout.digest:
                raise MessageError(f"{who}: layout {header.digest} instead of {group.layout.digest}")
            weight = sum(device_weight(work.merge, answered[d].examples) for d in header.devices)
            if header.weight != weight:
                raise MessageError(f"{who}: weight {header.weight} instead of {weight}")
            class_weight = None
            if work.merge.present_classes:
                counted = header.class_weight or []
                if len(counted) != work.family.classes or max(counted) > weight:
                    raise MessageError(f"{who}: class weights {counted} do not fit {work.family.classes} classes")
                class_weight = torch.tensor(counted, dtype=torch.int64)
            total = int64_vector(pick(arrays, header.payload, who), group.layout.numel, who)
            added = WeightedSum(total, weight, class_weight)
            examples = sum(answered[d].examples for d in header.devices)
            result.append(Contribution(group, header.devices, examples, added, None))
        return result

    # The record ------------------------------------------------------------------------------------------------------

    def _simulated_seconds(self, work: Work) -> float:
        """How long the round took by the virtual clock: until the last device whose update counts, or the deadline."""
        waited = [_seconds(a) for a in work.assignments if a.outcome == "trained"]
        missing = any(a.outcome == "late" for a in work.assignments) and len(waited) < self.settings.devices_per_round
        deadline = self.settings.deadline_seconds
        return deadline if missing and deadline is not None else max(waited, default=0.0)

    def _result(self, work: Work, evaluation: Evaluation | None, wall_seconds: float) -> RoundResult:
        trained = [a for a in work.assignments if a.outcome == "trained"]
        outcomes = Counter(a.outcome.split(":")[0] for a in work.assignments)
        memory = [_cost(a).peak_training_memory_bytes / a.budget.memory_bytes for a in trained if a.budget.memory_bytes]
        link = [_cost(a).payload_bytes / a.budget.payload_bytes for a in trained if a.budget.payload_bytes]
        record = {
            "round": work.round,
            "strategy": self.name,
            "task": self.settings.task_name,
            "accuracy": evaluation.accuracy if evaluation else None,
            "loss": evaluation.loss if evaluation else None,
            "accuracy_by_tier": evaluation.accuracy_by_tier if evaluation else None,
            "devices_sampled": len(work.assignments),
            "devices_replied": len(trained),
            "devices_failed": outcomes["failed"] + outcomes["late"],
            "devices_refused": outcomes["refused"],
            "bytes_down": self._bytes["down"],
            "bytes_up": self._bytes["up"],
            "memory_utilisation": float(np.mean(memory)) if memory else None,
            "bandwidth_utilisation": float(np.mean(link)) if link else None,
            "distinct_architectures": len({a.architecture for a in trained}),
            "simulated_seconds": self.population.now_seconds,
            "wall_seconds": wall_seconds,
            "server_seconds": {k: self._seconds[k] for k in ("assign", "payload", "absorb", "finish", "evaluate")},
            "server_peak_rss_bytes": peak_rss_bytes(),
        }
        return RoundResult(record, [_device_record(work, a) for a in work.assignments])

    @property
    def name(self) -> str:
        """The strategy's name as in the run configuration."""
        return type(self).__module__.rsplit(".", 1)[-1].replace("_", "-")

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[what] += time.perf_counter() - started

    # Flower's own loop (`Strategy.start`) drives the same round through these; ours is `server_app.app`, which reads
    # replies as they arrive where Flower's loop holds all of a round's. ------------------------------------------------

    def summary(self) -> None:
        """Log what runs."""
        log(INFO, "%s over %s, %s devices per round", self.name, self.family.name, self.settings.devices_per_round)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """All messages of a round at once. `arrays` and `config` are ignored: the strategy holds the global model."""
        self.round, self._seconds, self._bytes = server_round, Counter(), Counter()
        work = self._plan(grid)
        sent = [(batch, self._message(work, node, batch)) for node, q in self._batches(work).items() for batch in q]
        self._open = (work, sent)
        return [message for _, message in sent]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Absorb the replies and finish the round."""
        if self._open is None or self._open[0].round != server_round:
            raise RuntimeError(f"aggregate_train of round {server_round} without its configure_train")
        work, sent = self._open
        batches = {message.metadata.message_id: batch for batch, message in sent}
        for reply in replies:
            batch = batches.pop(reply.metadata.reply_to_message_id, None)
            if batch is not None:
                self._take(work, batch, failure_of(reply) or reply)
        self.finish_round()
        trained = [a for a in work.assignments if a.outcome == "trained"]
        return ArrayRecord(dict(self.state_dict().tensors)), MetricRecord({"devices-replied": len(trained)})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """None: models are scored on the server (`evaluate`)."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """None: models are scored on the server (`evaluate`)."""
        return None


def peak_rss_bytes() -> int:
    """The most memory this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _given(a: Assignment) -> Architecture:
    assert a.architecture is not None
    return a.architecture


def _cost(a: Assignment) -> Cost:
    assert a.cost is not None
    return a.cost


def _limit_bytes(a: Assignment) -> int:
    """The memory a device may use; 0, no limit, where the method gave it on purpose what its budget does not allow."""
    return a.budget.memory_bytes if _cost(a).peak_training_memory_bytes <= a.budget.memory_bytes else 0


def _seconds(a: Assignment) -> float:
    return a.timing.total_seconds if a.timing is not None else 0.0


def _device_record(work: Work, a: Assignment) -> dict[str, Any]:
    """One line of devices.jsonl."""
    update, built = a.update, a.cost is not None
    return {
        "device": a.device,
        "node": a.node,
        "round": work.round,
        "tier": a.tier,
        "architecture": _given(a).to_json() if built else None,
        "parameters": _cost(a).parameters if built else None,
        "payload_bytes": _cost(a).payload_bytes if built else None,
        "budget": {
            "memory_bytes": a.budget.memory_bytes,
            "payload_bytes": a.budget.payload_bytes,
            "deadline_seconds": a.budget.deadline_seconds,
        },
        "predicted_memory_bytes": _cost(a).peak_training_memory_bytes if built else None,
        "measured_memory_bytes": update.measured_memory_bytes if update else None,
        "seconds": update.seconds if update else None,
        "simulated_seconds": a.timing.total_seconds if a.timing is not None and np.isfinite(_seconds(a)) else None,
        "examples": update.examples if update else None,
        "loss": update.loss if update else None,
        "outcome": a.outcome,
    }
