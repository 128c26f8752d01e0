"""One half of a method at a time, on numbers worked out by hand: a server half that is told what came back, and a
client step over a model of one parameter."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from wildflower.client_app.fitting import regularizing
from wildflower.messages.orders import LocalTraining
from wildflower.messages.sums import WeightedSum, device_weight, flatten
from wildflower.models.lenet import LeNet5
from wildflower.strategies.method import Contribution, Group, Method, Order, Setup, Trained
from wildflower.strategies.run_settings import RoundSettings
from wildflower.strategies.shared_losses import Loss, Regularizer

FAMILY = LeNet5(input_shape=(1, 8, 8))


def setup(**training: Any) -> Setup:
    """Four devices in all, and whatever local training a test needs."""
    settings = RoundSettings("a run", {"devices": 4}, "made up", 1, 10, 2, 2, LocalTraining(**training))
    return Setup(FAMILY, settings, (1.0,))


def filled(method: Method, value: float) -> None:
    """Set every weight of the global model."""
    method.weights = {name: torch.full_like(old, value) for name, old in method.weights.items()}


def came_back(
    method: Method, examples: int, tensor_sets: dict[str, float], device: int = 0, **facts: list[float]
) -> Trained:
    """Let the method absorb the answer of one device, whose tensor sets hold one value everywhere."""
    order = Order(device, method.scored_architecture)
    local = method.client_step(order)
    sent, returned = (way(FAMILY, order.architecture) for way in (local.sent, local.returned))
    group = Group(
        order.architecture,
        method.selection(device, order.architecture),
        sent,
        returned,
        FAMILY.place(order.architecture),
    )
    sums = {}
    for name, tensor_set in returned.items():
        assert tensor_set.merge is not None
        sums[name] = WeightedSum.zeros(tensor_set.layout)
        contents = {e.name: torch.full(e.shape, tensor_sets[name]) for e in tensor_set.layout.entries}
        sums[name].add(flatten(contents, tensor_set.layout), device_weight(tensor_set.merge, examples))
    method.absorb(Contribution(group, [device], [device], examples, sums, {}))
    return Trained(order, "a tier", examples, None, facts)


class OneParameter(nn.Module):
    """f(x) = w x."""

    def __init__(self, w: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([w], dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.w * inputs


class HandContext:
    """A context of a device with one example, f(1) = `label`, whose loss is half the squared error.

    Its gradient in w is w - label. `kept` is what the device has kept.
    """

    def __init__(self, w: float, label: float, steps: int, kept: dict[str, Any] | None = None, **training: Any) -> None:
        self._model = OneParameter(w)
        self.training = LocalTraining(steps=steps, **training)
        self.task = SimpleNamespace(loss=lambda outputs, labels: (outputs - labels).square().mean() / 2)
        self.received: dict[str, Any] = {"weights": {}}
        self.device = torch.device("cpu")
        self.chance = random.Random(0)
        self.steps_taken, self._label, self.kept_tensors = 0, label, kept or {}

    def build(self, weights: Any) -> OneParameter:
        return self._model

    def kept(self, name: str) -> Any:
        return self.kept_tensors.get(name)

    def keep(self, name: str, tensors: Any) -> None:
        self.kept_tensors[name] = tensors

    def one_pass(self, *models: nn.Module):
        yield torch.ones(1, dtype=torch.float64), torch.tensor([self._label], dtype=torch.float64)

    def fit(
        self,
        model: Any,
        loss: Loss,
        *,
        regularizer: Regularizer | None = None,
        new_statistics: bool = False,
        rate: float = 1.0,
    ) -> float:
        regularize = None if regularizer is None else regularizing(model, regularizer)
        lr = rate * self.training.learning_rate
        parts = [{"params": [p], "lr": lr * self.training.rate_of(name)} for name, p in model.named_parameters()]
        sgd = torch.optim.SGD(parts, lr=lr, momentum=self.training.momentum)
        value = torch.zeros(())
        for _ in range(self.training.steps):
            [(inputs, labels)] = self.one_pass(model)
            sgd.zero_grad()
            beside = None if regularize is None else regularize()
            value = loss(inputs, labels)
            value.backward()
            if beside is not None:
                value = value + beside
            sgd.step()
            self.steps_taken += 1
        return float(value.detach())
