from dataclasses import replace

import numpy as np
import pytest

from tests.models.whole_space import all_picks
from wildflower.devices.budget import Budget
from wildflower.models.cost import cost
from wildflower.models.elastic import ElasticSpace
from wildflower.models.family import make_family
from wildflower.models.frontier import Prices
from wildflower.models.space import Space
from wildflower.strategies.evolution import EvolutionSearch, evolve
from wildflower.strategies.search import ExactSearch, PoolSearch

V3 = make_family(
    {
        "name": "mobilenet-v3",
        "input_shape": [1, 8, 8],
        "stage_channels": [8, 8, 16, 16, 24, 24],
        "depths": [1, 2],
        "expand_ratios": [3, 6],
        "kernel_sizes": [3, 5],
    }
)
# (2 expand ratios x 2 kernels) + (...)^2 in two stages, the others fixed but for one expand ratio: 20 x 20 x 2 = 800.
FIXED = {f"stage{s}.depth": (1,) for s in (3, 4, 5)} | {f"stage{s}_{b}.kernel": (3,) for s in (3, 4, 5) for b in (0, 1)}
TINY = ElasticSpace.of(V3, {**FIXED, "stage3_0.expand": (3,), "stage4_0.expand": (3,)})
RESNET = make_family({"name": "ofa-resnet50", "input_shape": [1, 8, 8], "first_channels": 16, "extra_depths": [0, 1]})


def macs_of(prices):
    return lambda found: [prices.macs(picks) for picks in found]


@pytest.mark.parametrize("space", [TINY, ElasticSpace.of(RESNET), ElasticSpace.of(V3)], ids=["tiny", "resnet", "v3"])
def test_prices_are_those_of_the_cost_model(space):
    prices = Prices(space, batch_size=4, optimizer="sgd-momentum")
    rng = np.random.default_rng(0)
    for _ in range(10):
        picks = space.draw(rng)
        arch = space.architecture(picks)
        whole = cost(space.family, arch, batch_size=4, optimizer="sgd-momentum")
        found = prices.total(picks)
        assert found.parameters == whole.parameters
        assert found.payload_bytes == whole.payload_bytes
        assert found.peak_training_memory_bytes == whole.peak_training_memory_bytes
        assert prices.macs(picks) == space.family.inference_macs(arch)


@pytest.mark.thorough
def test_the_optimum_is_found_under_nearly_all_budgets():
    assert TINY.size == 20 * 20 * 2
    prices = Prices(TINY, batch_size=4, optimizer="sgd")
    table = [(prices.macs(p), prices.total(p).peak_training_memory_bytes) for p in all_picks(TINY)]
    least, most = min(macs for macs, _ in table), max(macs for macs, _ in table)
    memory = [bytes_ for _, bytes_ in table]
    rng = np.random.default_rng(1)
    search = EvolutionSearch(TINY, 4, "sgd", population=40, generations=12)
    right = 0
    for number in range(40):
        budget = Budget(int(rng.integers(min(memory), max(memory) + 1)))
        limit = int(rng.integers(least, most + 1))
        fitting = [macs for macs, bytes_ in table if macs <= limit and bytes_ <= budget.memory_bytes]
        found = search.find(budget, np.random.default_rng(number), max_macs=limit)
        if not fitting:
            assert found is None
            right += 1
            continue
        assert found is not None
        assert V3.inference_macs(found) <= limit
        right += V3.inference_macs(found) == max(fitting)
    assert right >= 38


def test_a_score_without_a_slope_is_searched_too():
    """Here the score of a sub-network says nothing about its neighbors: only what was looked at can be found."""
    scores = {picks: float(np.random.default_rng(picks).random()) for picks in all_picks(TINY)}
    found = evolve(TINY, lambda some: [scores[p] for p in some], lambda _: 0, np.random.default_rng(0))
    assert found is not None
    assert scores[found] >= sorted(scores.values())[-8]


def test_the_same_seed_finds_the_same():
    prices = Prices(TINY, batch_size=4, optimizer="sgd")
    limit = (prices.macs(TINY.smallest_picks()) * 3) // 2

    def once(seed):
        rng = np.random.default_rng(seed)
        return evolve(TINY, macs_of(prices), lambda p: prices.macs(p) - limit, rng, 10, 2)

    assert once(5) == once(5)


def test_where_nothing_fits_nothing_is_found():
    assert evolve(TINY, lambda found: [0.0] * len(found), lambda _: 1, np.random.default_rng(0)) is None
    search = EvolutionSearch(TINY, 4, "sgd")
    assert search.find(Budget(1000), np.random.default_rng(0)) is None
    assert search.find(Budget(10**9, 1000, 1000), np.random.default_rng(0)) is None
    assert search.find(Budget(10**9), np.random.default_rng(0), max_macs=1) is None


