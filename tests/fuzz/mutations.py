"""Changes to what comes from outside: values inside JSON, letters, and bytes. Seeded, so that all runs agree."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

# What a hostile sender would put in a value's place. Sizes are far above any limit, and still made at once.
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63 - 1, 2**63, -(2**64), 10**30, 0.5, -0.0, 1e308, float("nan")),
    *(float("inf"), "", "0", "trained", "failed: x", "refused: \x1b[2J\n", "\x00", "\u202e", "\ud800", "x" * 5000),
    *([], {}, [[]], [{}], [0] * 3000, [-1] * 3000, [[2**62] * 2] * 200, {"a": {"a": {"a": 1}}}, ["x" * 3000]),
    *({f"k{i}": i for i in range(500)}, "os:system", "strategies.method:Local", "../../etc/passwd"),
)


def changed_json(rng: random.Random, value: Any, copies: int = 50) -> Any:
    """A copy of a JSON value in which one to three places are other ones; elements come up to `copies` times."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = _changed_once(rng, value, copies)
    return value


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += _places(inner, (*path, key))
        if len(found) > 300:
            break
    return found


def _changed_once(rng: random.Random, value: Any, copies: int) -> Any:
    path = rng.choice(_places(value))
    if not path:
        return copy.deepcopy(rng.choice(VALUES)) if rng.random() < 0.1 else value
    inside = value
    for key in path[:-1]:
        inside = inside[key]
    key, how = path[-1], rng.random()
    if how < 0.1:
        del inside[key]
    elif how < 0.2 and isinstance(inside, dict):
        inside[rng.choice(("more", "", "__class__", "\x1b[2J", "x" * 300))] = copy.deepcopy(rng.choice(VALUES))
    elif how < 0.3 and isinstance(inside, list):
        inside.extend([copy.deepcopy(inside[key])] * rng.choice((1, 2, copies)))
    elif how < 0.4 and type(inside[key]) in (int, float):
        inside[key] = inside[key] * rng.choice((-1, 2, 1000, 0.5)) + rng.choice((0, 1, -1))
    else:
        inside[key] = copy.deepcopy(rng.choice(VALUES))
    return value


def as_text(value: Any) -> str:
    """JSON as a hostile sender may write it: with NaN, and with lone surrogates."""
    return json.dumps(value)


def changed_text(rng: random.Random, text: str) -> str:
    """A text of which some letters are gone, doubled or other ones."""
    for _ in range(rng.choice((1, 1, 2, 5))):
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.choice((0, 1, 1, 3, 20, 200)))
        new = rng.choice(
            (
                "",
                "",
                "[",
                "]",
                "{",
                '"',
                ",",
                "-",
                "9" * 400,
                "\x00",
                "é",
                "[" * 500,
                "nan",
                "=",
                "\n",
                text[start:end] * 2,
            )
        )
        text = text[:start] + new + text[end:]
    return text


def changed_bytes(rng: random.Random, data: bytes) -> bytes:
    """Bytes that are cut, longer, or have other bits."""
    found, how = bytearray(data), rng.random()
    if how < 0.3:
        return bytes(found[: rng.randrange(len(found) + 1)])
    if how < 0.5:
        place = rng.randrange(len(found) + 1)
        return bytes(found[:place] + rng.randbytes(rng.choice((1, 4, 100))) + found[place:])
    for _ in range(rng.choice((1, 3, 30))):
        if found:
            found[rng.randrange(len(found))] = rng.choice((0, 0xFF, 0x7F, rng.randrange(256)))
    return bytes(found)
