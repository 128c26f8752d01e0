"""The block of keys in pyproject.toml, which Flower reads: it is written from the settings, and held by a test.

Flower refuses keys that pyproject.toml does not list, without saying which. `python -m server_app.keys` writes the
block anew.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
_BLOCK = re.compile(r"(?<=^\[tool\.flwr\.app\.config\]\n).*?(?=^\[)", re.DOTALL | re.MULTILINE)


def missing_keys(defaults: Mapping[str, object], listed: Iterable[str]) -> str:
    """What to do about keys that pyproject.toml lacks, given its keys `listed`; "" where it has all."""
    listed = set(listed)
    lines = [f"{key} = {to_toml(value)}" for key, value in defaults.items() if key not in listed]
    if not lines:
        return ""
    where = "pyproject.toml, [tool.flwr.app.config], lacks keys, which Flower would refuse"
    return "\n".join([f"{where}; `python -m server_app.keys` adds:", *lines])


@cache
def listed_keys(pyproject: Path = PYPROJECT) -> tuple[str, ...] | None:
    """The keys of [tool.flwr.app.config] as Flower flattens them; None where an installation has no such table."""
    if not pyproject.is_file():
        return None
    table = tomllib.loads(pyproject.read_text(encoding="utf-8")).get("tool", {}).get("flwr", {}).get("app", {})
    return tuple(_flat(table["config"])) if "config" in table else None


def block(defaults: Mapping[str, object], descriptions: Mapping[str, str], parts: Mapping[str, str]) -> str:
    """The lines of the block: every key with its default and what it is.

    Args:
        defaults: value of every key.
        descriptions: a sentence for every key.
        parts: the key that a part begins with -> its title; a method's keys begin a part of their own.
    """
    lines: list[str] = []
    last = ""
    for key, value in defaults.items():
        group = key.partition(".")[0] if "." in key else ""
        if key in parts:
            lines.append(f"# {parts[key]}")
        elif group and group != last:
            lines.append(f"# Settings of {group}")
        last = group
        lines.append(f"{key} = {to_toml(value)}  # {descriptions[key]}")
    return "\n".join(lines) + "\n\n"


def with_block(pyproject: str, text: str) -> str:
    """The text of a pyproject.toml with this block in place of its own."""
    found, count = _BLOCK.subn(lambda _: text, pyproject)
    if count != 1:
        raise ValueError("pyproject.toml has no table [tool.flwr.app.config] in front of another table")
    return found


def to_toml(value: object) -> str:
    """A scalar as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def main() -> None:
    """Write the block of pyproject.toml anew."""
    from server_app.config import PARTS, RunConfig, all_settings
    from strategies.params import kebab

    descriptions = {key: field.description or "" for key, field in all_settings().items()}
    parts = {kebab(name): title for name, title in PARTS.items()}
    text = block(RunConfig().to_dict(), descriptions, parts)
    PYPROJECT.write_text(with_block(PYPROJECT.read_text(encoding="utf-8"), text), encoding="utf-8")


if __name__ == "__main__":
    main()
