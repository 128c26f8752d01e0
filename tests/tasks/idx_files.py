"""Writes small folders of IDX files."""

import gzip
import struct
from pathlib import Path

import numpy as np


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write_folder(
    folder: Path,
    *,
    train: int = 40,
    test: int = 20,
    classes: int = 4,
    packed: bool = True,
    size: tuple[int, int] = (6, 5),
) -> Path:
    """Images whose labels go round all classes."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(5)
    for split, count in (("train", train), ("t10k", test)):
        images = rng.integers(0, 256, (count, *size))
        labels = np.arange(count) % classes
        for name, array in ((f"{split}-images-idx3-ubyte", images), (f"{split}-labels-idx1-ubyte", labels)):
            if packed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(idx_bytes(array)))
            else:
                (folder / name).write_bytes(idx_bytes(array))
    return folder
