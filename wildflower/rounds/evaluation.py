"""Evaluation of a round's models: on the server, on devices, or on each device after a little training."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from flwr.serverapp import Grid

from wildflower.devices.budget import Budget
from wildflower.messages.orders import LocalTraining, Score
from wildflower.messages.tensor_sets import STATISTICS, Weights
from wildflower.models.architecture import Architecture
from wildflower.models.placement import whole
from wildflower.plugins.flower_log import log
from wildflower.rounds.asking import Asking
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
from wildflower.rounds.own_data import OwnData
from wildflower.rounds.requests import Assignment, Work
from wildflower.rounds.scores import (
    Evaluation,
    Examples,
    Personal,
    federated_score,
    mean_score,
    personal_score,
    pooled,
    told,
)
from wildflower.rounds.sending import Sending
from wildflower.strategies.method import LEADING, Model, Order, Selection
from wildflower.strategies.pricing import fits
from wildflower.strategies.statistics import LEAST_DEVICES, ScoreModel, TakeStatistics


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


class Evaluating:
    """Scores the models of a method, and what devices would be given of them.

    It is called and no hook, because what it finds is the round's record.

    Attributes:
        scored: the models of the last evaluation, exactly as they were scored.
        model_scores: the score of each of them.
        tier_scores: where devices test, the score of each tier's model on the devices of that tier.
        delivered_tiers: by that evaluation, the architecture that most devices of each tier would be given.
        own_by_tier: the newest scores of models that devices have of their own.
    """

    def __init__(self, asking: Asking, sending: Sending, own: OwnData | None) -> None:
        self.asking, self.sending, self.own = asking, sending, own
        self.method, self.population, self.settings = asking.method, asking.population, asking.settings
        self.scored: dict[Architecture, Model] = {}
        self.model_scores: dict[Architecture, float] = {}
        self.tier_scores: dict[str, float] = {}
        self.delivered_tiers: dict[str, Architecture] = {}
        self.own_by_tier: dict[str, float] = {}

    def evaluate(self, grid: Grid, scorer: Scorer | None, left: Collection[int] = ()) -> Evaluation | None:
        """Score the method's models on the task's test set; None where they cannot be scored.

        On the server the global model is scored, and every tier's sub-model, and without a scorer nothing. Where models
        live on devices only, those score them, and the figures are means over devices. Where devices have models of
        their own beside the global one, those are the tiers'.

        Args:
            left: devices that have just left for good, which score the models that they have trained.
        """
        on_devices = self.method.scored_on_devices()
        if scorer is None and on_devices is None and not self.tests_on_devices:
            return None  # nobody scores
        self.scored, self.model_scores, self.tier_scores = {}, {}, {}
        recipients = self._recipients(grid) if self.settings.evaluate_tiers else []
        if on_devices is not None:
            return self._own_models(grid, scorer, on_devices, recipients, left)
        if scorer is None:
            return self._federated(grid, self._models(grid), recipients)
        return self._on_server(grid, scorer, recipients)

    def _own_models(
        self,
        grid: Grid,
        scorer: Scorer | None,
        on_devices: Sequence[tuple[int, Architecture, Selection]],
        recipients: Sequence[Recipient],
        left: Collection[int],
    ) -> Evaluation | None:
        """Evaluate where devices have models of their own, which they score, maybe beside a global one."""
        scored = self.method.scored_architecture
        models = {} if scorer is None and not self.tests_on_devices else self._models(grid)
        own: Evaluation | None = None
        if self.settings.evaluate_tiers or not models:
            own = self._scored_there(grid, on_devices, left)
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

    def _on_server(self, grid: Grid, scorer: Scorer, recipients: Sequence[Recipient]) -> Evaluation | None:
        """Evaluate on the server's test set: the global model, the tiers' sub-models, and what devices are given."""
        scored = self.method.scored_architecture
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
        delivered = delivered_models(recipients, given, of_device)
        return _evaluation(found.get(scored), tiers, told(of_device), delivered)

    def _recipients(self, grid: Grid) -> list[Recipient]:
        """What the method would give now to every device that is there, or to some of very many."""
        found = []
        for device in evenly_spread(self.population.present(grid)):
            tier = self.population.tier(device)
            orders = self.personal_order(device)
            if orders:
                a = orders[0]
                found.append(Recipient(device, tier, a.task.architecture, a.budget, fits(a.task.cost, a.budget)))
            else:
                budget = self.asking.budget(device, partial(self._largest_deliverable, device))
                found.append(Recipient(device, tier, budget=budget))
        return found

    def _largest_deliverable(self, device: int, budget: Budget) -> list[Order]:
        """What brings the most bytes of all that a device without an order could be delivered under a budget."""
        fitting = [Order(device, a) for a in self.method.deliverable if fits(self.method.cost(a), budget)]
        return sorted(fitting, key=self.asking.sent_bytes)[-1:]

    def _delivered_there(self, recipients: Sequence[Recipient], own: Evaluation | None) -> Delivered | None:
        """What is delivered where devices have models of their own, of which some have just been scored."""
        self.own_by_tier |= own.score_by_tier if own else {}
        nothing = self.settings.score_without_model
        return delivered_on_devices(recipients, self.own_by_tier, self.method.has_model, nothing)

    def _scored_there(
        self, grid: Grid, wanted: Sequence[tuple[int, Architecture, Selection]], left: Collection[int]
    ) -> Evaluation | None:
        """The means over devices of what their own models score on the task's test set."""
        there = {*self.population.connected(grid, [device for device, _, _ in wanted]), *left}
        asked = [self.asking.ask_whatever_fits(Order(d, a), selection) for d, a, selection in wanted if d in there]
        data: Examples = "test set" if self.own is None else "shard"
        return mean_score(self._scores(grid, asked, data), self.settings.metric, self.population)

    @property
    def tests_on_devices(self) -> bool:
        """Return whether nobody but the devices has examples to test on."""
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
        if self.settings.deliver == "best":  # nothing to choose by; `server_app.app.build` says before what to do
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
        if not devices:
            return {}
        step, architecture = ScoreModel(exits=model.exits), model.architecture
        weights = {name: model.weights[name] for name in model.family.tensors(architecture)}
        asked = [self.asking.ask_whatever_fits(Order(device, architecture), LEADING, step) for device in devices]
        orders = self.asking.to_score(asked, model.family, lambda group: {"weights": weights})
        return self.sending.scores(grid, orders, "shard")

    @property
    def scored_tiers(self) -> dict[str, Architecture]:
        """The tiers whose sub-models are scored on the server: all that had a device so far.

        None without `evaluate-tiers`, nor where devices score models of their own.
        """
        here = self.settings.evaluate_tiers and self.method.scored_on_devices() is None
        return self.asking.tier_architectures if here else {}

    @property
    def models_of_tiers(self) -> dict[str, Architecture]:
        """Return what each tier would be given, or where that is nothing now, what it was given last."""
        return self.scored_tiers | self.delivered_tiers

    def _holds(self, order: Order) -> bool:
        """Whether a device has the memory in which it could train what an order gives it."""
        return self.method.order_cost(order).peak_training_memory_bytes <= self.asking.budget_of(order).memory_bytes

    def _models(self, grid: Grid, given: Collection[Architecture | None] = ()) -> dict[Architecture, Model]:
        """The models to score, with batch norm statistics that devices take where they have none.

        given: architectures to score beside the global one and the tiers'.
        """
        wanted = dict.fromkeys([self.method.scored_architecture, *self.scored_tiers.values(), *given])
        models = dict(self.method.models([architecture for architecture in wanted if architecture is not None]))
        if not (self.settings.privacy or self.settings.secure_minimum):  # under which no device tells its statistics
            models = {a: replace(model, family=model.family.with_statistics) for a, model in models.items()}
        missing = [
            a
            for a, model in models.items()
            if any(n.endswith(STATISTICS) and n not in model.weights for n in model.family.tensors(model.architecture))
        ]
        if not missing:
            return models
        order = list(models)
        count = self.settings.statistics_devices or max(self.settings.devices_per_round, LEAST_DEVICES)
        devices = self._fitting(grid, self.population.sample(grid, self.method.rng(3), 8 * count))
        # On hardware one model after the other: each has the whole deadline.
        for architectures in [missing] if self.population.simulated else [[a] for a in missing]:
            connected = self.population.connected(grid, devices)  # some may have been left working a moment ago
            asked = {a: self._statistics(connected, count, models[a]) for a in architectures}
            self.sending.further(grid, *(work for work, _ in asked.values()))
            for architecture, (work, statistics) in asked.items():
                model = models.pop(architecture)
                if any(a.outcome == "trained" for a in work.assignments):
                    weights = model.weights | statistics()
                    models[architecture] = Model(model.family, architecture, weights, model.exits)
                else:
                    name = self.method.describe(architecture)
                    text = "Round %s: no device returned batch norm statistics, %s is not scored"
                    log.warning(text, self.method.round, name)
        return {a: models[a] for a in order if a in models}

    def _statistics(self, devices: list[int], count: int, model: Model) -> tuple[Work, Callable[[], Weights]]:
        """What is to be done for the batch norm statistics of one model, and a function that gives them afterwards.

        They are the mean over devices of what one pass over their data shows. The first `count` of `devices` that can
        afford to train the model take part. Each device's variance is that within its own batches: what differs between
        devices is not in it, unlike in one pass over pooled data.
        """
        architecture = model.architecture
        step = TakeStatistics(examples=self.settings.statistics_examples)
        asked = [self.asking.ask_whatever_fits(Order(device, architecture), LEADING, step) for device in devices]
        able = [a for a in asked if fits(a.task.cost, a.budget)]
        if not able:
            text = "Round %s: no device affords %s, so any device takes its batch norm statistics"
            log.warning(text, self.method.round, self.method.describe(architecture))
        layout = step.returned(model.family, architecture)["statistics"].layout
        zeros = {entry.name: torch.zeros(entry.shape) for entry in layout.entries}
        placement, mean = whole(zeros), self.method.running_mean(zeros)
        sent = {
            tensor: model.weights[tensor] if tensor in model.weights else torch.zeros(spec.shape)
            for tensor, spec in model.family.tensors(architecture).items()
        }
        assignments = (able or asked)[:count]
        work = self.asking.work(
            assignments,
            model.family,
            payload=lambda group: {"weights": sent},
            absorb=lambda contribution: mean.add(placement, layout, contribution.sum_of("statistics")),
            enough=len(assignments),
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
        assignments = [a for device in devices for a in self.personal_order(device)]
        scores = self._scores(grid, assignments, "shard", self.settings.personal_training_in(self.method.round))
        return personal_score(
            scores,
            len(assignments),
            self.settings.metric,
            self.population,
            by_device=self.settings.label_sets or len(assignments) <= MAX_TOLD,
            beside={a.device: a.task.client_step.scored_beside for a in assignments},
        )

    def personal_order(self, device: int) -> list[Assignment]:
        """Return what a device is asked in a personal evaluation: one order, or nothing."""

        def wanted(budget: Budget) -> list[Order]:
            found = self.method.personal(device, budget)
            return [] if found is None else [Order(device, found[0])]

        budget = self.asking.budget(device, wanted)
        found = self.method.personal(device, budget)
        return [] if found is None else [self.asking.ask(Order(device, found[0]), found[1], budget)]

    def _scores(
        self, grid: Grid, asked: list[Assignment], data: Examples, training: LocalTraining | None = None
    ) -> dict[int, Score]:
        """The scores that devices take of what they are sent of the method's models, or hold of them."""
        orders = self.asking.to_score(asked, self.method.family, self.method.payload)
        return self.sending.scores(grid, orders, data, training)
