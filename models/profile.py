"""The cost of single blocks: the parts of which a described network's cost composes (`wildflower.models.composition`).

`wildflower.models.cost` follows a whole training step. What a block adds to it depends on little besides the block: the
shape of its input, whether any parameters come before it (otherwise nobody asks for the gradient of its input), and
whether the block before it still needs that input in its own backward pass. A `Piece` is a block together with these.
Its `Profile` is what the same accounting says of the block alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.block_family import described
from wildflower.models.composition import Profile
from wildflower.models.cost import FLOAT_BYTES, Shape
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
