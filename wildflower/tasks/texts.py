"""Files of texts, and the task `text`: any such files of one's own, or a data set of the Hugging Face hub."""

from __future__ import annotations

import codecs
import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, Field, model_validator
from torch.nn import functional

from wildflower.tasks.data import Data, DataSet, find_file, no_file, refuse_unread_test_file, stratified_test, unread
from wildflower.tasks.device_data import FLOAT32_MAX
from wildflower.tasks.hub import Repository, existing_folder, files_of_copy, import_datasets, open_split
from wildflower.tasks.labels import NO_LABEL, label_text
from wildflower.tasks.metrics import METRICS, EntityF1, Metric, usual_metric
from wildflower.tasks.tokens import (
    HUB_NAME,
    Labels,
    TextArguments,
    Texts,
    joined,
    make_text_data_set,
    names_of,
    tokenized_once,
)

MAX_FILE_BYTES = 1 << 30
MAX_LINE_BYTES = 1 << 20
FORMATS = {".jsonl": "JSON lines", ".csv": "CSV", ".tsv": "TSV", ".conll": "CoNLL"}


Name = Annotated[str, AfterValidator(label_text)]
"""Of a column or a class, as files have them: with composed accents, and no blanks at the ends."""

MetricName = Literal["accuracy", "f1", "matthews", "token_accuracy", "entity_f1", "pearson", "mean_absolute_error"]

METRICS_OF: dict[Labels, tuple[MetricName, ...]] = {
    "classes": ("accuracy", "f1", "matthews"),
    "numbers": ("pearson", "mean_absolute_error"),
    "tags": ("entity_f1", "token_accuracy"),
}


class OwnTextArguments(TextArguments):
    """What the task `text` takes."""

    train: tuple[str, ...] | str = Field(
        "train.jsonl",
        description=f"File in data-dir to train on ({', '.join(FORMATS)}), or a list of files, each of which is a "
        "source for partition = 'natural'",
    )
    test: tuple[str, ...] | str = Field(
        "", description="File or files to test on, with the same columns; empty: a part of those to train on"
    )
    hub: str = Field(
        "",
        description="Name of a data set on the Hugging Face hub, such as owner/name; data-dir may have a local copy",
        pattern=rf"^({HUB_NAME})?$",
        max_length=200,
    )
    hub_config: str = Field("", description="Its configuration, where it has several", pattern=r"^[\w.-]*$")
    train_split: str = Field("train", description="Its split to train on", pattern=r"^[\w.-]+$")
    test_split: str = Field(
        "", description="Its split to test on; empty: a part of that to train on", pattern=r"^[\w.-]*$"
    )
    test_share: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.2, description="Share of what is to train on that is kept for testing where there is nothing to test on"
    )
    labels: Labels = Field(
        "classes", description="What labels are: names of classes, numbers, or tags (a list beside a list of words)"
    )
    text: Name = Field("text", description="Column of the text, or of its list of words", min_length=1)
    pair: Name = Field("", description="Column of the second text, where texts come in pairs")
    label: Name = Field("label", description="Column of the label, or of the list of tags", min_length=1)
    source: Name = Field("", description="Column of what a text is from, for partition = 'natural'")
    classes: tuple[Name, ...] = Field((), description="Names of the classes in order; empty takes those in the file")
    own_labels: bool = Field(
        False, description="Whether a source has only the classes of its own examples, and is scored on these"
    )
    metric: MetricName | Literal[""] = Field(
        "", description="Metric; empty: accuracy of classes, Pearson of numbers, entity F1 of tags"
    )

    @model_validator(mode="after")
    def _possible(self) -> OwnTextArguments:
        allowed = METRICS_OF[self.labels]
        if self.metric and self.metric not in allowed:
            raise ValueError(
                f"metric = {self.metric!r} does not go with labels = {self.labels!r}: {', '.join(allowed)}"
            )
        if self.pair and self.labels == "tags":
            raise ValueError("pair: words with tags come without a second text")
        sourced = bool(self.source) or len(self.train_files) > 1
        if self.own_labels and (not sourced or self.labels == "numbers"):
            raise ValueError("own_labels needs a column `source` or several files, and labels that are classes or tags")
        if len(set(self.classes)) != len(self.classes):
            raise ValueError("classes: a name is listed twice")
        for name in (*self.train_files, *self.test_files):
            if Path(name).name != name or Path(name).suffix not in FORMATS:
                raise ValueError(f"{name!r} is no file name that ends in {', '.join(FORMATS)}")
        if not self.train_files:
            raise ValueError("train: at least one file is needed")
        # Not what was set: nodes are sent all arguments with their values.
        changed = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]
        of_files = [name for name in changed if name in ("train", "test")]
        of_hub = [name for name in changed if name in ("hub_config", "train_split", "test_split")]
        if self.hub and of_files:
            raise ValueError(f"{of_files[0]} names files: of a data set of the hub say train_split and test_split")
        if of_hub and not self.hub:
            raise ValueError(f"{of_hub[0]} is of a data set of the hub, which `hub` names")
        return self

    @property
    def train_files(self) -> tuple[str, ...]:
        """Names of the files to train on."""
        return _listed(self.train)

    @property
    def test_files(self) -> tuple[str, ...]:
        """Names of the files to test on."""
        return _listed(self.test)


