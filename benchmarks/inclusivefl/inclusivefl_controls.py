"""InclusiveFL's controls and baselines, as plug-ins: `strategy = "inclusivefl_controls:SharesAll"`.

Experiments of this folder find the file beside them. They have the settings of InclusiveFL or of FedAdam, as
`inclusivefl-controls.KEY`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from typing_extensions import override

from wildflower.models.architecture import Architecture
from wildflower.strategies.fedadam import FedAdam, FedAdamParams
from wildflower.strategies.inclusivefl import InclusiveFL, InclusiveFLParams
from wildflower.strategies.method import ClientStep, Order, Setup, Traits
from wildflower.strategies.types_by_depth import Layers


class SharesAll(InclusiveFL):
    """Types share their last layers and, if there is one per type, their heads as well. This is ours."""

    def __init__(self, setup: Setup, params: InclusiveFLParams) -> None:
        super().__init__(setup, params)
        if self.shares_heads:
            check_heads_alike(self.family.name, self.layers.values())

    @property
    def shares_heads(self) -> bool:
        """Whether heads are the types', and not the devices'."""
        return self.params.head == "type"

    @override
    def sharing(self, number: int) -> list[Architecture]:
        return [a for a, layers in self.layers.items() if len(layers.blocks) >= number]

    @override
    def share(self, users: Mapping[Architecture, int]) -> None:
        super().share(users)
        if self.shares_heads:
            for name in self.layers[self.candidates[0]].head:
                self.to_mean(dict.fromkeys(self.candidates, name), users)


class RatesByType(InclusiveFL):
    """Types of two to six layers train at a rate of their own, as the published code has it: here 2.5 times, 1, 1."""

    @override
    def client_step(self, order: Order) -> ClientStep:
        smallest = order.architecture == self.candidates[-1]
        return super().client_step(order).model_copy(update={"rate": 2.5 if smallest else 1.0})


def check_heads_alike(family: str, types: Iterable[Layers]) -> None:
    """Raise ValueError if the heads of types have tensors of different names."""
    if len({frozenset(layers.head) for layers in types}) > 1:
        raise ValueError(f"SharesAll shares heads, but those of {family}'s types have tensors of other names")


class ExclusiveAdam(FedAdam):
    """FedAdam among the devices that can afford the whole model."""

    everyone = False

    @override
    @classmethod
    def traits(cls, params: FedAdamParams) -> Traits:
        return replace(super().traits(params), helps_below_smallest=False)


class SmallestAdam(FedAdam):
    """FedAdam whose devices train the smallest model."""

    def __init__(self, setup: Setup, params: FedAdamParams) -> None:
        super().__init__(setup, params)
        self.architecture = self.candidates[-1]
        self.everyone = setup.below_smallest == "smallest"
