"""Rows of numbers in files of one's own: CSV, TSV or JSON lines, with all columns or those named in task-arguments."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator

from wildflower.tasks.data import (
    Data,
    DataSet,
    decoded_files,
    find_file,
    make_data_set,
    no_file,
    refuse_unread_test_file,
    split,
    unread,
)
from wildflower.tasks.device_data import MAX_CHANNELS, OwnArguments, made
from wildflower.tasks.hub import existing_folder
from wildflower.tasks.outliers import ALIKE, crowded
from wildflower.tasks.remarks import Remarks, joined
from wildflower.tasks.rows import as_float32, as_name, check_columns, files_behind, files_of_device, rows_of
from wildflower.tasks.texts import Name

FORMATS = (".csv", ".tsv", ".jsonl")
MANY_NAMES = 10  # of labels that are numbers; more of them than half of the rows are no classes
REMEDY = "make numbers of texts and gaps (docs/your-data.md#texts-and-gaps)"
EXPECTED = "the files that task-arguments name"

Column = Annotated[Name, Field(min_length=1)]


class TableArguments(OwnArguments):
    """Arguments of the task `table`."""

    columns: Annotated[tuple[Column, ...], Field(max_length=MAX_CHANNELS)] = Field(
        (), description="Columns of numbers that a model reads, in their order; empty: all but the label's"
    )
    label: Column = Field("label", description="Column of the label")
    labels: Literal["classes", "numbers"] = Field(
        "classes", description="What labels are: names of classes, or numbers"
    )
    decimal: Literal[".", ","] = Field(
        ".", description="What stands in front of a number's decimals in CSV and TSV; other separators are refused"
    )
    train: str = Field("train.csv", description=f"File to train on ({', '.join(FORMATS)})")
    test: str = Field("", description="File to test on, with the same columns; empty: a part of that to train on")
    test_share: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.2, description="Share of each class that is kept for testing where there is no test file"
    )

    @model_validator(mode="after")
    def _columns_and_files(self) -> TableArguments:
        twice = [column for column in self.columns if self.columns.count(column) > 1]
        if twice or self.label in self.columns:
            raise ValueError(f"columns: {twice[0] if twice else self.label!r} is there twice, or is the label")
        for name in (self.train, *([self.test] if self.test else [])):
            if Path(name).name != name or Path(name).suffix not in FORMATS:
                raise ValueError(f"{name!r} is no file name that ends in {', '.join(FORMATS)}")
        return self


def load(data_dir: str, arguments: TableArguments) -> DataSet:
    """Return the rows of the files in `data_dir`, which must be given.

    FileNotFoundError where a file is not there, ValueError with file and line where something in it is wrong.
    """
    folder = existing_folder("table", data_dir, "the folder of your files")
    refuse_unread_test_file(folder, FORMATS, [arguments.train], arguments)
    names = [arguments.train, *([arguments.test] if arguments.test else [])]
    files = [find_file(folder, name, "table", EXPECTED) for name in names]
    arguments = (
        arguments if arguments.columns else arguments.model_copy(update={"columns": _columns(files[0], arguments)})
    )
    found = _read([*files], arguments)
    train, test = found.train, found.test
    _check_names(found.label_names, len(train) + len(test), arguments, folder)
    if not len(test):
        train, test = split(train, arguments.test_share, folder)
    _check_varied(train, arguments, folder)
    return replace(
        make_data_set(train, test),
        classes=found.classes,
        label_names=found.label_names,
        columns=arguments.columns,
        remarks=joined([*found.remarks, *unread(files, FORMATS)]),
    )


def _columns(file: Path, arguments: TableArguments) -> tuple[str, ...]:
    """Return the columns of a file without the label's. ValueError where a model can read none, or not so many."""
    found = tuple(column for _, row in islice(rows_of(file), 1) for column in row if column != arguments.label)
    if not 0 < len(found) <= MAX_CHANNELS:
        raise ValueError(
            f"{file}: {len(found)} columns beside {arguments.label!r}, and a model reads 1 to {MAX_CHANNELS}: name "
            "them, such as columns = ['length', 'width'] in task-arguments"
        )
    return found


