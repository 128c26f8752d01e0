"""What an architecture costs a device: parameters, payload, peak training memory, FLOPs; nothing is allocated.

Peak training memory follows one training step in the order in which PyTorch runs it: zero_grad(set_to_none=True),
forward, backward, optimizer step. Every tensor is followed from its allocation to its release:

* weights, buffers, optimizer state and the batch are there all the time;
* forward, a result stays if autograd saves it for the backward pass, otherwise until its last reader is done;
* backward, layers give back what they saved as they are left, while the gradients of parameters pile up;
* a convolution needs a workspace while it runs: on CPUs oneDNN copies its input, weights and result into layouts with
  channels in blocks of 16. Small batches of small images (one image, or 1x1 kernels in a single thread) are spared
  that; they are counted alike, which is on the safe side;
* the step itself needs temporary tensors as large as the largest parameter;
* oneDNN compiles and keeps kernels for every distinct convolution.

This is what the process needs if freed tensors go back to the system, see `wildflower.models.allocator`; with the C
library's defaults it holds 1.6 times as much, at worst 2.6 times (benchmarks/memory).

What the runtime needs without any model (PyTorch's libraries, thread pools, its first compiled kernels) is not in it:
that is the same for all architectures, and it is taken before a device reports its available memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from wildflower.models.architecture import Architecture
from wildflower.models.base import BlockFamily, Family
from wildflower.models.layers import (
    Block,
    Conv,
    DepthwiseConv,
    Dropout,
    Flatten,
    GlobalPool,
    Halve,
    HardSwish,
    Layer,
    Linear,
    Norm,
    Pool,
    Relu,
    Relu6,
    Scale,
    Shape,
    SqueezeExcite,
)
from wildflower.models.transformer import (
    Attention,
    Embedding,
    Gelu,
    LastPosition,
    LayerNorm,
    MeanPosition,
    Patches,
    Positions,
)
from wildflower.plugins.nearest import nearest_part

FLOAT_BYTES = 4
INDEX_BYTES = 8
CHANNEL_BLOCK = 16
"""Channels per block of oneDNN's layouts with AVX-512; narrower vectors have 8, and the estimate is a little high."""
CONVOLUTION_KERNEL_BYTES = 300_000
"""Compiled code and tables of one distinct convolution (forward and both gradients), measured on an x86-64 CPU."""

Convolution = tuple[Shape, Shape, int]  # shapes of input and result, side of the kernel


@dataclass(frozen=True)
class Cost:
    """The cost of an architecture, at a batch size and with an optimizer.

    `parameters` are counted. `download_bytes` and `upload_bytes` travel to and from the device: those of parameters and
    buffers, unless a method sends or returns something else.
    `training_flops` are those of one example, forward and backward: a multiplication and an addition for each weight
    and position of convolutions and linear layers, once forward and twice backward (once in the first layer, which
    needs no gradient of its input). Attention adds its products of positions with positions: two forward, and five
    backward, since PyTorch keeps no scores and computes them again. Norms, activations and pooling are not counted.
    """

    parameters: int
    download_bytes: int
    upload_bytes: int
    peak_training_memory_bytes: int
    training_flops: int

    @property
    def payload_bytes(self) -> int:
        """What travels the heavier way."""
        return max(self.download_bytes, self.upload_bytes)


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer keeps and uses, in multiples: `state` of all parameters, `temporary` of the largest one.

    accumulates: it steps by the gradients of several micro-batches. Their sum is held while the next one is computed,
        whose gradients go into it layer by layer; without it, gradients pile up in the backward pass alone.
    """

    state: int
    temporary: int
    accumulates: bool = False

    @property
    def copies(self) -> int:
        """How many times all parameters are held during the whole step, the weights themselves included."""
        return 1 + self.state + self.accumulates


OPTIMIZERS = {
    "sgd": Optimizer(state=0, temporary=1),  # the gradient with weight decay
    "sgd-momentum": Optimizer(state=1, temporary=1),
    "adam": Optimizer(state=2, temporary=3),  # the gradient with weight decay, the denominator and its root
    "adamw": Optimizer(state=2, temporary=2),  # the denominator and its root
}
ACCUMULATED = ", accumulated"
"""Behind an optimizer's name: it accumulates the gradients of micro-batches."""
OPTIMIZERS |= {name + ACCUMULATED: replace(kept, accumulates=True) for name, kept in OPTIMIZERS.items()}


