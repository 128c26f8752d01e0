"""Search by another criterion than parameters, in steps from the smallest architecture upward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from wildflower.devices.budget import Budget
from wildflower.models.architecture import Architecture
from wildflower.models.elastic import ElasticSpace
from wildflower.models.frontier import Prices
from wildflower.models.space import Space
from wildflower.strategies.search import within


class AscentSearch:
    """A search for what a budget buys by another criterion than parameters, by steps from the smallest upward.

    Each step takes the next larger option of one decision: the one that brings most of the criterion for the largest
    share of the budget that it takes. The search ends where no larger option fits. Which of equal steps comes first is
    random. That is a heuristic: what is found fits, and may not be the best.

    Args:
        space: Where to search.
        batch_size: Of local training, which memory depends on.
        optimizer: A name of `wildflower.models.cost.OPTIMIZERS`.
        criterion: "flops" of training, so that blocks of large maps are not left out; or "balanced", the sum over the
            blocks of log(1 + parameters), under which every block is worth as much as any other, and doubling a narrow
            one as much as doubling a wide one.
    """

    def __init__(
        self, space: Space | ElasticSpace, batch_size: int, optimizer: str, criterion: Literal["flops", "balanced"]
    ) -> None:
        self.space = space
        self.criterion = criterion
        self.prices = Prices(space, batch_size=batch_size, optimizer=optimizer)

    def find(self, budget: Budget, rng: np.random.Generator) -> Architecture | None:
        """Return what the steps lead to; None: not even the smallest fits."""
        picks = list(self.space.smallest_picks())
        if not within(self.prices.total(picks), budget):
            return None
        value, used = self.value(picks), self._used(picks, budget)
        while True:
            best: tuple[float, list[int]] | None = None
            for decision in map(int, rng.permutation(len(picks))):
                for pick in range(picks[decision] + 1, len(self.space.options[decision])):
                    tried = [*picks[:decision], pick, *picks[decision + 1 :]]
                    if (gain := self.value(tried) - value) <= 0 or not within(self.prices.total(tried), budget):
                        continue
                    rate = gain / max(self._used(tried, budget) - used, 1e-9)
                    if best is None or rate > best[0]:
                        best = rate, tried
                    break  # the next larger option that is worth more
            if best is None:
                return self.space.architecture(picks)
            picks = best[1]
            value, used = self.value(picks), self._used(picks, budget)

    def value(self, picks: Sequence[int]) -> float:
        """The criterion of an architecture."""
        if self.criterion == "flops":
            return float(self.prices.total(picks).training_flops)
        return math.fsum(math.log1p(parameters) for parameters in self.prices.parameters_by_block(picks))

    def _used(self, picks: Sequence[int], budget: Budget) -> float:
        """The largest share of what a budget allows that an architecture takes."""
        price = self.prices.total(picks)
        shares = [price.peak_training_memory_bytes / budget.memory_bytes]
        if budget.both_ways_bytes:
            shares.append(price.payload_bytes / budget.both_ways_bytes)
        if budget.round_seconds:
            seconds = budget.seconds(price.payload_bytes, price.payload_bytes, price.training_flops)
            shares.append(seconds / budget.round_seconds)
        return max(shares)
