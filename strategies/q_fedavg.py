"""q-FedAvg (Li et al., "Fair Resource Allocation in Federated Learning", ICLR 2020): high losses count more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field

from wildflower.messages.tensor_sets import STATISTICS
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.cost import Cost
from wildflower.models.weights import trained_parameters
from wildflower.strategies.method import (
    Answer,
    ClientContext,
    ClientStep,
    Order,
    Setup,
    Trained,
    Traits,
)
from wildflower.strategies.one_architecture import OneArchitecture
from wildflower.strategies.params import Params, Rate
from wildflower.strategies.submodel import zeros
from wildflower.strategies.training_steps import ChangesTraining

MIN_LOSS = 1e-10  # so that F^(q - 1) is finite for q below 1, as in the published code

# The client step ------------------------------------------------------------------------------------------------------


class FairTraining(ChangesTraining):
    """Devices minimize the task's loss F, such as CE(f(x), y), from w, which has the loss F(w) on the device's data.

    With L = 1 / learning rate and Dw = L (w - w_k), the device returns Delta = F(w)^q Dw and
    h = q F(w)^(q-1) ||Dw||^2 + L F(w)^q (Algorithm 2). Batch norm's running statistics are returned as they are.
    """

    q: Rate

    def facts(self, family: Family) -> dict[str, int]:
        """`h`, the bound of the local curvature."""
        return {"h": 1}

    def check_facts(self, facts: Mapping[str, Sequence[float]], examples: int) -> None:
        """h is above 0 wherever the loss is."""
        if facts["h"][0] <= 0:
            raise ValueError(f"h must be above 0, not {facts['h'][0]}")

    def train(self, context: ClientContext) -> Answer:
        """Take the loss of what was received, train, and weigh the change."""
        model = self.model(context)
        w = {name: p.detach().clone() for name, p in trained_parameters(model).items()}
        first_loss = mean_loss(context, model) + MIN_LOSS
        loss = context.fit(model, self.loss(context, model))
        slope = 1.0 / context.training.learning_rate
        moved = {name: slope * (w[name] - p.detach()) for name, p in trained_parameters(model).items()}
        square = sum(float(value.double().square().sum()) for value in moved.values())
        h = self.q * first_loss ** (self.q - 1) * square + slope * first_loss**self.q
        changes = {name: first_loss**self.q * value for name, value in moved.items()}
        return self.answer(model, changes, loss, {"h": [h]})


@torch.no_grad()
def mean_loss(context: ClientContext, model: torch.nn.Module) -> float:
    """The mean of the task's loss over the device's examples, in evaluation mode."""
    model.eval()
    total, seen = 0.0, 0
    for inputs, labels in context.one_pass(model):
        total += float(context.task.loss(model(inputs), labels)) * len(labels)
        seen += len(labels)
    return total / max(1, seen)


# The server half ------------------------------------------------------------------------------------------------------


class QFedAvgParams(Params):
    """q-FedAvg's settings."""

    q: Rate = Field(
        1.0, description="Fairness: 0 counts all devices alike; the larger, the more devices of high loss count"
    )


class QFedAvg(OneArchitecture[QFedAvgParams]):
    """w <- w - sum_k Delta_k / sum_k h_k over the round's devices. Every device trains the whole model."""

    ends_at_mean: ClassVar[bool] = False
    # Its step is a quotient of two sums over the devices.
    fit_for: ClassVar[Traits] = replace(OneArchitecture.fit_for, averages=False)
    returns_changes: ClassVar[bool] = True
    parameter_copies: ClassVar[int] = 1  # what was received

    def __init__(self, setup: Setup, params: QFedAvgParams) -> None:
        if rates := setup.settings.training.learning_rates:
            raise ValueError(
                f"learning-rates = {rates}: q-fedavg takes one over the learning rate for the curvature of the loss, "
                "which is one number for all parts: leave learning-rates out"
            )
        super().__init__(setup, params)

    def client_step(self, order: Order) -> ClientStep:
        """Training whose change is weighed by the loss."""
        return FairTraining(weighting="uniform", q=self.params.q)

    def training_cost(self, architecture: Architecture) -> Cost:
        """Plain training, and a forward pass over all examples before it."""
        price = super().training_cost(architecture)
        return replace(price, training_flops=price.training_flops + price.training_flops // 3)

    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        """One step along the changes, divided by the curvatures; both sums are taken as means over devices."""
        if not trained:
            return {}
        h = sum(done.facts["h"][0] for done in trained) / len(trained)
        mean = self.mean.mean(zeros(self.weights))
        self.weights = {
            name: mean[name] if name.endswith(STATISTICS) else old - mean[name] / h
            for name, old in self.weights.items()
        }
        return {"curvature": h}