def cost(family: Family, arch: Architecture, *, batch_size: int, optimizer: str) -> Cost:
    """Return the cost of `arch`; the same question is answered from a cache.

    Raises ValueError for an architecture out of bounds, a batch size below 1 and an optimizer not in OPTIMIZERS.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be >= 1, not {batch_size}")
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"no optimizer is named {optimizer!r}; {nearest_part(optimizer, OPTIMIZERS)}")
    return _cost(family, arch, batch_size, optimizer)


@lru_cache(maxsize=65536)
def _cost(family: Family, arch: Architecture, batch_size: int, optimizer: str) -> Cost:
    return family.price(arch, batch_size, optimizer)


def price_of_blocks(family: BlockFamily, arch: Architecture, batch_size: int, optimizer: str) -> Cost:
    """The cost of an architecture of described layers."""
    kept = OPTIMIZERS[optimizer]
    step = _follow(family, arch, batch_size, piling=not kept.accumulates)
    parameter_bytes = FLOAT_BYTES * step.parameters
    kernel_bytes = CONVOLUTION_KERNEL_BYTES * len(step.convolutions)
    fixed_bytes = parameter_bytes * kept.copies + FLOAT_BYTES * step.buffers + kernel_bytes
    update_bytes = parameter_bytes * step.piling + FLOAT_BYTES * kept.temporary * step.largest_parameter
    network_bytes = FLOAT_BYTES * (step.parameters + step.buffers)
    return Cost(
        parameters=step.parameters,
        download_bytes=network_bytes,
        upload_bytes=network_bytes,
        peak_training_memory_bytes=fixed_bytes + max(step.peak_bytes, step.batch_bytes + update_bytes),
        training_flops=step.flops,
    )


def _follow(family: BlockFamily, arch: Architecture, batch_size: int, *, piling: bool = True) -> _Step:
    """A whole training step of an architecture."""
    family.validate(arch)
    step = _Step(batch_size, piling=piling)
    step.run(family.blocks(arch), family.input_shape, family.classes, family.input_dtype.itemsize)
    return step


def distinct_convolutions(family: BlockFamily, arch: Architecture) -> set[Convolution]:
    """Return the convolutions of an architecture for which code has to be compiled."""
    return _follow(family, arch, 1).convolutions


def inference_macs(family: BlockFamily, arch: Architecture) -> int:
    """Return the multiplications, each with an addition, of one example's forward pass.

    This is what papers on architecture search call "FLOPs". Counted are those of convolutions, linear layers and
    attention.
    """
    return _follow(family, arch, 1).macs


@dataclass
class Footprint:
    """What one layer allocates and saves for a batch, in bytes; `parameters` and `buffers` in entries."""

    result: int = 0  # a new result; 0 where the layer works in place or returns a view
    saves_input: bool = False
    saves_result: bool = False
    saves_own: int = 0
    forward_peak: int = 0  # everything that is allocated while it runs forward, result and own savings included
    gradient: int = 0  # a new gradient of the input; 0 where the gradient of the result is passed on
    backward_peak: int = 0  # everything that is allocated while it runs backward
    parameters: int = 0
    largest_parameter: int = 0
    buffers: int = 0
    macs: int = 0  # multiplications and additions for one example
    score_macs: int = 0  # those of one product of positions with positions, of which attention has two


def _conv(layer: Conv, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
    inputs, outputs = shape[0], result_shape[0]
    positions, result_positions = math.prod(shape[1:]), math.prod(result_shape[1:])
    taps = layer.kernel**layer.dimensions
    weight = inputs * outputs * taps
    parameters = weight + (outputs if layer.bias else 0)
    result = FLOAT_BYTES * batch_size * outputs * result_positions
    gradient = 0 if first else FLOAT_BYTES * batch_size * inputs * positions

    blocked_inputs, blocked_outputs = _blocked(inputs), _blocked(outputs)
    input_copy = FLOAT_BYTES * batch_size * blocked_inputs * positions
    result_copy = FLOAT_BYTES * batch_size * blocked_outputs * result_positions
    weight_copy = FLOAT_BYTES * blocked_inputs * blocked_outputs * taps
    # Few input channels are read as they are: in the forward pass below one block, for the weight's gradient images.
    read_copy = 0 if inputs < CHANNEL_BLOCK else input_copy
    image_copy = 0 if inputs <= 3 else input_copy
    backward_phases = [
        gradient + image_copy + result_copy + weight_copy,  # the weight's gradient
        gradient + weight_copy + FLOAT_BYTES * parameters,
    ]
    if not first:  # the input's gradient; that of a strided convolution goes through two more layouts
        layouts = 3 * gradient if layer.stride > 1 else input_copy + gradient
        backward_phases += [result_copy + weight_copy + input_copy, layouts]
    return Footprint(
        result=result,
        saves_input=True,
        forward_peak=max(read_copy + weight_copy + result_copy, result_copy + result),
        gradient=gradient,
        backward_peak=max(backward_phases),
        parameters=parameters,
        largest_parameter=weight,
        macs=weight * result_positions,
    )


def _depthwise_conv(layer: DepthwiseConv, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
    channels = shape[0]
    positions, result_positions = math.prod(shape[1:]), math.prod(result_shape[1:])
    weight = channels * layer.kernel**2
    result = FLOAT_BYTES * batch_size * channels * result_positions
    gradient = FLOAT_BYTES * batch_size * channels * positions
    input_copy = FLOAT_BYTES * batch_size * _blocked(channels) * positions
    result_copy = FLOAT_BYTES * batch_size * _blocked(channels) * result_positions
    weight_copy = FLOAT_BYTES * _blocked(channels) * layer.kernel**2
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


def _squeeze_excite(layer: SqueezeExcite, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
    channels, squeezed = layer.channels.kept, layer.squeezed.kept
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
        # The gradient of the product by the input, and the product of which the gates' gradient is the sum; later the
        # gradient of the means, spread over all positions.
        backward_peak=2 * size + gates,
        parameters=2 * weight + squeezed + channels,
        largest_parameter=weight,
        macs=2 * weight,
    )


def _linear(layer: Linear, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
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


def _norm(layer: Norm, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
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
        buffers=0 if layer.static else 2 * shape[0],
    )


def _relu(layer: Relu, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
    size = FLOAT_BYTES * batch_size * math.prod(shape)
    return Footprint(saves_result=True, gradient=size, backward_peak=size)


def _scale(layer: Scale, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
    size = FLOAT_BYTES * batch_size * math.prod(shape)
    return Footprint(result=size, forward_peak=size, gradient=size, backward_peak=size)


def _pool(layer: Pool | Halve, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
    size = FLOAT_BYTES * batch_size * math.prod(shape)
    result_entries = batch_size * math.prod(result_shape)
    indices = INDEX_BYTES * result_entries if layer.kind == "max" else 0
    result = FLOAT_BYTES * result_entries
    return Footprint(
        result=result,
        saves_input=True,
        saves_own=indices,
        forward_peak=result + indices,
        gradient=size,
        backward_peak=size,
    )


def _global_pool(layer: GlobalPool, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
    size = FLOAT_BYTES * batch_size * math.prod(shape)
    result = FLOAT_BYTES * batch_size * result_shape[0]
    return Footprint(result=result, forward_peak=result, gradient=size, backward_peak=size)


def _flatten(layer: Flatten, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
    return Footprint()


def _dropout(layer: Dropout, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
    size = FLOAT_BYTES * batch_size * math.prod(shape)
    # The mask is drawn as integers, then kept as floats.
    return Footprint(result=size, saves_own=size, forward_peak=2 * size, gradient=size, backward_peak=size)


def _patches(layer: Patches, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
    # Only images are cut: there is no gradient to make.
    result = FLOAT_BYTES * batch_size * math.prod(result_shape)
    return Footprint(result=result, forward_peak=result)


def _embedding(layer: Embedding, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
    # What is saved are the tokens, which stay anyway.
    return _table(layer.vocabulary * layer.outputs.kept, result_shape, batch_size)


def _positions(layer: Positions, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
    return _table(math.prod(shape), result_shape, batch_size)


def _table(weight: int, result_shape: Shape, batch_size: int) -> Footprint:
    """A learned table of `weight` entries, read or added: nothing of its own is saved."""
    result = FLOAT_BYTES * batch_size * math.prod(result_shape)
    return Footprint(
        result=result,
        forward_peak=result,
        backward_peak=FLOAT_BYTES * weight,
        parameters=weight,
        largest_parameter=weight,
    )


def _layer_norm(layer: LayerNorm, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
    size = FLOAT_BYTES * batch_size * math.prod(shape)
    statistics = FLOAT_BYTES * 2 * batch_size * shape[0]  # mean and inverse deviation of each position
    # Backward, gradients of weight and bias are summed up in a table per thread.
    return Footprint(
        result=size,
        saves_input=True,
        saves_own=statistics,
        forward_peak=size + statistics,
        gradient=size,
        backward_peak=size + 2 * FLOAT_BYTES * 2 * shape[1],
        parameters=2 * shape[1],
        largest_parameter=shape[1],
    )


def _gelu(
    layer: Gelu | HardSwish | Relu6, shape: Shape, result_shape: Shape, batch_size: int, first: bool
) -> Footprint:
    size = FLOAT_BYTES * batch_size * math.prod(shape)
    return Footprint(result=size, saves_input=True, forward_peak=size, gradient=size, backward_peak=size)


def _attention(layer: Attention, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
    # PyTorch's fused attention on CPUs keeps no scores, only the log of their sums for each head and position. Tiles of
    # scores, some 10 KB per thread, are left out.
    positions, channels = shape
    width = layer.heads.kept * layer.head_size
    size = FLOAT_BYTES * batch_size * positions * channels
    inner = FLOAT_BYTES * batch_size * positions * width  # queries, keys, values, or what is mixed from the values
    saved = 4 * inner + FLOAT_BYTES * batch_size * positions * layer.heads.kept
    weight = channels * width
    into, out = FLOAT_BYTES * (weight + width), FLOAT_BYTES * (weight + channels)
    backward_phases = [
        out + 4 * inner,  # the gradient of the mixed values, and those of queries, keys and values
        # From here on, nothing is saved any more. Three gradients of the input are added up, values first.
        out + 3 * inner + into + size - saved,
        out + 2 * inner + 2 * into + 2 * size - saved,
        out + 1 * inner + 3 * into + 2 * size - saved,
    ]
    return Footprint(
        result=size,
        saves_input=True,
        saves_own=saved,
        forward_peak=saved + size,
        gradient=size,
        backward_peak=max(backward_phases),
        parameters=4 * weight + 3 * width + channels,
        largest_parameter=weight,
        macs=4 * weight * positions,
        score_macs=width * positions**2,
    )


def _mean_position(layer: MeanPosition, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
    size = FLOAT_BYTES * batch_size * math.prod(shape)
    result = FLOAT_BYTES * batch_size * result_shape[0]
    return Footprint(result=result, forward_peak=result, gradient=size, backward_peak=size)


def _last_position(layer: LastPosition, shape: Shape, result_shape: Shape, batch_size: int, first: bool) -> Footprint:
    size = FLOAT_BYTES * batch_size * math.prod(shape)
    return Footprint(gradient=size, backward_peak=size)


def _blocked(channels: int) -> int:
    return -(-channels // CHANNEL_BLOCK) * CHANNEL_BLOCK


FOOTPRINTS: dict[type[Layer], Callable[..., Footprint]] = {
    Conv: _conv,
    DepthwiseConv: _depthwise_conv,
    SqueezeExcite: _squeeze_excite,
    HardSwish: _gelu,
    Halve: _pool,
    Linear: _linear,
    Norm: _norm,
    Relu: _relu,
    Relu6: _gelu,
    Scale: _scale,
    Pool: _pool,
    GlobalPool: _global_pool,
    Flatten: _flatten,
    Dropout: _dropout,
    Patches: _patches,
    Embedding: _embedding,
    Positions: _positions,
    LayerNorm: _layer_norm,
    Gelu: _gelu,
    Attention: _attention,
    MeanPosition: _mean_position,
    LastPosition: _last_position,
}


def _convolutions(layer: Layer, shape: Shape, result_shape: Shape) -> set[Convolution]:
    """What a layer computes by oneDNN's convolutions."""
    match layer:
        case Conv() | DepthwiseConv():
            return {(shape, result_shape, layer.kernel)}
        case SqueezeExcite():
            wide, narrow = (layer.channels.kept, 1, 1), (layer.squeezed.kept, 1, 1)
            return {(wide, narrow, 1), (narrow, wide, 1)}
    return set()


