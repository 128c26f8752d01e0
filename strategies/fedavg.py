"""FedAvg (McMahan et al., AISTATS 2017) over unequal devices.

all-small: every device trains the narrowest model. all-large: every device trains the whole model whatever its budget,
the upper bound. exclusive: only devices that can afford the whole model take part. affordable: every device trains the
widest model that it can afford; over the members of a family `choice` these are separate federations. Devices that
share nothing are the method `local`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field
from typing_extensions import override

from wildflower.devices.budget import Budget
from wildflower.models.architecture import Architecture
from wildflower.strategies.method import ClientStep, Order, Setup, Training, Traits
from wildflower.strategies.one_architecture import OneArchitecture
from wildflower.strategies.params import Params


class FedAvgParams(Params):
    """FedAvg's settings."""

    use: Literal["all-large", "all-small", "exclusive", "affordable"] = Field(
        "all-large", description="Who trains what: all-large, all-small, exclusive, affordable"
    )


class FedAvg(OneArchitecture[FedAvgParams]):
    """w <- sum_k (n_k / n) w_k over one architecture (Algorithm 1, FederatedAveraging).

    Devices minimize the task's loss, such as L = CE(f(x), y).
    """

    def __init__(self, setup: Setup, params: FedAvgParams) -> None:
        super().__init__(setup, params)
        self.architecture = self.candidates[-1] if params.use == "all-small" else self.candidates[0]
        self.everyone = params.use == "all-large" or (params.use == "all-small" and setup.below_smallest == "smallest")

    @override
    @classmethod
    def traits(cls, params: FedAvgParams) -> Traits:
        alone = f"with {cls.name()}.use = 'all-small' no device trains two models: leave it"
        return replace(
            super().traits(params),
            helps_below_smallest=params.use != "exclusive",
            one_model=alone if params.use == "all-small" else "",
        )

    def assign(self, device: int, budget: Budget) -> Architecture | None:
        """The one architecture of this use; under `affordable` the widest that fits."""
        if self.params.use == "affordable":
            return super(OneArchitecture, self).assign(device, budget)
        return super().assign(device, budget)

    @property
    def smallest_architecture(self) -> Architecture:
        """The one architecture, or the narrowest."""
        return self.candidates[-1] if self.params.use == "affordable" else self.architecture

    @override
    def client_step(self, order: Order) -> ClientStep:
        return Training()
