import pytest
import torch

from tests.small_run import simulated_grid, small_config, started
from tests.strategies.halves import came_back, filled, setup
from wildflower.messages.tensor_sets import STATISTICS
from wildflower.strategies.fedavgm import FedAvgM, FedAvgMParams


def test_two_steps_by_hand():
    """beta = 1/2, all weights are 1 at first.

    Round 1, mean 0.8: v = 0.2, w = 0.8. Round 2, mean 0.7: v = 0.1 + 0.1 = 0.2, w = 0.6.
    """
    method = FedAvgM(setup(), FedAvgMParams(beta=0.5))
    filled(method, 1.0)
    for mean, expected in ((0.8, 0.8), (0.7, 0.6)):
        method.finish_round([came_back(method, 10, {"weights": mean})])
        for name, value in method.weights.items():
            wanted = mean if "running" in name else expected
            assert value.unique().tolist() == pytest.approx([wanted], abs=1e-6)
    assert not any("running" in name for name in method.v)


def test_a_round_without_answers_moves_nothing():
    method = FedAvgM(setup(), FedAvgMParams())
    filled(method, 1.0)
    method.finish_round([came_back(method, 10, {"weights": 0.6})])
    before = dict(method.weights)
    method.finish_round([])
    assert all(value is before[name] for name, value in method.weights.items())


def test_the_momentum_is_part_of_the_state():
    first, second = (FedAvgM(setup(), FedAvgMParams()) for _ in range(2))
    first.finish_round([came_back(first, 10, {"weights": 0.6})])
    second.load(first.state())
    for method in (first, second):
        method.finish_round([came_back(method, 10, {"weights": 0.5})])
    assert all((first.weights[name] == second.weights[name]).all() for name in first.weights)


@pytest.mark.parametrize("method", ["fedavgm", "fedadam", "q-fedavg"])
def test_devices_take_the_statistics_of_what_the_server_made(method, tmp_path):
    """With the mean of theirs it would be scored with those of other weights: 0.60 in place of 0.93 for momentum."""
    engine, scorer = started(small_config(tmp_path, strategy=method, **{"evaluate-every": 1}))
    seen = []

    def keep(model):
        seen.append(model)
        return scorer(model)

    assert engine.run_round(simulated_grid(), 1, keep).record["score"] is not None
    [whole] = [model for model in seen if model.architecture == engine.method.scored_architecture]
    ours = engine.method.weights
    statistics = {name for name in ours if name.endswith(STATISTICS)}
    assert statistics
    assert whole.weights.keys() == ours.keys()
    same = {name for name, value in whole.weights.items() if torch.equal(value, ours[name])}
    assert same == ours.keys() - statistics
