"""Composes the cost of a network from those of its parts along a chain.

    base_k   what is live when part k starts (its input included): base_1 = batch, base_k+1 = base_k + added_k
    G_k      the gradients of the parameters of all parts behind part k; 0 where they go into a sum that is held
    L        what the loss keeps until the end: logits and log-softmax

The peak of a step, apart from weights, optimizer state and such a sum, is the largest of base_k + forward_peak_k,
base_k + G_k + L + backward_peak_k, the loss base_K+1 + 3 logits, and the update. It equals the peak that
`wildflower.models.cost` finds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from wildflower.models.base import Family
from wildflower.models.cost import (
    CONVOLUTION_KERNEL_BYTES,
    FLOAT_BYTES,
    INDEX_BYTES,
    OPTIMIZERS,
    Convolution,
    Cost,
)


@dataclass(frozen=True)
class Profile:
    """Costs of a part, such as a block, bytes for a whole batch; peaks are relative to what is live before the block.

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
