"""FedAdam (Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2) over one architecture."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from wildflower.messages.tensor_sets import STATISTICS, Weights
from wildflower.models.architecture import Architecture
from wildflower.strategies.fedavg import FedAvg, FedAvgParams
from wildflower.strategies.method import Model, Setup, State, Trained
from wildflower.strategies.params import Decay, Params, PositiveRate
from wildflower.strategies.submodel import without_statistics


class AdamParams(Params):
    """The settings of a server's Adam."""

    eta: PositiveRate = Field(0.01, description="Learning rate of the server's Adam")
    beta_1: Decay = Field(
        0.9,
        description="Adam's beta_1: share of the running mean of the updates that stays in a round; the rest is new",
    )
    beta_2: Decay = Field(0.99, description="Adam's beta_2: the same share of the running mean of the squared updates")
    tau: PositiveRate = Field(1e-3, description="Number added to the root of the squares: larger is less adaptive")


class FedAdamParams(FedAvgParams, AdamParams):
    """FedAdam's settings."""

    use: Literal["all-large", "all-small", "exclusive"] = Field(
        "all-large", description="Who trains what: all-large, all-small, exclusive"
    )


class FedAdam(FedAvg):
    """Adam on the server, with the devices' mean change, weighted by examples, as pseudo-gradient.

    Delta_t = sum_k (n_k / n) (w_k - w_t);  m_t = beta_1 m + (1 - beta_1) Delta_t;
    v_t = beta_2 v + (1 - beta_2) Delta_t^2;  w_{t+1} = w_t + eta m_t / (sqrt(v_t) + tau), without bias correction.
    tau^2 is also the first v. Devices train one model by the task's loss: by default all of them the whole one. Batch
    norm's running statistics are no parameters: devices begin from the mean of theirs, and take them anew before the
    model is scored.
    """

    params_type: ClassVar[type[Params]] = FedAdamParams

    def __init__(self, setup: Setup, params: FedAdamParams) -> None:
        super().__init__(setup, params)
        self.adam = params
        self.learned = [name for name in self.weights if not name.endswith(STATISTICS)]
        self.m: Weights = {name: torch.zeros_like(self.weights[name]) for name in self.learned}
        self.v: Weights = {name: torch.full_like(self.weights[name], params.tau**2) for name in self.learned}

    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        """One step of the server's Adam; a round in which nobody answered changes nothing."""
        if self.mean.empty:
            return {}
        old = self.weights
        mean = self.mean.mean(old)
        for name in self.learned:
            mean[name] = adam_step(self.adam, name, old[name], mean[name] - old[name], self.m, self.v)
        self.weights = mean
        return {}

    def models(self, architectures: Collection[Architecture]) -> dict[Architecture, Model]:
        """The model without batch norm's statistics: after Adam those of the devices do not fit it."""
        return without_statistics(super().models(architectures))

    def state(self) -> State:
        """The global weights and both moments."""
        state = super().state()
        state.tensors |= {f"m/{name}": value for name, value in self.m.items()}
        state.tensors |= {f"v/{name}": value for name, value in self.v.items()}
        return state

    def load(self, state: State) -> None:
        """Restore the global weights and both moments."""
        super().load(state)
        self.m = {name: state.tensors[f"m/{name}"] for name in self.learned}
        self.v = {name: state.tensors[f"v/{name}"] for name in self.learned}


def adam_step(params: AdamParams, name: str, value: Tensor, update: Tensor, m: Weights, v: Weights) -> Tensor:
    """One step of the server's Adam on one tensor, whose moments in `m` and `v` it renews; returns the new value."""
    m[name] = params.beta_1 * m[name] + (1 - params.beta_1) * update
    v[name] = params.beta_2 * v[name] + (1 - params.beta_2) * update.square()
    return value + params.eta * m[name] / (v[name].sqrt() + params.tau)
