"""ResNets for small images (He et al. 2016): 3x3 stem, batch norm after each convolution, projection shortcuts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from wildflower.models.architecture import Architecture
from wildflower.models.base import is_count
from wildflower.models.block_family import ExitFamily
from wildflower.models.convolutions import Conv, draw_by_outgoing
from wildflower.models.layers import Block, Channels, GlobalPool, Layer, Linear, Relu, Relu6
from wildflower.models.network import Network

ACTIVATIONS: dict[str, Layer] = {"relu": Relu(), "relu6": Relu6()}


@dataclass(frozen=True)
class ResNet(ExitFamily):
    """Four stages of residual blocks; the first block of stages 2 to 4 halves the image and doubles the channels.

    What passes between the blocks of a stage, the stream, is one channel group per stage, so that additions stay
    aligned; the channels inside a block are groups of their own. Any block but the first of a stage may be left out
    (`activation="relu6"` bounds what passes through where blocks may be missing). With early `exits`, behind stages 1
    to 3, whole stages are left out instead, from the last one on.

    `depth` below 4 is a network of the first stages only, in which an adapter stands for the others: a 3x3 convolution
    with norm and activation that takes their stride and ends in their channels (RecipFL's depth-scaled models).

    `stage_channels` are the channels of the four stages, where they are not `first_channels` doubled from one to the
    next: (12, 25, 51, 102) make RecipFL's width-scaled ResNet-18, 444,218 parameters for 10 classes.

    With `preactivation` norm and activation stand in front of each convolution, and behind the last block (He et al.
    2016, "Identity Mappings in Deep Residual Networks"), as in HeteroFL's code and in that of dynamic model search. In
    front of a projection both of its sides read the same activations.
    """

    stage_blocks: ClassVar[tuple[int, ...]]
    bottleneck: ClassVar[bool]

    input_shape: tuple[int, ...] = (3, 32, 32)
    first_channels: int = 64
    activation: str = "relu"
    depth: int = 4
    stage_channels: tuple[int, ...] = ()
    preactivation: bool = False

    def __post_init__(self) -> None:
        if not is_count(self.depth) or self.depth > len(self.stage_blocks):
            raise ValueError(f"{self.name}: depth must be 1 to {len(self.stage_blocks)} stages, not {self.depth!r}")
        if self.depth < len(self.stage_blocks) and len(self.exits) > 1:
            raise ValueError(f"{self.name}: early exits go with depth = {len(self.stage_blocks)} only")
        self._check_counts("first_channels")
        if self.stage_channels:
            self._check_sizes("stage_channels", count=len(self.stage_blocks))
        if self.stage_channels and self.first_channels != ResNet.first_channels:
            raise ValueError(f"{self.name}: stage_channels say the first channels as well: leave out first_channels")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"{self.name}: activation must be 'relu' or 'relu6', not {self.activation!r}")
        if not isinstance(self.preactivation, bool):
            raise ValueError(f"{self.name}: preactivation must be true or false, not {self.preactivation!r}")
        if self.preactivation and (len(self.exits) > 1 or self.depth < len(self.stage_blocks)):
            raise ValueError(
                f"{self.name}: preactivation goes with one exit and depth = {len(self.stage_blocks)} only, for a head "
                "needs the norm that follows the last block"
            )
        super().__post_init__()

    @cached_property
    def stages(self) -> dict[str, tuple[str, ...]]:
        """Return the blocks of the stages."""
        return {
            f"stage{number}": tuple(f"stage{number}_{block}" for block in range(blocks))
            for number, blocks in enumerate(self.stage_blocks[: self.depth], start=1)
        }

    @property
    def stacks(self) -> Mapping[str, tuple[str, ...]]:
        """Return the stages."""
        return self.stages

    @cached_property
    def removable(self) -> Mapping[str, tuple[str, ...]]:
        """Return all blocks but the first of a stage, which changes the shape; with early exits all later segments."""
        if len(self.segments) > 1:
            return super().removable
        return {block: self._inner(block) for blocks in self.stages.values() for block in blocks[1:]}

    @cached_property
    def groups(self) -> dict[str, int]:
        """Return the stem, if it is not the first stage's stream, then each stage's stream and its blocks' groups."""
        sizes = self.stage_channels or tuple(self.first_channels * 2**n for n in range(len(self.stage_blocks)))
        groups = {"stem": sizes[0]} if self.bottleneck else {}
        for full, (stage, blocks) in zip(sizes, self.stages.items(), strict=False):
            groups[f"{stage}.stream"] = full * 4 if self.bottleneck else full
            groups |= {group: full for block in blocks for group in self._inner(block)}
        last = sizes[-1] * 4 if self.bottleneck else sizes[-1]
        return groups | ({"adapter": last} if self.depth < len(self.stage_blocks) else {})

    @cached_property
    def parts(self) -> dict[int, tuple[str, ...]]:
        """Return the stages; the stem is in front of the first."""
        stem = ("stem",) if self.bottleneck else ()
        parts = {
            number: (*(stem if number == 1 else ()), f"{stage}.stream", *(g for b in blocks for g in self._inner(b)))
            for number, (stage, blocks) in enumerate(self.stages.items(), start=1)
        }
        if "adapter" in self.groups:
            parts[self.depth] += ("adapter",)
        return parts

    def _inner(self, block: str) -> tuple[str, ...]:
        """Return the groups inside a block: one in a basic block, two in a bottleneck."""
        return (f"{block}.inner1", f"{block}.inner2") if self.bottleneck else (f"{block}.inner1",)

    def blocks(self, arch: Architecture) -> list[Block]:
        """Return the stem, the kept blocks of each stage and its head where it has one."""
        channels, activation = self.channels(arch), ACTIVATIONS[self.activation]
        stream = channels["stem" if self.bottleneck else "stage1.stream"]
        conv = Conv("conv", self.inputs, stream, kernel=3, padding=1, bias=False)
        stem = (conv,) if self.preactivation else (conv, *self.normalized(stream), activation)
        blocks = [Block("stem", stem)]
        for number, (stage, names) in enumerate(self.stages.items(), start=1):
            outputs = channels[f"{stage}.stream"]
            if not outputs.kept:
                break
            for name in names:
                if channels[f"{name}.inner1"].kept:
                    stride = 2 if name == names[0] and stage != "stage1" else 1
                    blocks += self._residual(name, stream, channels, outputs, stride)
                    stream = outputs
            if number == self.depth and "adapter" in channels:
                stride = 2 ** (len(self.stage_blocks) - self.depth)
                adapter = channels["adapter"]
                conv = Conv("conv", stream, adapter, kernel=3, stride=stride, padding=1, bias=False)
                blocks.append(Block("adapter", (conv, *self.normalized(adapter), activation)))
                stream = adapter
            if number == self.depth and self.preactivation:
                blocks.append(Block("final", (*self.normalized(stream), activation)))
            blocks += self.head(number, (GlobalPool(), Linear("classifier", stream, self.outputs)))
        return blocks

    def build(self, arch: Architecture) -> Network:
        """Return the sub-model, its convolutions drawn as `draw_by_outgoing` does."""
        network = super().build(arch)
        draw_by_outgoing(network)
        return network

    def _residual(
        self, name: str, inputs: Channels, channels: dict[str, Channels], outputs: Channels, stride: int
    ) -> list[Block]:
        """Return one residual block; if a pre-activated one projects its input, the norm in front is its own block."""
        activation = ACTIVATIONS[self.activation]
        first = channels[f"{name}.inner1"]
        if self.bottleneck:
            second = channels[f"{name}.inner2"]
            convs = [
                Conv("conv1", inputs, first, kernel=1, bias=False),
                Conv("conv2", first, second, kernel=3, stride=stride, padding=1, bias=False),
                Conv("conv3", second, outputs, kernel=1, bias=False),
            ]
        else:
            convs = [
                Conv("conv1", inputs, first, kernel=3, stride=stride, padding=1, bias=False),
                Conv("conv2", first, outputs, kernel=3, padding=1, bias=False),
            ]
        projection = Conv("conv", inputs, outputs, kernel=1, stride=stride, bias=False)
        layers: list[Layer] = []
        for number, conv in enumerate(convs, start=1):
            if self.preactivation:
                layers += [*self.normalized(conv.inputs, f"norm{number}"), activation, conv]
            else:
                layers += [conv, *self.normalized(conv.outputs, f"norm{number}"), activation]
        if not self.preactivation:
            # The last activation follows the addition.
            shortcut = (projection, *self.normalized(outputs)) if inputs != outputs else ()
            return [Block(name, tuple(layers[:-1]), shortcut, after=(activation,))]
        if inputs == outputs:
            return [Block(name, tuple(layers), ())]
        front = layers.index(convs[0])
        return [Block(f"{name}_front", tuple(layers[:front])), Block(name, tuple(layers[front:]), (projection,))]


@dataclass(frozen=True)
class ResNet18(ResNet):
    """11,173,962 parameters for 10 classes; 11,178,472 with the four exits of HypeMeFed's (1, 2, 3, 4)."""

    name: ClassVar[str] = "resnet18"
    stage_blocks: ClassVar[tuple[int, ...]] = (2, 2, 2, 2)
    bottleneck: ClassVar[bool] = False


@dataclass(frozen=True)
class ResNet34(ResNet):
    """21,282,122 parameters for 10 classes."""

    name: ClassVar[str] = "resnet34"
    stage_blocks: ClassVar[tuple[int, ...]] = (3, 4, 6, 3)
    bottleneck: ClassVar[bool] = False


@dataclass(frozen=True)
class ResNet152(ResNet):
    """58,156,618 parameters for 10 classes, in bottleneck blocks: four times as wide outside as inside."""

    name: ClassVar[str] = "resnet152"
    stage_blocks: ClassVar[tuple[int, ...]] = (3, 8, 36, 3)
    bottleneck: ClassVar[bool] = True
