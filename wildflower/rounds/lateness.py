"""Lateness by the virtual clock, and the time of a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from wildflower.models.family import Family
from wildflower.rounds.population import Population
from wildflower.rounds.requests import Assignment, by_device, devices_that_trained
from wildflower.strategies.pricing import tensor_set_bytes
from wildflower.strategies.run_settings import RoundSettings


def drop_late(
    assignments: Sequence[Assignment], family: Family, population: Population, settings: RoundSettings
) -> None:
    """In a simulation the clock says beforehand who misses the deadline or comes after enough others."""
    timed: list[tuple[float, int, list[Assignment]]] = []
    for device, orders in by_device(a for a in assignments if a.given is not None and not a.outcome).items():
        load = load_of(orders, family, population, settings)
        timing = population.timing(device, bytes_down=load.bytes_down, flops=load.flops, bytes_up=load.bytes_up)
        if timing is not None:
            timed.append((timing.total_seconds, device, orders))
        for a in orders:
            a.timing = timing
    deadline = settings.deadline_seconds or float("inf")
    for place, (seconds, _, orders) in enumerate(sorted(timed, key=lambda entry: entry[:2])):
        if seconds > deadline or seconds == float("inf") or place >= settings.enough_devices:
            for a in orders:
                a.outcome = "late"


class Load(NamedTuple):
    """The load of all orders of a device together: what they make it download, compute and upload in a round."""

    bytes_down: int
    flops: float
    bytes_up: int


def load_of(orders: Sequence[Assignment], family: Family, population: Population, settings: RoundSettings) -> Load:
    """A device downloads all its tensor sets, trains one model after the other, and uploads all."""
    travelling = [tensor_set_bytes(a.task.client_step, family, a.task.architecture, settings.wire) for a in orders]
    down, up = (sum(way) for way in zip(*travelling, strict=True))
    down += sum(a.frozen.nbytes for a in orders)
    examples = settings.examples_trained(population.examples(orders[0].device))
    return Load(down, sum(a.flops_per_example for a in orders) * examples, settings.upload_bytes(up))


def simulated_seconds(assignments: Sequence[Assignment], settings: RoundSettings) -> float:
    """Return how long the round took by the virtual clock: until the last device whose update counts, or the
    deadline."""
    waited = [a.simulated_seconds for a in assignments if a.outcome == "trained"]
    enough = devices_that_trained(assignments) >= settings.enough_devices
    missing = any(a.outcome == "late" for a in assignments) and not enough
    if missing and settings.deadline_seconds is not None:
        return settings.deadline_seconds
    # A round that nobody takes part in still takes a second, or links that carry nothing now never would again.
    return max(waited, default=1.0)