@dataclass
class _Tensor:
    size: int
    holders: int = 1  # the code that still reads it and the layers that saved it


_Trail = list[tuple[Footprint, _Tensor, _Tensor]]  # of each layer, in forward order: footprint, input, result

# Of a block: of its layers, of its shortcut if it has one, and behind the addition; None there: a concatenation.
_BlockTrail = tuple[_Trail, _Trail | None, _Trail | None]


class _Step:
    """One training step: the bytes that are live, and the most there were, apart from weights and optimizer state."""

    def __init__(self, batch_size: int, *, piling: bool = True) -> None:
        self.batch_size = batch_size
        self.piling = piling  # whether gradients pile up, and do not go into a sum that is there already
        self.live_bytes = 0
        self.peak_bytes = 0
        self.batch_bytes = 0
        self.parameters = 0
        self.largest_parameter = 0
        self.buffers = 0
        self.flops = 0
        self.macs = 0
        self.convolutions: set[Convolution] = set()  # distinct ones

    def run(self, blocks: list[Block], input_shape: Shape, classes: int, entry_bytes: int = FLOAT_BYTES) -> None:
        """Follow the forward and the backward pass through all blocks; `entry_bytes` are those of an input's entry."""
        batch = self._allocate(entry_bytes * self.batch_size * math.prod(input_shape))
        self._grow(INDEX_BYTES * self.batch_size)  # labels
        self.batch_bytes = self.live_bytes
        batch.holders += 1  # whoever trains keeps it during the step
        x, shape = batch, input_shape
        trails = []
        for block in blocks[:-1]:
            y, y_shape, trail = self._forward_block(block, x, shape)
            trails.append(trail)
            if not block.exit:  # the logits of an early exit stay for the loss
                self._release(x)
                x, shape = y, y_shape
        _, _, trail = self._forward_block(blocks[-1], x, shape)
        self._release(x)
        # Cross-entropy saves the log-softmax; backward, both of its parts make a gradient. The losses of all exits are
        # left before any head is.
        logits_bytes = FLOAT_BYTES * self.batch_size * classes
        early = sum(block.exit for block in blocks[:-1])
        self._grow((1 + early) * logits_bytes)
        self._grow(early * logits_bytes)
        self._touch(2 * logits_bytes)
        gradient = self._backward_block(trail, self._allocate(logits_bytes))
        for block, trail in zip(reversed(blocks[:-1]), reversed(trails), strict=True):
            if block.exit:  # what it passes on is added into the gradient that came from behind
                self._release(self._backward_block(trail, _Tensor(logits_bytes)))
            else:
                gradient = self._backward_block(trail, gradient)

    def _forward_block(self, block: Block, x: _Tensor, shape: Shape) -> tuple[_Tensor, Shape, _BlockTrail]:
        y, y_shape, main = self._forward(block.layers, x, shape)
        if block.concat:
            result = self._allocate(x.size + y.size)
            self._release(y)
            return result, block.output_shape(shape), (main, None, None)
        shortcut = None
        if block.shortcut is not None:
            added, _, shortcut = self._forward(block.shortcut, x, shape)
            total = self._allocate(y.size)
            self._release(added)
            self._release(y)
            y = total
        result, result_shape, after = self._forward(block.after, y, y_shape)
        self._release(y)
        return result, result_shape, (main, shortcut, after)

    def _forward(self, layers: tuple[Layer, ...], x: _Tensor, shape: Shape) -> tuple[_Tensor, Shape, _Trail]:
        """Run layers on `x`, which stays the caller's; the result is the caller's too."""
        trail = []
        x.holders += 1
        for layer in layers:
            result_shape = layer.output_shape(shape)
            # Only the layer that reads the batch comes before any parameters; nobody asks it for its input's gradient.
            footprint = FOOTPRINTS[type(layer)](layer, shape, result_shape, self.batch_size, self.parameters == 0)
            self._count(footprint)
            self.convolutions |= _convolutions(layer, shape, result_shape)
            self._touch(footprint.forward_peak)
            self._grow(footprint.saves_own)
            x.holders += footprint.saves_input
            y = x
            if footprint.result:
                y = self._allocate(footprint.result)
                self._release(x)
            y.holders += footprint.saves_result
            trail.append((footprint, x, y))
            x, shape = y, result_shape
        return x, shape, trail

    def _backward_block(self, trail: _BlockTrail, gradient: _Tensor) -> _Tensor:
        main, shortcut, after = trail
        if after is None:
            # What lay behind the input reads a view of the gradient; the rest of it is added to what comes out.
            gradient.holders += 1
            passed = self._backward(main, gradient)
            self._release(gradient)
            return passed
        gradient = self._backward(after, gradient)
        if shortcut is None:
            return self._backward(main, gradient)
        # Both sides of an addition get one and the same gradient. Autograd runs the shortcut first, since it was made
        # last, and adds the main path's gradient of the block's input into what came out of the shortcut.
        gradient.holders += 1
        total = self._backward(shortcut, gradient)
        self._release(self._backward(main, gradient))
        return total

    def _backward(self, trail: _Trail, gradient: _Tensor) -> _Tensor:
        """Run layers backward; `gradient` is used up, the result is the caller's."""
        for footprint, x, y in reversed(trail):
            self._touch(footprint.backward_peak)
            if self.piling:
                self._grow(FLOAT_BYTES * footprint.parameters)
            else:
                self._touch(FLOAT_BYTES * footprint.parameters)
            if footprint.gradient:
                passed = self._allocate(footprint.gradient)
                self._release(gradient)
                gradient = passed
            if footprint.saves_input:
                self._release(x)
            if footprint.saves_result:
                self._release(y)
            self.live_bytes -= footprint.saves_own
        return gradient

    def _count(self, footprint: Footprint) -> None:
        # One multiplication and one addition per weight forward, and the same for each gradient.
        self.macs += footprint.macs + 2 * footprint.score_macs
        self.flops += footprint.macs * 2 * (1 + (1 if self.parameters == 0 else 2))
        self.flops += footprint.score_macs * 2 * (2 + 5)
        self.parameters += footprint.parameters
        self.largest_parameter = max(self.largest_parameter, footprint.largest_parameter)
        self.buffers += footprint.buffers

    def _allocate(self, size: int) -> _Tensor:
        self._grow(size)
        return _Tensor(size)

    def _release(self, tensor: _Tensor) -> None:
        tensor.holders -= 1
        if tensor.holders == 0:
            self.live_bytes -= tensor.size

    def _grow(self, size: int) -> None:
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _touch(self, size: int) -> None:
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + size)
