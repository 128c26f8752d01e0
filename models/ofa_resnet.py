"""ResNet-50 as a supernet: elastic depth, expand ratio and width (once-for-all, Cai et al. 2020; ResNet-D's layers)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from wildflower.models.architecture import Architecture
from wildflower.models.convolutions import Conv, draw_by_outgoing
from wildflower.models.elastic import Decision, ElasticFamily, divisible
from wildflower.models.layers import Block, Channels, GlobalPool, Halve, Layer, Linear, Relu
from wildflower.models.network import Network


@dataclass(frozen=True)
class OfaResNet50(ElasticFamily):
    """Bottleneck blocks in four stages of 2, 2, 4 and 2 blocks and up to `extra_depths` more.

    The space chooses the depth of every stage, the expand ratio of every block (its inside by its outside), the width
    of the stem's two parts and of every stage, and whether the stem has its residual block. Streams of stages are one
    group each, the two insides of a block are one group, and all of them are multiples of 8.

    As in ResNet-D (He et al. 2019) the stem has three 3x3 convolutions, and shortcuts halve by pooling. `plain` is
    ResNet-50-D but for the shortcut over its second convolution: 25,576,264 parameters for 1000 classes.

    Args:
        first_channels: of the stem; the stages have 4, 8, 16 and 32 times as many.
        extra_depths, expand_ratios, widths: the options, ascending. Widths are shares of full ones.
    """

    name: ClassVar[str] = "ofa-resnet50"
    BASE_DEPTHS: ClassVar[tuple[int, ...]] = (2, 2, 4, 2)

    first_channels: int = 64
    extra_depths: tuple[int, ...] = (0, 1, 2)
    expand_ratios: tuple[float, ...] = (0.2, 0.25, 0.35)
    widths: tuple[float, ...] = (0.65, 0.8, 1.0)

    def __post_init__(self) -> None:
        self._check_counts("first_channels")
        self._check_options("extra_depths", self.extra_depths, 0, 16, whole=True)
        self._check_options("expand_ratios", self.expand_ratios, 0.01, 4, whole=False)
        self._check_options("widths", self.widths, 0.01, 8, whole=False)
        super().__post_init__()

    @property
    def published_strides(self) -> tuple[int, ...]:
        """Return those of the stem's first convolution, of its pooling, and of the stages."""
        return (2, 2, 1, 2, 2, 2)

    @cached_property
    def stages(self) -> dict[str, tuple[str, ...]]:
        """Return the blocks of the stages."""
        return {
            f"stage{number}": tuple(f"stage{number}_{place}" for place in range(base + self.extra_depths[-1]))
            for number, base in enumerate(self.BASE_DEPTHS, start=1)
        }

    @property
    def stacks(self) -> Mapping[str, tuple[str, ...]]:
        """Return the stages."""
        return self.stages

    def _stem(self, width: float) -> int:
        return divisible(self.first_channels * width)

    def _stream(self, stage: int, width: float) -> int:
        return divisible(self.first_channels * 2 ** (stage + 1) * width)

    @staticmethod
    def _inner(outputs: int, expand: float) -> int:
        return divisible(round(outputs * expand))

    @cached_property
    def groups(self) -> dict[str, int]:
        """Return the stem's inside, residual block (1 or 0) and result; each stage's stream and its blocks' insides."""
        widest, ratio = self.widths[-1], self.expand_ratios[-1]
        groups = {"stem.inner": divisible(self._stem(widest) // 2), "stem.residual": 1, "stem": self._stem(widest)}
        for number, (stage, blocks) in enumerate(self.stages.items(), start=1):
            groups[f"{stage}.stream"] = self._stream(number, widest)
            groups |= {f"{block}.inner": self._inner(self._stream(number, widest), ratio) for block in blocks}
        return groups

    @cached_property
    def removable(self) -> Mapping[str, tuple[str, ...]]:
        """Return the stem's residual block, and the blocks behind the smallest depth of their stage."""
        found = {"stem_residual": ("stem.residual",)}
        for blocks, base in zip(self.stages.values(), self.BASE_DEPTHS, strict=True):
            found |= {block: (f"{block}.inner",) for block in blocks[base + self.extra_depths[0] :]}
        return found

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        """Return those of the stem, then the width, depth and blocks' expand ratios of every stage."""
        found = [
            Decision("stem.inner.width", self.widths),
            Decision("stem.residual", (0, 1)),
            Decision("stem.width", self.widths),
        ]
        for (stage, blocks), base in zip(self.stages.items(), self.BASE_DEPTHS, strict=True):
            depth = f"{stage}.depth"
            found.append(Decision(f"{stage}.width", self.widths))
            found.append(Decision(depth, tuple(base + extra for extra in self.extra_depths)))
            found += [Decision(f"{b}.expand", self.expand_ratios, depth, place) for place, b in enumerate(blocks)]
        return tuple(found)

    def chosen(self, values: Mapping[str, float]) -> Architecture:
        """Return the architecture of the decisions' values."""
        widths = [
            divisible(self._stem(values["stem.inner.width"]) // 2),
            int(values["stem.residual"]),
            self._stem(values["stem.width"]),
        ]
        for number, (stage, blocks) in enumerate(self.stages.items(), start=1):
            outputs = self._stream(number, values[f"{stage}.width"])
            widths.append(outputs)
            for place, block in enumerate(blocks):
                kept = place < values[f"{stage}.depth"]
                widths.append(self._inner(outputs, values[f"{block}.expand"]) if kept else 0)
        return Architecture(tuple(widths))

    def plain(self) -> Architecture:
        """Return ResNet-50's depths 3, 4, 6, 3 and expand ratio 0.25; ValueError where the options do not have them."""
        values: dict[str, float] = {}
        for decision in self.decisions:
            if decision.name.endswith(".width"):
                wanted: float = 1
            elif decision.name.endswith(".expand"):
                wanted = 0.25
            else:
                wanted = {"stem.residual": 1, "stage1.depth": 3, "stage2.depth": 4, "stage3.depth": 6}.get(
                    decision.name, 3
                )
            if wanted not in decision.options:
                raise ValueError(f"{self.name}: ResNet-50 needs {wanted} among the options of {decision.name}")
            values[decision.name] = wanted
        return self.chosen(values)

    def blocks(self, arch: Architecture) -> list[Block]:
        """Return the stem, the kept blocks and the head."""
        channels, strides = self.channels(arch), iter(self.strides)
        inner, stream = channels["stem.inner"], channels["stem"]
        conv = Conv("conv", self.inputs, inner, kernel=3, stride=next(strides), padding=1, bias=False)
        blocks = [Block("stem", (conv, *self.normalized(inner), Relu()))]
        if channels["stem.residual"].kept:
            conv = Conv("conv", inner, inner, kernel=3, padding=1, bias=False)
            blocks.append(Block("stem_residual", (conv, *self.normalized(inner), Relu()), shortcut=()))
        conv = Conv("conv", inner, stream, kernel=3, padding=1, bias=False)
        pool: tuple[Layer, ...] = (Halve("max"),) if next(strides) == 2 else ()
        blocks.append(Block("stem_out", (conv, *self.normalized(stream), Relu(), *pool)))
        for (stage, names), stride in zip(self.stages.items(), strides, strict=True):
            outputs = channels[f"{stage}.stream"]
            for place, name in enumerate(names):
                if channels[f"{name}.inner"].kept:
                    inside = channels[f"{name}.inner"]
                    blocks.append(self._bottleneck(name, stream, inside, outputs, 1 if place else stride, place))
                    stream = outputs
        return [*blocks, Block("head", (GlobalPool(), Linear("classifier", stream, self.outputs)))]

    def _bottleneck(
        self, name: str, inputs: Channels, inner: Channels, outputs: Channels, stride: int, place: int
    ) -> Block:
        layers = (
            Conv("conv1", inputs, inner, kernel=1, bias=False),
            *self.normalized(inner, "norm1"),
            Relu(),
            Conv("conv2", inner, inner, kernel=3, stride=stride, padding=1, bias=False),
            *self.normalized(inner, "norm2"),
            Relu(),
            Conv("conv3", inner, outputs, kernel=1, bias=False),
            *self.normalized(outputs, "norm3"),
        )
        shortcut: tuple[Layer, ...] = ()
        if place == 0:
            halve: tuple[Layer, ...] = (Halve("average"),) if stride == 2 else ()
            shortcut = (*halve, Conv("conv", inputs, outputs, kernel=1, bias=False), *self.normalized(outputs))
        return Block(name, layers, shortcut, after=(Relu(),))

    def build(self, arch: Architecture) -> Network:
        """Return the sub-network, its convolutions drawn as `draw_by_outgoing` does."""
        network = super().build(arch)
        draw_by_outgoing(network)
        return network
