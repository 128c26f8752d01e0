"""Families whose networks are blocks of described layers, cut by channel groups."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar, TypeVar

import torch
from torch import nn
from typing_extensions import override

from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.cost import OPTIMIZERS, Convolution, Cost
from wildflower.models.frozen import marked, without_gradients
from wildflower.models.group_family import GroupFamily
from wildflower.models.layers import Block, Channels, Layer, Norm, Scale, TensorSpec
from wildflower.models.network import Network
from wildflower.models.placement import CLASSES, INPUT
from wildflower.models.training_step import Step

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class BlockFamily(GroupFamily):
    """A family whose networks are blocks of described layers (`wildflower.models.layers`), cut by channel groups.

    The same description builds a sub-model, names its tensors and prices it.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.blocks(self.full())  # an input that is too small is found here, not in the middle of a round

    @abstractmethod
    def blocks(self, arch: Architecture) -> list[Block]:
        """Return the pieces of the architecture in order of computation."""

    @property
    def outputs(self) -> Channels:
        """Return the classes, which are never cut."""
        return Channels(CLASSES, self.classes, self.classes)

    def scaled(self, channels: Channels) -> tuple[Layer, ...]:
        """Return what follows a hidden layer's output before its norm: the scaler of a cut layer, or nothing.

        A whole layer would be divided by 1: a pass over a large tensor for nothing.
        """
        return (Scale(channels),) if self.scaler and channels.kept < channels.full else ()

    # Sub-models

    @override
    def build(self, arch: Architecture) -> Network:
        self.validate(arch)
        return without_gradients(self, Network(self.blocks(arch)))

    def without_memory(self, arch: Architecture) -> Network:
        """Return the sub-model on the meta device: a twin of one that is kept, which takes a third of the time."""
        return _twin(_without_memory(self, arch))

    def tensors(self, arch: Architecture) -> Mapping[str, TensorSpec]:
        """Return what the sub-model's state_dict holds, in its order, without building it. Do not change the result."""
        return _tensors(self, arch)

    def price(self, arch: Architecture, batch_size: int, optimizer: str) -> Cost:
        """Follow one training step by what is known of every layer; with frozen layers, on fake tensors.

        What layers need whose input or weight has no gradient is not described.
        """
        if not self.freeze:
            return self._step(arch, batch_size, piling=not OPTIMIZERS[optimizer].accumulates).cost(optimizer)
        return super().price(arch, batch_size, optimizer)

    def answer(self, arch: Architecture, batch_size: int) -> tuple[int, ...]:
        """Return the shape of an example's answer: described networks answer for an input as a whole."""
        return (self.classes,)

    def convolutions(self, arch: Architecture) -> set[Convolution]:
        """Return those of the layers."""
        return self._step(arch, 1).convolutions

    def inference_macs(self, arch: Architecture) -> int:
        """Return the multiplications, each with an addition, of one example's forward pass.

        This is what papers on architecture search call "FLOPs". Counted are those of convolutions, linear layers and
        attention.
        """
        return self._step(arch, 1).macs

    def _step(self, arch: Architecture, batch_size: int, *, piling: bool = True) -> Step:
        self.validate(arch)
        step = Step(batch_size, piling=piling)
        step.run(self.blocks(arch), self.input_shape, self.classes, self.input_dtype.itemsize)
        return step


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
        """Return the image's channels, which are never cut."""
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
        """Return the numbers behind which an exit may be, in order -> the groups of that part of the network."""

    @cached_property
    def heads(self) -> Mapping[int, str]:
        """Return the numbers of the parts with an exit behind them -> the name of its head."""
        *early, last = self.exits or list(self.parts)[-1:]
        return {part: f"exit{part}" for part in early} | {last: "head"}

    @cached_property
    def segments(self) -> Mapping[str, tuple[str, ...]]:
        """Return all groups from one exit to the next."""
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
    return marked(family, specs) if family.freeze else specs


@lru_cache(maxsize=64)
def _without_memory(family: BlockFamily, arch: Architecture) -> Network:
    with torch.device("meta"):
        return family.build(arch)


def _twin(module: M) -> M:
    """Return a module of its own, with modules of its own inside, over the same parameters and buffers."""
    twin = module.__new__(type(module))
    for name, value in module.__dict__.items():
        # What is changed in place must not be shared: an LSTM also lists its weights.
        twin.__dict__[name] = value.copy() if isinstance(value, dict | list | set) else value
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else _twin(child)
    return twin


def described(family: Family, who: str) -> BlockFamily:
    """Return the family, for what reads descriptions of layers; ValueError if it has none."""
    if not isinstance(family, BlockFamily):
        raise ValueError(
            f"{who} needs a family of described layers, such as resnet18 (docs/families.md): {family.name} is not one, "
            "and nothing says which channels its layers read and make"
        )
    return family
