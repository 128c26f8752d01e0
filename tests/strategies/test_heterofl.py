import math

import pytest
import torch

from tests.small_run import simulated_grid, small_config
from tests.strategies.by_hand import (
    CLASSIFIER,
    CLASSIFIER_BIAS,
    FC,
    FC_BIAS,
    Devices,
    Logits,
    OneHidden,
    engine_of,
    filled,
    loss_of,
    no_scores,
    setup,
)
from wildflower.models.lenet import LeNet5
from wildflower.rounds.evaluation import Scores
from wildflower.server_app.app import run
from wildflower.strategies.heterofl import HeteroFL, HeteroFLParams
from wildflower.strategies.method import client_step_of
from wildflower.strategies.static_norm import MaskedTraining
from wildflower.strategies.statistics import TakeStatistics

STATISTICS = TakeStatistics(examples=2).reference()
VALUES = {0: 1.0, 1: 3.0, 2: 8.0}  # what the devices of width 4, 2 and 1 answer everywhere


def after_a_round(folder, classes=None, silent=(), examples=None):
    family = OneHidden()
    strategy = HeteroFL(setup(folder, family), HeteroFLParams())
    strategy.weights = filled(strategy.weights, -7.0)
    devices = Devices(family, lambda order, w: filled(w, VALUES[order.device]), examples, classes)
    if silent:
        strategy.assign = lambda device, budget, give=strategy.assign: (
            None if device in silent else give(device, budget)
        )
    engine_of(strategy, folder).run_round(devices.grid, 1, no_scores)
    return strategy.weights, devices


def test_every_coordinate_is_the_mean_over_the_devices_that_trained_it(tmp_path):
    # Hidden channel 0: (1 + 3 + 8) / 3 = 4. Channel 1: (1 + 3) / 2 = 2. Channels 2 and 3: 1. The classifier's columns
    # follow the channels, its bias belongs to all.
    weights, _ = after_a_round(tmp_path)
    assert weights[FC].flatten().tolist() == [4, 2, 1, 1]
    assert weights[FC_BIAS].tolist() == [4, 2, 1, 1]
    assert weights[CLASSIFIER].tolist() == [[4, 2, 1, 1]] * 3
    assert weights[CLASSIFIER_BIAS].tolist() == [4, 4, 4]


def test_the_mean_does_not_depend_on_the_number_of_examples(tmp_path):
    weights, _ = after_a_round(tmp_path, examples={0: 1, 1: 2, 2: 4})
    assert weights[FC].flatten().tolist() == [4, 2, 1, 1]


def test_what_nobody_trained_keeps_its_value(tmp_path):
    # Without device 0, channels 2 and 3 are nobody's. Channel 0: (3 + 8) / 2 = 5.5.
    weights, _ = after_a_round(tmp_path, silent=[0])
    assert weights[FC].flatten().tolist() == [5.5, 3, -7, -7]
    assert weights[CLASSIFIER].tolist() == [[5.5, 3, -7, -7]] * 3


def test_rows_of_absent_classes_do_not_count(tmp_path):
    # Class 0: devices 0 and 2, so (1 + 8) / 2 = 4.5 in column 0, 1 elsewhere. Class 1: device 1 alone, 3 in its two
    # columns. Class 2: nobody. Hidden channels count for all.
    weights, _ = after_a_round(tmp_path, classes={0: [0], 1: [1], 2: [0]})
    assert weights[CLASSIFIER].tolist() == [[4.5, 1, 1, 1], [3, 3, -7, -7], [-7, -7, -7, -7]]
    assert weights[CLASSIFIER_BIAS].tolist() == [4.5, 3, -7]
    assert weights[FC].flatten().tolist() == [4, 2, 1, 1]


def test_devices_get_the_leading_channels_that_fit_and_the_masked_objective(tmp_path):
    family = OneHidden()
    strategy = HeteroFL(setup(tmp_path, family), HeteroFLParams())
    strategy.weights[FC] = torch.arange(4.0).view(4, 1)
    devices = Devices(family, lambda order, w: w)
    engine_of(strategy, tmp_path).run_round(devices.grid, 1, no_scores)
    assert {d: w[FC].flatten().tolist() for d, w in devices.received.items()} == {0: [0, 1, 2, 3], 1: [0, 1], 2: [0]}
    for order in devices.orders.values():
        assert client_step_of(order.client_step) == MaskedTraining(weighting="uniform")


