"""Sending work to nodes and absorbing what comes back, reply by reply."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from logging import INFO, WARNING

from flwr.app import Message
from flwr.serverapp import Grid

from wildflower.devices.validation import one_line
from wildflower.messages.flower_records import release
from wildflower.messages.orders import LocalTraining, Score
from wildflower.messages.packing import MessageError
from wildflower.plugins.flower_log import log
from wildflower.rounds.asking import Asking
from wildflower.rounds.exchange import Failure, exchange
from wildflower.rounds.hooks import RoundHook, each
from wildflower.rounds.replies import Checked, read_reply
from wildflower.rounds.requests import Assignment, Orders, Work, by_device, devices_that_trained
from wildflower.rounds.round_records import count_scoring, count_work
from wildflower.rounds.scores import Examples, score_on_devices
from wildflower.strategies.statistics import TakeStatistics

OnReply = Callable[[list[Assignment], Checked], None]


class Sending:
    """Exchanges work with the nodes that carry its devices.

    Attributes:
        traffic: bytes of the round that runs: `wildflower.rounds.round_records.TRAFFIC`.
    """

    def __init__(self, asking: Asking, hooks: Sequence[RoundHook], max_examples: Callable[[int], int]) -> None:
        """Make it for a run.

        Args:
            max_examples: how many a device may say that it has trained on.
        """
        self.asking, self._hooks, self._max_examples = asking, hooks, max_examples
        self.population, self.settings = asking.population, asking.settings
        self._timed = asking.method.stopwatch.timed
        self.traffic: Counter[str] = Counter()

    def run(self, grid: Grid, *works: Work, on_reply: OnReply | None = None) -> None:
        """Exchange routed work with the nodes, absorbing every reply as it arrives; then `settle` is to be called."""
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
            self.take(works[place], batch, reply, on_reply)
            left[place] -= devices_that_trained(batch)
            if max(left) <= 0:
                break
        replies.close()

    def further(self, grid: Grid, *works: Work) -> None:
        """Do further work of a round, beside its training, from routing to settling."""
        self.asking.route(grid, *works)
        self.run(grid, *works)
        for work in works:
            self.settle(work)

    def message(self, work: Work, node: int, batch: list[Assignment]) -> Message:
        """Return the message that carries a batch to its node."""
        with self._timed("payload"):
            seconds = self.population.answer_seconds(self.settings.deadline_seconds)
            return work.message(self.settings, node, batch, seconds)

    def take(
        self, work: Work, batch: list[Assignment], reply: Message | Failure, on_reply: OnReply | None = None
    ) -> None:
        """Absorb one reply. Whatever is wrong with it is counted and changes nothing."""
        if isinstance(reply, Failure):
            for a in batch:
                a.outcome = "late" if reply.late else f"failed: {reply.why}"
            return
        with self._timed("absorb"):
            checked = self._absorb(work, batch, reply)
        if checked is not None and on_reply is not None:
            on_reply(batch, checked)

    def _absorb(self, work: Work, batch: list[Assignment], reply: Message) -> Checked | None:
        """Read a reply, and absorb its contributions. -> what is in it; None where it is refused as a whole."""
        population = self.population
        try:
            checked = read_reply(self.settings.run, work, batch, reply, self._max_examples, population.check_report)
        except MessageError as error:
            devices, why = list(by_device(batch)), one_line(str(error))
            log.warning("Round %s: the reply for devices %s is refused: %s", work.round, devices, why)
            _refuse(work, batch, why)
            return None
        release(reply.content)  # what was read of its arrays is not held beside them while it is merged
        for number, why in checked.wrong.items():
            _note_refused(work, [a for a in batch if a.number == number], why)
        for a in batch:
            a.outcome, a.update = checked.outcomes[a.number], checked.updates.get(a.number)
            if a.number in checked.reports:
                population.replied(a.device, checked.reports[a.number])
        for contribution in checked.contributions:
            try:
                work.absorb(contribution)
            except MessageError as error:
                why = one_line(str(error))
                log.warning("Round %s: devices %s are refused: %s", work.round, contribution.devices, why)
                _refuse(work, [a for a in batch if a.number in contribution.orders], why)
        return checked

    def settle(self, work: Work) -> None:
        """Call late what has no outcome by now, count the bytes, and say what went wrong."""
        for a in work.assignments:
            a.outcome = a.outcome or "late"
        self.asking.note_frozen(work)
        count_work(self.traffic, work)
        each(self._hooks, lambda hook: hook.after_exchange(work))
        far = sorted({a.device for a in work.assignments if a.update is not None and a.update.bounded})
        if far:
            # Under differential privacy clipping is the usual case, and nothing to warn of.
            level, key = (WARNING, "aggregation.norm-bound") if self.settings.privacy is None else (INFO, "dp.clip")
            log.log(level, "Round %s: the updates of devices %s are scaled down to %s", work.round, far, key)
        troubles = Counter(a.outcome for a in work.assignments if a.outcome.startswith(("failed", "refused")))
        for outcome, times in troubles.most_common(3):
            text = "Round %s: %s of %s work orders%s %s"
            log.warning(text, work.round, times, len(work.assignments), _for_scoring(work), outcome)

    def scores(
        self, grid: Grid, orders: Orders, data: Examples, training: LocalTraining | None = None
    ) -> dict[int, Score]:
        """Ask devices for scores (`score_on_devices`), and note which of them then hold the frozen parts."""
        self.asking.route(grid, orders)
        found = score_on_devices(grid, orders, self.settings, self.population, data, training)
        count_scoring(self.traffic, orders)
        for a in orders.assignments:
            if a.device in found:
                self.asking.frozen.has(a.device, a.frozen.name)
            else:
                self.asking.frozen.lost(a.device)
        return found


def _refuse(work: Work, assignments: Sequence[Assignment], why: str) -> None:
    for a in assignments:
        a.outcome = one_line(f"refused: {why}")
    _note_refused(work, assignments, why)


def _note_refused(work: Work, assignments: Sequence[Assignment], why: str) -> None:
    work.refused |= {a.node: why for a in assignments if a.node is not None}


def _devices_by_themselves(asked: tuple[int, list[Assignment]]) -> list[tuple[int, list[Assignment]]]:
    """Return the parts of a message's orders: those of one device read each other's models."""
    return [(asked[0], orders) for orders in by_device(asked[1]).values()]


def _for_scoring(work: Work) -> str:
    """What a log says of orders that train nothing, which come beside those that train; "" of others."""
    scoring = any(a.given is not None and isinstance(a.given.client_step, TakeStatistics) for a in work.assignments)
    return " for scoring (statistics of batch norm)" if scoring else ""
