"""VGG as HypeMeFed uses it, with its final exit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from models.architecture import Architecture
from models.base import ImageFamily, is_count
from models.layers import Block, Conv, Dropout, Flatten, Layer, Linear, Pool, Relu


@dataclass(frozen=True)
class Vgg(ImageFamily):
    """Blocks of two 3x3 convolutions (bias, batch norm, ReLU) and a max pooling; then flatten, dropout 0.5, classifier.

    `block_channels` are the output channels of the blocks: (32, 64, 128, 256) for SVHN, (64, 128, 256, 512) for STL-10
    and for UniMiB SHAR as 1x18x25 images, as in HypeMeFed's code. Its three-exit models (1,245,886, 5,979,486 and
    4,729,048 parameters) are this network plus a head behind blocks 1 and 2.
    """

    name: ClassVar[str] = "vgg"

    input_shape: tuple[int, ...] = (3, 32, 32)
    block_channels: tuple[int, ...] = (32, 64, 128, 256)

    def __post_init__(self) -> None:
        if not self.block_channels or not all(is_count(size) for size in self.block_channels):
            raise ValueError(f"{self.name}: block_channels must hold sizes >= 1, not {self.block_channels!r}")
        super().__post_init__()

    @cached_property
    def groups(self) -> dict[str, int]:
        """Two groups per block, one per convolution."""
        return {f"block{block}.conv{conv}": full for block, full in enumerate(self.block_channels) for conv in (1, 2)}

    def blocks(self, arch: Architecture) -> list[Block]:
        """The convolutional blocks and the head."""
        channels = self.channels(arch)
        blocks = []
        inputs, shape = self.inputs, self.input_shape
        for block in range(len(self.block_channels)):
            layers: list[Layer] = []
            for conv in (1, 2):
                outputs = channels[f"block{block}.conv{conv}"]
                layers += [
                    Conv(f"conv{conv}", inputs, outputs, kernel=3, padding=1),
                    *self.normalized(outputs, f"norm{conv}"),
                    Relu(),
                ]
                inputs = outputs
            blocks.append(Block(f"block{block}", (*layers, Pool("max"))))
            shape = blocks[-1].output_shape(shape)
        classifier = Linear("classifier", inputs, self.outputs, positions=shape[1] * shape[2])
        return [*blocks, Block("head", (Flatten(), Dropout(0.5), classifier))]
