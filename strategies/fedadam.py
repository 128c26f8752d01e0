"""FedAdam (Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2) over one architecture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from wildflower.messages.tensor_sets import Weights
from wildflower.strategies.method import ClientStep, Order, Setup, Trained, Training
from wildflower.strategies.one_architecture import OneArchitecture
from wildflower.strategies.params import Betas, Params, PositiveRate
from wildflower.strategies.submodel import learned


class FedAdamParams(Params):
    """FedAdam's settings, and those of other servers' Adam."""

    eta: PositiveRate = Field(0.01, description="Learning rate of the server's Adam")
    betas: Betas = Field(
        (0.9, 0.99),
        description="Betas of the server's Adam: shares of the running means of the updates and of their squares that "
        "stay in a round",
    )
    tau: PositiveRate = Field(1e-3, description="Number added to the root of the squares: larger is less adaptive")


class ServerAdam:
    """Adam on the server without bias correction, over the tensors of `weights`; tau^2 is also the first v."""

    def __init__(self, params: FedAdamParams, weights: Weights) -> None:
        self.params = params
        self.m: Weights = {name: torch.zeros_like(value) for name, value in weights.items()}
        self.v: Weights = {name: torch.full_like(value, params.tau**2) for name, value in weights.items()}

    def step(self, name: str, value: Tensor, update: Tensor) -> Tensor:
        """Return the value of one tensor after a step, and renew its moments."""
        beta_1, beta_2 = self.params.betas
        self.m[name] = beta_1 * self.m[name] + (1 - beta_1) * update
        self.v[name] = beta_2 * self.v[name] + (1 - beta_2) * update.square()
        return value + self.params.eta * self.m[name] / (self.v[name].sqrt() + self.params.tau)


class FedAdam(OneArchitecture[FedAdamParams]):
    """Adam on the server, with the devices' mean change, weighted by examples, as pseudo-gradient.

    Delta_t = sum_k (n_k / n) (w_k - w_t);  m_t = beta_1 m + (1 - beta_1) Delta_t;
    v_t = beta_2 v + (1 - beta_2) Delta_t^2;  w_{t+1} = w_t + eta m_t / (sqrt(v_t) + tau), without bias correction.
    tau^2 is also the first v. All devices train the whole model by the task's loss. Batch norm's running statistics are
    no parameters: devices begin from the mean of theirs, and take them anew before the model is scored.
    """

    ends_at_mean: ClassVar[bool] = False

    def __init__(self, setup: Setup, params: FedAdamParams) -> None:
        super().__init__(setup, params)
        self.adam = ServerAdam(params, learned(self.weights))

    @override
    def client_step(self, order: Order) -> ClientStep:
        return Training()

    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        """Take one step of the server's Adam; a round in which nobody answered changes nothing."""
        if self.mean.empty:
            return {}
        old = self.weights
        mean = self.mean.mean(old)
        for name in self.adam.m:
            mean[name] = self.adam.step(name, old[name], mean[name] - old[name])
        self.weights = mean
        return {}

    @override
    def beside_weights(self) -> Mapping[str, Weights]:
        return {"m": self.adam.m, "v": self.adam.v}
