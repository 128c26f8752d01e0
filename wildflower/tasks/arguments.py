"""Arguments of a task: settings that only some tasks have, such as the columns of a file of texts."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.config import JsonDict

from wildflower.plugins.nearest import LIKENESS, did_you_mean

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


class TaskArguments(BaseModel):
    """What `task-arguments` of a run give a task: fields with a type, bounds, a default and a description.

    They travel within `wildflower.tasks.spec.TaskSpec`. Values must be hashable: tuples in place of lists.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


FOLDER: JsonDict = {"folder": True}
"""The `json_schema_extra` of a field that may name a folder. A relative one is below the place of the command."""

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
LISTS: dict[object, str] = {int: "[16, 16]", float: "[0.5, 0.25]", str: "['a', 'b']"}

Arguments = TypeVar("Arguments", bound=TaskArguments)


def read_arguments(task: str, kind: type[Arguments] | None, values: Mapping[str, Any]) -> Arguments | None:
    """The arguments of a task from values by name; ValueError says which is wrong, and what the task takes."""
    if kind is None:
        if values:
            raise ValueError(f"the task {task!r} takes no arguments, got {', '.join(values)}")
        return None
    try:
        # By way of JSON, in which a list may stand for a tuple.
        return kind.model_validate_json(json.dumps(dict(values), default=str))
    except ValidationError as error:
        raise ValueError(f"arguments of the task {task!r}: {_wrong(kind, error)}") from None


def _wrong(kind: type[TaskArguments], error: ValidationError) -> str:
    """What is wrong first, and what would be right; an argument that there is not before one that is missing."""
    first = min(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    if not first["loc"]:
        return first["msg"].removeprefix("Value error, ")
    name, *inside = map(str, first["loc"])
    if first["type"] == "extra_forbidden":
        meant = did_you_mean(name, kind.model_fields, most=1, likeness=LIKENESS)
        task_takes = f"task takes {', '.join(kind.model_fields)}"
        return f"there is no argument {name!r}; " + (f"{meant} The {task_takes}" if meant else f"the {task_takes}")
    if first["type"] == "missing":
        return f"the argument {name!r} is missing; the task takes {', '.join(kind.model_fields)}"
    where = name + "".join(f"[{part}]" for part in inside if part.isdigit())
    if first["type"] == "tuple_type":
        right = f"must be a list such as {_list_like(kind.model_fields[name].annotation)}"
    else:
        right = must(first)
    return f"{where} = {reprlib.repr(first['input'])}: {right}"


def must(item: ErrorDetails) -> str:
    """Say what a value must be, from an error of pydantic's."""
    if item["type"] == "string_too_short" and item["ctx"]["min_length"] == 1:
        return "must not be empty"
    kind, _, what = item["type"].partition("_")
    if what in ("type", "parsing") and kind in KINDS:
        return f"must be {KINDS[kind]}"
    if item["type"] in BOUNDS:
        bounds = {
            key: f"{value:g}" if isinstance(value, float) else value for key, value in item.get("ctx", {}).items()
        }
        return BOUNDS[item["type"]].format(**bounds)
    return re.sub(r"^\w+ should ", "must ", item["msg"].removeprefix("Value error, "))


def in_words(error: ValidationError) -> str:
    """What pydantic finds wrong with a file, in one line: the first of its errors, and how many more there are."""
    first, *others = error.errors(include_url=False)
    key = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        text = f"the key {key!r} is missing"
    elif first["type"] == "extra_forbidden":
        text = f"there should be no key {key!r}"
    elif first["type"] == "json_invalid":
        text = f"it is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}"
    elif key:
        text = f"{key} = {reprlib.repr(first['input'])}: {must(first)}"
    else:  # the model's own words are a sentence
        text = must(first) if first["type"] == "value_error" else f"it {must(first)}"
    return text + (f" (and {len(others)} more)" if others else "")


def _list_like(annotation: object) -> str:
    """A list of what a field holds, as it stands in an experiment file."""
    while get_origin(annotation) is not None:
        annotation = get_args(annotation)[0]
    return LISTS[annotation]
