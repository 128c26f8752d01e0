"""Convolutions and squeeze-and-excite, as described layers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn
from typing_extensions import override

from wildflower.models.cost import FLOAT_BYTES, Convolution, Footprint, Shape, backward_copies, blocked, forward_copies
from wildflower.models.layers import Channels, Layer, TensorSpec, spec
from wildflower.models.placement import Axis, Window


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

    @override
    def footprint(self, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
        read, made = (batch_size, *shape), (batch_size, *result_shape)
        sizes = (result_shape[0], shape[0], *[self.kernel] * self.dimensions)
        weight = math.prod(sizes)
        return Footprint(
            result=FLOAT_BYTES * math.prod(made),
            saves_input=True,
            forward_peak=forward_copies(read, sizes, made),
            gradient=0 if first else FLOAT_BYTES * math.prod(read),
            backward_peak=backward_copies(made, read, sizes, strided=self.stride > 1, first=first, bias=self.bias),
            parameters=weight + (result_shape[0] if self.bias else 0),
            largest_parameter=weight,
            macs=weight * math.prod(result_shape[1:]),
        )

    @override
    def convolutions(self, shape: Shape, result_shape: Shape) -> set[Convolution]:
        return {(shape, result_shape, self.kernel)}


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

    @override
    def footprint(self, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
        channels = shape[0]
        positions, result_positions = math.prod(shape[1:]), math.prod(result_shape[1:])
        weight = channels * self.kernel**2
        result = FLOAT_BYTES * batch_size * channels * result_positions
        gradient = FLOAT_BYTES * batch_size * channels * positions
        input_copy = FLOAT_BYTES * batch_size * blocked(channels) * positions
        result_copy = FLOAT_BYTES * batch_size * blocked(channels) * result_positions
        weight_copy = FLOAT_BYTES * blocked(channels) * self.kernel**2
        return Footprint(
            result=result,
            saves_input=True,
            forward_peak=max(input_copy + weight_copy + result_copy, result_copy + result),
            gradient=gradient,
            backward_peak=max(
                gradient + input_copy + result_copy + weight_copy, gradient + weight_copy + FLOAT_BYTES * weight
            ),
            parameters=weight,
            largest_parameter=weight,
            macs=weight * result_positions,
        )

    @override
    def convolutions(self, shape: Shape, result_shape: Shape) -> set[Convolution]:
        return {(shape, result_shape, self.kernel)}


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

    @override
    def footprint(self, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
        channels, squeezed = self.channels.kept, self.squeezed.kept
        size = FLOAT_BYTES * batch_size * math.prod(shape)
        gates, inside = (FLOAT_BYTES * batch_size * count for count in (channels, squeezed))
        weight = channels * squeezed
        # Saved are the means, what the first convolution makes of them, the gates before and behind the hard sigmoid.
        saved = 3 * gates + inside
        return Footprint(
            result=size,
            saves_input=True,
            saves_own=saved,
            forward_peak=saved + size,
            gradient=size,
            # The gradient of the product by the input, and the product of which the gates' gradient is the sum; later
            # the gradient of the means, spread over all positions.
            backward_peak=2 * size + gates,
            parameters=2 * weight + squeezed + channels,
            largest_parameter=weight,
            macs=2 * weight,
        )

    @override
    def convolutions(self, shape: Shape, result_shape: Shape) -> set[Convolution]:
        wide, narrow = (self.channels.kept, 1, 1), (self.squeezed.kept, 1, 1)
        return {(wide, narrow, 1), (narrow, wide, 1)}


def draw_by_outgoing(network: nn.Module) -> None:
    """Draw the convolutions' weights anew as He et al. (2015) do, by their outgoing connections."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
