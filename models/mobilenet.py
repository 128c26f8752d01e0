"""MobileNetV2 and MobileNetV3 as supernets: elastic depth, expand ratio and kernel (Cai et al. 2020).

A plain published network is one of the sub-networks, or of the family: MobileNetV2's is `plain()` of its family, and so
is MobileNetV3-Large's, whose widths inside the blocks are no expand ratios.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import nn

from wildflower.models.architecture import Architecture
from wildflower.models.convolutions import Conv, DepthwiseConv, SqueezeExcite
from wildflower.models.elastic import Decision, ElasticFamily, divisible
from wildflower.models.layers import Block, Channels, Dropout, GlobalPool, HardSwish, Layer, Linear, Norm, Relu, Relu6
from wildflower.models.network import Network
from wildflower.plugins.raised_as import raised_as

MAX_KERNEL = 15


@dataclass(frozen=True)
class MobileNet(ElasticFamily):
    """Stages of inverted residual blocks: 1x1 expansion, depthwise convolution, 1x1 projection without activation.

    What passes between the blocks of a stage, the stream, is one channel group per stage, which sub-networks of the
    space keep whole; the inside of a block is a group of its own. The space chooses the depth of every stage, and the
    expand ratio and the kernel of every block. Smaller kernels are the centers of larger ones, and a stage of depth d
    has its first d blocks.

    Args:
        width_multiplier: what all channels outside the blocks are multiplied by, rounded to multiples of 8; the last
            features grow with it, and never shrink below their published number.
        stage_channels: of the first block, then of the stages.
        depths, expand_ratios, kernel_sizes: the options, ascending.
        dropout: in front of the classifier.
    """

    STEM: ClassVar[int]
    FEATURES: ClassVar[int]
    STRIDES: ClassVar[tuple[int, ...]]  # of the stages
    FIXED: ClassVar[int] = 0  # stages at the end, of one block
    EPSILON: ClassVar[float] = 1e-5
    STEM_ACTIVATION: ClassVar[Layer]
    PUBLISHED_DEPTHS: ClassVar[tuple[int, ...]]  # of the stages
    TORCHVISION_HEAD: ClassVar[Mapping[str, str]]  # layer of the head -> what torchvision calls it

    width_multiplier: float = 1.0
    stage_channels: tuple[int, ...] = ()
    depths: tuple[int, ...] = (2, 3, 4)
    expand_ratios: tuple[float, ...] = (3, 4, 6)
    kernel_sizes: tuple[int, ...] = (3, 5, 7)
    dropout: float = 0.2

    def __post_init__(self) -> None:
        if (
            isinstance(self.width_multiplier, bool)
            or not isinstance(self.width_multiplier, int | float)
            or not 0 < self.width_multiplier <= 8
        ):
            raise ValueError(
                f"{self.name}: width_multiplier must be above 0 and at most 8, not {self.width_multiplier!r}"
            )
        if isinstance(self.dropout, bool) or not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise ValueError(f"{self.name}: dropout must be 0 to below 1, not {self.dropout!r}")
        self._check_sizes("stage_channels", count=len(self.STRIDES) + 1)
        self._check_options("depths", self.depths, 1, 16, whole=True)
        self._check_options("expand_ratios", self.expand_ratios, 1, 16, whole=False)
        self._check_options("kernel_sizes", self.kernel_sizes, 3, MAX_KERNEL, whole=True)
        if any(size % 2 == 0 for size in self.kernel_sizes):
            raise ValueError(f"{self.name}: kernel_sizes must be odd, not {self.kernel_sizes!r}")
        super().__post_init__()

    @property
    def published_strides(self) -> tuple[int, ...]:
        """Return those of the stem and of the stages."""
        return (2, *self.STRIDES)

    # Names and sizes

    @cached_property
    def stages(self) -> dict[str, tuple[str, ...]]:
        """Return the blocks of the stages behind the first block."""
        count = len(self.STRIDES)
        return {
            f"stage{number}": tuple(
                f"stage{number}_{place}" for place in range(self.depths[-1] if number <= count - self.FIXED else 1)
            )
            for number in range(1, count + 1)
        }

    @property
    def stacks(self) -> Mapping[str, tuple[str, ...]]:
        """Return the stages."""
        return self.stages

    @cached_property
    def streams(self) -> dict[str, int]:
        """Return what passes out of the stem, the first block and each stage."""
        first, *others = (divisible(size * self.width_multiplier) for size in self.stage_channels)
        stem = divisible(self.STEM * self.width_multiplier)
        # A first block that keeps the number of channels has a shortcut: both are one group.
        streams = {"stem": stem} | ({} if first == stem else {"first.stream": first})
        return streams | {f"{stage}.stream": size for stage, size in zip(self.stages, others, strict=True)}

    def _inputs(self, stage: str, place: int) -> str:
        """Return the stream that a block reads."""
        if place:
            return f"{stage}.stream"
        streams = list(self.streams)
        return streams[streams.index(f"{stage}.stream") - 1]

    @cached_property
    def _inner(self) -> dict[str, int]:
        """Return the full width inside every block."""
        return {
            block: divisible(round(self.streams[self._inputs(stage, place)] * self.expand_ratios[-1]))
            for stage, blocks in self.stages.items()
            for place, block in enumerate(blocks)
        }

    @property
    @abstractmethod
    def head_groups(self) -> dict[str, int]:
        """Return the groups behind the last stage."""

    @cached_property
    def groups(self) -> dict[str, int]:
        """Streams, the inside of every block, and the head's."""
        groups = dict(list(self.streams.items())[: -len(self.stages)])
        for stage, blocks in self.stages.items():
            groups[f"{stage}.stream"] = self.streams[f"{stage}.stream"]
            groups |= {f"{block}.inner": self._inner[block] for block in blocks}
        return groups | self.head_groups

    @cached_property
    def removable(self) -> Mapping[str, tuple[str, ...]]:
        """Return the blocks behind the smallest depth of their stage."""
        return {block: (f"{block}.inner",) for blocks in self.stages.values() for block in blocks[self.depths[0] :]}

    @cached_property
    def kernels(self) -> Mapping[str, int]:
        """Return one per block of the stages."""
        return {block: self.kernel_sizes[-1] for blocks in self.stages.values() for block in blocks}

    # The space

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        """Return the depth of every stage, each with the expand ratios and kernels of its blocks."""
        found = []
        for stage, blocks in self.stages.items():
            depth = f"{stage}.depth"
            found.append(Decision(depth, self.depths if len(blocks) > 1 else (1,)))
            for place, block in enumerate(blocks):
                found.append(Decision(f"{block}.expand", self.expand_ratios, depth, place))
                found.append(Decision(f"{block}.kernel", self.kernel_sizes, depth, place))
        return tuple(found)

    def chosen(self, values: Mapping[str, float]) -> Architecture:
        """Return the architecture of the decisions' values."""
        widths, kernels = dict(self.groups), dict(self.kernels)
        for stage, blocks in self.stages.items():
            for place, block in enumerate(blocks):
                if place < values[f"{stage}.depth"]:
                    inputs = self.streams[self._inputs(stage, place)]
                    widths[f"{block}.inner"] = divisible(round(inputs * values[f"{block}.expand"]))
                    kernels[block] = int(values[f"{block}.kernel"])
                else:
                    widths[f"{block}.inner"] = 0
        return Architecture(tuple(widths.values()), tuple(kernels.values()))

    # The network

    def normalized(self, channels: Channels, name: str = "norm") -> tuple[Layer, ...]:
        """Return the scaler, where the family has one, and the norm of a layer's output."""
        return (*self.scaled(channels), Norm(name, channels, static=self.norm == "static", epsilon=self.EPSILON))

    def _dropout(self) -> tuple[Layer, ...]:
        return (Dropout(self.dropout),) if self.dropout else ()

    @abstractmethod
    def _activation(self, stage: int) -> Layer:
        """Inside the blocks of a stage; of stage 0, the first block."""

    def _gate(self, stage: int, block: str, channels: dict[str, Channels]) -> tuple[Layer, ...]:
        """Return what follows the depthwise convolution's activation."""
        return ()

    @abstractmethod
    def _head(self, inputs: Channels, channels: dict[str, Channels]) -> list[Block]:
        """Return the blocks behind the last stage."""

    def blocks(self, arch: Architecture) -> list[Block]:
        """Return the stem, the first block, the kept blocks of the stages and the head."""
        channels = self.channels(arch)
        sides = dict(zip(self.kernels, arch.kernels, strict=True))
        strides = iter(self.strides)
        stream = channels["stem"]
        conv = Conv("conv", self.inputs, stream, kernel=3, stride=next(strides), padding=1, bias=False)
        blocks = [Block("stem", (conv, *self.normalized(stream), self.STEM_ACTIVATION))]
        first = channels.get("first.stream", stream)
        layers = (
            DepthwiseConv("depthwise", stream, 3),
            *self.normalized(stream, "norm2"),
            self._activation(0),
            Conv("project", stream, first, kernel=1, bias=False),
            *self.normalized(first, "norm3"),
        )
        blocks.append(Block("first", layers, shortcut=() if first == stream else None))
        stream = first
        for number, (stage, names) in enumerate(self.stages.items(), start=1):
            outputs, stride = channels[f"{stage}.stream"], next(strides)
            for place, name in enumerate(names):
                inner = channels[f"{name}.inner"]
                if not inner.kept:
                    continue
                layers = (
                    Conv("expand", stream, inner, kernel=1, bias=False),
                    *self.normalized(inner, "norm1"),
                    self._activation(number),
                    DepthwiseConv("depthwise", inner, sides[name], 1 if place else stride, self.kernels[name]),
                    *self.normalized(inner, "norm2"),
                    self._activation(number),
                    *self._gate(number, name, channels),
                    Conv("project", inner, outputs, kernel=1, bias=False),
                    *self.normalized(outputs, "norm3"),
                )
                blocks.append(Block(name, layers, shortcut=() if place else None))
                stream = outputs
        return [*blocks, *self._head(stream, channels)]

    def build(self, arch: Architecture) -> Network:
        """Return the sub-network, initialized as torchvision does."""
        network = super().build(arch)
        for module in network.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0, 0.01)
                nn.init.zeros_(module.bias)
        return network

    # The published network

    @abstractmethod
    def plain(self) -> Architecture:
        """Return the architecture of the published network; ValueError where the family does not hold it."""

    @abstractmethod
    def _torchvision_parts(self, stage: int) -> dict[str, str]:
        """Return what torchvision calls the parts of a block of a stage, within the block; of stage 0, the first."""

    def torchvision_names(self) -> dict[str, str]:
        """Return what torchvision's model calls every tensor of the plain architecture."""
        parts = {"stem.conv": "features.0.0", "stem.norm": "features.0.1"}
        blocks = [("first", 0)]
        for stage, (names, depth) in enumerate(zip(self.stages.values(), self.PUBLISHED_DEPTHS, strict=True), start=1):
            blocks += [(name, stage) for name in names[:depth]]
        for place, (block, stage) in enumerate(blocks, start=1):
            for part, path in self._torchvision_parts(stage).items():
                parts[f"{block}.{part}"] = f"features.{place}.{path}"
        last = len(blocks) + 1
        parts |= {"features.conv": f"features.{last}.0", "features.norm": f"features.{last}.1"}
        parts |= self.TORCHVISION_HEAD
        found: dict[str, str] = {}
        for name in self.tensors(self.plain()):
            part, _, kind = name.rpartition(".")
            found[name] = f"{parts[part]}.{kind}"
        return found

    def published(self) -> tuple[Architecture, Mapping[str, str]]:
        """Return the plain network, as torchvision has it."""
        return self.plain(), self.torchvision_names()

    def _plain(self, inner: Mapping[str, int], kernels: Mapping[str, int]) -> Architecture:
        """Return the architecture of these sizes by block; what is not named has its full size."""
        widths, sides, depths = dict(self.groups), dict(self.kernels), self.PUBLISHED_DEPTHS
        for blocks, depth in zip(self.stages.values(), depths, strict=True):
            for place, block in enumerate(blocks):
                if place < depth:
                    widths[f"{block}.inner"] = inner.get(block, self._inner[block])
                    sides[block] = kernels.get(block, sides[block])
                else:
                    widths[f"{block}.inner"] = 0
        arch = Architecture(tuple(widths.values()), tuple(sides.values()))
        with raised_as(ValueError, f"{self.name} with these arguments does not hold the published network: "):
            if any(len(blocks) < depth for blocks, depth in zip(self.stages.values(), depths, strict=True)):
                raise ValueError(f"{self.name}: depths {self.depths} are fewer blocks than its {depths}")
            self.validate(arch)
        return arch


