"""SCAFFOLD (Karimireddy et al., ICML 2020): control variates correct the drift of devices whose data differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from wildflower.messages.orders import Merge
from wildflower.messages.tensor_sets import TensorSet, TensorSets, Weights, parameters_of
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.weights import trained_parameters
from wildflower.strategies.aggregation import CoordinateMean
from wildflower.strategies.fednova import effective_steps
from wildflower.strategies.method import (
    Answer,
    ClientContext,
    ClientStep,
    Contribution,
    Group,
    Order,
    Setup,
    Trained,
    Training,
    Traits,
)
from wildflower.strategies.one_architecture import OneArchitecture
from wildflower.strategies.params import Params, PositiveRate
from wildflower.strategies.shared_losses import Regularizer
from wildflower.strategies.submodel import learned, zeros

# The client step ------------------------------------------------------------------------------------------------------


class ControlledTraining(Training):
    """Devices step along g(y) - c_i + c, g being the gradient of the task's loss, such as L = CE(f(x), y).

    After K steps from x to y at learning rate eta, c_i+ = c_i - c + (x - y) / (K eta) (option II of Algorithm 1), which
    the device keeps; it returns y and c_i+ - c_i. Under momentum K counts effective steps (ours, as FedNova counts
    them), so that (x - y) / (K eta) is still a mean gradient; without, this is the paper's.
    """

    def sent(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        """The weights x and the server's control variate c."""
        tensors = family.tensors(architecture)
        return {"weights": TensorSet.of(tensors), "control": TensorSet.of(parameters_of(tensors))}

    def returned(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        """The weights y and the change of the device's control variate; every device counts alike."""
        tensors, merge = family.tensors(architecture), Merge(weighting="uniform")
        return {"weights": TensorSet.of(tensors, merge), "control_change": TensorSet.of(parameters_of(tensors), merge)}

    def train(self, context: ClientContext) -> Answer:
        """Train under the correction, and renew the device's control variate, which is 0 at first."""
        model = self.model(context)
        x = {name: p.detach().clone() for name, p in trained_parameters(model).items()}
        c = {name: value.to(context.device) for name, value in context.received["control"].items()}
        kept = context.kept("control") or {name: torch.zeros_like(value) for name, value in c.items()}
        c_i = {name: value.to(context.device) for name, value in kept.items()}
        drift = Regularizer(correction={name: c_i[name] - c[name] for name in c})
        loss = context.fit(model, self.loss(context, model), regularizer=drift)
        y = {name: p.detach() for name, p in trained_parameters(model).items()}
        # A part whose learning rate is 0 says nothing of its gradient.
        new = c_i | {name: c_i[name] - c[name] + value for name, value in mean_gradients(context, x, y).items()}
        context.keep("control", new)
        moved = {name: new[name] - c_i[name] for name in new}
        return Answer(model, {"weights": dict(model.state_dict()), "control_change": moved}, loss)


def mean_gradients(context: ClientContext, x: Mapping[str, Tensor], y: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """(x - y) / (K eta) by name, of the parameters that have a learning rate; x, y: before and after K steps.

    eta is the learning rate of the parameter's own part. Under momentum K counts effective steps.
    """
    training = context.training
    steps = effective_steps(context.steps_taken, training.momentum)
    rates = {name: training.learning_rate * training.rate_of(name) for name in x}
    return {name: (x[name] - y[name]) / (steps * rate) for name, rate in rates.items() if rate}


# The server half ------------------------------------------------------------------------------------------------------


class ScaffoldParams(Params):
    """SCAFFOLD's settings."""

    eta: PositiveRate = Field(1.0, description="Learning rate of the server (eta_g)")


class Scaffold(OneArchitecture[ScaffoldParams]):
    """x <- x + eta_g mean_i (y_i - x);  c <- c + |S| / N mean_i (c_i+ - c_i), S being the round's devices, N all.

    Every device trains the whole model. Batch norm's running statistics are no parameters: they become the mean.
    """

    # c must stay the mean of the devices' control variates.
    fit_for: ClassVar[Traits] = replace(OneArchitecture.fit_for, averages=False)
    returns_changes: ClassVar[bool] = True
    parameter_copies: ClassVar[int] = 5  # x, c, c_i, their difference, and a gradient before there is one
    only_sgd: ClassVar[bool] = True

    def __init__(self, setup: Setup, params: ScaffoldParams) -> None:
        super().__init__(setup, params)
        self.control = zeros(learned(self.weights))
        self.control_mean = CoordinateMean(self.control)

    def client_step(self, order: Order) -> ClientStep:
        """Training under control variates."""
        return ControlledTraining()

    def payload(self, group: Group) -> TensorSets:
        """The weights and the control variate of the model that devices train: of a `choice`, the largest member."""
        names = self.family.tensors(self.architecture)
        return {
            "weights": {name: self.weights[name] for name in names},
            "control": {name: value for name, value in self.control.items() if name in names},
        }

    def absorb(self, contribution: Contribution) -> None:
        """Add the devices' weights, and what their control variates changed by."""
        self.control_mean.check(contribution.sum_of("control_change"))
        self.average(self.mean, contribution, ["weights"])
        self.average(self.control_mean, contribution, ["control_change"])

    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        """One step of the server; a round in which nobody answered changes nothing."""
        if not trained:
            return {}
        old, mean = self.weights, self.mean.mean(self.weights)
        moved = self.control_mean.mean(zeros(self.control))
        share = len(trained) / self.settings.devices
        for name in self.control:
            mean[name] = old[name] + self.params.eta * (mean[name] - old[name])
            self.control[name] = self.control[name] + share * moved[name]
        self.weights = mean
        return {}

    @override
    def beside_weights(self) -> Mapping[str, Weights]:
        return {"control": self.control}
