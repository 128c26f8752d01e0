"""Files of texts, and the task `text`: any such files of one's own, or a data set of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from torch.nn import functional

from wildflower.plugins.raised_as import raised_as
from wildflower.tasks.data import Data, DataSet, find_file, no_file, refuse_unread_test_file, stratified_test, unread
from wildflower.tasks.hub import Repository, existing_folder, files_of_copy, open_split
from wildflower.tasks.labels import NO_LABEL, label_text
from wildflower.tasks.metrics import METRICS, EntityF1, Metric, usual_metric
from wildflower.tasks.rows import (
    Rows,
    as_float32,
    as_name,
    as_tags,
    as_text,
    as_words,
    check_columns,
    files_behind,
    files_of_device,
    named_rows,
    rows_of,
)
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

FORMATS = {".jsonl": "JSON lines", ".csv": "CSV", ".tsv": "TSV", ".conll": "CoNLL"}


Name = Annotated[str, AfterValidator(label_text)]
"""The name of a column or a class: with composed accents, and no blanks at the ends."""

MetricName = Literal["accuracy", "f1", "matthews", "token_accuracy", "entity_f1", "pearson", "mean_absolute_error"]

METRICS_OF: dict[Labels, tuple[MetricName, ...]] = {
    "classes": ("accuracy", "f1", "matthews"),
    "numbers": ("pearson", "mean_absolute_error"),
    "tags": ("entity_f1", "token_accuracy"),
}


def _listed(names: object) -> object:
    if isinstance(names, str):
        return (names,) if names else ()
    return tuple(names) if isinstance(names, list) else names


Files = Annotated[tuple[str, ...], BeforeValidator(_listed)]
"""Names of files, of which one may stand without a list around it."""


class OwnTextArguments(TextArguments):
    """Arguments of the task `text`."""

    train: Files = Field(
        ("train.jsonl",),
        description=f"File in data-dir to train on ({', '.join(FORMATS)}), or a list of files, each of which is a "
        "source for partition = 'natural'",
    )
    test: Files = Field(
        (), description="File or files to test on, with the same columns; empty: a part of those to train on"
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
        sourced = bool(self.source) or len(self.train) > 1
        if self.own_labels and (not sourced or self.labels == "numbers"):
            raise ValueError("own_labels needs a column `source` or several files, and labels that are classes or tags")
        if len(set(self.classes)) != len(self.classes):
            raise ValueError("classes: a name is listed twice")
        for name in (*self.train, *self.test):
            if Path(name).name != name or Path(name).suffix not in FORMATS:
                raise ValueError(f"{name!r} is no file name that ends in {', '.join(FORMATS)}")
        if not self.train:
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


def load(data_dir: str, arguments: OwnTextArguments) -> DataSet:
    """Return the files in `data_dir`, or a data set of the hub.

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
    """Return the files that the arguments name, and what reads them."""
    refuse_unread_test_file(folder, tuple(FORMATS), arguments.train, arguments)
    training, testing = (
        [find_file(folder, name, "text", "the files that task-arguments name") for name in names]
        for names in (arguments.train, arguments.test)
    )

    def parts() -> tuple[Texts, Texts | None]:
        train = _together([read_texts(file, arguments) for file in training])
        return train, _together([read_texts(file, arguments) for file in testing]) if testing else None

    return [*training, *testing], parts


def _of_hub(folder: Path | None, arguments: OwnTextArguments) -> tuple[list[Path], Parts]:
    """Return the files of a local copy, if there is a folder, and what reads the data set that the arguments name."""
    share = 0.0 if arguments.test_split else arguments.test_share  # that `load` keeps for testing
    repository = Repository(arguments.hub, config=arguments.hub_config or None, held_out=share)

    def texts_of(split: str) -> Texts:
        source = f"{arguments.hub}, split {split}"
        rows = named_rows(open_split(repository, split, folder), f"{source}, row ")
        return _texts_of(rows, source, arguments, before_number=", row ")

    def parts() -> tuple[Texts, Texts | None]:
        train = texts_of(arguments.train_split)
        return train, texts_of(arguments.test_split) if arguments.test_split else None

    return [] if folder is None else files_of_copy(folder, "text", arguments.hub), parts


