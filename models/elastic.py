"""Once-for-all spaces (Cai et al. 2020): supernets whose sub-networks are named by depths, ratios, widths and kernels.

A family of this kind says which decisions there are. Its space draws and counts the architectures that they lead to,
for the training of a supernet and for searches.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from wildflower.models.architecture import Architecture
from wildflower.models.block_family import ImageFamily
from wildflower.plugins.nearest import nearest_part

MIN_SIDE = 4
"""Positions to a side that the last layers have at least, where the input has them."""


@dataclass(frozen=True)
class Decision:
    """One decision about a sub-network; `options` ascend.

    `stage` is the decision on the depth of the stage that the decided block is in, and `place` the block's number
    there: the decision means nothing where the depth is not above `place`. They are None and 0 where it always does.
    """

    name: str
    options: tuple[float, ...]
    stage: str | None = None
    place: int = 0


@dataclass(frozen=True)
class ElasticFamily(ImageFamily):
    """A supernet with a space of sub-networks.

    The image is halved as often as leaves its last layers `MIN_SIDE` positions to a side, at most as often as the
    published network halves 224x224; the earliest strides are dropped first, as is usual for small images. `halvings`
    sets another number.
    """

    input_shape: tuple[int, ...] = (3, 32, 32)
    halvings: int | None = None

    def __post_init__(self) -> None:
        most = sum(stride == 2 for stride in self.published_strides)
        if self.halvings is not None and (
            isinstance(self.halvings, bool) or not isinstance(self.halvings, int) or not 0 <= self.halvings <= most
        ):
            raise ValueError(f"{self.name}: halvings must be 0 to {most}, not {self.halvings!r}")
        super().__post_init__()

    @property
    @abstractmethod
    def published_strides(self) -> tuple[int, ...]:
        """Return the strides of the published network, 1 or 2, in order of computation."""

    @property
    @abstractmethod
    def decisions(self) -> tuple[Decision, ...]:
        """Return the decisions that lead to a sub-network."""

    @abstractmethod
    def chosen(self, values: Mapping[str, float]) -> Architecture:
        """Return the architecture of one value per decision, by name; what means nothing is not looked at."""

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Return the strides that are left for this input."""
        halvings = self.halvings
        if halvings is None:
            side, halvings = min(self.input_shape[1:]), 0
            while -(-side // 2) >= MIN_SIDE:
                side, halvings = -(-side // 2), halvings + 1
        dropped = max(0, sum(stride == 2 for stride in self.published_strides) - halvings)
        found = []
        for stride in self.published_strides:
            found.append(1 if stride == 2 and dropped else stride)
            dropped -= stride == 2 and dropped > 0
        return tuple(found)

    def _check_options(self, what: str, options: object, least: float, most: float, *, whole: bool) -> None:
        """Raise ValueError unless an argument of the family is an ascending list of numbers within bounds."""
        if (
            not isinstance(options, tuple)
            or not options
            or any(isinstance(o, bool) or not isinstance(o, int if whole else int | float) for o in options)
            or list(options) != sorted(set(options))
            or not least <= options[0] <= options[-1] <= most
        ):
            raise ValueError(
                f"{self.name}: {what} must be ascending {'whole ' if whole else ''}numbers from {least} to {most}, "
                f"not {options!r}"
            )


@dataclass(frozen=True)
class ElasticSpace:
    """The sub-networks of an elastic family, decision by decision.

    It answers what searches ask of `wildflower.models.space.Space`. A *pick* is the number of the option taken in one
    decision. Decisions about a block beyond the depth of its stage mean nothing: picks that differ only there are one
    architecture, which is counted, drawn and listed once.

    A part of the space has fewer options: `of(family, {"stage1.depth": (2,)})`.
    """

    family: ElasticFamily
    decisions: tuple[Decision, ...]

    @classmethod
    def of(cls, family: ElasticFamily, options: Mapping[str, Sequence[float]] | None = None) -> ElasticSpace:
        """Return the space of a family, with some of the options only where they are given by the decision's name.

        Raises ValueError for an unknown decision, and for options that the family does not have.
        """
        options, known = options or {}, {decision.name: decision for decision in family.decisions}
        for name, given in options.items():
            if name not in known:
                raise ValueError(f"space: {family.name} has no decision {name!r}; {nearest_part(name, known)}")
            if not given or list(given) != [option for option in known[name].options if option in given]:
                raise ValueError(
                    f"space: options of {name} must ascend and be among {known[name].options}, not {given!r}"
                )
        return cls(
            family,
            tuple(Decision(d.name, tuple(options.get(d.name, d.options)), d.stage, d.place) for d in family.decisions),
        )

    @cached_property
    def options(self) -> tuple[tuple[Any, ...], ...]:
        """Return the options of every decision, ascending."""
        return tuple(decision.options for decision in self.decisions)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {decision.name: number for number, decision in enumerate(self.decisions)}

    @property
    def floors(self) -> tuple[()]:
        """None: how many blocks stay is a decision here."""
        return ()

    @property
    def floor_decisions(self) -> dict[Any, tuple[int, ...]]:
        """None."""
        return {}

    def keeps_enough(self, picks: Sequence[int]) -> bool:
        """Say whether as many layers stay as must: always, since how many is a decision."""
        return True

    def canonical(self, picks: Sequence[int]) -> tuple[int, ...]:
        """Return the picks with 0 in every decision that means nothing: the same for the same architecture."""
        found = list(picks)
        for number in self.beyond(picks):
            found[number] = 0
        return tuple(found)

    def beyond(self, picks: Sequence[int]) -> list[int]:
        """Return the numbers of the decisions that mean nothing: about blocks that these picks leave out."""
        found = []
        for stage, inside in self._inside:
            depth = self.options[stage][picks[stage]]
            found += [number for number, place in inside if depth <= place]
        return found

    @cached_property
    def _inside(self) -> list[tuple[int, list[tuple[int, int]]]]:
        """Of every stage the number of its depth's decision, and numbers and places of the decisions inside of it."""
        found: dict[int, list[tuple[int, int]]] = {}
        for number, decision in enumerate(self.decisions):
            if decision.stage is not None:
                found.setdefault(self._numbers[decision.stage], []).append((number, decision.place))
        return list(found.items())

    @property
    def size(self) -> int:
        """Return the number of architectures."""
        sizes = 1
        by_stage: dict[str, list[Decision]] = {}
        for decision in self.decisions:
            if decision.stage is None:
                by_stage.setdefault(decision.name, [])
            else:
                by_stage.setdefault(decision.stage, []).append(decision)
        for name, inside in by_stage.items():
            sizes *= sum(
                math.prod(len(decision.options) for decision in inside if depth > decision.place)
                for depth in self.options[self._numbers[name]]
            )
        return sizes

    def architecture(self, picks: Sequence[int]) -> Architecture:
        """Return the architecture of one pick per decision; ValueError for picks that are none."""
        if len(picks) != len(self.options):
            raise ValueError(f"space: {len(picks)} picks, but there are {len(self.options)} decisions")
        values = {}
        for decision, pick in zip(self.decisions, picks, strict=True):
            if not 0 <= pick < len(decision.options):
                raise ValueError(f"space: pick of {decision.name} must be 0 to {len(decision.options) - 1}, not {pick}")
            values[decision.name] = decision.options[pick]
        return self.family.chosen(values)

    def smallest(self) -> Architecture:
        """Return the architecture of all first options."""
        return self.architecture(self.smallest_picks())

    def smallest_picks(self) -> list[int]:
        """Return all first options."""
        return [0] * len(self.options)

    def largest(self) -> Architecture:
        """Return the architecture of all last options."""
        return self.architecture([len(options) - 1 for options in self.options])

    def draw(self, rng: np.random.Generator) -> tuple[int, ...]:
        """Draw the picks of every decision on their own, all options alike, as once-for-all does."""
        return self.canonical([int(rng.integers(len(options))) for options in self.options])

    def sample(self, rng: np.random.Generator) -> Architecture:
        """Draw an architecture."""
        return self.architecture(self.draw(rng))


def divisible(channels: float) -> int:
    """Round channels to a multiple of 8, to the next one where 10 % would be lost.

    Source: the code of MobileNetV2 (Sandler et al. 2018), which MobileNetV3 and once-for-all share.
    """
    found = max(8, int(channels + 4) // 8 * 8)
    return found + 8 if found < 0.9 * channels else found
