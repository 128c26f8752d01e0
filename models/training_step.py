"""One training step of a network of described layers, followed allocation by allocation: its price (see cost.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from wildflower.models.cost import (
    CONVOLUTION_KERNEL_BYTES,
    FLOAT_BYTES,
    INDEX_BYTES,
    OPTIMIZERS,
    Convolution,
    Cost,
    Footprint,
    Shape,
)
from wildflower.models.layers import Block, Layer


@dataclass
class _Tensor:
    size: int
    holders: int = 1  # the code that still reads it and the layers that saved it


_Trail = list[tuple[Footprint, _Tensor, _Tensor]]  # of each layer, in forward order: footprint, input, result

# Of a block: of its layers, of its shortcut if it has one, and behind the addition; None there: a concatenation.
_BlockTrail = tuple[_Trail, _Trail | None, _Trail | None]


class Step:
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

    def cost(self, optimizer: str) -> Cost:
        """Return what the network of the step costs with an optimizer that takes gradients as this step does."""
        kept = OPTIMIZERS[optimizer]
        parameter_bytes = FLOAT_BYTES * self.parameters
        kernel_bytes = CONVOLUTION_KERNEL_BYTES * len(self.convolutions)
        fixed_bytes = parameter_bytes * kept.copies + FLOAT_BYTES * self.buffers + kernel_bytes
        update_bytes = parameter_bytes * self.piling + FLOAT_BYTES * kept.temporary * self.largest_parameter
        network_bytes = FLOAT_BYTES * (self.parameters + self.buffers)
        return Cost(
            parameters=self.parameters,
            download_bytes=network_bytes,
            upload_bytes=network_bytes,
            peak_training_memory_bytes=fixed_bytes + max(self.peak_bytes, self.batch_bytes + update_bytes),
            training_flops=self.flops,
        )

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
            footprint = layer.footprint(shape, result_shape, self.batch_size, self.parameters == 0)
            self._count(footprint)
            self.convolutions |= layer.convolutions(shape, result_shape)
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