def _listed(names: tuple[str, ...] | str) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) and names else tuple(names)


def load(data_dir: str, arguments: OwnTextArguments) -> DataSet:
    """The files in `data_dir`, or a data set of the hub.

    FileNotFoundError where a file is not there, or the hub cannot be reached and `data_dir` has no copy; ValueError
    with file and line where something in it is wrong.
    """
    if not data_dir and not arguments.hub:
        raise ValueError("the task 'text' needs data-dir, the folder of your files, or `hub` in task-arguments")
    folder = existing_folder("text", data_dir) if data_dir else None
    files, parts = _of_hub(folder, arguments) if folder is None or arguments.hub else _of_files(folder, arguments)

    def read() -> DataSet:
        train, test = parts()
        if test is None:
            train, test = held_out(train, arguments.labels, arguments.test_share)
        found = make_text_data_set(
            train,
            test,
            arguments.labels,
            arguments,
            data_dir,
            classes=arguments.classes,
            own_labels=arguments.own_labels,
        )
        if arguments.metric == "f1" and found.classes != 2:
            raise ValueError(
                f"{folder or arguments.hub}: metric = 'f1' needs two classes, the labels have {found.classes}"
            )
        return found

    found = tokenized_once("text", files, data_dir, arguments, read)
    return found if arguments.hub else replace(found, remarks=unread(files, tuple(FORMATS)))


Parts = Callable[[], tuple[Texts, Texts | None]]
"""Reads the texts to train on and those to test on; None where there are no others."""


def _of_files(folder: Path, arguments: OwnTextArguments) -> tuple[list[Path], Parts]:
    """The files that the arguments name, and what reads them."""
    refuse_unread_test_file(folder, tuple(FORMATS), arguments.train_files, arguments)
    training, testing = (
        [find_file(folder, name, "text", "the files that task-arguments name") for name in names]
        for names in (arguments.train_files, arguments.test_files)
    )

    def parts() -> tuple[Texts, Texts | None]:
        train = _together([read_texts(file, arguments) for file in training])
        return train, _together([read_texts(file, arguments) for file in testing]) if testing else None

    return [*training, *testing], parts


def _of_hub(folder: Path | None, arguments: OwnTextArguments) -> tuple[list[Path], Parts]:
    """The files of a local copy, none where there is no folder, and what reads the data set that the arguments name."""
    share = 0.0 if arguments.test_split else arguments.test_share  # that `load` keeps for testing
    repository = Repository(arguments.hub, config=arguments.hub_config or None, held_out=share)

    def texts_of(split: str) -> Texts:
        source = f"{arguments.hub}, split {split}"
        rows = _named_rows(open_split(repository, split, folder), f"{source}, row ")
        return _texts_of(rows, source, arguments, before_number=", row ")

    def parts() -> tuple[Texts, Texts | None]:
        train = texts_of(arguments.train_split)
        return train, texts_of(arguments.test_split) if arguments.test_split else None

    return [] if folder is None else files_of_copy(folder, f"copy of {arguments.hub}"), parts


