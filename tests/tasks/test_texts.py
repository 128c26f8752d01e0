import json
import re
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
import torch
from text_files import CLS, PAD, SEP, UNK, VOCABULARY, ids, make_tokenizer, write_lines

from wildflower.plugins.extras import MissingExtraError
from wildflower.tasks import hub, texts
from wildflower.tasks.arguments import read_arguments
from wildflower.tasks.labels import NO_LABEL
from wildflower.tasks.metrics import EntityF1, Matthews
from wildflower.tasks.task import TASKS, Task, TaskSpec, load_task
from wildflower.tasks.tokens import load_tokenizer


def load(folder: Path | str, tokenizer: str, *, devices: int = 2, partition: str = "iid", **arguments: Any) -> Task:
    given = read_arguments("text", TASKS["text"].arguments, {"tokenizer": tokenizer, **arguments})
    return load_task(TaskSpec(name="text", devices=devices, data_dir=str(folder), partition=partition, arguments=given))


def examples(folder: Path, *rows: dict[str, Any]) -> Path:
    """The rows as train.jsonl and as test.jsonl."""
    write_lines(folder / "train.jsonl", *rows)
    write_lines(folder / "test.jsonl", *rows)
    return folder


OPINIONS = (
    {"text": "The film was good.", "label": "positive"},
    {"text": "bad plot", "label": "negative"},
    {"text": "we saw it", "label": "neutral"},
)


# Tokens ---------------------------------------------------------------------------------------------------------------


def test_texts_become_tokens_padded_to_the_longest_and_names_become_classes(tmp_path: Path, tokenizer: str) -> None:
    task = load(examples(tmp_path, *OPINIONS), tokenizer, test="test.jsonl")
    first, second, third = ids("the film was good ."), ids("bad plot"), ids("we saw it")
    assert task.train.inputs.tolist() == [
        [CLS, *first, SEP],
        [CLS, *second, SEP, PAD, PAD, PAD],
        [CLS, *third, SEP, PAD, PAD],
    ]
    assert task.train.inputs.dtype == torch.int32
    assert task.label_names == ("negative", "neutral", "positive")
    assert task.train.labels.tolist() == [2, 0, 1]
    assert (task.classes, task.input_shape, task.metric.name) == (3, (7,), "accuracy")
    assert task.vocabulary is not None
    assert (task.vocabulary.tokens, task.vocabulary.pad_id, task.vocabulary.cut_texts) == (len(VOCABULARY), PAD, 0)


def test_a_batch_is_as_long_as_its_longest_text(tmp_path: Path, tokenizer: str) -> None:
    task = load(examples(tmp_path, *OPINIONS), tokenizer, test="test.jsonl")
    inputs, labels = task.batch(task.train.inputs[1:], task.train.labels[1:], augment=None)
    assert inputs.tolist() == [[CLS, *ids("bad plot"), SEP, PAD], [CLS, *ids("we saw it"), SEP]]
    assert inputs.dtype == torch.int64
    assert labels.tolist() == [0, 1]


def test_texts_beyond_the_limit_are_cut_and_counted(tmp_path: Path, tokenizer: str) -> None:
    task = load(examples(tmp_path, *OPINIONS), tokenizer, test="test.jsonl", max_tokens=5)
    assert task.train.inputs.tolist()[0] == [CLS, *ids("the film was"), SEP]
    assert task.vocabulary is not None
    assert task.vocabulary.cut_texts == 2  # one in each file: the third has five tokens


def test_pairs_are_one_text_with_a_separator_between(tmp_path: Path, tokenizer: str) -> None:
    rows = [{"text": "bad film", "other": "poor film", "label": n / 2} for n in (1, 9)]
    task = load(examples(tmp_path, *rows), tokenizer, test="test.jsonl", pair="other", labels="numbers")
    assert task.train.inputs.tolist()[0] == [CLS, *ids("bad film"), SEP, *ids("poor film"), SEP]
    assert task.train.labels.tolist() == [0.5, 4.5]
    assert (task.classes, task.metric.name, task.label_kind) == (1, "pearson", "numbers")
    assert task.vocabulary is not None
    assert task.vocabulary.separator == SEP
    outputs = torch.tensor([[1.5], [4.5]])
    assert task.loss(outputs, task.train.labels).item() == pytest.approx(0.5)  # (1^2 + 0^2) / 2


