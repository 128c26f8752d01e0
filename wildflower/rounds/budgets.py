"""The budget of a device in a round, and how much of it the message with its weights leaves to training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from wildflower.devices.budget import Budget, budget_of
from wildflower.rounds.population import Population
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
