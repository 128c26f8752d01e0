"""One model for all: which one it is, its steps, and that it is what four keys of wildflower come to."""

import pytest

from tests.small_run import same_bits, simulated_grid, small_config, started
from tests.strategies.halves import FAMILY, came_back, filled, setup
from wildflower.devices.budget import Budget
from wildflower.strategies.one_model import OneModel, OneModelParams
from wildflower.strategies.pricing import Means

WILDFLOWER = {"wildflower.levels": 1, "wildflower.shares": "", "wildflower.masked-loss": False}


def test_two_steps_by_hand():
    """beta = 1/2, all weights are 1 at first; devices count alike, whatever their examples.

    Round 1, mean (0.7 + 0.9) / 2 = 0.8: v = 0.2, w = 0.8. Round 2, mean 0.7: v = 0.1 + 0.1 = 0.2, w = 0.6.
    """
    method = OneModel(setup(), OneModelParams(momentum=0.5))
    filled(method, 1.0)
    method.finish_round([came_back(method, 10, {"weights": 0.7}), came_back(method, 90, {"weights": 0.9}, device=1)])
    assert method.weights["head.fc1.bias"].unique().tolist() == pytest.approx([0.8])
    method.finish_round([came_back(method, 10, {"weights": 0.7})])
    assert method.weights["head.fc1.bias"].unique().tolist() == pytest.approx([0.6])
    before = dict(method.weights)
    method.finish_round([])
    assert all(value is before[name] for name, value in method.weights.items())


def needed(method, width):
    return method.cost(FAMILY.width(width)).peak_training_memory_bytes


def test_it_is_the_widest_that_all_devices_can_train():
    made = setup()
    method = OneModel(made.__class__(FAMILY, made.settings, (1.0, 0.5, 0.25)), OneModelParams())
    fleet = [Means(Budget(needed(method, width))) for width in (1.0, 0.5, 0.5)]
    method.survey(fleet)
    assert method.candidates == [FAMILY.width(0.5)]
    assert method.scored_architecture == method.smallest_architecture == FAMILY.width(0.5)
    assert [method.assign(0, means.budget) for means in fleet] == [FAMILY.width(0.5)] * 3
    assert method.assign(0, Budget(needed(method, 0.5) - 1)) is None
    resumed = OneModel(made.__class__(FAMILY, made.settings, (1.0, 0.5, 0.25)), OneModelParams())
    resumed.load(method.state())
    assert resumed.candidates == method.candidates


def test_where_nobody_affords_any_it_is_the_smallest(caplog):
    made = setup()
    method = OneModel(made.__class__(FAMILY, made.settings, (1.0, 0.25)), OneModelParams())
    with caplog.at_level("WARNING", "flwr"):
        method.survey([Means(Budget(1))])
    assert "no device affords any network now" in caplog.text
    assert method.candidates == [FAMILY.width(0.25)]


def test_it_has_the_bits_of_wildflower_with_one_level_of_one_width(tmp_path):
    weights = {}
    for strategy, own in (("one-model", {}), ("wildflower", WILDFLOWER)):
        folder = tmp_path / strategy
        folder.mkdir()
        engine, scorer = started(small_config(folder, strategy=strategy, **own))
        grid = simulated_grid()
        for number in (1, 2):
            engine.run_round(grid, number, scorer)
        weights[strategy] = engine.method.weights
    assert same_bits(weights["one-model"], weights["wildflower"])
