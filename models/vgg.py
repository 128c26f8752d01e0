"""VGG as HypeMeFed uses it, over images or signals, with any number of exits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from wildflower.models.architecture import Architecture
from wildflower.models.block_family import ExitFamily
from wildflower.models.convolutions import Conv
from wildflower.models.layers import Block, Dropout, Flatten, Layer, Linear, Pool, Relu


@dataclass(frozen=True)
class Vgg(ExitFamily):
    """Blocks of two convolutions (kernel 3, bias, batch norm, ReLU) and a max pooling.

    A head is flatten, dropout 0.5 and a linear layer. `block_channels` are the output channels of the blocks:
    (32, 64, 128, 256) for SVHN, (64, 128, 256, 512) for STL-10 and for UniMiB SHAR as 1x18x25 images, as in HypeMeFed's
    code. Blocks count from 0; its models have `exits` (1, 2, 3), with 1,245,886, 5,979,486 and 4,729,048 parameters.
    """

    name: ClassVar[str] = "vgg"
    signals: ClassVar[bool] = True

    input_shape: tuple[int, ...] = (3, 32, 32)
    block_channels: tuple[int, ...] = (32, 64, 128, 256)

    def __post_init__(self) -> None:
        self._check_sizes("block_channels")
        super().__post_init__()

    @cached_property
    def groups(self) -> dict[str, int]:
        """Two groups per block, one per convolution."""
        return {f"block{block}.conv{conv}": full for block, full in enumerate(self.block_channels) for conv in (1, 2)}

    @cached_property
    def parts(self) -> dict[int, tuple[str, ...]]:
        """Return the blocks."""
        return {block: (f"block{block}.conv1", f"block{block}.conv2") for block in range(len(self.block_channels))}

    def blocks(self, arch: Architecture) -> list[Block]:
        """Return the convolutional blocks, each with its head where it has one."""
        channels = self.channels(arch)
        blocks: list[Block] = []
        inputs, shape = self.inputs, self.input_shape
        for block, groups in self.parts.items():
            if not channels[groups[0]].kept:
                break
            layers: list[Layer] = []
            for conv, group in enumerate(groups, start=1):
                outputs = channels[group]
                layers += [
                    Conv(f"conv{conv}", inputs, outputs, kernel=3, padding=1, dimensions=self.dimensions),
                    *self.normalized(outputs, f"norm{conv}"),
                    Relu(),
                ]
                inputs = outputs
            body = Block(f"block{block}", (*layers, Pool("max", dimensions=self.dimensions)))
            shape = body.output_shape(shape)
            classifier = Linear("classifier", inputs, self.outputs, positions=math.prod(shape[1:]))
            blocks += [body, *self.head(block, (Flatten(), Dropout(0.5), classifier))]
        return blocks