def own(data_dir: str, arguments: OwnTextArguments) -> DataSet:
    """The texts of a device's folder, in the files that `load` reads; of those to train on and to test on one may lack.

    In place of files train/ and test/ may be what `save_to_disk` of `datasets` wrote. Inputs have `max_tokens` tokens
    on every device.
    """
    if arguments.hub:
        raise ValueError("task-arguments: `hub` names texts that a run deals out, but these devices have their own")
    folder = existing_folder("text", data_dir)
    there = [
        [folder / name for name in names if (folder / name).is_file()] or saved(folder / part)
        for names, part in ((arguments.train_files, "train"), (arguments.test_files, "test"))
    ]
    if not any(there):
        raise no_file(folder, arguments.train_files[0], "text", "the files that task-arguments name")

    def read() -> DataSet:
        train, test = (
            _together([read_texts(file, arguments) for file in files]) if files else Texts() for files in there
        )
        names = () if arguments.labels == "numbers" else names_of(joined([train, test]), arguments.labels)
        found = make_text_data_set(train, test, arguments.labels, arguments, data_dir, classes=names)
        return replace(found, train=_filled(found.train, arguments, found), test=_filled(found.test, arguments, found))

    behind = [one for files in there for file in files for one in files_behind(file)]
    found = tokenized_once("text-own", behind, data_dir, arguments, read)
    return replace(found, remarks=unread(behind, tuple(FORMATS)))


def saved(folder: Path, most_bytes: int = MAX_FILE_BYTES) -> list[Path]:
    """The first file of a data set which `save_to_disk` of `datasets` wrote, for all; [] where there is none.

    ValueError where its files are not beside the state.json that lists them, or have too many bytes together.
    """
    state = folder / "state.json"
    if not state.is_file():
        return []
    check_size(state.stat().st_size, state, MAX_LINE_BYTES)
    try:
        names = [part["filename"] for part in json.loads(state.read_text())["_data_files"]]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"{state}: it does not list the data set's files: {type(error).__name__}: {error}") from None
    if not names:
        raise ValueError(f"{state}: it lists no files: the data set is empty")
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
            raise ValueError(f"{state}: {name!r} is no file beside it")
        if Path(name).suffix != ".arrow":
            raise ValueError(f"{state}: {name!r} is no Arrow file, and save_to_disk writes no other")
    check_size(sum((folder / name).stat().st_size for name in names), folder, most_bytes)
    return [folder / name for name in names[:1]]


def check_size(size_bytes: int, where: Path, most_bytes: int = MAX_FILE_BYTES) -> None:
    """ValueError where a file, or all files of a data set, have more than `most_bytes`."""
    if size_bytes > most_bytes:
        raise ValueError(f"{where}: {size_bytes} bytes are more than {most_bytes}")


def files_behind(file: Path) -> list[Path]:
    """All files that a file stands for: those of the whole data set, where it is of one that `saved` found."""
    return [*sorted(file.parent.glob("*.arrow")), file.parent / "state.json"] if file.suffix == ".arrow" else [file]


def saved_rows(file: Path) -> Rows:
    """The rows of the data set that an .arrow file is of; names stand in place of the numbers of classes."""
    return _named_rows(import_datasets().load_from_disk(str(file.parent)), f"{file}:")


def _named_rows(rows: Any, source: object) -> Rows:
    """The rows of a data set of `datasets`, counted from 1; names stand in place of the numbers of classes and tags.

    ValueError by `source` and row where a number is not that of a class. On the hub -1 is often a label that is not
    public.
    """
    # Of a column of lists, such as tags, the feature is that of an entry.
    entries = {column: getattr(feature, "feature", feature) for column, feature in rows.features.items()}
    names = {column: feature.names for column, feature in entries.items() if hasattr(feature, "names")}

    def named(column: str, value: Any, number: int) -> Any:
        if isinstance(value, list):
            return [named(column, entry, number) for entry in value]
        if value is not None and not 0 <= value < len(names[column]):
            most = len(names[column]) - 1
            raise ValueError(f"{source}{number}: {column} is {value}, and its classes are 0 to {most}")
        return None if value is None else names[column][value]

    for number, row in enumerate(rows.with_format(None), start=1):
        yield number, {c: named(c, value, number) if c in names else value for c, value in row.items()}


