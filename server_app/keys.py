"""Whether every setting of a method stands where it must: in `RunConfig`, and in pyproject.toml, which Flower reads.

A method's settings are the fields of its dataclass of parameters. What is not in `RunConfig` cannot be set, and Flower
refuses keys that pyproject.toml does not list without saying which. So what is missing is told here, as lines to add.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def missing_fields(strategies: Mapping[str, tuple[type[Any], type[Any]]], have: Iterable[str]) -> str:
    """The lines that the class `RunConfig` lacks of all methods' settings; "" where it has all of its fields `have`."""
    have, lines = set(have), []
    for method, (kind, params) in strategies.items():
        for setting in fields(params):
            name = f"{method.replace('-', '_')}__{setting.name}"
            if name not in have:
                typed = _annotation(setting.type)
                lines.append(f"    {name}: {typed} = {setting.default!r}  # {kind.__module__}, {params.__name__}")
    return _told("server_app/config.py, class RunConfig, lacks settings of a method; add", lines)


def missing_keys(defaults: Mapping[str, object], listed: Iterable[str]) -> str:
    """The lines that pyproject.toml lacks, given its keys `listed`; "" where it has all."""
    listed = set(listed)
    lines = [f"{key} = {_toml(value)}" for key, value in defaults.items() if key not in listed]
    return _told("pyproject.toml, [tool.flwr.app.config], lacks keys, which Flower would refuse; add", lines)


@cache
def listed_keys(pyproject: Path = PYPROJECT) -> tuple[str, ...] | None:
    """The keys of [tool.flwr.app.config] as Flower flattens them; None where an installation has no such table."""
    if not pyproject.is_file():
        return None
    table = tomllib.loads(pyproject.read_text(encoding="utf-8")).get("tool", {}).get("flwr", {}).get("app", {})
    return tuple(_flat(table["config"])) if "config" in table else None


def _annotation(declared: object) -> str:
    name = declared.__name__ if isinstance(declared, type) else str(declared).removeprefix("typing.")
    return "Numbers" if name.startswith("tuple") else name  # a list is text in Flower's configuration


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _told(where: str, lines: list[str]) -> str:
    return "\n".join([f"{where}:", *lines]) if lines else ""
