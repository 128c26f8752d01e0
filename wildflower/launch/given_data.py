"""Data that are objects in Python, as one data set: arrays, tensors, data sets and tables, also one for each device."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, default_collate

from wildflower.launch.experiment_file import SettingsError
from wildflower.launch.source import kind_of_value
from wildflower.plugins.nearest import nearest
from wildflower.tasks.data import Data, DataSet, stratified_test
from wildflower.tasks.device_data import in_order
from wildflower.tasks.labels import NO_LABEL, label_text
from wildflower.tasks.outliers import ALIKE, crowded
from wildflower.tasks.remarks import Remarks

TEST_SHARE = 0.2
LABELS = ("label", "labels", "target", "y")  # of a table's columns, where none is named
SPLITS = ("train", "test")
TABLES = (("pandas", "DataFrame"), ("polars", "DataFrame"), ("datasets", "Dataset"))
MOST_LAST = 4  # values on the last side of images that are taken for channels
CAN_BE = (
    "must be a pair (x, y) of arrays or tensors, a Dataset of PyTorch or a DataLoader of one, a data set of Hugging "
    "Face's datasets, a table of pandas with label=, or one of these for each device, as a list or a dict"
)


@dataclass(frozen=True)
class _Examples:
    """Inputs as a tensor, and labels that are numbers or names, one per example; of a table the inputs' names."""

    inputs: Tensor
    labels: np.ndarray
    columns: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)


def data_set_of(data: object, label: str | None, test: object, *, flat: bool) -> tuple[DataSet, int]:
    """Return what was given as one data set, and of how many devices it is; 0 where it is to be dealt out.

    Args:
        label: the column of labels, of tables.
        test: examples to test on; None keeps a fifth of each class, or of each device's examples.
        flat: rows of numbers stay so, (examples, columns), as a module reads them; the project's own families read
            (examples, columns, 1).

    Raises SettingsError, which says what the arguments may be.
    """
    splits = _splits(data)
    if splits is not None:
        if test is not None and "test" in splits:
            raise SettingsError("test: data has a split 'test' already: leave one of the two out")
        data, test = splits["train"], splits.get("test", test)
    devices = _of_devices(data)
    parts = [_examples(part, label, f"data[{name!r}]") for name, part in devices.items()]
    if not devices:
        parts = [_examples(data, label, "data")]
    train = _joined(parts, "data")
    source = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor([len(part) for part in parts]))
    numbers = train.labels.dtype.kind == "f"
    if test is None:
        dealt_out = devices or numbers or train.labels.ndim > 1
        strata = source if dealt_out else torch.from_numpy(np.unique(train.labels, return_inverse=True)[1].reshape(-1))
        mask = stratified_test(strata, TEST_SHARE)
        if not mask.any():
            raise SettingsError(f"data: {len(train)} examples are too few to keep a fifth for testing: give test=")
        tests, train, source = _chosen(train, mask), _chosen(train, ~mask), source[~mask]
    else:
        of_tests = [_examples(part, label, "test") for part in (_of_devices(test) or {"": test}).values()]
        tests = _joined(of_tests, "test")
    found = _data_set(train, tests, flat)
    return replace(found, natural_ids=source, in_order=True) if devices else found, len(devices)


def inputs_as(inputs: object, shape: Sequence[int], dtype: str, columns: Sequence[str] = ()) -> Tensor:
    """Return inputs as a run stores them, of a table its `columns` by name.

    Raises SettingsError if they have another shape or type, or lack a column.
    """
    if columns and any(_is_of(*table, inputs) for table in TABLES[:2]):
        inputs = _numbers_of(_by_name(inputs, "inputs"), columns, "inputs")
    found = _tensor(inputs, "inputs")
    if tuple(found.shape[1:]) != tuple(shape) and math.prod(found.shape[1:]) == math.prod(shape) and shape[-1:] == [1]:
        found = found.reshape(len(found), *shape)
    kind = getattr(torch, dtype)
    if tuple(found.shape[1:]) != tuple(shape):
        raise SettingsError(
            f"inputs have shape {tuple(found.shape)}, and must be (examples, {', '.join(map(str, shape))})"
        )
    if found.dtype != kind and not (kind.is_floating_point and found.dtype.is_floating_point):
        raise SettingsError(f"inputs are {found.dtype}, and those of the run are {kind}: give x.astype({dtype!r})")
    return found.to(kind)


