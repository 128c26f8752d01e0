"""A multilayer perceptron, for rows of numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from wildflower.models.architecture import Architecture
from wildflower.models.block_family import BlockFamily
from wildflower.models.layers import Block, Channels, Flatten, Layer, Linear, Relu
from wildflower.models.placement import INPUT


@dataclass(frozen=True)
class Mlp(BlockFamily):
    """Flatten, hidden layers with ReLU, and a classifier: the 2NN of McMahan et al. 2017 with its 200-200 units.

    199,210 parameters for 1x28x28 inputs and 10 classes, as the paper says. It takes inputs of any shape whose first
    dimension is the channels, such as (columns, 1) for rows of a table. `hidden` are the full sizes. It has no norm, so
    `norm` has nothing to act on.
    """

    name: ClassVar[str] = "mlp"

    input_shape: tuple[int, ...] = (1, 28, 28)
    hidden: tuple[int, ...] = (200, 200)

    def __post_init__(self) -> None:
        self._check_sizes("hidden")
        super().__post_init__()

    @cached_property
    def groups(self) -> dict[str, int]:
        """Return one group per hidden layer."""
        return {f"fc{number}": size for number, size in enumerate(self.hidden, start=1)}

    def blocks(self, arch: Architecture) -> list[Block]:
        """Return the one block of all layers."""
        inputs = Channels(INPUT, self.input_shape[0], self.input_shape[0])
        positions = math.prod(self.input_shape[1:])
        layers: list[Layer] = [Flatten()]
        for name, outputs in self.channels(arch).items():
            layers += [Linear(name, inputs, outputs, positions), *self.scaled(outputs), Relu()]
            inputs, positions = outputs, 1
        return [Block("head", (*layers, Linear("classifier", inputs, self.outputs, positions)))]
