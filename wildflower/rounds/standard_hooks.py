"""The project's own round hooks, and which of them a run has."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from wildflower.rounds.hooks import Round, RoundHook
from wildflower.rounds.own_data import OwnData
from wildflower.rounds.population import Population
from wildflower.rounds.replies import Checked
from wildflower.rounds.requests import Assignment, Work, by_device
from wildflower.rounds.secure_aggregation import SecureRound
from wildflower.strategies.run_settings import RoundSettings


def standard_hooks(settings: RoundSettings, population: Population, own: OwnData | None = None) -> list[RoundHook]:
    """Return the hooks that a run has by its settings."""
    hooks: list[RoundHook] = [Reputation(population)]
    if own is not None:
        hooks.append(own)
    if settings.secure_minimum:
        hooks.append(SecureAggregation())
    return hooks


class Reputation(RoundHook):
    """Tells the population which nodes and devices have kept to what was asked of them.

    Nodes whose replies are refused again and again are quarantined, and devices that outgrew their memory get less.
    """

    def __init__(self, population: Population) -> None:
        self._population = population

    @override
    def after_exchange(self, work: Work) -> None:
        population = self._population
        for a in work.assignments:
            if a.outcome != "trained":  # one that could afford nothing has no update to say with that it has more now
                population.ask_again(a.device)
        trained = {a.node for a in work.assignments if a.outcome == "trained" and a.node is not None}
        for node in sorted(trained - work.refused.keys() - work.broke.keys()):
            population.accepted(node)
        # Where all are refused it is rather the run's fault, such as a model that has diverged.
        for node, why in sorted(((work.refused if trained else {}) | work.broke).items()):
            population.refused(node, why, lied=node in work.broke)
        overran = by_device(a for a in work.assignments if a.update is not None and a.update.overrun)
        for device, orders in overran.items():  # lowered once: a child that is killed loses all orders of its device
            largest_bytes = max(a.task.cost.peak_training_memory_bytes for a in orders)
            population.overran(device, largest_bytes / max(1, orders[0].budget.memory_bytes))


class SecureAggregation(RoundHook):
    """Lets devices agree on masks before they train, so that the server sees sums of their updates only."""

    def __init__(self) -> None:
        self._of_round: SecureRound | None = None

    @override
    def before_sending(self, round: Round) -> None:
        with round.method.stopwatch.timed("secure"):
            self._of_round = SecureRound(round.asked, round.settings, round.population)
            self._of_round.agree(round.grid)

    @override
    def on_reply(self, round: Round, batch: Sequence[Assignment], reply: Checked) -> None:
        assert self._of_round is not None
        for a in batch:
            if a.number in reply.masked:
                self._of_round.sum_of(a).add(a.device, reply.masked[a.number])

    @override
    def before_finishing(self, round: Round) -> None:
        """Absorb the sums whose masks can be taken off."""
        assert self._of_round is not None
        with round.method.stopwatch.timed("secure"):
            self._of_round.finish(round.grid)
        round.traffic["training_bytes_down"] += self._of_round.bytes_down
        round.traffic["training_bytes_up"] += self._of_round.bytes_up