def own(data_dir: str, arguments: OwnTextArguments) -> DataSet:
    """Return the texts of a device's folder, in the files that `load` reads, of which one kind may be missing.

    In place of files train/ and test/ may be what `save_to_disk` of `datasets` wrote. Inputs have `max_tokens` tokens
    on every device.
    """
    if arguments.hub:
        raise ValueError("task-arguments: `hub` names texts that a run deals out, but these devices have their own")
    folder = existing_folder("text", data_dir)
    there = [
        files_of_device(folder, names, part) for names, part in ((arguments.train, "train"), (arguments.test, "test"))
    ]
    if not any(there):
        raise no_file(folder, arguments.train[0], "text", "the files that task-arguments name")

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


def _filled(part: Data, arguments: OwnTextArguments, found: DataSet) -> Data:
    """Return texts padded to `max_tokens`: how long the longest is differs from device to device."""
    assert found.vocabulary is not None
    more = arguments.max_tokens - part.inputs.shape[1]
    inputs = functional.pad(part.inputs, (0, more), value=found.vocabulary.pad_id)
    labels = part.labels
    if arguments.labels == "tags":
        labels = functional.pad(labels, (0, more), value=NO_LABEL)
    return Data(inputs, labels)


def _together(parts: list[Texts]) -> Texts:
    """Return the texts of several files as one; each file is a source, unless a column says the source."""
    if len(parts) > 1 and not parts[0].sources:
        # Sources are numbered in the order of their names.
        parts = [replace(part, sources=[f"{number:09d}"] * len(part)) for number, part in enumerate(parts)]
    return joined(parts)


def metric(arguments: OwnTextArguments, data: DataSet) -> Metric:
    """Return the metric that the arguments name."""
    if not arguments.metric:
        return usual_metric(data.train.label_kind, data.label_names)
    return EntityF1(data.label_names) if arguments.metric == "entity_f1" else METRICS[arguments.metric]()


def held_out(texts: Texts, labels: Labels, share: float) -> tuple[Texts, Texts]:
    """Return texts to train and to test on: `share` of each class (of all, where labels are no classes) are to test on.

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
    """Return the texts of a file by its columns; ValueError names file and line of what is wrong."""
    rows = rows_of(file)
    if file.suffix == ".conll" and arguments.labels != "tags":
        raise ValueError(f"{file}: a CoNLL file has words with tags: say labels = 'tags'")
    return _texts_of(rows, str(file), arguments, conll=file.suffix == ".conll")


def _texts_of(
    rows: Rows, source: str, arguments: OwnTextArguments, *, before_number: str = ":", conll: bool = False
) -> Texts:
    """Return the texts of numbered rows by their columns; ValueError names what is wrong by source and number.

    before_number: what stands between the two.
    conll: whether columns are those of a CoNLL file, which has no names of its own.
    """
    found = Texts()
    tags = arguments.labels == "tags"
    text = as_words if tags else as_text
    of_kind: dict[Labels, Callable[[object], Any]] = {"classes": as_name, "numbers": as_float32, "tags": as_tags}
    label = of_kind[arguments.labels]
    readers = {arguments.text: (found.texts, text), arguments.label: (found.labels, label)}
    if len(readers) < 2:
        raise ValueError(f"text and label both name the column {arguments.text!r}: each needs a column of its own")
    if conll:
        readers = {"words": (found.texts, as_words), "tags": (found.labels, as_tags)}
    if arguments.pair:
        readers[arguments.pair] = (found.pairs, as_text)
    if arguments.source:
        readers[arguments.source] = (found.sources, as_name)
    for number, row in rows:
        place = f"{source}{before_number}{number}"
        check_columns(row, readers, source, number, before_number)
        for column, (values, read) in readers.items():
            with raised_as(ValueError, f"{place}: {column} "):
                values.append(read(row[column]))
        found.places.append(place)
    found.check(arguments.labels, source)
    return found
