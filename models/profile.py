"""The cost of single blocks, and how the cost of a network composes from them along its chain.

`wildflower.models.cost` follows a whole training step. What a block adds to it depends on little besides the block: the
shape of its input, whether any parameters come before it (otherwise nobody asks for the gradient of its input), and
whether the block before it still needs that input in its own backward pass. A `Piece` is a block together with these,
its `Profile` is what the same accounting says of the block alone. With

    base_k   what is live when block k starts (its input included): base_1 = batch, base_k+1 = base_k + added_k
    G_k      the gradients of the parameters of all blocks behind block k; 0 where they go into a sum that is held
    L        what the loss keeps until the end: logits and log-softmax

the peak of a step, apart from weights, optimizer state and such a sum, is the largest of base_k + forward_peak_k,
base_k + G_k + L + backward_peak_k, the loss base_K+1 + 3 logits, and the update. It equals the peak that
`wildflower.models.cost` finds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.block_family import described
from wildflower.models.cost import (
    CONVOLUTION_KERNEL_BYTES,
    FLOAT_BYTES,
    INDEX_BYTES,
    OPTIMIZERS,
    Convolution,
    Cost,
    Shape,
)
from wildflower.models.layers import Block
from wildflower.models.traced.family import Traced
from wildflower.models.training_step import Step


@dataclass(frozen=True)
class Piece:
    """A block and what of its surroundings its cost depends on.

    Attributes:
        block: The block.
        shape: Of its input, for one example.
        first: No parameters come before it.
        held: The block before it keeps the input until its own backward pass (the batch is always kept).
    """

    block: Block
    shape: Shape
    first: bool
    held: bool

    @property
    def name(self) -> str:
        """The name of the block."""
        return self.block.name

    def profile(self, batch_size: int, *, piling: bool = True) -> Profile:
        """Return the costs of the block."""
        return profile(self, batch_size, piling=piling)


@dataclass(frozen=True)
class Profile:
    """Costs of a block, bytes for a whole batch; peaks are relative to what is live before the block.

    Attributes:
        parameters: Entries.
        buffers: Entries.
        largest_parameter: Entries of the largest tensor among the parameters.
        added_bytes: What is live after its forward pass, its result included, less what was before.
        forward_peak_bytes: Most during its forward pass.
        backward_peak_bytes: Most during its backward pass, gradients of later parameters and the loss apart.
        training_flops: Of one example, forward and backward.
        keeps_result: Its own backward pass needs its result.
        convolutions: Distinct ones: shapes of input and result, kernel.
        macs: Multiplications and additions of one example, forward.
    """

    parameters: int
    buffers: int
    largest_parameter: int
    added_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    training_flops: int
    keeps_result: bool
    convolutions: frozenset[Convolution]
    macs: int


class AnyPiece(Protocol):
    """A part of a network, of a name, whose costs compose."""

    @property
    def name(self) -> str:
        """The name of the part in its chain."""

    def profile(self, batch_size: int, *, piling: bool = True) -> Profile:
        """Return the costs of the part."""


@lru_cache(maxsize=65536)
def profile(piece: Piece, batch_size: int, *, piling: bool = True) -> Profile:
    """Return what a block costs; ValueError for one that hands on its input instead of a result of its own.

    piling: whether its gradients pile up, and do not go into the sum of those of earlier micro-batches.
    """
    step = Step(batch_size, piling=piling)
    before = step.parameters = 0 if piece.first else 1
    x = step._allocate(FLOAT_BYTES * batch_size * math.prod(piece.shape))
    x.holders += piece.held
    base = step.live_bytes
    y, _, trail = step._forward_block(piece.block, x, piece.shape)
    if y is x:
        raise ValueError(f"block {piece.block.name} has no result of its own: make it a part of a neighboring block")
    step._release(x)
    forward_peak, added = step.peak_bytes - base, step.live_bytes - base
    keeps_result = y.holders > 1
    # Backward: the block behind has read the result, and left its gradient.
    step._release(y)
    step.peak_bytes = 0
    step._backward_block(trail, step._allocate(y.size))
    return Profile(
        parameters=step.parameters - before,
        buffers=step.buffers,
        largest_parameter=step.largest_parameter,
        added_bytes=added,
        forward_peak_bytes=forward_peak,
        backward_peak_bytes=step.peak_bytes - base,
        training_flops=step.flops,
        keeps_result=keeps_result,
        convolutions=frozenset(step.convolutions),
        macs=step.macs,
    )


def pieces(family: Family, arch: Architecture) -> Sequence[AnyPiece]:
    """Return the blocks of an architecture with their surroundings, in order of computation; links of a module."""
    if isinstance(family, Traced):
        from wildflower.models.traced.links import pieces_of  # a device should not load PyTorch's tracer

        return pieces_of(family, arch)
    family = described(family, "a search along the chain of blocks (searcher = 'exact', or by the balanced criterion)")
    found = []
    shape, first, held = family.input_shape, True, True
    for block in family.blocks(arch):
        piece = Piece(block, shape, first, held)
        found.append(piece)
        # Neither of the two answers taken from here depends on the batch size.
        alone = profile(piece, 1)
        shape, first, held = block.output_shape(shape), first and alone.parameters == 0, alone.keeps_result
    if held:
        raise ValueError(f"{family.name}: the last block must not need its result, the logits, in its backward pass")
    return found


@dataclass(frozen=True)
class Frame:
    """Memory around the blocks of a family in a training step, in bytes, at a batch size and with an optimizer.

    Attributes:
        batch_bytes: Inputs and labels.
        logits_bytes: Of the whole batch.
        copies: Multiple of the parameters that is held during the whole step, the weights themselves included.
        piling: Whether gradients pile up in the backward pass; else they go into a sum that is one of the copies.
        temporary: Multiple of the largest parameter that the optimizer's step needs.
    """

    batch_bytes: int
    logits_bytes: int
    copies: int
    piling: bool
    temporary: int

    @classmethod
    def of(cls, family: Family, batch_size: int, optimizer: str) -> Frame:
        """Return the frame of a family, as `wildflower.models.cost` has it."""
        kept = OPTIMIZERS[optimizer]
        return cls(
            batch_bytes=batch_size * (family.input_dtype.itemsize * math.prod(family.input_shape) + INDEX_BYTES),
            logits_bytes=FLOAT_BYTES * batch_size * family.classes,
            copies=kept.copies,
            piling=not kept.accumulates,
            temporary=kept.temporary,
        )

    @property
    def loss_peak_bytes(self) -> int:
        """Return the loss and its gradient on top of the logits."""
        return 3 * self.logits_bytes

    @property
    def loss_kept_bytes(self) -> int:
        """Logits and log-softmax, kept until the end of the step."""
        return 2 * self.logits_bytes


def total(profiles: Iterable[Profile], frame: Frame) -> Cost:
    """Return the cost of a network from the profiles of its blocks, in order of computation."""
    parameters = buffers = largest = flops = 0
    convolutions: set[Convolution] = set()
    peak = frame.loss_peak_bytes
    # From the end: the peak of what lies behind a block, relative to what is live before it.
    for block in reversed(list(profiles)):
        peak = max(
            block.forward_peak_bytes,
            block.added_bytes + peak,
            FLOAT_BYTES * parameters * frame.piling + frame.loss_kept_bytes + block.backward_peak_bytes,
        )
        parameters += block.parameters
        buffers += block.buffers
        largest = max(largest, block.largest_parameter)
        flops += block.training_flops
        convolutions |= block.convolutions
    fixed = FLOAT_BYTES * (parameters * frame.copies + buffers) + CONVOLUTION_KERNEL_BYTES * len(convolutions)
    update = FLOAT_BYTES * (parameters * frame.piling + frame.temporary * largest)
    memory_bytes = fixed + frame.batch_bytes + max(peak, update)
    payload_bytes = FLOAT_BYTES * (parameters + buffers)
    return Cost(parameters, payload_bytes, payload_bytes, memory_bytes, flops)
