import pytest

from models.cnn import Cnn3
from models.cost import _Step, cost, distinct_convolutions
from models.resnet import ResNet18
from strategies.fjord import FjORD, FjORDParams, training_cost
from tests.small_run import METHODS, simulated_grid, small_config, started
from tests.strategies.by_hand import CLASSIFIER, CLASSIFIER_BIAS, FC, Devices, OneHidden, filled, no_scores, setup

WIDTHS = (1.0, 0.5, 0.25)


def after_a_round(folder, params=FjORDParams(), silent=()):
    """Devices 0, 1 and 2 of width 1, 1/2 and 1/4 answer 1, 3 and 8; they hold 1, 1 and 2 examples."""
    strategy = FjORD(setup(folder, OneHidden()), params)
    strategy.weights = filled(strategy.weights, -7.0)
    strategy.assign = lambda device, budget: None if device in silent else strategy.candidates[device]
    values = {0: 1.0, 1: 3.0, 2: 8.0}
    devices = Devices(OneHidden(), lambda order, w: filled(w, values[order.device]), examples={0: 1, 1: 1, 2: 2})
    strategy.run_round(devices.grid, 1, no_scores)
    return strategy, devices


@pytest.mark.parametrize("distillation", [False, True])
def test_a_device_draws_among_the_widths_up_to_its_own(distillation, tmp_path):
    _, devices = after_a_round(tmp_path, FjORDParams(distillation=distillation))
    objectives = {device: order.objective for device, order in devices.orders.items()}
    assert {o.kind for o in objectives.values()} == {"ordered dropout"}
    assert {o.distillation for o in objectives.values()} == {distillation}
    assert {device: o.widths for device, o in objectives.items()} == {0: (0.25, 0.5, 1.0), 1: (0.25, 0.5), 2: (0.25,)}
    assert {device: len(w[FC]) for device, w in devices.received.items()} == {0: 4, 1: 2, 2: 1}


def test_every_coordinate_is_the_mean_over_its_owners_by_examples(tmp_path):
    # Channel 0: (1 + 3 + 2 * 8) / 4 = 5. Channel 1: (1 + 3) / 2 = 2. Channels 2 and 3: 1.
    strategy, _ = after_a_round(tmp_path)
    assert strategy.weights[FC].flatten().tolist() == [5, 2, 1, 1]
    assert strategy.weights[CLASSIFIER].tolist() == [[5, 2, 1, 1]] * 3
    assert strategy.weights[CLASSIFIER_BIAS].tolist() == [5, 5, 5]


def test_what_nobody_trained_keeps_its_value(tmp_path):
    strategy, _ = after_a_round(tmp_path, silent=[0])
    # Channel 0: (3 + 2 * 8) / 3.
    assert strategy.weights[FC].flatten().tolist() == [pytest.approx(19 / 3), 3, -7, -7]


def test_a_device_is_charged_for_the_dearest_of_its_steps():
    """One hidden layer, SGD without momentum, two examples. Entries: 23 in all of the whole, 8 of the quarter.

    The quarter's step holds its own peak, 2 * (23 - 8) entries more of weights and gradients, and twice the largest
    tensor, 12 entries: 54 entries. With distillation 8 more of gradients, and the target of 2 * 3.
    """
    family = OneHidden()
    whole, quarter = (cost(family, family.width(w), batch_size=2, optimizer="sgd") for w in (1.0, 0.25))
    assert (whole.parameters, quarter.parameters) == (23, 8)

    def charged(distillation):
        return training_cost(family, family.full(), (1.0, 0.25), distillation, 2, "sgd")

    peak = quarter.peak_training_memory_bytes
    assert charged(False).peak_training_memory_bytes == max(whole.peak_training_memory_bytes, peak + 4 * 54)
    assert charged(True).peak_training_memory_bytes == max(whole.peak_training_memory_bytes, peak + 4 * 68)
    assert peak + 4 * 54 > whole.peak_training_memory_bytes  # it is the gradients that make the difference here
    # Half of the batches are the quarter's; with distillation all are the whole one's, and half of them both.
    assert charged(False).training_flops == (whole.training_flops + quarter.training_flops) // 2
    assert charged(True).training_flops == whole.training_flops + quarter.training_flops // 2
    assert charged(True).payload_bytes == whole.payload_bytes


def test_one_width_alone_costs_what_it_costs_without_ordered_dropout():
    family = OneHidden()
    for distillation in (False, True):
        charged = training_cost(family, family.width(0.25), WIDTHS, distillation, 2, "sgd-momentum")
        assert charged == cost(family, family.width(0.25), batch_size=2, optimizer="sgd-momentum")


def test_the_compiled_convolutions_of_all_widths_are_charged():
    family = ResNet18(norm="static")
    whole, half = family.full(), family.width(0.5)
    counted = {}
    for architecture in (whole, half):
        step = _Step(1)
        step.run(family.blocks(architecture), family.input_shape, family.classes)
        counted[architecture] = step.convolutions
        assert distinct_convolutions(family, architecture) == step.convolutions
    assert not counted[whole] & counted[half]
    large_batch = training_cost(family, whole, (1.0, 0.5), False, 256, "sgd")  # its activations hide all else
    plain = cost(family, whole, batch_size=256, optimizer="sgd")
    more = large_batch.peak_training_memory_bytes - plain.peak_training_memory_bytes
    assert more == 300_000 * len(counted[half])


@pytest.mark.parametrize("method", ["fjord", "fjord with distillation"])
def test_devices_of_a_width_afford_what_the_method_needs_for_it(method, tmp_path):
    strategy, scorer = started(small_config(tmp_path, **METHODS[method]))
    result = strategy.run_round(simulated_grid(), 1, scorer)
    widths = dict(zip(("whole", "half", "quarter"), strategy.candidates, strict=True))
    trained = [d for d in result.devices if d["outcome"] == "trained"]
    assert len(trained) == 4
    for device in trained:
        assert device["architecture"] == widths[device["tier"]].to_json()
        assert device["predicted_memory_bytes"] == strategy.cost(widths[device["tier"]]).peak_training_memory_bytes
        assert device["predicted_memory_bytes"] <= device["budget"]["memory_bytes"]


def test_convolutions_behind_an_early_exit_are_found():
    family = Cnn3(input_shape=(1, 8, 8), exits=(1, 2, 3))
    conv1 = ((1, 8, 8), (32, 8, 8), 3)
    conv2 = ((32, 4, 4), (64, 4, 4), 3)
    assert distinct_convolutions(family, family.up_to(2)) == {conv1, conv2}
    assert distinct_convolutions(family, family.full()) == {conv1, conv2, ((64, 2, 2), (128, 2, 2), 3)}
