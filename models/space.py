"""Search spaces: which architectures of a family a search may give to a device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

import numpy as np

from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.group_family import GroupFamily, cut_by_groups
from wildflower.plugins.nearest import nearest_part


@dataclass(frozen=True)
class Choice:
    """One decision about channels: the share of each of `groups` that is kept, the same for all of them.

    `name` is that of a removable layer, whose groups are decided together, or that of a single group. `shares` ascend
    within [0, 1]; 0 removes the layer.
    """

    name: str
    groups: tuple[str, ...]
    shares: tuple[float, ...]


@dataclass(frozen=True)
class KernelChoice:
    """One decision about an elastic kernel: its side; `sides` ascend."""

    name: str
    sides: tuple[int, ...]


@dataclass(frozen=True)
class Floor:
    """At least `least` of the removable layers `layers` stay; `name` is that of their stack."""

    name: str
    layers: tuple[str, ...]
    minimum: int


@dataclass(frozen=True)
class Space:
    """A family and the decisions that lead to one of its architectures: hashable, equal for equal decisions.

    Decisions are numbered, `choices` first and `kernels` behind them. A *pick* is the number of the option taken in one
    decision. Shares that keep the same channels (1/16 and 1/8 of six channels both keep one) are one option, so that
    different picks are different architectures. `floors` say how many layers stay; what they forbid is no part of the
    space. Source of per-layer shares with 0: section 4 of "Revisiting
    System-Heterogeneous Federated Learning through Dynamic Model Search".
    """

    family: GroupFamily
    choices: tuple[Choice, ...]
    kernels: tuple[KernelChoice, ...] = ()
    floors: tuple[Floor, ...] = ()

    @classmethod
    def of(
        cls,
        family: Family,
        shares: Sequence[float],
        overrides: Mapping[str, Sequence[float]] | None = None,
        min_blocks: int = 1,
    ) -> Space:
        """Return the space in which every layer has the same shares.

        Every removable layer is one choice over all of `shares`, every other group one over those above 0. Elastic
        kernels may have any odd side from 3 up.

        Args:
            family: Whose architectures they are.
            shares: Kept shares of the channels; 0 removes a layer.
            overrides: Name of a removable layer or of another group -> its shares instead; name of a kernel followed by
                ".kernel" -> its sides instead. A name with `*` stands for all that match it and have no entry under
                their own name.
            min_blocks: How many blocks stay of every stack of the family: of each stage of a ResNet, of a
                transformer's encoder.

        Raises:
            ValueError: what is impossible, and of which layer.
        """
        family = cut_by_groups(family, "a search space")
        inside = {group for groups in family.removable.values() for group in groups}
        layers = {group: (group,) for group in family.groups if group not in inside} | dict(family.removable)
        sides = {f"{kernel}.kernel": kernel for kernel in family.kernels}
        overrides = _by_name(overrides or {}, [*layers, *sides], family)
        # In the order of the groups, so that a space reads like its family.
        first = {group: position for position, group in enumerate(family.groups)}
        choices = []
        for name, groups in sorted(layers.items(), key=lambda layer: first[layer[1][0]]):
            common = [share for share in shares if share != 0 or name in family.removable]
            choices.append(Choice(name, tuple(groups), tuple(overrides.get(name, common))))
        kernels = [
            KernelChoice(kernel, tuple(_side(kernel, s) for s in overrides.get(name, range(3, full + 1, 2))))
            for (name, kernel), full in zip(sides.items(), family.kernels.values(), strict=True)
        ]
        space = cls(family, tuple(choices), tuple(kernels), _floors(family, min_blocks))
        for choice in space.choices:
            if choice.name in overrides:
                _check_distinct(choice, family)
        return space

    def __post_init__(self) -> None:
        family = self.family
        if len(family.segments) > 1:
            raise ValueError(
                f"space: {family.name} has {len(family.segments)} exits, and a search chooses layers of a network with "
                "one: leave `exits` out of its arguments"
            )
        for choice in self.choices:
            self._check(choice)
        decided = [group for choice in self.choices for group in choice.groups]
        if sorted(decided) != sorted(family.groups):
            missing = [group for group in family.groups if group not in decided]
            twice = sorted({group for group in decided if decided.count(group) > 1})
            raise ValueError(
                f"space: every group of {family.name} needs exactly one choice; without: {missing}, twice: {twice}"
            )
        if tuple(choice.name for choice in self.kernels) != tuple(family.kernels):
            raise ValueError(f"space: the kernels of {family.name} are {list(family.kernels)}, in this order")
        for kernel in self.kernels:
            if not kernel.sides or list(kernel.sides) != sorted(set(kernel.sides)):
                raise ValueError(f"space: sides of kernel {kernel.name} must ascend, not {list(kernel.sides)}")
            full = family.kernels[kernel.name]
            if any(side % 2 == 0 or not 3 <= side <= full for side in kernel.sides):
                raise ValueError(
                    f"space: sides of kernel {kernel.name} are odd and 3 to {full}, not {list(kernel.sides)}"
                )
        for floor, decisions in self.floor_decisions.items():
            able = sum(any(self.options[decision][-1]) for decision in decisions)
            if able < floor.minimum:
                raise ValueError(
                    f"space: {floor.minimum} of the removable layers of {floor.name} must stay, but the shares of only "
                    f"{able} are above 0"
                )
        for arch in (self.smallest(), self.largest()):
            family.validate(arch)

    def _check(self, choice: Choice) -> None:
        removable = self.family.removable
        for group in choice.groups:
            if group not in self.family.groups:
                raise ValueError(
                    f"space: choice {choice.name}: {self.family.name} has no group {group!r}; "
                    f"{nearest_part(group, self.family.groups)}"
                )
        for share in choice.shares:
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
                raise ValueError(f"space: shares of {choice.name} lie in [0, 1], not {share!r}")
            for group in choice.groups:
                full = self.family.groups[group]
                if share > 0 and kept(share, full) == 0:
                    raise ValueError(
                        f"space: share {share!r} of {choice.name} keeps none of the {full} channels of {group}: at "
                        f"least {1 / full:.3g}" + (", or 0" if choice.name in removable else "")
                    )
        twice = sorted({share for share in choice.shares if choice.shares.count(share) > 1})
        if twice:
            raise ValueError(f"space: share {twice[0]!r} of {choice.name} is listed twice: leave one out")
        if not choice.shares or list(choice.shares) != sorted(choice.shares):
            raise ValueError(
                f"space: shares of {choice.name} must ascend and be at least one, not {list(choice.shares)}"
            )
        if choice.shares[0] == 0 and choice.name not in removable:
            raise ValueError(
                f"space: share 0 of {choice.name}: what follows needs this layer; layers that may be left out: "
                f"{', '.join(removable) or 'none'}"
            )
        if choice.name in removable and set(choice.groups) != set(removable[choice.name]):
            raise ValueError(
                f"space: choice {choice.name} must decide {', '.join(removable[choice.name])} together, "
                f"not {', '.join(choice.groups)}"
            )

    @cached_property
    def options(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Return the options of every decision, ascending: kept channels of the choice's groups, or a kernel's side."""
        full = self.family.groups
        widths = (
            tuple(dict.fromkeys(tuple(kept(share, full[group]) for group in choice.groups) for share in choice.shares))
            for choice in self.choices
        )
        return (*widths, *(tuple((side,) for side in kernel.sides) for kernel in self.kernels))

    @cached_property
    def floor_decisions(self) -> dict[Floor, tuple[int, ...]]:
        """Return the numbers of the decisions about the layers of every floor."""
        numbers = {choice.name: number for number, choice in enumerate(self.choices)}
        return {floor: tuple(numbers[layer] for layer in floor.layers) for floor in self.floors}

    @property
    def size(self) -> int:
        """Return the number of architectures."""
        bound = {decision for decisions in self.floor_decisions.values() for decision in decisions}
        size = math.prod(len(options) for decision, options in enumerate(self.options) if decision not in bound)
        for floor, decisions in self.floor_decisions.items():
            ways = {0: 1}  # layers that stay -> picks of the layers looked at so far
            for decision in decisions:
                staying = sum(any(option) for option in self.options[decision])
                leaving = len(self.options[decision]) - staying
                ways = {
                    stay: ways.get(stay, 0) * leaving + ways.get(stay - 1, 0) * staying for stay in range(len(ways) + 1)
                }
            size *= sum(count for stay, count in ways.items() if stay >= floor.minimum)
        return size

    def architecture(self, picks: Sequence[int]) -> Architecture:
        """Return the architecture of one pick per decision; ValueError for picks that are none."""
        if len(picks) != len(self.options):
            raise ValueError(f"space: {len(picks)} picks, but there are {len(self.options)} decisions")
        values = []
        for decision, (pick, options) in enumerate(zip(picks, self.options, strict=True)):
            if not 0 <= pick < len(options):
                name = [*(c.name for c in self.choices), *(k.name for k in self.kernels)][decision]
                raise ValueError(f"space: pick of {name} must be 0 to {len(options) - 1}, not {pick}")
            values.append(options[pick])
        for floor, decisions in self.floor_decisions.items():
            if (stay := self._staying(picks, decisions)) < floor.minimum:
                raise ValueError(
                    f"space: {floor.minimum} of the removable layers of {floor.name} must stay, these picks keep {stay}"
                )
        widths = {
            group: width
            for choice, kept_widths in zip(self.choices, values, strict=False)
            for group, width in zip(choice.groups, kept_widths, strict=True)
        }
        return Architecture(
            tuple(widths[group] for group in self.family.groups), tuple(side for (side,) in values[len(self.choices) :])
        )

    def keeps_enough(self, picks: Sequence[int]) -> bool:
        """Say whether as many layers stay as the floors say."""
        return all(self._staying(picks, found) >= floor.minimum for floor, found in self.floor_decisions.items())

    def allows(self, architecture: Architecture) -> bool:
        """Say whether an architecture is one of the family, and as many of its layers stay as the floors say.

        What two of the space have in common may not be allowed: if each keeps another one of two blocks, none is left.
        """
        try:
            self.family.validate(architecture)
        except ValueError:
            return False
        widths = dict(zip(self.family.groups, architecture.widths, strict=True))
        removable = self.family.removable
        return all(
            sum(any(widths[group] for group in removable[layer]) for layer in floor.layers) >= floor.minimum
            for floor in self.floors
        )

    def _staying(self, picks: Sequence[int], decisions: Sequence[int]) -> int:
        return sum(any(self.options[decision][picks[decision]]) for decision in decisions)

    def smallest(self) -> Architecture:
        """Return the architecture of `smallest_picks`."""
        return self.architecture(self.smallest_picks())

    def smallest_picks(self) -> list[int]:
        """Return all first options, but for layers that must stay: those of fewest channels do."""
        picks = [0] * len(self.options)
        for floor, decisions in self.floor_decisions.items():
            leaving = [decision for decision in decisions if not any(self.options[decision][0])]
            lacking = floor.minimum - (len(decisions) - len(leaving))
            able = sorted((d for d in leaving if len(self.options[d]) > 1), key=lambda d: sum(self.options[d][1]))
            for decision in able[: max(0, lacking)]:
                picks[decision] = 1
        return picks

    def largest(self) -> Architecture:
        """Return the architecture of all last options."""
        return self.architecture([len(options) - 1 for options in self.options])

    def canonical(self, picks: Sequence[int]) -> tuple[int, ...]:
        """Return the picks themselves: different ones are different architectures."""
        return tuple(picks)

    def sample(self, rng: np.random.Generator) -> Architecture:
        """Draw an architecture."""
        return self.architecture(self.draw(rng))

    def draw(self, rng: np.random.Generator) -> tuple[int, ...]:
        """Draw every pick on its own, all options alike; of a stack that lacks layers, random ones are put back."""
        picks = [int(rng.integers(len(options))) for options in self.options]
        for floor, decisions in self.floor_decisions.items():
            leaving = [decision for decision in decisions if not any(self.options[decision][picks[decision]])]
            lacking = floor.minimum - (len(decisions) - len(leaving))
            if lacking > 0:
                able = [decision for decision in leaving if len(self.options[decision]) > 1]
                for decision in rng.choice(able, lacking, replace=False):
                    picks[decision] = int(rng.integers(1, len(self.options[decision])))
        return tuple(picks)


