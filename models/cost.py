"""The cost of an architecture for a device: parameters, payload, peak training memory, FLOPs; nothing is allocated.

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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Protocol

from wildflower.models.architecture import Architecture
from wildflower.plugins.nearest import nearest_part

FLOAT_BYTES = 4
INDEX_BYTES = 8
CHANNEL_BLOCK = 16
"""Channels per block of oneDNN's layouts with AVX-512; narrower vectors have 8, and the estimate is a little high."""
CONVOLUTION_KERNEL_BYTES = 300_000
"""Compiled code and tables of one distinct convolution (forward and both gradients), measured on an x86-64 CPU."""

Shape = tuple[int, ...]
"""Of one example: (channels, height, width) of an image, (channels, length) of a signal, (positions, channels) of a
sequence or, once flattened, (features,)."""

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
    `entry_bytes` are those of one entry of the widest parameter, and so of its gradient and of the optimizer's state.
    """

    parameters: int
    download_bytes: int
    upload_bytes: int
    peak_training_memory_bytes: int
    training_flops: int
    entry_bytes: int = FLOAT_BYTES

    @property
    def payload_bytes(self) -> int:
        """Return what travels the heavier way."""
        return max(self.download_bytes, self.upload_bytes)


@dataclass(frozen=True)
class Optimizer:
    """Memory that an optimizer keeps and uses, in multiples: `state` of all parameters, `temporary` of the largest one.

    accumulates: it steps by the gradients of several micro-batches. Their sum is held while the next one is computed,
        whose gradients go into it layer by layer; without it, gradients pile up in the backward pass alone.
    """

    state: int
    temporary: int
    accumulates: bool = False

    @property
    def copies(self) -> int:
        """Return how many times all parameters are held during the whole step, the weights themselves included."""
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


class Priced(Protocol):
    """Anything that has a price for each architecture: a family."""

    def price(self, arch: Architecture, batch_size: int, optimizer: str) -> Cost:
        """Return what an architecture costs."""

    def __hash__(self) -> int:
        """Return the same for equal families."""


def cost(family: Priced, arch: Architecture, *, batch_size: int, optimizer: str) -> Cost:
    """Return the cost of `arch`; the same question is answered from a cache.

    Raises ValueError for an architecture out of bounds, a batch size below 1 and an optimizer not in OPTIMIZERS.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be >= 1, not {batch_size}")
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"no optimizer is named {optimizer!r}; {nearest_part(optimizer, OPTIMIZERS)}")
    return _cost(family, arch, batch_size, optimizer)


@lru_cache(maxsize=65536)
def _cost(family: Priced, arch: Architecture, batch_size: int, optimizer: str) -> Cost:
    return family.price(arch, batch_size, optimizer)


@dataclass
class Footprint:
    """Memory that one layer allocates and saves for a batch, in bytes; `parameters` and `buffers` in entries."""

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


def passing_footprint(shape: Shape, result_shape: Shape, batch_size: int, *, saves_own: int = 0) -> Footprint:
    """Return the footprint of a layer without parameters that makes a new result, and a new gradient of its input."""
    gradient, result = (FLOAT_BYTES * batch_size * prod(sizes) for sizes in (shape, result_shape))
    return Footprint(
        result=result,
        saves_own=saves_own,
        forward_peak=result + saves_own,
        gradient=gradient,
        backward_peak=gradient,
    )


def pooling_footprint(kind: str, shape: Shape, result_shape: Shape, batch_size: int) -> Footprint:
    """Return the footprint of pooling of a kind, "max" or "average": of maxima the places are saved."""
    indices = INDEX_BYTES * batch_size * prod(result_shape) if kind == "max" else 0
    return replace(passing_footprint(shape, result_shape, batch_size, saves_own=indices), saves_input=True)


def table_footprint(weight: int, result_shape: Shape, batch_size: int) -> Footprint:
    """Return the footprint of a learned table of `weight` entries, read or added: nothing of its own is saved."""
    result = FLOAT_BYTES * batch_size * prod(result_shape)
    return Footprint(
        result=result,
        forward_peak=result,
        backward_peak=FLOAT_BYTES * weight,
        parameters=weight,
        largest_parameter=weight,
    )


