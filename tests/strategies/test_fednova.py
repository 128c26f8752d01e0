from dataclasses import replace

import pytest

from tests.strategies.halves import HandContext, came_back, filled, setup
from wildflower.strategies.aggregation import Aggregation
from wildflower.strategies.fednova import FedNova, NormalizedTraining, effective_steps
from wildflower.strategies.method import Order
from wildflower.strategies.params import Params


@pytest.mark.parametrize(
    ("steps", "momentum", "expected"),
    [
        (3, 0.0, 3.0),
        (1, 0.9, 1.0),
        (2, 0.5, 2.5),  # the first gradient counts 1 + 1/2, the second 1
        (3, 0.5, 4.25),  # 1 + 1/2 + 1/4, 1 + 1/2, 1
    ],
)
def test_effective_steps_by_hand(steps, momentum, expected):
    assert effective_steps(steps, momentum) == pytest.approx(expected)


def test_a_device_returns_its_change_per_effective_step():
    """w = 1, gradient w, rate 0.1, momentum 1/2: w_1 = 0.9, then the velocity is 0.9 + 0.5 = 1.4 and w_2 = 0.76.

    a = 2.5, so that d = (1 - 0.76) / 2.5 = 0.096.
    """
    context = HandContext(1.0, 0.0, steps=2, learning_rate=0.1, momentum=0.5)
    answer = NormalizedTraining().train(context)
    assert answer.facts == {"effective_steps": [pytest.approx(2.5)]}
    assert answer.tensor_sets["changes"]["w"].tolist() == pytest.approx([0.096])


def test_one_step_of_the_server_by_hand():
    """x = 1. Device 0: 30 examples, 2 steps, d = 0.25. Device 1: 10 examples, 1 step, d = 0.1.

    p = 3/4, 1/4; tau_eff = 3/4 2 + 1/4 = 1.75; sum p d = 0.2125; x <- 1 - 1.75 0.2125 = 0.628125. Batch norm's
    statistics become 3/4 2 + 1/4 4 = 2.5.
    """
    method = FedNova(setup(batch_size=15), Params())
    filled(method, 1.0)
    trained = [
        came_back(method, 30, {"changes": 0.25, "statistics": 2.0}, device=0, effective_steps=[2.0]),
        came_back(method, 10, {"changes": 0.1, "statistics": 4.0}, device=1, effective_steps=[1.0]),
    ]
    assert method.finish_round(trained) == {"effective_steps": pytest.approx(1.75)}
    for name, value in method.weights.items():
        assert value.unique().tolist() == pytest.approx([2.5 if "running" in name else 0.628125], abs=1e-6)


def test_batch_norms_statistics_are_bounded_by_themselves():
    """x = 1, the devices of above, each change no larger than the smaller of two.

    d = 0.1 both, x <- 1 - 1.75 0.1 = 0.825. Statistics go from 1 to 2 and to 4: bounded, both go to 2.
    """
    start = setup(batch_size=15)
    bounded = replace(start.settings, aggregation=Aggregation("norm-bounded-mean"))
    method = FedNova(replace(start, settings=bounded), Params())
    filled(method, 1.0)
    trained = [
        came_back(method, 30, {"changes": 0.25, "statistics": 2.0}, device=0, effective_steps=[2.0]),
        came_back(method, 10, {"changes": 0.1, "statistics": 4.0}, device=1, effective_steps=[1.0]),
    ]
    method.finish_round(trained)
    for name, value in method.weights.items():
        assert value.unique().tolist() == pytest.approx([2.0 if "running" in name else 0.825], abs=1e-4)


def test_equal_steps_are_fedavg():
    """Two steps each: x - 2 (p_0 (x - y_0) / 2 + p_1 (x - y_1) / 2) = p_0 y_0 + p_1 y_1."""
    method = FedNova(setup(batch_size=15), Params())
    filled(method, 1.0)
    trained = [
        came_back(method, 30, {"changes": (1 - 0.6) / 2, "statistics": 1.0}, device=0, effective_steps=[2.0]),
        came_back(method, 30, {"changes": (1 - 0.2) / 2, "statistics": 1.0}, device=1, effective_steps=[2.0]),
    ]
    method.finish_round(trained)
    assert method.weights["head.fc1.bias"].unique().tolist() == pytest.approx([0.4], abs=1e-6)


def test_a_device_cannot_stretch_the_step_by_what_it_says():
    """30 examples in batches of 15 are at most 2 steps."""
    method = FedNova(setup(batch_size=15), Params())
    filled(method, 1.0)
    trained = [came_back(method, 30, {"changes": 0.1, "statistics": 1.0}, effective_steps=[1e9])]
    assert method.finish_round(trained) == {"effective_steps": 2.0}
    assert method.weights["head.fc1.bias"].unique().tolist() == pytest.approx([0.8], abs=1e-6)


def test_steps_of_adam_are_not_counted():
    with pytest.raises(ValueError, match="set optimizer = 'sgd'"):
        FedNova(setup(optimizer="adam"), Params())


def test_what_a_device_sends_is_as_large_as_the_model():
    method = FedNova(setup(), Params())
    returned = method.client_step(Order(0, method.scored_architecture)).returned(
        method.family, method.scored_architecture
    )
    whole = method.family.tensors(method.scored_architecture)
    assert {e.name for tensor_set in returned.values() for e in tensor_set.layout.entries} == set(whole)


def test_a_device_that_took_no_step_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        NormalizedTraining().check_facts({"effective_steps": [0.0]}, examples=10)
