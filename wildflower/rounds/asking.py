"""Questions to devices: their budgets, the orders that fit these, and what they already hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from flwr.serverapp import Grid

from wildflower.devices.budget import Budget, budget_of
from wildflower.messages.frozen_parts import frozen_nbytes
from wildflower.messages.tensor_sets import TensorSets
from wildflower.models.architecture import Architecture
from wildflower.models.family import Family
from wildflower.plugins.flower_log import log
from wildflower.rounds.frozen import Frozen
from wildflower.rounds.hooks import RoundHook, ruled
from wildflower.rounds.population import Population
from wildflower.rounds.requests import Assignment, Given, Orders, Work, by_device
from wildflower.strategies.method import LEADING, ClientStep, Contribution, Group, Method, Order, Selection
from wildflower.strategies.pricing import Means, nothing_beside, tensor_set_bytes
from wildflower.strategies.run_settings import RoundSettings

# A node's message while it trains, in payloads: in the SuperNode, on its way to the worker, and in the worker.
MESSAGE_COPIES = 5


def budget_in_round(device: int, population: Population, settings: RoundSettings) -> Budget:
    """Return what a device may spend in this round, its message included."""
    budget = budget_of(
        population.report(device),
        memory_fraction=settings.memory_fraction,
        transfer_seconds=settings.transfer_seconds,
        deadline_seconds=settings.deadline_seconds,
        round_seconds=settings.round_seconds,
        examples=settings.examples_trained(population.examples(device)),
    )
    return replace(budget, memory_bytes=int(budget.memory_bytes * population.memory_factor(device)))


def beside_message(budget: Budget, payload_bytes: Callable[[Budget], int]) -> Budget:
    """The largest part of a budget that leaves room for the message which brings what is given under that part.

    To a thousandth of the memory, and exactly where the largest message fits. Memory 0 where none is found.

    Args:
        payload_bytes: of all that a device would be given under a budget; the less memory, the less it should be.
    """
    whole_bytes = budget.memory_bytes

    def with_message(part_bytes: int) -> int:
        return part_bytes + MESSAGE_COPIES * payload_bytes(replace(budget, memory_bytes=part_bytes))

    low, high = 0, whole_bytes
    middle = max(0, 2 * whole_bytes - with_message(whole_bytes))  # beside the largest message
    while high - low > whole_bytes // 1000 + 1:
        spare_bytes = whole_bytes - with_message(middle)
        if spare_bytes == 0:
            return replace(budget, memory_bytes=middle)
        low, high = (middle, high) if spare_bytes > 0 else (low, middle)
        middle = (low + high) // 2
    return replace(budget, memory_bytes=low)


NOTHING_FITS = "skipped: no architecture of this strategy fits the budget"  # the outcome of such a device


class Asking:
    """Turns budgets into orders, and knows who keeps what of earlier ones.

    Frozen parts are no hook, because every order says what of them its device still lacks.

    Attributes:
        tier_architectures: the newest architecture of every tier.
        keepers: devices that keep something.
        oldest_checkpoint: the round of the oldest checkpoint that the run may go on from. Devices keep what such a run
            needs. None: nobody goes on from an earlier one than that of the last round.
    """

    def __init__(self, method: Method, population: Population, hooks: Sequence[RoundHook]) -> None:
        self.method, self.population, self.settings, self._hooks = method, population, method.settings, hooks
        self.frozen = Frozen(method.family, method.frozen_weights())
        self.tier_architectures: dict[str, Architecture] = {}
        self.keepers: set[int] = set()
        self.oldest_checkpoint: int | None = None
        self._introduced: set[int] = set()  # devices that have answered the method's first question
        self._told_skipped: set[int] = set()  # devices of which it was said that nothing fits them

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON."""
        return {
            "tiers": [[tier, a.to_json()] for tier, a in self.tier_architectures.items()],  # in their order
            "keepers": sorted(self.keepers),
            "introduced": sorted(self._introduced),
            **({"frozen": self.frozen.state()} if self.frozen.held else {}),
        }

    def load(self, values: Mapping[str, Any]) -> None:
        """Restore `state`, once the method has been restored."""
        self.tier_architectures = {t: Architecture.from_json(a) for t, a in values["tiers"]}
        self.keepers, self._introduced = set(values["keepers"]), set(values["introduced"])
        self.frozen = Frozen(self.method.family, self.method.frozen_weights())
        if "frozen" in values:
            self.frozen.load(values["frozen"])

    # Budgets

    def budget(self, device: int, wanted: Callable[[Budget], Sequence[Order]]) -> Budget:
        """Return what a device may spend in this round; of the memory, what is left to training.

        A real node holds the message that brings its tensor sets in memory while it trains. How large that is depends
        on what it is given under the budget, which `wanted` says.
        """
        budget = self._budget_in_round(device)
        if not self._trains_beside_message(device):
            return budget
        return beside_message(budget, lambda part: sum(map(self.sent_bytes, wanted(part))))

    def budget_of(self, order: Order) -> Budget:
        """Return what a device may spend on one order that is given to it whatever its budget."""
        return self.budget(order.device, lambda _: [order])

    def _budget_in_round(self, device: int) -> Budget:
        return ruled(self._hooks, device, budget_in_round(device, self.population, self.settings))

    def _trains_beside_message(self, device: int) -> bool:
        """Whether a device holds its message in the memory that it trains in."""
        return not self.population.simulated and self.population.report(device).memory_is_ram

    def sent_bytes(self, order: Order) -> int:
        """Return the bytes of what a device is sent for an order, as it travels."""
        family = self.method.family
        down, _ = tensor_set_bytes(self.method.client_step(order), family, order.architecture, self.settings.wire)
        return down + frozen_nbytes(family, order.architecture)

    def survey(self, devices: Iterable[int]) -> None:
        """Let the method see what devices may spend, before the first of them trains."""
        message_bytes = lru_cache(lambda architecture: MESSAGE_COPIES * self.sent_bytes(Order(0, architecture)))
        self.method.survey(
            Means(
                self._budget_in_round(device),
                message_bytes if self._trains_beside_message(device) else nothing_beside,
            )
            for device in devices
        )

    # Orders

    def _wanted(self, device: int, budget: Budget) -> list[Order]:
        """What the method gives a device under a budget."""
        architecture = self.method.assign(device, budget)
        if architecture is None:
            return []
        found = [architecture, *self.method.extra_architectures(device, budget, architecture)]
        return [Order(device, a, place, self.method.after(device, place)) for place, a in enumerate(found)]

    def orders(self, device: int) -> list[Assignment]:
        """Return what a device is asked in this round; one order that gives it nothing where nothing fits."""
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

    def gives_work(self, device: int) -> bool:
        """Say whether a device would be given work in this round; true of one that has to answer a question first."""
        new = self.method.first_question is not None and device not in self._introduced
        return new or bool(self._wanted(device, self.budget(device, partial(self._wanted, device))))

    def ask(self, order: Order, selection: Selection, budget: Budget, step: ClientStep | None = None) -> Assignment:
        """Return an order as an assignment; `step` in place of the method's client step."""
        given = Given(order, selection, self.method.order_cost(order), step or self.method.client_step(order))
        return Assignment(
            order.device,
            self.population.tier(order.device),
            budget,
            given,
            kept=order.device in self.keepers,
            frozen=self.frozen.owed(order.device, order.architecture, selection),
        )

    def ask_whatever_fits(self, order: Order, selection: Selection, step: ClientStep | None = None) -> Assignment:
        """Return an order that a device is given whatever its budget."""
        return self.ask(order, selection, self.budget_of(order), step)

    def work(
        self,
        assignments: list[Assignment],
        family: Family,
        payload: Callable[[Group], TensorSets],
        absorb: Callable[[Contribution], None],
        enough: int,
        *,
        norm_bound: float = 0.0,
        clip: float = 0.0,
    ) -> Work:
        """Return assignments as work of this round; the arguments are the attributes of `Work`."""
        return Work(
            round=self.method.round,
            assignments=assignments,
            family=family,
            payload=payload,
            frozen=self.frozen,
            absorb=absorb,
            enough=enough,
            simulated=self.population.simulated,
            norm_bound=norm_bound,
            clip=clip,
            each_by_itself=not self.settings.aggregation.adds_up,
            wire=self.settings.wire,
            oldest_checkpoint=self.oldest_checkpoint,
        )

    def to_score(self, assignments: list[Assignment], family: Family, payload: Callable[[Group], TensorSets]) -> Orders:
        """Return assignments as orders that bring nothing back but scores."""
        return Orders(
            round=self.method.round,
            assignments=assignments,
            family=family,
            payload=payload,
            frozen=self.frozen,
        )

    def route(self, grid: Grid, *works: Orders) -> None:
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

    # First questions, and who has answered

    def questions(self, devices: Collection[int], question: ClientStep) -> Work:
        """Return what is asked of the devices that train for the first time, before they are given work."""
        new = [device for device in devices if device not in self._introduced]
        smallest = self.method.smallest_architecture
        asked = [self.ask(Order(d, smallest), LEADING, self.budget(d, lambda _: ()), question) for d in new]
        return self.work(asked, self.method.family, lambda group: {}, lambda contribution: None, len(new))

    def introduce(self, work: Work) -> dict[int, str]:
        """Hand answers to first questions to the method.

        Returns:
            The outcomes of devices that gave no answer: they do not train in this round, and are asked again.
        """
        for a in work.assignments:
            if a.outcome == "trained" and a.update is not None:
                self._introduced.add(a.device)
                self.method.introduce(a.device, a.update.facts)
        return {a.device: a.outcome for a in work.assignments if a.device not in self._introduced}

    def note_frozen(self, work: Work) -> None:
        """Take note of who has the frozen parts of work that is done."""
        for a in work.assignments:
            if a.outcome == "trained":
                self.frozen.has(a.device, a.frozen.name)
            elif a.node is not None:
                self.frozen.lost(a.device)

    def forget(self, devices: Iterable[int]) -> None:
        """Drop what is held of devices that have left for good, so that a long run needs no more memory."""
        for device in devices:
            for held in (self.keepers, self._introduced, self._told_skipped):
                held.discard(device)
            self.frozen.lost(device)
            self.method.left(device)

    def tell_skipped(self, assignments: Sequence[Assignment]) -> None:
        """Say once which devices train nothing, with what the smallest model needs and what the first may spend."""
        skipped = [a for a in assignments if a.given is None and a.device not in self._told_skipped]
        if not skipped:
            return
        first, *others = skipped
        self._told_skipped.update(a.device for a in skipped)
        cost = self.method.order_cost(Order(first.device, self.method.smallest_architecture))
        needs = [f"{_size(cost.peak_training_memory_bytes)} of memory"]
        has = [f"{_size(first.budget.memory_bytes)} of memory"]
        for way, needed_bytes, limit_bytes in (
            ("down", cost.download_bytes, first.budget.download_bytes),
            ("up", cost.upload_bytes, first.budget.upload_bytes),
        ):
            if limit_bytes is not None:
                needs.append(f"{_size(needed_bytes)} of weights {way}")
                has.append(f"{_size(limit_bytes)} of weights {way}")
        text = (
            "Round %s: device %s is skipped, as no model of %s fits its budget: the smallest needs %s, it has %s%s%s. "
            "`wildflower plan%s` says what binds"
        )
        of_the_run = "" if self.population.simulated else " --run RUN_FOLDER"
        time = ", and budget.round-seconds bounds its time" if first.budget.round_seconds is not None else ""
        more = f"; so {'is 1 other' if len(others) == 1 else f'are {len(others)} others'}" if others else ""
        number, name = self.method.round, self.method.name()
        log.warning(text, number, first.device, name, ", ".join(needs), ", ".join(has), time, more, of_the_run)


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.2f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:,.2f} kB"
