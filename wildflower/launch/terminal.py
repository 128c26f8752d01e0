"""Tables on a terminal, however narrow: no word and no figure of theirs is cut."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from textwrap import wrap

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

BESIDE = 3  # letters that a column takes beside its text: blanks and a line
MAX_WORD = 24  # longer words, such as paths, may be folded
BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:%|[kMGT]?B|Mbit/s|min|h|d|s)(?![\w/]))")
NO_BREAK = "\N{NO-BREAK SPACE}"


def terminal() -> Console:
    """Return the terminal that commands print to, which shows `mine:Anchor` as it is and not with an emoji."""
    return Console(emoji=False)


def say(console: Console, text: str, before: str = "", style: str = "") -> None:
    """Print a text as it is, in lines of any length, behind words in a style of Rich such as "Error: ", if any."""
    console.print(Text.assemble((before, style), text), soft_wrap=True)


def tables_of(title: str, headers: Sequence[str], rows: Iterable[Sequence[str]], width: int) -> list[Table]:
    """A table of texts as one or, where its columns do not stand side by side, as several below each other.

    Each of them has the first column, which says what a row is about.

    Args:
        headers: of the columns, as many as every row has texts.
        width: of the terminal, in letters.
    """
    cells = [list(row) for row in rows]
    columns = list(zip(headers, *cells, strict=True))
    least = [max(map(_longest_word, texts)) for texts in columns]
    parts: list[list[int]] = [[0]]
    for number in range(1, len(columns)):
        if len(parts[-1]) > 1 and _taken([least[n] for n in [*parts[-1], number]]) > width:
            parts.append([0])
        parts[-1].append(number)
    return [
        _table(title if place == 0 else "", [columns[n] for n in part], [least[n] for n in part], width)
        for place, part in enumerate(parts)
    ]


def _table(title: str, columns: Sequence[Sequence[str]], least: Sequence[int], width: int) -> Table:
    table = Table(title=title or None, title_justify="left")
    widths = _widths(least, [max(map(len, texts)) for texts in columns], width)
    for (header, *_), letters in zip(columns, widths, strict=True):
        table.add_column(escape(_wrapped(header, letters)), overflow="fold", width=letters)
    for row in zip(*(texts for _, *texts in columns), strict=True):
        table.add_row(*(escape(_wrapped(text, letters)) for text, letters in zip(row, widths, strict=True)))
    return table


def _widths(least: Sequence[int], wanted: Sequence[int], width: int) -> list[int]:
    """Each column's width: its longest word, and of what is left letter by letter as much as its text takes."""
    widths = list(least)
    left = width - _taken(widths)
    while left > 0 and (short := [n for n, letters in enumerate(widths) if letters < wanted[n]]):
        for number in short[:left]:
            widths[number] += 1
        left -= len(short[:left])
    return widths


def _taken(widths: Sequence[int]) -> int:
    return sum(widths) + BESIDE * len(widths) + 1


def _longest_word(text: str) -> int:
    return max((min(len(word), MAX_WORD) for word in _joined(text).split(" ")), default=1)


def _joined(text: str) -> str:
    """A text in which no line ends between a figure and its unit."""
    return BEFORE_UNIT.sub(NO_BREAK, text)


def _wrapped(text: str, letters: int) -> str:
    """A text in lines of so many letters; Rich would end them anywhere between two words."""
    lines = (wrap(line, letters, break_on_hyphens=False) for line in _joined(text).splitlines())
    return "\n".join(line for found in lines for line in found).replace(NO_BREAK, " ")
