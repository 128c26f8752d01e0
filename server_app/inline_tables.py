"""Values as TOML, and keys whose text is the inside of an inline table, such as "exits = [1, 2, 3], kernel = 5"."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any


def parse_arguments(text: str, like: str = "exits = [1, 2, 3], kernel = 5") -> dict[str, Any]:
    """The arguments that a text of `family-arguments` stands for. Raises ValueError, with what they are `like`."""
    try:
        return tomllib.loads(f"arguments = {{{text}}}")["arguments"]
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f'must be like "{like}": {error}') from None


def rates_of(text: str) -> dict[str, Any]:
    """Return what `learning-rates` holds: part of the model -> how many times the learning rate it has."""
    return flat(parse_arguments(text, like="classifier = 10, 'encoder.layer.0' = 0.1"))


def weights_of(text: str) -> dict[str, str]:
    """Return what `initial.weights` names: member of a choice -> file, folder or name; of another family "" -> it."""
    if not re.match(r"\s*\w+\s*=\s*['\"]", text):
        return {"": text}
    like = "large = 'a.safetensors', small = 'b.safetensors'"
    found = parse_arguments(text, like)
    if not all(isinstance(source, str) and source for source in found.values()):
        raise ValueError(f'must be like "{like}"')
    return found


def tables_flat(values: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return a configuration whose tables are flat keys, where `keys` are those of all settings.

    Other values that are tables stay as they are, and are wrong.
    """
    names = {key.partition(".")[0] for key in keys if "." in key}
    found: dict[str, Any] = {}
    for key, value in values.items():
        is_table = isinstance(value, dict) and value and key in names
        found |= flat(value, f"{key}.") if is_table else {key: value}
    return found


def flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as flat keys: {"part": {"key": 1}} -> {"part.key": 1}."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def to_toml(value: object) -> str:
    """A setting's value as TOML writes it."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # inf, -inf and nan, which are no JSON
    # JSON's texts, numbers and truth values are TOML's, but for one character that JSON need not escape.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
