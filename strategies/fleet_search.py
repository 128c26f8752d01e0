"""Searches at a method's own price, and for a whole fleet where few nested architectures are to be chosen for it.

The searchers are those of `wildflower.strategies.search`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from wildflower.devices.budget import Budget
from wildflower.models.architecture import Architecture
from wildflower.models.cost import Cost
from wildflower.models.space import Space
from wildflower.strategies.pricing import Means, fits

SURVEYED = 40
"""Devices of a fleet for whose budgets architectures are searched, at most, when few are chosen for all."""
NARROWED = 12
"""Searches under ever less memory, link and time, until an architecture fits at its method's own price."""


def find_priced(
    find: Callable[[Budget], Architecture | None],
    price: Callable[[Architecture], Cost],
    budget: Budget,
    part: Budget,
) -> Architecture | None:
    """Return what a search finds that fits a budget at a method's own price, such as that of several levels at once.

    A searcher prices an architecture alone. While what it finds is too dear, it searches again under a budget from
    which the excess is taken off, and a little more, of memory, of each link and of time. None: nothing was found in
    `NARROWED` searches.

    Args:
        find: the search under a budget; None: nothing fits.
        price: of an architecture that it finds, with all that is trained beside it.
        budget: what must fit.
        part: the same budget as the search counts, with payloads as 32-bit floats
        (`wildflower.strategies.pricing.in_floats`).
    """
    retries = {"download_bytes": 0, "upload_bytes": 0}
    for _ in range(NARROWED):
        found = find(part)
        if found is None:
            return None
        cost = price(found)
        if fits(cost, budget):
            return found
        over_bytes = cost.peak_training_memory_bytes - budget.memory_bytes
        if over_bytes > 0:
            part = replace(part, memory_bytes=max(0, part.memory_bytes - over_bytes - part.memory_bytes // 100))
        for way in retries:
            left_bytes, needed_bytes, limit_bytes = (getattr(one, way) for one in (part, cost, budget))
            if left_bytes is not None and limit_bytes is not None and needed_bytes > limit_bytes:
                part = replace(part, **{way: _narrowed(left_bytes, needed_bytes, limit_bytes, retries[way])})
                retries[way] += 1
        in_time = budget.in_time(cost.download_bytes, cost.upload_bytes, cost.training_flops)
        if part.round_seconds is not None and not in_time:
            part = replace(part, round_seconds=part.round_seconds * 0.9)
    return None


def _narrowed(part_bytes: int, needed_bytes: int, limit_bytes: int, retries: int) -> int:
    """How much of a link the next search may use: less, in the ratio by which the last find was too large for it.

    And a little less than that: what was found may leave some of its budget unused, so that it would be found again.
    This little doubles with every retry for the same link.
    """
    return max(0, part_bytes * limit_bytes // needed_bytes - part_bytes * 2**retries // 10_000)


def fleet_options(
    space: Space, fleet: Sequence[Means], find: Callable[[Budget], Architecture | None]
) -> list[Architecture]:
    """Return architectures of a space from which nested ones can be chosen for a fleet.

    These are the smallest of the space; what is found for the budgets of up to `SURVEYED` devices, from the smallest to
    the largest; and for every two of these what they have in common, which is a cut of both, and what they have
    together, of which both are cuts.

    Args:
        space: where they are searched.
        fleet: what its devices may spend.
        find: the search for one budget; None where nothing fits.
    """
    ordered = sorted(fleet, key=lambda means: (means.budget.memory_bytes, means.budget.both_ways_bytes or 0))
    some = [ordered[round(place)] for place in np.linspace(0, len(ordered) - 1, min(SURVEYED, len(ordered)))]
    found = dict.fromkeys(a for means in some if (a := _find_beside_message(means, find)) is not None)
    options = dict.fromkeys([space.smallest(), *found])
    for one in found:
        for other in found:
            for option in (in_common(one, other), together(one, other)):
                if option not in options and space.allows(option):
                    options[option] = None
    return list(options)


def _find_beside_message(means: Means, find: Callable[[Budget], Architecture | None]) -> Architecture | None:
    """What is found for what a message of that size leaves of the memory."""
    found = find(means.budget)
    beside_bytes = 0 if found is None else means.message_bytes(found)
    if not beside_bytes:
        return found
    left_bytes = means.budget.memory_bytes - beside_bytes
    return find(replace(means.budget, memory_bytes=left_bytes)) if left_bytes > 0 else None


def in_common(one: Architecture, other: Architecture) -> Architecture:
    """The largest architecture that is a cut of both."""
    return Architecture(tuple(map(min, one.widths, other.widths)), tuple(map(min, one.kernels, other.kernels)))


def together(one: Architecture, other: Architecture) -> Architecture:
    """The smallest architecture of which both are cuts."""
    return Architecture(tuple(map(max, one.widths, other.widths)), tuple(map(max, one.kernels, other.kernels)))
