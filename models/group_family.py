"""Families that are cut by channel groups: what an architecture of theirs is, and which there are."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from wildflower.models.architecture import Architecture
from wildflower.models.base import Family, check_cut, check_flag, check_norm, is_count
from wildflower.models.layers import Channels
from wildflower.models.placement import Placement, Select, kept_channels, leading, place
from wildflower.plugins.nearest import nearest_part


@dataclass(frozen=True)
class GroupFamily(Family):
    """A family of which an architecture keeps a number of channels of every group, and may leave out some layers.

    norm: batch norms have running statistics ("batch"), or none ("static").
    scaler: whether results of cut layers are divided by the kept share of their channels (HeteroFL).
    """

    norm: str = "batch"
    scaler: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_norm(self.name, self.norm)
        check_flag(self.name, "scaler", self.scaler)

    @cached_property
    def removable(self) -> Mapping[str, tuple[str, ...]]:
        """Layers that an architecture may leave out, in order: name -> the groups inside, which are then all 0.

        Of a family with several exits these are the segments behind the first; what stays must end at an exit.
        """
        return dict(list(self.segments.items())[1:])

    def architecture(
        self, widths: Mapping[str, int] | None = None, without: Collection[str] = (), kernel: int | None = None
    ) -> Architecture:
        """Return an architecture by names: what is not named is full.

        Args:
            widths: group -> kept channels.
            without: removable layers to leave out; their groups become 0.
            kernel: side of all elastic kernels.
        """
        widths = widths or {}
        for what, given, known in (("group", widths, self.groups), ("removable layer", without, self.removable)):
            for key in given:
                if key not in known:
                    raise ValueError(f"{self.name} has no {what} {key!r}; {nearest_part(key, known)}")
        left_out = {group for layer in without for group in self.removable[layer]}
        arch = Architecture(
            tuple(0 if group in left_out else widths.get(group, full) for group, full in self.groups.items()),
            tuple(kernel or full for full in self.kernels.values()),
        )
        self.validate(arch)
        return arch

    def smallest(self) -> Architecture:
        """Return the architecture with one channel in every group and without all removable layers."""
        return self.architecture(dict.fromkeys(self.groups, 1), self.removable, kernel=3 if self.kernels else None)

    def up_to(self, exit: int, rate: float = 1.0) -> Architecture:
        """Return the architecture that ends at an exit, counted from 1, and keeps `rate` of every group up to there."""
        check_cut(self.name, len(self.segments), exit, rate)
        widths = {group: kept_channels(full, rate) for group, full in self.groups.items()}
        return self.architecture(widths, without=list(self.segments)[exit:])

    def first_layers(self, count: int) -> Architecture:
        """Return the whole network but for the blocks of its one stack behind the first `count`."""
        if len(self.stacks) != 1:
            return super().first_layers(count)
        [blocks] = self.stacks.values()
        if not 1 <= count <= len(blocks):
            raise ValueError(f"{self.name}: a network has 1 to {len(blocks)} blocks, not {count}")
        return self.architecture(without=blocks[count:])

    def sample(self, rng: np.random.Generator) -> Architecture:
        """Draw an exit, or a coin for every removable layer; kernels, and the width of every kept group (uniform)."""
        if len(self.segments) > 1:
            without = list(self.segments)[int(rng.integers(1, len(self.segments) + 1)) :]
        else:
            without = [layer for layer in self.removable if rng.random() < 0.5]
        arch = self.architecture({g: int(rng.integers(1, full + 1)) for g, full in self.groups.items()}, without)
        sides = tuple(3 + 2 * int(rng.integers((full - 1) // 2)) for full in self.kernels.values())
        return replace(arch, kernels=sides)

    def validate(self, arch: Architecture) -> None:
        """Raise ValueError that names the entry out of bounds and its bound."""
        for what, given, known in (("widths", arch.widths, self.groups), ("kernels", arch.kernels, self.kernels)):
            if len(given) != len(known):
                raise ValueError(f"{self.name}: {len(given)} {what}, but there are {len(known)}: {', '.join(known)}")
        widths = dict(zip(self.groups, arch.widths, strict=True))
        inside = {group for groups in self.removable.values() for group in groups}
        for group, full in self.groups.items():
            if widths[group] == 0 and group not in inside:
                raise ValueError(
                    f"{self.name}: width of {group} must be 1 to {full}, not 0: what follows needs this layer; "
                    f"layers that may be left out: {', '.join(self.removable) or 'none'}"
                )
            if not 0 <= widths[group] <= full:
                raise ValueError(f"{self.name}: width of {group} must be 1 to {full}, not {widths[group]}")
        for layer, groups in self.removable.items():
            if len({widths[group] == 0 for group in groups}) > 1:
                raise ValueError(f"{self.name}: widths of {', '.join(groups)} must all be 0 or none, they are {layer}")
        missing = ""
        for head, groups in self.segments.items():
            if groups and widths[groups[0]] == 0:
                missing = missing or head
            elif missing:
                raise ValueError(
                    f"{self.name}: {head} is kept without {missing}, which is in front of it: a sub-model must end at "
                    f"an exit ({', '.join(self.segments)}), with widths above 0 up to it and 0 behind it"
                )
        for (kernel, full), side in zip(self.kernels.items(), arch.kernels, strict=True):
            if not 3 <= side <= full or side % 2 == 0:
                raise ValueError(f"{self.name}: kernel {kernel} must be odd and 3 to {full}, not {side}")

    def channels(self, arch: Architecture) -> dict[str, Channels]:
        """Return the kept channels of every group, by group."""
        return {
            group: Channels(group, kept, full)
            for (group, full), kept in zip(self.groups.items(), arch.widths, strict=True)
        }

    def place(self, arch: Architecture, select: Select = leading) -> Placement:
        """Return where the sub-model's tensors lie in the global ones, with `select` applied to every channel group."""
        return _leading(self, arch) if select is leading else _placement(self, arch, select)


