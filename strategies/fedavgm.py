"""FedAvgM (Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution", 2019): server momentum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from pydantic import Field
from typing_extensions import override

from wildflower.messages.tensor_sets import Weights
from wildflower.strategies.method import ClientStep, Order, Setup, Trained, Training
from wildflower.strategies.one_architecture import OneArchitecture
from wildflower.strategies.params import Decay, Params
from wildflower.strategies.submodel import learned, zeros


class FedAvgMParams(Params):
    """FedAvgM's settings."""

    beta: Decay = Field(0.9, description="Share of the server's momentum that is kept in a round")


class FedAvgM(OneArchitecture[FedAvgMParams]):
    """v <- beta v + (w_t - mean_k w_k);  w_{t+1} = w_t - v, the mean being weighted by examples.

    With beta = 0 it is FedAvg. Every device trains the whole model. Batch norm's running statistics are no
    parameters: devices begin from the mean of theirs, and take them anew before the model is scored.
    """

    ends_at_mean: ClassVar[bool] = False

    def __init__(self, setup: Setup, params: FedAvgMParams) -> None:
        super().__init__(setup, params)
        self.v = zeros(learned(self.weights))

    @override
    def client_step(self, order: Order) -> ClientStep:
        return Training()

    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        """One step with momentum; a round in which nobody answered changes nothing."""
        if self.mean.empty:
            return {}
        mean = self.mean.mean(self.weights)
        self.weights = momentum_step(self.v, self.weights, mean, self.params.beta)
        return {}

    @override
    def beside_weights(self) -> Mapping[str, Weights]:
        return {"v": self.v}


def momentum_step(v: Weights, old: Weights, mean: Weights, beta: float) -> Weights:
    """Return the weights after a step with momentum, and renew `v`; tensors that have no momentum become the mean."""
    for name in v:
        v[name] = beta * v[name] + (old[name] - mean[name])
    return mean | {name: old[name] - v[name] for name in v}
