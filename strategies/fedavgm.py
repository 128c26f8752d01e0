"""FedAvgM (Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution", 2019): server momentum."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import Field

from wildflower.messages.tensor_sets import STATISTICS, Weights
from wildflower.models.architecture import Architecture
from wildflower.strategies.fedavg import OneModel
from wildflower.strategies.method import Model, Setup, State, Trained
from wildflower.strategies.params import Decay, Params, PositiveRate
from wildflower.strategies.submodel import without_statistics

# The client step is `wildflower.strategies.method.Training`: devices minimize the task's loss, such as L = CE(f(x), y).


class FedAvgMParams(Params):
    """FedAvgM's settings."""

    beta: Decay = Field(0.9, description="Share of the server's momentum that is kept in a round")
    eta: PositiveRate = Field(1.0, description="Learning rate of the server")


class FedAvgM(OneModel[FedAvgMParams]):
    """v <- beta v + (w_t - mean_k w_k);  w_{t+1} = w_t - eta v, the mean being weighted by examples.

    With beta = 0 and eta = 1 it is FedAvg. Every device trains the whole model. Batch norm's running statistics are no
    parameters: devices begin from the mean of theirs, and take them anew before the model is scored.
    """

    params_type: ClassVar[type[Params]] = FedAvgMParams

    def __init__(self, setup: Setup, params: FedAvgMParams) -> None:
        super().__init__(setup, params)
        learned = [name for name in self.weights if not name.endswith(STATISTICS)]
        self.v: Weights = {name: torch.zeros_like(self.weights[name]) for name in learned}

    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        """One step with momentum; a round in which nobody answered changes nothing."""
        if self.mean.empty:
            return {}
        old = self.weights
        new = self.mean.mean(old)
        for name in self.v:
            self.v[name] = self.params.beta * self.v[name] + (old[name] - new[name])
            new[name] = old[name] - self.params.eta * self.v[name]
        self.weights = new
        return {}

    def models(self, architectures: Collection[Architecture]) -> dict[Architecture, Model]:
        """The model without batch norm's statistics: after momentum those of the devices do not fit it."""
        return without_statistics(super().models(architectures))

    def state(self) -> State:
        """The global weights and the momentum."""
        state = super().state()
        state.tensors |= {f"v/{name}": value for name, value in self.v.items()}
        return state

    def load(self, state: State) -> None:
        """Restore the global weights and the momentum."""
        super().load(state)
        self.v = {name: state.tensors[f"v/{name}"] for name in self.v}
