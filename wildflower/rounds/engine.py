"""The round, once for all methods: `Engine.run_round`.

The engine samples devices, reads their reports, sends them work in waves, checks what comes back, waits no longer than
the deadline, has models scored, and writes the figures of the journal. What a device gets, what it is sent and what
becomes of what it returns is the method's business (`wildflower.strategies.method`), of which the engine knows the
contract alone. What is optional are hooks (`wildflower.rounds.hooks`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from functools import partial

from flwr.app import Message
from flwr.serverapp import Grid

from wildflower.plugins.flower_log import log
from wildflower.rounds.asking import Asking
from wildflower.rounds.delivery import evenly_spread
from wildflower.rounds.evaluation import Evaluating, Scorer
from wildflower.rounds.exchange import Failure
from wildflower.rounds.hooks import (
    HookError,
    Round,
    RoundHook,
    RoundResult,
    check_devices,
    check_metrics,
    each,
    name_of,
    naming,
)
from wildflower.rounds.lateness import drop_late, simulated_seconds
from wildflower.rounds.layout_check import dry_run_payload
from wildflower.rounds.own_data import OwnData
from wildflower.rounds.population import Population
from wildflower.rounds.replies import Checked
from wildflower.rounds.requests import Assignment
from wildflower.rounds.round_records import device_record, round_record
from wildflower.rounds.scores import Evaluation, Personal
from wildflower.rounds.sending import Sending
from wildflower.strategies.method import Method, State, Trained
from wildflower.strategies.pricing import fits


class Engine:
    """Runs the rounds of one method over the devices of a population.

    Attributes:
        hooks: what is optional in a round, in the order in which it is called. Hooks may be added before round 1.
        own: what devices say of data that they alone hold; None where the server deals them out.
        assignments: the orders of the round that runs, or ran last.
        asking: what devices are asked.
        sending: how that gets to them, and what comes back.
        evaluation: the models of the last evaluation and their scores.
    """

    def __init__(
        self, method: Method, population: Population, hooks: Sequence[RoundHook] = (), own: OwnData | None = None
    ) -> None:
        """Make an engine.

        Args:
            hooks: those of `wildflower.rounds.standard_hooks`, and more.
        """
        self.method, self.population, self.settings, self.own = method, population, method.settings, own
        self.hooks, self.assignments = list(hooks), list[Assignment]()
        self.asking = Asking(method, population, self.hooks)
        self.sending = Sending(self.asking, self.hooks, population.examples if own is None else own.most_examples)
        self.evaluation = Evaluating(self.asking, self.sending, own)

    def start(self, number: int = 1) -> None:
        """Before the first of the rounds that come, round `number`: let the method make what takes long.

        Raises DryRunError, or what the method raises, where its halves do not go together.
        """
        self.method.round = number
        self.method.start()
        dry_run_payload(self.method)

    def run_round(self, grid: Grid, number: int, scorer: Scorer | None) -> RoundResult:
        """Run one whole round. Without a scorer only devices score.

        Raises HookError where a hook fails or may not do what it does.
        """
        round = self.begin(grid, number)
        self.gather(round)
        self.finish(round)
        return self.conclude(round, scorer)

    def begin(self, grid: Grid, number: int) -> Round:
        """Sample devices, and give each the work that its budget allows."""
        round = self.sample(grid, number)
        self.assign(round)
        self.prepare(round)
        return round

    def take(self, round: Round, batch: list[Assignment], reply: Message | Failure) -> None:
        """Absorb one reply of the round."""
        self.sending.take(round.asked, batch, reply, partial(self._replied, round))

    def _replied(self, round: Round, batch: list[Assignment], checked: Checked) -> None:
        each(self.hooks, lambda hook: hook.on_reply(round, batch, checked))

    # The parts of a round

    def sample(self, grid: Grid, number: int) -> Round:
        """Begin a round with its devices: a number of them, or under differential privacy each with one probability."""
        round = Round(number, grid, self.method, self.population, started=time.perf_counter())
        self.method.round = number
        self.method.stopwatch.seconds.clear()
        self.sending.traffic = round.traffic
        with self.method.stopwatch.timed("assign"):
            if number == 1:
                self.asking.survey(evenly_spread(self.population.present(grid)))
            round.devices = self._sample(grid)
        for hook in self.hooks:
            sampled = list(round.devices)
            with naming(hook):
                hook.before_assigning(round)
            check_devices(hook, round, sampled)
        return round

    def _sample(self, grid: Grid) -> list[int]:
        privacy = self.settings.privacy
        if privacy is None:
            working = partial(self._working, grid)
            return self.population.sample(grid, self.method.rng(0), self.places(), working)
        # On real nodes nobody may foresee who is asked: that is what sampling protects.
        able = self.population.everyone(grid)
        drawn = (
            self.method.rng(0).random(len(able)) if privacy.seeded else [secrets.SystemRandom().random() for _ in able]
        )
        return [device for device, number in zip(able, drawn, strict=True) if number < privacy.sampling_rate]

    def places(self) -> int:
        """Return how many devices are sampled for the next round."""
        return self.settings.sampled_devices

    def _working(self, grid: Grid, devices: Sequence[int]) -> int:
        """Return how many of some devices would be given work now."""
        unknown = {} if self.own is None else self.own.admit(grid, devices, self.population)
        return sum(device not in unknown and self.asking.gives_work(device) for device in devices)

    def assign(self, round: Round) -> None:
        """Give each device the architecture that its budget allows, and leave out who cannot take part."""
        grid, devices, method = round.grid, round.devices, self.method
        unknown = {} if self.own is None else self.own.admit(grid, devices, self.population)
        if method.first_question is not None:
            questions = self.asking.questions([d for d in devices if d not in unknown], method.first_question)
            self.sending.further(grid, questions)
            unknown |= self.asking.introduce(questions)
        with method.stopwatch.timed("assign"):
            self.assignments = round.assignments = [a for device in devices for a in self.asking.orders(device)]
            for a in round.assignments:
                a.outcome = a.outcome or unknown.get(a.device, "")
            self.asking.tell_skipped(round.assignments)
            beyond = {a.device for a in round.assignments if a.given is not None and not fits(a.given.cost, a.budget)}
            if beyond and method.below_smallest == "smallest":
                text = "Round %s: devices %s get an architecture that they cannot afford"
                log.warning(text, round.number, sorted(beyond))
            # No hook: the virtual clock says who is late, and at the end how long the round took.
            drop_late(round.assignments, method.family, self.population, self.settings)

    def prepare(self, round: Round) -> None:
        """Make work of the assignments, and route it to the nodes."""
        with self.method.stopwatch.timed("assign"):
            settings = self.settings
            round.work = work = self.asking.work(
                round.assignments,
                self.method.family,
                self.method.payload,
                self.method.absorb,
                settings.enough_devices,
                norm_bound=settings.norm_bound,
                clip=settings.privacy.clip if settings.privacy else 0.0,
            )
            self.asking.route(round.grid, work)
            each(self.hooks, lambda hook: hook.before_sending(round))
            self.method.begin_round([a.task.order for a in work.assignments if a.node is not None])

    def gather(self, round: Round) -> None:
        """Send the round's work, and absorb what comes back."""
        self.sending.run(round.grid, round.asked, on_reply=partial(self._replied, round))

    def seconds(self, round: Round) -> float:
        """Return how long a round took by the virtual clock."""
        return simulated_seconds(round.assignments, self.settings)

    def finish(self, round: Round) -> None:
        """Settle what came back, and let the method make its next model of it."""
        each(self.hooks, lambda hook: hook.before_finishing(round))
        self.sending.settle(round.asked)
        trained = [(a, a.update) for a in round.assignments if a.update is not None and a.outcome == "trained"]
        lost = {a.device for a, update in trained if update.state_lost}
        # Who has lost it and keeps nothing new has nothing left to lose.
        self.asking.keepers -= lost
        self.asking.keepers |= {a.device for a, update in trained if update.state_kept}
        for device in sorted(lost):
            log.warning("Round %s: device %s has lost what it kept, and began anew", round.number, device)
            self.method.lost(device)
        done = [
            Trained(a.task.order, a.tier, update.examples, update.loss, update.facts)
            for a, update in sorted(trained, key=lambda pair: (pair[0].device, pair[0].task.order.place))
        ]
        with self.method.stopwatch.timed("finish"):
            round.metrics = dict(self.method.finish_round(done))
        for hook in self.hooks:
            before = dict(round.metrics)
            with naming(hook):
                hook.after_finishing(round)
            check_metrics(hook, round, before)
        round.left = self.population.advance(self.seconds(round), time.perf_counter() - round.started)

    def conclude(self, round: Round, scorer: Scorer | None) -> RoundResult:
        """Evaluate a finished round, where it is its turn, and sum it up."""
        evaluation, personal = self.score(round, scorer)
        # After the evaluation, which may score the models of devices that trained in the round.
        self.asking.forget(round.left)
        round.result = self.record(round, evaluation, personal)
        each(self.hooks, lambda hook: hook.at_end(round))
        return round.result

    def score(self, round: Round, scorer: Scorer | None) -> tuple[Evaluation | None, Personal | None]:
        """Evaluate models and devices where it is their turn; None for what is not evaluated in this round."""
        settings, evaluation, personal = self.settings, None, None
        if round.number % settings.evaluate_every == 0 or round.number == settings.rounds:
            with self.method.stopwatch.timed("evaluate"):
                evaluation = self.evaluation.evaluate(round.grid, scorer, round.left)
        if settings.personal_in(round.number):
            with self.method.stopwatch.timed("evaluate"):
                personal = self.evaluation.evaluate_personally(round.grid)
        return evaluation, personal

    def record(self, round: Round, evaluation: Evaluation | None, personal: Personal | None) -> RoundResult:
        """Sum a round up for the journal."""
        record = round_record(round, evaluation, personal)
        return RoundResult(record, [device_record(round.number, a) for a in round.assignments])

    # Checkpoints

    def state(self) -> State:
        """Return everything a resumed run needs beside the configuration and the round's number."""
        own = self.method.state()
        engine = self.asking.state() | self.population.state_dict()
        if self.evaluation.own_by_tier:
            engine["own_by_tier"] = dict(self.evaluation.own_by_tier)
        if of_hooks := {name_of(hook): kept for hook in self.hooks if (kept := hook.state())}:
            engine["hooks"] = of_hooks
        if both := own.values.keys() & engine.keys():
            raise ValueError(f"the state of {self.method.name()} has {min(both)!r}, which is the engine's: rename it")
        return State(own.tensors, {**own.values, **engine})

    def load(self, state: State) -> None:
        """Restore `state`.

        Raises ValueError where it is of another model, HookError where it is of a hook that is not there.
        """
        values = state.values
        of_hooks = values.get("hooks", {})
        if gone := of_hooks.keys() - {name_of(hook) for hook in self.hooks}:
            raise HookError(f"the checkpoint has what hook {min(gone)} keeps: give the hook again, to go on with it")
        self.evaluation.own_by_tier = {tier: float(score) for tier, score in values.get("own_by_tier", {}).items()}
        self.population.load_state_dict(values)
        for hook in self.hooks:
            if name_of(hook) in of_hooks:
                with naming(hook):
                    hook.load(of_hooks[name_of(hook)])
        self.method.load(state)
        self.asking.load(values)