def blocked(channels: int) -> int:
    """Return the number of channels in whole blocks of oneDNN's layouts."""
    return -(-channels // CHANNEL_BLOCK) * CHANNEL_BLOCK


def _blocked_entries(shape: Sequence[int]) -> int:
    """Return the entries of a tensor whose channels, its second dimension, lie in blocks."""
    return shape[0] * blocked(shape[1]) * prod(shape[2:])


def _copied_weight(channels: int, weight: Sequence[int]) -> int:
    """Return the entries of a copy of weights, which is padded to whole blocks where there is one group of channels.

    Measured with oneDNN 3.12, of 1 to 64 channels to a group.

    channels: of what the second dimension of the weights is of: the input, or of a transposed convolution the result.
    """
    return prod(weight) if channels != weight[1] else _blocked_entries((blocked(weight[0]), *weight[1:]))


def forward_copies(
    inputs: Sequence[int],
    weight: Sequence[int],
    result: Sequence[int],
    *,
    transposed: bool = False,
    copied: bool = False,
    entry_bytes: int = FLOAT_BYTES,
) -> int:
    """Return the bytes that a convolution of these shapes holds while it runs forward, its result included.

    copied: its input is made dense first.
    """
    # Few input channels are read as they are: in the forward pass below one block, for the weight's gradient images.
    read = 0 if inputs[1] < CHANNEL_BLOCK else _blocked_entries(inputs)
    copy = _blocked_entries(result)
    weight_copy = _copied_weight((result if transposed else inputs)[1], weight)
    return entry_bytes * (copied * prod(inputs) + max(read + weight_copy + copy, copy + prod(result)))


def backward_copies(
    result: Sequence[int],
    inputs: Sequence[int],
    weight: Sequence[int],
    *,
    strided: bool,
    first: bool,
    bias: bool,
    transposed: bool = False,
    copied: tuple[bool, bool] = (False, False),
    entry_bytes: int = FLOAT_BYTES,
) -> int:
    """Return the bytes that a convolution holds while it runs backward, the gradients that it returns included.

    first: no gradient of its input is asked for.
    copied: whether the gradient of its result, and its input, are made dense first.
    """
    gradient = 0 if first else prod(inputs)
    image = 0 if inputs[1] <= 3 else _blocked_entries(inputs)
    weight_copy = _copied_weight((result if transposed else inputs)[1], weight)
    parameters = prod(weight) + bias * weight[0]
    # The weight's gradient is added up in floats, also where entries are shorter.
    phases = [gradient + image + _blocked_entries(result), gradient + parameters]
    held_bytes = entry_bytes * max(phases) + max(entry_bytes, FLOAT_BYTES) * weight_copy
    if not first:  # the input's gradient; that of a strided convolution goes through two more layouts
        layouts = 3 * gradient if strided else _blocked_entries(inputs) + gradient
        copies = _blocked_entries(result) + weight_copy
        held_bytes = max(held_bytes, entry_bytes * max(copies + _blocked_entries(inputs), layouts))
    return held_bytes + entry_bytes * (copied[0] * prod(result) + copied[1] * prod(inputs))


def unfolded_copies(
    inputs: Sequence[int], weight: Sequence[int], result: Sequence[int], *, first: bool | None, entry_bytes: int
) -> int:
    """Return the bytes that a convolution holds while PyTorch computes it without oneDNN.

    Each position of the result is unfolded to the entries that the kernel reads. Results of groups are put together.

    first: None in the forward pass; in the backward pass, whether no gradient of the input is asked for.
    """
    made = prod(result) if first is None else 0 if first else prod(inputs)
    pieces = made if inputs[1] != weight[1] else 0
    columns = result[0] * prod(weight[1:]) * prod(result[2:]) if prod(weight[2:]) > 1 else 0
    return entry_bytes * (made + pieces + columns + (0 if first is None else prod(weight)))