def test_dynamic_devices_draw_among_the_widths_they_afford(tmp_path):
    family = OneHidden()
    strategy = HeteroFL(setup(tmp_path, family), HeteroFLParams(dynamic=True))
    devices = Devices(family, lambda order, w: w)
    engine = engine_of(strategy, tmp_path)
    seen = {0: set(), 1: set(), 2: set()}
    for number in range(1, 10):
        engine.run_round(devices.grid, number, no_scores)
        for device, order in devices.orders.items():
            seen[device].add(order.architecture["widths"][0])
    assert seen == {0: {4, 2, 1}, 1: {2, 1}, 2: {1}}


@pytest.mark.parametrize("count", [0, 2])
def test_a_scored_model_has_the_mean_statistics_of_devices(count, tmp_path):
    """The mean is weighted by examples: (1 * 1 + 3 * 5) / 4 = 4 where devices 0 and 1 hold 1 and 3 examples.

    By default all three take part, of which a round has two: (1 * 1 + 3 * 5 + 3 * 5) / 7. How many examples a device
    passes changes nothing of its weight.
    """
    family = LeNet5(input_shape=(1, 8, 8), norm="static", scaler=True)
    changes = {"evaluate_every": 1, "statistics_devices": count, "statistics_examples": 2}
    strategy = HeteroFL(setup(tmp_path, family, devices_per_round=2, **changes), HeteroFLParams())
    strategy.assign = lambda device, budget: family.full() if device < 2 else None
    engine = engine_of(strategy, tmp_path)
    engine.asking.budget = lambda device, wanted, of=engine.asking.budget: of(0, wanted)
    scored = []

    def answer(order, weights):
        if order.client_step != STATISTICS:
            return weights
        value = {0: 1.0, 1: 5.0, 2: 5.0}[order.device]
        return {"statistics": {name: torch.full_like(v, value) for name, v in weights.items() if "running" in name}}

    def scorer(model):
        scored.append(model)
        return Scores(0.5, 1.0)

    both = LeNet5(input_shape=(1, 8, 8), scaler=True)

    class Both(Devices):
        """Orders of training are of the static family, those of statistics of the one that keeps them."""

        def _handle(self, message, context):
            self.family = both if STATISTICS.name in str(message.content) else family
            return super()._handle(message, context)

    devices = Both(family, answer, examples={0: 1, 1: 3, 2: 3})
    result = engine.run_round(devices.grid, 1, scorer)
    assert result.record["score"] == 0.5
    [model] = scored
    assert model.family == both
    assert set(model.weights) == set(both.tensors(both.full()))
    statistics = torch.cat([value for name, value in model.weights.items() if "running" in name])
    asked = sorted(d for d, o in devices.orders.items() if o.client_step == STATISTICS)
    assert len(asked) == (count or 3)
    expected = {(0, 1): 4.0, (0, 2): 4.0, (1, 2): 5.0, (0, 1, 2): 31 / 7}[tuple(asked)]
    assert statistics.unique().tolist() == [pytest.approx(expected, abs=1e-6)]


def test_masked_cross_entropy_sets_absent_logits_to_zero_and_keeps_them_in_the_softmax():
    # Logits (ln 2, ln 9, 0) without class 1 are (ln 2, 0, 0): p = (1/2, 1/4, 1/4), not (2/3, 0, 1/3).
    model = Logits(math.log(2), math.log(9), 0.0)
    loss = loss_of(MaskedTraining(), model, class_counts=torch.tensor([4, 0, 1]))
    value = loss(torch.zeros(1, 1), torch.tensor([0]))
    assert float(value.detach()) == pytest.approx(math.log(2))
    value.backward()
    # Gradient p - onehot on what is present, nothing on what is absent.
    assert model.values.grad.tolist() == pytest.approx([-0.5, 0.0, 0.25])


@pytest.mark.parametrize(("order", "told"), [("none", 0), ("flip", 1), ("mix", 1)])
def test_it_is_told_once_where_no_tensor_counts_the_classes(order, told, tmp_path, caplog):
    keys = {"family": "own_traced:Ordered", "family-arguments": f"arguments = {{order = '{order}'}}"}
    run(simulated_grid(), small_config(tmp_path, strategy="heterofl", rounds=1, **keys))
    assert caplog.text.count("No tensor of the model counts the classes one by one") == told
