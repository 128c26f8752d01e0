"""Layers and blocks: one description builds a network, places its tensors and is priced by `wildflower.models.cost`.

A layer is a small frozen value that names the channel groups it reads and writes. `build` makes the module, `tensors`
says which channel group each dimension of each of its tensors belongs to, `output_shape` the shape of its result.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from wildflower.models.placement import CLASSES, Axis, Window

# Convolutions of fewer output channels, and their norms, take longer with the channels of a pixel side by side: cnn3
# and ResNet-18 from 1.1 to 1.9 times as long in training mode, and 0.5 to 0.9 times as long with 8 channels and more.
LEAST_CHANNELS_LAST = 8
# A pool that trains is faster by slices for tensors of at least so many values: at 100,000 it is level with PyTorch's.
LEAST_BY_SLICES = 2**17
SLICED_TOGETHER = 2**18  # values whose gradients are made at a time

Shape = tuple[int, ...]
"""Of one example: (channels, height, width) of an image, (channels, length) of a signal, (positions, channels) of a
sequence or, once flattened, (features,)."""


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
    axes: tuple[Axis | Window | None, ...]
    frozen: bool = False

    @property
    def of_classes(self) -> bool:
        """Whether it has as many entries along a side as there are classes, as those of a head have."""
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


class Stateless(Layer):
    """A layer without tensors, which needs no name."""

    name = ""

    def tensors(self) -> dict[str, TensorSpec]:
        """Return nothing."""
        return {}


def spec(*dimensions: tuple[int, Axis | Window | None]) -> TensorSpec:
    """Return the spec of a float tensor from the size and the axis of each of its dimensions."""
    return TensorSpec(tuple(size for size, _ in dimensions), torch.float32, tuple(axis for _, axis in dimensions))


@dataclass(frozen=True)
class Conv(Layer):
    """A convolution with a square kernel; `full_kernel` is the side in the global model, None: the same.

    `dimensions` are 2 for images and 1 for signals, whose "square" is a stretch of length `kernel`.
    """

    name: str
    inputs: Channels
    outputs: Channels
    kernel: int
    stride: int = 1
    padding: int = 0
    bias: bool = True
    full_kernel: int | None = None
    dimensions: int = 2

    def build(self) -> nn.Module:
        """Return an `nn.Conv2d` or `nn.Conv1d`."""
        kind = nn.Conv2d if self.dimensions == 2 else nn.Conv1d
        return kind(
            self.inputs.kept, self.outputs.kept, self.kernel, stride=self.stride, padding=self.padding, bias=self.bias
        )

    def output_shape(self, shape: Shape) -> Shape:
        """(channels, *sides) -> the same of the result; ValueError where the kernel does not fit."""
        sides = [(side + 2 * self.padding - self.kernel) // self.stride + 1 for side in shape[1:]]
        if min(sides) < 1:
            kernel = "x".join([str(self.kernel)] * self.dimensions)
            raise ValueError(f"{self.name}: a {kernel} kernel does not fit an input of {shape[1:]}")
        return self.outputs.kept, *sides

    def tensors(self) -> dict[str, TensorSpec]:
        """Weight (out, in, kernel per dimension) and bias (out)."""
        out = (self.outputs.kept, Axis(self.outputs.group))
        kernel = (self.kernel, Window(self.kernel, self.full_kernel) if self.full_kernel else None)
        inputs = (self.inputs.kept, Axis(self.inputs.group))
        specs = {"weight": spec(out, inputs, *[kernel] * self.dimensions)}
        return specs | ({"bias": spec(out)} if self.bias else {})


@dataclass(frozen=True)
class DepthwiseConv(Layer):
    """A convolution of every channel by itself, padded so that stride 1 keeps the size; no bias.

    `full_kernel` is the side in the global model, None: the same.
    """

    name: str
    channels: Channels
    kernel: int
    stride: int = 1
    full_kernel: int | None = None

    def build(self) -> nn.Module:
        """Return an `nn.Conv2d` of as many groups as channels."""
        kept, padding = self.channels.kept, self.kernel // 2
        return nn.Conv2d(kept, kept, self.kernel, stride=self.stride, padding=padding, groups=kept, bias=False)

    def output_shape(self, shape: Shape) -> Shape:
        """(channels, height, width) -> the sides divided by the stride, rounded up."""
        return shape[0], *(-(-side // self.stride) for side in shape[1:])

    def tensors(self) -> dict[str, TensorSpec]:
        """Weight (channels, 1, kernel, kernel)."""
        side = (self.kernel, Window(self.kernel, self.full_kernel) if self.full_kernel else None)
        return {"weight": spec((self.channels.kept, Axis(self.channels.group)), (1, None), side, side)}


class ChannelGate(nn.Module):
    """Scale every channel by what two 1x1 convolutions make of the means of all channels."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) to the same shape."""
        means = nn.functional.adaptive_avg_pool2d(x, 1)
        gates = nn.functional.hardsigmoid(self.fc2(nn.functional.relu(self.fc1(means), inplace=True)))
        return x * gates


