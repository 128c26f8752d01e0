"""Methods whose devices get a network up to one of its exits, and how a family is cut in depth."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any, ClassVar

from typing_extensions import override

from wildflower.models.architecture import Architecture
from wildflower.models.family import Family
from wildflower.strategies.method import P, Setup, Traits
from wildflower.strategies.submodel import SubModelMethod

EARLY_EXITS = {"early_exits": True}  # by default, of families that can find places for them


class ExitsMethod(SubModelMethod[P]):
    """Devices get the network up to the deepest exit that they can afford."""

    fit_for: ClassVar[Traits] = replace(SubModelMethod.fit_for, takes_tokens=True)

    def __init__(self, setup: Setup, params: P) -> None:
        require_exits(self.name(), setup.family)
        super().__init__(setup, params, self.cuts(setup.family, params))

    @classmethod
    def cuts(cls, family: Family, params: P) -> list[Architecture]:
        """Return the candidates, deepest first."""
        return by_exit(family)

    @override
    @classmethod
    def family_defaults(cls, params: P) -> dict[str, Any]:
        return EARLY_EXITS


def by_exit(family: Family) -> list[Architecture]:
    """The networks up to each exit of a family, deepest first."""
    return [family.up_to(exit) for exit in range(len(family.segments), 0, -1)]


def by_depth(family: Family) -> list[Architecture]:
    """The whole network, and the first two thirds and the first third of the layers of its one stack, deepest first.

    Raises ValueError where the family has no such stack.
    """
    if len(family.stacks) != 1:
        raise ValueError(
            f"{family.name} is not cut in depth: it has {len(family.stacks)} stacks of layers alike, not one"
        )
    [layers] = family.stacks.values()
    counts = sorted({math.ceil(len(layers) * thirds / 3) for thirds in (1, 2, 3)}, reverse=True)
    return [family.first_layers(count) for count in counts]


def require_exits(method: str, family: Family) -> None:
    """Raise ValueError where a method that trains exits is given a family that has one only."""
    if len(family.segments) < 2:
        arguments = {field.name for field in fields(family)}
        if {"early_exits", "keep"} <= arguments:
            how = "name parts of the module in family-arguments, such as \"exits = ['layer1', 'layer2']\""
        elif "early_exits" in arguments:
            how = "set family-arguments, such as 'depths = [2, 4, 6], early_exits = true'"
        elif "exits" in arguments:
            how = "set family-arguments, such as 'exits = [1, 2, 3]'"
        else:
            how = "take a family with the argument `exits` or `early_exits`"
        raise ValueError(f"{method} needs a family with several exits, {family.name} has one: {how} (docs/families.md)")


def require_one_exit(method: str, family: Family) -> None:
    """Raise ValueError where a method whose types of models have one head each is given a family with several exits."""
    if len(family.segments) > 1:
        raise ValueError(
            f"{method} gives every type of model one head, and {family.name} has several exits: leave out exits or "
            "early_exits"
        )
