"""Texts as tokens: a tokenizer of Hugging Face's turns them into a data set, once per machine."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from wildflower.plugins.extras import needed
from wildflower.tasks.arguments import FOLDER, TaskArguments
from wildflower.tasks.data import DECODED_VERSION, Data, DataSet, Vocabulary, decoded_once, digest
from wildflower.tasks.device_data import check_numbers, in_order
from wildflower.tasks.hub import unreachable
from wildflower.tasks.labels import NO_LABEL

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_CLASSES = 10_000
"""The most labels by name: more are numbers, or texts, that were taken for names."""

TOKENIZED_TOGETHER = 1000

TOKENIZED_VERSION = 3
"""Raised whenever a tokenized data set says something else, so that files of an older release are not read."""

VOCABULARY = "vocab.txt"
SAY_WHICH = ("tokenizer.json", "tokenizer_config.json", "config.json")  # what kind of tokenizer a folder has
HUB_NAME = r"[\w-][\w.-]*(/[\w-][\w.-]*)?"  # of a model, or of a data set: no path

Labels = Literal["classes", "numbers", "tags"]


class TextArguments(TaskArguments):
    """Arguments of every task of texts."""

    tokenizer: str = Field(
        description="The model's tokenizer: a folder of Hugging Face's, by its whole path or in data-dir, or a name on "
        "its hub",
        min_length=1,
        json_schema_extra=FOLDER,
    )
    max_tokens: Annotated[int, Field(ge=3, le=65536)] = Field(
        128, description="Most tokens of a text, with those that the tokenizer adds; longer ones are cut"
    )


@dataclass
class Texts:
    """Texts as they were read, with their labels, in lists of one length.

    Attributes:
        places: where each is from, such as file and line, for errors.
        texts: each one text, or the list of its words where labels are tags.
        labels: each the name of a class, a number, or the list of the tags of the words.
        pairs: the second text of each; [] where there are none.
        sources: what each is from in the real world, such as a person; [] where that is not known.
    """

    places: list[str] = field(default_factory=list)
    texts: list[Any] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)
    pairs: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.texts)

    def add(self, place: str, text: Any, label: Any, source: str = "") -> None:
        """Add a text that has no second one."""
        self.places.append(place)
        self.texts.append(text)
        self.labels.append(label)
        if source:
            self.sources.append(source)

    def picked(self, numbers: Sequence[int]) -> Texts:
        """Some of the texts."""
        lists = (self.places, self.texts, self.labels, self.pairs, self.sources)
        return Texts(*([values[number] for number in numbers] if values else [] for values in lists))

    def check(self, labels: Labels, file: object) -> None:
        """Raise ValueError where a file has no texts, and with its place where one is empty or lacks tags."""
        if not self.texts:
            raise ValueError(f"{file}: holds no texts")
        for number, (place, text) in enumerate(zip(self.places, self.texts, strict=True)):
            parts = [text] if isinstance(text, str) else text
            if self.pairs:
                parts = [*parts, self.pairs[number]]
            if not parts or not all(part.strip() for part in parts):
                raise ValueError(f"{place}: a text is empty: leave this example out, or fill it in")
            if labels == "tags" and len(self.labels[number]) != len(text):
                raise ValueError(f"{place}: {len(text)} words have {len(self.labels[number])} tags: each word has one")


def joined(parts: Sequence[Texts]) -> Texts:
    """Return texts of several files as one, in order."""
    names = [each.name for each in fields(Texts)]
    return Texts(**{name: [value for part in parts for value in getattr(part, name)] for name in names})


def tokenized_once(
    name: str, files: Sequence[Path], data_dir: str, arguments: TextArguments, read: Callable[[], DataSet]
) -> DataSet:
    """`decoded_once` under a key of the contents of the files, of the tokenizer and of the arguments."""
    tokenizer = _folder(arguments.tokenizer, data_dir)
    found = [] if tokenizer is None else sorted(file for file in tokenizer.iterdir() if _is_of_tokenizer(file))
    key = digest(
        decoded=DECODED_VERSION,
        tokenized=TOKENIZED_VERSION,
        files=[(str(file), _hash(file)) for file in files],
        tokenizer=[(file.name, _hash(file)) for file in found] or arguments.tokenizer,
        arguments=arguments.model_dump(mode="json", exclude={"tokenizer"}),
    )
    return decoded_once(name, key, read)


def _hash(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _is_of_tokenizer(file: Path) -> bool:
    """Return whether a file of a model's folder can tell of its tokenizer; weights cannot, and are large."""
    return file.is_file() and file.suffix in (".json", ".txt", ".model", ".jinja")


