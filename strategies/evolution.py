"""Evolutionary search: the sub-network that scores best under a device's limits (RaFL's Eq. 2, once-for-all's search).

What is found depends on the random numbers alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from wildflower.devices.budget import Budget
from wildflower.models.architecture import Architecture
from wildflower.models.elastic import ElasticSpace
from wildflower.models.frontier import Prices
from wildflower.models.space import Space

Picks = tuple[int, ...]
Score = Callable[[Sequence[Picks]], Sequence[float]]
"""Of several sub-networks how good they are: larger is better, and none is NaN."""

# All but the generations, of which it has 500, is as in once-for-all's code.
POPULATION = 100  # sub-networks of each generation
GENERATIONS = 30  # behind the random first one
PARENTS = 0.25  # of a generation stay and have children: those that score best
MUTATED = 0.5  # of the children are mutations of one parent, not crossings
MUTATION = 0.1  # the probability with which a mutation draws a decision anew
ATTEMPTS = 10  # draws of a child until one fits and is new
EXCHANGES = 1000  # changes of two decisions at once that are looked at in one step, where no change of one helps


def evolve(
    space: Space | ElasticSpace,
    score: Score,
    excess: Callable[[Picks], float],
    rng: np.random.Generator,
    population: int = POPULATION,
    generations: int = GENERATIONS,
) -> Picks | None:
    """Return the picks of the best sub-network that was found; None where nothing that fits was found.

    The first generation is drawn, with the smallest sub-network in it (or where that does not fit, one near it that
    does: a smaller network may need more memory, where its convolutions are of more kinds). In each later one the best
    of the one before stay as parents; their children are mutations, of which every decision is drawn anew with a small
    probability, and crossings, which take every decision from one of two parents.

    Three things are ours. A child that does not fit, or was there before, is drawn again; where that does not help it
    is made smaller, decision by decision, until it fits: under a tight budget hardly any draw does. In the end the best
    one takes steps to better ones, of one changed decision or, where none is better, of two.

    Args:
        space: where to search.
        score: what is maximized.
        excess: by how much a sub-network is over the limits, such as the share of a budget that it lacks; it fits where
            this is 0 or less.
        rng: all chance.
        population, generations: how much is searched.
    """
    scores: dict[Picks, float] = {}
    known: dict[Picks, float] = {}

    def over(picks: Picks) -> float:
        if picks not in known:
            known[picks] = excess(picks) if space.keeps_enough(picks) else math.inf
        return known[picks]

    def fits(picks: Picks) -> bool:
        return over(picks) <= 0

    start = _fitting_start(space, over, rng)
    if start is None:
        return None

    def judge(found: Sequence[Picks]) -> None:
        new = sorted({picks for picks in found if picks not in scores})
        if new:
            scores.update(zip(new, map(float, score(new)), strict=True))

    def best(found: Sequence[Picks], count: int) -> list[Picks]:
        # Of equal scores the smaller picks, so that an order of drawing does not matter.
        return sorted(set(found), key=lambda picks: (-scores[picks], picks))[:count]

    def fitting(draw: Callable[[], Sequence[int]]) -> Picks:
        for _ in range(ATTEMPTS):
            picks = space.canonical(draw())
            if picks not in scores and fits(picks):
                return picks
        return _shrunk(space, picks, fits, rng) or start

    generation = [start, *(fitting(lambda: space.draw(rng)) for _ in range(population - 1))]
    judge(generation)
    for _ in range(generations):
        parents = best(generation, max(1, round(PARENTS * population)))
        children = []
        mutations = round(MUTATED * (population - len(parents)))
        for number in range(population - len(parents)):
            first, second = (parents[int(rng.integers(len(parents)))] for _ in range(2))
            if number < mutations:
                children.append(fitting(partial(_mutation, space, first, rng)))
            else:
                children.append(fitting(partial(_crossing, first, second, rng)))
        judge(children)
        generation = [*parents, *children]
    (found,) = best(generation, 1)
    while True:
        steps = [picks for picks in _neighbors(space, found) if fits(picks)]
        judge(steps)
        (better,) = best([found, *steps], 1)
        if scores[better] <= scores[found]:
            steps = [picks for picks in _exchanges(space, found, rng) if fits(picks)]
            judge(steps)
            (better,) = best([found, *steps], 1)
        if scores[better] <= scores[found]:
            return found
        found = better


def _mutation(space: Space | ElasticSpace, picks: Picks, rng: np.random.Generator) -> list[int]:
    anew = rng.random(len(picks)) < MUTATION
    return [
        int(rng.integers(len(options))) if drawn else pick
        for pick, options, drawn in zip(picks, space.options, anew, strict=True)
    ]


def _crossing(one: Picks, other: Picks, rng: np.random.Generator) -> list[int]:
    first = rng.random(len(one)) < 0.5
    return [a if taken else b for a, b, taken in zip(one, other, first, strict=True)]


def _fitting_start(
    space: Space | ElasticSpace, excess: Callable[[Picks], float], rng: np.random.Generator
) -> Picks | None:
    """The smallest sub-network; where that does not fit, what steps of one decision down the excess lead to.

    They begin at the smallest, at the largest and at some draws, for there are ends that lead nowhere.
    """
    largest = [len(options) - 1 for options in space.options]
    starts = itertools.chain([space.smallest_picks(), largest], (space.draw(rng) for _ in range(ATTEMPTS)))
    for start in starts:
        found = space.canonical(start)
        before = math.inf
        while 0 < excess(found) < before:
            before = excess(found)
            found = min(_neighbors(space, found), key=lambda picks: (excess(picks), picks), default=found)
        if excess(found) <= 0:
            return found
    return None


def _shrunk(
    space: Space | ElasticSpace, picks: Picks, fits: Callable[[Picks], bool], rng: np.random.Generator
) -> Picks | None:
    """Lower random picks by one until it fits; None where it never does."""
    while not fits(picks):
        able = [d for d, pick in enumerate(picks) if pick]
        lowered = None
        for place in rng.permutation(len(able)):
            decision = able[place]
            tried = space.canonical((*picks[:decision], picks[decision] - 1, *picks[decision + 1 :]))
            if space.keeps_enough(tried):
                lowered = tried
                break
        if lowered is None:
            return None
        picks = lowered
    return picks


def _neighbors(space: Space | ElasticSpace, picks: Picks) -> list[Picks]:
    """All architectures that differ in one decision."""
    found = {
        space.canonical((*picks[:decision], pick, *picks[decision + 1 :]))
        for decision, options in enumerate(space.options)
        for pick in range(len(options))
    }
    return sorted(found - {picks})


def _exchanges(space: Space | ElasticSpace, picks: Picks, rng: np.random.Generator) -> list[Picks]:
    """Architectures that differ in two decisions, all of them or `EXCHANGES` random ones."""
    single = [
        (decision, pick)
        for decision, options in enumerate(space.options)
        for pick in range(len(options))
        if pick != picks[decision]
    ]
    pairs = [(a, b) for a, b in itertools.combinations(single, 2) if a[0] != b[0]]
    chosen = rng.permutation(len(pairs))[:EXCHANGES]
    found = set()
    for number in chosen:
        changed = list(picks)
        for decision, pick in pairs[number]:
            changed[decision] = pick
        found.add(space.canonical(changed))
    return sorted(found - {picks})


class EvolutionSearch:
    """The sub-network that scores best under a device's budget, found by evolution.

    Args:
        space: Where to search.
        batch_size: Of local training, which memory depends on.
        optimizer: A name of `wildflower.models.cost.OPTIMIZERS`.
        score: How good sub-networks are, such as `wildflower.strategies.predictor.Predictor.score`; None: their number
            of multiplications, the objective of a search without anything learned.
        population, generations: As of `evolve`.
    """

    def __init__(
        self,
        space: Space | ElasticSpace,
        batch_size: int,
        optimizer: str,
        score: Score | None = None,
        population: int = POPULATION,
        generations: int = GENERATIONS,
    ) -> None:
        self.space = space
        self.prices = Prices(space, batch_size=batch_size, optimizer=optimizer)
        self.score = score or (lambda found: [float(self.prices.macs(picks)) for picks in found])
        self.population, self.generations = population, generations

    def excess(self, picks: Picks, budget: Budget, max_macs: int | None = None) -> float:
        """By which share a sub-network is over what it exceeds most, or else 0.

        That is memory, payload, time for both ways and the training, or multiplications.
        """
        total = self.prices.total(picks)
        needs = [(total.peak_training_memory_bytes, budget.memory_bytes), (total.payload_bytes, budget.both_ways_bytes)]
        if max_macs is not None:
            needs.append((self.prices.macs(picks), max_macs))
        shares = [need / max(limit, 1) for need, limit in needs if limit is not None]
        if budget.round_seconds is not None:
            seconds = budget.seconds(total.payload_bytes, total.payload_bytes, total.training_flops)
            shares.append(seconds / budget.round_seconds)
        return max(0.0, max(shares) - 1)

    def find(self, budget: Budget, rng: np.random.Generator, max_macs: int | None = None) -> Architecture | None:
        """Return the best sub-network that was found; None: nothing that fits was found."""
        excess = partial(self.excess, budget=budget, max_macs=max_macs)
        picks = evolve(self.space, self.score, excess, rng, self.population, self.generations)
        return None if picks is None else self.space.architecture(picks)
