"""Runs over texts: arguments of the task, the vocabulary, label sets of the devices' own."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import transformers
from own_words import Words
from safetensors.torch import save_file

from tests.encoders import family_arguments
from tests.small_run import simulated_grid, small_config, started
from tests.tasks.text_files import SEP, VOCABULARY, make_tokenizer, write_lines
from wildflower.launch.python import load
from wildflower.models.weights import with_weights
from wildflower.server_app.app import run
from wildflower.server_app.config import ConfigError, RunConfig
from wildflower.server_app.run_folder import read_rounds
from wildflower.server_app.vocabulary import check_last_token, check_vocabulary
from wildflower.tasks.task import TaskSpec, load_task

SOURCES = 6
SMALL = family_arguments(heads=2, mlp=16, depth=2)
WORDS = ("good", "bad", "great", "poor", "film", "book")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer, and sixteen texts of each of six sources, each of which has two classes of its own and one more."""
    make_tokenizer(tmp_path / "words")
    rows = [
        {"text": f"the {WORDS[source]} {WORDS[number % 6]}", "label": label, "who": f"source {source}"}
        for source in range(SOURCES)
        for number in range(16)
        for label in (("both", f"only {source}a", f"only {source}b")[number % 3],)
    ]
    write_lines(tmp_path / "train.jsonl", *rows)
    return tmp_path


def config(folder: Path, **changes: Any) -> RunConfig:
    arguments = f"tokenizer = '{folder / 'words'}', source = 'who', own_labels = true, max_tokens = 8"
    settings = {
        "task": "text",
        "task_arguments": arguments,
        "data_dir": str(folder),
        "family": "own_words:Words",
        "strategy": "fedavg",
        "partition": "natural",
        "examples_per_device": 0,
        "test_fraction": 0.25,
        "personal__every": 2,
        "personal__epochs": 0,
        "rounds": 2,
        "evaluate_every": 2,
        "local_steps": 4,
    }
    return small_config(folder, **settings | changes)


def test_every_device_is_scored_on_its_own_label_set(folder: Path) -> None:
    """The scores are the shares of right answers among the classes of the device alone."""
    engine, scorer = started(config(folder))
    grid = simulated_grid()
    record = [engine.run_round(grid, number, scorer) for number in (1, 2)][-1].record
    task = load_task(TaskSpec.from_json(engine.settings.task))
    architecture = engine.method.scored_architecture
    [model] = engine.method.models([architecture]).values()
    module = with_weights(model.family, architecture, model.weights).eval()
    expected = {}
    for device in range(SOURCES):
        names = [f"only {device}a", f"only {device}b", "both"]
        own = [task.label_names.index(name) for name in names]
        assert sorted(own) == task.label_set(device).tolist()  # type: ignore[union-attr]
        inputs, labels = task.own_test(device)
        with torch.no_grad():
            answers = [own[int(logits[own].argmax())] for logits in module(inputs.long())]
        expected[device] = sum(a == b for a, b in zip(answers, labels.tolist(), strict=True)) / len(labels)
    assert record["personal_score_by_device"] == pytest.approx(expected)
    assert record["personal_score"] == pytest.approx(sum(expected.values()) / SOURCES)


def test_a_run_over_texts_ends_with_a_journal(folder: Path) -> None:
    """Batches are of several lengths, and devices train and are scored on their own classes."""
    run_dir = run(simulated_grid(), config(folder, personal__epochs=1))
    last = read_rounds(run_dir)[-1]
    assert last.personal_score_by_device is not None
    assert sorted(last.personal_score_by_device) == list(range(SOURCES))
    assert last.personal_failed == 0


def test_few_devices_with_all_classes_have_their_scores_in_the_journal_too(folder: Path) -> None:
    arguments = f"tokenizer = '{folder / 'words'}', source = 'who'"
    run_dir = run(simulated_grid(), config(folder, task_arguments=arguments))
    last = read_rounds(run_dir)[-1]
    assert last.personal_score_by_device is not None
    assert fmean(last.personal_score_by_device.values()) == pytest.approx(last.personal_score)


