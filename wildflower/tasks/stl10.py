"""STL-10 (Coates et al. 2011): labeled images, 96x96 in color, 10 classes; from the hub or the authors' files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from wildflower.tasks import hub
from wildflower.tasks.data import (
    Data,
    DataSet,
    decoded_files,
    find_file,
    make_data_set,
)

SIDE = 96
IMAGE_BYTES = 3 * SIDE * SIDE
CLASSES = 10


def load(data_dir: str) -> DataSet:
    """From the files of stl10_binary.tar.gz or a copy of the hub's in `data_dir`; without one from the hub."""
    folder = hub.existing_folder("stl10", data_dir) if data_dir else None
    if folder is None or hub.find_local(folder):
        return hub.load("stl10", data_dir)
    names = [f"{split}_{what}.bin" for split in ("train", "test") for what in ("X", "y")]
    files = [find_file(folder, name, "stl10", "the files of stl10_binary.tar.gz or parquet files") for name in names]
    return decoded_files("stl10", files, lambda: make_data_set(_read(*files[:2]), _read(*files[2:])))


def _read(images: Path, labels: Path) -> Data:
    """Read images of 3 x 96 x 96 bytes each, column by column; labels one byte each, from 1."""
    pixels, numbers = np.fromfile(images, np.uint8), np.fromfile(labels, np.uint8)
    if not len(pixels) or len(pixels) % IMAGE_BYTES:
        raise ValueError(f"{images}: {len(pixels)} bytes are no whole images of {IMAGE_BYTES} bytes; fetch it again")
    if len(pixels) != IMAGE_BYTES * len(numbers):
        raise ValueError(
            f"{images} has {len(pixels) // IMAGE_BYTES} images, {labels} has {len(numbers)} labels: "
            "the counts must agree"
        )
    if numbers.min() < 1 or numbers.max() > CLASSES:
        raise ValueError(f"{labels}: labels must be 1 to {CLASSES}, found {numbers.min()} to {numbers.max()}")
    columns = torch.from_numpy(pixels).view(-1, 3, SIDE, SIDE)
    return Data(columns.transpose(2, 3).contiguous(), torch.from_numpy(numbers).long() - 1)
