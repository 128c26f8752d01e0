"""A group of settings from the values of a configuration, or in words what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from wildflower.plugins.invalid import must
from wildflower.strategies.params import Params, kebab, to_scalar

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

# What would be right, by the beginning of pydantic's name of an error.
RIGHT = {
    "int_": "a whole number such as {default}",
    "float_": "a number such as {default}",
    "bool_": "true or false",
    "string_": "a text such as '{default}'",
}


def validated(kind: type[Params], values: Mapping[str, Any], prefix: str) -> tuple[Params | None, list[str]]:
    """Return a group of settings and [], or None and what is wrong with it, a sentence a key."""
    names = {kebab(name): field for name, field in kind.model_fields.items()}
    try:
        return kind.model_validate(values), []
    except ValidationError as error:
        lines = []
        for item in error.errors(include_url=False):
            if item["loc"] == ():
                lines.append(item["msg"].removeprefix("Value error, "))
            elif item["loc"][0] != "groups" and item["input"] is not None:  # what is wrong with groups is known
                key = f"{prefix}{item['loc'][0]}"
                default = names[str(item["loc"][0])].get_default(call_default_factory=True)
                lines.append(f"{key} = {item['input']!r}: {_wrong(to_scalar(default), item)}")
        return None, lines


def _wrong(default: object, item: ErrorDetails) -> str:
    """Return what was wrong with one value, and what would be right."""
    for kind, right in RIGHT.items():
        if item["type"].startswith(kind):
            return f"must be {'a text in quotes' if default == '' else right.format(default=default)}"
    return must(item)