@dataclass(frozen=True)
class SqueezeExcite(Layer):
    """Squeeze-and-excitation (Hu et al. 2018) with the hard sigmoid of MobileNetV3 (Howard et al. 2019)."""

    name: str
    channels: Channels
    squeezed: Channels

    def build(self) -> nn.Module:
        """Return a `ChannelGate`."""
        return ChannelGate(self.channels.kept, self.squeezed.kept)

    def tensors(self) -> dict[str, TensorSpec]:
        """Weights (out, in, 1, 1) and biases (out) of both convolutions."""
        wide = (self.channels.kept, Axis(self.channels.group))
        narrow = (self.squeezed.kept, Axis(self.squeezed.group))
        one = (1, None)
        return {
            "fc1.weight": spec(narrow, wide, one, one),
            "fc1.bias": spec(narrow),
            "fc2.weight": spec(wide, narrow, one, one),
            "fc2.bias": spec(wide),
        }


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


class BatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm over all positions of images and signals alike, without integers in its state: no count of batches.

    Running statistics therefore need a fixed momentum; whoever wants a cumulative average sets `momentum` to 1/k at the
    k-th batch.
    """

    def __init__(self, channels: int, *, running_statistics: bool, epsilon: float = 1e-5) -> None:
        super().__init__(channels, eps=epsilon, track_running_stats=running_statistics)
        self.num_batches_tracked = None

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 3:
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


@dataclass(frozen=True)
class Relu6(Stateless):
    """min(max(0, x), 6): a bound on activations where whole layers may be missing."""

    def build(self) -> nn.Module:
        """Return an `nn.ReLU6`. In place it would need as much memory: PyTorch's backward pass wants its input."""
        return nn.ReLU6()


@dataclass(frozen=True)
class HardSwish(Stateless):
    """x * min(max(0, x + 3), 6) / 6, MobileNetV3's activation."""

    def build(self) -> nn.Module:
        """Return an `nn.Hardswish`, which is not in place: the backward pass needs its input."""
        return nn.Hardswish()


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


@dataclass(frozen=True)
class Dropout(Stateless):
    """Zero each entry with probability `rate` while training."""

    rate: float

    def build(self) -> nn.Module:
        """Return an `nn.Dropout`."""
        return nn.Dropout(self.rate)


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

    def build(self) -> nn.Module:
        """Return the block's module."""
        return BlockModule(self)

    def output_shape(self, shape: Shape) -> Shape:
        """Return the shape of the result for one example of `shape`."""
        before = shape
        for layer in (*self.layers, *self.after):
            shape = layer.output_shape(shape)
        return (before[0] + shape[0], *shape[1:]) if self.concat else shape

    def tensors(self) -> Iterator[tuple[str, TensorSpec]]:
        """Yield the tensors of the block's state with their names in the network."""
        for path, layers in self._paths().items():
            for layer in layers:
                for tensor, spec in layer.tensors().items():
                    yield f"{self.name}.{path}{layer.name}.{tensor}", spec

    def _paths(self) -> dict[str, tuple[Layer, ...]]:
        return {"": self.layers, "shortcut.": self.shortcut or (), "after.": self.after}


