"""A choice among several families: unequal models that are no cuts of one another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from wildflower.models.architecture import Architecture
from wildflower.models.base import Family, check_flag, check_norm, lies_in
from wildflower.models.cost import Convolution, Cost
from wildflower.models.layers import TensorSpec
from wildflower.models.network import Network
from wildflower.models.placement import CLASSES, INPUT, AnyAxis, Axis, Coordinates, Joined, Placement, Select, leading
from wildflower.plugins.nearest import nearest_part


@dataclass(frozen=True)
class Choice(Family):
    """Several families under one roof, largest first: an architecture is one of exactly one member.

    Groups, kernels and tensors carry the member's name in front (`large.conv1`, `large.block1.conv.weight`), so that
    the global model is all members beside each other, and a sub-model's tensors are those of its member. The groups of
    all other members have width 0, and their kernels are whole. All else is asked of the member.

    `members` are the members' names and families, all with the input shape, classes, norm and scaler of the choice as
    far as they have such arguments, and each with fewer parameters than the one before.
    """

    name: ClassVar[str] = "choice"
    SHARED: ClassVar[tuple[str, ...]] = ("input_shape", "classes", "norm", "scaler")

    norm: str = "batch"
    scaler: bool = False
    members: tuple[tuple[str, Family], ...] = ()

    def __post_init__(self) -> None:
        check_norm(self.name, self.norm)  # which no member may have
        check_flag(self.name, "scaler", self.scaler)
        if not isinstance(self.members, tuple) or len(self.members) < 2:
            given = len(self.members) if isinstance(self.members, tuple) else repr(self.members)
            raise ValueError(f"choice: members must be two families or more by name, not {given}")
        for member, family in self.members:
            if not member.isidentifier():
                raise ValueError(f"choice: a member's name is made of letters, digits and _, not {member!r}")
            if isinstance(family, Choice) or len(family.segments) > 1:
                raise ValueError(f"choice: member {member!r} must be a single family with one exit")
            if not family.groups:
                raise ValueError(f"choice: member {member!r} has no channels that could be cut, and must have some")
            if family.freeze:
                raise ValueError(f"choice: name what is frozen in freeze of the choice, as {member}.{family.freeze[0]}")
            for shared in self.SHARED:
                if (found := getattr(family, shared, getattr(self, shared))) != getattr(self, shared):
                    raise ValueError(f"choice: {shared} of {member!r} is {found!r}, not {getattr(self, shared)!r}")
            if family.input_dtype != self.input_dtype:
                raise ValueError(f"choice: either all members read tokens or none, unlike {member!r}")
        super().__post_init__()
        parameters = [
            family.price(family.full(), batch_size=1, optimizer="sgd").parameters for _, family in self.members
        ]
        for (larger, _), (smaller, _), maximum, count in zip(
            self.members, self.members[1:], parameters, parameters[1:], strict=False
        ):
            if count >= maximum:
                raise ValueError(
                    f"choice: members go from large to small, but {larger!r} has {maximum} parameters and {smaller!r}, "
                    f"behind it, {count}"
                )

    def spec(self) -> dict[str, Any]:
        """Return the JSON from which `make_family` makes this family again; what members share stands once."""
        shared = {field: getattr(self, field) for field in self.SHARED}
        shared["input_shape"] = list(self.input_shape)
        members = {
            member: {key: value for key, value in family.spec().items() if key not in self.SHARED}
            for member, family in self.members
        }
        return {"name": self.name, **shared, "members": members, "freeze": list(self.freeze)}

    @property
    def input_dtype(self) -> torch.dtype:  # type: ignore[override]
        """Return what all members read."""
        return self.members[0][1].input_dtype

    @property
    def pair_separator(self) -> int:
        """Return that of the members by which any of them tells texts apart; -1: none does."""
        return max(family.pair_separator for _, family in self.members)

    @cached_property
    def with_statistics(self) -> Choice:
        """Return the same choice among members with running statistics."""
        if self.norm == "batch":
            return self
        statistics: dict[str, Any] = {"norm": "batch"}
        members = ((m, replace(f, **statistics) if hasattr(f, "norm") else f) for m, f in self.members)
        return replace(self, norm="batch", members=tuple(members))

    @cached_property
    def groups(self) -> dict[str, int]:
        """Return the groups of all members."""
        return {f"{member}.{group}": full for member, f in self.members for group, full in f.groups.items()}

    @cached_property
    def kernels(self) -> dict[str, int]:
        """Return the elastic kernels of all members."""
        return {f"{member}.{kernel}": side for member, f in self.members for kernel, side in f.kernels.items()}

    @cached_property
    def alternatives(self) -> dict[str, Family]:
        """Return the members by what is in front of their tensors' names, with what the choice freezes of each."""
        found = {}
        for member, family in self.members:
            parts = dict.fromkeys(name.partition(".")[0] for name in family.tensor_names())  # of one frozen as a whole
            frozen = [part.removeprefix(f"{member}.") for part in self.freeze if lies_in(part, member)]
            frozen = [inside for part in frozen for inside in (parts if part == member else [part])]
            found[f"{member}."] = replace(family, freeze=tuple(frozen)) if frozen else family
        return found

    def member_of(self, arch: Architecture) -> tuple[str, Family, Architecture]:
        """Return the member of an architecture, as `alternatives` has it, and its architecture there.

        ValueError unless the architecture is of exactly one member.
        """
        widths, kernels = list(arch.widths), list(arch.kernels)
        if len(widths) != len(self.groups) or len(kernels) != len(self.kernels):
            raise ValueError(f"choice: {len(self.groups)} widths and {len(self.kernels)} kernels, not {arch}")
        found: list[tuple[str, Family, Architecture]] = []
        for prefix, family in self.alternatives.items():
            own = Architecture(tuple(widths[: len(family.groups)]), tuple(kernels[: len(family.kernels)]))
            del widths[: len(family.groups)], kernels[: len(family.kernels)]
            if any(own.widths):
                found.append((prefix, family, own))
            elif own.kernels != tuple(family.kernels.values()):
                raise ValueError(f"choice: kernels of {prefix[:-1]}, which is not chosen, must be whole")
        if len(found) != 1:
            names = ", ".join(prefix[:-1] for prefix, _, _ in found) or "none"
            raise ValueError(f"choice: an architecture has widths of exactly one member, this one of {names}")
        return found[0]

    def of(self, member: str, arch: Architecture | None = None) -> Architecture:
        """Return a member's architecture, its full one by default, as one of this family."""
        if member not in dict(self.members):
            raise ValueError(f"the choice has no member {member!r}; {nearest_part(member, dict(self.members))}")
        widths: list[int] = []
        kernels: list[int] = []
        for name, family in self.members:
            own = (arch or family.full()) if name == member else None
            widths += own.widths if own else [0] * len(family.groups)
            kernels += own.kernels if own else family.kernels.values()
        return Architecture(tuple(widths), tuple(kernels))

    def validate(self, arch: Architecture) -> None:
        """Raise ValueError unless this is an architecture of exactly one member."""
        _, family, own = self.member_of(arch)
        family.validate(own)

    def full(self) -> Architecture:
        """Return the whole first member, the largest."""
        return self.of(self.members[0][0])

    def smallest(self) -> Architecture:
        """Return the smallest architecture of the last member."""
        member, family = self.members[-1]
        return self.of(member, family.smallest())

    def up_to(self, exit: int, rate: float = 1.0) -> Architecture:
        """Return the cut of the first member; members are chosen by `of`, not by width."""
        member, family = self.members[0]
        return self.of(member, family.up_to(exit, rate))

    def candidates(self, widths: Iterable[float]) -> list[Architecture]:
        """Return the members, whole; widths play no part."""
        return [self.of(member) for member, _ in self.members]

    # Of the member

    def is_frozen(self, name: str) -> bool:
        """Say whether its member's tensor is not trained."""
        member, _, inside = name.partition(".")
        family = self.alternatives.get(f"{member}.")
        return family is not None and family.is_frozen(inside)

    def further_names(self) -> dict[str, str]:
        """Return those of all members."""
        return {
            prefix + name: prefix + first
            for prefix, family in self.alternatives.items()
            for name, first in family.further_names().items()
        }

    def tensor_names(self) -> list[str]:
        """Return the tensors of all members."""
        return [prefix + name for prefix, family in self.alternatives.items() for name in family.tensor_names()]

    def build(self, arch: Architecture) -> Network:
        """Return the member's sub-model, initialized as it does."""
        prefix, family, own = self.member_of(arch)
        return Chosen(prefix[:-1], family.build(own))

    def without_memory(self, arch: Architecture) -> Network:
        """Return the member's sub-model, to be given weights."""
        prefix, family, own = self.member_of(arch)
        return Chosen(prefix[:-1], family.without_memory(own))

    def initial(self) -> dict[str, Tensor]:
        """Return first weights of all members."""
        return {
            prefix + name: value
            for prefix, family in self.alternatives.items()
            for name, value in family.initial().items()
        }

    def tensors(self, arch: Architecture) -> Mapping[str, TensorSpec]:
        """Return those of the member, under its name."""
        return _tensors(self, arch)

    def place(self, arch: Architecture, select: Select = leading) -> Placement:
        """Return where the member places its tensors, under its name."""
        return _leading(self, arch) if select is leading else _placement(self, arch, select)

    def price(self, arch: Architecture, batch_size: int, optimizer: str) -> Cost:
        """Return what the member costs."""
        _, family, own = self.member_of(arch)
        return family.price(own, batch_size, optimizer)

    def convolutions(self, arch: Architecture) -> set[Convolution]:
        """Return those of the member."""
        _, family, own = self.member_of(arch)
        return set(family.convolutions(own))