def _check_names(names: Sequence[str], rows: int, arguments: TableArguments, folder: Path) -> None:
    """Raise ValueError where what is taken for names of classes are rather numbers: most rows have one of their own."""
    if len(names) <= max(MANY_NAMES, rows / 2):
        return
    try:
        for name in names:
            as_float32(name)
    except ValueError:
        return
    raise ValueError(
        f"{folder}: {arguments.label} has {len(names)} different numbers in {rows} rows, such as {names[0]}, too many "
        "for classes: say labels = 'numbers' in task-arguments"
    )


def _check_varied(train: Data, arguments: TableArguments, folder: Path) -> None:
    """Raise ValueError where a column has one value, by which a model could tell nothing."""
    constant = (train.inputs == train.inputs[:1]).all(dim=0).flatten()
    if bool(constant.any()):
        number = int(constant.nonzero()[0])
        raise ValueError(
            f"{folder}: {arguments.columns[number]} is {float(train.inputs[0, number, 0]):g} in all training rows, so "
            "that nothing can be learned of it: leave it out of the file, or out of columns"
        )


def own(data_dir: str, arguments: TableArguments) -> DataSet:
    """Return the rows of a device's folder, in the files that `load` reads; either file may be missing.

    In place of files train/ and test/ may be what `save_to_disk` of `datasets` wrote.
    """
    folder = existing_folder("table", data_dir)
    if not arguments.columns:
        raise ValueError(
            "columns must be named in task-arguments where devices hold the data, so that all read the same"
        )
    train, test = (files_of_device(folder, [getattr(arguments, part)], part) for part in ("train", "test"))
    if not train and not test:
        raise no_file(folder, arguments.train, "table", EXPECTED)
    files: list[Path | None] = [train[0] if train else None, *test]
    found = _read(files, arguments)
    return replace(found, remarks=joined([*found.remarks, *unread([*train, *test], FORMATS)]))


def _read(files: list[Path | None], arguments: TableArguments) -> DataSet:
    """Return the rows to train on and, where there is a second file, those to test on; None stands for no rows."""

    def decode() -> DataSet:
        parts = [_rows(file, arguments) for file in files]
        remarks = Remarks()
        for inputs, _ in parts:
            for column in crowded(inputs):
                remarks.add(f"columns {ALIKE}", arguments.columns[column])
        return replace(made(parts), remarks=remarks.found())

    return decoded_files(
        "table",
        [one for file in files if file is not None for one in files_behind(file)],
        decode,
        parts=[file is not None for file in files],
        columns=arguments.columns,
        label=(arguments.label, arguments.labels, arguments.decimal),
    )


def _rows(file: Path | None, arguments: TableArguments) -> tuple[torch.Tensor, list[object]]:
    """(rows, columns, 1), and a label per row. ValueError names file and line of what is wrong.

    In 64 bits: 32 would round Unix seconds to steps of 128, before the mean is taken away.
    """
    columns, labels = arguments.columns, list[object]()
    values = array("d")
    if file is not None:
        number_of = partial(as_float32, decimal=arguments.decimal) if file.suffix in (".csv", ".tsv") else as_float32
        label_of: Callable[[object], object] = number_of if arguments.labels == "numbers" else as_name
        for line, row in rows_of(file):
            check_columns(row, (*columns, arguments.label), file, line)
            column = arguments.label
            try:
                labels.append(label_of(row[column]))
                for column in columns:
                    values.append(number_of(row[column]))
            except ValueError as error:
                fraction = column == arguments.label and isinstance(row[column], float)
                hint = "; labels that are numbers need labels = 'numbers' in task-arguments" if fraction else ""
                if column != arguments.label and str(error).endswith("a finite number"):
                    hint = f": leave it out of columns, or {REMEDY}"
                raise ValueError(f"{file}:{line}: {column} {error}{hint}") from None
        if not labels:
            raise ValueError(f"{file}: holds no rows")
    inputs = torch.tensor(values, dtype=torch.float64)
    return inputs.view(len(labels), len(columns), 1), labels
