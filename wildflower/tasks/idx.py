"""MNIST, Fashion-MNIST and any other folder of IDX files (http://yann.lecun.com/exdb/mnist describes the format)."""

from __future__ import annotations

import gzip
import math
import re
import zlib
from pathlib import Path

import numpy as np
import torch

from wildflower.tasks import hub
from wildflower.tasks.data import Data, DataSet, decoded_files, make_data_set

INSTALL_FOLDER = Path("/usr/share/datasets")
"""The folder of the packages dataset-fashion-mnist and the like, with a folder per data set."""

_FILE_NAMES = {
    "train images": re.compile(r"(.*-)?train-images[-.]idx3-ubyte(\.gz)?"),
    "train labels": re.compile(r"(.*-)?train-labels[-.]idx1-ubyte(\.gz)?"),
    "test images": re.compile(r"(.*-)?(t10k|test)-images[-.]idx3-ubyte(\.gz)?"),
    "test labels": re.compile(r"(.*-)?(t10k|test)-labels[-.]idx1-ubyte(\.gz)?"),
}


def read_idx(file: Path, *, dimensions: int) -> np.ndarray:
    """Return the array of bytes in an IDX file, compressed by gzip if its name ends in .gz.

    ValueError when the file is no IDX file of bytes with `dimensions` dimensions, or is shorter or longer than it says.
    """
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"{file}: not a whole gzip file ({file.stat().st_size} bytes): {error}; fetch it again"
        ) from error
    magic = bytes((0, 0, 0x08, dimensions))
    header_bytes = 4 + 4 * dimensions
    if content[:4] != magic:
        raise ValueError(
            f"{file}: starts with {content[:4].hex() or 'nothing'}, an IDX file of bytes with "
            f"{dimensions} dimensions starts with {magic.hex()}"
        )
    if len(content) < header_bytes:
        raise ValueError(f"{file}: truncated in its header, {len(content)} of {header_bytes} bytes")
    shape = tuple(np.frombuffer(content, ">u4", count=dimensions, offset=4).tolist())
    expected_bytes = header_bytes + math.prod(shape)
    if len(content) != expected_bytes:
        what = "truncated" if len(content) < expected_bytes else "too long"
        raise ValueError(
            f"{file}: {what}, {len(content)} bytes where its header (shape {shape}) asks for {expected_bytes}"
        )
    return np.frombuffer(content, np.uint8, offset=header_bytes).reshape(shape)


def load(name: str, data_dir: str) -> DataSet:
    """Return the data set `name` from `data_dir`, else from its install folder, else downloaded.

    A `data_dir` holds IDX files or, for names of the hub, a local copy in the hub's format.
    """
    if data_dir:
        folder = hub.existing_folder(name, data_dir)
        if name in hub.REPOSITORIES and hub.find_local(folder):
            return hub.load(name, data_dir)
        return _load_folder(name, folder)
    if (INSTALL_FOLDER / name).is_dir():
        return _load_folder(name, INSTALL_FOLDER / name)
    try:
        return hub.load(name, "")
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"no data for the task '{name}': set data-dir to a folder with its IDX files or put them into "
            f"{INSTALL_FOLDER / name} (where the Debian package dataset-fashion-mnist puts Fashion-MNIST); {error}"
        ) from error


def load_any(data_dir: str) -> DataSet:
    """Return the IDX files in `data_dir`, which must be given."""
    return _load_folder("idx", hub.existing_folder("idx", data_dir, "the folder of your IDX files"))


def _load_folder(name: str, folder: Path) -> DataSet:
    source = f", or a copy of {hub.REPOSITORIES[name].path} on the Hugging Face hub" if name in hub.REPOSITORIES else ""
    files = {part: _find(folder, part, source) for part in _FILE_NAMES}
    return decoded_files(
        name,
        list(files.values()),
        lambda: make_data_set(_read_pair(files, "train"), _read_pair(files, "test")),
    )


def _find(folder: Path, part: str, source: str) -> Path:
    found = sorted(file for file in folder.iterdir() if _FILE_NAMES[part].fullmatch(file.name))
    # The same file packed and unpacked is one file, and the unpacked one is faster to read.
    found = [file for file in found if file.suffix != ".gz" or file.with_suffix("") not in found]
    if len(found) == 1:
        return found[0]
    if not found:
        raise FileNotFoundError(
            f"{folder}: no file with the {part}; expected a name such as {_example(part)} or {_example(part)}.gz"
            f"{source}"
        )
    raise ValueError(f"{folder}: several files could hold the {part}: {', '.join(file.name for file in found)}")


def _example(part: str) -> str:
    split, what = part.split()
    return f"{'t10k' if split == 'test' else split}-{what}-idx{3 if what == 'images' else 1}-ubyte"


def _read_pair(files: dict[str, Path], split: str) -> Data:
    images = read_idx(files[f"{split} images"], dimensions=3)
    labels = read_idx(files[f"{split} labels"], dimensions=1)
    if len(images) != len(labels):
        raise ValueError(
            f"{files[f'{split} images']} has {len(images)} images, "
            f"{files[f'{split} labels']} has {len(labels)} labels: the counts must agree"
        )
    # np.frombuffer gives read-only memory, which torch does not know; a copy is its own.
    return Data(torch.from_numpy(images.copy())[:, None], torch.from_numpy(labels.astype(np.int64)))