def _filled(part: Data, arguments: OwnTextArguments, found: DataSet) -> Data:
    """Texts padded to `max_tokens`: how long the longest is differs from device to device."""
    assert found.vocabulary is not None
    more = arguments.max_tokens - part.inputs.shape[1]
    inputs = functional.pad(part.inputs, (0, more), value=found.vocabulary.pad_id)
    labels = part.labels
    if arguments.labels == "tags":
        labels = functional.pad(labels, (0, more), value=NO_LABEL)
    return Data(inputs, labels)


def _together(parts: list[Texts]) -> Texts:
    """The texts of several files as one; each is a source, where there are several and no column says the source."""
    if len(parts) > 1 and not parts[0].sources:
        # Sources are numbered in the order of their names.
        parts = [replace(part, sources=[f"{number:09d}"] * len(part)) for number, part in enumerate(parts)]
    return joined(parts)


def metric(arguments: OwnTextArguments, data: DataSet) -> Metric:
    """The metric that the arguments name."""
    if not arguments.metric:
        return usual_metric(data.train.label_kind, data.label_names)
    return EntityF1(data.label_names) if arguments.metric == "entity_f1" else METRICS[arguments.metric]()


def held_out(texts: Texts, labels: Labels, share: float) -> tuple[Texts, Texts]:
    """Texts to train and to test on: `share` of each class (of all, where labels are no classes) are to test on.

    The choice depends on the labels alone. A text that alone has a tag is trained on. ValueError where nothing would
    be left for one of them.
    """
    of_class: dict[str, int] = {}
    strata = [of_class.setdefault(str(label) if labels == "classes" else "", len(of_class)) for label in texts.labels]
    mask = stratified_test(torch.tensor(strata), share)
    if labels == "tags":
        known = {tag for tags, tests in zip(texts.labels, mask.tolist(), strict=True) if not tests for tag in tags}
        for place, tags in enumerate(texts.labels):
            if not known.issuperset(tags):
                mask[place] = False
                known.update(tags)
    if not mask.any() or mask.all():
        files = {place.rpartition(":")[0] for place in texts.places}  # "" of a data set that lies in no file
        where = f"{', '.join(sorted(files))}: " if all(files) else ""
        few = f"{where}{len(texts)} texts are too few to keep a share of {share} for testing"
        if labels == "classes" and len(of_class) == len(texts):
            few += ": each has a class of its own; if the labels are numbers, say labels = 'numbers'"
        raise ValueError(few)
    return texts.picked((~mask).nonzero().flatten().tolist()), texts.picked(mask.nonzero().flatten().tolist())


def read_texts(file: Path, arguments: OwnTextArguments) -> Texts:
    """The texts of a file by its columns; ValueError names file and line of what is wrong."""
    check_size(file.stat().st_size, file)
    rows = {".jsonl": json_rows, ".csv": csv_rows, ".tsv": tsv_rows, ".conll": conll_rows, ".arrow": saved_rows}[
        file.suffix
    ](file)
    if file.suffix == ".conll" and arguments.labels != "tags":
        raise ValueError(f"{file}: a CoNLL file has words with tags: say labels = 'tags'")
    return _texts_of(rows, str(file), arguments, conll=file.suffix == ".conll")


def _texts_of(
    rows: Rows, source: str, arguments: OwnTextArguments, *, before_number: str = ":", conll: bool = False
) -> Texts:
    """The texts of numbered rows by their columns; ValueError names what is wrong by source and number.

    before_number: what stands between the two.
    conll: whether columns are those of a CoNLL file, which has no names of its own.
    """
    found = Texts()
    tags = arguments.labels == "tags"
    text = _words if tags else _text
    of_kind: dict[Labels, Callable[[object], Any]] = {"classes": as_name, "numbers": as_float32, "tags": _tags}
    label = of_kind[arguments.labels]
    readers = {arguments.text: (found.texts, text), arguments.label: (found.labels, label)}
    if len(readers) < 2:
        raise ValueError(f"text and label both name the column {arguments.text!r}: each needs a column of its own")
    if conll:
        readers = {"words": (found.texts, _words), "tags": (found.labels, _tags)}
    if arguments.pair:
        readers[arguments.pair] = (found.pairs, _text)
    if arguments.source:
        readers[arguments.source] = (found.sources, as_name)
    for number, row in rows:
        place = f"{source}{before_number}{number}"
        check_columns(row, readers, source, number, before_number)
        for column, (values, read) in readers.items():
            try:
                values.append(read(row[column]))
            except ValueError as error:
                raise ValueError(f"{place}: {column} {error}") from None
        found.places.append(place)
    found.check(arguments.labels, source)
    return found