def kept(share: float, full: int) -> int:
    """Return the channels that a share keeps: ceil(share * full), without a hair's breadth of rounding error."""
    return math.ceil(round(share * full, 9))


def _by_name(
    overrides: Mapping[str, Sequence[float]], names: Sequence[str], family: Family
) -> dict[str, Sequence[float]]:
    """Overrides without `*`: each for one choice."""
    found: dict[str, Sequence[float]] = {}
    by: dict[str, str] = {}
    for entry, values in overrides.items():
        matching = [name for name in names if fnmatchcase(name, entry)] if "*" in entry else [entry]
        if not matching or matching[0] not in names:
            raise ValueError(f"space: {family.name} has no choice named {entry!r}; {nearest_part(entry, names)}")
        for name in matching:
            if "*" in entry and name in overrides:
                continue
            if name in by:
                raise ValueError(f"space: both {by[name]!r} and {entry!r} stand for {name}: only one of them may")
            found[name], by[name] = values, entry
    return found


def _check_distinct(choice: Choice, family: GroupFamily) -> None:
    """Raise ValueError where two shares that were given for a layer by its name keep the same channels of it."""
    sizes = [family.groups[group] for group in choice.groups]
    by_channels: dict[tuple[int, ...], float] = {}
    for share in choice.shares:
        channels = tuple(kept(share, full) for full in sizes)
        if channels in by_channels:
            raise ValueError(
                f"space: shares {by_channels[channels]!r} and {share!r} of {choice.name} both keep "
                f"{' and '.join(map(str, channels))} of {' and '.join(map(str, sizes))} channels: leave one out"
            )
        by_channels[channels] = share


def _floors(family: GroupFamily, min_blocks: int) -> tuple[Floor, ...]:
    """Return what `min_blocks` means for each stack of a family, beside the blocks that always stay."""
    if min_blocks < 1:
        raise ValueError(f"space: at least 1 block of a stack stays, not {min_blocks}")
    if min_blocks > 1 and not (family.removable and family.stacks):
        raise ValueError(f"space: {family.name} has no blocks that may be left out, so {min_blocks} cannot be said")
    floors = []
    for name, blocks in family.stacks.items():
        if min_blocks > len(blocks):
            raise ValueError(
                f"space: {min_blocks} blocks of every stack are to stay, but {name} of {family.name} has "
                f"{len(blocks)} only"
            )
        layers = tuple(block for block in blocks if block in family.removable)
        minimum = min_blocks - (len(blocks) - len(layers))
        if minimum > 0:
            floors.append(Floor(name, layers, minimum))
    return tuple(floors)


def _side(kernel: str, side: float) -> int:
    if isinstance(side, bool) or not math.isfinite(side) or side != int(side):
        raise ValueError(f"space: sides of kernel {kernel} must be whole numbers, not {side!r}")
    return int(side)
