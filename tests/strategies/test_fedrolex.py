import torch

from tests.strategies.by_hand import CLASSIFIER, FC, FC_BIAS, Devices, OneHidden, engine_of, no_scores, setup
from wildflower.strategies.fedrolex import FedRolex
from wildflower.strategies.params import Params


def test_the_window_rolls_by_one_channel_a_round_and_wraps_on_both_sides_of_a_layer(tmp_path):
    """Width 2 of 4: channels {1, 2} in round 1, {2, 3} in round 2, {3, 0} in round 3; width 1: {1}, {2}, {3}."""
    family = OneHidden()
    for number, (half, quarter) in {1: ([1, 2], [1]), 2: ([2, 3], [2]), 3: ([3, 0], [3]), 4: ([0, 1], [0])}.items():
        strategy = FedRolex(setup(tmp_path, family), Params())
        strategy.weights[FC] = torch.arange(4.0).view(4, 1)
        strategy.weights[FC_BIAS] = torch.arange(4.0)
        strategy.weights[CLASSIFIER] = torch.arange(12.0).view(3, 4)
        devices = Devices(family, lambda order, w: {name: value + 100 for name, value in w.items()})
        strategy.assign = lambda device, budget, give=strategy.assign: give(device, budget) if device else None
        engine_of(strategy, tmp_path).run_round(devices.grid, number, no_scores)
        for device, window in ((1, half), (2, quarter)):
            received = devices.received[device]
            assert received[FC].flatten().tolist() == window
            assert received[FC_BIAS].tolist() == window
            assert received[CLASSIFIER].tolist() == [[row * 4 + channel for channel in window] for row in range(3)]
        # All answered "plus 100", so what somebody trained is 100 more, and the rest is what it was.
        expected = [channel + 100.0 * (channel in half or channel in quarter) for channel in range(4)]
        assert strategy.weights[FC].flatten().tolist() == expected
        assert strategy.weights[CLASSIFIER][0].tolist() == expected


def test_who_has_the_whole_model_gets_it_in_its_own_order(tmp_path):
    family = OneHidden()
    strategy = FedRolex(setup(tmp_path, family), Params())
    strategy.weights[FC] = torch.arange(4.0).view(4, 1)
    devices = Devices(family, lambda order, w: w)
    engine_of(strategy, tmp_path).run_round(devices.grid, 3, no_scores)
    assert devices.received[0][FC].flatten().tolist() == [0, 1, 2, 3]
