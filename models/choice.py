"""A choice among several families: unequal models that are no cuts of one another."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from wildflower.models.architecture import Architecture
from wildflower.models.block_family import BlockFamily
from wildflower.models.frozen import without_gradients
from wildflower.models.layers import Block, Channels, Layer
from wildflower.models.network import Network
from wildflower.plugins.nearest import nearest_part


@dataclass(frozen=True)
class Choice(BlockFamily):
    """Several families under one roof, largest first: an architecture is one of exactly one member.

    Groups, kernels and the blocks of the network carry the member's name in front (`large.conv1`, `large_block1`), so
    that the global model is all members beside each other, and a sub-model's tensors are those of its member. The
    groups of all other members have width 0, and their kernels are whole.

    `members` are the members' names and families, all with the input shape, classes, norm and scaler of the choice, and
    each with fewer parameters than the one before.
    """

    name: ClassVar[str] = "choice"
    SHARED: ClassVar[tuple[str, ...]] = ("input_shape", "classes", "norm", "scaler")

    members: tuple[tuple[str, BlockFamily], ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.members, tuple) or len(self.members) < 2:
            given = len(self.members) if isinstance(self.members, tuple) else repr(self.members)
            raise ValueError(f"choice: members must be two families or more by name, not {given}")
        for member, family in self.members:
            if not member.isidentifier():
                raise ValueError(f"choice: a member's name is made of letters, digits and _, not {member!r}")
            if not isinstance(family, BlockFamily):
                raise ValueError(f"choice: member {member!r} must be a family of described layers, not {family.name}")
            if isinstance(family, Choice) or len(family.segments) > 1:
                raise ValueError(f"choice: member {member!r} must be a single family with one exit")
            for shared in self.SHARED:
                if getattr(family, shared) != getattr(self, shared):
                    raise ValueError(
                        f"choice: {shared} of {member!r} is {getattr(family, shared)!r}, not {getattr(self, shared)!r}"
                    )
            if family.input_dtype != self.input_dtype:
                raise ValueError(f"choice: member {member!r} reads tokens, which is not built")
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

    @cached_property
    def with_statistics(self) -> Choice:
        """Return the same choice among members with running statistics."""
        if self.norm == "batch":
            return self
        members = tuple((member, replace(family, norm="batch")) for member, family in self.members)
        return replace(self, norm="batch", members=members)

    @cached_property
    def groups(self) -> dict[str, int]:
        """Return the groups of all members."""
        return {f"{member}.{group}": full for member, f in self.members for group, full in f.groups.items()}

    @cached_property
    def kernels(self) -> dict[str, int]:
        """Return the elastic kernels of all members."""
        return {f"{member}.{kernel}": side for member, f in self.members for kernel, side in f.kernels.items()}

    @cached_property
    def removable(self) -> dict[str, tuple[str, ...]]:
        """Return what the members' architectures may leave out; a whole member is not named here."""
        return {
            f"{member}.{layer}": tuple(f"{member}.{group}" for group in groups)
            for member, family in self.members
            for layer, groups in family.removable.items()
        }

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

    def split(self, arch: Architecture) -> tuple[str, BlockFamily, Architecture]:
        """Return the member of an architecture, and its architecture there; ValueError unless it is of exactly one."""
        widths, kernels = list(arch.widths), list(arch.kernels)
        if len(widths) != len(self.groups) or len(kernels) != len(self.kernels):
            raise ValueError(f"choice: {len(self.groups)} widths and {len(self.kernels)} kernels, not {arch}")
        found: list[tuple[str, BlockFamily, Architecture]] = []
        for member, family in self.members:
            own = Architecture(tuple(widths[: len(family.groups)]), tuple(kernels[: len(family.kernels)]))
            del widths[: len(family.groups)], kernels[: len(family.kernels)]
            if any(own.widths):
                found.append((member, family, own))
            elif own.kernels != tuple(family.kernels.values()):
                raise ValueError(f"choice: kernels of {member}, which is not chosen, must be whole")
        if len(found) != 1:
            names = ", ".join(member for member, _, _ in found) or "none"
            raise ValueError(f"choice: an architecture has widths of exactly one member, this one of {names}")
        return found[0]

    def validate(self, arch: Architecture) -> None:
        """Raise ValueError unless this is an architecture of exactly one member."""
        _, family, own = self.split(arch)
        family.validate(own)

    def full(self) -> Architecture:
        """Return the whole first member, the largest."""
        return self.of(self.members[0][0])

    def smallest(self) -> Architecture:
        """Return the smallest architecture of the last member."""
        member, family = self.members[-1]
        return self.of(member, family.smallest())

    def sample(self, rng: np.random.Generator) -> Architecture:
        """Draw a member, then one of its architectures."""
        member, family = self.members[int(rng.integers(len(self.members)))]
        return self.of(member, family.sample(rng))

    def up_to(self, exit: int, rate: float = 1.0) -> Architecture:
        """Return the cut of the first member; members are chosen by `of`, not by width."""
        member, family = self.members[0]
        return self.of(member, family.up_to(exit, rate))

    def candidates(self, widths: Iterable[float]) -> list[Architecture]:
        """Return the members, whole; widths play no part."""
        return [self.of(member) for member, _ in self.members]

    def tensor_names(self) -> list[str]:
        """Return the tensors of all members."""
        return [name for member, _ in self.members for name in self.tensors(self.of(member))]

    def blocks(self, arch: Architecture) -> list[Block]:
        """Return the blocks of the member, under its name."""
        member, family, own = self.split(arch)
        groups = family.channels(own)
        return [_renamed(block, member, groups) for block in family.blocks(own)]

    def channels(self, arch: Architecture) -> dict[str, Channels]:
        """Return the channels of the member, and nothing of all others'."""
        chosen, _, own = self.split(arch)
        return {
            f"{name}.{group}": Channels(f"{name}.{group}", found.kept if name == chosen else 0, found.full)
            for name, family in self.members
            for group, found in family.channels(own if name == chosen else family.full()).items()
        }

    def build(self, arch: Architecture) -> Network:
        """Return the member's sub-model, initialized as it does."""
        member, family, own = self.split(arch)
        network = Network([])
        for name, block in family.build(own).named_children():
            network.add_module(f"{member}_{name}", block)
        return without_gradients(self, network)

    def initial(self) -> dict[str, Tensor]:
        """Return first weights of all members."""
        return {
            name: value
            for member, _ in self.members
            for name, value in self.build(self.of(member)).state_dict().items()
        }


def _renamed(block: Block, member: str, groups: Collection[str]) -> Block:
    """Return the block with the member's name in front of its own and of the channel groups that it names."""

    def channels(value: object) -> object:
        if not isinstance(value, Channels) or value.group not in groups:
            return value
        return replace(value, group=f"{member}.{value.group}")

    def layers(given: tuple[Layer, ...]) -> tuple[Layer, ...]:
        return tuple(
            replace(layer, **{f.name: channels(getattr(layer, f.name)) for f in fields(layer)})  # type: ignore[arg-type,type-var]
            for layer in given
        )

    return replace(
        block,
        name=f"{member}_{block.name}",
        layers=layers(block.layers),
        shortcut=None if block.shortcut is None else layers(block.shortcut),
        after=layers(block.after),
    )