def test_a_tokenizer_that_gives_pairs_one_type_alone_has_no_separator(tmp_path: Path) -> None:
    """As RoBERTa's, whose post-processor is the only difference here."""
    file = make_tokenizer(tmp_path / "words") / "tokenizer.json"
    content = json.loads(file.read_text())
    ends = {"sep": ["[SEP]", SEP], "cls": ["[CLS]", CLS]}
    content["post_processor"] = {"type": "RobertaProcessing", "trim_offsets": True, "add_prefix_space": False, **ends}
    file.write_text(json.dumps(content))
    examples(tmp_path, {"text": "bad film", "other": "poor", "label": "a"}, {"text": "a", "other": "b", "label": "b"})
    task = load(tmp_path, str(tmp_path / "words"), test="test.jsonl", pair="other")
    assert task.train.inputs.tolist()[0] == [CLS, *ids("bad film"), SEP, SEP, *ids("poor"), SEP]
    assert task.vocabulary is not None
    assert task.vocabulary.separator == -1


def test_a_separator_inside_of_a_pair_is_told_with_its_place(tmp_path: Path, tokenizer: str) -> None:
    rows = [{"text": text, "other": "poor film", "label": text} for text in ("good", "bad [SEP] film")]
    for _ in range(2):  # from the files, and from the cache
        load_task.cache_clear()
        pairs = load(examples(tmp_path, *rows), tokenizer, test="test.jsonl", pair="other").vocabulary
        assert pairs is not None
        pairs.check_pairs(-1)
        with pytest.raises(ValueError, match=r"train\.jsonl:2: a text of this pair holds the tokenizer's separator"):
            pairs.check_pairs(SEP)
    write_lines(tmp_path / "train.jsonl", {**rows[0], "label": "x"}, {**rows[0], "label": "bad [SEP] film"})
    of_test = load(tmp_path, tokenizer, test="test.jsonl", pair="other", classes=("x", "good", "bad [SEP] film"))
    assert of_test.vocabulary is not None
    assert of_test.vocabulary.unclear_pair.endswith("test.jsonl:2")
    alone = load(examples(tmp_path, *rows), tokenizer, test="test.jsonl")
    assert alone.train.inputs.tolist()[1] == [CLS, *ids("bad"), SEP, *ids("film"), SEP]
    assert alone.vocabulary is not None
    assert alone.vocabulary.separator == -1


def test_the_first_token_of_a_word_has_its_tag(tmp_path: Path, tokenizer: str) -> None:
    row = {"text": ["John", "plays", "in", "Rome"], "label": ["B-PER", "O", "O", "B-LOC"]}
    short = {"text": ["John"], "label": ["B-PER"]}
    task = load(examples(tmp_path, row, short), tokenizer, test="test.jsonl", labels="tags")
    assert task.label_names == ("B-LOC", "B-PER", "O")
    assert task.train.inputs.tolist()[0] == [CLS, *ids("john play ##s in rome"), SEP]
    none = NO_LABEL
    assert task.train.labels.tolist() == [[none, 1, 2, none, 2, 0, none], [none, 1, none, none, none, none, none]]
    assert task.metric == EntityF1(("B-LOC", "B-PER", "O"))
    inputs, labels = task.batch(task.train.inputs[1:], task.train.labels[1:], augment=None)
    assert inputs.shape == labels.shape == (1, 3)