# Forms of data -------------------------------------------------------------------------------------------------------


def _splits(data: object) -> Mapping[str, object] | None:
    """Return what is there under the names of splits; None where `data` has no such names."""
    if not isinstance(data, Mapping) or not set(data) or not all(isinstance(key, str) for key in data):
        return None
    if "train" not in data:
        return None
    if others := [key for key in data if key not in SPLITS]:
        raise SettingsError(
            f"data has splits {', '.join(map(repr, data))}, and 'train' and 'test' are read: leave {others[0]!r} out, "
            "or give data=DATA['train'], test=DATA[...]"
        )
    return data


def _of_devices(data: object) -> dict[object, object]:
    """Return the data of each device, by its number; {} where they are not given by device."""
    if isinstance(data, Mapping):
        if not data:
            raise SettingsError(f"data = {{}}: {CAN_BE}")
        names = list(data)
        if all(isinstance(name, int | np.integer) for name in names):
            if sorted(names) != list(range(len(names))):
                raise SettingsError(
                    f"data: the devices are called {', '.join(map(str, sorted(names)[:5]))}...: number them from 0 to "
                    f"{len(names) - 1}, or call them by names"
                )
            names.sort()
        return {name: data[name] for name in names}
    if isinstance(data, list):
        if not data or any(isinstance(part, int | float | str | bytes) for part in data):
            raise SettingsError(f"data is a list of {len(data)} values: {CAN_BE}")
        return dict(enumerate(data))
    return {}


def _examples(data: object, label: str | None, what: str) -> _Examples:
    columns: tuple[str, ...] = ()
    if label is not None and not any(_is_of(*table, data) for table in TABLES):
        raise SettingsError(
            f"label = {label!r}: it names a column of a table, and {what} is {kind_of_value(data)}: leave it out"
        )
    if isinstance(data, str):
        raise SettingsError(
            f"{what} is {data!r}, and {CAN_BE}; files are read by task='table', 'images' or 'npz' with data_dir="
        )
    if isinstance(data, DataLoader):
        data = _of_loader(data, what)
    if isinstance(data, tuple):
        if len(data) != 2:
            raise SettingsError(f"{what} is a tuple of {len(data)}: {CAN_BE}")
        inputs, labels = data
    elif any(_is_of(*table, data) for table in TABLES[:2]):
        inputs, labels, columns = _of_table(data, label, what)
    elif _is_of(*TABLES[2], data):
        inputs, labels = _of_hugging_face(data, label, what)
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__") and not _is_array(data):
        inputs, labels = _of_pairs((data[place] for place in range(len(data))), what)
    elif isinstance(data, Iterable) and not _is_array(data) and not isinstance(data, str | bytes | Mapping):
        inputs, labels = _of_pairs(data, what)
    else:
        alone = " alone: give (x, y)" if _is_array(data) else f": {CAN_BE}"
        raise SettingsError(f"{what} is {kind_of_value(data)}{alone}")
    tensor = _tensor(inputs, what)
    found = _Examples(tensor, _labels(labels, what, tuple(tensor.shape)), columns)
    if len(found.inputs) != len(found.labels):
        raise SettingsError(f"{what}: {len(found.inputs)} inputs and {len(found.labels)} labels: give one for each")
    if not len(found):
        raise SettingsError(f"{what} has no examples")
    return found


def _of_loader(loader: DataLoader[Any], what: str) -> object:
    """Return the data set behind a loader: a run makes batches of its own."""
    if loader.collate_fn is not default_collate or not isinstance(loader.sampler, RandomSampler | SequentialSampler):
        raise SettingsError(
            f"{what} is a DataLoader with a collate_fn or a sampler of its own, and a run makes batches itself: give "
            "what the loader makes of all examples as (x, y)"
        )
    return loader.dataset


