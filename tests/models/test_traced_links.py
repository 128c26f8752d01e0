"""A module that is cut by itself as a chain of links: costs that compose, and the exact search along them."""

import numpy as np
import pytest

from tests.models.whole_space import all_of
from wildflower.devices.budget import Budget
from wildflower.models.composition import Frame, total
from wildflower.models.family import make_family
from wildflower.models.space import Space
from wildflower.models.traced.links import pieces_of
from wildflower.strategies.search import ExactSearch


def family_of(name):
    tokens = name in ("Words", "Tied")
    shape = [6] if tokens else [1, 8, 8]
    return make_family({"name": f"own_traced:{name}", "input_shape": shape, "classes": 7, "tokens": tokens})


@pytest.mark.parametrize("name", ["Dense", "Residual", "Patches", "Separable", "Words", "Dense2"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_costs_of_links_add_up_to_the_price_of_any_width_and_depth(name, optimizer):
    family = family_of(name)
    rng = np.random.default_rng(0)
    for arch in (family.full(), family.sample(rng)):
        frame = Frame.of(family, 12, optimizer)
        found = total([piece.profile(12, piling=frame.piling) for piece in pieces_of(family, arch)], frame)
        true = family.step(arch, 12, accumulates=not frame.piling).cost(12, optimizer)
        assert found.peak_training_memory_bytes == pytest.approx(true.peak_training_memory_bytes, rel=0.01)
        assert (found.parameters, found.download_bytes) == (true.parameters, true.download_bytes)
        assert found.training_flops == true.training_flops


def test_the_exact_search_finds_the_largest_of_all_that_fit():
    family = family_of("Residual")
    space = Space.of(family, (0.0, 0.5, 1.0))
    search = ExactSearch(space, batch_size=8, optimizer="sgd", tolerance=0.0)
    prices = [family.price(arch, 8, "sgd") for arch in all_of(space)]
    largest = max(price.peak_training_memory_bytes for price in prices)
    for share in (0.6, 0.8, 0.9):
        budget = Budget(memory_bytes=int(share * largest))
        best = max(price.parameters for price in prices if price.peak_training_memory_bytes <= budget.memory_bytes)
        assert search.optimum(budget) == pytest.approx(best, rel=0.02)


def test_what_lacks_blocks_is_priced_without_following_it(monkeypatch):
    """There are as many choices of blocks as subsets: the step of the whole is followed, and no other one."""
    family = family_of("Residual")
    whole, shortened = family.full(), family.smallest()
    assert 0 in shortened.widths
    true = family.step(shortened, 12, accumulates=False).cost(12, "sgd")
    family.price(whole, 12, "sgd")
    family.price(shortened, 12, "sgd")
    monkeypatch.setattr("wildflower.models.traced.family._recorded", None)
    found = family.price(shortened, 12, "sgd")
    assert found.peak_training_memory_bytes == pytest.approx(true.peak_training_memory_bytes, rel=0.01)
    assert (found.payload_bytes, found.training_flops) == (true.payload_bytes, true.training_flops)


def test_what_is_no_chain_is_said():
    with pytest.raises(ValueError, match="costs of its parts do not add up to those of the whole"):
        pieces_of(family_of("Tied"), family_of("Tied").full())