def test_a_second_process_reads_the_cache_without_the_library(
    tmp_path: Path, tokenizer: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = examples(tmp_path, *OPINIONS)
    first = load(folder, tokenizer, test="test.jsonl")
    load_task.cache_clear()
    monkeypatch.setitem(sys.modules, "transformers", None)
    second = load(folder, tokenizer, test="test.jsonl")
    assert first is not second
    assert torch.equal(first.train.inputs, second.train.inputs)
    assert (second.label_names, second.vocabulary) == (first.label_names, first.vocabulary)
    assert len(list(empty_cache.rglob("text-*.safetensors"))) == 1


@pytest.mark.parametrize("changed", ["text", "tokenizer", "length"])
def test_whatever_determines_the_tokens_makes_them_anew(
    changed: str, tmp_path: Path, tokenizer: str, empty_cache: Path
) -> None:
    folder = examples(tmp_path, *OPINIONS)
    load(folder, tokenizer, test="test.jsonl")
    load_task.cache_clear()
    if changed == "text":
        examples(tmp_path, *OPINIONS[:2])
    if changed == "tokenizer":
        tokenizer = str(make_tokenizer(tmp_path / "other"))
        (tmp_path / "other" / "special_tokens_map.json").write_text("{}")
    load(folder, tokenizer, test="test.jsonl", max_tokens=4 if changed == "length" else 128)
    assert len(list(empty_cache.rglob("text-*.safetensors"))) == 2


def test_a_tokenizer_may_lie_in_the_data_folder(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "words")
    task = load(examples(tmp_path, *OPINIONS), "words", test="test.jsonl")
    assert task.train.inputs[1, 1] == VOCABULARY["bad"]


def test_a_tokenizer_that_is_nowhere_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="tokenizer = '/no/such': no such folder"):
        load_tokenizer("/no/such", "")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no tokenizer in this folder"):
        load_tokenizer(str(tmp_path / "empty"), "")


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'wildflower\[text\]'"):
        load_tokenizer("any", "")


# Files ----------------------------------------------------------------------------------------------------------------


def test_csv_tsv_and_json_lines_are_read_alike(tmp_path: Path, tokenizer: str) -> None:
    examples(tmp_path, {"text": 'a "good", red book', "label": 1}, {"text": "bad", "label": 0})
    (tmp_path / "train.csv").write_text('label,text\n1,"a ""good"", red book"\n0,bad\n')
    (tmp_path / "train.tsv").write_text('text\tlabel\na "good", red book\t1\nbad\t0\n')
    found = [
        load(tmp_path, tokenizer, train=name, test="test.jsonl") for name in ("train.jsonl", "train.csv", "train.tsv")
    ]
    for task in found:
        assert task.train.inputs.tolist() == found[0].train.inputs.tolist()
        assert task.train.labels.tolist() == [1, 0]
    assert found[0].train.inputs[0].tolist() == [CLS, *ids("a [UNK] good [UNK] , red book"), SEP]


def test_sentences_of_conll_files_are_parted_by_empty_lines(tmp_path: Path, tokenizer: str) -> None:
    text = "-DOCSTART- -X- -X- O\n\nJohn NNP B-NP B-PER\nlives VBZ B-VP O\n\n\nParis NNP B-NP B-LOC\n"
    (tmp_path / "train.conll").write_text(text)
    task = load(tmp_path, tokenizer, train="train.conll", test="train.conll", labels="tags")
    none = NO_LABEL
    assert task.train.inputs.tolist() == [[CLS, *ids("john lives"), SEP], [CLS, *ids("paris"), SEP, PAD]]
    assert task.train.labels.tolist() == [[none, 1, 2, none], [none, 0, none, none]]


def test_comments_of_conll_files_are_left_out_and_other_tags_than_of_entities_are_scored_one_by_one(
    tmp_path: Path, tokenizer: str
) -> None:
    (tmp_path / "train.conll").write_text("# sent_id = 1\nJohn NOUN\n# NOUN\n\n# text = lives\n# VERB\nlives VERB\n")
    task = load(tmp_path, tokenizer, train="train.conll", test="train.conll", labels="tags")
    assert (task.label_names, len(task.train)) == (("NOUN", "VERB"), 2)
    assert (task.train.labels != NO_LABEL).sum(1).tolist() == [2, 2]  # a word may be "#", the first one as well
    assert task.metric.name == "token_accuracy"


