"""The round, once for all methods.

The engine samples devices, reads their reports, sends them work in waves, checks what comes back, waits no longer than
the deadline, has models scored, and writes the figures of the journal. What a device gets, what it is sent and what
becomes of what it returns is the method's business (`wildflower.strategies.method`), of which the engine knows the
contract alone.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from logging import INFO, WARNING
from typing import Any, NamedTuple

import torch
from flwr.app import Message
from flwr.common import log
from flwr.serverapp import Grid

from wildflower.devices.budget import Budget
from wildflower.devices.validation import one_line
from wildflower.messages.flower_records import release
from wildflower.messages.frozen_parts import frozen_nbytes
from wildflower.messages.orders import LocalTraining, Score
from wildflower.messages.packing import MessageError
from wildflower.messages.tensor_sets import STATISTICS, TensorSets, Weights
from wildflower.models.architecture import Architecture
from wildflower.models.placement import whole
from wildflower.rounds.budgets import MESSAGE_COPIES, beside_message, budget_in_round
from wildflower.rounds.delivery import (
    MAX_TOLD,
    Delivered,
    Recipient,
    best_that_fit,
    delivered_models,
    delivered_on_devices,
    evenly_spread,
    most_common_by_tier,
    represented,
    scores_of_devices,
)
from wildflower.rounds.exchange import Failure, exchange
from wildflower.rounds.frozen import Frozen
from wildflower.rounds.lateness import drop_late, simulated_seconds
from wildflower.rounds.layout_check import dry_run_payload
from wildflower.rounds.own_data import OwnData
from wildflower.rounds.population import Population
from wildflower.rounds.replies import read_reply
from wildflower.rounds.requests import Assignment, Given, Orders, Work, by_device, devices_that_trained
from wildflower.rounds.round_records import RoundResult, count_scoring, count_work, device_record, round_record
from wildflower.rounds.scores import (
    Evaluation,
    Examples,
    Personal,
    federated_score,
    mean_score,
    personal_score,
    pooled,
    score_on_devices,
    told,
)
from wildflower.rounds.secure_aggregation import SecureRound
from wildflower.strategies.method import (
    LEADING,
    ClientStep,
    Contribution,
    Group,
    Means,
    Method,
    Model,
    Order,
    Selection,
    State,
    Trained,
    fits,
    nothing_beside,
    tensor_set_bytes,
)
from wildflower.strategies.statistics import LEAST_DEVICES, ScoreModel, TakeStatistics

NOTHING_FITS = "skipped: no architecture of this strategy fits the budget"  # the outcome of such a device


class Scores(NamedTuple):
    """Value of the task's metric and mean loss of a model; where its family has several exits, the value of each.

    held_out, rest: the values on the two parts of the test set, where the best models are delivered; else None.
    by_class: the share of each class's test examples that are answered right, by the names of classes; None where
    labels are not one class per example, or there are too many classes.
    """

    score: float
    loss: float
    by_exit: tuple[float, ...] = ()
    held_out: float | None = None
    rest: float | None = None
    by_class: Mapping[str, float] | None = None


Scorer = Callable[[Model], Scores]


def _evaluation(
    whole: Scores | None, by_tier: dict[str, float], by_device: dict[int, float] | None, delivered: Delivered | None
) -> Evaluation:
    """An evaluation on the server; `whole` is None where the global model could not be scored."""
    if whole is None:
        return Evaluation(None, None, by_tier, delivered=delivered, score_by_device=by_device)
    return Evaluation(
        whole.score,
        whole.loss,
        by_tier,
        list(whole.by_exit) or None,
        delivered,
        accuracy_by_class=None if whole.by_class is None else dict(whole.by_class),
        score_by_device=by_device,
    )


class Engine:
    """Runs the rounds of one method over the devices of a population.

    Attributes:
        assignments: the orders of the round that runs, or ran last.
        tier_architectures: the newest architecture of every tier.
        scored: the models of the last evaluation, exactly as they were scored.
        model_scores: the score of each of them.
        tier_scores: where devices test, the score of each tier's model on the devices of that tier.
        delivered_tiers: by that evaluation, the architecture that most devices of each tier would be given.
        own: what devices say of data that they alone hold; None where the server deals them out.
        oldest_checkpoint: the round of the oldest checkpoint that the run may go on from. Devices keep what such a run
            needs. None: nobody goes on from an earlier one than that of the last round.
    """

    def __init__(self, method: Method, population: Population, own: OwnData | None = None) -> None:
        self.method, self.population, self.settings, self.own = method, population, method.settings, own
        self.assignments: list[Assignment] = []
        self.tier_architectures: dict[str, Architecture] = {}
        self.scored: dict[Architecture, Model] = {}
        self.model_scores: dict[Architecture, float] = {}
        self.tier_scores: dict[str, float] = {}
        self.delivered_tiers: dict[str, Architecture] = {}
        self.oldest_checkpoint: int | None = None
        self._own_by_tier: dict[str, float] = {}  # the newest scores of models that devices have of their own
        self._keepers: set[int] = set()  # devices that keep something
        self._introduced: set[int] = set()  # devices that have answered the method's first question
        self._told_skipped: set[int] = set()  # devices of which it was said that nothing fits them
        self._traffic: Counter[str] = Counter()  # of the round that runs: `wildflower.rounds.round_records.TRAFFIC`
        self._frozen = Frozen(method.family, method.frozen_weights())
        self._left: list[int] = []  # devices that left for good at the end of the round that runs
        self._secure: SecureRound | None = None  # of the round that runs

    @property
    def round(self) -> int:
        """The number of the round that runs, or ran last."""
        return self.method.round

    def state(self) -> State:
        """Everything a resumed run needs beside the configuration and the round's number."""
        own = self.method.state()
        engine: dict[str, Any] = {
            "tiers": [[tier, a.to_json()] for tier, a in self.tier_architectures.items()],  # in their order
            "keepers": sorted(self._keepers),
            "introduced": sorted(self._introduced),
            **({"frozen": self._frozen.state()} if self._frozen.held else {}),
            **({"own_by_tier": dict(self._own_by_tier)} if self._own_by_tier else {}),
            **self.population.state_dict(),
            **({} if self.own is None else self.own.state_dict()),
        }
        if both := own.values.keys() & engine.keys():
            raise ValueError(f"the state of {self.method.name()} has {min(both)!r}, which is the engine's: rename it")
        return State(own.tensors, {**own.values, **engine})

    def load(self, state: State) -> None:
        """Restore `state`; ValueError where it is of another model."""
        values = state.values
        self.tier_architectures = {t: Architecture.from_json(a) for t, a in values["tiers"]}
        # Checkpoints of earlier versions have no keepers, and nobody introduced.
        self._keepers, self._introduced = set(values.get("keepers", [])), set(values.get("introduced", []))
        self._own_by_tier = {tier: float(score) for tier, score in values.get("own_by_tier", {}).items()}
        self.population.load_state_dict(values)
        if self.own is not None:
            self.own.load_state_dict(values)
        self.method.load(state)
        self._frozen = Frozen(self.method.family, self.method.frozen_weights())
        self._frozen.load(values.get("frozen", {}))

    def start(self, number: int = 1) -> None:
        """Before the first of the rounds that come, round `number`: let the method make what takes long.

        Raises DryRunError, or what the method raises, where its halves do not go together.
        """
        self.method.round = number
        self.method.start()
        dry_run_payload(self.method)

    # The round -------------------------------------------------------------------------------------------------------

    def run_round(self, grid: Grid, number: int, scorer: Scorer | None) -> RoundResult:
        """One whole round: sample, assign, train, absorb, finish, evaluate."""
        started = time.perf_counter()
        work = self.begin(grid, number)
        self._run(grid, work)
        metrics = self.finish(work, started)
        return self.conclude(grid, work, scorer, metrics, started)

    def begin(self, grid: Grid, number: int) -> Work:
        """Sample devices, read their reports, and give each the architecture that its budget allows."""
        self.method.round = number
        self.method.stopwatch.seconds.clear()
        self._traffic = Counter()
        with self._timed("assign"):
            devices = self._sample(grid)
            if number == 1:
                self.survey(evenly_spread(self.population.present(grid)))
        unknown = {} if self.own is None else self.own.admit(grid, devices, self.population)
        if self.method.first_question is not None:
            unknown |= self._introduce(grid, [d for d in devices if d not in unknown], self.method.first_question)
        with self._timed("assign"):
            self.assignments = [a for device in devices for a in self.orders(device)]
            for a in self.assignments:
                a.outcome = a.outcome or unknown.get(a.device, "")
            self._tell_skipped([a for a in self.assignments if a.given is None and a.device not in self._told_skipped])
            beyond = [a.device for a in self.assignments if a.given is not None and not fits(a.given.cost, a.budget)]
            if beyond and self.method.below_smallest == "smallest":
                text = "Round %s: devices %s get an architecture that they cannot afford"
                log(WARNING, text, number, sorted(set(beyond)))
            drop_late(self.assignments, self.method.family, self.population, self.settings)
            work = Work(
                round=number,
                assignments=self.assignments,
                family=self.method.family,
                payload=self.method.payload,
                frozen=self._frozen,
                absorb=self.method.absorb,
                enough=self.settings.enough_devices,
                simulated=self.population.simulated,
                norm_bound=self.settings.norm_bound,
                clip=self.settings.privacy.clip if self.settings.privacy else 0.0,
                each_by_itself=not self.settings.aggregation.adds_up,
                wire=self.settings.wire,
                oldest_checkpoint=self.oldest_checkpoint,
            )
            self._route(grid, work)
            self._secure = self._agree(grid, work)
            self.method.begin_round([a.task.order for a in self.assignments if a.node is not None])
        return work

    def _agree(self, grid: Grid, work: Work) -> SecureRound | None:
        """Let the devices agree on masks, where the server is to see sums only."""
        if not self.settings.secure_minimum:
            return None
        with self._timed("secure"):
            found = SecureRound(work, self.settings, self.population)
            found.agree(grid)
        return found

    def unmask(self, grid: Grid, work: Work) -> None:
        """After all replies of a round: absorb the sums whose masks can be taken off."""
        if self._secure is None or self._secure.work is not work:
            return
        with self._timed("secure"):
            self._secure.finish(grid)
        self._traffic["training_bytes_down"] += self._secure.bytes_down
        self._traffic["training_bytes_up"] += self._secure.bytes_up

    def _sample(self, grid: Grid) -> list[int]:
        """The devices of the round: a number of them, or under differential privacy each with the same probability."""
        privacy = self.settings.privacy
        if privacy is None:
            return self.population.sample(grid, self.method.rng(0), self.settings.sampled_devices)
        # On real nodes nobody may foresee who is asked: that is what sampling protects.
        able = self.population.everyone(grid)
        drawn = (
            self.method.rng(0).random(len(able)) if privacy.seeded else [secrets.SystemRandom().random() for _ in able]
        )
        return [device for device, number in zip(able, drawn, strict=True) if number < privacy.sampling_rate]

    def finish(self, work: Work, started: float) -> dict[str, float | None]:
        """Let the method make its next model. -> the method's own figures."""
        trained = [(a, a.update) for a in work.assignments if a.update is not None and a.outcome == "trained"]
        lost = {a.device for a, update in trained if update.state_lost}
        # Who has lost it and keeps nothing new has nothing left to lose.
        self._keepers -= lost
        self._keepers |= {a.device for a, update in trained if update.state_kept}
        for device in sorted(lost):
            log(WARNING, "Round %s: device %s has lost what it kept, and began anew", work.round, device)
            self.method.lost(device)
        with self._timed("finish"):
            metrics = self.method.finish_round(self._trained(work))
        seconds = simulated_seconds(work.assignments, self.settings)
        self._left += self.population.advance(seconds, time.perf_counter() - started)
        return dict(metrics)

    def _forget_who_left(self) -> None:
        """Drop what is held of devices that have left for good, so that a long run needs no more memory.

        This comes after the evaluation, which may score the models of the devices that trained in the round.
        """
        self._keepers.difference_update(self._left)
        self._introduced.difference_update(self._left)
        self._told_skipped.difference_update(self._left)
        for device in self._left:
            self._frozen.lost(device)
            self.method.left(device)
        self._left.clear()

    def conclude(
        self,
        grid: Grid,
        work: Work,
        scorer: Scorer | None,
        metrics: Mapping[str, float | None],
        started: float,
    ) -> RoundResult:
        """Evaluate a finished round, where it is its turn, and sum it up. Without a scorer only devices score."""
        number = work.round
        evaluation: Evaluation | None = None
        if number % self.settings.evaluate_every == 0 or number == self.settings.rounds:
            with self._timed("evaluate"):
                evaluation = self.evaluate(grid, scorer)
        personal: Personal | None = None
        if self.settings.personal_in(number):
            with self._timed("evaluate"):
                personal = self.evaluate_personally(grid)
        self._forget_who_left()
        record = round_record(
            work,
            strategy=self.method.name(),
            task=self.settings.task_name,
            metric=self.settings.metric,
            evaluation=evaluation,
            personal=personal,
            traffic=self._traffic,
            simulated_seconds=self.population.now_seconds,
            wall_seconds=time.perf_counter() - started,
            server_seconds=self.method.stopwatch.seconds,
            metrics=metrics,
            privacy=self.settings.privacy,
        )
        return RoundResult(record, [device_record(work.round, a) for a in work.assignments])

    def _trained(self, work: Work) -> list[Trained]:
        done = [a for a in work.assignments if a.outcome == "trained" and a.update is not None]
        return [
            Trained(a.task.order, a.tier, a.update.examples, a.update.loss, a.update.facts)
            for a in sorted(done, key=lambda a: (a.device, a.task.order.place))
            if a.update is not None
        ]

    # What devices are asked ------------------------------------------------------------------------------------------

    def budget(self, device: int, wanted: Callable[[Budget], Sequence[Order]]) -> Budget:
        """What a device may spend in this round; of the memory, what is left to training.

        A real node holds the message that brings its tensor sets in memory while it trains. How large that is depends
        on what it is given under the budget, which `wanted` says.
        """
        budget = budget_in_round(device, self.population, self.settings)
        if not self._trains_beside_message(device):
            return budget
        return beside_message(budget, lambda part: sum(map(self._sent_bytes, wanted(part))))

    def _trains_beside_message(self, device: int) -> bool:
        """Whether a device holds its message in the memory that it trains in."""
        return not self.population.simulated and self.population.report(device).memory_is_ram

    def _sent_bytes(self, order: Order) -> int:
        """Bytes of what a device is sent for an order, as it travels."""
        family = self.method.family
        down, _ = tensor_set_bytes(self.method.client_step(order), family, order.architecture, self.settings.wire)
        return down + frozen_nbytes(family, order.architecture)

    def survey(self, devices: Iterable[int]) -> None:
        """Let the method see what devices may spend, before the first of them trains."""
        message_bytes = lru_cache(lambda architecture: MESSAGE_COPIES * self._sent_bytes(Order(0, architecture)))
        self.method.survey(
            Means(
                budget_in_round(device, self.population, self.settings),
                message_bytes if self._trains_beside_message(device) else nothing_beside,
            )
            for device in devices
        )

    def _wanted(self, device: int, budget: Budget) -> list[Order]:
        """What the method gives a device under a budget."""
        architecture = self.method.assign(device, budget)
        if architecture is None:
            return []
        found = [architecture, *self.method.extra_architectures(device, budget, architecture)]
        return [Order(device, a, place, self.method.after(device, place)) for place, a in enumerate(found)]

    def orders(self, device: int) -> list[Assignment]:
        """What a device is asked in this round: one order, or several; one that gives it nothing where nothing fits."""
        method = self.method
        budget = self.budget(device, partial(self._wanted, device))
        orders = self._wanted(device, budget)
        if not orders:
            return [Assignment(device, self.population.tier(device), budget, None, outcome=NOTHING_FITS)]
        self.tier_architectures[self.population.tier(device)] = orders[0].architecture
        asked: list[Assignment] = []
        for order in orders:
            asked.append(self.ask(order, method.selection(device, order.architecture), budget))
            asked[-1].earlier = None if order.after is None else asked[order.after]
        return asked

    def _tell_skipped(self, assignments: Sequence[Assignment]) -> None:
        """Say which devices train nothing, with what the smallest model needs and what the first of them may spend."""
        if not assignments:
            return
        skipped, *others = assignments
        self._told_skipped.update(a.device for a in assignments)
        cost = self.method.order_cost(Order(skipped.device, self.method.smallest_architecture))
        needs = [f"{_megabytes(cost.peak_training_memory_bytes)} of memory"]
        has = [f"{_megabytes(skipped.budget.memory_bytes)} of memory"]
        for way, needed_bytes, limit_bytes in (
            ("down", cost.download_bytes, skipped.budget.download_bytes),
            ("up", cost.upload_bytes, skipped.budget.upload_bytes),
        ):
            if limit_bytes is not None:
                needs.append(f"{_megabytes(needed_bytes)} of weights {way}")
                has.append(f"{_megabytes(limit_bytes)} of weights {way}")
        text = "Round %s: device %s is skipped, as no model of %s fits its budget: the smallest needs %s, it has %s%s%s"
        time = ", and budget.round-seconds bounds its time" if skipped.budget.round_seconds is not None else ""
        more = f"; so {'is 1 other' if len(others) == 1 else f'are {len(others)} others'}" if others else ""
        log(WARNING, text, self.round, skipped.device, self.method.name(), ", ".join(needs), ", ".join(has), time, more)

    def ask(self, order: Order, selection: Selection, budget: Budget, local: ClientStep | None = None) -> Assignment:
        """An order as an assignment; `local` in place of the method's client step."""
        given = Given(order, selection, self.method.order_cost(order), local or self.method.client_step(order))
        tier = self.population.tier(order.device)
        return Assignment(
            order.device,
            tier,
            budget,
            given,
            kept=order.device in self._keepers,
            frozen=self._frozen.owed(order.device, order.architecture, selection),
        )

    def _route(self, grid: Grid, *works: Orders) -> None:
        """Say which node carries each device that takes part."""
        asked = [
            orders
            for work in works
            for orders in by_device(a for a in work.assignments if a.given is not None and not a.outcome).values()
        ]
        if asked:
            loads = [
                sum(float(a.task.cost.training_flops) for a in orders) * self.population.examples(orders[0].device)
                for orders in asked
            ]
            nodes = self.population.nodes(grid, [orders[0].device for orders in asked], loads)
            for orders, node in zip(asked, nodes, strict=True):
                for a in orders:
                    a.node = node

    def _introduce(self, grid: Grid, devices: Collection[int], question: ClientStep) -> dict[int, str]:
        """Ask devices that train for the first time what the method wants to know of them beforehand.

        Returns:
            The outcomes of those that gave no answer: they do not train in this round, and are asked again.
        """
        new = [device for device in devices if device not in self._introduced]
        smallest = self.method.smallest_architecture
        work = Work(
            round=self.round,
            assignments=[self.ask(Order(d, smallest), LEADING, self.budget(d, lambda _: ()), question) for d in new],
            family=self.method.family,
            payload=_no_tensor_sets,
            frozen=self._frozen,
            absorb=_absorb_nothing,
            enough=len(new),
            simulated=self.population.simulated,
            oldest_checkpoint=self.oldest_checkpoint,
        )
        self._exchange(grid, work)
        for a in work.assignments:
            if a.outcome == "trained" and a.update is not None:
                self._introduced.add(a.device)
                self.method.introduce(a.device, a.update.facts)
        return {a.device: a.outcome for a in work.assignments if a.device not in self._introduced}

    def _exchange(self, grid: Grid, *works: Work) -> None:
        """Route and exchange further work of a round."""
        self._route(grid, *works)
        self._run(grid, *works)

    def _run(self, grid: Grid, *works: Work) -> None:
        """Exchange the work with the nodes, absorbing every reply as it arrives."""
        queues: dict[int, deque[tuple[int, list[Assignment]]]] = {}
        for place, work in enumerate(works):
            for node, batches in work.batches().items():
                queues.setdefault(node, deque()).extend((place, batch) for batch in batches)
        replies = exchange(
            grid,
            queues,
            lambda node, asked: self.message(works[asked[0]], node, asked[1]),
            deadline_seconds=self.population.answer_seconds(self.settings.deadline_seconds),
            busy=self.population.busy,
            poll_seconds=self.population.poll_seconds,
            parts=_devices_by_themselves if self.population.simulated else None,
        )
        left = [work.enough for work in works]
        for (place, batch), reply in replies:
            self.take(works[place], batch, reply)
            left[place] -= devices_that_trained(batch)
            if max(left) <= 0:
                break
        replies.close()
        for work in works:
            self.unmask(grid, work)
            self.settle(work)

    def message(self, work: Work, node: int, batch: list[Assignment]) -> Message:
        """The message that carries a batch to its node."""
        with self._timed("payload"):
            seconds = self.population.answer_seconds(self.settings.deadline_seconds)
            return work.message(self.settings, node, batch, seconds)

    def settle(self, work: Work) -> None:
        """What has no outcome by now is late; count the bytes, and say what went wrong."""
        for a in work.assignments:
            a.outcome = a.outcome or "late"
            if a.outcome == "trained":
                self._frozen.has(a.device, a.frozen.name)
            elif a.node is not None:
                self._frozen.lost(a.device)
            if self.own is not None and a.update is not None:
                if a.outcome == "trained":
                    self.own.trained(a.device, a.update.examples)
                elif a.outcome.startswith("refused"):
                    self.own.refused(a.device)
            if a.outcome != "trained":  # one that could afford nothing has no update to say with that it has more now
                self.population.ask_again(a.device)
        count_work(self._traffic, work)
        trained = {a.node for a in work.assignments if a.outcome == "trained" and a.node is not None}
        for node in sorted(trained - work.refused.keys() - work.broke.keys()):
            self.population.accepted(node)
        # Where all are refused it is rather the run's fault, such as a model that has diverged.
        for node, why in sorted(((work.refused if trained else {}) | work.broke).items()):
            self.population.refused(node, why, lied=node in work.broke)
        overran = by_device(a for a in work.assignments if a.update is not None and a.update.overrun)
        for device, orders in overran.items():  # lowered once: a child that is killed loses all orders of its device
            largest_bytes = max(a.task.cost.peak_training_memory_bytes for a in orders)
            self.population.overran(device, largest_bytes / max(1, orders[0].budget.memory_bytes))
        far = sorted({a.device for a in work.assignments if a.update is not None and a.update.bounded})
        if far:
            # Under differential privacy clipping is the usual case, and nothing to warn of.
            level, key = (WARNING, "norm-bound") if self.settings.privacy is None else (INFO, "dp.clip")
            log(level, "Round %s: the updates of devices %s are scaled down to %s", work.round, far, key)
        troubles = Counter(a.outcome for a in work.assignments if a.outcome.startswith(("failed", "refused")))
        for outcome, times in troubles.most_common(3):
            text = "Round %s: %s of %s work orders%s %s"
            log(WARNING, text, work.round, times, len(work.assignments), _for_scoring(work), outcome)

    def take(self, work: Work, batch: list[Assignment], reply: Message | Failure) -> None:
        """Absorb one reply. Whatever is wrong with it is counted and changes nothing."""
        if isinstance(reply, Failure):
            for a in batch:
                a.outcome = "late" if reply.late else f"failed: {reply.why}"
            return
        with self._timed("absorb"):
            self._absorb(work, batch, reply)

    def _absorb(self, work: Work, batch: list[Assignment], reply: Message) -> None:
        try:
            population, run = self.population, self.settings.run
            maximum = population.examples if self.own is None else lambda _: self.own.max_examples
            checked = read_reply(run, work, batch, reply, maximum, population.check_report)
        except MessageError as error:
            devices, why = list(by_device(batch)), one_line(str(error))
            log(WARNING, "Round %s: the reply for devices %s is refused: %s", work.round, devices, why)
            _refuse(work, batch, why)
            return
        release(reply.content)  # what was read of its arrays is not held beside them while it is merged
        for number, why in checked.wrong.items():
            _note_refused(work, [a for a in batch if a.number == number], why)
        for a in batch:
            a.outcome, a.update = checked.outcomes[a.number], checked.updates.get(a.number)
            if a.number in checked.reports:
                self.population.replied(a.device, checked.reports[a.number])
            if a.number in checked.masked and self._secure is not None:
                self._secure.sum_of(a).add(a.device, checked.masked[a.number])
        for contribution in checked.contributions:
            self._absorb_one(work, contribution, [a for a in batch if a.number in contribution.orders])

    def _absorb_one(self, work: Work, contribution: Contribution, assignments: Sequence[Assignment]) -> None:
        try:
            work.absorb(contribution)
        except MessageError as error:
            why = one_line(str(error))
            log(WARNING, "Round %s: devices %s are refused: %s", work.round, contribution.devices, why)
            _refuse(work, assignments, why)

    def _timed(self, part: str) -> Any:
        return self.method.stopwatch.timed(part)

    # Scores ----------------------------------------------------------------------------------------------------------

    def evaluate(self, grid: Grid, scorer: Scorer | None) -> Evaluation | None:
        """Score the method's models on the task's test set; None where they cannot be scored.

        On the server the global model is scored, and every tier's sub-model, and without a scorer nothing. Where models
        live on devices only, those score them, and the figures are means over devices. Where devices have models of
        their own beside the global one, those are the tiers'.
        """
        on_devices = self.method.scored_on_devices()
        if scorer is None and on_devices is None and not self.tests_on_devices:
            return None  # nobody scores
        scored = self.method.scored_architecture
        self.scored, self.model_scores, self.tier_scores = {}, {}, {}
        recipients = self._recipients(grid) if self.settings.evaluate_tiers else []
        if on_devices is not None:
            models = {} if scorer is None and not self.tests_on_devices else self._models(grid)
            own = self._scored_there(grid, on_devices) if self.settings.evaluate_tiers or not models else None
            delivered = self._delivered_there(recipients, own)
            if scored not in models:
                return own and replace(own, delivered=delivered)
            if scorer is None:
                everywhere = self._federated(grid, models, recipients) or own
                return everywhere and replace(everywhere, delivered=delivered)
            self.scored = models
            whole = scorer(models[scored])
            self.model_scores = {scored: whole.score}
            tiers = own.score_by_tier if own else {}
            return _evaluation(whole, tiers, own.score_by_device if own else None, delivered)
        if scorer is None:
            return self._federated(grid, self._models(grid), recipients)
        candidates = dict.fromkeys([scored, *self.scored_tiers.values(), *self.method.deliverable])
        given = represented(recipients, candidates, self.method.cost)
        best = self.settings.deliver == "best"
        self.scored = models = self._models(grid, [*given.values(), *(candidates if best and recipients else [])])
        if not models:
            return None
        found: dict[Architecture, Scores] = {}
        family = self.method.family
        if scored in models:
            whole = found[scored] = scorer(models[scored])
            as_whole = scored == family.full() and models[scored].family == family and models[scored].exits == "deepest"
            if as_whole and not best:
                # The networks up to each exit are in the global model: one pass scores them all.
                by_exit = enumerate(whole.by_exit, start=1)
                found = {family.up_to(exit): Scores(value, math.nan) for exit, value in by_exit} | found
        found |= {a: scorer(model) for a, model in models.items() if a not in found}
        if best and any(scores.held_out is None for scores in found.values()):
            raise ValueError(
                "deliver = 'best' needs a scorer that also scores held-out examples (server_app/server_scoring.py)"
            )
        self.model_scores = {a: found[a].score for a in models}
        values = self.model_scores
        if best:
            held_out, values = ({a: getattr(found[a], part) for a in models} for part in ("held_out", "rest"))
            given = best_that_fit(recipients, given, held_out, self.settings.metric.scale, self.method.cost)
        self.delivered_tiers = most_common_by_tier(recipients, given)
        tiers = {tier: found[a].score for tier, a in self.scored_tiers.items() if a in models}
        nothing = self.settings.score_without_model
        of_device = scores_of_devices(recipients, given, values, nothing)
        delivered = delivered_models(recipients, given, values, nothing)
        return _evaluation(found.get(scored), tiers, told(of_device), delivered)

    def _recipients(self, grid: Grid) -> list[Recipient]:
        """What the method would give now to every device that is there, or to some of very many."""
        found = []
        for device in evenly_spread(self.population.present(grid)):
            tier = self.population.tier(device)
            orders = self._order_to_score(device)
            if orders:
                a = orders[0]
                found.append(Recipient(device, tier, a.task.architecture, a.budget, fits(a.task.cost, a.budget)))
            else:
                budget = self.budget(device, partial(self._largest_deliverable, device))
                found.append(Recipient(device, tier, budget=budget))
        return found

    def _largest_deliverable(self, device: int, budget: Budget) -> list[Order]:
        """What brings the most bytes of all that a device without an order could be delivered under a budget."""
        fitting = [Order(device, a) for a in self.method.deliverable if fits(self.method.cost(a), budget)]
        return sorted(fitting, key=self._sent_bytes)[-1:]

    def _delivered_there(self, recipients: Sequence[Recipient], own: Evaluation | None) -> Delivered | None:
        """What is delivered where devices have models of their own, of which some have just been scored."""
        self._own_by_tier |= own.score_by_tier if own else {}
        nothing = self.settings.score_without_model
        return delivered_on_devices(recipients, self._own_by_tier, self.method.has_model, nothing)

    def _scored_there(self, grid: Grid, wanted: Sequence[tuple[int, Architecture, Selection]]) -> Evaluation | None:
        """The means over devices of what their own models score on the task's test set.

        Those that left at the end of the round are scored before they are forgotten.
        """
        there = {*self.population.connected(grid, [device for device, _, _ in wanted]), *self._left}
        asked = [self._to_score(d, a, selection) for d, a, selection in wanted if d in there]
        data: Examples = "test set" if self.own is None else "shard"
        return mean_score(self.scores(grid, asked, data), self.settings.metric, self.population)

    @property
    def tests_on_devices(self) -> bool:
        """Whether nobody but the devices has examples to test on."""
        return self.own is not None and not self.population.holdings.test_set

    def _federated(
        self, grid: Grid, models: Mapping[Architecture, Model], recipients: Sequence[Recipient]
    ) -> Evaluation | None:
        """Devices score models on what each keeps for testing, and every example counts alike.

        The score is that of the global model over all devices that score it, as if their test examples lay in one
        place. A tier's is that of its sub-model over its devices, and each recipient counts as its tier. A model that
        is not among `models`, or that no device scores, has no score, and the others have theirs all the same.
        """
        assert self.own is not None
        if (
            self.settings.deliver == "best"
        ):  # nothing to choose by; `wildflower.server_app.app.build` says before what to do
            raise ValueError("deliver = 'best' needs a test set on the server, to hold out a part to choose by")
        able = [d for d in self._fitting(grid, self.population.everyone(grid)) if self.own.testing(d)]
        there = self.population.connected(grid, able)
        scored = self.method.scored_architecture
        whole = self._score_model(grid, models[scored], there) if scored in models else {}
        of: dict[Architecture, dict[int, Score]] = {scored: whole}
        tiers: dict[str, dict[int, Score]] = {}
        for tier, architecture in self.scored_tiers.items():
            if architecture in models:
                theirs = [d for d in there if self.population.tier(d) == tier]
                if architecture == scored:
                    found = {d: whole[d] for d in theirs if d in whole}
                else:
                    found = self._score_model(grid, models[architecture], theirs)
                if found:
                    of[architecture] = of.get(architecture, {}) | found
                    tiers[tier] = found
        # Of a model that no device could hold nothing is known.
        self.scored = {a: model for a, model in models.items() if of.get(a)}
        self.model_scores = {a: pooled(of[a], self.settings.metric)[0] for a in self.scored}
        holding = {device for device in whole if self._holds(Order(device, scored))}
        evaluation = federated_score(whole, holding, tiers, self.settings.metric)
        by_tier, nothing = evaluation.score_by_tier if evaluation else {}, self.settings.score_without_model
        self.tier_scores = dict(by_tier)
        delivered = delivered_on_devices(recipients, by_tier, lambda device: True, nothing)
        return evaluation and replace(evaluation, delivered=delivered)

    def _fitting(self, grid: Grid, devices: list[int]) -> list[int]:
        """Those of the devices whose data fit: all of them where the server deals the data out."""
        if self.own is None:
            return devices
        self.own.admit(grid, devices, self.population)
        return self.own.fitting(devices)

    def _score_model(self, grid: Grid, model: Model, devices: Sequence[int]) -> dict[int, Score]:
        """The scores that devices take of one model, exactly as it is, on what each keeps for testing."""
        local = ScoreModel(exits=model.exits)
        orders = [Order(device, model.architecture) for device in devices]
        if not orders:
            return {}
        weights = {name: model.weights[name] for name in model.family.tensors(model.architecture)}
        asked = Orders(
            round=self.round,
            assignments=[self.ask(o, LEADING, self._budget_of(o), local) for o in orders],
            family=model.family,
            payload=lambda group: {"weights": weights},
            frozen=self._frozen,
        )
        return self._score(grid, asked, "shard")

    @property
    def scored_tiers(self) -> dict[str, Architecture]:
        """The tiers whose sub-models are scored on the server: all that had a device so far.

        None without `evaluate-tiers`, nor where devices score models of their own.
        """
        here = self.settings.evaluate_tiers and self.method.scored_on_devices() is None
        return self.tier_architectures if here else {}

    @property
    def models_of_tiers(self) -> dict[str, Architecture]:
        """What each tier would be given, or where that is nothing now, what it was given last."""
        return self.scored_tiers | self.delivered_tiers

    def _to_score(self, device: int, architecture: Architecture, selection: Selection) -> Assignment:
        order = Order(device, architecture)
        return self.ask(order, selection, self._budget_of(order))

    def _budget_of(self, order: Order) -> Budget:
        """What a device may spend on one order that is given to it whatever its budget."""
        return self.budget(order.device, lambda _: [order])

    def _holds(self, order: Order) -> bool:
        """Whether a device has the memory in which it could train what an order gives it."""
        return self.method.order_cost(order).peak_training_memory_bytes <= self._budget_of(order).memory_bytes

    def _models(self, grid: Grid, given: Collection[Architecture | None] = ()) -> dict[Architecture, Model]:
        """The models to score, with batch norm statistics that devices take where they have none.

        given: architectures to score beside the global one and the tiers'.
        """
        wanted = dict.fromkeys([self.method.scored_architecture, *self.scored_tiers.values(), *given])
        models = dict(self.method.models([architecture for architecture in wanted if architecture is not None]))
        if not (self.settings.privacy or self.settings.secure_minimum):  # under which no device tells its statistics
            models = {a: replace(model, family=model.family.with_statistics) for a, model in models.items()}
        missing = {a: names for a, model in models.items() if (names := _missing_statistics(model))}
        if not missing:
            return models
        order = list(models)
        count = self.settings.statistics_devices or max(self.settings.devices_per_round, LEAST_DEVICES)
        devices = self._fitting(grid, self.population.sample(grid, self.method.rng(3), 8 * count))
        # On hardware one model after the other: each has the whole deadline.
        for architectures in [list(missing)] if self.population.simulated else [[a] for a in missing]:
            connected = self.population.connected(grid, devices)  # some may have been left working a moment ago
            asked = {a: self._statistics(connected, count, models[a]) for a in architectures}
            self._exchange(grid, *(work for work, _ in asked.values()))
            for architecture, (work, statistics) in asked.items():
                model = models.pop(architecture)
                if any(a.outcome == "trained" for a in work.assignments):
                    weights = model.weights | statistics()
                    models[architecture] = Model(model.family, architecture, weights, model.exits)
                else:
                    name = self.method.describe(architecture)
                    text = "Round %s: no device returned batch norm statistics, %s is not scored"
                    log(WARNING, text, self.round, name)
        return {a: models[a] for a in order if a in models}

    def _statistics(self, devices: list[int], count: int, model: Model) -> tuple[Work, Callable[[], Weights]]:
        """What is to be done for the batch norm statistics of one model, and a function that gives them afterwards.

        They are the mean over devices of what one pass over their data shows. The first `count` of `devices` that can
        afford to train the model take part. Each device's variance is that within its own batches: what differs between
        devices is not in it, unlike in one pass over pooled data.
        """
        architecture = model.architecture
        local = TakeStatistics(examples=self.settings.statistics_examples)
        orders = [Order(device, architecture) for device in devices]
        asked = [self.ask(o, LEADING, self._budget_of(o), local) for o in orders]
        able = [a for a in asked if fits(a.task.cost, a.budget)]
        if not able:
            text = "Round %s: no device affords %s, so any device takes its batch norm statistics"
            log(WARNING, text, self.round, self.method.describe(architecture))
        layout = local.returned(model.family, architecture)["statistics"].layout
        zeros = {entry.name: torch.zeros(entry.shape) for entry in layout.entries}
        placement, mean = whole(zeros), self.method.running_mean(zeros)
        sent = {
            tensor: model.weights[tensor] if tensor in model.weights else torch.zeros(spec.shape)
            for tensor, spec in model.family.tensors(architecture).items()
        }
        assignments = (able or asked)[:count]
        work = Work(
            round=self.round,
            assignments=assignments,
            family=model.family,
            payload=lambda group: {"weights": sent},
            frozen=self._frozen,
            absorb=lambda contribution: mean.add(placement, layout, contribution.sum_of("statistics")),
            enough=len(assignments),
            simulated=self.population.simulated,
            each_by_itself=not self.settings.aggregation.adds_up,
            wire=self.settings.wire,
            oldest_checkpoint=self.oldest_checkpoint,
        )
        return work, lambda: mean.mean(zeros)

    def evaluate_personally(self, grid: Grid) -> Personal:
        """Let every device train and score, on its own examples, the model that it would be given now.

        Nothing but scores comes back, and no device keeps anything. The protocol is that of RecipFL and of HypeMeFed's
        personalized accuracy.
        """
        devices = self._fitting(grid, self.population.everyone(grid))
        if self.own is not None:
            devices = [d for d in devices if self.own.testing(d)]
        assignments = [a for device in devices for a in self._order_to_score(device)]
        scores = self.scores(grid, assignments, "shard", self.settings.personal_training_in(self.round))
        return personal_score(
            scores,
            len(assignments),
            self.settings.metric,
            self.population,
            by_device=self.settings.label_sets or len(assignments) <= MAX_TOLD,
            beside={a.device: a.task.client_step.scored_beside for a in assignments},
        )

    def _order_to_score(self, device: int) -> list[Assignment]:
        """What a device is asked in a personal evaluation: one order, or nothing."""

        def wanted(budget: Budget) -> list[Order]:
            found = self.method.personal(device, budget)
            return [] if found is None else [Order(device, found[0])]

        budget = self.budget(device, wanted)
        found = self.method.personal(device, budget)
        return [] if found is None else [self.ask(Order(device, found[0]), found[1], budget)]

    def scores(
        self, grid: Grid, assignments: list[Assignment], data: Examples, training: LocalTraining | None = None
    ) -> dict[int, Score]:
        """The scores that devices take of what they are asked to score; `wildflower.rounds.scores.score_on_devices`."""
        orders = Orders(
            round=self.round,
            assignments=assignments,
            family=self.method.family,
            payload=self.method.payload,
            frozen=self._frozen,
        )
        return self._score(grid, orders, data, training)

    def _score(
        self, grid: Grid, orders: Orders, data: Examples, training: LocalTraining | None = None
    ) -> dict[int, Score]:
        """Ask devices for scores, and note which of them then hold the frozen parts."""
        self._route(grid, orders)
        found = score_on_devices(grid, orders, self.settings, self.population, data, training)
        count_scoring(self._traffic, orders)
        for a in orders.assignments:
            if a.device in found:
                self._frozen.has(a.device, a.frozen.name)
            else:
                self._frozen.lost(a.device)
        return found