class BlockModule(nn.Module):
    """The module of a `Block`. Where a max-pool follows a ReLU it comes first, see `_pools_first`."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.order = [_add_layer(self, layer) for layer in _pools_first(block.layers)]
        self.shortcut = None if block.shortcut is None else _sequence(block.shortcut)
        self.after = _sequence(block.after)
        self.concat = block.concat

    def forward(self, x: Tensor) -> Tensor:
        """(batch, *input shape) -> (batch, *output shape)."""
        y = x
        for name in self.order:
            y = getattr(self, name)(y)
        if self.concat:
            return torch.cat([x, y], dim=1)
        if self.shortcut is not None:
            y = y + self.shortcut(x)
        return self.after(y)


def _pools_first(layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers with every ReLU moved behind a max-pool that follows it, where it has fewer values to change.

    All bits stay the same. The largest of some ReLUs is the ReLU of the largest. Where that is 0 no gradient comes back
    in either order, and elsewhere the same value of a window takes it. The price is that of the order in the
    description, whose way back takes more memory. Pools over signals stay where they are: what they return is a view,
    which a ReLU in place would copy on the way back.
    """
    found = [*layers]
    for place in range(1, len(found)):
        before, layer = found[place - 1 : place + 1]
        over_signals = isinstance(layer, Pool) and layer.dimensions == 1
        if isinstance(before, Relu) and isinstance(layer, Pool | Halve) and layer.kind == "max" and not over_signals:
            found[place - 1 : place + 1] = layer, before
    return found


def _add_layer(module: nn.Module, layer: Layer) -> str:
    # Layers without tensors are numbered: no state depends on their names.
    name = layer.name or f"{type(layer).__name__.lower()}{len(module._modules)}"
    module.add_module(name, layer.build())
    return name


def _sequence(layers: tuple[Layer, ...]) -> nn.Sequential:
    sequence = nn.Sequential()
    for layer in layers:
        _add_layer(sequence, layer)
    return sequence


class Network(nn.Module):
    """Blocks one after another: (batch, *input shape) -> (batch, classes); the last one is the deepest head.

    No layer asks for contiguous tensors. `takes_channels_last` says whether passes are faster without them.
    """

    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.early = {block.name for block in blocks[:-1] if block.exit}
        for block in blocks:
            self.add_module(block.name, block.build())
        widths = [layer.out_channels for layer in self.modules() if isinstance(layer, nn.Conv2d)]
        self.takes_channels_last = min(widths, default=0) >= LEAST_CHANNELS_LAST

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the deepest head, one row per example; no other head is computed."""
        for name, block in self.named_children():
            if name not in self.early:
                x = block(x)
        return x

    def settle(self) -> None:
        """Compute what follows from the weights once they are there: of described layers nothing."""

    def exits(self, x: Tensor) -> list[Tensor]:
        """Return the logits of all heads, from the shallowest to the deepest: a list of one without early exits."""
        logits = []
        for name, block in self.named_children():
            if name in self.early:
                logits.append(block(x))
            else:
                x = block(x)
        return [*logits, x]


class HalvingMaxPool(nn.MaxPool2d):
    """`nn.MaxPool2d(2)` that trains in less time.

    For finite values the bits are PyTorch's: of equal values in a window the first in row-major order takes the
    gradient. Where tensors are large and contiguous, the places of the maxima are not kept, so that a step takes less
    memory than its price, which is that of PyTorch's pool. That one is used for tensors with the channels of a pixel
    side by side; its way back takes five times as long for a gradient that is not laid out so.
    """

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) -> half the sides; a rest at the border is dropped."""
        trains = x.requires_grad and torch.is_grad_enabled() and x.device.type == "cpu"
        even = x.shape[2] % 2 == x.shape[3] % 2 == 0
        if trains and x.numel() >= LEAST_BY_SLICES and even and x.is_contiguous():
            return _MaxOfFourToTrain.apply(x)
        pooled: Tensor = super().forward(x)
        if trains and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
            pooled.register_hook(lambda gradient: gradient.contiguous(memory_format=torch.channels_last))
        return pooled