def test_a_sentence_that_alone_has_a_tag_is_trained_on(tmp_path: Path, tokenizer: str) -> None:
    """Wherever it stands: a tag that nobody is trained on cannot be tested."""
    for place in range(10):
        tags = ["B-ORG" if n == place else "B-PER" for n in range(10)]
        write_lines(tmp_path / "train.jsonl", *({"text": ["john"], "label": [tag]} for tag in tags))
        task = load(tmp_path, tokenizer, labels="tags", test_share=0.3)
        assert task.label_names == ("B-ORG", "B-PER")
        assert 0 in task.train.labels
        assert 0 not in task.test.labels


def test_a_text_that_is_its_own_label_is_refused(tmp_path: Path, tokenizer: str) -> None:
    with pytest.raises(ValueError, match="text and label both name the column 'text'"):
        load(examples(tmp_path, *OPINIONS), tokenizer, label="text", test="test.jsonl")


def test_labels_that_begin_with_two_signs_are_names(tmp_path: Path, tokenizer: str) -> None:
    rows = ({"text": "good", "label": label} for label in ("--1", "10", "9"))
    task = load(examples(tmp_path, *rows), tokenizer, test="test.jsonl")
    assert task.label_names == ("--1", "10", "9")


def test_without_a_test_file_a_share_of_each_class_is_kept(tmp_path: Path, tokenizer: str) -> None:
    rows = [{"text": "good" if n % 5 else "bad", "label": "yes" if n % 5 else "no"} for n in range(50)]
    write_lines(tmp_path / "train.jsonl", *rows)
    task = load(tmp_path, tokenizer, test_share=0.3)
    assert task.test.labels.bincount().tolist() == [3, 12]  # of 10 and of 40
    assert task.train.labels.bincount().tolist() == [7, 28]


def hub_rows(*labels: int) -> datasets.Dataset:
    """Questions as a data set of the hub has them, whose labels are numbers of named classes."""
    columns = {"question": ["what day" if label else "who works" for label in labels], "kind": list(labels)}
    kinds = datasets.ClassLabel(names=["person", "time"])
    features = datasets.Features({"question": datasets.Value("string"), "kind": kinds})
    return datasets.Dataset.from_dict(columns, features=features)


OF_HUB = {"hub": "somebody/questions", "text": "question", "label": "kind"}


