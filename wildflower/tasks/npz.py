"""Anybody's own data: a folder with `train.npz` and `test.npz`, as `numpy.savez` writes them."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from wildflower.plugins.raised_as import raised_as
from wildflower.tasks import hub
from wildflower.tasks.data import (
    ONE_COLOR,
    Data,
    DataSet,
    decoded_files,
    make_data_set,
    one_color,
    unread,
)
from wildflower.tasks.device_data import OwnArguments, made
from wildflower.tasks.outliers import ALIKE, crowded
from wildflower.tasks.remarks import Remark, Remarks, joined

LOOKED_AT_TOGETHER = 1024
NAMES = ("inputs", "labels", "groups")
SHAPES = (
    "uint8 images are N x channels x height x width, or N x height x width; "
    "float32 signals are N x channels x length, or N x channels x height x width"
)
MOST_LAST = 4
"""Channels of images: no more values than that on a last side are taken for channels."""
FEWEST_STEPS = 256
"""Between the least and the largest number of a channel, as bytes have."""
FAR = "channels so far from zero that float32 rounds them to few steps: subtract a number before they are saved"
_DAMAGED = (OSError, EOFError, ValueError, RuntimeError, zlib.error, zipfile.BadZipFile)


class NpzArguments(OwnArguments):
    """Arguments of the task `npz`."""

    channels: Literal["", "first", "last"] = Field(
        "", description="Where inputs have their channels; empty: first, and an error where they seem to be last"
    )


def load(data_dir: str, arguments: NpzArguments | None = None) -> DataSet:
    """Return the arrays in `train.npz` and `test.npz` of `data_dir`, which must be given.

    `inputs` and `labels` (whole numbers from 0), and in `train.npz`, for the natural partition, optionally `groups`:
    whole numbers, equal where examples are from one source.
    """
    folder = hub.existing_folder("npz", data_dir, "the folder of your train.npz and test.npz")
    channels = "" if arguments is None else arguments.channels
    train, test = _find(folder, "train.npz"), _find(folder, "test.npz")
    found = decoded_files("npz", [train, test], lambda: _decode(train, test, channels), channels=channels)
    return replace(found, remarks=joined([*found.remarks, *unread([train, test], (".npz", ".npy"))]))


def own(data_dir: str, arguments: NpzArguments | None = None) -> DataSet:
    """Return a device's examples: `train.npz`, `test.npz` or both in its folder. Labels are whole numbers or names.

    FileNotFoundError where there is neither, ValueError where a file is wrong.
    """
    folder, channels = hub.existing_folder("npz", data_dir), "" if arguments is None else arguments.channels
    files = [folder / name for name in ("train.npz", "test.npz") if (folder / name).is_file()]
    if not files:
        _find(folder, "train.npz")

    def decode() -> DataSet:
        found = {file.name: _read(file) for file in files}
        parts = {
            name: (_inputs(folder / name, arrays, channels), _names(folder / name, arrays))
            for name, arrays in found.items()
        }
        if "train.npz" not in parts:
            inputs, _ = parts["test.npz"]
            parts = {"train.npz": (inputs[:0], []), **parts}
        shapes = {tuple(inputs.shape[1:]) for inputs, _ in parts.values()}
        kinds = {inputs.dtype for inputs, _ in parts.values()}
        if len(shapes) > 1 or len(kinds) > 1:
            raise ValueError(f"{folder}: train.npz and test.npz hold inputs of different shapes or types")
        return replace(made(list(parts.values())), remarks=_seldom_meant([inputs for inputs, _ in parts.values()]))

    data = decoded_files("npz-own", files, decode, channels=channels)
    return replace(data, remarks=joined([*data.remarks, *unread(files, (".npz", ".npy"))]))


def _names(file: Path, arrays: dict[str, np.ndarray]) -> list[str]:
    """Return the labels of a file as texts."""
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


def _decode(train: Path, test: Path, channels: str) -> DataSet:
    of_train, of_test = _read(train), _read(test)
    groups = _whole_numbers(train, "groups", of_train) if "groups" in of_train else None
    # Numbered from 0, whatever numbers the sources have.
    ids = None if groups is None else torch.from_numpy(np.unique(groups, return_inverse=True)[1].reshape(-1))
    data = [
        Data(_inputs(file, arrays, channels), _labels(file, arrays))
        for file, arrays in ((train, of_train), (test, of_test))
    ]
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
    with raised_as(ValueError, f"{train.parent}: "):
        found = make_data_set(*data, natural_ids=ids)
        return replace(found, remarks=_seldom_meant([part.inputs for part in data]))


def _read(file: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file by name; none of them is a pickle."""
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


