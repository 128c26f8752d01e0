"""Sentences with ratings of their sentiment by people, in four domains.

Source: Hutto and Gilbert 2014, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media Text":
sentences of movie reviews, of editorials of the New York Times and of Amazon's reviews, and tweets, each with the mean
of 20 ratings from -4 to 4. The sentences are in the source archive of version 0.5 of `vaderSentiment`.
"""

from __future__ import annotations

import io
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Annotated, Literal

from pydantic import Field

from wildflower.tasks.data import DataSet
from wildflower.tasks.hub import existing_folder
from wildflower.tasks.texts import held_out
from wildflower.tasks.tokens import TextArguments, Texts, joined, make_text_data_set, tokenized_once

Domain = Literal["movies", "editorials", "tweets", "products"]
FILES: dict[Domain, str] = {
    "movies": "movieReviewSnippets_GroundTruth.txt",
    "editorials": "nytEditorialSnippets_GroundTruth.txt",
    "tweets": "tweets_GroundTruth.txt",
    "products": "amazonReviewSnippets_GroundTruth.txt",
}
DOWNLOAD = "pip download --no-deps --no-binary :all: vaderSentiment==0.5"
INNER = "hutto_ICWSM_2014.tar.gz"
"""The archive within the archive."""

MAX_BYTES = 1 << 26
"""The limit of an archive or a file; the largest has 2.5 MB."""

TEST_SHARE = 0.2
CLASSES = ("negative", "neutral", "positive")


class SentimentArguments(TextArguments):
    """Arguments of the task `sentiment`."""

    domains: tuple[Domain, ...] = Field(tuple(FILES), description="Which domains there are", min_length=1)
    labels: Literal["classes", "numbers"] = Field("classes", description="Three classes, or the ratings themselves")
    neutral: Annotated[float, Field(ge=0, lt=4)] = Field(
        0.5, description="Ratings from minus this to this are neutral, those below negative, those above positive"
    )


def load(data_dir: str, arguments: SentimentArguments) -> DataSet:
    """Return sentences from the archive or the text files in `data_dir`; natural ids are the domains.

    A fifth of each domain's sentences is the test set. FileNotFoundError where there are none, ValueError with file and
    line for one of another kind.
    """
    if not data_dir:
        raise FileNotFoundError(
            f"no data for the task 'sentiment': {DOWNLOAD} (2.4 MB), and set data-dir to the folder it is in"
        )
    folder = existing_folder("sentiment", data_dir)
    archives = sorted([*folder.rglob("vaderSentiment-0.5.zip"), *folder.rglob("vaderSentiment-0.5.tar.gz")])
    texts = [file for name in FILES.values() for file in sorted(folder.rglob(name))]
    files = archives[:1] or texts

    def read() -> DataSet:
        contents = _unpacked(archives[0]) if archives else {file.name: file.read_bytes() for file in texts}
        trains, tests = [], []
        for domain in dict.fromkeys(arguments.domains):
            if FILES[domain] not in contents:
                raise FileNotFoundError(
                    f"{folder}: no file {FILES[domain]} of the task 'sentiment'; {DOWNLOAD} gets an archive with it"
                )
            sentences = read_sentences(FILES[domain], contents[FILES[domain]], domain, arguments)
            train, test = held_out(sentences, arguments.labels, TEST_SHARE)
            trains.append(train)
            tests.append(test)
        classes = CLASSES if arguments.labels == "classes" else ()
        return make_text_data_set(joined(trains), joined(tests), arguments.labels, arguments, data_dir, classes=classes)

    return tokenized_once("sentiment", files, data_dir, arguments, read)


def read_sentences(name: str, content: bytes, domain: str, arguments: SentimentArguments) -> Texts:
    """Read lines of number, rating and sentence, with tabs between."""
    found = Texts()
    try:
        lines = content.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: not a text in UTF-8 ({error})") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            _, rating_text, sentence = line.split("\t")
            rating = float(rating_text)
            if not -4 <= rating <= 4:
                raise ValueError(rating)
        except ValueError:
            raise ValueError(
                f"{name}:{number}: must be a number, a rating from -4 to 4 and a sentence, with tabs between"
            ) from None
        limit = arguments.neutral
        label = rating if arguments.labels == "numbers" else CLASSES[1 + (rating > limit) - (rating < -limit)]
        found.add(f"{name}:{number}", sentence, label, domain)
    found.check(arguments.labels, name)
    return found


def _unpacked(archive: Path) -> dict[str, bytes]:
    """Return the sentences' files in the archive within the archive, by their names; nothing is written to the disk."""
    try:
        if archive.suffix == ".zip":
            with zipfile.ZipFile(archive) as outer:
                inner = _bounded(outer.open(next(name for name in outer.namelist() if name.endswith(INNER))))
        else:
            with tarfile.open(archive) as outer:
                inner = _files(outer, lambda name: name == INNER)[INNER]
        with tarfile.open(fileobj=io.BytesIO(inner)) as found:
            return _files(found, lambda name: name in FILES.values())
    except (StopIteration, KeyError, OSError, EOFError, tarfile.TarError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{archive}: not the whole archive of vaderSentiment 0.5 ({error!r}); fetch it again"
        ) from None


def _files(archive: tarfile.TarFile, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    found = {}
    for info in archive:
        content = archive.extractfile(info) if info.isfile() and wanted(Path(info.name).name) else None
        if content is not None:
            found[Path(info.name).name] = _bounded(content)
    return found


def _bounded(content: IO[bytes]) -> bytes:
    found = content.read(MAX_BYTES + 1)
    if len(found) > MAX_BYTES:
        raise OSError(f"a file in it has more than {MAX_BYTES} bytes")
    return found
