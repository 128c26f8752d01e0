"""Families: a global model together with the rule that cuts smaller models out of it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from wildflower.models.architecture import Architecture
from wildflower.models.cost import OPTIMIZERS, Convolution, Cost
from wildflower.models.layers import Block, Channels, Layer, Norm, Scale, TensorSpec
from wildflower.models.network import Network
from wildflower.models.placement import (
    CLASSES,
    INPUT,
    Axis,
    Coordinates,
    Joined,
    Placement,
    Select,
    Window,
    leading,
    spread,
)
from wildflower.models.training_step import distinct_convolutions, price_of_blocks
from wildflower.plugins.nearest import LIKENESS, did_you_mean, nearest_part

M = TypeVar("M", bound=nn.Module)
VARIANCE = "running_var"
STATISTICS = ("running_mean", VARIANCE)  # what batch norm learns without gradients


@dataclass(frozen=True)
class Family(ABC):
    """A global model and the sub-models that can be cut out of it.

    A family is a value: equal arguments make equal families, which is what its caches go by. Subclasses are frozen
    dataclasses whose fields are what `spec` writes and `make_family` reads. This is all that engine, client and methods
    ask of a family; `BlockFamily` is one whose networks are made of described layers.

    freeze: names of tensors, or what they begin with in front of a dot, that are not trained. Batch norm's running
        statistics are not learned by gradients and go on.
    """

    name: ClassVar[str]
    input_dtype: ClassVar[torch.dtype] = torch.float32  # int64 where the inputs are tokens

    input_shape: tuple[int, ...]
    classes: int = 10
    freeze: tuple[str, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        if not self.input_shape or any(not is_count(size) for size in self.input_shape):
            raise ValueError(f"{self.name}: input_shape must hold sizes >= 1, not {self.input_shape!r}")
        if not is_count(self.classes):
            raise ValueError(f"{self.name}: classes must be a number >= 1, not {self.classes!r}")
        if not isinstance(self.freeze, tuple) or not all(isinstance(part, str) and part for part in self.freeze):
            raise ValueError(f"{self.name}: freeze must be a list of names such as ['embeddings'], not {self.freeze!r}")

    @property
    def pair_separator(self) -> int:
        """The token by which networks tell the two texts of a pair apart; -1: they do not."""
        return int(getattr(self, "separator", -1))

    @classmethod
    def resolved(cls, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments with what only this machine can read, such as a folder, replaced by its contents.

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

    # What is frozen

    def is_frozen(self, name: str) -> bool:
        """Whether a tensor of this name is not trained."""
        if name.endswith(STATISTICS):
            return False
        return any(lies_in(name, part) for part in self.freeze)

    def further_names(self) -> Mapping[str, str]:
        """Of tied weights of the full model: each further name of a tensor -> the name that it goes by."""
        return {}

    def tensor_names(self) -> list[str]:
        """The names of all tensors that any architecture has."""
        return list(self.tensors(self.full()))

    def check_parts(self, parts: Iterable[str]) -> None:
        """Raise ValueError where a part, the beginning of tensors' names in front of a dot, names nothing."""
        names = self.tensor_names()
        for part in parts:
            if not any(lies_in(name, part) for name in names):
                known = dict.fromkeys(name[:position] for name in names for position in _ends(name))
                outermost = ", ".join(dict.fromkeys(name.partition(".")[0] for name in known))
                meant = did_you_mean(part, known, likeness=LIKENESS) or f"its outermost parts are {outermost}"
                raise ValueError(f"{self.name} has no part {part!r}; {meant}")
            for further, first in self.further_names().items():
                if lies_in(further, part) and not lies_in(first, part):
                    raise ValueError(
                        f"{self.name}: the part {part!r} holds {further}, which is one tensor with {first}. The "
                        f"tensor goes by the name {first}: name a part that holds that"
                    )

    def check_freeze(self) -> None:
        """Raise ValueError where an entry of `freeze` names nothing, or where nothing is left to train."""
        self.check_parts(self.freeze)
        if self._all_frozen(self.tensors(self.full())):
            raise ValueError(f"{self.name}: with freeze = {', '.join(self.freeze)} nothing is left to train")

    def check_left(self, arch: Architecture) -> None:
        """Raise ValueError where nothing of an architecture is left to train."""
        if self.freeze and self._all_frozen(self.tensors(arch)):
            learned = (spec.shape for name, spec in self.tensors(arch).items() if not name.endswith(STATISTICS))
            parameters = sum(math.prod(shape) for shape in learned)
            raise ValueError(
                f"{self.name}: with freeze = {', '.join(self.freeze)} nothing is left to train of the model of "
                f"{parameters:,} parameters, which devices may get"
            )

    def check_trained(self, parts: Iterable[str]) -> None:
        """Raise ValueError where a part names nothing, or only what is frozen."""
        parts = list(parts)
        self.check_parts(parts)
        for part in parts if self.freeze else ():
            if self._all_frozen(name for name in self.tensor_names() if lies_in(name, part)):
                raise ValueError(f"{part} is frozen, so that no learning rate makes a difference: leave it out")

    def _all_frozen(self, names: Iterable[str]) -> bool:
        """Whether all of these tensors that gradients could train are frozen."""
        return all(self.is_frozen(name) for name in names if not name.endswith(STATISTICS))

    def _with_frozen(self, network: Network) -> Network:
        """The network, with no gradients of what is frozen."""
        for name, parameter in network.named_parameters() if self.freeze else ():
            if self.is_frozen(name):  # others are left alone, because a module may keep some of them still itself
                parameter.requires_grad_(False)
        return network

    def _marked(self, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        """The specs of tensors, with what is frozen marked."""
        return {name: replace(spec, frozen=self.is_frozen(name)) for name, spec in specs.items()}

    # Architectures

    @property
    @abstractmethod
    def groups(self) -> Mapping[str, int]:
        """What an architecture chooses, such as channel groups, and the full sizes, in the order of its `widths`."""

    @cached_property
    def kernels(self) -> Mapping[str, int]:
        """Elastic kernels and their full sides (odd), in the order of `Architecture.kernels`; at least 3 is kept."""
        return {}

    @cached_property
    def segments(self) -> Mapping[str, tuple[str, ...]]:
        """The exits from the shallowest on: name of the head -> the groups between it and the exit before.

        The cost of a sub-model with several exits is that of training all of them; strategies that train the deepest
        one alone are charged the same.
        """
        return {"head": tuple(self.groups)}

    @property
    def stacks(self) -> Mapping[str, tuple[str, ...]]:
        """Stacks of blocks alike: name -> its blocks in order, removable ones and those that always stay.

        The tensors of a block are those whose names begin with its name, and with "." or "_" behind it.
        """
        return {}

    def published(self) -> tuple[Architecture, Mapping[str, str]] | None:
        """The sub-model that is published with weights, and of each of its tensors what it is called there.

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

    def width(self, rate: float, rounding: Callable[[float], int] = math.ceil) -> Architecture:
        """Return the architecture that keeps `rate` of every channel group, at full depth, with full kernels.

        HeteroFL keeps ceil(rate * full) channels. RecipFL's cut of ResNet-18 to 0.2 rounds down: pass `math.floor`.
        """
        return self.up_to(len(self.segments), rate, rounding)

    @abstractmethod
    def up_to(self, exit: int, rate: float = 1.0, rounding: Callable[[float], int] = math.ceil) -> Architecture:
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

    @property
    def with_statistics(self) -> Family:
        """The family whose networks keep the batch norm statistics that this one's leave out; itself where none do."""
        return self

    @abstractmethod
    def tensors(self, arch: Architecture) -> Mapping[str, TensorSpec]:
        """Return what the sub-model's state_dict holds, in its order, without building it. Do not change the result."""

    @abstractmethod
    def place(self, arch: Architecture, select: Select = leading) -> Placement:
        """Return where the sub-model's tensors lie in the global ones, with `select` applied to every channel group.

        ValueError where the family is cut otherwise than `select` wants.
        """

    @abstractmethod
    def price(self, arch: Architecture, batch_size: int, optimizer: str) -> Cost:
        """Return what an architecture costs; `wildflower.models.cost.cost` checks the question and keeps the answer."""

    @abstractmethod
    def convolutions(self, arch: Architecture) -> Collection[Convolution]:
        """Return the distinct convolutions of an architecture, for each of which code is compiled."""


@dataclass(frozen=True)
class BlockFamily(Family):
    """A family whose networks are blocks of described layers (`wildflower.models.layers`), cut by channel groups.

    The same description builds a sub-model, names its tensors and prices it.
    """

    norm: str = "batch"
    scaler: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm not in ("batch", "static"):
            raise ValueError(f"{self.name}: norm must be 'batch' or 'static', not {self.norm!r}")
        if not isinstance(self.scaler, bool):
            raise ValueError(f"{self.name}: scaler must be true or false, not {self.scaler!r}")
        self.blocks(self.full())  # an input that is too small is found here, not in the middle of a round

    @cached_property
    def removable(self) -> Mapping[str, tuple[str, ...]]:
        """Layers that an architecture may leave out, in order: name -> the groups inside, which are then all 0.

        Of a family with several exits these are the segments behind the first; what stays must end at an exit.
        """
        return dict(list(self.segments.items())[1:])

    @abstractmethod
    def blocks(self, arch: Architecture) -> list[Block]:
        """Return the pieces of the architecture in order of computation."""

    # Architectures

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

    def up_to(self, exit: int, rate: float = 1.0, rounding: Callable[[float], int] = math.ceil) -> Architecture:
        """Return the architecture that ends at an exit, counted from 1, and keeps `rate` of every group up to there."""
        if not 1 <= exit <= len(self.segments):
            raise ValueError(f"{self.name}: exit must be 1 to {len(self.segments)}, not {exit}")
        if not 0 < rate <= 1:
            raise ValueError(f"a width rate lies in (0, 1], not {rate!r}")
        # A hair's breadth of rounding error must not add or lose a channel.
        return self.architecture(
            {group: max(1, rounding(round(rate * full, 9))) for group, full in self.groups.items()},
            without=list(self.segments)[exit:],
        )

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
            if widths[groups[0]] == 0:
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

    @property
    def outputs(self) -> Channels:
        """The classes, which are never cut."""
        return Channels(CLASSES, self.classes, self.classes)

    def scaled(self, channels: Channels) -> tuple[Layer, ...]:
        """Return what follows a hidden layer's output before its norm: the scaler of a cut layer, or nothing.

        A whole layer would be divided by 1: a pass over a large tensor for nothing.
        """
        return (Scale(channels),) if self.scaler and channels.kept < channels.full else ()

    # Sub-models

    def build(self, arch: Architecture) -> Network:
        """Return the sub-model, initialized by torch's generator, on the current default device.

        It maps (batch, *input_shape) to (batch, classes), by its deepest exit. Raises ValueError for an architecture
        out of bounds.
        """
        self.validate(arch)
        return self._with_frozen(Network(self.blocks(arch)))

    def without_memory(self, arch: Architecture) -> Network:
        """Return the sub-model on the meta device: a twin of one that is kept, which takes a third of the time."""
        return _twin(_without_memory(self, arch))

    def tensors(self, arch: Architecture) -> Mapping[str, TensorSpec]:
        """Return what the sub-model's state_dict holds, in its order, without building it. Do not change the result."""
        return _tensors(self, arch)

    def place(self, arch: Architecture, select: Select = leading) -> Placement:
        """Return where the sub-model's tensors lie in the global ones, with `select` applied to every channel group."""
        if select is leading:
            return _leading_placement(self, arch)
        return self._place(arch, select)

    def _place(self, arch: Architecture, select: Select) -> Placement:
        specs = self.tensors(arch)
        channels = self.channels(arch)
        selected = {group: select(group, entry.full, entry.kept) for group, entry in channels.items() if entry.kept > 0}
        wide = {
            axis: spread(selected[axis.group], axis.repeat)
            for spec in specs.values()
            for axis in spec.axes
            if isinstance(axis, Axis) and axis.group in selected
        }

        def coordinates(axis: Axis | Joined | Window | None) -> Coordinates:
            if isinstance(axis, Window):
                return axis.coordinates
            # Dimensions without a group of this family (input channels, classes) are never cut.
            return wide.get(axis, slice(None)) if isinstance(axis, Axis) else slice(None)

        return Placement(
            {name: tuple(coordinates(axis) for axis in spec.axes) for name, spec in specs.items()},
            {name: spec.axes for name, spec in specs.items()},
        )

    @property
    def with_statistics(self) -> BlockFamily:
        """The same family with running statistics."""
        return self if self.norm == "batch" else replace(self, norm="batch")

    def price(self, arch: Architecture, batch_size: int, optimizer: str) -> Cost:
        """Follow one training step by what is known of every layer."""
        if self.freeze:
            return _traced(self, arch, batch_size, optimizer)
        return price_of_blocks(self, arch, batch_size, optimizer)

    def convolutions(self, arch: Architecture) -> set[Convolution]:
        """Those of the layers."""
        return distinct_convolutions(self, arch)


@dataclass(frozen=True)
class ImageFamily(BlockFamily):
    """A family over images of shape (channels, height, width), where `signals` also over (channels, length)."""

    signals: ClassVar[bool] = False

    input_shape: tuple[int, ...] = (1, 28, 28)

    def __post_init__(self) -> None:
        if len(self.input_shape) != 3 and not (self.signals and len(self.input_shape) == 2):
            shapes = "(channels, height, width)" + (" or (channels, length)" if self.signals else "")
            raise ValueError(f"{self.name}: input_shape must be {shapes}, not {self.input_shape!r}")
        super().__post_init__()

    @property
    def dimensions(self) -> int:
        """2 for images, 1 for signals."""
        return len(self.input_shape) - 1

    @property
    def inputs(self) -> Channels:
        """The image's channels, which are never cut."""
        return Channels(INPUT, self.input_shape[0], self.input_shape[0])

    def normalized(self, channels: Channels, name: str = "norm") -> tuple[Layer, ...]:
        """Return the scaler, where the family has one, and the norm of a layer's output."""
        return (*self.scaled(channels), Norm(name, channels, static=self.norm == "static"))


@dataclass(frozen=True)
class ExitFamily(ImageFamily):
    """A family whose network is a chain of parts, behind any of which there may be an exit.

    `exits` are the numbers of the parts with an exit behind them, ascending; the last part always has one, and () means
    that one only. A device gets the network up to its exit, with all heads on the way. The head behind part 2 is called
    exit2, the final one head.
    """

    exits: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        parts = list(self.parts)
        if not isinstance(self.exits, tuple) or any(type(part) is not int or part not in parts for part in self.exits):
            raise ValueError(f"{self.name}: exits must be a list of numbers out of {parts}, not {self.exits!r}")
        if self.exits and list(self.exits) != sorted({*self.exits, parts[-1]}):
            raise ValueError(f"{self.name}: exits must ascend and end with {parts[-1]}, not be {list(self.exits)}")
        super().__post_init__()

    @property
    @abstractmethod
    def parts(self) -> Mapping[int, tuple[str, ...]]:
        """The numbers behind which an exit may be, in order -> the groups of that part of the network."""

    @cached_property
    def heads(self) -> Mapping[int, str]:
        """The numbers of the parts with an exit behind them -> the name of its head."""
        *early, last = self.exits or list(self.parts)[-1:]
        return {part: f"exit{part}" for part in early} | {last: "head"}

    @cached_property
    def segments(self) -> Mapping[str, tuple[str, ...]]:
        """All groups from one exit to the next."""
        segments: dict[str, tuple[str, ...]] = {}
        groups: tuple[str, ...] = ()
        for part, inside in self.parts.items():
            groups += inside
            if part in self.heads:
                segments[self.heads[part]] = groups
                groups = ()
        return segments

    def head(self, part: int, layers: tuple[Layer, ...]) -> tuple[Block, ...]:
        """Return the head of `layers` behind a part, if there is an exit."""
        name = self.heads.get(part)
        return () if name is None else (Block(name, layers, exit=name != "head"),)


# Bounded: a ResNet-152 has some 800 tensors, and a search may look at many thousand architectures.
@lru_cache(maxsize=256)
def _tensors(family: BlockFamily, arch: Architecture) -> dict[str, TensorSpec]:
    family.validate(arch)
    specs = dict(item for block in family.blocks(arch) for item in block.tensors())
    return family._marked(specs) if family.freeze else specs


@lru_cache(maxsize=64)
def _without_memory(family: BlockFamily, arch: Architecture) -> Network:
    with torch.device("meta"):
        return family.build(arch)


def _twin(module: M) -> M:
    """A module of its own, with modules of its own inside, over the same parameters and buffers."""
    twin = module.__new__(type(module))
    for name, value in module.__dict__.items():
        # What is changed in place must not be shared: an LSTM also lists its weights.
        twin.__dict__[name] = value.copy() if isinstance(value, dict | list | set) else value
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else _twin(child)
    return twin


@lru_cache(maxsize=256)
def _leading_placement(family: BlockFamily, arch: Architecture) -> Placement:
    return family._place(arch, leading)


def described(family: Family, who: str) -> BlockFamily:
    """The family, for what reads descriptions of layers; ValueError where it has none."""
    if not isinstance(family, BlockFamily):
        raise ValueError(
            f"{who} needs a family of described layers, such as resnet18 (docs/families.md): {family.name} is not one, "
            "and nothing says which channels its layers read and make"
        )
    return family


def with_weights(family: Family, architecture: Architecture, weights: Mapping[str, Tensor]) -> Network:
    """The sub-model over these very tensors: nothing is initialized or copied, and training changes them in place.

    Raises ValueError where names or shapes are not those of the sub-model.
    """
    model = family.without_memory(architecture)
    _assign(model, weights)
    fill_buffers(model, family, architecture)
    model.settle()
    return model


def _assign(model: torch.nn.Module, weights: Mapping[str, Tensor]) -> None:
    """What `load_state_dict(weights, assign=True)` does, in a third of the time, which counts once per device."""
    left = dict(weights)
    held = {id(tensor) for tensor in getattr(model, "held", ())}
    made: dict[int, Tensor] = {}  # what a tensor of the model has become: tied weights are one under several names

    def taken(name: str, before: Tensor) -> Tensor:
        found = left.pop(name, None)
        if found is None or found.shape != before.shape:
            given = "there is none" if found is None else f"it has the shape {tuple(found.shape)}"
            raise ValueError(f"{name} of {type(model).__name__} must have the shape {tuple(before.shape)}: {given}")
        return found

    for path, module in model.named_modules(remove_duplicate=False):
        before = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if (new := made.get(id(parameter))) is None:
                    # The same memory with a version of its own: the tensors of a message are views of one, and what a
                    # module writes in place would seem to autograd to change all that lies beside it.
                    value = taken(before + name, parameter).data
                    new = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
                    vars(new).update(vars(parameter))  # marks that the module has given it
                    if id(parameter) in held:  # what a list holds too stays the object that it is
                        torch.utils.swap_tensors(parameter, new)
                        new = parameter
                    made[id(parameter)] = made[id(new)] = new  # a module that stands at two places is met twice
                module._parameters[name] = new
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                if (new := made.get(id(buffer))) is None:
                    new = taken(before + name, buffer).data
                    if id(buffer) in held:
                        torch.utils.swap_tensors(buffer, new)
                        new = buffer
                    made[id(buffer)] = made[id(new)] = new
                module._buffers[name] = new
    if left:
        raise ValueError(f"{type(model).__name__} has no tensor {', '.join(sorted(left)[:3])}")


def fill_buffers(model: Network, family: Family, architecture: Architecture) -> None:
    """Give a model without memory the buffers that it still lacks, as a fresh one has them.

    Those that are drawn at random, such as a fixed permutation, are the same for an architecture on every device and in
    every score.
    """
    if not any(buffer.is_meta for buffer in model.buffers()):
        return
    # A GPU's generator is left alone: the device's own draws go on from it.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(0)
        fresh = dict(family.build(architecture).named_buffers(remove_duplicate=False))
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        if buffer.is_meta:
            path, _, own = name.rpartition(".")
            model.get_submodule(path)._buffers[own] = fresh[name]


def _traced(family: BlockFamily, arch: Architecture, batch_size: int, optimizer: str) -> Cost:
    """The cost by a step on fake tensors: what layers need whose input or weight has no gradient is not described."""
    from wildflower.models.trace import follow  # only a server prices so: devices need not load it

    shape, dtype, accumulates = family.input_shape, family.input_dtype, OPTIMIZERS[optimizer].accumulates
    step = follow(lambda: family.build(arch), batch_size, shape, dtype, family.classes, accumulates=accumulates)
    return step.cost(batch_size, optimizer)


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that are not frozen, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _ends(name: str) -> list[int]:
    """Where the dotted parts of a name end."""
    return [position for position, letter in enumerate(name) if letter == "."] + [len(name)]


def lies_in(name: str, part: str) -> bool:
    """Say whether a tensor is a part of a model, or lies in it: a part's name ends in front of a dot."""
    return name == part or name.startswith(f"{part}.")


def is_count(value: object) -> bool:
    """Say whether a value, as read from JSON, is a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
