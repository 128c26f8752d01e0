"""FedAvg (McMahan et al., AISTATS 2017) over unequal devices; its fourth use, devices alone, is `strategies.local`.

all-small: every device trains the narrowest model. all-large: every device trains the whole model whatever its budget,
the upper bound. exclusive: only devices that can afford the whole model take part. affordable: every device trains the
widest model that it can afford; over the members of a family `choice` these are separate federations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from devices.budget import Budget
from models.architecture import Architecture
from strategies.base import Setup
from strategies.submodel import SubModelStrategy, by_exit
from strategies.work import fits


@dataclass(frozen=True)
class FedAvgParams:
    """Who trains what; see the module."""

    use: Literal["all-small", "all-large", "exclusive", "affordable", "local"] = "all-large"


class FedAvg(SubModelStrategy):
    """w <- sum_k (n_k / n) w_k over one architecture (Algorithm 1, FederatedAveraging).

    Devices minimize L = CE(f(x), y) (`client_app.objectives.local_loss`, "cross entropy").
    """

    def __init__(self, setup: Setup, params: FedAvgParams) -> None:
        super().__init__(setup, by_exit(setup.family) if len(setup.family.segments) > 1 else None)
        self.params = params
        self.architecture = self.candidates[-1] if params.use == "all-small" else self.candidates[0]

    def assign(self, device: int, budget: Budget) -> Architecture | None:
        """The one architecture of this use, for every device or for those it fits; under `affordable` the widest."""
        if self.params.use == "affordable":
            return super().assign(device, budget)
        everyone = self.params.use == "all-large" or (
            self.params.use == "all-small" and self.below_smallest == "smallest"
        )
        return self.architecture if everyone or fits(self.cost(self.architecture), budget) else None

    @property
    def least(self) -> Architecture:
        """The one architecture, or the narrowest."""
        return self.smallest if self.params.use == "affordable" else self.architecture

    @property
    def scored_architecture(self) -> Architecture:
        """The one architecture, or the widest."""
        return self.architecture