@dataclass(frozen=True)
class MobileNetV2(MobileNet):
    """MobileNetV2 (Sandler et al. 2018): ReLU6, the last stage of one block; 3,504,872 parameters for 1000 classes.

    Once-for-all's space of this kind has ProxylessNAS's channels and width 1.3: `stage_channels =
    [16, 24, 40, 80, 96, 192, 320], width_multiplier = 1.3`.
    """

    name: ClassVar[str] = "mobilenet-v2"
    STEM: ClassVar[int] = 32
    FEATURES: ClassVar[int] = 1280
    STRIDES: ClassVar[tuple[int, ...]] = (2, 2, 2, 1, 2, 1)
    STEM_ACTIVATION: ClassVar[Layer] = Relu6()
    PUBLISHED_DEPTHS: ClassVar[tuple[int, ...]] = (2, 3, 4, 3, 3, 1)
    TORCHVISION_HEAD: ClassVar[Mapping[str, str]] = {"head.classifier": "classifier.1"}
    FIXED: ClassVar[int] = 1

    stage_channels: tuple[int, ...] = (16, 24, 32, 64, 96, 160, 320)

    @property
    def head_groups(self) -> dict[str, int]:
        """Return the last features."""
        return {"features": divisible(self.FEATURES * max(1.0, self.width_multiplier))}

    def _activation(self, stage: int) -> Layer:
        return Relu6()

    def _head(self, inputs: Channels, channels: dict[str, Channels]) -> list[Block]:
        features = channels["features"]
        conv = Conv("conv", inputs, features, kernel=1, bias=False)
        return [
            Block("features", (conv, *self.normalized(features), Relu6())),
            Block("head", (GlobalPool(), *self._dropout(), Linear("classifier", features, self.outputs))),
        ]

    def plain(self) -> Architecture:
        """Return the published network: expand ratio 6, kernels of 3 and 2, 3, 4, 3, 3 and 1 blocks."""
        inner = {
            block: divisible(round(self.streams[self._inputs(stage, place)] * 6))
            for stage, blocks in self.stages.items()
            for place, block in enumerate(blocks)
        }
        return self._plain(inner, dict.fromkeys(self.kernels, 3))

    def _torchvision_parts(self, stage: int) -> dict[str, str]:
        first = min(stage, 1)
        before = {"expand": "0.0", "norm1": "0.1"} if stage else {}
        parts = {"depthwise": f"{first}.0", "norm2": f"{first}.1", "project": str(first + 1), "norm3": str(first + 2)}
        return {part: f"conv.{path}" for part, path in (before | parts).items()}


