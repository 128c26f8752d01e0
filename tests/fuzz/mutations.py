"""What a hostile sender makes of an honest input: other values inside JSON, other letters, other bytes.

Each function takes what hypothesis draws with. Its choices are ordered from the smallest change to the largest, so that
hypothesis shrinks towards one small change, and the changes of the smallest input that fails are printed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import note
from hypothesis import strategies as st

# What a hostile sender would put in a value's place. Sizes are far above any limit, and still made at once.
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63 - 1, 2**63, -(2**64), 10**30, 0.5, -0.0, 1e308, float("nan")),
    *(float("inf"), "", "0", "trained", "failed: x", "refused: \x1b[2J\n", "\x00", "\u202e", "\ud800", "x" * 5000),
    *([], {}, [[]], [{}], [0] * 3000, [-1] * 3000, [[2**62] * 2] * 200, {"a": {"a": {"a": 1}}}, ["x" * 3000]),
    *({f"k{i}": i for i in range(500)}, "os:system", "wildflower.strategies.method:ClientStep", "../../etc/passwd"),
)
TWICE = None  # what was there
PIECES = (
    "",
    "",
    "[",
    "]",
    "{",
    '"',
    ",",
    "-",
    "=",
    "\n",
    "é",
    "\x00",
    "nan",
    "9" * 400,
    "[" * 500,
    None,
)  # None: twice
NAMES = ("more", "", "__class__", "\x1b[2J", "x" * 300)
NUMBERS = ((2, 0), (-1, 0), (0.5, 0), (1000, 0), (1, 1), (1, -1), (-1, 1), (2, -1))  # times, and plus
WORDS = st.binary(min_size=8, max_size=8)
BYTES = st.binary(min_size=1, max_size=100)
MOST_PLACES = 300

Path = tuple[Any, ...]


class Choices:
    """All choices of one change, out of one draw: a draw takes hypothesis longer than the reading of most inputs.

    Smaller numbers are earlier options, and zeros the first of each, which is what hypothesis shrinks to.
    """

    def __init__(self, draw: st.DrawFn) -> None:
        self.rest = int.from_bytes(draw(WORDS), "big")

    def below(self, limit: int) -> int:
        """A number from 0 to `limit` - 1."""
        self.rest, found = divmod(self.rest, limit)
        return found

    def of(self, options: Sequence[Any]) -> Any:
        """One of `options`."""
        return options[self.below(len(options))]


def changed_json(draw: st.DrawFn, value: Any, copies: int = 50) -> Any:
    """A JSON value of which one to three places are other ones; elements come up to `copies` times. It is no copy."""
    first = Choices(draw)
    value = _changed_once(first, value, copies)
    for _ in range(first.of((0, 0, 0, 1, 2))):
        value = _changed_once(Choices(draw), value, copies)
    return value


def _places(value: Any, path: Path = ()) -> list[Path]:
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in itertools.islice(items, MOST_PLACES):
        if isinstance(inner, dict | list):
            found += _places(inner, (*path, key))
        else:
            found.append((*path, key))
        if len(found) > MOST_PLACES:
            break
    return found


def _changed_once(choices: Choices, value: Any, copies: int) -> Any:
    path = choices.of(_places(value))
    how = choices.below(10)
    if not path:
        return _other(choices, path) if how == 9 else value
    return _with(value, path, lambda inside, key: _changed_at(choices, inside, key, how, path, copies))


def _with(value: Any, path: Path, change: Callable[[Any, Any], None]) -> Any:
    """`value` with a change in the container that holds the path's last key; what is on the way there is copied."""
    value = value.copy()
    if len(path) == 1:
        change(value, path[0])
    else:
        value[path[0]] = _with(value[path[0]], path[1:], change)
    return value


def _changed_at(choices: Choices, inside: Any, key: Any, how: int, path: Path, copies: int) -> None:
    if how == 6 and type(inside[key]) in (int, float):
        factor, more = choices.of(NUMBERS)
        inside[key] = inside[key] * factor + more
        note((path, "becomes", inside[key]))
    elif how == 7:
        del inside[key]
        note((path, "is gone"))
    elif how == 8 and isinstance(inside, dict):
        name = choices.of(NAMES)
        inside[name] = _other(choices, (*path[:-1], name))
    elif how == 9 and isinstance(inside, list):
        times = choices.of((1, 2, copies))
        inside.extend([inside[key]] * times)
        note((path, "comes again", times))
    else:
        inside[key] = _other(choices, path)


def _other(choices: Choices, path: Path) -> Any:
    value = choices.of(VALUES)
    note((path, "becomes", value))
    return value


def as_text(value: Any) -> str:
    """JSON as a hostile sender may write it: with NaN, and with lone surrogates."""
    return json.dumps(value)


def changed_text(draw: st.DrawFn, text: str) -> str:
    """A text of which some letters are gone, doubled or other ones."""
    first = Choices(draw)
    text = _cut(first, text)
    for _ in range(first.of((0, 0, 1, 4))):
        text = _cut(Choices(draw), text)
    return text


def _cut(choices: Choices, text: str) -> str:
    start = choices.below(len(text) + 1)
    end = min(len(text), start + choices.of((1, 1, 0, 3, 20, 200)))
    piece = choices.of(PIECES)
    new = text[start:end] * 2 if piece is TWICE else piece
    note(("letters", start, "to", end, "become", new))
    return text[:start] + new + text[end:]


@st.composite
def messages(draw: st.DrawFn, value: Any, copies: int = 50) -> str:
    """JSON values as texts, of which values or letters are other ones."""
    if draw(st.integers(0, 9)) < 8:
        return as_text(changed_json(draw, value, copies))
    return changed_text(draw, as_text(value))


def changed_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes that have other bits, are overwritten, cut, or longer."""
    choices = Choices(draw)
    place, how = choices.below(len(data) + 1), choices.below(10)
    if how < 3:
        return data[: place - 1] + bytes([choices.below(256)]) + data[place:] if place else data
    if how < 6:
        return data[:place]
    more = draw(BYTES)
    return data[:place] + more + data[place + (len(more) if how < 8 else 0) :]
