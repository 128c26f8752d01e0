"""Families: a global model together with the rule that cuts smaller models out of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from wildflower.models.architecture import Architecture
from wildflower.models.cost import OPTIMIZERS, Convolution, Cost
from wildflower.models.layers import TensorSpec
from wildflower.models.network import Network
from wildflower.models.placement import Placement, Select, leading

if TYPE_CHECKING:
    from wildflower.models.trace import Step

VARIANCE = "running_var"
STATISTICS = ("running_mean", VARIANCE)  # what batch norm learns without gradients


@dataclass(frozen=True)
class Family(ABC):
    """A global model and the sub-models that can be cut out of it.

    A family is a value: equal arguments make equal families, which is what its caches go by. Subclasses are frozen
    dataclasses whose fields are what `spec` writes and `make_family` reads. This is all that engine, client and methods
    ask of a family; `wildflower.models.block_family` has those whose networks are made of described layers.

    freeze: names of tensors, or what they begin with in front of a dot, that are not trained
        (`wildflower.models.frozen`). Batch norm's running statistics are not learned by gradients and go on.
    """

    name: ClassVar[str]
    input_dtype: ClassVar[torch.dtype] = torch.float32  # int64 where the inputs are tokens

    input_shape: tuple[int, ...]
    classes: int = 10
    freeze: tuple[str, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        if not self.input_shape or any(not is_count(size) for size in self.input_shape):
            raise ValueError(f"{self.name}: input_shape must hold sizes >= 1, not {self.input_shape!r}")
        self._check_counts("classes")
        if not isinstance(self.freeze, tuple) or not all(isinstance(part, str) and part for part in self.freeze):
            raise ValueError(f"{self.name}: freeze must be a list of names such as ['embeddings'], not {self.freeze!r}")

    def _check_counts(self, *fields: str) -> None:
        """Raise ValueError unless these arguments are whole numbers of at least 1."""
        for name in fields:
            if not is_count(value := getattr(self, name)):
                raise ValueError(f"{self.name}: {name} must be a number >= 1, not {value!r}")

    def _check_sizes(self, *fields: str, count: int | None = None) -> None:
        """Raise ValueError unless these arguments are lists of sizes, of `count` of them if that is given."""
        for name in fields:
            sizes = getattr(self, name)
            right = isinstance(sizes, tuple) and bool(sizes) and all(map(is_count, sizes))
            if not right or count not in (None, len(sizes)):
                what = "numbers" if count is None else f"{count} numbers"
                raise ValueError(f"{self.name}: {name} must be a list of {what} >= 1, not {sizes!r}")

    @property
    def pair_separator(self) -> int:
        """Return the token by which networks tell the two texts of a pair apart; -1: they do not."""
        return int(getattr(self, "separator", -1))

    @classmethod
    def resolved(cls, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments with what only this machine can read, such as a folder, replaced by its contents.

        `make_family` calls it. Nodes make the family from `spec`, which names nothing that they would have to have.
        """
        return dict(arguments)

    def spec(self) -> dict[str, Any]:
        """Return the JSON from which `make_family` makes this family again; one from outside is named by reference."""
        kind = type(self)
        name = (
            self.name if kind.__module__.startswith("wildflower.models.") else f"{kind.__module__}:{kind.__qualname__}"
        )
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"name": name} | {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    # Tensors

    def is_frozen(self, name: str) -> bool:
        """Say whether a tensor of this name is not trained."""
        return not name.endswith(STATISTICS) and any(lies_in(name, part) for part in self.freeze)

    def further_names(self) -> Mapping[str, str]:
        """Return each further name of a tied weight of the full model -> the name that it goes by."""
        return {}

    def tensor_names(self) -> list[str]:
        """Return the names of all tensors that any architecture has."""
        return list(self.tensors(self.full()))

    # Architectures

    @property
    @abstractmethod
    def groups(self) -> Mapping[str, int]:
        """Return what an architecture chooses, such as channel groups, and the full sizes, in the order of `widths`."""

    @cached_property
    def kernels(self) -> Mapping[str, int]:
        """Return elastic kernels and their full sides (odd), in the order of `Architecture.kernels`; 3 is the least."""
        return {}

    @cached_property
    def segments(self) -> Mapping[str, tuple[str, ...]]:
        """Return the exits from the shallowest on: name of the head -> the groups between it and the exit before.

        The cost of a sub-model with several exits is that of training all of them; strategies that train the deepest
        one alone are charged the same.
        """
        return {"head": tuple(self.groups)}

    @property
    def stacks(self) -> Mapping[str, tuple[str, ...]]:
        """Return the stacks of blocks alike: name -> its blocks in order, removable ones and those that always stay.

        The tensors of a block are those whose names begin with its name, and with "." or "_" behind it.
        """
        return {}

    def published(self) -> tuple[Architecture, Mapping[str, str]] | None:
        """Return the sub-model that is published with weights, and what each of its tensors is called there.

        None where there is none; ValueError where there is one and this family's arguments leave no room for it.
        """
        return None

    def full(self) -> Architecture:
        """Return the global model's architecture."""
        return Architecture(tuple(self.groups.values()), tuple(self.kernels.values()))

    def largest(self) -> Architecture:
        """Return the largest architecture, which is the full one."""
        return self.full()

    @abstractmethod
    def smallest(self) -> Architecture:
        """Return the smallest architecture."""

    def width(self, rate: float) -> Architecture:
        """Return the architecture that keeps `rate` of every channel group, at full depth, with full kernels.

        HeteroFL keeps ceil(rate * full) channels.
        """
        return self.up_to(len(self.segments), rate)

    @abstractmethod
    def up_to(self, exit: int, rate: float = 1.0) -> Architecture:
        """Return the architecture that ends at an exit, counted from 1, and keeps `rate` of every group up to there."""

    def candidates(self, widths: Iterable[float]) -> list[Architecture]:
        """Return the architectures that devices may get, largest first: the cuts of these width rates."""
        return [self.width(width) for width in sorted(widths, reverse=True)]

    def first_layers(self, count: int) -> Architecture:
        """Return the whole network but for the blocks of its one stack behind the first `count`.

        ValueError where the family is not cut in depth.
        """
        raise ValueError(f"{self.name} is not cut in depth")

    def exit_of(self, arch: Architecture) -> int:
        """Return the number of the exit at which an architecture ends, counted from 1."""
        kept = {group for group, width in zip(self.groups, arch.widths, strict=True) if width}
        return sum(not kept.isdisjoint(groups) for groups in self.segments.values())

    @abstractmethod
    def validate(self, arch: Architecture) -> None:
        """Raise ValueError that names the entry out of bounds and its bound."""

    @property
    def alternatives(self) -> Mapping[str, Family]:
        """Return the families of whose networks an architecture is one, by what is in front of their tensors' names.

        That is this family itself, and of a choice each of its members.
        """
        return {"": self}

    def member_of(self, arch: Architecture) -> tuple[str, Family, Architecture]:
        """Return the entry of `alternatives` that an architecture is of, and what the architecture is called there."""
        return "", self, arch

    # Sub-models

    @abstractmethod
    def build(self, arch: Architecture) -> Network:
        """Return the sub-model, initialized by torch's generator, on the current default device.

        It maps (batch, *input_shape) to (batch, classes), by its deepest exit. Raises ValueError for an architecture
        out of bounds.
        """

    def without_memory(self, arch: Architecture) -> Network:
        """Return the sub-model on the meta device, to be given weights."""
        with torch.device("meta"):
            return self.build(arch)

    def initial(self) -> dict[str, Tensor]:
        """Return first weights of the global model, drawn by torch's generator."""
        return {name: value.detach().clone() for name, value in self.build(self.full()).state_dict().items()}

    @cached_property
    def with_statistics(self) -> Self:
        """Return the family whose networks keep the batch norm statistics that this one's leave out, or itself."""
        if getattr(self, "norm", "batch") == "batch":
            return self
        found = replace(self, norm="batch")  # type: ignore[call-arg]  # a family that has none ends above
        return self if found.tensor_names() == self.tensor_names() else found

    @abstractmethod
    def tensors(self, arch: Architecture) -> Mapping[str, TensorSpec]:
        """Return what the sub-model's state_dict holds, in its order, without building it. Do not change the result."""

    @abstractmethod
    def place(self, arch: Architecture, select: Select = leading) -> Placement:
        """Return where the sub-model's tensors lie in the global ones, with `select` applied to every channel group.

        ValueError where the family is cut otherwise than `select` wants.
        """

    def step(self, arch: Architecture, batch_size: int, *, accumulates: bool) -> Step:
        """Return a training step of an architecture; see `wildflower.models.trace.follow`."""
        return followed(self, arch, batch_size, accumulates=accumulates)

    def price(self, arch: Architecture, batch_size: int, optimizer: str) -> Cost:
        """Return what an architecture costs; `wildflower.models.cost.cost` checks the question and keeps the answer."""
        return self.step(arch, batch_size, accumulates=OPTIMIZERS[optimizer].accumulates).cost(batch_size, optimizer)

    def convolutions(self, arch: Architecture) -> Collection[Convolution]:
        """Return the distinct convolutions of an architecture, for each of which code is compiled."""
        return self.step(arch, 2, accumulates=False).convolutions

    def answer(self, arch: Architecture, batch_size: int) -> tuple[int, ...]:
        """Return the shape of what the sub-model returns for each example: (outputs,) or (outputs, positions)."""
        return self.step(arch, batch_size, accumulates=False).answer


@lru_cache(maxsize=256)
def followed(family: Family, arch: Architecture, batch_size: int, *, accumulates: bool) -> Step:
    """Return a training step of an architecture that is followed on fake tensors."""
    from wildflower.models.trace import follow  # only a server prices so, and a device should not load PyTorch's tracer

    shape, dtype = family.input_shape, family.input_dtype
    return follow(lambda: family.build(arch), batch_size, shape, dtype, family.classes, accumulates=accumulates)


def lies_in(name: str, part: str) -> bool:
    """Say whether a tensor is a part of a model, or lies in it: a part's name ends in front of a dot."""
    return name == part or name.startswith(f"{part}.")


def is_count(value: object) -> bool:
    """Say whether a value, as read from JSON, is a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_norm(name: str, norm: object) -> None:
    """Raise ValueError unless batch norms are of a kind that there is."""
    if norm not in ("batch", "static"):
        raise ValueError(f"{name}: norm must be 'batch' or 'static', not {norm!r}")


def check_flag(name: str, argument: str, value: object) -> None:
    """Raise ValueError unless an argument, as read from JSON, is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}: {argument} must be true or false, not {value!r}")


def check_cut(name: str, exits: int, exit: int, rate: float) -> None:
    """Raise ValueError unless a cut ends at one of the exits and keeps a share of the width."""
    if not 1 <= exit <= exits:
        raise ValueError(f"{name}: exit must be {'1' if exits == 1 else f'1 to {exits}'}, not {exit}")
    if not 0 < rate <= 1:
        raise ValueError(f"a width rate lies in (0, 1], not {rate!r}")