def _missing_statistics(model: Model) -> list[str]:
    """The running statistics that a model's family has and its weights have not."""
    names = model.family.tensors(model.architecture)
    return [name for name in names if name.endswith(STATISTICS) and name not in model.weights]


def _refuse(work: Work, assignments: Sequence[Assignment], why: str) -> None:
    for a in assignments:
        a.outcome = one_line(f"refused: {why}")
    _note_refused(work, assignments, why)


def _note_refused(work: Work, assignments: Sequence[Assignment], why: str) -> None:
    work.refused |= {a.node: why for a in assignments if a.node is not None}


def _devices_by_themselves(asked: tuple[int, list[Assignment]]) -> list[tuple[int, list[Assignment]]]:
    """Return the parts of a message's orders: those of one device read each other's models."""
    return [(asked[0], orders) for orders in by_device(asked[1]).values()]


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.2f} MB"


def _for_scoring(work: Work) -> str:
    """What a log says of orders that train nothing, which come beside those that train; "" of others."""
    scoring = any(a.given is not None and isinstance(a.given.client_step, TakeStatistics) for a in work.assignments)
    return " for scoring (statistics of batch norm)" if scoring else ""


def _no_tensor_sets(group: Group) -> TensorSets:
    return {}


def _absorb_nothing(contribution: Contribution) -> None:
    pass