def _of_pairs(pairs: Iterable[Any], what: str) -> tuple[Any, Any]:
    inputs: list[np.ndarray] = []
    labels: list[Any] = []
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise SettingsError(f"{what}[{len(inputs)}] is {kind_of_value(pair)}, and must be a pair (input, label)")
        inputs.append(_one_input(pair[0]))
        labels.append(pair[1].tolist() if isinstance(pair[1], Tensor | np.ndarray | np.generic) else pair[1])
    shapes = {array.shape for array in inputs}
    if len(shapes) > 1:
        some = " and ".join(str(shape) for shape in sorted(shapes)[:2])
        raise SettingsError(f"{what}: inputs have shapes {some}, and must have one: resize them, or cut and pad")
    return np.stack(inputs) if inputs else np.zeros((0, 1), np.float32), labels


def _one_input(value: Any) -> np.ndarray:
    array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    is_image = _is_of("PIL.Image", "Image", value)
    return np.moveaxis(array, -1, 0) if is_image and array.ndim == 3 else array


def _of_table(table: Any, label: str | None, what: str) -> tuple[Any, Any, tuple[str, ...]]:
    by_name = _by_name(table, what)
    name = _label_column([*by_name], label, what)
    features = [column for column in by_name if column != name]
    if not features:
        raise SettingsError(f"{what} has the column {name!r} alone: it must have others, which are learned from")
    return _numbers_of(by_name, features, what), np.asarray(by_name[name]), tuple(features)


def _by_name(table: Any, what: str) -> dict[str, Any]:
    """Return the columns of a table; SettingsError if two have one name."""
    columns = [*map(str, table.columns)]
    if twice := next((column for column in columns if columns.count(column) > 1), None):
        raise SettingsError(f"{what} has the column {twice!r} twice: give each a name of its own")
    return dict(zip(columns, (table[column] for column in table.columns), strict=True))


def _numbers_of(table: Mapping[str, Any], columns: Sequence[str], what: str) -> np.ndarray:
    """Return columns as (rows, columns); SettingsError names one that is missing, holds no numbers or has gaps."""
    if missing := [column for column in columns if column not in table]:
        raise SettingsError(
            f"{what} lacks {len(missing)} of {len(columns)} columns that the model reads: "
            f"{', '.join(map(repr, missing[:5]))}; {nearest(missing[0], list(table))}"
        )
    for column in columns:
        kind = np.asarray(table[column]).dtype
        if kind.kind not in "iufb":
            raise SettingsError(
                f"{what}: the column {column!r} has no numbers ({kind}): make numbers of it, as "
                "pandas.get_dummies(TABLE, dtype=float) does, or leave it out"
            )
        if gaps := int(np.isnan(np.asarray(table[column], dtype=np.float64)).sum()):
            raise SettingsError(
                f"{what}: {gaps} of {len(table[column])} values of the column {column!r} are missing: fill them in, as "
                "TABLE.fillna(TABLE.median(numeric_only=True)) does, or leave these rows out"
            )
    return np.stack([np.asarray(table[column], dtype=np.float64) for column in columns], axis=1)


def _of_hugging_face(data: Any, label: str | None, what: str) -> tuple[Any, Any]:
    columns = list(data.column_names)
    name = _label_column(columns, label, what)
    others = [column for column in columns if column != name]
    names = getattr(data.features[name], "names", None)
    rows = data.with_format(None)
    labels = [names[value] if names else value for value in rows[name]]
    first = rows[0][others[0]] if len(rows) and len(others) == 1 else None
    if isinstance(first, str):
        raise SettingsError(
            f"{what}: the column {others[0]!r} has texts, which need a tokenizer: give token numbers of one length, or "
            "run the task 'text' (docs/your-texts.md)"
        )
    if first is not None:
        inputs, _ = _of_pairs(((row[others[0]], 0) for row in rows), what)
        return inputs, labels
    return _of_table(rows.to_pandas()[[*others, name]], name, what)[0], labels


def _label_column(columns: Sequence[str], label: str | None, what: str) -> str:
    if label is not None:
        if label not in columns:
            raise SettingsError(f"label = {label!r}: {what} has no such column; {nearest(label, columns)}")
        return label
    found = [column for column in columns if column in LABELS]
    if len(found) != 1:
        raise SettingsError(f"{what}: which column holds the labels? Give label=, one of {', '.join(columns[:12])}")
    return found[0]