def _has_capitals(vocabulary: Path) -> bool:
    """Return whether a vocabulary of one token a line has words with capitals, beside tokens like [PAD]."""
    lines = vocabulary.read_text(encoding="utf-8").splitlines()
    return any(line != line.lower() for line in lines if not re.fullmatch(r"\[.*\]", line))


def _folder(name: str, data_dir: str) -> Path | None:
    """Return the folder that a tokenizer's name stands for; None where it is a name of the hub."""
    places = [Path(data_dir).expanduser() / name] if data_dir else []
    return next((place for place in [*places, Path(name).expanduser()] if place.is_dir()), None)


def load_tokenizer(name: str, data_dir: str, *, words: bool = False) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder, or of a name on the hub.

    Args:
        name: as in `TextArguments`.
        data_dir: of the task; "" where it has none.
        words: texts come as lists of words.

    Raises:
        MissingExtraError: the library is not there.
        FileNotFoundError: the tokenizer is not there.
        ValueError: it has no padding token, or cannot say which word a token is of and which texts it cut.
    """
    with needed("transformers", "a task of texts"):
        from transformers import AutoTokenizer
    folder = _folder(name, data_dir)
    if folder is None and not re.fullmatch(HUB_NAME, name):
        raise FileNotFoundError(f"tokenizer = {name!r}: no such folder{f', nor below {data_dir}' if data_dir else ''}")
    # Without a network every request to the hub is tried many times.
    options: dict[str, Any] = {"local_files_only": folder is not None or bool(unreachable())}
    if words:
        # Tokenizers of bytes, such as RoBERTa's, know a word's beginning by the space in front of it.
        options["add_prefix_space"] = True
    try:
        if folder and (folder / VOCABULARY).is_file() and not any((folder / file).exists() for file in SAY_WHICH):
            options |= {"tokenizer_type": "bert", "do_lower_case": not _has_capitals(folder / VOCABULARY)}
        tokenizer = AutoTokenizer.from_pretrained(str(folder or name), use_fast=True, **options)
    except (OSError, ValueError, KeyError) as error:
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FileNotFoundError(
            f"tokenizer = {name!r}: no tokenizer in this folder, nor under this name on Hugging Face's hub ({why}); "
            "give the whole path of a folder with tokenizer.json or vocab.txt, or connect to the hub once"
        ) from None
    if tokenizer.pad_token_id is None:
        raise ValueError(f"tokenizer = {name!r}: it has no padding token, which texts of unequal length need")
    if not tokenizer.is_fast:
        raise ValueError(f"tokenizer = {name!r}: it is not one of the library tokenizers: give one with tokenizer.json")
    return tokenizer


def make_text_data_set(
    train: Texts,
    test: Texts,
    labels: Labels,
    arguments: TextArguments,
    data_dir: str,
    *,
    classes: Sequence[str] = (),
    own_labels: bool = False,
) -> DataSet:
    """Return the tokens and labels of texts.

    Inputs are int32 (examples, longest), padded at their ends. Of a word's tokens the first has the word's tag.

    Args:
        train, test: what was read.
        labels: what their labels are.
        arguments: the tokenizer and the limit.
        data_dir: of the task.
        classes: names of the classes or tags, in order; () takes all that there are, in alphabetical order.
        own_labels: every source has only the classes that its own training examples have.

    Raises:
        ValueError: what is wrong, with file and line.
    """
    tokenizer = load_tokenizer(arguments.tokenizer, data_dir, words=labels == "tags")
    names = () if labels == "numbers" else tuple(classes) or names_of(train, labels)
    separator = _separator(tokenizer) if train.pairs or test.pairs else -1
    encoded = [_encode(part, labels, tokenizer, arguments.max_tokens) for part in (train, test)]
    longest = max(len(ids) for ids, _, _ in (*encoded[0], *encoded[1]))
    data = []
    for part, rows in zip((train, test), encoded, strict=True):
        inputs = _padded([ids for ids, _, _ in rows], longest, int(tokenizer.pad_token_id)).to(torch.int32)
        data.append(Data(inputs, _labels(part, labels, names, [words for _, words, _ in rows], longest)))
    ids = _sources(train) if train.sources else None
    own = None if ids is None or not own_labels or labels == "numbers" else _label_sets(ids, data[0].labels, len(names))
    unclear = _unclear_pair(train, encoded[0], separator) or _unclear_pair(test, encoded[1], separator)
    cut = sum(was_cut for rows in encoded for _, _, was_cut in rows)
    return DataSet(
        train=data[0],
        test=data[1],
        classes=len(names) or 1,
        natural_ids=ids,
        label_names=names,
        label_sets=own,
        vocabulary=Vocabulary(len(tokenizer), int(tokenizer.pad_token_id), cut, separator, unclear),
    )


def names_of(train: Texts, labels: Labels) -> tuple[str, ...]:
    """Return the names of all classes or tags that texts have, in order; ValueError if they are too many for names."""
    found = {tag for tags in train.labels for tag in tags} if labels == "tags" else set(train.labels)
    if len(found) > MAX_CLASSES:
        raise ValueError(
            f"the labels have {len(found)} different names, more than {MAX_CLASSES}: if they are numbers, say "
            "labels = 'numbers'"
        )
    return in_order(found)


Row = tuple[list[int], list[int | None], bool]
"""The tokens of a text, the word that each is of (None: of none), and whether the text was cut."""


def _separator(tokenizer: Any) -> int:
    """Return the token behind both texts of a pair, if token types say which text is which, as BERT's do.

    Types then follow from the tokens, and need not be kept beside them. -1 where all are 0, as RoBERTa's. They are
    asked for by name: transformers' classes leave them out where a folder names no model's own class.
    """
    probe = tokenizer("a", "a", return_token_type_ids=True)
    ids, types, separator = probe["input_ids"], probe["token_type_ids"], tokenizer.sep_token_id
    if separator is None or ids.count(separator) != 2 or ids[-1] != separator:
        return -1
    first = ids.index(separator) + 1
    return int(separator) if types == [0] * first + [1] * (len(ids) - first) else -1


def _unclear_pair(part: Texts, rows: list[Row], separator: int) -> str:
    """Return where the first pair stands that holds the separator itself; no error yet, for not every model goes by it.

    Without the folder: what is kept in the cache goes by contents, which may lie in another folder the next time.
    """
    if not part.pairs or separator < 0:
        return ""
    unclear = (place for place, row in zip(part.places, rows, strict=True) if row[0].count(separator) != 2)
    return Path(next(unclear, "")).name


def _encode(part: Texts, labels: Labels, tokenizer: Any, max_tokens: int) -> list[Row]:
    rows: list[Row] = []
    added = tokenizer.num_special_tokens_to_add(pair=bool(part.pairs))
    if max_tokens <= added + bool(part.pairs):
        raise ValueError(f"max_tokens = {max_tokens}: the tokenizer itself adds {added} to every text")
    words = labels == "tags"
    for start in range(0, len(part), TOKENIZED_TOGETHER):
        picked = slice(start, start + TOKENIZED_TOGETHER)
        pairs = {"text_pair": part.pairs[picked]} if part.pairs else {}
        options = {"truncation": "longest_first", "max_length": max_tokens, "is_split_into_words": words}
        for number, encoding in enumerate(tokenizer(part.texts[picked], **pairs, **options).encodings):
            if len(encoding.ids) <= added:
                raise ValueError(f"{part.places[start + number]}: the tokenizer finds no token in this text")
            rows.append((encoding.ids, encoding.word_ids if words else [], bool(encoding.overflowing)))
    return rows


def _padded(rows: list[list[int]], longest: int, value: int) -> Tensor:
    padded = torch.full((len(rows), longest), value)
    for row, ids in zip(padded, rows, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    return padded


def _labels(part: Texts, labels: Labels, names: Sequence[str], words: list[list[int | None]], longest: int) -> Tensor:
    if labels == "numbers":
        check_numbers(part.labels)
        return torch.tensor(part.labels, dtype=torch.float32)
    number_of = {name: number for number, name in enumerate(names)}

    def number(name: str, example: int) -> int:
        if name not in number_of:
            known = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
            raise ValueError(f"{part.places[example]}: {name!r} is none of the {len(names)} classes {known}")
        return number_of[name]

    if labels == "classes":
        return torch.tensor([number(name, example) for example, name in enumerate(part.labels)], dtype=torch.int64)
    rows = []
    for example, (tags, of_word) in enumerate(zip(part.labels, words, strict=True)):
        numbers = [number(tag, example) for tag in tags]
        before = zip([None, *of_word[:-1]], of_word, strict=True)
        rows.append([NO_LABEL if word is None or word == last else numbers[word] for last, word in before])
    return _padded(rows, longest, NO_LABEL)


def _sources(train: Texts) -> Tensor:
    number_of = {source: number for number, source in enumerate(sorted(set(train.sources)))}
    return torch.tensor([number_of[source] for source in train.sources])


def _label_sets(sources: Tensor, labels: Tensor, classes: int) -> Tensor:
    """(sources, classes): which classes the examples of each source have."""
    sets = torch.zeros(int(sources.max()) + 1, classes, dtype=torch.bool)
    for source, of_example in zip(sources.tolist(), labels.reshape(len(labels), -1), strict=True):
        sets[source, of_example[of_example != NO_LABEL]] = True
    return sets