def test_a_data_set_of_the_hub_is_read_by_its_name(tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(repository: hub.Repository, split: str) -> datasets.Dataset:
        asked.append((repository.path, repository.config, split))
        return hub_rows(1, 0, 0) if split == "dev" else hub_rows(0, 1, 1)

    monkeypatch.setattr(hub, "_download", download)
    splits = {"hub_config": "small", "train_split": "training", "test_split": "dev"}
    task = load("", tokenizer, **OF_HUB, **splits)
    assert asked == [("somebody/questions", "small", "training"), ("somebody/questions", "small", "dev")]
    assert task.label_names == ("person", "time")
    assert (task.train.labels.tolist(), task.test.labels.tolist()) == ([0, 1, 1], [1, 0, 0])
    assert task.train.inputs[0].tolist() == [CLS, *ids("who works"), SEP]


@pytest.mark.parametrize("saved", [True, False])
def test_a_copy_of_a_data_set_of_the_hub(tmp_path: Path, tokenizer: str, saved: bool) -> None:
    rows = hub_rows(*([0] * 10 + [1] * 40))
    if saved:
        rows.save_to_disk(tmp_path / "copy")
    else:
        (tmp_path / "copy").mkdir()
        rows.to_parquet(tmp_path / "copy" / "train-00000-of-00001.parquet")
    task = load(tmp_path / "copy", tokenizer, test_share=0.3, **OF_HUB)
    assert task.test.labels.bincount().tolist() == [3, 12]
    assert task.train.labels.bincount().tolist() == [7, 28]
    with pytest.raises(ValueError, match=re.escape("split train, row 1: no column 'label', there are 'question', ")):
        load(tmp_path / "copy", tokenizer, **OF_HUB | {"label": "label"})


def test_tags_of_the_hub_are_lists_of_numbers_of_classes(tmp_path: Path, tokenizer: str) -> None:
    names = datasets.ClassLabel(names=["O", "B-PER"])
    features = {"tokens": datasets.Sequence(datasets.Value("string")), "ner_tags": datasets.Sequence(names)}
    columns = {"tokens": [["john", "works"], ["who", "lives"]] * 5, "ner_tags": [[1, 0], [0, 0]] * 5}
    datasets.Dataset.from_dict(columns, features=datasets.Features(features)).save_to_disk(tmp_path / "copy")
    arguments = {"hub": "a/b", "text": "tokens", "label": "ner_tags", "labels": "tags", "test_share": 0.5}
    task = load(tmp_path / "copy", tokenizer, **arguments)
    assert task.label_names == ("B-PER", "O")
    assert {tuple(labels) for labels in task.train.labels.tolist()} == {
        (NO_LABEL, 0, 1, NO_LABEL),
        (NO_LABEL, 1, 1, NO_LABEL),
    }


@pytest.mark.parametrize(
    ("label", "words"), [(-1, "kind is -1, and its classes are 0 to 1"), (None, "kind is None, it")]
)
def test_a_label_of_the_hub_that_is_not_public_is_refused(
    label: int | None, words: str, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = hub_rows(0, 1)
    column = pyarrow.chunked_array([pyarrow.array([0, label], pyarrow.int64())])
    broken = datasets.Dataset(rows.data.table.set_column(1, rows.data.table.field("kind"), column))
    monkeypatch.setattr(hub, "_download", lambda repository, split: broken)
    with pytest.raises(ValueError, match=re.escape(f"somebody/questions, split train, row 2: {words}")):
        load("", tokenizer, **OF_HUB)


def test_a_folder_is_no_name_on_the_hub(tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_rows(0, 1).to_parquet(tmp_path / "mine" / "texts" / "train.parquet")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="mine/texts lies here, and so is no name on the hub: set data-dir to it"):
        load("", tokenizer, **OF_HUB | {"hub": "mine/texts"})


def test_what_the_hub_says_of_an_unknown_split_is_told(tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: object, **__: object) -> None:
        raise ValueError("Unknown split")

    monkeypatch.setattr(hub, "unreachable", lambda: "")
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match="somebody/questions, configuration x, split train, cannot be read: Unknown"):
        load("", tokenizer, **OF_HUB, hub_config="x")


def test_a_copy_of_several_configurations_must_say_which(tmp_path: Path, tokenizer: str) -> None:
    for config, label in (("a", 0), ("b", 1)):
        (tmp_path / config).mkdir()
        hub_rows(*[label, 1 - label] * 4).to_parquet(tmp_path / config / "train-00000-of-00001.parquet")
    for given, words in (({}, "configuration is not named"), ({"hub_config": "c"}, "configuration is none of them: c")):
        with pytest.raises(ValueError, match=f"several folders have data of the split 'train' .*{words}"):
            load(tmp_path, tokenizer, **OF_HUB, **given)
    assert len(load(tmp_path, tokenizer, **OF_HUB, hub_config="a").train) == 6


def test_without_a_folder_and_a_copy_the_error_says_what_is_expected(tmp_path: Path, tokenizer: str) -> None:
    with pytest.raises(ValueError, match="needs data-dir, the folder of your files, or `hub`"):
        load("", tokenizer)
    with pytest.raises(FileNotFoundError, match="no data of the task 'text'; expected parquet files"):
        load(tmp_path, tokenizer, **OF_HUB)
    with pytest.raises(ValueError, match="`hub` names texts that a run deals out, but these devices have their own"):
        texts.own(str(tmp_path), read_arguments("text", texts.OwnTextArguments, {"tokenizer": tokenizer, **OF_HUB}))


def test_numbers_as_names_are_in_their_order(tmp_path: Path, tokenizer: str) -> None:
    rows = [{"text": "good", "label": number} for number in (10, 9, 2, 10)]
    task = load(examples(tmp_path, *rows), tokenizer, test="test.jsonl")
    assert task.label_names == ("2", "9", "10")


def test_sources_are_those_of_the_natural_partition(tmp_path: Path, tokenizer: str) -> None:
    rows = [{"text": f"{'good ' * (n + 1)}", "label": str(n % 2), "who": "ben" if n < 3 else "ann"} for n in range(5)]
    task = load(examples(tmp_path, *rows), tokenizer, test="test.jsonl", source="who", partition="natural")
    assert [sorted(task.shard(device).train.tolist()) for device in (0, 1)] == [[3, 4], [0, 1, 2]]


def test_the_metric_may_be_chosen(tmp_path: Path, tokenizer: str) -> None:
    folder = examples(tmp_path, *OPINIONS)
    assert load(folder, tokenizer, test="test.jsonl", metric="matthews").metric == Matthews()
    with pytest.raises(ValueError, match="metric = 'f1' needs two classes, the labels have 3"):
        load(folder, tokenizer, test="test.jsonl", metric="f1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metric": "pearson"}, "metric = 'pearson' does not go with labels = 'classes': accuracy, f1, matthews"),
        ({"labels": "tags", "pair": "b"}, "words with tags come without a second text"),
        ({"own_labels": True}, "own_labels needs a column `source` or several files"),
        ({"train": "../x.jsonl"}, "'../x.jsonl' is no file name that ends in .jsonl, .csv"),
        ({"train": "x.parquet"}, "'x.parquet' is no file name that ends in .jsonl"),
        ({"classes": ["a", "a"]}, "a name is listed twice"),
        ({"hub": "a/b/c"}, "hub = 'a/b/c': "),
        ({"hub": "../b"}, "hub = '../b': "),
        ({"hub": "a/b", "train": "train.csv"}, "train names files: of a data set of the hub say train_split"),
        ({"test_split": "test"}, "test_split is of a data set of the hub, which `hub` names"),
        ({"max_tokens": 2}, "max_tokens = 2: must be at least 3"),
        ({"lenght": 5}, "there is no argument 'lenght'; the task takes tokenizer, max_tokens, train"),
        ({"tokenizr": "x"}, "there is no argument 'tokenizr'; did you mean 'tokenizer'? The task takes tokenizer"),
        ({"classes": "a"}, "classes = 'a': must be a list such as ['a', 'b']"),
        ({"classes": [3]}, "classes[0] = 3: must be a text in quotes"),
        ({"tokenizer": ""}, "tokenizer = '': must not be empty"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read_arguments("text", TASKS["text"].arguments, {"tokenizer": "x", **arguments})


def test_a_required_argument_that_is_misspelled_is_found_before_one_is_missing() -> None:
    with pytest.raises(ValueError, match="there is no argument 'tokeniser'; did you mean 'tokenizer'"):
        read_arguments("text", TASKS["text"].arguments, {"tokeniser": "x"})
    with pytest.raises(ValueError, match="the argument 'tokenizer' is missing; the task takes tokenizer, max_tokens"):
        read_arguments("text", TASKS["text"].arguments, {})


@pytest.mark.parametrize(("more", "of_capitals"), [((), "good"), (("Paris",), "[UNK]")])
def test_a_vocabulary_alone_is_berts_and_keeps_capitals_where_it_has_some(
    tmp_path: Path, more: tuple[str, ...], of_capitals: str
) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join((*VOCABULARY, *more)), encoding="utf-8")
    tokenizer = load_tokenizer(str(tmp_path), "")
    assert tokenizer.tokenize("GOOD playing") == [of_capitals, "play", "##ing"]
    assert tokenizer("good")["input_ids"] == [CLS, VOCABULARY["good"], SEP]
    assert tokenizer.pad_token_id == PAD