def _seldom_meant(parts: Sequence[Tensor]) -> tuple[Remark, ...]:
    """Count images (bytes) of one color all over, and channels of signals of which float32 or a norm leaves little."""
    remarks = Remarks()
    for inputs in parts:
        if inputs.dtype != torch.uint8:
            for channel in _far_from_zero(inputs.numpy()):
                remarks.add(FAR, f"channel {channel}, counted from 0")
            for channel in crowded(inputs):
                remarks.add(f"channels {ALIKE}", f"channel {channel}, counted from 0")
            continue
        for start, chunk in enumerate(inputs.split(LOOKED_AT_TOGETHER)):
            numbers = one_color(chunk).nonzero().flatten().tolist()
            first = f"input {start * LOOKED_AT_TOGETHER + numbers[0]}" if numbers else ""
            remarks.add(ONE_COLOR, first, len(numbers))
    return remarks.found()


def _far_from_zero(inputs: np.ndarray) -> list[int]:
    """Return the channels, on axis 1, whose numbers are so far from zero that 32 bits have few steps between them."""
    if inputs.ndim < 2 or not inputs.size:
        return []
    others = tuple(axis for axis in range(inputs.ndim) if axis != 1)
    low, high = (np.asarray(end, np.float64) for end in (inputs.min(axis=others), inputs.max(axis=others)))
    steps = np.spacing(np.maximum(abs(low), abs(high)).astype(np.float32)).astype(np.float64)
    return np.flatnonzero((low < high) & (high - low < FEWEST_STEPS * steps)).tolist()


def _inputs(file: Path, arrays: dict[str, np.ndarray], channels: str) -> Tensor:
    inputs = arrays["inputs"]
    images, signals = inputs.dtype == np.uint8, inputs.dtype.kind == "f" and inputs.dtype.itemsize == 4
    if not images and not signals:
        far = inputs.dtype.kind in "fiu" and bool(_far_from_zero(inputs))
        first = "; first subtract a number from each channel, because float32 has few steps so far from zero"
        raise ValueError(
            f"{file}: inputs are {inputs.dtype}, they must be uint8 (pixels from 0 to 255) or float32: convert them, "
            f"as in inputs.astype(numpy.float32){first * far}"
        )
    if inputs.ndim not in (3, 4) or 0 in inputs.shape:
        raise ValueError(f"{file}: inputs have shape {inputs.shape}; {SHAPES}")
    if images and inputs.ndim == 3:
        inputs = inputs[:, None]
    elif channels == "last":
        inputs = np.moveaxis(inputs, -1, 1)
    elif not channels and (why := _seems_last(inputs)):
        how = "inputs.transpose(0, 3, 1, 2)" if inputs.ndim == 4 else "inputs.transpose(0, 2, 1)"
        raise ValueError(
            f"{file}: inputs have shape {inputs.shape}, {why}: use {how}, or channels = 'last' in task-arguments; "
            f"channels = 'first' if they are right as they are; {SHAPES}"
        )
    if signals:
        bad = np.flatnonzero(~np.isfinite(inputs).reshape(len(inputs), -1).all(axis=1))
        if len(bad):
            raise ValueError(
                f"{file}: {len(bad)} of {len(inputs)} inputs hold values that are not finite, the first is inputs"
                f"[{bad[0]}]: leave these examples out, or fill in what is missing"
            )
    # In the machine's byte order and in rows, whatever the file has: torch knows no other.
    return torch.from_numpy(np.array(inputs, np.uint8 if images else np.float32, order="C"))


def _seems_last(inputs: np.ndarray) -> str:
    """Return why inputs seem to have their channels last, or none at all; "" where they do not."""
    if inputs.ndim == 4:
        _, first, rows, last = inputs.shape
        few = last <= MOST_LAST < first
        return "with channels last" if few or (first == rows and last < first) else ""
    _, first, last = inputs.shape
    if first == last > 1:
        return "which may be images without an axis of channels (for those use inputs[:, None])"
    return f"with channels last, or with {first} channels of {last} values" if first > last else ""


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
