import math

import pytest
import torch

from tests.strategies.by_hand import Devices, Logits, OneHidden, engine_of, loss_of, no_scores, setup
from tests.strategies.halves import HandContext
from wildflower.client_app.fitting import regularizing
from wildflower.strategies.fedavg import FedAvg, FedAvgParams
from wildflower.strategies.fedprox import FedProx, FedProxParams, ProximalTraining
from wildflower.strategies.method import client_step_of
from wildflower.strategies.shared_losses import Regularizer


def test_devices_minimize_with_the_proximal_term_on_the_whole_model(tmp_path):
    family = OneHidden()
    devices = Devices(family, lambda order, w: w)
    engine_of(FedProx(setup(tmp_path, family), FedProxParams(mu=0.25)), tmp_path).run_round(devices.grid, 1, no_scores)
    assert sorted(devices.orders) == [0, 1, 2]
    for order in devices.orders.values():
        assert client_step_of(order.client_step) == ProximalTraining(mu=0.25, weighting="examples")
        assert order.architecture["widths"] == [4]


def test_two_steps_of_a_device_by_hand():
    """Received 1, loss w^2 / 2, mu 3, rate 0.1: first w - 0 + 3 (w - 1) = 1, and w = 0.9.

    Then 0.9 + 3 (0.9 - 1) = 0.6, and w = 0.84; the loss that is reported is 0.9^2 / 2 + 3 / 2 (0.9 - 1)^2 = 0.42.
    """
    context = HandContext(1.0, 0.0, steps=2, learning_rate=0.1)
    answer = ProximalTraining(mu=3.0).train(context)
    assert answer.tensor_sets["weights"]["w"].tolist() == pytest.approx([0.84])
    assert answer.loss == pytest.approx(0.42)


def test_the_proximal_term_pulls_towards_the_weights_that_were_received():
    # Received w = (ln 2, 0, 0), now w' = w + (0, 0, ln 2): p = (2, 1, 2) / 5. With mu = 3 and label 0:
    # loss = ln(5/2) + 3/2 (ln 2)^2, gradient = p - onehot + 3 (w' - w) = (-3/5, 1/5, 2/5 + 3 ln 2).
    model = Logits(math.log(2), 0.0, 0.0)
    pull = Regularizer(strength=3.0, reported=True)
    regularize = regularizing(model, pull)
    with torch.no_grad():
        model.values[2] += math.log(2)
    beside = regularize()
    value = loss_of(ProximalTraining(mu=3.0), model)(torch.zeros(1, 1), torch.tensor([0]))
    value.backward()
    assert float(value.detach() + beside) == pytest.approx(math.log(5 / 2) + 1.5 * math.log(2) ** 2)
    assert model.values.grad.tolist() == pytest.approx([-0.6, 0.2, 0.4 + 3 * math.log(2)])


def test_before_the_first_step_the_proximal_term_is_nothing():
    model = Logits(0.5, -0.5, 0.0)
    assert regularizing(model, Regularizer(strength=9.0, reported=True))() == 0
    assert torch.equal(model.values.grad, torch.zeros(3))


def test_a_device_pays_for_what_it_received(tmp_path):
    """8 bytes per parameter more than plain training: what it received, and a gradient before the forward pass."""
    family = OneHidden()
    method = FedProx(setup(tmp_path, family), FedProxParams())
    plain = FedAvg(setup(tmp_path, family), FedAvgParams()).training_cost(family.full())
    price = method.cost(family.full())
    assert price.peak_training_memory_bytes - plain.peak_training_memory_bytes == 8 * plain.parameters
    assert price.payload_bytes == plain.payload_bytes
