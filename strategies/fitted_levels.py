"""The nested levels that fit a fleet, and what training them costs."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.cost import Cost
from wildflower.strategies.method import P, State
from wildflower.strategies.nested import is_cut, training_cost
from wildflower.strategies.params import Params
from wildflower.strategies.pricing import Means
from wildflower.strategies.static_norm import StaticNormMethod


def below(family: Family, architecture: Architecture, levels: Sequence[Architecture]) -> tuple[Architecture, ...]:
    """Those of some levels, which come largest first, that lie inside an architecture and inside one another."""
    found: list[Architecture] = []
    for level in levels:
        if is_cut(family, level, found[-1] if found else architecture):
            found.append(level)
    return tuple(found)


def are_nested(family: Family, levels: Sequence[Architecture]) -> bool:
    """Return whether any of some levels, which come largest first, lies inside another."""
    return any(below(family, level, levels) for level in levels)


@lru_cache(maxsize=16384)
def level_cost(
    family: Family, architecture: Architecture, lower: tuple[Architecture, ...], batch_size: int, optimizer: str
) -> Cost:
    """`nested.training_cost`, and the factors of all gradients and a copy of the largest gradient."""
    found = training_cost(family, architecture, lower, batch_size, optimizer)
    if not lower:
        return found
    largest = max(math.prod(spec.shape) for spec in family.tensors(architecture).values())
    extra_bytes = found.entry_bytes * (found.parameters + largest)
    return replace(found, peak_training_memory_bytes=found.peak_training_memory_bytes + extra_bytes)


def fitted_levels(
    family: Family,
    options: Iterable[Architecture],
    fleet: Sequence[Means],
    count: int,
    price: Callable[[Architecture, Sequence[Architecture]], Cost],
    size: Callable[[Cost], int] = attrgetter("parameters"),
) -> list[Architecture]:
    """Levels under which the sum over devices of log(size) is large, of the largest level that each affords.

    A level is priced with the training of all smaller ones. First of all as many devices as possible afford any level.
    Levels are added one by one, as long as that makes the sum larger, and then each is exchanged for a better one until
    there is none: no exchange and no addition of one level would serve the fleet better.

    Args:
        options: what levels may be, in any order.
        fleet: what its devices may spend; those that afford no option have no say.
        count: how many levels at most.
        price: of training a level with some smaller ones, which come largest first.
        size: of a level, by what it costs to train it alone: its parameters, or its FLOPs.

    Returns:
        The levels, largest first; none where no device affords any option.
    """
    sizes = {option: size(price(option, ())) for option in options}
    ordered = sorted(sizes, key=lambda option: (sizes[option], option.widths, option.kernels))
    fleet = [means for means in fleet if any(means.afford(option, price(option, ())) for option in ordered)]
    if not fleet:
        return []
    by_level: dict[tuple[Architecture, ...], NDArray[np.float64]] = {}  # of the last of some levels, by device

    def worth(levels: tuple[Architecture, ...]) -> tuple[int, float]:
        """Return how many devices afford any of some levels, smallest first, and the sum over these of log(size)."""
        logs = np.full(len(fleet), -math.inf)
        for number, level in enumerate(levels, start=1):
            key = levels[:number]
            if key not in by_level:
                cost = price(level, key[-2::-1])
                able = [means.afford(level, cost) for means in fleet]
                by_level[key] = np.where(able, math.log(sizes[level]), -math.inf)
            logs = np.maximum(logs, by_level[key])
        served = logs[logs > -math.inf]
        return len(served), round(math.fsum(served), 9)

    def better(levels: tuple[Architecture, ...], others: tuple[Architecture, ...]) -> tuple[Architecture, ...]:
        """The best of some levels and what they become with one more beside `others`."""
        best, value = levels, worth(levels)
        for option in ordered:
            place = bisect(others, sizes[option], key=sizes.__getitem__)
            changed = (*others[:place], option, *others[place:])
            near = pairwise(changed[max(0, place - 1) : place + 2])
            if all(is_cut(family, small, large) for small, large in near) and (other := worth(changed)) > value:
                best, value = changed, other
        return best

    found: tuple[Architecture, ...] = ()
    while True:
        before = found
        if len(found) < count:
            found = better(found, found)
        for level in found:
            if level in found:
                found = better(found, tuple(other for other in found if other != level))
        if found == before:
            return list(found[::-1])


class FittedMethod(StaticNormMethod[P]):
    """Candidates that are chosen once, in the first round, for the fleet: a checkpoint holds them. No distillation."""

    shared_params: ClassVar[Mapping[str, type[Params]]] = {}

    @override
    def state(self) -> State:
        state = super().state()
        state.values["levels"] = [level.to_json() for level in self.candidates]
        return state

    @override
    def load(self, state: State) -> None:
        super().load(state)
        self.candidates = [Architecture.from_json(level) for level in state.values["levels"]]
        for level in self.candidates:
            self.family.validate(level)
        if not self.candidates:
            raise ValueError("the checkpoint holds no levels")
