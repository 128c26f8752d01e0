"""AnycostFL's "flexible gradient compression": an update in a share of its bytes.

The paper's text was not at hand when this was written, so that it follows what is known of it. Where that leaves
something open, "Reading:" says what is built.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wildflower.messages.error import MessageError
from wildflower.messages.packing import Layout
from wildflower.messages.sums import CACHED
from wildflower.messages.tensor_sets import TensorSet, Weights
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.strategies.bit_packing import bytes_of, packed, unpacked

MAX_ERROR = 1e6  # of a compression, in parts of the update's square; honest ones are below 1, or little above
MAX_BITS = 15  # of a magnitude's level; with its sign an element then takes at most two bytes
_LEVEL_BITS = range(1, MAX_BITS + 1)


@dataclass(frozen=True)
class Compressed:
    """The content of a compressed update.

    Attributes:
        values: the update, 0 in kernels that were dropped.
        kept: which elements were not dropped.
        share: of the kernels that were kept, the paper's rho.
        error: the squared error of the compression, in parts of the update's squared norm.
    """

    values: Weights
    kept: dict[str, Tensor]
    share: float
    error: float


@dataclass(frozen=True)
class Code:
    """An update in at most a share of the bytes that it takes as 32-bit floats: kernels are dropped, others quantized.

    A kernel is one slice [o, i] of a convolution's filters, a row of a linear layer, or a whole bias. Reading: scales
    and shifts of norms are a kernel each, as a bias is. Kernels are kept whole, those of largest L2 norm first.

    Of a kept element travel its sign and one of L = 2^bits levels, which lie evenly between the least and the largest
    magnitude that was kept of its tensor. It becomes one of the two levels beside it, by a chance that makes the mean
    over many draws the element itself. Reading: these two magnitudes are of each tensor, and not of the whole update,
    because layers move by very different amounts; and L is a power of two, so that a level fills its bits.

    For every L as many kernels are kept as the bytes hold. Of these pairs that one is taken whose expected squared
    error is least: the squares of what is dropped, and the variance of the quantization.

    The bytes are: the bits of a level (1), the relative squared error (4), the least and the largest magnitude of
    every tensor (8 each), one bit per kernel that says whether it was kept, where the paper has Golomb codes, and sign
    and level of every element that was kept. What is left of the bytes is 0. They are as many in every round, because
    both sides derive layouts before anything is trained.

    Attributes:
        layout: the tensors of the update.
        beta: the share of their bytes.
    """

    layout: Layout
    beta: float

    @cached_property
    def shapes(self) -> list[tuple[int, int]]:
        """Return the kernels of every tensor, and the elements of one."""
        return [_kernels(entry.shape) for entry in self.layout.entries]

    @cached_property
    def sizes(self) -> Tensor:
        """The elements of every kernel of all tensors (int64)."""
        counts, elements = zip(*self.shapes, strict=True)
        return torch.tensor(elements).repeat_interleave(torch.tensor(counts))

    @cached_property
    def fixed_bytes(self) -> int:
        """All bytes but those of elements."""
        return 5 + 8 * len(self.shapes) + bytes_of(len(self.sizes))

    @cached_property
    def nbytes(self) -> int:
        """The bytes that travel: the share, or what all elements take with the most levels where that is less."""
        return min(self.allowed_bytes, self.fixed_bytes + bytes_of(self.layout.numel * (1 + MAX_BITS)))

    @property
    def allowed_bytes(self) -> int:
        """The share of the bytes of 32-bit floats."""
        return int(self.beta * self.layout.nbytes)

    @property
    def least_bytes(self) -> int:
        """Return what is needed whatever the update is: the largest kernel, with two levels."""
        return self.fixed_bytes + bytes_of(2 * int(self.sizes.max()))

    # Writing

    def write(self, update: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
        """The bytes that stand for an update of 32-bit floats (uint8). MessageError where a value is not finite."""
        rows = []
        for entry, shape in zip(self.layout.entries, self.shapes, strict=True):
            value = update[entry.name]
            if not bool(torch.isfinite(value).all()):
                raise MessageError(f"tensor {entry.name!r} of the update holds values that are not finite")
            rows.append(value.reshape(shape))
        norms = torch.cat([torch.linalg.vector_norm(row, dim=1, dtype=torch.float64) for row in rows])
        kept, bits, dropped = self.choose(rows, norms)
        codes, ranges, error = [], np.zeros((len(rows), 2), dtype="<f4"), dropped
        for number, found in self._kept_of(rows, kept):
            low, high = ranges[number] = _range(found)
            for piece in found.split(CACHED):
                place = _place(piece, low, high, bits)
                level = (place + torch.rand(len(piece), generator=generator, dtype=torch.float64)).floor_()
                level.clamp_(max=2**bits - 1)
                error += float((_magnitude(level, low, high, bits) - piece.abs().double()).square_().sum())
                codes.append(level.to(torch.int32) + (piece < 0).to(torch.int32) * 2**bits)
        whole = float(norms.square().sum())
        parts: list[NDArray[Any]] = [
            np.array([bits], dtype=np.uint8),
            np.array([error / whole if whole else 0.0], dtype="<f4").view(np.uint8),
            ranges.reshape(-1).view(np.uint8),
            np.packbits(kept.numpy()),
            packed(torch.cat(codes).numpy(), bits + 1),
        ]
        data = np.zeros(self.nbytes, dtype=np.uint8)
        used = np.concatenate(parts)
        data[: len(used)] = used
        return torch.from_numpy(data)

    def choose(self, rows: Sequence[Tensor], norms: Tensor) -> tuple[Tensor, int, float]:
        """Return which kernels are kept (bool), the bits of a level, and the squares of what is dropped.

        Args:
            rows: (kernels, elements) of every tensor.
            norms: the L2 norm of every kernel of all tensors (float64).
        """
        order = torch.sort(norms, descending=True, stable=True).indices
        elements = self.sizes[order].cumsum(0)
        # Added up from the smallest on, so that nothing is lost beside the large ones.
        dropped = [*norms[order].square().flip(0).cumsum(0).flip(0).tolist(), 0.0]
        room_bits = 8 * (self.nbytes - self.fixed_bytes)
        found: list[tuple[float, int, int]] = []
        for bits in _LEVEL_BITS:
            count = int((elements * (1 + bits) <= room_bits).sum())
            if count:
                error = dropped[count] + self._variance(rows, _first(order, count), bits)
                found.append((error, bits, count))
        _, bits, count = min(found)
        return _first(order, count), bits, dropped[count]

    def _variance(self, rows: Sequence[Tensor], kept: Tensor, bits: int) -> float:
        """The expected squared error of the elements that are kept."""
        total = 0.0
        for _, found in self._kept_of(rows, kept):
            low, high = _range(found)
            step = (high - low) / (2**bits - 1)
            for piece in found.split(CACHED):
                above = _place(piece, low, high, bits).frac_()
                total += step**2 * float((above * (1 - above)).sum())
        return total

    def _kept_of(self, rows: Sequence[Tensor], kept: Tensor) -> list[tuple[int, Tensor]]:
        """The elements that are kept of every tensor, by its number; without tensors of which none are."""
        masks = kept.split([count for count, _ in self.shapes])
        return [(n, row[mask].reshape(-1)) for n, (row, mask) in enumerate(zip(rows, masks, strict=True)) if mask.any()]

    # Reading

    def read(self, data: Tensor) -> Compressed:
        """The update that bytes stand for. MessageError where they cannot be right."""
        raw = data.numpy()
        if len(raw) != self.nbytes:
            raise MessageError(f"a compressed update has {len(raw)} bytes instead of {self.nbytes}")
        bits = int(raw[0])
        if bits not in _LEVEL_BITS:
            raise MessageError(f"a compressed update has levels of {bits} bits: they have 1 to {MAX_BITS}")
        numbers = raw[1 : 5 + 8 * len(self.shapes)].copy().view("<f4")
        error, ranges = float(numbers[0]), numbers[1:].reshape(-1, 2)
        if not 0 <= error <= MAX_ERROR:
            raise MessageError(f"a compressed update has a relative squared error of {error:g}, above {MAX_ERROR:g}")
        right = np.isfinite(ranges).all(axis=1) & (ranges[:, 0] >= 0) & (ranges[:, 0] <= ranges[:, 1])
        if not right.all():
            wrong = int(np.flatnonzero(~right)[0])
            low, high = ranges[wrong]
            name = self.layout.entries[wrong].name
            raise MessageError(f"a compressed update has magnitudes of {name!r} from {low:g} to {high:g}")
        ranges = ranges.astype(np.float64)
        mask = np.unpackbits(raw[5 + 8 * len(self.shapes) : self.fixed_bytes], count=len(self.sizes))
        kept = torch.from_numpy(mask).bool()
        count = int(self.sizes[kept].sum())
        if bytes_of(count * (1 + bits)) > self.nbytes - self.fixed_bytes:
            raise MessageError(f"a compressed update keeps {count} elements of {1 + bits} bits, for which it is short")
        codes = torch.from_numpy(unpacked(raw[self.fixed_bytes :], count, 1 + bits))
        values, elements, start = Weights(), dict[str, Tensor](), 0
        masks = kept.split([kernels for kernels, _ in self.shapes])
        for entry, shape, rows, (low, high) in zip(self.layout.entries, self.shapes, masks, ranges, strict=True):
            stop = start + int(rows.sum()) * shape[1]
            code = codes[start:stop]
            start = stop
            magnitude = _magnitude((code & (2**bits - 1)).double(), low, high, bits)
            signed = torch.where(code >= 2**bits, -magnitude, magnitude).float()
            value = torch.zeros(shape)
            value[rows] = signed.view(-1, shape[1])
            values[entry.name] = value.view(entry.shape)
            elements[entry.name] = rows[:, None].expand(shape).reshape(entry.shape)
        return Compressed(values, elements, float(kept.double().mean()), error)


@lru_cache(maxsize=256)
def code_of(family: Family, architecture: Architecture, beta: float) -> Code:
    """Return how the update of a sub-model travels; what is frozen has none."""
    return Code(TensorSet.of(family.tensors(architecture)).layout, beta)


def _kernels(shape: tuple[int, ...]) -> tuple[int, int]:
    """How many kernels a tensor has, and the elements of one."""
    kernels = math.prod(shape[: min(2, len(shape) - 1)]) if len(shape) > 1 else 1
    return kernels, math.prod(shape) // kernels


def _first(order: Tensor, count: int) -> Tensor:
    """A mask of the kernels that come first in an order."""
    kept = torch.zeros(len(order), dtype=torch.bool)
    kept[order[:count]] = True
    return kept


def _range(values: Tensor) -> tuple[float, float]:
    """The least and the largest magnitude."""
    low, high = torch.aminmax(values.abs())
    return float(low), float(high)


def _place(values: Tensor, low: float, high: float, bits: int) -> Tensor:
    """Where magnitudes lie among 2^bits levels from `low` to `high`, the first of which is 0 (float64)."""
    scale = (2**bits - 1) / (high - low) if high > low else 0.0
    return values.abs().double().sub_(low).mul_(scale)


def _magnitude(level: Tensor, low: float, high: float, bits: int) -> Tensor:
    """The magnitudes that levels stand for (float64)."""
    return low + level * ((high - low) / (2**bits - 1))