LINE_2 = r"train\.jsonl:2: "


@pytest.mark.parametrize(
    ("line", "arguments", "message"),
    [
        ('{"text": " ", "label": "a"}', {}, LINE_2 + "a text is empty"),
        ('{"text": "", "label": "a"}', {}, LINE_2 + "a text is empty"),
        ('{"label": "a"}', {}, LINE_2 + "no column 'text', there are 'label'"),
        ('{"text": 3, "label": "a"}', {}, LINE_2 + "text is 3, it must be a text"),
        ('{"text": "good", "label": 0.5}', {}, LINE_2 + "label is 0.5, it must be a name or a whole number"),
        ('{"text": "good", "label": "c"}', {"classes": ["a", "b"]}, LINE_2 + "'c' is none of the 2 classes a, b"),
        (
            '{"text": "good", "label": 1e39}',
            {"labels": "numbers"},
            LINE_2 + "label is 1e\\+39, more than a number of 32 bits can be",
        ),
        ('{"text": "good", "label": "c"}', {"labels": "numbers"}, LINE_2 + "label is 'c', it must be a finite number"),
        (
            '{"text": "good", "label": 1e999}',
            {"labels": "numbers"},
            LINE_2 + "label is inf, it must be a finite number",
        ),
        ('{"text": "good", "label": "a", "b": ""}', {"pair": "b"}, LINE_2 + "a text is empty"),
        ("[1]", {}, LINE_2 + "must be an object such as"),
        ('{"text": "good"', {}, LINE_2 + "not JSON"),
        ('{"text": "\\u200b", "label": "a"}', {}, LINE_2 + "the tokenizer finds no token in this text"),
        ('{"text": ["good", "film"], "label": ["a"]}', {"labels": "tags"}, LINE_2 + "2 words have 1 tags"),
        (
            '{"text": "good film", "label": ["a"]}',
            {"labels": "tags"},
            LINE_2 + "text is 'good film', it must be a list",
        ),
    ],
)
def test_what_is_wrong_with_a_line_is_told_with_its_place(
    line: str, arguments: dict[str, Any], message: str, tmp_path: Path, tokenizer: str
) -> None:
    good = {"tags": '{"text": ["good"], "label": ["a"]}', "numbers": '{"text": "good", "label": 1}'}.get(
        arguments.get("labels", ""), '{"text": "good", "label": "a", "b": "bad"}'
    )
    (tmp_path / "train.jsonl").write_text(f"{good}\n{line}\n")
    (tmp_path / "test.jsonl").write_text(f"{good}\n")
    with pytest.raises(ValueError, match=message):
        load(tmp_path, tokenizer, test="test.jsonl", **arguments)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.csv", b"text,label\ngood,a,b\n", r"train\.csv:2: 3 values, the header has 2 columns"),
        ("train.csv", b'text,label\n"good\n', r"train\.csv:2: "),
        ("train.csv", b"", r"train\.csv: has no header"),
        ("train.csv", b"text,label,text\na,b,c\n", r"train\.csv: the header names the column 'text' twice"),
        ("train.tsv", b"text\tlabel\n\xff\ta\n", r"train\.tsv:2: not a text in UTF-8 .* \(Excel: CSV UTF-8\)"),
        ("train.jsonl", b"\n\n", r"train\.jsonl: holds no texts"),
        ("train.conll", b"John O\nlives\n", r"train\.conll:2: 'lives' has one value"),
        ("train.conll", b"John B-PER\nlives per\n\n" * 9, "the tag 'per' is neither O nor such as B-per and I-per"),
        ("train.jsonl", b'{"text": "a \\ud83d", "label": "x"}\n', r"train\.jsonl:1: text is .* half of a character"),
        ("train.jsonl", b'{"text": "a", "label": "\\ud83d"}\n', r"train\.jsonl:1: label is .* half of a character"),
        ("train.csv", b"text,label\na,1\nb,2\nc,3\n", r"train\.csv: 3 texts are too few .* a class of its own; if"),
    ],
)
def test_files_of_another_kind_are_refused(
    name: str, content: bytes, message: str, tmp_path: Path, tokenizer: str
) -> None:
    (tmp_path / name).write_bytes(content)
    labels = "tags" if name.endswith("conll") else "classes"
    with pytest.raises(ValueError, match=message):
        load(tmp_path, tokenizer, train=name, labels=labels)


