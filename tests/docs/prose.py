"""The rules for text that a test can hold: short sentences, short cells.

`python -m tests.docs.prose` lists what breaks them. A quotation or a piece of code counts as one word, the target of a
link as none.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORDS_OF_A_CELL = 40
WORDS_OF_A_SENTENCE = 35

_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_FENCE = re.compile(r"^( *)(`{3,})[^\n]*\n.*?^\1\2`*$", re.DOTALL | re.MULTILINE)
_ITEM = re.compile(r"^([-*]|\d+\.) ")
# A sentence ends with a full stop in front of a capital, a number, code or a quotation.
_END = re.compile(r"(?<=[.!?])[)\"*]*\s+(?=[A-Z*(\[0-9])")


@dataclass(frozen=True)
class Found:
    """What is too long on a page."""

    kind: str
    words: int
    text: str


def pages() -> list[Path]:
    """Return all pages that people read: README, docs/ and the benchmarks' pages."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").rglob("*.md"))]


def plain(text: str) -> str:
    """Return a text without what is no prose: links' targets, code and quotations."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "Code", text)
    text = re.sub(r'"[^"]*"', "Quotation", text)
    return text.replace("**", "")


def words(text: str) -> int:
    """Return the number of words of a plain text."""
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs and the items of lists of a page, without tables, headings and code."""
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        stripped = line.strip()
        outside = not stripped or stripped.startswith(("#", ">", "|", "<"))
        if outside or _ITEM.match(stripped):
            if lines:
                yield " ".join(lines)
            lines = []
        if not outside and (lines or not line.startswith("    ") or _ITEM.match(stripped)):
            lines.append(_ITEM.sub("", stripped))


def cells(text: str) -> Iterator[str]:
    """Yield the cells of all tables of a page."""
    for line in text.splitlines():
        if line.strip().startswith("|"):
            yield from (cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1])


def too_long(text: str) -> list[Found]:
    """Return the sentences and cells of a page that have too many words."""
    text = _FENCE.sub("\n", _COMMENT.sub("", text))
    found = [Found("cell", words(plain(cell)), cell) for cell in cells(text) if words(plain(cell)) > WORDS_OF_A_CELL]
    for paragraph in paragraphs(text):
        for sentence in _END.split(plain(paragraph)):
            if words(sentence) > WORDS_OF_A_SENTENCE:
                found.append(Found("sentence", words(sentence), sentence))
    return found


if __name__ == "__main__":
    for page in pages():
        if len(sys.argv) < 2 or any(name in str(page) for name in sys.argv[1:]):
            for one in too_long(page.read_text(encoding="utf-8")):
                print(f"{page.relative_to(ROOT)}: {one.kind} of {one.words} words: {one.text}")