class Chosen(Network):
    """A member's network, whose tensors have the member's name in front."""

    def __init__(self, member: str, network: Network) -> None:
        super().__init__([])
        self.member = member
        self.add_module(member, network)
        self.takes_channels_last = getattr(network, "takes_channels_last", False)  # which an encoder does not say

    @property
    def held(self) -> tuple[Tensor, ...]:
        """Return what a user's module holds outside of its tables."""
        return getattr(self.alone, "held", ())

    @property
    def alone(self) -> Network:
        """Return the member's own network."""
        network = self._modules[self.member]
        assert isinstance(network, Network)
        return network

    def exits(self, x: Tensor) -> list[Tensor]:
        """Return the one exit."""
        return [self(x)]

    def settle(self) -> None:
        """Compute what follows from the weights of the member, once they are there."""
        self.alone.settle()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As of `nn.Module`; further names of the member's tied weights need not be there."""
        own = {name.removeprefix(f"{self.member}."): value for name, value in state_dict.items()}
        return self.alone.load_state_dict(own, strict, assign)


def _axis(axis: AnyAxis, prefix: str) -> AnyAxis:
    """Return an axis of a member as one of the choice; inputs and classes are the same for all members."""
    if isinstance(axis, Axis) and axis.group not in (CLASSES, INPUT):
        return replace(axis, group=prefix + axis.group)
    if isinstance(axis, Joined):
        return Joined(tuple((group and prefix + group, *rest) for group, *rest in axis.stretches))  # type: ignore[misc]
    return axis


@lru_cache(maxsize=256)
def _tensors(family: Choice, arch: Architecture) -> dict[str, TensorSpec]:
    prefix, of, own = family.member_of(arch)
    return {
        prefix + name: replace(spec, axes=tuple(_axis(axis, prefix) for axis in spec.axes))
        for name, spec in of.tensors(own).items()
    }


@lru_cache(maxsize=256)
def _leading(family: Choice, arch: Architecture) -> Placement:
    return _placement(family, arch, leading)


def _placement(family: Choice, arch: Architecture, select: Select) -> Placement:
    prefix, of, own = family.member_of(arch)

    def inside(group: str, full: int, kept: int) -> Coordinates:
        return select(prefix + group, full, kept)

    found = of.place(own, leading if select is leading else inside)
    axes = {prefix + name: tuple(_axis(axis, prefix) for axis in axes) for name, axes in found.axes.items()}
    return Placement({prefix + name: value for name, value in found.coordinates.items()}, axes)
