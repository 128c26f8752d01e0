from dataclasses import replace

import pytest
import torch

from tests.small_run import METHODS, simulated_grid, small_config, started
from tests.strategies.halves import FAMILY, HandContext, came_back, filled, setup
from wildflower.strategies.method import Group, Order
from wildflower.strategies.scaffold import ControlledTraining, Scaffold, ScaffoldParams


def tensor(value):
    return torch.tensor([value], dtype=torch.float64)


def test_a_devices_steps_and_control_variate_by_hand():
    """x = 1, gradient y, c = 0.2, c_i = 0.5, rate 0.1, two steps.

    y_1 = 1 - 0.1 (1 - 0.5 + 0.2) = 0.93; y_2 = 0.93 - 0.1 (0.93 - 0.3) = 0.867.
    c_i+ = 0.5 - 0.2 + (1 - 0.867) / (2 0.1) = 0.965, the mean of the gradients 1 and 0.93.
    """
    context = HandContext(1.0, 0.0, steps=2, kept={"control": {"w": tensor(0.5)}}, learning_rate=0.1)
    context.received["control"] = {"w": tensor(0.2)}
    answer = ControlledTraining().train(context)
    assert answer.tensor_sets["weights"]["w"].tolist() == pytest.approx([0.867])
    assert context.kept_tensors["control"]["w"].tolist() == pytest.approx([0.965])
    assert answer.tensor_sets["control_change"]["w"].tolist() == pytest.approx([0.465])


def test_a_part_with_a_learning_rate_of_its_own_has_the_same_control_variate():
    """0.01 ten times is 0.1: steps and mean gradient are those of the test above."""
    rates = {"learning_rate": 0.01, "learning_rates": {"w": 10.0}}
    context = HandContext(1.0, 0.0, steps=2, kept={"control": {"w": tensor(0.5)}}, **rates)
    context.received["control"] = {"w": tensor(0.2)}
    answer = ControlledTraining().train(context)
    assert answer.tensor_sets["weights"]["w"].tolist() == pytest.approx([0.867])
    assert context.kept_tensors["control"]["w"].tolist() == pytest.approx([0.965])


def test_a_part_that_does_not_learn_keeps_its_control_variate():
    context = HandContext(1.0, 0.0, steps=2, kept={"control": {"w": tensor(0.5)}}, learning_rates={"w": 0.0})
    context.received["control"] = {"w": tensor(0.2)}
    answer = ControlledTraining().train(context)
    assert answer.tensor_sets["weights"]["w"].tolist() == [1.0]
    assert context.kept_tensors["control"]["w"].tolist() == [0.5]
    assert answer.tensor_sets["control_change"]["w"].tolist() == [0.0]


def test_with_momentum_the_control_variate_is_still_a_mean_of_gradients():
    """x = 1, c = c_i = 0, rate 0.1, momentum 1/2: y_1 = 0.9, y_2 = 0.9 - 0.1 (0.9 + 0.5) = 0.76.

    The first gradient, 1, counts 1.5, the second, 0.9, counts 1: (1.5 + 0.9) / 2.5 = 0.96 = 0.24 / (2.5 0.1).
    """
    context = HandContext(1.0, 0.0, steps=2, learning_rate=0.1, momentum=0.5)
    context.received["control"] = {"w": tensor(0.0)}
    ControlledTraining().train(context)
    assert context.kept_tensors["control"]["w"].tolist() == pytest.approx([0.96])


def test_one_step_of_the_server_by_hand():
    """x = 1, c = 0.2, two of four devices, eta_g = 1/2; every device counts alike, whatever its examples.

    y = 0.867 and 1.1: x <- 1 + 1/2 (0.9835 - 1) = 0.99175. Changes of c_i 0.465 and -0.265:
    c <- 0.2 + 2/4 0.1 = 0.25.
    """
    method = Scaffold(setup(), ScaffoldParams(eta=0.5))
    filled(method, 1.0)
    method.control = {name: torch.full_like(value, 0.2) for name, value in method.control.items()}
    trained = [
        came_back(method, 30, {"weights": 0.867, "control_change": 0.465}, device=0),
        came_back(method, 10, {"weights": 1.1, "control_change": -0.265}, device=1),
    ]
    method.finish_round(trained)
    for name, value in method.weights.items():
        wanted = 0.9835 if "running" in name else 0.99175
        assert value.unique().tolist() == pytest.approx([wanted], abs=1e-6)
    assert all(value.unique().tolist() == pytest.approx([0.25], abs=1e-6) for value in method.control.values())
    assert not any("running" in name for name in method.control)


def test_both_tensor_sets_travel_both_ways():
    """The payload of a device is twice the parameters, both ways."""
    method = Scaffold(setup(), ScaffoldParams())
    whole = method.scored_architecture
    local = method.client_step(Order(0, whole))
    sent, returned = local.sent(FAMILY, whole), local.returned(FAMILY, whole)
    group = Group(whole, method.selection(0, whole), sent, returned, FAMILY.place(whole))
    assert method.payload(group).keys() == sent.keys() == {"weights", "control"}
    assert returned.keys() == {"weights", "control_change"}
    parameters = sum(value.numel() for value in method.control.values())
    assert method.cost(whole).payload_bytes == sent["weights"].layout.nbytes + 4 * parameters


def test_of_a_choice_the_largest_member_travels(tmp_path):
    members = "members = { large = { name = 'cnn3' }, small = { name = 'mlp', hidden = [4] } }"
    keys = METHODS["scaffold"] | {"family": "choice", "family-arguments": members}
    engine, scorer = started(small_config(tmp_path, **keys))
    before = {name: value.clone() for name, value in engine.method.weights.items()}
    result = engine.run_round(simulated_grid(), 1, scorer)
    assert {device["outcome"] for device in result.devices} == {"trained"}
    moved = {name for name, value in engine.method.weights.items() if not torch.equal(value, before[name])}
    assert {name.partition(".")[0] for name in moved} == {"large"}


def test_the_control_variate_is_part_of_the_state():
    first, second = (Scaffold(setup(), ScaffoldParams()) for _ in range(2))
    first.finish_round([came_back(first, 10, {"weights": 0.6, "control_change": 0.3})])
    second.load(first.state())
    assert all((first.control[name] == second.control[name]).all() for name in first.control)
    assert first.control["head.fc1.bias"].unique().tolist() == pytest.approx([0.075], abs=1e-6)


def test_steps_of_adam_hold_no_gradients():
    with pytest.raises(ValueError, match="set optimizer = 'sgd'"):
        Scaffold(setup(optimizer="adam"), ScaffoldParams())


def test_a_bound_on_weights_is_refused():
    """What devices return beside weights has no distance from what they were sent."""
    bounded = setup()
    bounded = replace(bounded, settings=replace(bounded.settings, norm_bound=1.0))
    with pytest.raises(ValueError, match=r"set aggregation\.norm-bound = 0"):
        Scaffold(bounded, ScaffoldParams())
    assert Scaffold.traits(ScaffoldParams()).one_model == "scaffold puts together changes of one model: leave it false"