def check_depths(name: str, depths: object, blocks: Sequence[int]) -> None:
    """Raise ValueError unless depths ascend and end with all blocks of the one stack, of which `blocks` are counted."""
    if not isinstance(depths, tuple) or not all(is_count(depth) for depth in depths):
        raise ValueError(f"{name}: depths must be numbers of blocks such as [2, 4], not {depths!r}")
    if len(blocks) != 1:
        raise ValueError(f"{name}: depths are of one stack of blocks, and there are {len(blocks)}: leave depths out")
    if list(depths) != sorted({*depths, blocks[0]}):
        raise ValueError(f"{name}: depths must ascend and end with depth = {blocks[0]}, not be {list(depths)}")


def depth_at(depths: Sequence[int], rate: float) -> int:
    """Return the first of some depths that has this share of the last one."""
    if not 0 < rate <= 1:
        raise ValueError(f"a width rate lies in (0, 1], not {rate!r}")
    return next(depth for depth in depths if depth >= math.ceil(round(rate * depths[-1], 9)))


def _placement(family: GroupFamily, arch: Architecture, select: Select) -> Placement:
    axes = {name: spec.axes for name, spec in family.tensors(arch).items()}
    sizes = {group: (channels.full, channels.kept) for group, channels in family.channels(arch).items()}
    return place(axes, sizes, select)


@lru_cache(maxsize=256)
def _leading(family: GroupFamily, arch: Architecture) -> Placement:
    return _placement(family, arch, leading)


def cut_by_groups(family: Family, who: str) -> GroupFamily:
    """Return the family, for what reads channel groups; ValueError if it has none."""
    if not isinstance(family, GroupFamily):
        raise ValueError(
            f"{who} needs a family that is cut by channel groups, such as resnet18 or a module of yours without levels "
            f"(docs/families.md), and {family.name} is not one"
        )
    return family
