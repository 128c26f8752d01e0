"""LeNet-5 with batch norm (LeCun et al. 1998; as in RecipFL, WWW 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from wildflower.models.architecture import Architecture
from wildflower.models.block_family import ExitFamily
from wildflower.models.convolutions import Conv
from wildflower.models.layers import Block, Channels, Flatten, Layer, Linear, Pool, Relu


@dataclass(frozen=True)
class LeNet5(ExitFamily):
    """Two 5x5 convolutions with batch norm, ReLU and average pooling, then features-120-84-classes.

    44,470 parameters for 1x28x28 inputs and 10 classes (256-120-84-10 behind the flatten). The convolutions have no
    padding, as in the original; inputs with a side below 16, which that would shrink to nothing, are padded by 2.

    `conv_channels` and `hidden` are the full sizes. RecipFL's small LeNet is (6, 3) and (84,): 48-84-10 behind the
    flatten and 5,593 parameters, without the layer of 120, and so no cut of the whole one. An early exit behind the
    first convolution is flatten, linear.
    """

    name: ClassVar[str] = "lenet5"

    conv_channels: tuple[int, ...] = (6, 16)
    hidden: tuple[int, ...] = (120, 84)

    def __post_init__(self) -> None:
        self._check_sizes("conv_channels", "hidden")
        super().__post_init__()

    @cached_property
    def groups(self) -> dict[str, int]:
        """Channel groups and their full sizes."""
        convs = {f"conv{number}": size for number, size in enumerate(self.conv_channels, start=1)}
        return convs | {f"fc{number}": size for number, size in enumerate(self.hidden, start=1)}

    @cached_property
    def parts(self) -> dict[int, tuple[str, ...]]:
        """Return the convolutions; the hidden layers belong to the last."""
        parts = {number: (f"conv{number}",) for number in range(1, len(self.conv_channels) + 1)}
        last = len(parts)
        return parts | {last: parts[last] + tuple(f"fc{number}" for number in range(1, len(self.hidden) + 1))}

    def blocks(self, arch: Architecture) -> list[Block]:
        """Return the convolutional blocks, each with its head where it has one."""
        channels = self.channels(arch)
        padding = 2 if min(self.input_shape[1:]) < 16 else 0
        blocks: list[Block] = []
        inputs, shape = self.inputs, self.input_shape
        for number in self.parts:
            outputs = channels[f"conv{number}"]
            if not outputs.kept:
                break
            conv = Conv("conv", inputs, outputs, kernel=5, padding=padding)
            body = Block(f"block{number}", (conv, *self.normalized(outputs), Relu(), Pool("average")))
            inputs, shape = outputs, body.output_shape(shape)
            hidden = [channels[group] for group in self.parts[number][1:]]
            blocks += [body, *self.head(number, self._classifier(inputs, shape[1] * shape[2], hidden))]
        return blocks

    def _classifier(self, inputs: Channels, positions: int, hidden: list[Channels]) -> tuple[Layer, ...]:
        """Flatten, the hidden layers and the classifier."""
        layers: list[Layer] = [Flatten()]
        for number, outputs in enumerate(hidden, start=1):
            layers += [Linear(f"fc{number}", inputs, outputs, positions), *self.scaled(outputs), Relu()]
            inputs, positions = outputs, 1
        return (*layers, Linear("classifier", inputs, self.outputs, positions))
