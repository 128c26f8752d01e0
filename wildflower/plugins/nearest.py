"""Names near to one that there is not: the end of an error message."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_LETTERS = 100
"""Of a name from outside that is compared."""

LIKENESS = 0.6
"""How alike two names are, of 1, for one to be meant by the other; difflib's own default."""


def near(name: object, valid: Iterable[str], *, most: int = 3, likeness: float = 0.5) -> list[str]:
    """Return the valid names nearest to a name, up to `most`, the nearest first."""
    return difflib.get_close_matches(str(name)[:MAX_LETTERS], list(valid), n=most, cutoff=likeness)


def did_you_mean(name: object, valid: Iterable[str], *, most: int = 3, likeness: float = 0.5) -> str:
    """Return the nearest valid names in words, up to `most`; "" where none is near."""
    close = near(name, valid, most=most, likeness=likeness)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else ""


def nearest(name: object, valid: Iterable[str]) -> str:
    """Return the nearest valid names in words, or all of them where none is near."""
    names = sorted(valid)
    return did_you_mean(name, names) or f"valid are {', '.join(names)}"


def nearest_part(name: object, parts: Iterable[str]) -> str:
    """Return the nearest names of what a thing has, such as a model's blocks, or all it has where none is near."""
    parts = list(parts)
    return did_you_mean(name, parts, likeness=LIKENESS) or "it has " + (", ".join(map(repr, parts)) or "none")
