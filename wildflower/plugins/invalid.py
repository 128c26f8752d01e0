"""Errors of pydantic about a value from outside, in one line of plain words."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from wildflower.plugins.nearest import nearest

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

BOUNDS = {
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have {min_length} or more entries, and has {actual_length}",
    "too_long": "must have at most {max_length} entries, and has {actual_length}",
    "string_too_short": "must have at least {min_length} letters",
    "string_too_long": "must have at most {max_length} letters",
    "string_pattern_mismatch": "must be of the form {pattern}",
    "finite_number": "must be a finite number",
}
KINDS = {
    "string": "a text in quotes",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "list": "a list",
    "tuple": "a list",
    "dict": "a table of keys and values",
}


def must(item: ErrorDetails) -> str:
    """Say what a value must be, from an error of pydantic's."""
    if item["type"] == "string_too_short" and item["ctx"]["min_length"] == 1:
        return "must not be empty"
    kind, _, what = item["type"].partition("_")
    if what in ("type", "parsing") and kind in KINDS:
        return f"must be {KINDS[kind]}"
    if item["type"] in BOUNDS:
        bounds = {key: _written(value) for key, value in item.get("ctx", {}).items()}
        return BOUNDS[item["type"]].format(**bounds)
    return re.sub(r"^\w+ should ", "must ", item["msg"].removeprefix("Value error, "))


def _written(bound: object) -> object:
    if isinstance(bound, int) and bound >= 2**31 and bound.bit_count() == 1:
        return f"2^{bound.bit_length() - 1}"
    return f"{bound:g}" if isinstance(bound, float) else bound


def in_words(error: ValidationError, keys: Iterable[str] = ()) -> str:
    """Return the first of pydantic's errors as one line, and how many more there are.

    keys: those that are valid, of which the nearest are named where a key is unknown.
    """
    first, *others = error.errors(include_url=False)
    return one(first, keys) + (f" (and {len(others)} more)" if others else "")


def one(item: ErrorDetails, keys: Iterable[str] = ()) -> str:
    """Return one of pydantic's errors as a line; `keys` as of `in_words`."""
    key = ".".join(map(str, item["loc"]))
    if item["type"] == "missing":
        return f"the key {key!r} is missing"
    if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        shown = reprlib.repr(key)
        return f"unknown key {shown}, {nearest(key, keys)}" if keys else f"there should be no key {shown}"
    if item["type"] == "json_invalid":
        return f"it is not JSON: {item['msg'].removeprefix('Invalid JSON: ')}"
    if key:
        return f"{key} = {reprlib.repr(item['input'])}: {must(item)}"
    return must(item) if item["type"] == "value_error" else f"it {must(item)}"  # a model's own words are a sentence