@dataclass(frozen=True)
class MobileNetV3(MobileNet):
    """MobileNetV3-Large (Howard et al. 2019): squeeze-excite in stages 2, 4 and 5, hard swish from stage 3 on.

    Once-for-all's spaces of this kind have `width_multiplier` 1.0 or 1.2. The published network has 5,483,032
    parameters for 1000 classes.
    """

    name: ClassVar[str] = "mobilenet-v3"
    STEM: ClassVar[int] = 16
    FEATURES: ClassVar[int] = 1280
    STRIDES: ClassVar[tuple[int, ...]] = (2, 2, 2, 1, 2)
    STEM_ACTIVATION: ClassVar[Layer] = HardSwish()
    PUBLISHED_DEPTHS: ClassVar[tuple[int, ...]] = (2, 3, 4, 2, 3)
    TORCHVISION_HEAD: ClassVar[Mapping[str, str]] = {"head.fc": "classifier.0", "head.classifier": "classifier.3"}
    EPSILON: ClassVar[float] = 1e-3
    GATED: ClassVar[tuple[int, ...]] = (2, 4, 5)
    SWISH_FROM: ClassVar[int] = 3
    # By stage: kernel and width inside the blocks of the published network.
    PUBLISHED: ClassVar[tuple[tuple[int, tuple[int, ...]], ...]] = (
        (3, (64, 72)),
        (5, (72, 120, 120)),
        (3, (240, 200, 184, 184)),
        (3, (480, 672)),
        (5, (672, 960, 960)),
    )

    stage_channels: tuple[int, ...] = (16, 24, 40, 80, 112, 160)

    @property
    def head_groups(self) -> dict[str, int]:
        """Return the last convolution, six times as wide as the last stage, and the layer behind the pooling."""
        last = list(self.streams.values())[-1]
        return {"features": last * 6, "fc": divisible(self.FEATURES * max(1.0, self.width_multiplier))}

    def channels(self, arch: Architecture) -> dict[str, Channels]:
        """Return the groups, and of every gated block what its squeeze keeps: a quarter of the block's inside."""
        channels = super().channels(arch)
        for number in self.GATED:
            for block in self.stages[f"stage{number}"]:
                inner = channels[f"{block}.inner"]
                kept = divisible(inner.kept // 4) if inner.kept else 0
                channels[f"{block}.squeeze"] = Channels(f"{block}.squeeze", kept, divisible(inner.full // 4))
        return channels

    def _activation(self, stage: int) -> Layer:
        return HardSwish() if stage >= self.SWISH_FROM else Relu()

    def _gate(self, stage: int, block: str, channels: dict[str, Channels]) -> tuple[Layer, ...]:
        if stage not in self.GATED:
            return ()
        return (SqueezeExcite("gate", channels[f"{block}.inner"], channels[f"{block}.squeeze"]),)

    def _head(self, inputs: Channels, channels: dict[str, Channels]) -> list[Block]:
        features, fc = channels["features"], channels["fc"]
        conv = Conv("conv", inputs, features, kernel=1, bias=False)
        layers = (
            GlobalPool(),
            Linear("fc", features, fc),
            *self.scaled(fc),
            HardSwish(),
            *self._dropout(),
            Linear("classifier", fc, self.outputs),
        )
        return [Block("features", (conv, *self.normalized(features), HardSwish())), Block("head", layers)]

    def plain(self) -> Architecture:
        """Return the published network, whose widths inside the blocks are its own."""
        inner, kernels = {}, {}
        for (kernel, widths), blocks in zip(self.PUBLISHED, self.stages.values(), strict=True):
            for block, width in zip(blocks, widths, strict=False):
                inner[block], kernels[block] = width, kernel
        return self._plain(inner, kernels)

    def _torchvision_parts(self, stage: int) -> dict[str, str]:
        first, gated = min(stage, 1), stage in self.GATED
        last = first + 1 + gated
        parts = {"expand": "0.0", "norm1": "0.1"} if stage else {}
        parts |= {"depthwise": f"{first}.0", "norm2": f"{first}.1", "project": f"{last}.0", "norm3": f"{last}.1"}
        parts |= {f"gate.{layer}": f"2.{layer}" for layer in ("fc1", "fc2")} if gated else {}
        return {part: f"block.{path}" for part, path in parts.items()}
