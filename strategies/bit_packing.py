"""Whole numbers of a few bits, packed into bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wildflower.messages.sums import CACHED


def bytes_of(bits: int) -> int:
    """Return how many bytes hold so many bits."""
    return -(-bits // 8)


def packed(codes: NDArray[np.int32], width: int) -> NDArray[np.uint8]:
    """Return whole numbers of `width` bits, one behind the other."""
    places = np.arange(width, dtype=np.int32)
    # A piece of CACHED numbers, which is a multiple of 8, fills whole bytes.
    pieces = (codes[start : start + CACHED, None] >> places & 1 for start in range(0, len(codes), CACHED))
    return np.concatenate([np.packbits(piece.astype(np.uint8)) for piece in pieces])


def unpacked(data: NDArray[np.uint8], count: int, width: int) -> NDArray[np.int32]:
    """Return the numbers that `packed` has packed."""
    codes, powers = np.zeros(count, dtype=np.int32), 2 ** np.arange(width, dtype=np.int32)
    for start in range(0, count, CACHED):
        stop = min(count, start + CACHED)
        bits = np.unpackbits(data[start * width // 8 : bytes_of(stop * width)], count=(stop - start) * width)
        codes[start:stop] = bits.reshape(-1, width).astype(np.int32) @ powers
    return codes
