"""Street View House Numbers (Netzer et al. 2011): digits, 32x32 in color; from the hub or the authors' files."""

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
from wildflower.tasks.mat import read_mat

CLASSES = 10


def load(data_dir: str) -> DataSet:
    """From train_32x32.mat and test_32x32.mat or a copy of the hub's in `data_dir`; without one from the hub."""
    folder = hub.existing_folder("svhn", data_dir) if data_dir else None
    if folder is None or hub.find_local(folder):
        return hub.load("svhn", data_dir)
    names = ("train_32x32.mat", "test_32x32.mat")
    train, test = [find_file(folder, name, "svhn", f"{' and '.join(names)} or parquet files") for name in names]
    return decoded_files("svhn", [train, test], lambda: make_data_set(_read(train), _read(test)))


def _read(file: Path) -> Data:
    """X (height, width, channels, examples) of bytes; y (examples, 1), in which 10 stands for the digit 0."""
    images, labels = read_mat(file, "X"), read_mat(file, "y").ravel()
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[2] != 3:
        raise ValueError(f"{file}: X must be bytes (height, width, 3, examples), not {images.dtype} {images.shape}")
    if images.shape[3] != len(labels):
        raise ValueError(f"{file}: {images.shape[3]} images, {len(labels)} labels: the counts must agree")
    if not np.isin(labels, range(1, CLASSES + 1)).all():
        raise ValueError(f"{file}: labels must be 1 to {CLASSES}, found {labels.min()} to {labels.max()}")
    inputs = torch.from_numpy(np.ascontiguousarray(images.transpose(3, 2, 0, 1)))
    return Data(inputs, torch.from_numpy(labels.astype(np.int64) % CLASSES))