def check_columns(
    row: Mapping[str, Any], columns: Iterable[str], source: object, number: int, before_number: str = ":"
) -> None:
    """ValueError where a row lacks a column, with its place: of a file with a header that is the header's line.

    before_number: what stands between the source and the row's number.
    """
    if lacking := next((column for column in columns if column not in row), None):
        header = str(source).endswith((".csv", ".tsv"))
        only = next(iter(row), "")
        mark = next((mark for mark in (";", ",", "\t") if len(row) == 1 and mark in only), "")
        hint = f"; {mark!r} stands between its values: a .csv file has commas there, a .tsv file tabs" if mark else ""
        raise ValueError(
            f"{source}{before_number}{1 if header else number}: no column {lacking!r}, there are "
            f"{', '.join(map(repr, row))}{hint}"
        )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"is {_shown(value)}, it must be a text")
    return _whole(value)


def as_name(value: object) -> str:
    """The name that a value of a column is; ValueError, which the column's name goes before, where it is none."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if not isinstance(value, str) or not label_text(value):
        raise ValueError(f"is {_shown(value)}, it must be a name or a whole number")
    return _whole(label_text(value))


_SEPARATED = re.compile(r"\s*[+-]?\d+([.,'\s\u2019]\d+)+(e[+-]?\d+)?\s*", re.IGNORECASE)


def as_float32(value: object, decimal: str = ".") -> float:
    """The finite number, as large as 32 bits hold, that a value of a column is or says; ValueError as of `as_name`.

    decimal: what stands in front of decimals in a text; any other separator is refused, because nobody can tell
        1,234 with three decimals from 1,234 in the thousands.
    """
    text = value.translate({ord("."): "?", ord(","): "."}) if isinstance(value, str) and decimal == "," else value
    try:
        number = float(text) if isinstance(text, str | int | float) and not isinstance(text, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    # Python reads 1_000 as a number; in a file it is more likely a name or a slip.
    if not math.isfinite(number) or (isinstance(value, str) and "_" in value):
        hint = ""
        if isinstance(value, str) and _SEPARATED.fullmatch(value):
            hint = (
                f" without separators of thousands and with {decimal!r} in front of decimals (decimal = "
                f"{',' if decimal == '.' else '.'!r} in the task-arguments of tables reads the other)"
            )
        raise ValueError(f"is {_shown(value)}, it must be a finite number{hint}")
    if abs(number) > FLOAT32_MAX:
        raise ValueError(f"is {number:g}, more than a number of 32 bits can be")
    return number


def _words(value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise ValueError(f"is {_shown(value)}, it must be a list of texts")
    return [_whole(word) for word in value]


def _tags(value: object) -> list[str]:
    return [label_text(tag) for tag in _words(value)]


def _whole(text: str) -> str:
    """A text; ValueError where one of its characters is cut in half, as in what was cut by its length elsewhere."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"half of a character ({text[error.start]!r}, one of the two surrogates)"
        raise ValueError(f"is {_shown(text)}, it holds {half}: leave it out") from None
    return text


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


Rows = Iterator[tuple[int, dict[str, Any]]]
"""Line in the file, counted from 1, and the values of a row by column."""


