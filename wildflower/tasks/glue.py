"""GLUE (Wang et al. 2018): nine tasks of understanding English, from the Hugging Face hub or a local copy.

The labels of GLUE's own test sets are not public: models are tested on the validation sets, of MNLI on the matched one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from wildflower.tasks import hub
from wildflower.tasks.data import DataSet
from wildflower.tasks.hub import Repository
from wildflower.tasks.metrics import ACCURACY, F1, METRICS, Matthews, Metric, Pearson
from wildflower.tasks.texts import METRICS_OF, MetricName
from wildflower.tasks.tokens import Labels, TextArguments, Texts, make_text_data_set, tokenized_once

REPOSITORY = "nyu-mll/glue"


class GlueArguments(TextArguments):
    """Arguments of the tasks of GLUE."""

    metric: MetricName | Literal[""] = Field("", description="Metric; empty: that of InclusiveFL's paper")


@dataclass(frozen=True)
class Part:
    """One of the tasks: its columns of texts, its classes in order ("" are numbers), its metric."""

    columns: tuple[str, ...]
    classes: tuple[str, ...]
    metric: Metric = field(default=ACCURACY)
    validation: str = "validation"


ENTAILMENT = ("entailment", "not_entailment")

PARTS = {
    "cola": Part(("sentence",), ("unacceptable", "acceptable"), Matthews()),
    "sst2": Part(("sentence",), ("negative", "positive")),
    "mrpc": Part(("sentence1", "sentence2"), ("not_equivalent", "equivalent"), F1()),
    "qqp": Part(("question1", "question2"), ("not_duplicate", "duplicate")),
    "stsb": Part(("sentence1", "sentence2"), (), Pearson()),
    "mnli": Part(
        ("premise", "hypothesis"), ("entailment", "neutral", "contradiction"), validation="validation_matched"
    ),
    "qnli": Part(("question", "sentence"), ENTAILMENT),
    "rte": Part(("sentence1", "sentence2"), ENTAILMENT),
    "wnli": Part(("sentence1", "sentence2"), ("not_entailment", "entailment")),
}
"""Metrics are those of InclusiveFL's paper (section 4.1); columns and the order of classes are the hub's."""


def metric(name: str, arguments: GlueArguments, data: DataSet) -> Metric:
    """Return the metric that the arguments name, or else the paper's; ValueError if it does not go with the labels."""
    part, chosen = PARTS[name], arguments.metric
    if not chosen:
        return part.metric
    allowed = METRICS_OF["classes" if part.classes else "numbers"]
    if chosen == "f1" and len(part.classes) != 2:
        raise ValueError(f"glue-{name}: metric = 'f1' needs two classes, the labels have {len(part.classes)}")
    if chosen not in allowed:
        raise ValueError(f"glue-{name}: metric = {chosen!r} does not go with its labels: {', '.join(allowed)}")
    return METRICS[chosen]()


def load(name: str, data_dir: str, arguments: GlueArguments) -> DataSet:
    """Return the task `name` of PARTS from a local copy of the hub's files in `data_dir`, else from the hub.

    FileNotFoundError when there is no copy and the hub cannot be reached, ValueError when a copy lacks a column.
    """
    part, task = PARTS[name], f"glue-{name}"
    repository = Repository(REPOSITORY, config=name)
    labels: Labels = "classes" if part.classes else "numbers"
    folder = hub.existing_folder(task, data_dir) if data_dir else None
    files = [] if folder is None else hub.files_of_copy(folder, task, REPOSITORY, name)

    def read() -> DataSet:
        train, test = (
            _texts(hub.open_split(repository, split, folder), part, f"{REPOSITORY} {name} {split}")
            for split in ("train", part.validation)
        )
        return make_text_data_set(train, test, labels, arguments, data_dir, classes=part.classes)

    return tokenized_once(task, files, data_dir, arguments, read)


def _texts(rows: Any, part: Part, where: str) -> Texts:
    missing = [column for column in (*part.columns, "label") if column not in rows.column_names]
    if missing:
        raise ValueError(f"{where}: no column {missing[0]!r}, there are {', '.join(rows.column_names)}")
    found = Texts()
    for number, row in enumerate(rows):
        place, label = f"{where}, row {number}", row["label"]
        if part.classes and not (isinstance(label, int) and 0 <= label < len(part.classes)):
            raise ValueError(f"{place}: the label is {label!r}, it must be 0 to {len(part.classes) - 1}")
        found.add(place, row[part.columns[0]], part.classes[label] if part.classes else float(label))
        found.pairs += [row[column] for column in part.columns[1:]]
    found.check("classes" if part.classes else "numbers", where)
    return found