def test_everything_fits_without_limits():
    search = EvolutionSearch(TINY, 4, "sgd", population=20, generations=3)
    assert search.find(Budget(10**12), np.random.default_rng(0)) == TINY.largest()


def test_no_child_that_does_not_fit_is_scored():
    prices = Prices(TINY, batch_size=4, optimizer="sgd")
    limit = prices.macs(TINY.smallest_picks()) + 3000

    def score(found):
        assert all(prices.macs(picks) <= limit for picks in found)
        assert len(set(found)) == len(found)
        return [prices.macs(picks) for picks in found]

    found = evolve(TINY, score, lambda p: prices.macs(p) - limit, np.random.default_rng(2))
    assert found is not None


def test_spaces_of_shares_are_searched_as_well():
    family = make_family({"name": "resnet18", "input_shape": [1, 8, 8], "first_channels": 16, "activation": "relu6"})
    space = Space.of(family, (0, 0.5, 1), min_blocks=2)
    exact = ExactSearch(space, 64, "sgd", tolerance=0)
    whole = cost(family, family.full(), batch_size=64, optimizer="sgd")
    budget = Budget(int(0.8 * whole.peak_training_memory_bytes))
    prices = Prices(space, batch_size=64, optimizer="sgd")
    search = EvolutionSearch(
        space,
        64,
        "sgd",
        score=lambda found: [prices.total(picks).parameters for picks in found],
        population=40,
        generations=20,
    )
    found = cost(family, search.find(budget, np.random.default_rng(0)), batch_size=64, optimizer="sgd")
    assert found.peak_training_memory_bytes <= budget.memory_bytes
    assert 0.98 * exact.optimum(budget) <= found.parameters < whole.parameters


def test_exact_and_pool_search_take_elastic_spaces():
    prices = Prices(TINY, batch_size=4, optimizer="sgd")
    totals = [prices.total(picks) for picks in all_picks(TINY)]
    exact = ExactSearch(TINY, 4, "sgd", tolerance=0)
    assert exact.exact
    pool = PoolSearch(TINY, lambda arch: cost(V3, arch, batch_size=4, optimizer="sgd"), max_draws=20, epsilon=0.05)
    most, least = (f(t.peak_training_memory_bytes for t in totals) for f in (max, min))
    for number, memory in enumerate(np.linspace(least, most, 15)):
        budget = Budget(int(memory))
        best = max(t.parameters for t in totals if t.peak_training_memory_bytes <= budget.memory_bytes)
        assert exact.optimum(budget) == best
        found = exact.find(budget, np.random.default_rng(number))
        price = cost(V3, found, batch_size=4, optimizer="sgd")
        assert price.parameters == best
        assert price.peak_training_memory_bytes <= budget.memory_bytes
        drawn = pool.find(budget, np.random.default_rng(number))
        # Where neither the smallest nor a draw fits, the pool has nothing.
        needed = 0 if drawn is None else cost(V3, drawn, batch_size=4, optimizer="sgd").peak_training_memory_bytes
        assert needed <= budget.memory_bytes


def test_what_is_found_is_in_time():
    """Of all sub-networks that can be trained and sent in a round's time, one of the most multiplications."""
    search, prices = (
        EvolutionSearch(TINY, 4, "sgd", population=40, generations=12),
        Prices(TINY, batch_size=4, optimizer="sgd"),
    )
    for seconds_per_byte, seconds_per_flop in ((1e-6, 0.0), (0.0, 1e-7), (1e-6, 1e-7)):
        free = Budget(10**12, seconds_per_byte_down=seconds_per_byte, seconds_per_flop=seconds_per_flop)
        needs = {}
        for picks in all_picks(TINY):
            total = prices.total(picks)
            needs[picks] = total.payload_bytes * seconds_per_byte + total.training_flops * seconds_per_flop
        for share in (0.3, 0.7):
            limit = min(needs.values()) * (1 - share) + max(needs.values()) * share
            found = search.find(replace(free, round_seconds=limit), np.random.default_rng(0))
            price = cost(V3, found, batch_size=4, optimizer="sgd")
            assert free.seconds(price.download_bytes, price.upload_bytes, price.training_flops) <= limit
            best = max(prices.macs(picks) for picks, seconds in needs.items() if seconds <= limit)
            assert V3.inference_macs(found) >= 0.95 * best
        assert search.find(replace(free, round_seconds=min(needs.values()) * 0.99), np.random.default_rng(0)) is None
