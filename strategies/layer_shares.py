"""Shares of channels that single layers may keep, as a setting says them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any


def layer_shares(text: str) -> dict[str, tuple[float, ...]]:
    """Read shares of single layers: the inside of an inline TOML table, such as "stem = [1], 'stage3_*' = [0, 0.5]".

    Names are those of `wildflower.models.space.Space.of`; a dot in a name needs no quotes, a star does.

    Raises:
        ValueError: it is no such table, or a value is no list of numbers.
    """
    example = "must be like \"stem = [1], 'stage3_*' = [0, 0.5]\""
    try:
        table = tomllib.loads(f"shares = {{{text}}}")["shares"]
    except tomllib.TOMLDecodeError as error:
        # tomllib's words for a key that stands there twice.
        if "immutable namespace" in str(error) or "Duplicate" in str(error):
            raise ValueError(f"{example}: a layer is named twice; give each its shares once") from None
        raise ValueError(f"{example}: {error}") from None
    found = {}
    for name, values in _flat(table):
        if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
            raise ValueError(f"{example}: {name} is no list of numbers, but {values!r}")
        found[name] = tuple(sorted(float(value) for value in values))
    return found


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """TOML reads `stage1.stream = ...` as a table in a table."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