class _MaxOfFourToTrain(torch.autograd.Function):
    """The maximum of four slices, each of which has one value of every window, and its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        maxima = _max_of_four(x)
        ctx.save_for_backward(x, maxima.clone())  # the next layer may change its input in place
        return maxima

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, maxima = ctx.saved_tensors
        found = torch.empty_like(x)
        # A few examples at a time, so that what is made on the way stays in the cache and is little.
        size = max(1, SLICED_TOGETHER * len(x) // x.numel())
        pieces = (tensor.split(size) for tensor in (x, maxima, gradient, found))
        for values, largest, gradients, part in zip(*pieces, strict=True):
            left = gradients.clone()  # of each window, until one of its values has taken it
            for row in (0, 1):
                for column in (0, 1):
                    taken = left * (values[:, :, row::2, column::2] == largest)
                    left -= taken
                    part[:, :, row::2, column::2] = taken
        return found


class MaxOfFour(nn.Module):
    """`nn.MaxPool2d(2)` by the maximum of slices, without the places of the maxima that a gradient would need."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) -> half the sides; a rest at the border is dropped."""
        return _max_of_four(x)


def _max_of_four(x: Tensor) -> Tensor:
    height, width = (side // 2 * 2 for side in x.shape[2:])
    columns = torch.maximum(x[..., :width:2], x[..., 1:width:2])
    return torch.maximum(columns[:, :, :height:2], columns[:, :, 1:height:2])


def pool_by_slices(network: nn.Module) -> None:
    """Let a network that is not trained pool by slices, which takes less time and gives the same bits.

    Networks that are not described by blocks stay as they are.
    """
    for block in network.modules():
        if isinstance(block, BlockModule):
            for name in block.order:
                if _halves(block.get_submodule(name)):
                    block.add_module(name, MaxOfFour())


def _halves(layer: nn.Module) -> bool:
    """Whether a layer is `nn.MaxPool2d(2)`."""
    return isinstance(layer, nn.MaxPool2d) and (
        (layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.ceil_mode) == (2, 2, 0, 1, False)
    )


def lighten(network: nn.Module) -> None:
    """Make the passes of a network shorter that is scored and then dropped: `fold_norms` and `pool_by_slices`."""
    fold_norms(network)
    pool_by_slices(network)


def fold_norms(network: nn.Module) -> None:
    """Fold batch norms, and scalers in front of them, into the convolutions before them, which saves their passes.

    Changes a network that is scored and then dropped. Its function in evaluation mode stays the same but for rounding,
    (w x + b) / r -> (w s / r) x + (b / r - mean) s + shift with s = scale / sqrt(variance + epsilon); in training mode
    it would be another one. Batch norms without running statistics stay, and so do networks that are not described by
    blocks.
    """
    for module in network.modules():
        if isinstance(module, BlockModule):
            _fold(module, module.order)
            for part in (module.shortcut, module.after):
                if part is not None:
                    _fold(part, list(part._modules))


def _fold(parent: nn.Module, order: Sequence[str]) -> None:
    """Fold within layers of a module that follow each other in this order."""
    layers = [parent.get_submodule(name) for name in order]
    for place, conv in enumerate(layers):
        rate, norm_at = 1.0, place + 1
        if norm_at < len(layers) and isinstance(scaler := layers[norm_at], Scaler):
            rate, norm_at = scaler.rate, place + 2
        norm = layers[norm_at] if norm_at < len(layers) else None
        if not isinstance(conv, nn.Conv1d | nn.Conv2d) or not isinstance(norm, BatchNorm) or norm.running_mean is None:
            continue
        assert norm.running_var is not None
        with torch.no_grad():
            by_channel = norm.weight * (norm.running_var + norm.eps).rsqrt()
            bias = norm.bias - norm.running_mean * by_channel
            if conv.bias is not None:
                bias = bias + conv.bias * by_channel / rate
            weight = conv.weight * (by_channel / rate).reshape(-1, *[1] * (conv.weight.dim() - 1))
        conv.weight, conv.bias = nn.Parameter(weight), nn.Parameter(bias)
        for name in order[place + 1 : norm_at + 1]:
            parent.add_module(name, nn.Identity())


class MeanOfExits(nn.Module):
    """A network that says the mean of its exits' logits."""

    def __init__(self, model: Network) -> None:
        super().__init__()
        self.model = model
        self.takes_channels_last = getattr(model, "takes_channels_last", False)  # which an encoder does not say

    def forward(self, inputs: Tensor) -> Tensor:
        """(batch, *input shape) -> (batch, classes)."""
        return torch.stack(self.model.exits(inputs)).mean(dim=0)
