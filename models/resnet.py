"""ResNets for small images (He et al. 2016): 3x3 stem, batch norm after each convolution, projection shortcuts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import nn

from models.architecture import Architecture
from models.base import ImageFamily
from models.layers import Block, Channels, Conv, GlobalPool, Layer, Linear, Relu

STAGE_CHANNELS = (64, 128, 256, 512)


@dataclass(frozen=True)
class ResNet(ImageFamily):
    """Four stages of residual blocks; the first block of stages 2 to 4 halves the image.

    What passes between the blocks of a stage, the stream, is one channel group per stage, so that additions stay
    aligned; the channels inside a block are groups of their own. A depth of d keeps the first d blocks of a stage.
    """

    stage_blocks: ClassVar[tuple[int, ...]]
    bottleneck: ClassVar[bool]

    input_shape: tuple[int, ...] = (3, 32, 32)

    @cached_property
    def stages(self) -> dict[str, int]:
        """Blocks of the four stages."""
        return {f"stage{number}": blocks for number, blocks in enumerate(self.stage_blocks, start=1)}

    @cached_property
    def block_groups(self) -> dict[str, tuple[str, int]]:
        """The groups inside each block: one in a basic block, two in a bottleneck."""
        return {
            f"{stage}_{block}.inner{inner}": (stage, block)
            for stage, blocks in self.stages.items()
            for block in range(blocks)
            for inner in ((1, 2) if self.bottleneck else (1,))
        }

    @cached_property
    def groups(self) -> dict[str, int]:
        """The stem, where it is not the first stage's stream, then each stage's stream and the groups of its blocks."""
        groups = {"stem": STAGE_CHANNELS[0]} if self.bottleneck else {}
        for stage, full in zip(self.stages, STAGE_CHANNELS, strict=True):
            groups[f"{stage}.stream"] = full * 4 if self.bottleneck else full
            groups |= {group: full for group, (owner, _) in self.block_groups.items() if owner == stage}
        return groups

    def blocks(self, arch: Architecture) -> list[Block]:
        """The stem, the kept blocks and the head."""
        channels = self.channels(arch)
        stream = channels["stem" if self.bottleneck else "stage1.stream"]
        stem = (Conv("conv", self.inputs, stream, kernel=3, padding=1, bias=False), *self.normalized(stream), Relu())
        blocks = [Block("stem", stem)]
        for stage, depth in zip(self.stages, arch.depths, strict=True):
            outputs = channels[f"{stage}.stream"]
            for block in range(depth):
                name = f"{stage}_{block}"
                stride = 2 if block == 0 and stage != "stage1" else 1
                blocks.append(self._residual(name, stream, channels, outputs, stride))
                stream = outputs
        return [*blocks, Block("head", (GlobalPool(), Linear("classifier", stream, self.outputs)))]

    def build(self, arch: Architecture) -> nn.Module:
        """Return the sub-model, its convolutions drawn as He et al. (2015) do, by their outgoing connections."""
        network = super().build(arch)
        for module in network.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        return network

    def _residual(
        self, name: str, inputs: Channels, channels: dict[str, Channels], outputs: Channels, stride: int
    ) -> Block:
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
        layers: list[Layer] = []
        for number, conv in enumerate(convs, start=1):
            layers += [conv, *self.normalized(conv.outputs, f"norm{number}"), Relu()]
        shortcut: tuple[Layer, ...] = ()
        if inputs != outputs:
            projection = Conv("conv", inputs, outputs, kernel=1, stride=stride, bias=False)
            shortcut = (projection, *self.normalized(outputs))
        # The last ReLU follows the addition.
        return Block(name, tuple(layers[:-1]), shortcut, after=(Relu(),))


@dataclass(frozen=True)
class ResNet18(ResNet):
    """11,173,962 parameters for 10 classes."""

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
