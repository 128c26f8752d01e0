"""One model for all: FedAvg of the widest network that all devices can train, with momentum on the server.

The number to beat, by a method that gives devices of different sizes different models. This one is of this project; its
momentum is FedAvgM's (Hsu, Qi and Brown 2019).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pydantic import Field
from typing_extensions import override

from wildflower.messages.tensor_sets import Weights
from wildflower.plugins.flower_log import log
from wildflower.strategies.fedavgm import momentum_step
from wildflower.strategies.fitted_levels import FittedMethod, fitted_levels
from wildflower.strategies.level_options import sizes_between
from wildflower.strategies.method import ClientStep, Order, Setup, Trained, Training
from wildflower.strategies.params import Decay, Params
from wildflower.strategies.pricing import Means
from wildflower.strategies.submodel import learned, zeros


class OneModelParams(Params):
    """Settings of one model for all."""

    momentum: Decay = Field(0.5, description="Share of its last step that the server adds to the next one")


class OneModel(FittedMethod[OneModelParams]):
    """v <- beta v + (w_t - mean_k w_k);  w_{t+1} = w_t - v, the mean being over the round's devices, unweighted.

    Devices minimize the task's loss, such as L = CE(f(x), y). beta is `momentum`. The network is chosen once, in the
    first round: as many devices as possible afford it, and of such networks it is the widest. Batch norm is HeteroFL's,
    so that statistics are taken for the model that is scored.
    """

    def __init__(self, setup: Setup, params: OneModelParams) -> None:
        super().__init__(setup, params)
        self.sizes = sizes_between(self.family, setup.widths, depths=())
        self.v = zeros(learned(self.weights))

    @override
    def survey(self, fleet: Iterable[Means]) -> None:
        found = fitted_levels(self.family, self.sizes, list(fleet), 1, lambda size, _: self.cost(size))
        if not found:
            log.warning("One model: no device affords any network now, so that it is the smallest of `widths`")
        self.candidates = found or [min(self.sizes, key=lambda size: self.cost(size).parameters)]
        log.info("One model: all devices train %s", self.describe(self.candidates[0]))

    @override
    def client_step(self, order: Order) -> ClientStep:
        return Training(weighting="uniform")

    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        """Take one step with momentum; a round in which nobody answered changes nothing."""
        if self.mean.empty:
            return {}
        self.weights = momentum_step(self.v, self.weights, self.mean.mean(self.weights), self.params.momentum)
        return {}

    @override
    def beside_weights(self) -> Mapping[str, Weights]:
        return {"v": self.v}
