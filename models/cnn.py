"""Plain convolutional networks: of three and of ten convolutions, and the benchmark CNN of pfl-research."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from wildflower.models.architecture import Architecture
from wildflower.models.base import is_count
from wildflower.models.block_family import ExitFamily, ImageFamily
from wildflower.models.convolutions import Conv
from wildflower.models.layers import Block, Dropout, Flatten, Layer, Linear, Pool, Relu


@dataclass(frozen=True)
class Cnn(ExitFamily):
    """Convolutions with batch norm and ReLU, some with max pooling behind; heads: flatten, linear.

    Convolutions count from 1, and there may be an exit behind any of them. With `kernel` 5 or more an architecture also
    chooses the side of each kernel; this does not go with early exits.
    """

    signals: ClassVar[bool] = True
    conv_channels: ClassVar[tuple[int, ...]]
    pooled: ClassVar[tuple[int, ...]]

    kernel: int = 3

    def __post_init__(self) -> None:
        if not is_count(self.kernel) or self.kernel < 3 or self.kernel % 2 == 0:
            raise ValueError(f"{self.name}: kernel must be an odd side >= 3, not {self.kernel!r}")
        super().__post_init__()
        if self.kernels and len(self.segments) > 1:
            raise ValueError(f"{self.name}: early exits go with kernel = 3 only, not {self.kernel}")

    @cached_property
    def kernels(self) -> dict[str, int]:
        """Return one elastic kernel per convolution, where there is a choice."""
        return dict.fromkeys(self.groups, self.kernel) if self.kernel > 3 else {}

    @cached_property
    def groups(self) -> dict[str, int]:
        """Return one group per convolution."""
        return {f"conv{number}": full for number, full in enumerate(self.conv_channels, start=1)}

    @cached_property
    def parts(self) -> dict[int, tuple[str, ...]]:
        """Return the convolutions."""
        return {number: (group,) for number, group in enumerate(self.groups, start=1)}

    def blocks(self, arch: Architecture) -> list[Block]:
        """Return a block per convolution, each with its head where it has one."""
        blocks: list[Block] = []
        inputs, shape = self.inputs, self.input_shape
        for number, outputs in enumerate(self.channels(arch).values(), start=1):
            if not outputs.kept:
                break
            side = arch.kernels[number - 1] if self.kernels else self.kernel
            conv = Conv(
                "conv", inputs, outputs, side, padding=side // 2, full_kernel=self.kernel, dimensions=self.dimensions
            )
            layers: tuple[Layer, ...] = (conv, *self.normalized(outputs), Relu())
            if number in self.pooled:
                layers += (Pool("max", dimensions=self.dimensions),)
            body = Block(f"block{number}", layers)
            inputs, shape = outputs, body.output_shape(shape)
            classifier = Linear("classifier", inputs, self.outputs, positions=math.prod(shape[1:]))
            blocks += [body, *self.head(number, (Flatten(), classifier))]
        return blocks


@dataclass(frozen=True)
class Cnn3(Cnn):
    """Three convolutions of 32, 64 and 128 channels, each with max pooling.

    The shape of the network in the preliminary study of HypeMeFed (a CNN of three convolutions for Fashion-MNIST); the
    paper does not print its widths, these are ours: 104,650 parameters for 1x28x28 inputs and 10 classes. With exits
    (1, 2, 3) there are 63,114, 113,108 and 198,750 up to each.
    """

    name: ClassVar[str] = "cnn3"
    conv_channels: ClassVar[tuple[int, ...]] = (32, 64, 128)
    pooled: ClassVar[tuple[int, ...]] = (1, 2, 3)


@dataclass(frozen=True)
class Cnn10(Cnn):
    """Ten convolutions of 16 (three), 32 (three) and 64 channels (four), pooled behind the first, third and sixth.

    For HypeMeFed's experiment with ten exits on Fashion-MNIST, whose network the paper does not print. Our choice is
    small enough for a processor with all ten heads: 285,956 parameters for 1x28x28 inputs and 10 classes, 163,786 with
    the final head only. The first pooling comes early because a head behind n channels of 28x28 has 7,840 n weights.
    """

    name: ClassVar[str] = "cnn10"
    conv_channels: ClassVar[tuple[int, ...]] = (16, 16, 16, 32, 32, 32, 64, 64, 64, 64)
    pooled: ClassVar[tuple[int, ...]] = (1, 3, 6)


@dataclass(frozen=True)
class PflCnn(ImageFamily):
    """The CNN of pfl-research's CIFAR-10 benchmarks (Granqvist et al. 2024), which has no norm at all.

    Convolutions 3x3x32 and 3x3x64 without padding, max pooling, dropout 0.25, a layer of 128, dropout 0.5 and a
    classifier: 1,626,442 parameters for 3x32x32 inputs and 10 classes. `norm` has nothing to act on.
    """

    name: ClassVar[str] = "pfl-cnn"

    input_shape: tuple[int, ...] = (3, 32, 32)

    @cached_property
    def groups(self) -> dict[str, int]:
        """Return one group per hidden layer."""
        return {"conv1": 32, "conv2": 64, "fc1": 128}

    def blocks(self, arch: Architecture) -> list[Block]:
        """Return the convolutions and the head."""
        conv1, conv2, fc1 = self.channels(arch).values()
        features = Block(
            "features",
            (
                Conv("conv1", self.inputs, conv1, kernel=3),
                *self.scaled(conv1),
                Relu(),
                Conv("conv2", conv1, conv2, kernel=3),
                *self.scaled(conv2),
                Relu(),
                Pool("max"),
                Dropout(0.25),
            ),
        )
        _, height, width = features.output_shape(self.input_shape)
        head = (
            Flatten(),
            Linear("fc1", conv2, fc1, positions=height * width),
            *self.scaled(fc1),
            Relu(),
            Dropout(0.5),
            Linear("classifier", fc1, self.outputs),
        )
        return [features, Block("head", head)]
