"""Searchers: which architecture of a space a device gets under its budget.

`PoolSearch` is the paper's, `ExactSearch` and `AscentSearch` are ours. All answer `find`, and save what they have seen
in `state_dict`. `wildflower.strategies.fleet_search` searches at a method's own price, and for a whole fleet.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wildflower.devices.budget import Budget
from wildflower.models.architecture import Architecture
from wildflower.models.cost import Cost
from wildflower.models.elastic import ElasticSpace
from wildflower.models.frontier import Frontier
from wildflower.models.space import Space
from wildflower.strategies.pricing import fits

SEGMENT = 1024
"""Labels whose least memory is known beforehand, so that most of the frontier need not be looked at."""
ATTEMPTS = 8
"""Random choices that are tried until one fits; with exchanged layers it may need a little more memory."""
CHANGES, PRICED = 32, 6
"""Random changes of one pick each that are drawn for what was chosen, and how many of them are priced at most."""


SIZES: dict[str, Callable[[Cost], int]] = {
    "parameters": lambda cost: cost.parameters,
    "memory": lambda cost: cost.peak_training_memory_bytes,
    "bandwidth": lambda cost: cost.payload_bytes,
}
"""By what architectures of a pool are compared: the paper's criterion, and the two of its section 4.3."""


class PoolSearch:
    """The largest fitting architecture of a pool that grows by random draws.

    Source: the search algorithm of the paper of dynamic model search (`wildflower.strategies.model_search`). The
    pool begins with the smallest and the largest architecture, is shared by all devices and kept over rounds; the
    printed intersection with a draw is read as the union. epsilon is the probability to *stop* before each draw, the
    reverse of what an epsilon-greedy search calls so.
    """

    def __init__(
        self,
        space: Space | ElasticSpace,
        cost_of: Callable[[Architecture], Cost],
        epsilon: float = 0.8,
        max_draws: int = 5,
        criterion: str = "parameters",
    ) -> None:
        if not 0 < epsilon <= 1:
            raise ValueError(f"epsilon, the probability to stop, must be in (0, 1], not {epsilon!r}")
        if max_draws < 1:
            raise ValueError(f"max_draws must be >= 1, not {max_draws}")
        self.space = space
        self.cost_of = cost_of
        self.epsilon = epsilon
        self.max_draws = max_draws
        self.size = SIZES[criterion]
        self.pool: dict[Architecture, Cost] = {}
        self._by_size: list[tuple[int, int, Architecture]] = []  # -size, place in the pool: the largest first
        for architecture in (space.smallest(), space.largest()):
            self._include(architecture)

    def find(self, budget: Budget, rng: np.random.Generator) -> Architecture | None:
        """Return the largest that fits of the pool, which may grow by draws; None: not even the smallest fits.

        Asked again with the same budget and numbers it may find another of the same size, which the pool has by then.
        The smallest architecture is in the pool, and with it the paper's fall-back.
        """
        found = self.largest(budget)
        draws = 0
        while draws < self.max_draws and rng.random() > self.epsilon:
            draws += 1
            drawn = self.space.sample(rng)
            self._include(drawn)
            cost = self.pool[drawn]
            if fits(cost, budget) and (found is None or self.size(cost) > self.size(self.pool[found])):
                found = drawn
        return found

    def largest(self, budget: Budget) -> Architecture | None:
        """Return the largest of the pool that fits; None: not even the smallest does."""
        return next((arch for _, _, arch in self._by_size if fits(self.pool[arch], budget)), None)

    def _include(self, architecture: Architecture) -> None:
        if architecture not in self.pool:
            cost = self.pool[architecture] = self.cost_of(architecture)
            # Of equally large ones the first that came is the one that is taken.
            insort(self._by_size, (-self.size(cost), len(self.pool), architecture))

    def state_dict(self) -> dict[str, Any]:
        """Return the pool."""
        return {"pool": [architecture.to_json() for architecture in self.pool]}

    def load_state_dict(self, state: object) -> None:
        """Restore the pool; ValueError where it is none, or of another family."""
        if not isinstance(state, dict) or set(state) != {"pool"} or not isinstance(state["pool"], list):
            raise ValueError("the state of a pool search is an object with a list named 'pool'")
        pool = [Architecture.from_json(value) for value in state["pool"]]
        for architecture in pool:
            self.space.family.validate(architecture)
        for architecture in (self.space.smallest(), self.space.largest()):
            if architecture not in pool:
                raise ValueError(f"the pool lacks {architecture.to_json()}, with which every pool of this space begins")
        self.pool, self._by_size = {}, []
        for architecture in pool:
            self._include(architecture)


