"""The round, once for all methods.

A strategy says what is its own: which architecture a device gets, which weights it is sent, what is done with each
update as it arrives, and what happens at the end of a round. The base does the rest: sampling, reports, budgets,
messages in waves, deadlines, validation of replies, and the figures of the journal.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Any, ClassVar, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy as FlowerStrategy

from devices.budget import Budget
from messages.orders import LocalTraining, Merge, Objective, Score
from messages.packing import MessageError
from models.architecture import Architecture
from models.cost import Cost, cost
from models.family import Family
from strategies.budgets import beside_message, budget_in_round
from strategies.distillation import Distillation, Distilled
from strategies.exchange import Failure, exchange, failure_of, stranger
from strategies.lateness import drop_late, simulated_seconds
from strategies.population import Population
from strategies.records import RoundResult, device_record, round_record
from strategies.replies import read_reply
from strategies.scores import Evaluation, Examples, Personal, personal_score, score_on_devices
from strategies.work import (
    LEADING,
    Assignment,
    Contribution,
    Given,
    Group,
    Orders,
    RoundSettings,
    Selection,
    Weights,
    Work,
    by_device,
    devices_that_trained,
    fits,
)


@dataclass(frozen=True)
class Setup:
    """What every strategy is made of.

    widths: the candidate widths; a device gets the widest that fits its budget.
    below_smallest: "skip" a device whose budget is below the narrowest, or give it the "smallest" all the same.
    distillation: of sub-models in place on the server after every round; None: none.
    both_models: devices that can afford more than the smallest candidate train the smallest as well.
    """

    family: Family
    population: Population
    settings: RoundSettings
    widths: tuple[float, ...]
    below_smallest: str = "skip"
    distillation: Distillation | None = None
    both_models: bool = False


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


class Scores(NamedTuple):
    """Accuracy (0..1) and mean loss of a model; where its family has several exits, the accuracy of each of its own."""

    accuracy: float
    loss: float
    by_exit: tuple[float, ...] = ()


Scorer = Callable[[Model], Scores]


class Strategy(FlowerStrategy):
    """Base of all methods. State that a resumed run needs is in `state_dict`; all else follows from (seed, round).

    Class attributes that a method sets:
        family_options: how the method wants its family built, such as HeteroFL's static batch norm.
        merge: how updates add up, or None where the method wants each device's weights by themselves.
        keeps_models: devices train models of their own, and no weights travel.
        keeps_statistics: batch norm's running statistics stay on the devices, from one training to the next.
        asks_class_counts: devices say with their updates how many examples of each class they hold.
    """

    family_options: ClassVar[dict[str, Any]] = {}
    merge: Merge | None = Merge()
    keeps_models: ClassVar[bool] = False
    keeps_statistics: ClassVar[bool] = False
    asks_class_counts: ClassVar[bool] = False
    params: Any = None  # of the method, where it has any

    def __init__(self, setup: Setup) -> None:
        self.family, self.population, self.settings = setup.family, setup.population, setup.settings
        self.widths, self.below_smallest = setup.widths, setup.below_smallest
        self.round = 0
        self.assignments: list[Assignment] = []  # of the round that runs
        self.tier_architectures: dict[str, Architecture] = {}  # the newest of every tier
        self.distilled: Distilled | None = None  # in this round
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._bytes: Counter[str] = Counter()
        self._open: tuple[Work, list[tuple[list[Assignment], Message]], float] | None = None  # of Flower's own loop

    # What a method says of itself ------------------------------------------------------------------------------------

    @abstractmethod
    def assign(self, device: int, budget: Budget) -> Architecture | None:
        """The architecture of a device under its budget; None where the device cannot take part.

        It is asked for several budgets before one is found that leaves room for the message: answers depend on the
        round, the device and the budget only, and nothing is logged.
        """

    def further(self, device: int, budget: Budget, architecture: Architecture) -> list[Architecture]:
        """What else a device trains in the same round, after the architecture of `assign` and in this order.

        Nothing by default. The device trains one after the other, and is sent all weights at once: its memory must hold
        the largest of them, its link their sum.
        """
        return []

    def teacher(self, device: int, place: int) -> int | None:
        """Whose trained model teaches while a device trains its order number `place`: the number of an earlier one.

        0 is the architecture of `assign`, then come those of `further`. None, no teacher, by default; what is made of a
        teacher is the objective's business.
        """
        return None

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

    def personal(self, device: int, budget: Budget) -> tuple[Architecture, Selection] | None:
        """What a device is scored with on its own test shard; None where it cannot take part.

        By default the architecture of `assign`, cut from the leading channels; its weights are those of `payload`. This
        is asked of every device after a round, and must not change what later rounds do.
        """
        architecture = self.assign(device, budget)
        return None if architecture is None else (architecture, LEADING)

    @property
    @abstractmethod
    def least(self) -> Architecture:
        """The smallest architecture that a device may get: who cannot afford it does not take part."""

    @property
    @abstractmethod
    def scored_architecture(self) -> Architecture:
        """The architecture of the global model as it is scored."""

    @property
    def scored_tiers(self) -> dict[str, Architecture]:
        """The tiers whose sub-models are scored: all that had a device so far, or none without `evaluate-tiers`."""
        return self.tier_architectures if self.settings.evaluate_tiers else {}

    @abstractmethod
    def models(self, grid: Grid) -> dict[Architecture, Model]:
        """The models to score: the global one, and one of every architecture of `scored_tiers`."""

    def state_dict(self) -> State:
        """Everything a resumed run needs beside the configuration and the round's number."""
        tiers = {tier: a.to_json() for tier, a in self.tier_architectures.items()}
        return State({}, {"tiers": tiers, **self.population.state_dict()})

    def load_state_dict(self, state: State) -> None:
        """Restore `state_dict`; ValueError where it is of another model."""
        self.tier_architectures = {t: Architecture.from_json(a) for t, a in state.values["tiers"].items()}
        self.population.load_state_dict(state.values)

    # The round -------------------------------------------------------------------------------------------------------

    def rng(self, purpose: int, *more: int) -> np.random.Generator:
        """A generator that depends on the seed, the round and the given numbers only."""
        return self.settings.rng(self.round, purpose, *more)

    def run_round(self, grid: Grid, number: int, scorer: Scorer) -> RoundResult:
        """One whole round: sample, assign, train, absorb, finish, evaluate."""
        started = time.perf_counter()
        self.round, self._seconds, self._bytes = number, defaultdict(float), Counter()
        self.distilled = None
        work = self._plan(grid)
        self._run(grid, work)
        with self._timed("finish"):
            self.finish_round()
        self.population.advance(simulated_seconds(work.assignments, self.settings), time.perf_counter() - started)
        evaluation: Evaluation | None = None
        if number % self.settings.evaluate_every == 0 or number == self.settings.rounds:
            with self._timed("evaluate"):
                evaluation = self.evaluate(grid, scorer)
        personal: Personal | None = None
        if self.settings.personal_in(number):
            with self._timed("evaluate"):
                personal = self.evaluate_personally(grid)
        wall_seconds = time.perf_counter() - started
        record = round_record(
            work,
            strategy=self.name,
            task=self.settings.task_name,
            evaluation=evaluation,
            personal=personal,
            nbytes=self._bytes,
            simulated_seconds=self.population.now_seconds,
            wall_seconds=wall_seconds,
            server_seconds=self._seconds,
            distilled=self.distilled,
        )
        return RoundResult(record, [device_record(work.round, a) for a in work.assignments])

    def evaluate(self, grid: Grid, scorer: Scorer) -> Evaluation | None:
        """Score the global model and every tier's sub-model on the task's test set; None where it cannot be scored."""
        models = self.models(grid)
        scored = self.scored_architecture
        if scored not in models:
            return None
        whole = scorer(models[scored])
        accuracies = {scored: whole.accuracy}
        if scored == self.family.full() and models[scored].family == self.family:
            # The networks up to each exit are in the global model: one pass scores them all.
            accuracies |= {self.family.up_to(exit): a for exit, a in enumerate(whole.by_exit, start=1)}
        accuracies |= {a: scorer(model).accuracy for a, model in models.items() if a not in accuracies}
        tiers = {tier: accuracies[a] for tier, a in self.scored_tiers.items() if a in models}
        return Evaluation(whole.accuracy, whole.loss, tiers, list(whole.by_exit) or None)

    def evaluate_personally(self, grid: Grid) -> Personal:
        """Let every device train and score, on its own examples, the model that it would be given now.

        Nothing but scores comes back, and no device keeps anything. The protocol is that of RecipFL and of HypeMeFed's
        personalized accuracy.
        """
        assignments = [a for device in self.population.everyone(grid) for a in self._order_to_score(device)]
        scores = self.scores(grid, assignments, "shard", self.settings.personal_training_in(self.round))
        return personal_score(scores, len(assignments), self.population)

    def _order_to_score(self, device: int) -> list[Assignment]:
        """What a device is asked in a personal evaluation: one order, or nothing."""

        def wanted(budget: Budget) -> list[Architecture]:
            found = self.personal(device, budget)
            return [] if found is None else [found[0]]

        budget = self.budget(device, wanted)
        found = self.personal(device, budget)
        return [] if found is None else [self.ask(device, *found, budget)]

    def scores(
        self, grid: Grid, assignments: list[Assignment], data: Examples, training: LocalTraining | None = None
    ) -> dict[int, Score]:
        """The scores that devices take of what they are asked to score; `strategies.scores.score_on_devices`."""
        orders = Orders(
            round=self.round,
            assignments=assignments,
            family=self.family,
            objective=self.objective_of,
            payload=None if self.keeps_models else self.payload,
            keeps_statistics=self.keeps_statistics,
        )
        self._route(grid, orders)
        return score_on_devices(grid, orders, self.settings, self.population, data, training)

    def objective_of(self, a: Assignment) -> Objective:
        """What a device computes on one order; by default the objective for its architecture."""
        return self.objective(a.device, a.task.architecture)

    def _plan(self, grid: Grid) -> Work:
        """Sample devices, read their reports, and give each the architecture that its budget allows."""
        with self._timed("assign"):
            devices = self.population.sample(grid, self.rng(0), self.settings.sampled_devices)
            self.assignments = [a for device in devices for a in self._orders(device)]
            beyond = [a.device for a in self.assignments if a.given is not None and not fits(a.given.cost, a.budget)]
            if beyond and self.below_smallest == "smallest":
                text = "Round %s: devices %s get an architecture that they cannot afford"
                log(WARNING, text, self.round, sorted(set(beyond)))
            drop_late(self.assignments, self.population, self.settings, weights_travel=not self.keeps_models)
            work = Work(
                round=self.round,
                assignments=self.assignments,
                family=self.family,
                objective=self.objective_of,
                merge=self.merge,
                payload=None if self.keeps_models else self.payload,
                absorb=self.absorb,
                enough=self.settings.devices_per_round,
                keeps_statistics=self.keeps_statistics,
                asks_class_counts=self.asks_class_counts,
                norm_bound=self.settings.norm_bound,
            )
            self._route(grid, work)
        return work

    def budget(self, device: int, wanted: Callable[[Budget], Sequence[Architecture]] = lambda _: ()) -> Budget:
        """What a device may spend in this round; of the memory, what is left to training.

        A real node holds the message that brings its weights in memory while it trains. How large that is depends on
        what it is given under the budget, which `wanted` says.
        """
        budget = budget_in_round(device, self.population, self.settings)
        if self.population.simulated or self.keeps_models or not self.population.report(device).memory_is_ram:
            return budget
        return beside_message(budget, lambda part: sum(self.cost(a).payload_bytes for a in wanted(part)))

    def _orders(self, device: int) -> list[Assignment]:
        """What a device is asked in this round: one order, or several."""

        def wanted(budget: Budget) -> list[Architecture]:
            architecture = self.assign(device, budget)
            return [] if architecture is None else [architecture, *self.further(device, budget, architecture)]

        budget = self.budget(device, wanted)
        architectures = wanted(budget)
        if not architectures:
            why = "skipped: no architecture of this strategy fits the budget"
            return [Assignment(device, self.population.tier(device), budget, None, outcome=why)]
        self.tier_architectures[self.population.tier(device)] = architectures[0]
        orders: list[Assignment] = []
        for place, architecture in enumerate(architectures):
            orders.append(self.ask(device, architecture, self.selection(device, architecture), budget))
            teacher = self.teacher(device, place)
            orders[-1].teacher = None if teacher is None else orders[:-1][teacher]
        return orders

    def ask(self, device: int, architecture: Architecture, selection: Selection, budget: Budget) -> Assignment:
        """An assignment of an architecture to a device."""
        given = Given(architecture, selection, self.cost(architecture))
        return Assignment(device, self.population.tier(device), budget, given)

    @classmethod
    def family_defaults(cls, params: Any) -> dict[str, Any]:
        """Arguments that the method gives a family that has them, where `family-arguments` say nothing else."""
        return {}

    @classmethod
    def price(
        cls,
        family: Family,
        architecture: Architecture,
        settings: RoundSettings,
        widths: tuple[float, ...],
        params: Any,
    ) -> Cost:
        """What training costs a device, before there is a strategy: a fleet's `fits_width` is worth that many bytes."""
        return cost(family, architecture, batch_size=settings.training.batch_size, optimizer=settings.optimizer)

    def cost(self, architecture: Architecture) -> Cost:
        """What training this architecture costs a device of this run."""
        return self.price(self.family, architecture, self.settings, self.widths, self.params)

    def told(self, architecture: Architecture) -> str:
        """An architecture as a log names it: its lists of widths are long, and say little."""
        if architecture == self.family.full():
            return f"the whole {self.family.name}"
        return f"the {self.family.name} of {self.cost(architecture).parameters:,} parameters"

    def _route(self, grid: Grid, work: Orders) -> None:
        """Say which node carries each device that takes part."""
        asked = by_device(a for a in work.assignments if a.given is not None and not a.outcome)
        if asked:
            loads = [
                sum(float(a.task.cost.training_flops) for a in orders) * self.population.examples(device)
                for device, orders in asked.items()
            ]
            nodes = self.population.nodes(grid, list(asked), loads)
            for orders, node in zip(asked.values(), nodes, strict=True):
                for a in orders:
                    a.node = node

    def exchange_work(self, grid: Grid, work: Work) -> None:
        """Route and exchange further work of a round, such as statistics."""
        self._route(grid, work)
        self._run(grid, work)

    def _run(self, grid: Grid, work: Work) -> None:
        """Exchange the work with the nodes, absorbing every reply as it arrives."""
        simulated = self.population.simulated

        def make(node: int, batch: list[Assignment]) -> Message:
            with self._timed("payload"):
                return work.message(self.settings, simulated, node, batch)

        replies = exchange(
            grid,
            work.batches(),
            make,
            deadline_seconds=None if simulated else self.settings.deadline_seconds,
            busy=self.population.busy,
            poll_seconds=self.population.poll_seconds,
        )
        trained = 0
        for batch, reply in replies:
            with self._timed("absorb"):
                self._take(work, batch, reply)
            trained += devices_that_trained(batch)
            if trained >= work.enough:
                break
        replies.close()
        self._settle(work)

    def _settle(self, work: Work) -> None:
        """What has no outcome by now is late; count the bytes, and say what went wrong."""
        for a in work.assignments:
            a.outcome = a.outcome or "late"
            if a.given is not None:  # under a fleet the late ones are not trained, but they too are sent their weights
                self._bytes["down"] += work.bytes_down(a)
                self._bytes["up"] += work.bytes_up(a) if a.outcome == "trained" else 0
            if a.outcome != "trained":  # one that could afford nothing has no update to say with that it has more now
                self.population.ask_again(a.device)
        overran = by_device(a for a in work.assignments if a.update is not None and a.update.overrun)
        for device, orders in overran.items():  # lowered once: a child that is killed loses all orders of its device
            largest_bytes = max(a.task.cost.peak_training_memory_bytes for a in orders)
            self.population.overran(device, largest_bytes / max(1, orders[0].budget.memory_bytes))
        far = sorted({a.device for a in work.assignments if a.update is not None and a.update.bounded})
        if far:
            text = "Round %s: the updates of devices %s are scaled down to norm-bound"
            log(WARNING, text, work.round, far)
        troubles = Counter(a.outcome for a in work.assignments if a.outcome.startswith(("failed", "refused")))
        for outcome, times in troubles.most_common(3):
            log(WARNING, "Round %s: %s of %s work orders %s", work.round, times, len(work.assignments), outcome)

    def _take(self, work: Work, batch: list[Assignment], reply: Message | Failure) -> None:
        """Absorb one reply. Whatever is wrong with it is counted and changes nothing."""
        if isinstance(reply, Failure):
            for a in batch:
                a.outcome = "late" if reply.late else f"failed: {reply.why}"
            return
        try:
            checked = read_reply(
                self.settings.run,
                work,
                batch,
                reply,
                self.population.examples,
                simulated=self.population.simulated,
            )
        except MessageError as error:
            devices = list(by_device(batch))
            log(WARNING, "Round %s: the reply for devices %s is refused: %s", work.round, devices, error)
            for a in batch:
                a.outcome = f"refused: {error}"
            return
        for a in batch:
            a.outcome, a.update = checked.outcomes[a.number], checked.updates.get(a.number)
            if a.number in checked.reports:
                self.population.replied(a.device, checked.reports[a.number])
        for contribution in checked.contributions:
            try:
                work.absorb(contribution)
            except MessageError as error:
                log(WARNING, "Round %s: devices %s are refused: %s", work.round, contribution.devices, error)
                for a in batch:
                    if a.number in contribution.orders:
                        a.outcome = f"refused: {error}"

    @property
    def name(self) -> str:
        """The strategy's name as in the run configuration."""
        return type(self).__module__.rsplit(".", 1)[-1].replace("_", "-")

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        """Note the time of a part of the round, without that of parts which are noted by themselves inside it."""
        started, noted = time.perf_counter(), sum(self._seconds.values())
        try:
            yield
        finally:
            inside = sum(self._seconds.values()) - noted
            self._seconds[what] += max(0.0, time.perf_counter() - started - inside)

    # Flower's own loop (`Strategy.start`) drives the same round through these. Ours is `server_app.app`: it reads
    # replies as they arrive, where Flower's loop holds all of a round's.

    def summary(self) -> None:
        """Log what runs."""
        log(INFO, "%s over %s, %s devices per round", self.name, self.family.name, self.settings.devices_per_round)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """All messages of a round at once. `arrays` and `config` are ignored: the strategy holds the global model."""
        self.round, self._seconds, self._bytes = server_round, defaultdict(float), Counter()
        work = self._plan(grid)
        simulated = self.population.simulated
        sent = [
            (batch, work.message(self.settings, simulated, node, batch))
            for node, queue in work.batches().items()
            for batch in queue
        ]
        self._open = (work, sent, time.perf_counter())
        return [message for _, message in sent]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Absorb the replies and finish the round."""
        if self._open is None or self._open[0].round != server_round:
            raise RuntimeError(f"aggregate_train of round {server_round} without its configure_train")
        work, sent, started = self._open
        # Flower gave them their ids.
        batches = {message.metadata.message_id: (batch, message.metadata.dst_node_id) for batch, message in sent}
        for reply in replies:
            batch, node = batches.pop(reply.metadata.reply_to_message_id, ([], 0))
            if batch:
                self._take(work, batch, failure_of(reply) or stranger(reply, node) or reply)
        self._settle(work)
        self.finish_round()
        self.population.advance(simulated_seconds(work.assignments, self.settings), time.perf_counter() - started)
        trained = devices_that_trained(work.assignments)
        return ArrayRecord(dict(self.state_dict().tensors)), MetricRecord({"devices-replied": trained})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """None: models are scored on the server (`evaluate`)."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """None: models are scored on the server (`evaluate`)."""
        return None