def test_a_line_without_an_end_is_not_read_whole(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wildflower.tasks.rows.MAX_LINE_BYTES", 40)
    (tmp_path / "train.jsonl").write_text('{"text": "good", "label": "a"}\n' + "x" * 100)
    with pytest.raises(ValueError, match=r"train\.jsonl:2: the line has 40 bytes or more"):
        load(tmp_path, tokenizer)


def test_a_label_of_the_test_file_alone_is_refused(tmp_path: Path, tokenizer: str) -> None:
    write_lines(tmp_path / "train.jsonl", *OPINIONS[:2])
    write_lines(tmp_path / "test.jsonl", *OPINIONS)
    with pytest.raises(ValueError, match=r"test\.jsonl:3: 'neutral' is none of the 2 classes negative, positive"):
        load(tmp_path, tokenizer, test="test.jsonl")


# Label sets of sources ------------------------------------------------------------------------------------------------


def silos(folder: Path, tokenizer: str) -> Task:
    """Two silos with tags of their own: people in one, places in the other."""
    (folder / "people.conll").write_text("john B-PER\nlives O\n\n" * 4)
    (folder / "places.conll").write_text("paris B-LOC\nis O\n\n" * 4)
    files = ["people.conll", "places.conll"]
    return load(folder, tokenizer, train=files, test=files, labels="tags", own_labels=True, partition="natural")


def test_each_file_is_a_source_with_its_own_label_set(tmp_path: Path, tokenizer: str) -> None:
    task = silos(tmp_path, tokenizer)
    assert task.label_names == ("B-LOC", "B-PER", "O")
    people, places = (task.label_set(device) for device in (0, 1))
    assert people is not None
    assert places is not None
    assert (people.tolist(), places.tolist()) == ([1, 2], [0, 2])
    assert task.label_sets is not None
    assert task.label_sets.tolist() == [[False, True, True], [True, False, True]]


@pytest.mark.parametrize("devices", [2, 5])
def test_device_n_holds_source_n_where_sources_have_label_sets(devices: int, tmp_path: Path, tokenizer: str) -> None:
    rows = [{"text": "good", "label": f"class {n % 5}", "who": f"source {n % 5}"} for n in reversed(range(20))]
    options = {"source": "who", "own_labels": True, "partition": "natural", "devices": devices}
    task = load(examples(tmp_path, *rows), tokenizer, test="test.jsonl", **options)
    for device in range(devices):
        assert task.train.labels[task.shard(device).train].unique().tolist() == [device]
        assert task.label_set(device).tolist() == [device]  # type: ignore[union-attr]


def test_a_device_is_scored_as_if_its_head_had_its_own_classes_alone(tmp_path: Path, tokenizer: str) -> None:
    """The loss of the device is the cross-entropy over two logits, worked out with a head of two outputs."""
    task = silos(tmp_path, tokenizer)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 3, 4, generator=generator, requires_grad=True)
    labels = task.train.labels[task.shard(0).train[:1]]
    assert labels.tolist() == [[NO_LABEL, 1, 2, NO_LABEL]]
    own = task.for_device(0)
    loss = own.loss(logits, labels)
    loss.backward()
    small = torch.nn.functional.cross_entropy(logits.detach()[:, 1:, 1:3], torch.tensor([[0, 1]]))
    assert loss.item() == pytest.approx(small.item(), rel=1e-6)
    assert logits.grad is not None
    assert not logits.grad[:, 0].any()
    assert logits.grad[:, 1:, 1:3].all()
    best_is_foreign = torch.tensor([9.0, 1.0, 0.0]).view(1, 3, 1).expand(1, 3, 4)
    assert own.answers(best_is_foreign).argmax(1).unique().tolist() == [1]
    assert task.answers(best_is_foreign).argmax(1).unique().tolist() == [0]


def test_without_sources_of_their_own_devices_have_all_classes(tmp_path: Path, tokenizer: str) -> None:
    task = load(examples(tmp_path, *OPINIONS), tokenizer, test="test.jsonl")
    assert task.label_set(0) is None
    assert task.for_device(0) is task


def test_unknown_words_are_the_unknown_token(tmp_path: Path, tokenizer: str) -> None:
    rows = {"text": "xylophone", "label": "a"}, {"text": "zither", "label": "b"}
    task = load(examples(tmp_path, *rows), tokenizer, devices=1, test="test.jsonl")
    assert task.train.inputs.tolist() == [[CLS, UNK, SEP]] * 2