class ExactSearch:
    """The most parameters under a budget, then a random choice among architectures that have nearly as many.

    The choice is uniform among the frontier's labels that fit and have at least (1 - tolerance) of the optimum's
    parameters. As the frontier keeps one of many equal ends, picks of interchangeable layers are then exchanged at
    random, so that over the rounds all layers are trained; what needs too much memory that way is drawn again, and
    after `ATTEMPTS` draws the last label is taken as it is. Of all architectures of as many parameters the frontier has
    the leanest, also where memory is not what binds; random changes, of which those are made that fit and stay within
    the tolerance, lead away from it.

    A time budget chooses among the frontier's labels, which were compared by parameters, payload and memory alone: an
    architecture of as many parameters that takes less time may have been left out. What is found is in time.

    Args:
        space: Where to search.
        batch_size: Of local training, which memory depends on.
        optimizer: A name of `wildflower.models.cost.OPTIMIZERS`.
        tolerance: Share of the optimum's parameters that may be missing; 0 takes the optimum itself. A little above 0
            all layers get their turn over the rounds of a method that searches in each of them.
    """

    def __init__(self, space: Space | ElasticSpace, batch_size: int, optimizer: str, tolerance: float) -> None:
        if not 0 <= tolerance < 1:
            raise ValueError(f"tolerance must be in [0, 1), not {tolerance!r}")
        self.space = space
        self.tolerance = tolerance
        self.frontier = Frontier(space, batch_size=batch_size, optimizer=optimizer)
        self._open = [number for number, options in enumerate(space.options) if len(options) > 1]
        starts = np.arange(0, len(self.frontier.parameters), SEGMENT)
        self._min_memory_bytes = np.minimum.reduceat(self.frontier.memory_bytes, starts)
        self._min_payload_bytes = np.minimum.reduceat(self.frontier.payload_bytes, starts)

    @property
    def exact(self) -> bool:
        """Return whether `optimum` is the optimum always; in a large space it may miss it by a little."""
        return self.frontier.exact

    def optimum(self, budget: Budget) -> int | None:
        """Return the most parameters that fit a budget; None where nothing does."""
        label = self._optimum(budget)
        return None if label is None else int(self.frontier.parameters[label])

    def find(self, budget: Budget, rng: np.random.Generator) -> Architecture | None:
        """Return an architecture within the tolerance of the optimum; None: nothing in the space fits."""
        frontier = self.frontier
        best = self._optimum(budget)
        if best is None:
            return None
        # A whole number, because for another numpy would turn all parameters into floats first.
        minimum = math.ceil(frontier.parameters[best] * (1 - self.tolerance))
        low = int(np.searchsorted(frontier.parameters, minimum))
        candidates = low + np.flatnonzero(self._fit(low, best + 1, budget))
        for _ in range(ATTEMPTS):
            label = int(rng.choice(candidates))
            picks = frontier.picks(label)
            exchanged = picks.copy()
            for decisions in frontier.interchangeable:
                order = rng.permutation(len(decisions))
                for decision, other in zip(decisions, order, strict=True):
                    exchanged[decision] = picks[decisions[other]]
            if within(frontier.total(exchanged), budget):
                picks = exchanged
                break
        has, maximum = int(frontier.parameters[label]), int(frontier.parameters[best])
        return self.space.architecture(self._changed(picks, has, (minimum, maximum), budget, rng))

    def _changed(
        self, picks: list[int], parameters: int, bounds: tuple[int, int], budget: Budget, rng: np.random.Generator
    ) -> list[int]:
        """Other picks that fit and whose number of parameters is within bounds; `parameters` is that of `picks`."""
        found, (minimum, maximum), priced = picks, bounds, 0
        for _ in range(CHANGES if self._open else 0):
            if priced == PRICED:
                break
            decision = self._open[int(rng.integers(len(self._open)))]
            pick = int(rng.integers(len(self.space.options[decision]) - 1))
            pick += pick >= found[decision]
            # Most changes end here; to price one takes ten times as long.
            if not minimum <= parameters + self.frontier.parameters_more(found, decision, pick) <= maximum:
                continue
            tried = [*found[:decision], pick, *found[decision + 1 :]]
            if self.space.keeps_enough(tried):
                priced += 1
                total = self.frontier.total(tried)
                if within(total, budget):
                    found, parameters = tried, total.parameters
        return found

    def _optimum(self, budget: Budget) -> int | None:
        """The last label that fits, in order of parameters."""
        segments = self._min_memory_bytes <= budget.memory_bytes
        if budget.both_ways_bytes is not None:
            segments &= self._min_payload_bytes <= budget.both_ways_bytes
        for segment in np.flatnonzero(segments)[::-1]:
            start = int(segment) * SEGMENT
            fitting = np.flatnonzero(self._fit(start, start + SEGMENT, budget))
            if fitting.size:
                return start + int(fitting[-1])
        return None

    def _fit(self, start: int, stop: int, budget: Budget) -> NDArray[np.bool_]:
        fitting = self.frontier.memory_bytes[start:stop] <= budget.memory_bytes
        if budget.both_ways_bytes is not None:
            fitting &= self.frontier.payload_bytes[start:stop] <= budget.both_ways_bytes
        if budget.round_seconds is not None:
            payload_bytes, flops = self.frontier.payload_bytes[start:stop], self.frontier.training_flops[start:stop]
            seconds = payload_bytes * budget.seconds_per_byte + flops * budget.seconds_per_flop
            fitting &= seconds <= budget.round_seconds
        return fitting


def within(total: Cost, budget: Budget) -> bool:
    """Return whether a budget suffices for a network that travels to the device, is trained there and comes back."""
    in_time = budget.in_time(total.payload_bytes, total.payload_bytes, total.training_flops)
    in_memory = total.peak_training_memory_bytes <= budget.memory_bytes
    return in_memory and budget.can_travel(total.payload_bytes, total.payload_bytes) and in_time
