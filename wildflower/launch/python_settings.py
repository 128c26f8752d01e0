"""Settings, grids and rows as Python gives them, for the functions of `wildflower.launch.python`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from wildflower.launch.experiment_file import SettingsError, as_overrides, as_text
from wildflower.launch.objects import method_reference
from wildflower.launch.sweeps import Row, make_rows, read_rows


def _key(name: object) -> str:
    if not isinstance(name, str):
        raise SettingsError(f"{name!r} is no key of a run's configuration: it must be a text, such as 'learning_rate'")
    return name.replace("_", "-")


def grid_of(grid: object, prefix: str = "") -> dict[str, list[str]]:
    """The values of every key as texts; a dict in place of values has those of a method's own keys."""
    if not isinstance(grid, Mapping):
        raise SettingsError(
            f'grid = {grid!r}: must be a dict of keys and their values, such as {{"strategy": ["heterofl", "fedavg"]}}'
        )
    texts: dict[str, list[str]] = {}
    for name, values in grid.items():
        key = f"{prefix}{_key(name)}"
        if isinstance(values, Mapping) and not values:
            raise SettingsError(f"grid {key}: there is no key of the method, such as {{{key!r}: {{'mu': [0.1, 1]}}}}")
        found = grid_of(values, f"{key}.") if isinstance(values, Mapping) else {key: _values(key, values)}
        if twice := next((one for one in found if one in texts), None):
            raise SettingsError(f"grid {twice}: it is given twice: put all its values into one list")
        texts |= found
    return texts


def space_of(search: object, prefix: str = "") -> dict[str, Any]:
    """Return what is searched by key; a dict in place of values has those of a method's own keys."""
    if not isinstance(search, Mapping):
        raise SettingsError(
            f'search = {search!r}: must be a dict of keys and their ranges, such as {{"learning_rate": (0.001, 0.3)}}'
        )
    found: dict[str, Any] = {}
    for name, values in search.items():
        key = f"{prefix}{_key(name)}"
        found |= space_of(values, f"{key}.") if isinstance(values, Mapping) else {key: values}
    return found


def _values(key: str, values: object) -> list[str]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise SettingsError(f"grid {key} = {values!r}: must be a list of values")
    values = [*values]
    if of_several := next((value for value in values if isinstance(value, Mapping)), None):
        first, value = next(iter(of_several.items()), ("KEY", "VALUE"))
        raise SettingsError(
            f"grid {key}: {of_several!r} is a set of settings, and a grid has lists of values: "
            f"{{{key!r}: {{{first!r}: [{value!r}, ...]}}}}. Settings that go together are rows"
        )
    texts = [as_text(key, value) for value in values]
    if not texts or len(set(texts)) < len(texts):
        raise SettingsError(f"grid {key}: there is no value, or one stands there twice")
    return texts


def with_dashes(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the keys that their names in Python stand for, at every level."""
    return {_key(name): with_dashes(value) if isinstance(value, Mapping) else value for name, value in settings.items()}


def overrides_of(settings: Mapping[str, Any]) -> list[str]:
    """Settings as the command takes them; SettingsError for what is no setting's value."""
    return as_overrides(with_dashes(settings))


def rows_of(rows: Mapping[str, Mapping[str, Any]] | str | os.PathLike[str] | None) -> list[Row]:
    """Return rows of a dict or a file; SettingsError for what is neither."""
    if rows is None:
        return []
    if isinstance(rows, str | os.PathLike):
        return read_rows(Path(rows))
    if not isinstance(rows, Mapping):
        raise SettingsError(
            f'rows = {rows!r}: must be a dict of named settings, such as {{"slow": {{"learning_rate": 0.01}}}}, or the '
            "name of a file of them"
        )
    return make_rows({n: with_dashes(r) if isinstance(r, Mapping) else r for n, r in rows.items()}, "rows")


def by_reference(settings: Any) -> tuple[Any, list[type]]:
    """Return a grid or rows with references in place of classes of methods, and these classes."""
    methods: list[type] = []

    def replaced(value: Any) -> Any:
        if isinstance(value, type):
            methods.append(value)
            return method_reference(value)
        if isinstance(value, Mapping):
            return {key: replaced(part) for key, part in value.items()}
        return [replaced(part) for part in value] if isinstance(value, list | tuple) else value

    return replaced(settings), methods
