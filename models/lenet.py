"""LeNet-5 with batch norm (LeCun et al. 1998; as in RecipFL, WWW 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from models.architecture import Architecture
from models.base import ImageFamily
from models.layers import Block, Conv, Flatten, Linear, Pool, Relu


@dataclass(frozen=True)
class LeNet5(ImageFamily):
    """Two 5x5 convolutions with batch norm, ReLU and average pooling, then features-120-84-classes.

    44,470 parameters for 1x28x28 inputs and 10 classes (256-120-84-10 behind the flatten). The convolutions have no
    padding, as in the original; inputs with a side below 16, which that would shrink to nothing, are padded by 2.
    """

    name: ClassVar[str] = "lenet5"

    @cached_property
    def groups(self) -> dict[str, int]:
        """Channel groups and their full sizes."""
        return {"conv1": 6, "conv2": 16, "fc1": 120, "fc2": 84}

    def blocks(self, arch: Architecture) -> list[Block]:
        """Two convolutional blocks and the head."""
        channels = self.channels(arch)
        padding = 2 if min(self.input_shape[1:]) < 16 else 0
        features = []
        inputs, shape = self.inputs, self.input_shape
        for number in (1, 2):
            outputs = channels[f"conv{number}"]
            conv = Conv("conv", inputs, outputs, kernel=5, padding=padding)
            features.append(Block(f"block{number}", (conv, *self.normalized(outputs), Relu(), Pool("average"))))
            inputs, shape = outputs, features[-1].output_shape(shape)
        fc1, fc2 = channels["fc1"], channels["fc2"]
        head = (
            Flatten(),
            Linear("fc1", inputs, fc1, positions=shape[1] * shape[2]),
            *self.scaled(fc1),
            Relu(),
            Linear("fc2", fc1, fc2),
            *self.scaled(fc2),
            Relu(),
            Linear("classifier", fc2, self.outputs),
        )
        return [*features, Block("head", head)]
