"""DenseNet for small images (Huang et al., CVPR 2017): every layer reads what all layers before it have made."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from wildflower.models.architecture import Architecture
from wildflower.models.base import is_count
from wildflower.models.block_family import ExitFamily
from wildflower.models.convolutions import Conv
from wildflower.models.layers import Block, Channels, GlobalPool, Layer, Linear, Pool, Relu


@dataclass(frozen=True)
class DenseNet121(ExitFamily):
    """DenseNet-121 with bottlenecks and half the channels behind each of its first three stages; stem of 3x3.

    1,035,268 parameters for 100 classes, 276,484 with `growth` 6. Only the insides of layers are channel groups: what
    passes between layers is made of many layers' channels and is never cut; smaller models have less `growth` or, with
    `depth` below 4, only the first stages, in front of an adapter that takes the stride of the others and ends in their
    channels: a 3x3 convolution, norm and ReLU (depth 1 of RecipFL: 258,484). Early `exits` are behind stages 1 to 3,
    each with the norm, ReLU and pooling of the head in front of its classifier.
    """

    name: ClassVar[str] = "densenet121"
    stage_layers: ClassVar[tuple[int, ...]] = (6, 12, 24, 16)

    input_shape: tuple[int, ...] = (3, 32, 32)
    growth: int = 12
    depth: int = 4

    def __post_init__(self) -> None:
        self._check_counts("growth")
        if not is_count(self.depth) or self.depth > len(self.stage_layers):
            raise ValueError(f"{self.name}: depth must be 1 to {len(self.stage_layers)} stages, not {self.depth!r}")
        super().__post_init__()

    @cached_property
    def parts(self) -> dict[int, tuple[str, ...]]:
        """Return the stages, each with the insides of its layers."""
        stages = enumerate(self.stage_layers[: self.depth], start=1)
        return {stage: tuple(f"stage{stage}_{layer}" for layer in range(layers)) for stage, layers in stages}

    @cached_property
    def groups(self) -> dict[str, int]:
        """Return the inside of every layer, four times as wide as what it adds."""
        return {group: 4 * self.growth for groups in self.parts.values() for group in groups}

    def blocks(self, arch: Architecture) -> list[Block]:
        """Return the stem, the layers with transitions between stages, and the head."""
        inside = self.channels(arch)
        stream = self._fixed(2 * self.growth)
        blocks = [Block("stem", (Conv("conv", self.inputs, stream, kernel=3, padding=1, bias=False),))]
        for stage, layers in enumerate(self.stage_layers, start=1):
            if stage <= self.depth:
                for layer in range(layers):
                    blocks.append(self._layer(f"stage{stage}_{layer}", stream, inside[f"stage{stage}_{layer}"]))
                    stream = self._fixed(stream.kept + self.growth)
                if stage < self.depth:
                    blocks += self.head(stage, self._classified(stream))
                    if not inside[f"stage{stage + 1}_0"].kept:
                        return blocks
            else:
                stream = self._fixed(stream.kept + layers * self.growth)
            if stage == len(self.stage_layers):
                break
            before, stream = stream, self._fixed(stream.kept // 2)
            if stage <= self.depth:
                conv = Conv("conv", before, stream, kernel=1, bias=False)
                transition = (*self.normalized(before), Relu(), conv, Pool("average"))
                blocks.append(Block(f"transition{stage}", transition))
                made = stream
        if self.depth == len(self.stage_layers):
            return [*blocks, Block("head", self._classified(stream))]
        stride = 2 ** (len(self.stage_layers) - 1 - self.depth)
        adapter = Conv("conv", made, stream, kernel=3, stride=stride, padding=1, bias=False)
        blocks.append(Block("adapter", (adapter, *self.normalized(stream), Relu())))
        return [*blocks, Block("head", (GlobalPool(), Linear("classifier", stream, self.outputs)))]

    def _classified(self, stream: Channels) -> tuple[Layer, ...]:
        return (*self.normalized(stream), Relu(), GlobalPool(), Linear("classifier", stream, self.outputs))

    def _layer(self, name: str, stream: Channels, inside: Channels) -> Block:
        layers = (
            *self.normalized(stream, "norm1"),
            Relu(),
            Conv("conv1", stream, inside, kernel=1, bias=False),
            *self.normalized(inside, "norm2"),
            Relu(),
            Conv("conv2", inside, self._fixed(self.growth), kernel=3, padding=1, bias=False),
        )
        return Block(name, layers, concat=True)

    def _fixed(self, channels: int) -> Channels:
        return Channels("stream", channels, channels)