OF_TEXTS = """
from torch import nn, arange


class Anywhere(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.words, self.inner, self.head = nn.Embedding(47, 8), nn.Linear(8, 64), nn.Linear(64, classes)

    def placed(self, tokens):
        return self.words(tokens)

    def forward(self, tokens):
        return self.head(self.inner(self.placed(tokens)).relu()).transpose(1, 2)


class Placed(Anywhere):
    def __init__(self, classes):
        super().__init__(classes)
        self.positions = nn.Embedding(8, 8)

    def placed(self, tokens):
        return self.words(tokens) + self.positions(arange(tokens.shape[1], device=tokens.device))
"""


@pytest.mark.parametrize(("module", "one_length"), [("Placed", True), ("Anywhere", False)])
def test_a_module_of_ones_own_reads_texts_that_are_cut_to_the_longest_of_a_batch(
    module: str, one_length: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of 5 tokens, where a graph was traced with 8: with a table of positions they are padded again."""
    (folder / "own_of_texts.py").write_text(OF_TEXTS)
    monkeypatch.syspath_prepend(folder)
    rows = [
        {"text": ["we", "saw", word], "label": ["O", "O", f"B-{number % 2}"]} for number, word in enumerate(WORDS * 12)
    ]
    write_lines(folder / "train.jsonl", *rows)
    arguments = f"tokenizer = '{folder / 'words'}', labels = 'tags', max_tokens = 8"
    settings = {"task_arguments": arguments, "partition": "iid", "family": f"own_of_texts:{module}"}
    engine, scorer = started(config(folder, **settings))
    task = load_task(TaskSpec.from_json(engine.settings.task))
    assert task.batch(task.train.inputs[:4], task.train.labels[:4], augment=None)[0].shape == (4, 5)
    assert engine.method.family.one_length is one_length
    lines = engine.run_round(simulated_grid(), 1, scorer).devices
    assert {line["outcome"] for line in lines} == {"trained"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "method",
    [
        {"strategy": "heterofl", "heterofl.masked-loss": False, "widths": "1, 0.5"},
        {"strategy": "inclusivefl", "inclusivefl.head": "own", "family_arguments": f"{SMALL}, depths = [1, 2]"},
    ],
    ids=lambda method: method["strategy"],
)
def test_devices_of_several_sizes_learn_tags(method: dict[str, Any], folder: Path) -> None:
    rows = [
        {"text": ["we", "saw", word], "label": ["O", "O", f"B-{number % 2}"], "who": f"source {number % SOURCES}"}
        for number, word in enumerate(WORDS * 12)
    ]
    write_lines(folder / "train.jsonl", *rows)
    arguments = f"tokenizer = '{folder / 'words'}', source = 'who', labels = 'tags', own_labels = true"
    settings = {"family": "transformers:AutoModel", "family_arguments": SMALL, "below_smallest": "smallest"}
    run_dir = run(simulated_grid(), config(folder, task_arguments=arguments, **settings | method))
    last = read_rounds(run_dir)[-1]
    assert last.devices_replied == last.devices_sampled
    assert (last.metric, last.personal_failed) == ("entity_f1", 0)


@pytest.mark.parametrize(
    ("task", "arguments", "message"),
    [
        ("text", "", "arguments of the task 'text': the argument 'tokenizer' is missing"),
        ("text", "tokenizer = 3", "tokenizer = 3: must be a text in quotes"),
        ("text", "tokenizer = 'x', max_token = 3", "there is no argument 'max_token'; did you mean 'max_tokens'?"),
        ("text", "tokenizer =", "must be like \"tokenizer = 'my-model', max_tokens = 64\""),
        ("digits", "tokenizer = 'x'", "the task 'digits' takes no arguments, got tokenizer"),
    ],
)
def test_arguments_that_the_task_does_not_take_are_refused(task: str, arguments: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"^task-arguments = ") as caught:
        RunConfig.from_run_config({"task": task, "task-arguments": arguments})
    assert message in str(caught.value)


def test_a_spec_travels_with_its_arguments(folder: Path) -> None:
    given = config(folder).own_task_arguments()
    spec = TaskSpec(name="text", devices=2, data_dir=str(folder), arguments=given)
    again = TaskSpec.from_json(spec.to_json())
    assert (again, hash(again)) == (spec, hash(spec))
    with pytest.raises(ValueError, match="the argument 'tokenizer' is missing"):
        TaskSpec(name="text", devices=2)
    with pytest.raises(ValueError, match="max_tokens = 1000000000: must be at most 65536"):
        TaskSpec.from_json({**spec.to_json(), "arguments": {"tokenizer": "x", "max_tokens": 10**9}})


def test_embeddings_of_another_tokenizer_are_refused(folder: Path) -> None:
    task = load_task(
        TaskSpec(name="text", devices=2, data_dir=str(folder), arguments=config(folder).own_task_arguments())
    )
    tokens = len(VOCABULARY)

    def family(**changes: int) -> Words:
        return Words(**{"input_shape": (8,), "classes": 13, "vocabulary": tokens} | changes)  # type: ignore[arg-type]

    check_vocabulary(task, family())
    with pytest.raises(ValueError, match=f"the tokenizer has {tokens} tokens, the embeddings have {tokens - 1} rows"):
        check_vocabulary(task, family(vocabulary=tokens - 1))
    with pytest.raises(ValueError, match=f"the tokenizer has {tokens} tokens, the embeddings have 99 rows"):
        check_vocabulary(task, family(vocabulary=99))
    with pytest.raises(ValueError, match="the tokenizer pads with token 0, the model leaves out token 1"):
        check_vocabulary(task, family(pad_id=1))


def pooled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of one's own beside the experiment, with as many embeddings as it is told."""
    (folder / "beside").mkdir()
    (folder / "beside" / "own_pooled.py").write_text(
        "import torch\nfrom torch import nn\n\n\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, classes, rows=12, hidden=8, broken=False, normed=False):\n"
        "        super().__init__()\n"
        "        self.words, self.head = nn.Embedding(rows, hidden), nn.Linear(hidden, classes)\n"
        "        self.norm = nn.BatchNorm1d(hidden) if normed else nn.Identity()\n"
        "        self.broken = broken\n\n"
        "    def forward(self, x):\n"
        "        if self.broken and type(x) is torch.Tensor:  # and no fake one, by which it is priced\n"
        "            raise RuntimeError('a fault of its own')\n"
        "        return self.head(self.norm(self.words(x).mean(1)))\n"
    )
    monkeypatch.syspath_prepend(str(folder / "beside"))


def test_a_module_that_has_too_few_embeddings_is_refused_before_round_1(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer has 47 tokens. Of levels the smallest is asked too, whose embeddings may be fewer."""
    pooled(folder, monkeypatch)
    assert len(VOCABULARY) == 47
    last = r"network fails on token 46, the last of the tokenizer's 47 \(IndexError: index out .*give its embeddings 47"
    for arguments in ("arguments = {rows = 46}", "levels = [{rows = 46}, {rows = 47}]"):
        with pytest.raises(ConfigError, match=last):
            started(config(folder, family="own_pooled:Net", family_arguments=arguments))
    engine, _ = started(config(folder, family="own_pooled:Net", family_arguments="arguments = {rows = 47}"))
    before = torch.get_rng_state()
    check_last_token(load_task(TaskSpec.from_json(engine.settings.task)), engine.method.family)
    assert torch.equal(torch.get_rng_state(), before)  # the run's own weights are what they are without it
    with pytest.raises(ConfigError, match=r"broken = true}': .*RuntimeError: a fault of its own"):
        started(config(folder, family="own_pooled:Net", family_arguments="arguments = {rows = 47, broken = true}"))
    # The one example that is asked is none for a batch norm without running statistics.
    normed = "arguments = {rows = 47, normed = true}"
    engine, _ = started(config(folder, strategy="heterofl", family="own_pooled:Net", family_arguments=normed))
    assert engine.method.family.norm == "static"


def test_answers_that_do_not_go_with_the_labels_are_refused_before_round_1(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One per text for a label per token, and the other way round."""
    pooled(folder, monkeypatch)
    words = {"family": "transformers:AutoModel", "family_arguments": f"{SMALL}, labels = 'tokens'"}
    with pytest.raises(ConfigError, match="labels = 'tokens', and those of 'text' are of 'sequence': leave labels out"):
        started(config(folder, **words))
    (folder / "beside" / "own_tagger.py").write_text(
        "from torch import nn\n\n\n"
        "class Tagger(nn.Module):\n"
        "    def __init__(self, classes):\n"
        "        super().__init__()\n"
        "        self.words, self.head = nn.Embedding(47, 8), nn.Linear(8, classes)\n\n"
        "    def forward(self, x):\n"
        "        return self.head(self.words(x)).transpose(1, 2)\n"
    )
    with pytest.raises(ConfigError, match="an answer for every token, and the task has one label per input"):
        started(config(folder, family="own_tagger:Tagger"))
    rows = [{"text": ["we", "saw", word], "label": ["O", "O", "B-X"]} for word in WORDS * 4]
    write_lines(folder / "train.jsonl", *rows)
    tags = {"task_arguments": f"tokenizer = '{folder / 'words'}', labels = 'tags'", "partition": "iid"}
    with pytest.raises(ConfigError, match="one answer per input, and the task has a label for every token"):
        started(config(folder, **tags, family="own_pooled:Net", family_arguments="arguments = {rows = 47}"))
    started(config(folder, **tags, family="own_tagger:Tagger"))


@pytest.mark.thorough
def test_a_name_on_the_hub_says_the_sizes_of_its_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_folder(folder, dict(VOCABULARY))
    (folder / "away").mkdir()
    monkeypatch.chdir(folder / "away")
    there = {"config.json", "model.safetensors"}

    def downloaded(name: str, file: str) -> Path:
        if name != "me/tiny" or file not in there:
            raise ValueError(f"{name} has no {file}")
        return model / file

    monkeypatch.setattr("wildflower.models.initial._from_hub", downloaded)
    engine, _ = started(config(folder, family="transformers:AutoModel", initial__weights="me/tiny"))
    family = engine.method.family
    assert list(family.groups.values()) == [16, 2, 16]
    there.remove("config.json")  # then the sizes are to be given
    sizes = family_arguments(heads=2, mlp=16, depth=1)
    started(config(folder, family="transformers:AutoModel", family_arguments=sizes, initial__weights="me/tiny"))
    settings = {"family": "transformers:AutoModel", "family_arguments": sizes}
    with pytest.raises(ConfigError, match=r"^initial.weights = 'mine/pretrained\.pth': there is no file or folder"):
        started(config(folder, **settings, initial__weights="mine/pretrained.pth"))


def model_folder(folder: Path, vocabulary: dict[str, int], *, mlp: int = 16, positions: int = 16) -> Path:
    """A tiny BERT, and beside it a tokenizer of this vocabulary."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": mlp}
    made = transformers.BertConfig(vocab_size=len(VOCABULARY), max_position_embeddings=positions, **sizes)
    transformers.BertModel(made).save_pretrained(folder / "model")
    file = make_tokenizer(folder / "model") / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"] = vocabulary
    file.write_text(json.dumps(content))
    return folder / "model"


def test_another_vocabulary_of_the_same_size_than_the_models_own_is_refused(folder: Path) -> None:
    numbers = list(VOCABULARY.values())
    words = [word for word, number in VOCABULARY.items() if number >= 5]
    reversed_ = dict(VOCABULARY) | dict(zip(words, numbers[:4:-1], strict=True))
    model = model_folder(folder, reversed_)
    settings = {"family": "transformers:AutoModel", "initial__weights": str(model)}
    # Of 42 words in the reverse order all have other numbers: there is no middle one.
    with pytest.raises(ConfigError, match=r"^initial.weights = .*: 42 of 47 differ, the first is number 5, 'a' and in"):
        started(config(folder, **settings))
    beside = settings | {"initial__weights": str(model / "model.safetensors")}
    sizes = family_arguments(heads=2, mlp=16, depth=1)
    with pytest.raises(ConfigError, match="42 of 47 differ"):  # the file lies beside its tokenizer
        started(config(folder, **beside, family_arguments=sizes))
    started(config(folder, **settings, initial__names="'embeddings.word_embeddings' = false"))
    arguments = config(folder).task_arguments.replace(str(folder / "words"), str(model))
    started(config(folder, **settings, task_arguments=arguments))


@pytest.mark.thorough
def test_only_embeddings_of_tokens_count_as_embeddings(folder: Path) -> None:
    """An MLP, or a table of positions, with more rows than the vocabulary has tokens is none."""
    words = [word for word, number in VOCABULARY.items() if number >= 5]
    reversed_ = dict(VOCABULARY) | dict(zip(words, list(VOCABULARY.values())[:4:-1], strict=True))
    settings = {
        "family": "transformers:AutoModel",
        "initial__weights": str(model_folder(folder, reversed_, mlp=64, positions=64)),
    }
    with pytest.raises(ConfigError, match="42 of 47 differ"):
        started(config(folder, **settings))
    started(config(folder, **settings, initial__names="'embeddings.word_embeddings' = false"))


def test_embeddings_of_a_module_of_ones_own_are_compared_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not say its vocabulary, and has one spare row."""
    pooled(folder, monkeypatch)
    words = [word for word, number in VOCABULARY.items() if number >= 5]
    reversed_ = dict(VOCABULARY) | dict(zip(words, list(VOCABULARY.values())[:4:-1], strict=True))
    model = model_folder(folder, reversed_)
    for file in ("config.json", "model.safetensors"):
        (model / file).unlink()
    save_file({"words.weight": torch.ones(48, 8)}, model / "model.safetensors")
    settings = {"family": "own_pooled:Net", "family_arguments": "arguments = {rows = 48}"}
    with pytest.raises(ConfigError, match="42 of 47 differ"):
        started(config(folder, **settings, initial__weights=str(model)))


def test_words_in_place_of_free_tokens_and_behind_the_last_are_the_models_vocabulary(folder: Path) -> None:
    free = {(f"[unused{n}]" if token in ("red", "blue") else token): n for token, n in VOCABULARY.items()}
    del free["[unused46]"]
    assert list(free)[-1] == "[unused45]"
    started(config(folder, family="transformers:AutoModel", initial__weights=str(model_folder(folder, free))))


@pytest.mark.thorough
def test_the_family_learns_the_separator_of_pairs_from_the_tokenizer(folder: Path) -> None:
    rows = [{"text": f"the {WORDS[n % 6]}", "other": f"a {WORDS[n % 5]}", "label": "ab"[n % 2]} for n in range(96)]
    write_lines(folder / "train.jsonl", *rows)
    arguments = f"tokenizer = '{folder / 'words'}', max_tokens = 8"
    settings = {"family": "transformers:AutoModel", "family_arguments": SMALL, "partition": "iid"}
    for task_arguments, separator in ((arguments, -1), (f"{arguments}, pair = 'other'", SEP)):
        engine, _ = started(config(folder, task_arguments=task_arguments, **settings))
        assert engine.method.family.separator == separator


@pytest.mark.thorough
def test_a_separator_inside_of_a_text_is_refused_where_the_model_goes_by_it(folder: Path) -> None:
    rows = [{"text": f"the {WORDS[n % 6]}", "other": "a [SEP] b", "label": "ab"[n % 2]} for n in range(96)]
    write_lines(folder / "train.jsonl", *rows)
    arguments = f"tokenizer = '{folder / 'words'}', max_tokens = 8, pair = 'other'"
    settings = {"family": "transformers:AutoModel", "partition": "iid", "task_arguments": arguments}
    with pytest.raises(ConfigError, match=r"train\.jsonl:\d+: a text of this pair holds the tokenizer's separator"):
        started(config(folder, family_arguments=SMALL, **settings))
    for other in (family_arguments("distilbert"), family_arguments(type_vocab_size=1)):
        started(config(folder, family_arguments=other, **settings))


def test_a_run_with_other_embeddings_ends_before_round_1(folder: Path) -> None:
    with pytest.raises(ConfigError, match="the embeddings have 7 rows: take the tokenizer of this model"):
        started(config(folder, family_arguments="vocabulary = 7"))
    with pytest.raises(ConfigError, match="it reads characters"):
        started(config(folder, family="bert-tiny"))


@pytest.mark.thorough
def test_a_model_of_transformers_is_cut_by_itself(folder: Path) -> None:
    sizes = "hidden_size = 16, num_hidden_layers = 1, num_attention_heads = 2, intermediate_size = 16"
    model = {
        "family": "transformers:AutoModelForSequenceClassification",
        "family_arguments": f"model = {{model_type = 'bert', {sizes}}}",
        "strategy": "heterofl",
        "below_smallest": "smallest",
    }
    run_dir = run(simulated_grid(), config(folder, **model))
    assert all(record.devices_replied == 4 for record in read_rounds(run_dir))
    assert type(load(run_dir).model()) is transformers.BertForSequenceClassification
