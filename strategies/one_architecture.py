"""The base of methods under which all devices train one architecture, by default the whole model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import ClassVar

from typing_extensions import override

from wildflower.devices.budget import Budget
from wildflower.models.architecture import Architecture
from wildflower.models.cost import Cost
from wildflower.strategies.contract_values import Setup
from wildflower.strategies.exits import by_exit
from wildflower.strategies.method import Model, P, Traits
from wildflower.strategies.pricing import fits, with_parameter_copies
from wildflower.strategies.submodel import SubModelMethod, without_statistics


class OneArchitecture(SubModelMethod[P]):
    """All devices train the same architecture, by default the whole model whatever their budget.

    Attributes:
        everyone: whether it is given to devices that cannot afford it.
        returns_changes: devices return changes, or more than weights: `both-models` and `aggregation.norm-bound`, which
            are about weights, do not go with the method.
        only_sgd: the method counts the steps of SGD.
        parameter_copies: tensors as large as all parameters that the client step holds beside plain training.
        ends_at_mean: the next model is the mean of the devices'. After another step, such as Adam's, the mean of their
            batch norm statistics does not fit the model, and devices take them anew before it is scored.
    """

    everyone = True
    returns_changes: ClassVar[bool] = False
    only_sgd: ClassVar[bool] = False
    parameter_copies: ClassVar[int] = 0
    ends_at_mean: ClassVar[bool] = True

    def __init__(self, setup: Setup, params: P) -> None:
        optimizer, bound = setup.settings.training.optimizer, setup.settings.norm_bound
        if self.only_sgd and optimizer != "sgd":
            raise ValueError(
                f"optimizer = {optimizer!r}: {self.name()} counts the steps of SGD, with or without momentum: set "
                "optimizer = 'sgd'"
            )
        if self.returns_changes and bound:
            raise ValueError(
                f"aggregation.norm-bound = {bound:g}: it bounds how far weights move, and devices return more than "
                f"weights under {self.name()}: set aggregation.norm-bound = 0"
            )
        super().__init__(setup, params, by_exit(setup.family) if len(setup.family.segments) > 1 else None)
        self.architecture = self.candidates[0]

    @override
    @classmethod
    def traits(cls, params: P) -> Traits:
        why = f"{cls.name()} puts together changes of one model: leave it false" if cls.returns_changes else ""
        return replace(super().traits(params), one_model=why or cls.fit_for.one_model)

    def assign(self, device: int, budget: Budget) -> Architecture | None:
        """Return the one architecture, for every device or for those that can afford it."""
        return self.architecture if self.everyone or fits(self.cost(self.architecture), budget) else None

    @override
    @property
    def smallest_architecture(self) -> Architecture:
        return self.architecture

    @override
    @property
    def scored_architecture(self) -> Architecture:
        return self.architecture

    @override
    def training_cost(self, architecture: Architecture) -> Cost:
        return with_parameter_copies(super().training_cost(architecture), self.parameter_copies)

    @override
    def models(self, architectures: Collection[Architecture]) -> dict[Architecture, Model]:
        found = super().models(architectures)
        return found if self.ends_at_mean else without_statistics(found)

    @property
    def deliverable(self) -> list[Architecture]:
        """The one architecture, and with `both_models` the smallest: the others are not trained."""
        return list(dict.fromkeys([self.architecture, *(self.candidates[-1:] if self.both_models else [])]))