def lines_of(file: Path, encoding: str = "utf-8-sig") -> Iterator[tuple[int, str]]:
    """The lines of a text file, counted from 1, without their ends; ValueError for one that is no text or too long."""
    with file.open("rb") as content:
        start = content.peek(4)[:4]
        if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) or (start and b"\0" in start):
            raise ValueError(f"{file}: it is in UTF-16, or no text at all: save it in UTF-8 (Excel: CSV UTF-8)")
        for number, line in enumerate(iter(lambda: content.readline(MAX_LINE_BYTES), b""), start=1):
            if len(line) == MAX_LINE_BYTES:
                raise ValueError(f"{file}:{number}: the line has {MAX_LINE_BYTES} bytes or more")
            try:
                text = line.decode(encoding)
            except UnicodeDecodeError as error:
                name = encoding.removesuffix("-sig").upper()
                raise ValueError(
                    f"{file}:{number}: not a text in {name} (byte {error.start + 1} of the line): save the file in "
                    f"that encoding{' (Excel: CSV UTF-8)' * (name == 'UTF-8')}"
                ) from None
            yield number, text.rstrip("\r\n")


def json_rows(file: Path) -> Rows:
    """An object per line; empty lines are left out."""
    for number, line in lines_of(file):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}:{number}: not JSON ({error})") from None
        if not isinstance(row, dict):
            raise ValueError(f'{file}:{number}: must be an object such as {{"text": "...", "label": "..."}}')
        yield number, row if line.isascii() else {label_text(column): value for column, value in row.items()}


def csv_rows(file: Path) -> Rows:
    """A header with the columns' names, then a row per text; a value in quotes may hold commas and line ends.

    Where no comma stands in the header, semicolons or tabs stand between values, as Excel writes in some countries.
    """
    return _separated(file, {"delimiter": _mark_between(file), "strict": True})


def _mark_between(file: Path) -> str:
    """What stands between the values of a CSV file, by its first line outside of quotes."""
    _, header = next(iter(lines_of(file)), (0, ""))
    outside = re.sub(r'"[^"]*"', "", header)
    return next((mark for mark in (",", ";", "\t") if mark in outside), ",")


def tsv_rows(file: Path) -> Rows:
    """A header, then a row per line with tabs between the values; quotes have no meaning."""
    return _separated(file, {"delimiter": "\t", "quoting": csv.QUOTE_NONE})


def _separated(file: Path, dialect: dict[str, Any]) -> Rows:
    reader = csv.reader((f"{line}\n" for _, line in lines_of(file)), **dialect)
    try:
        header = next(reader, None)
        if not header:
            raise ValueError(f"{file}: has no header with the columns' names")
        if header[0].lower().startswith("sep="):
            raise ValueError(f"{file}:1: {dialect['delimiter'].join(header)!r} is a line for Excel alone: leave it out")
        header = [label_text(column) for column in header]
        if twice := [column for column in header if header.count(column) > 1]:
            raise ValueError(f"{file}: the header names the column {twice[0]!r} twice, each column needs its own name")
        last = reader.line_num
        for row in reader:
            first, last = last + 1, reader.line_num
            if not row:
                continue
            if len(row) != len(header):
                values = f"{len(row)} value{'s' if len(row) != 1 else ''}"
                raise ValueError(f"{file}:{first}: {values}, the header has {len(header)} columns")
            yield first, dict(zip(header, row, strict=True))
    except csv.Error as error:
        # What is said of them tells how to open the file in Python.
        old = "lines end as on Macs of old, in a carriage return: save it with other ends of lines (Excel: CSV UTF-8)"
        raise ValueError(f"{file}:{reader.line_num}: {old if 'new-line' in str(error) else error}") from None


def conll_rows(file: Path) -> Rows:
    """A word per line with its tag as the last value, an empty line behind each sentence: `words` and `tags`.

    Lines in front of a sentence such as "# sent_id = 1" are comments.
    """
    words: list[str] = []
    tags: list[str] = []
    first = 0
    for number, line in _and_an_end(lines_of(file)):
        values = line.split()
        if not values or values[0] == "-DOCSTART-":
            if words:
                yield first, {"words": words, "tags": tags}
            words, tags = [], []
            continue
        if not words and line.startswith("# ") and " = " in line:
            continue
        if len(values) < 2:
            raise ValueError(f"{file}:{number}: {line!r} has one value, a word comes with its tag")
        first = first if words else number
        words.append(values[0])
        tags.append(values[-1])


def _and_an_end(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    yield from lines
    yield 0, ""