# Inputs and labels ----------------------------------------------------------------------------------------------------


def _tensor(inputs: Any, what: str) -> Tensor:
    """Return inputs as they are stored: bytes, float32 or int32."""
    try:
        array = inputs.detach().cpu().numpy() if isinstance(inputs, Tensor) else np.asarray(inputs)
    except ValueError:  # lists of several lengths
        raise SettingsError(
            f"{what}: inputs are a {kind_of_value(inputs)} of several shapes: give an array or a tensor"
        ) from None
    kind, shape = array.dtype.kind, array.shape
    if kind not in "iufb" or not shape:
        raise SettingsError(
            f"{what}: inputs are {array.dtype} of shape {shape}, and must be numbers, one row per example"
        )
    if not array.size:
        raise SettingsError(f"{what}: inputs have shape {shape}, and must be one row or more of one number or more")
    if array.ndim == 1:
        array = array[:, None]
    if kind == "u" and array.dtype.itemsize == 1 and array.ndim > 2:
        if array.ndim == 3:
            array = array[:, None]
        elif array.ndim == 4 and array.shape[-1] <= MOST_LAST < array.shape[1]:
            raise SettingsError(
                f"{what}: inputs have shape {shape}, with channels last, and networks of PyTorch read them first: give "
                "x.transpose(0, 3, 1, 2), or x.permute(0, 3, 1, 2) of a tensor"
            )
        return torch.from_numpy(np.array(array, np.uint8, order="C"))
    if kind in "iu" and array.dtype.itemsize > 1:
        if array.ndim != 2:
            raise SettingsError(
                f"{what}: inputs are {array.dtype} of shape {shape}: give pixels as uint8, numbers as float32, and "
                "tokens as whole numbers (examples, sequence)"
            )
        if array.size and (array.min() < 0 or array.max() >= 2**31 - 1):
            raise SettingsError(f"{what}: whole numbers are tokens, from 0 on: give numbers as float32")
        return torch.from_numpy(np.array(array, np.int32, order="C"))
    array = np.array(array, np.float32, order="C")
    if bad := np.flatnonzero(~np.isfinite(array).reshape(len(array), -1).all(axis=1)).tolist():
        raise SettingsError(
            f"{what}: {len(bad)} of {len(array)} inputs hold values that are not finite, the first is x[{bad[0]}]: "
            "leave these examples out, or fill in what is missing"
        )
    return torch.from_numpy(array)


def _is_one_hot(array: np.ndarray) -> bool:
    return array.shape[1] > 1 and bool(((array == 0) | (array == 1)).all() and (array.sum(axis=1) == 1).all())


