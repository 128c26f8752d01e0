"""The keys that pyproject.toml lists: Flower refuses others, without saying which."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from wildflower.plugins.beside import APP
from wildflower.server_app.inline_tables import flat, to_toml

PYPROJECT = APP / "pyproject.toml"


def missing_keys(defaults: Mapping[str, object], listed: Iterable[str]) -> str:
    """Return what to do about keys that pyproject.toml lacks, given its keys `listed`; "" where it has all."""
    listed = set(listed)
    lines = [f"{key} = {to_toml(value)}" for key, value in defaults.items() if key not in listed]
    if not lines:
        return ""
    where = "pyproject.toml, [tool.flwr.app.config], lacks keys, which Flower would refuse"
    return "\n".join([f"{where}; `python -m wildflower.server_app.keys` adds:", *lines])


@cache
def listed_keys(pyproject: Path = PYPROJECT) -> tuple[str, ...] | None:
    """The keys of [tool.flwr.app.config] as Flower flattens them; None where an installation has no such table."""
    if not pyproject.is_file():
        return None
    table = tomllib.loads(pyproject.read_text(encoding="utf-8")).get("tool", {}).get("flwr", {}).get("app", {})
    return tuple(flat(table["config"])) if "config" in table else None
