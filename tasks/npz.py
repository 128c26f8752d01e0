"""Anybody's own data: a folder with `train.npz` and `test.npz`, as `numpy.savez` writes them."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tasks import hub
from tasks.data import DECODED_VERSION, Data, DataSet, decoded_once, describe_files, digest, make_data_set
from tasks.own import OwnArguments, made

NAMES = ("inputs", "labels", "groups")
SHAPES = (
    "uint8 images are N x channels x height x width, or N x height x width; "
    "float32 signals are N x channels x length, or N x channels x height x width"
)
_DAMAGED = (OSError, EOFError, ValueError, RuntimeError, zlib.error, zipfile.BadZipFile)


def load(data_dir: str, arguments: OwnArguments | None = None) -> DataSet:
    """The arrays in `train.npz` and `test.npz` of `data_dir`, which must be given.

    `inputs` and `labels` (whole numbers from 0), and in `train.npz`, for the natural partition, optionally `groups`:
    whole numbers, equal where examples are from one source.
    """
    if not data_dir:
        raise ValueError("the task 'npz' needs data-dir: the folder of your train.npz and test.npz")
    folder = hub.existing_folder("npz", data_dir)
    train, test = _find(folder, "train.npz"), _find(folder, "test.npz")
    return decoded_once(
        "npz", digest(decoded=DECODED_VERSION, files=describe_files([train, test])), lambda: _decode(train, test)
    )


def own(data_dir: str, arguments: OwnArguments | None = None) -> DataSet:
    """What a device has: `train.npz`, `test.npz` or both in its folder. Labels are whole numbers, or names (str).

    FileNotFoundError where there is neither, ValueError where a file is wrong.
    """
    folder = hub.existing_folder("npz", data_dir)
    files = [folder / name for name in ("train.npz", "test.npz") if (folder / name).is_file()]
    if not files:
        _find(folder, "train.npz")

    def decode() -> DataSet:
        found = {file.name: _read(file) for file in files}
        parts = {
            name: (_inputs(folder / name, arrays), _names(folder / name, arrays)) for name, arrays in found.items()
        }
        if "train.npz" not in parts:
            inputs, _ = parts["test.npz"]
            parts = {"train.npz": (inputs[:0], []), **parts}
        shapes = {tuple(inputs.shape[1:]) for inputs, _ in parts.values()}
        kinds = {inputs.dtype for inputs, _ in parts.values()}
        if len(shapes) > 1 or len(kinds) > 1:
            raise ValueError(f"{folder}: train.npz and test.npz hold inputs of different shapes or types")
        return made(list(parts.values()))

    return decoded_once("npz-own", digest(decoded=DECODED_VERSION, files=describe_files(files)), decode)


def _names(file: Path, arrays: dict[str, np.ndarray]) -> list[str]:
    """The labels of a file as texts."""
    labels = arrays["labels"]
    if labels.dtype.kind not in "iuU" or labels.ndim != 1:
        raise ValueError(
            f"{file}: labels are {labels.dtype} of shape {labels.shape}, they must be whole numbers or texts, one per "
            "example"
        )
    return [str(label).strip() for label in labels.tolist()]


def _find(folder: Path, name: str) -> Path:
    if (folder / name).is_file():
        return folder / name
    there = ", ".join(sorted(file.name for file in folder.iterdir())[:10]) or "nothing"
    raise FileNotFoundError(
        f"{folder}: no file {name}, which the task 'npz' needs beside "
        f"{'test.npz' if name == 'train.npz' else 'train.npz'}; the folder holds {there}"
    )


def _decode(train: Path, test: Path) -> DataSet:
    of_train, of_test = _read(train), _read(test)
    groups = _whole_numbers(train, "groups", of_train) if "groups" in of_train else None
    # Numbered from 0, whatever numbers the sources have.
    ids = None if groups is None else torch.from_numpy(np.unique(groups, return_inverse=True)[1].reshape(-1))
    data = [Data(_inputs(file, arrays), _labels(file, arrays)) for file, arrays in ((train, of_train), (test, of_test))]
    labels = torch.cat([part.labels for part in data])
    if int(labels.min()) > 0:
        raise ValueError(
            f"{train.parent}: the smallest label is {int(labels.min())}, labels count from 0: subtract it from all"
        )
    if int(labels.max()) >= len(labels):
        raise ValueError(
            f"{train.parent}: the largest label is {int(labels.max())}, and there are {len(labels)} examples: "
            "labels are 0 to the number of classes - 1"
        )
    try:
        return make_data_set(*data, natural_ids=ids)
    except ValueError as error:
        raise ValueError(f"{train.parent}: {error}") from None


def _read(file: Path) -> dict[str, np.ndarray]:
    """The arrays of a file by name; none of them is a pickle."""
    try:
        # A pickle can run code when it is loaded.
        content = np.load(file, allow_pickle=False)
        if isinstance(content, np.ndarray):
            raise ValueError("it holds one array without a name")
        with content:
            names = list(content.files)
            arrays = {name: content[name] for name in names if name in NAMES}
    except _DAMAGED as error:
        raise ValueError(
            f"{file}: cannot be read ({error}); it must be a whole file of numpy.savez with arrays of numbers, as in "
            f"numpy.savez({file.name!r}, inputs=..., labels=...)"
        ) from error
    unknown = [name for name in names if name not in NAMES]
    missing = [name for name in ("inputs", "labels") if name not in names]
    if unknown or missing:
        raise ValueError(
            f"{file}: holds arrays called {', '.join(names) or 'nothing'}; it must hold inputs and labels, may hold "
            "groups, and no others"
        )
    if arrays["labels"].ndim != 1:
        raise ValueError(f"{file}: labels have shape {arrays['labels'].shape}, they must have one number per example")
    for name, array in arrays.items():
        if array.shape[:1] != arrays["labels"].shape:
            count = len(array) if array.ndim else "no"
            raise ValueError(f"{file}: {count} {name}, {len(arrays['labels'])} labels: the counts must agree")
    if not len(arrays["labels"]):
        raise ValueError(f"{file}: holds no examples")
    return arrays


def _inputs(file: Path, arrays: dict[str, np.ndarray]) -> Tensor:
    inputs = arrays["inputs"]
    images, signals = inputs.dtype == np.uint8, inputs.dtype.kind == "f" and inputs.dtype.itemsize == 4
    if not images and not signals:
        raise ValueError(
            f"{file}: inputs are {inputs.dtype}, they must be uint8 (pixels from 0 to 255) or float32: convert them, "
            "as in inputs.astype(numpy.float32)"
        )
    if inputs.ndim not in (3, 4) or 0 in inputs.shape:
        raise ValueError(f"{file}: inputs have shape {inputs.shape}; {SHAPES}")
    if images and inputs.ndim == 4 and inputs.shape[1] > 4 and inputs.shape[3] in (1, 3, 4):
        raise ValueError(
            f"{file}: inputs have shape {inputs.shape}, with channels last; {SHAPES}: use inputs.transpose(0, 3, 1, 2)"
        )
    if images and inputs.ndim == 3:
        inputs = inputs[:, None]
    if signals:
        bad = np.flatnonzero(~np.isfinite(inputs).reshape(len(inputs), -1).all(axis=1))
        if len(bad):
            raise ValueError(
                f"{file}: {len(bad)} of {len(inputs)} inputs hold values that are not finite, the first is inputs"
                f"[{bad[0]}]: leave these examples out, or fill in what is missing"
            )
    # In the machine's byte order and in rows, whatever the file has: torch knows no other.
    return torch.from_numpy(np.array(inputs, np.uint8 if images else np.float32, order="C"))


def _labels(file: Path, arrays: dict[str, np.ndarray]) -> Tensor:
    labels = _whole_numbers(file, "labels", arrays)
    if labels.min() < 0:
        raise ValueError(f"{file}: labels[{labels.argmin()}] is {labels.min()}, labels count from 0")
    return torch.from_numpy(labels)


def _whole_numbers(file: Path, name: str, arrays: dict[str, np.ndarray]) -> np.ndarray:
    values = arrays[name]
    if values.dtype.kind not in "iu" or values.ndim != 1:
        texts = values.dtype.kind in "US" and values.ndim == 1
        numbers = f"numpy.unique({name}, return_inverse=True)[1]" if texts else f"{name}.astype(numpy.int64)"
        if texts and name == "labels":
            numbers += " over those of train.npz and test.npz together"
        raise ValueError(
            f"{file}: {name} are {values.dtype} of shape {values.shape}, they must be whole numbers, one per example: "
            f"as in {numbers}"
        )
    if values.dtype.kind == "u" and values.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{file}: {name} hold {values.max()}, more than fits into 64 bits with a sign")
    return values.astype(np.int64)
