"""FedAvg (McMahan et al., AISTATS 2017) over unequal devices.

all-small: every device trains the narrowest model. all-large: every device trains the whole model whatever its budget,
the upper bound. exclusive: only devices that can afford the whole model take part. affordable: every device trains the
widest model that it can afford; over the members of a family `choice` these are separate federations. Devices that
share nothing are the method `local`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from wildflower.devices.budget import Budget
from wildflower.models.architecture import Architecture
from wildflower.strategies.method import ClientStep, Order, P, Setup, Training, Traits
from wildflower.strategies.params import Params
from wildflower.strategies.pricing import fits
from wildflower.strategies.submodel import SubModelMethod, by_exit

# The client step is `wildflower.strategies.method.Training`: devices minimize the task's loss, such as L = CE(f(x), y).


class OneModel(SubModelMethod[P]):
    """All devices train one architecture, by default the whole model whatever their budget.

    Attributes:
        everyone: whether it is given to devices that cannot afford it.
        returns_changes: devices return changes, or more than weights: `both-models` and `norm-bound`, which are about
            weights, do not go with the method.
        only_sgd: the method counts the steps of SGD.
    """

    everyone = True
    returns_changes: ClassVar[bool] = False
    only_sgd: ClassVar[bool] = False

    def __init__(self, setup: Setup, params: P) -> None:
        optimizer, bound = setup.settings.training.optimizer, setup.settings.norm_bound
        if self.only_sgd and optimizer != "sgd":
            raise ValueError(
                f"optimizer = {optimizer!r}: {self.name()} counts the steps of SGD, with or without momentum: set "
                "optimizer = 'sgd'"
            )
        if self.returns_changes and bound:
            raise ValueError(
                f"norm-bound = {bound:g}: it bounds how far weights move, and devices return more than weights under "
                f"{self.name()}: set norm-bound = 0"
            )
        super().__init__(setup, params, by_exit(setup.family) if len(setup.family.segments) > 1 else None)
        self.architecture = self.candidates[0]

    @classmethod
    def check(cls, params: P, *, both_models: bool) -> None:
        """All devices of a round train one model, where they return changes of it."""
        if both_models and cls.returns_changes:
            raise ValueError(f"both-models = True: {cls.name()} puts together changes of one model: leave it false")

    def assign(self, device: int, budget: Budget) -> Architecture | None:
        """The one architecture, for every device or for those that can afford it."""
        return self.architecture if self.everyone or fits(self.cost(self.architecture), budget) else None

    @property
    def smallest_architecture(self) -> Architecture:
        """The one architecture."""
        return self.architecture

    @property
    def scored_architecture(self) -> Architecture:
        """The one architecture."""
        return self.architecture

    @property
    def deliverable(self) -> list[Architecture]:
        """The one architecture, and with `both_models` the smallest: the others are not trained."""
        return list(dict.fromkeys([self.architecture, *(self.candidates[-1:] if self.both_models else [])]))

    def client_step(self, order: Order) -> ClientStep:
        """Plain training, averaged by examples."""
        return Training()


class FedAvgParams(Params):
    """FedAvg's settings."""

    use: Literal["all-large", "all-small", "exclusive", "affordable"] = Field(
        "all-large", description="Who trains what: all-large, all-small, exclusive, affordable"
    )


class FedAvg(OneModel[FedAvgParams]):
    """w <- sum_k (n_k / n) w_k over one architecture (Algorithm 1, FederatedAveraging)."""

    params_type: ClassVar[type[Params]] = FedAvgParams

    def __init__(self, setup: Setup, params: FedAvgParams) -> None:
        super().__init__(setup, params)
        self.architecture = self.candidates[-1] if params.use == "all-small" else self.candidates[0]
        self.everyone = params.use == "all-large" or (params.use == "all-small" and setup.below_smallest == "smallest")

    @classmethod
    def check(cls, params: FedAvgParams, *, both_models: bool) -> None:
        """Nobody trains two models where all train the smallest."""
        if both_models and params.use == "all-small":
            raise ValueError(
                f"both-models = True: with {cls.name()}.use = 'all-small' no device trains two models: leave it"
            )

    @override
    @classmethod
    def traits(cls, params: FedAvgParams) -> Traits:
        return replace(super().traits(params), helps_below_smallest=params.use != "exclusive")

    def assign(self, device: int, budget: Budget) -> Architecture | None:
        """The one architecture of this use; under `affordable` the widest that fits."""
        if self.params.use == "affordable":
            return super(OneModel, self).assign(device, budget)
        return super().assign(device, budget)

    @property
    def smallest_architecture(self) -> Architecture:
        """The one architecture, or the narrowest."""
        return self.candidates[-1] if self.params.use == "affordable" else self.architecture
