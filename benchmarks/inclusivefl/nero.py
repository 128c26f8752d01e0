"""NERO as a task beside the experiments, `task = "nero:TASK"`: named entities in biomedical sentences.

Each sentence was marked by one of nine annotators.

Source: "NERO: a biomedical named-entity (recognition) ontology with a large, annotated corpus", npj Systems Biology and
Applications; the file is that of the Python package `NERO-nlp`. A record is a mention: its words, its type, and the
sentence. Where in the sentence it stands is not in the file. It is looked up by its words, in sentences that were cut
into words by spaces; those of the other sets were not, and are left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from wildflower.plugins.flower_log import log
from wildflower.tasks.data import DataSet, find_file, installed_data
from wildflower.tasks.hub import existing_folder
from wildflower.tasks.rows import lines_of
from wildflower.tasks.task import Kind
from wildflower.tasks.texts import held_out
from wildflower.tasks.tokens import TextArguments, Texts, joined, make_text_data_set, tokenized_once

FILE = "annotation_results.txt"

PACKAGE, DOWNLOAD = "NERO", "NERO-nlp"

COLUMNS = 31
SENTENCE, ANNOTATOR, WORDS, TYPE, TEXT, SET = 2, 3, 8, 9, 29, 30
"""Columns of a record, counted from 0."""

SETS = "manualset"
"""The beginning of the names of the sets whose sentences are cut into words."""

MIN_MENTIONS = 50
"""The fewest of a type of entities: rarer types are slips of the pen such as `gen`."""

TEST_SHARE = 0.2
OUTSIDE = "O"


class NeroArguments(TextArguments):
    """Arguments of the task `nero`."""

    annotators: tuple[int, ...] = Field(
        (), description="Numbers of the annotators whose sentences are taken, such as [5, 7, 13]; empty takes all"
    )
    own_labels: bool = Field(
        False, description="Whether an annotator has only the tags of their own sentences, and is scored on these"
    )


def load(data_dir: str, arguments: NeroArguments) -> DataSet:
    """Return sentences with tags, from `annotation_results.txt` in `data_dir` or the installed package.

    Natural ids are the annotators; a fifth of each one's sentences is the test set. FileNotFoundError when there are
    none, ValueError for a file of another kind.
    """
    folder = existing_folder("nero", data_dir) if data_dir else _installed()
    file = find_file(folder, FILE, "nero", "the file of the package NERO-nlp")

    def read() -> DataSet:
        of_annotator = read_sentences(file)
        unknown = [number for number in arguments.annotators if str(number) not in of_annotator]
        if unknown:
            raise ValueError(f"{file}: no annotator {unknown[0]}, there are {', '.join(sorted(of_annotator, key=int))}")
        chosen = [str(number) for number in arguments.annotators] or sorted(of_annotator, key=int)
        parts = [held_out(of_annotator[annotator], "tags", TEST_SHARE) for annotator in dict.fromkeys(chosen)]
        train, test = (joined(found) for found in zip(*parts, strict=True))
        types = {tag[2:] for tags in (*train.labels, *test.labels) for tag in tags if tag != OUTSIDE}
        tags = [OUTSIDE, *(f"{prefix}-{kind}" for kind in sorted(types) for prefix in "BI")]
        return make_text_data_set(
            train, test, "tags", arguments, data_dir, classes=tags, own_labels=arguments.own_labels
        )

    return tokenized_once("nero", [file], data_dir, arguments, read)


def _installed() -> Path:
    return installed_data("nero", PACKAGE, DOWNLOAD, FILE, f"its file {FILE}")


def read_sentences(file: Path) -> dict[str, Texts]:
    """Return the sentences of each annotator, by the annotator's number; how many mentions were not found is logged."""
    sentences: dict[tuple[str, str], tuple[str, list[str]]] = {}
    mentions: defaultdict[tuple[str, str], list[tuple[list[str], str]]] = defaultdict(list)
    for place, record in _records(file):
        if not record[SET].startswith(SETS) or not record[TEXT].split():
            continue
        if not record[ANNOTATOR].isdecimal():
            raise ValueError(f"{place}: the annotator is {record[ANNOTATOR]!r}, it must be a number")
        key = (record[ANNOTATOR], record[SENTENCE])
        sentences.setdefault(key, (place, record[TEXT].split()))
        mentions[key].append((record[WORDS].split(), record[TYPE].strip()))
    counts = Counter(kind for found in mentions.values() for _, kind in found)
    known = {kind for kind, count in counts.items() if kind and count >= MIN_MENTIONS}
    missed = 0
    found: dict[str, Texts] = {}
    for key, (place, words) in sentences.items():
        tags, lost = tag_words(words, [mention for mention in mentions[key] if mention[1] in known])
        missed += lost
        found.setdefault(key[0], Texts()).add(place, words, tags, f"{int(key[0]):09d}")
    if not found:
        raise ValueError(f"{file}: no sentence of a set whose name begins with {SETS}")
    log.info("nero: %s of %s mentions are not in their sentence, or within another", missed, counts.total())
    return found


def tag_words(words: list[str], mentions: list[tuple[list[str], str]]) -> tuple[list[str], int]:
    """Return the tag of each word: B-TYPE where a mention begins, I-TYPE where it goes on, O elsewhere.

    Longer mentions are placed first, each at the first place with its words that is still free. Returns the tags, and
    how many mentions have no place.
    """
    tags, missed = [OUTSIDE] * len(words), 0
    for mention, kind in sorted(mentions, key=lambda found: -len(found[0])):
        length = len(mention)
        for start in range(len(words) - length + 1):
            span = slice(start, start + length)
            if length and words[span] == mention and set(tags[span]) == {OUTSIDE}:
                tags[span] = [f"B-{kind}", *[f"I-{kind}"] * (length - 1)]
                break
        else:
            missed += 1
    return tags, missed


def _records(file: Path) -> Iterator[tuple[str, list[str]]]:
    """Records with their file and line; a line end within the sentence parts a record in two lines."""
    lines = lines_of(file, "latin-1")
    _, header = next(lines, (0, ""))
    if len(header.split("\t")) != COLUMNS:
        raise ValueError(f"{file}:1: must have {COLUMNS} columns with tabs between, has {len(header.split(chr(9)))}")
    before = ""
    for number, line in lines:
        values = (before + line).split("\t")
        if len(values) == COLUMNS:
            yield f"{file}:{number}", values
            before = ""
        elif len(values) < COLUMNS:
            before += f"{line} "
        else:
            raise ValueError(f"{file}:{number}: a record has {len(values)} columns, not {COLUMNS}")
    if before.strip():
        raise ValueError(f"{file}: its last record is not whole; fetch it again")


TASK = Kind(load, "transformers:AutoModel", arguments=NeroArguments)
