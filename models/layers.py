"""Layers and blocks: one description builds a network, places its tensors and is priced by `wildflower.models.cost`.

A layer is a small frozen value that names the channel groups it reads and writes. `build` makes the module, `tensors`
says which channel group each dimension of each of its tensors belongs to, `output_shape` the shape of its result.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from typing_extensions import override

from wildflower.models.cost import (
    FLOAT_BYTES,
    Convolution,
    Footprint,
    Shape,
    passing_footprint,
    pooling_footprint,
)
from wildflower.models.max_pool import HalvingMaxPool
from wildflower.models.placement import CLASSES, AnyAxis, Axis


@dataclass(frozen=True)
class Channels:
    """The channels that one architecture keeps of a channel group."""

    group: str
    kept: int
    full: int


@dataclass(frozen=True)
class TensorSpec:
    """Shape and type of one tensor of a sub-model's state, and the channel group of each dimension.

    frozen: it is not trained, and travels to a device once.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    axes: tuple[AnyAxis, ...]
    frozen: bool = False

    @property
    def of_classes(self) -> bool:
        """Say whether it has as many entries along a side as there are classes, as those of a head have."""
        return any(isinstance(axis, Axis) and axis.group == CLASSES for axis in self.axes)


class Layer(ABC):
    """One step of a network."""

    name: str

    @abstractmethod
    def build(self) -> nn.Module:
        """Return the module, initialized, on the current default device."""

    def output_shape(self, shape: Shape) -> Shape:
        """Return the shape of the result for one example of `shape`; ValueError where the layer does not fit it."""
        return shape

    @abstractmethod
    def tensors(self) -> dict[str, TensorSpec]:
        """Return the tensors of the module's state, in its order."""

    @abstractmethod
    def footprint(self, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
        """Return what the layer allocates and saves in a training step.

        first: no parameters come before it, so that nobody asks for the gradient of its input.
        """

    def convolutions(self, shape: Shape, result_shape: Shape) -> set[Convolution]:
        """Return what it computes by oneDNN's convolutions: nothing by default."""
        return set()


class Stateless(Layer):
    """A layer without tensors, which needs no name. By default its backward pass reads nothing that it keeps."""

    name = ""

    def tensors(self) -> dict[str, TensorSpec]:
        """Return nothing."""
        return {}

    @override
    def footprint(self, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
        return passing_footprint(shape, result_shape, batch_size)


def spec(*dimensions: tuple[int, AnyAxis]) -> TensorSpec:
    """Return the spec of a float tensor from the size and the axis of each of its dimensions."""
    return TensorSpec(tuple(size for size, _ in dimensions), torch.float32, tuple(axis for _, axis in dimensions))


@dataclass(frozen=True)
class Linear(Layer):
    """A fully connected layer, which every position of a sequence goes through alike.

    After a flatten, each input channel stands for `positions` consecutive features.
    """

    name: str
    inputs: Channels
    outputs: Channels
    positions: int = 1

    def build(self) -> nn.Module:
        """Return an `nn.Linear`."""
        return nn.Linear(self.inputs.kept * self.positions, self.outputs.kept)

    def output_shape(self, shape: Shape) -> Shape:
        """(..., features) -> (..., outputs)."""
        if shape[-1] != self.inputs.kept * self.positions:
            raise ValueError(f"{self.name}: expects {self.inputs.kept * self.positions} features, gets {shape}")
        return (*shape[:-1], self.outputs.kept)

    def tensors(self) -> dict[str, TensorSpec]:
        """Weight (out, in * positions) and bias (out)."""
        out = (self.outputs.kept, Axis(self.outputs.group))
        features = (self.inputs.kept * self.positions, Axis(self.inputs.group, self.positions))
        return {"weight": spec(out, features), "bias": spec(out)}

    @override
    def footprint(self, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
        weight = shape[-1] * result_shape[-1]
        parameters = weight + result_shape[-1]
        result = FLOAT_BYTES * batch_size * math.prod(result_shape)
        gradient = 0 if first else FLOAT_BYTES * batch_size * math.prod(shape)
        return Footprint(
            result=result,
            saves_input=True,
            forward_peak=result,
            gradient=gradient,
            backward_peak=gradient + FLOAT_BYTES * parameters,
            parameters=parameters,
            largest_parameter=weight,
            macs=weight * math.prod(shape[:-1]),
        )


class BatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm over any number of positions, or none, without integers in its state: no count of batches.

    Running statistics therefore need a fixed momentum; whoever wants a cumulative average sets `momentum` to 1/k at the
    k-th batch.
    """

    def __init__(self, channels: int, *, running_statistics: bool, epsilon: float = 1e-5) -> None:
        super().__init__(channels, eps=epsilon, track_running_stats=running_statistics)
        self.num_batches_tracked = None

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected (batch, channels, *sides), got {tuple(input.shape)}")

    def _load_from_state_dict(self, *arguments: object) -> None:
        # PyTorch's own version adds a counter to plain dictionaries, which a strict load then refuses.
        nn.Module._load_from_state_dict(self, *arguments)


def make_static(module: nn.Module) -> None:
    """Let PyTorch's batch norms of any module, and instance norms with statistics, keep no running statistics.

    They then normalize by the batch, as HeteroFL's static batch norm does. A norm that the module's own `train` leaves
    in evaluation mode stays as it is: its statistics are constants.
    """
    module.train()
    for part in module.modules():
        if isinstance(part, _NormBase) and part.training and part.track_running_stats:
            part.track_running_stats = False
            part.running_mean = part.running_var = part.num_batches_tracked = None


@contextmanager
def mean_statistics(model: nn.Module, least: float = 0.0) -> Iterator[None]:
    """Let norms' running statistics become the mean over the batches that they meet in a `with` block.

    A norm meets as many batches as it is used: one that stands at two places of a network meets two in a pass.

    Args:
        least: the momentum below which they go on as a moving average.
    """
    norms = [module for module in model.modules() if isinstance(module, _NormBase)]
    uses: Counter[nn.Module] = Counter()

    def before_use(norm: Any, _: object) -> None:
        uses[norm] += 1
        norm.momentum = max(least, 1 / uses[norm])

    momenta = [norm.momentum for norm in norms]
    hooks = [norm.register_forward_pre_hook(before_use) for norm in norms]
    try:
        yield
    finally:
        for norm, momentum, hook in zip(norms, momenta, hooks, strict=True):
            hook.remove()
            norm.momentum = momentum


@dataclass(frozen=True)
class Norm(Layer):
    """Batch norm: with running statistics, or static (HeteroFL's sBN), which always uses the batch's own."""

    name: str
    channels: Channels
    static: bool = False
    epsilon: float = 1e-5

    def build(self) -> nn.Module:
        """Return a batch norm without integer state."""
        return BatchNorm(self.channels.kept, running_statistics=not self.static, epsilon=self.epsilon)

    def tensors(self) -> dict[str, TensorSpec]:
        """Weight and bias, and the running mean and variance where they are kept."""
        names = ("weight", "bias") if self.static else ("weight", "bias", "running_mean", "running_var")
        return {name: spec((self.channels.kept, Axis(self.channels.group))) for name in names}

    @override
    def footprint(self, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
        size = FLOAT_BYTES * batch_size * math.prod(shape)
        statistics = FLOAT_BYTES * 2 * shape[0]  # mean and inverse deviation of the batch
        return Footprint(
            result=size,
            saves_input=True,
            saves_own=statistics,
            forward_peak=size + statistics,
            gradient=size,
            backward_peak=size + statistics,
            parameters=2 * shape[0],
            largest_parameter=shape[0],
            buffers=0 if self.static else 2 * shape[0],
        )


class Scaler(nn.Module):
    """Divide by the kept share of channels, so that cut layers have the magnitude of whole ones.

    Source: HeteroFL (Diao et al. 2021), section 3, where it acts in training only: its scored model is whole, so that
    there is nothing to divide. A sub-model that is scored or distilled must be the function that was trained.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """Any shape to the same shape."""
        return x / self.rate


@dataclass(frozen=True)
class Scale(Stateless):
    """A `Scaler` for the rate kept / full of one channel group."""

    channels: Channels

    def build(self) -> nn.Module:
        """Return a `Scaler`."""
        return Scaler(self.channels.kept / self.channels.full)


@dataclass(frozen=True)
class Relu(Stateless):
    """max(0, x), in place: neither a convolution nor a norm needs its result again in the backward pass."""

    def build(self) -> nn.Module:
        """Return an in-place `nn.ReLU`."""
        return nn.ReLU(inplace=True)

    @override
    def footprint(self, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
        size = FLOAT_BYTES * batch_size * math.prod(shape)
        return Footprint(saves_result=True, gradient=size, backward_peak=size)


class Elementwise(Stateless):
    """A function of every entry that is not in place: its backward pass reads its input."""

    module: ClassVar[type[nn.Module]]

    def build(self) -> nn.Module:
        """Return the module."""
        return self.module()

    @override
    def footprint(self, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
        return replace(passing_footprint(shape, result_shape, batch_size), saves_input=True)


@dataclass(frozen=True)
class Relu6(Elementwise):
    """min(max(0, x), 6): a bound on activations where whole layers may be missing.

    In place it would need as much memory: PyTorch's backward pass wants its input.
    """

    module = nn.ReLU6


@dataclass(frozen=True)
class HardSwish(Elementwise):
    """x * min(max(0, x + 3), 6) / 6, MobileNetV3's activation."""

    module = nn.Hardswish


@dataclass(frozen=True)
class Halve(Stateless):
    """Pooling that halves an image, sides rounded up: the maximum of 3x3 positions around every second one (the stem of
    a ResNet), or the mean of 2x2 positions, of fewer at the border (the shortcut of ResNet-D, He et al. 2019)."""

    kind: str  # "max" or "average"

    def build(self) -> nn.Module:
        """Return an `nn.MaxPool2d` or `nn.AvgPool2d`."""
        if self.kind == "max":
            return nn.MaxPool2d(3, stride=2, padding=1)
        return nn.AvgPool2d(2, stride=2, ceil_mode=True, count_include_pad=False)

    def output_shape(self, shape: Shape) -> Shape:
        """(channels, height, width) -> half the sides, rounded up."""
        return shape[0], *(-(-side // 2) for side in shape[1:])

    @override
    def footprint(self, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
        return pooling_footprint(self.kind, shape, result_shape, batch_size)


@dataclass(frozen=True)
class Pool(Stateless):
    """Max or average pooling over square windows that do not overlap; a rest at the border is dropped."""

    kind: str  # "max" or "average"
    window: int = 2
    dimensions: int = 2

    def build(self) -> nn.Module:
        """Return an `nn.MaxPool2d`, `nn.AvgPool2d` or their like for signals."""
        if self.kind == "max":
            if self.dimensions == 1:
                return nn.MaxPool1d(self.window)
            return HalvingMaxPool() if self.window == 2 else nn.MaxPool2d(self.window)
        return nn.AvgPool2d(self.window) if self.dimensions == 2 else nn.AvgPool1d(self.window)

    def output_shape(self, shape: Shape) -> Shape:
        """(channels, *sides) -> the sides divided by the window."""
        channels, *sides = shape
        if min(sides) < self.window:
            raise ValueError(f"a pooling window of {self.window} does not fit an input of {tuple(sides)}")
        return channels, *(side // self.window for side in sides)

    @override
    def footprint(self, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
        return pooling_footprint(self.kind, shape, result_shape, batch_size)


@dataclass(frozen=True)
class GlobalPool(Stateless):
    """The mean over all positions, flattened."""

    def build(self) -> nn.Module:
        """Return the pooling and the flatten."""
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def output_shape(self, shape: Shape) -> Shape:
        """(channels, height, width) -> (channels,)."""
        return (shape[0],)


@dataclass(frozen=True)
class Flatten(Stateless):
    """All positions of all channels as features, channels first."""

    def build(self) -> nn.Module:
        """Return an `nn.Flatten`."""
        return nn.Flatten()

    def output_shape(self, shape: Shape) -> Shape:
        """(channels, *sides) -> (channels * positions,)."""
        return (math.prod(shape),)

    @override
    def footprint(self, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
        return Footprint()


@dataclass(frozen=True)
class Dropout(Stateless):
    """Zero each entry with probability `rate` while training."""

    rate: float

    def build(self) -> nn.Module:
        """Return an `nn.Dropout`."""
        return nn.Dropout(self.rate)

    @override
    def footprint(self, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
        size = FLOAT_BYTES * batch_size * math.prod(shape)
        # The mask is drawn as integers, then kept as floats.
        return passing_footprint(shape, result_shape, batch_size, saves_own=size)


@dataclass(frozen=True)
class Block:
    """A piece of a network: layers one after another, and possibly a shortcut that is added to their result.

    `shortcut` is None where nothing is added, () for the block's input itself, else the layers of a projection; `after`
    are the layers that follow the addition. With `concat` the result's channels are put behind the input's, without
    shortcut and `after`. An early `exit` is a head in front of deeper blocks: its result are logits, and what
    follows continues from its input, which it must not change in place.
    """

    name: str
    layers: tuple[Layer, ...]
    shortcut: tuple[Layer, ...] | None = None
    after: tuple[Layer, ...] = ()
    exit: bool = False
    concat: bool = False

    def output_shape(self, shape: Shape) -> Shape:
        """Return the shape of the result for one example of `shape`."""
        before = shape
        for layer in (*self.layers, *self.after):
            shape = layer.output_shape(shape)
        return (before[0] + shape[0], *shape[1:]) if self.concat else shape

    def tensors(self) -> Iterator[tuple[str, TensorSpec]]:
        """Yield the tensors of the block's state with their names in the network."""
        paths = {"": self.layers, "shortcut.": self.shortcut or (), "after.": self.after}
        for path, layers in paths.items():
            for layer in layers:
                for tensor, spec in layer.tensors().items():
                    yield f"{self.name}.{path}{layer.name}.{tensor}", spec
