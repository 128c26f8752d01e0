"""Rows of files: CSV, TSV, JSON lines, CoNLL, and what `save_to_disk` of `datasets` wrote; and the values in them.

Every reader gives a row's place in the file beside its values, so that an error can name it. These are Python's own
`csv` and `json`: devices do without pandas.
"""

from __future__ import annotations

import codecs
import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from wildflower.tasks.device_data import FLOAT32_MAX
from wildflower.tasks.hub import import_datasets
from wildflower.tasks.labels import label_text

MAX_FILE_BYTES = 1 << 30
MAX_LINE_BYTES = 1 << 20


Rows = Iterator[tuple[int, dict[str, Any]]]
"""Line in the file, counted from 1, and the values of a row by column."""


def rows_of(file: Path) -> Rows:
    """Return the rows of a file by the end of its name; ValueError for a file too large, and for what is wrong in it.

    KeyError where there is no reader for such a name.
    """
    check_size(file.stat().st_size, file)
    return READERS[file.suffix](file)


def lines_of(file: Path, encoding: str = "utf-8-sig") -> Iterator[tuple[int, str]]:
    """Yield the lines of a text file, counted from 1, without their ends; ValueError for a file that is no text."""
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
    """Read an object per line; empty lines are left out."""
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
    """Read a header with the columns' names, then a row per text; a value in quotes may hold commas and line ends.

    Where no comma stands in the header, semicolons or tabs stand between values, as Excel writes in some countries.
    """
    return _separated(file, {"delimiter": _mark_between(file), "strict": True})


def _mark_between(file: Path) -> str:
    """Return what stands between the values of a CSV file, by its first line outside of quotes."""
    _, header = next(iter(lines_of(file)), (0, ""))
    outside = re.sub(r'"[^"]*"', "", header)
    return next((mark for mark in (",", ";", "\t") if mark in outside), ",")


def tsv_rows(file: Path) -> Rows:
    """Read a header, then a row per line with tabs between the values; quotes have no meaning."""
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
    """Read a word per line with its tag as the last value, an empty line behind each sentence: `words` and `tags`.

    Lines in front of a sentence such as "# sent_id = 1" are comments.
    """
    words: list[str] = []
    tags: list[str] = []
    first = 0
    for number, line in chain(lines_of(file), [(0, "")]):
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


def saved(folder: Path, most_bytes: int = MAX_FILE_BYTES) -> list[Path]:
    """Return the first file of a data set which `save_to_disk` of `datasets` wrote, for all; [] where there is none.

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


def files_of_device(folder: Path, names: Iterable[str], part: str) -> list[Path]:
    """Return the files of these names in a device's folder, or else what `saved` finds in the folder `part` in it."""
    return [folder / name for name in names if name and (folder / name).is_file()] or saved(folder / part)


def check_size(size_bytes: int, where: Path, most_bytes: int = MAX_FILE_BYTES) -> None:
    """Raise ValueError where a file, or all files of a data set, have more than `most_bytes`."""
    if size_bytes > most_bytes:
        raise ValueError(f"{where}: {size_bytes} bytes are more than {most_bytes}")


def files_behind(file: Path) -> list[Path]:
    """Return all files that a file stands for: those of the whole data set, where it is of one that `saved` found."""
    return [*sorted(file.parent.glob("*.arrow")), file.parent / "state.json"] if file.suffix == ".arrow" else [file]


def saved_rows(file: Path) -> Rows:
    """Return the rows of the data set that an .arrow file is of; names stand in place of the numbers of classes."""
    return named_rows(import_datasets().load_from_disk(str(file.parent)), f"{file}:")


def named_rows(rows: Any, source: object) -> Rows:
    """Yield the rows of a data set of `datasets`, counted from 1, with names for the numbers of classes and tags.

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


READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": json_rows,
    ".csv": csv_rows,
    ".tsv": tsv_rows,
    ".conll": conll_rows,
    ".arrow": saved_rows,
}


# Values ---------------------------------------------------------------------------------------------------------------


def check_columns(
    row: Mapping[str, Any], columns: Iterable[str], source: object, number: int, before_number: str = ":"
) -> None:
    """Raise ValueError where a row lacks a column, with its place: of a file with a header that is the header's line.

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


def as_text(value: object) -> str:
    """Return a value of a column that is a text; ValueError, which the column's name goes before, where it is none."""
    if not isinstance(value, str):
        raise ValueError(f"is {_shown(value)}, it must be a text")
    return _whole(value)


def as_name(value: object) -> str:
    """Return the name that a value of a column is; ValueError as of `as_text`."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if not isinstance(value, str) or not label_text(value):
        raise ValueError(f"is {_shown(value)}, it must be a name or a whole number")
    return _whole(label_text(value))


_SEPARATED = re.compile(r"\s*[+-]?\d+([.,'\s\u2019]\d+)+(e[+-]?\d+)?\s*", re.IGNORECASE)


def as_float32(value: object, decimal: str = ".") -> float:
    """Return the finite number of 32 bits that a value of a column is or says; ValueError as of `as_name`.

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


def as_words(value: object) -> list[str]:
    """Return a value of a column that is a list of texts; ValueError as of `as_text`."""
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise ValueError(f"is {_shown(value)}, it must be a list of texts")
    return [_whole(word) for word in value]


def as_tags(value: object) -> list[str]:
    """Return a value of a column that is a list of tags; ValueError as of `as_text`."""
    return [label_text(tag) for tag in as_words(value)]


def _whole(text: str) -> str:
    """Return a text; ValueError if a character is cut in half, as in what was cut by its length elsewhere."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"half of a character ({text[error.start]!r}, one of the two surrogates)"
        raise ValueError(f"is {_shown(text)}, it holds {half}: leave it out") from None
    return text


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
