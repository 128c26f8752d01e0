"""Kinds of labels, and labels that look alike."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable
from decimal import Decimal, InvalidOperation
from typing import Literal

LabelKind = Literal["classes", "numbers", "classes of tokens"]
"""The kinds of labels: int64 (examples,), float32 (examples,) or int64 (examples, sequence)."""

NO_LABEL = -100
"""Stands for the label of a token that has none; PyTorch's losses leave it out."""

INVISIBLE = "\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\ufeff"  # soft hyphen, zero width, marks of direction and order
MISSING = ("", "na", "n/a", "#n/a", "nan", "none", "null", "nil", "<na>", "missing", "?")
"""The texts that programs write for a missing value, as `_loosely` has them."""

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d{1,3})?", re.ASCII | re.IGNORECASE)


def label_text(label: object) -> str:
    """Return the text by which a label is matched: its accents composed (NFC), without what nobody sees at its ends."""
    text, before = unicodedata.normalize("NFC", str(label)), None
    while text != before:
        before, text = text, text.strip().strip(INVISIBLE)
    return text


def shown(label: str) -> str:
    """Return a label as an error prints it: what nobody sees is written as \\u200b, \\xa0 and the like."""
    return ascii(label) if any(not letter.isprintable() or letter in INVISIBLE for letter in label) else repr(label)


def same(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Return groups of labels that nobody tells apart: `1`, `01` and `1.0`, or other kinds of blanks."""
    return _groups(names, _strictly)


def alike(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Return groups of labels that may be slips for each other, and labels that stand for a missing value.

    They differ in capitals, or in blanks, hyphens and underscores. Groups of `same` are among them.
    """
    names = tuple(names)
    found = _groups(names, _loosely)
    grouped = {name for group in found for name in group}
    return found + [(name,) for name in sorted(set(names) - grouped) if _loosely(name) == "missing"]


def _groups(names: Iterable[str], key: Callable[[str], str]) -> list[tuple[str, ...]]:
    groups: dict[str, list[str]] = {}
    for name in sorted(set(names)):
        groups.setdefault(key(name), []).append(name)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def _strictly(name: str) -> str:
    text = unicodedata.normalize("NFKC", name).translate(dict.fromkeys(map(ord, INVISIBLE)))
    text = " ".join(text.split())
    if _NUMBER.fullmatch(text):
        try:
            return str(Decimal(text).normalize() + 0)
        except InvalidOperation:
            return text
    return text


def _loosely(name: str) -> str:
    text = _strictly(name).casefold()
    if not _NUMBER.fullmatch(text):  # a minus is no hyphen
        text = " ".join(re.split(r"[\s_\-]+", text)).strip()
    return "missing" if text in MISSING else text