def _labels(labels: Any, what: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return labels of inputs of a shape as whole numbers, float32 or texts."""
    array = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.dtype.kind == "O" and all(isinstance(label, str) for label in array.flat):
        array = array.astype(str)
    if array.ndim == 2 and array.dtype.kind in "iufb" and array.shape[1:] != shape[-1:] and _is_one_hot(array):
        raise SettingsError(
            f"{what}: labels have shape {array.shape} with one 1 in each row: give classes as whole numbers, "
            "y.argmax(1)"
        )
    if array.dtype.kind not in "iufbU" or array.ndim not in (1, 2) or (array.ndim == 2 and array.dtype.kind != "i"):
        raise SettingsError(
            f"{what}: labels are {array.dtype} of shape {array.shape}, and must be one for each example: a class as a "
            "whole number or a text, or a number to be learned; or of each token a class"
        )
    if array.dtype.kind == "f":
        if not np.isfinite(array).all():
            raise SettingsError(f"{what}: labels hold values that are not finite: leave these examples out")
        return array.astype(np.float32)
    return array if array.dtype.kind == "U" else array.astype(np.int64)


def _joined(parts: Sequence[_Examples], what: str) -> _Examples:
    shapes = {(tuple(part.inputs.shape[1:]), str(part.inputs.dtype)) for part in parts}
    if len(shapes) > 1:
        raise SettingsError(f"{what}: devices have inputs of several shapes or types: {sorted(map(str, shapes))[:3]}")
    kinds = {"numbers" if part.labels.dtype.kind == "f" else part.labels.ndim for part in parts}
    if len({part.columns for part in parts}) > 1:
        raise SettingsError(f"{what}: the tables of devices have other columns, or in another order: make them alike")
    if len(kinds) > 1:
        raise SettingsError(f"{what}: some labels are fractions and others are classes: make them alike")
    texts = any(part.labels.dtype.kind == "U" for part in parts)
    labels = [part.labels.astype(str) if texts else part.labels for part in parts]
    return _Examples(torch.cat([part.inputs for part in parts]), np.concatenate(labels), parts[0].columns)


def _chosen(examples: _Examples, mask: Tensor) -> _Examples:
    return replace(examples, inputs=examples.inputs[mask], labels=examples.labels[mask.numpy()])


def _data_set(train: _Examples, test: _Examples, flat: bool) -> DataSet:
    for name, one, other in (
        ("inputs", tuple(train.inputs.shape[1:]), tuple(test.inputs.shape[1:])),
        ("inputs", train.inputs.dtype, test.inputs.dtype),
        ("labels", train.labels.dtype.kind, test.labels.dtype.kind),
        ("columns", train.columns, test.columns),
    ):
        if one != other:
            raise SettingsError(f"test: its {name} are {other}, those of data are {one}: they must be alike")
    labels, names, classes = _numbered(train.labels, test.labels)
    unshaped = train.inputs.dim() == 2 and train.inputs.is_floating_point() and not flat
    inputs = (part.inputs[:, :, None] if unshaped else part.inputs for part in (train, test))
    parts = [Data(*pair) for pair in zip(inputs, labels, strict=True)]
    mean, std = (None, None) if train.inputs.dtype == torch.int32 else _moments(parts[0].inputs)
    found = DataSet(parts[0], parts[1], classes, mean=mean, std=std, label_names=names, columns=train.columns)
    remarks = Remarks()
    for channel in crowded(train.inputs) if train.inputs.is_floating_point() else ():
        name = train.columns[channel] if train.columns else f"channel {channel}, counted from 0"
        remarks.add(f"channels or columns {ALIKE}", name)
    return replace(found, remarks=remarks.found())


def _numbered(train: np.ndarray, test: np.ndarray) -> tuple[list[Tensor], tuple[str, ...], int]:
    """Return the labels of both parts as a model's outputs count them, the classes' names, and how many there are.

    Whole numbers from 0 on stay as they are; all others are names.
    """
    both = [train, test]
    if train.dtype.kind == "f":
        return [torch.from_numpy(part) for part in both], (), 1
    if train.ndim == 2:
        used = np.concatenate([part[part != NO_LABEL] for part in both])
        return [torch.from_numpy(part) for part in both], (), int(used.max()) + 1 if used.size else 1
    values = np.unique(np.concatenate(both))
    names: tuple[str, ...] = ()
    if train.dtype.kind == "i" and values[0] == 0 and values[-1] < len(train) + len(test):
        found, classes = [torch.from_numpy(part) for part in both], int(values[-1]) + 1
    else:
        names = in_order(label_text(value) for value in values)
        number_of = {text: number for number, text in enumerate(names)}
        found = [torch.tensor([number_of[label_text(value)] for value in part.tolist()]) for part in both]
        classes = len(names)
    if classes < 2:
        raise SettingsError("data: all labels are alike: at least two classes are needed")
    return found, names, classes


def _moments(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and deviation per channel; a channel that has one value only is divided by 1."""
    means, deviations = [], []
    for channel in inputs.unbind(1):
        values = channel.double()
        deviation = float(values.std(correction=0))
        means.append(float(values.mean()))
        deviations.append(deviation if deviation > 1e-12 * max(1.0, abs(means[-1])) else 1.0)
    return torch.tensor(means), torch.tensor(deviations)


def _is_array(value: object) -> bool:
    return isinstance(value, Tensor | np.ndarray) or _is_of("pandas", "Series", value)


def _is_of(module: str, name: str, value: object) -> bool:
    """Whether a value is of a library's class, which nobody has to import for that."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)
