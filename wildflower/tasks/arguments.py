"""Arguments of a task: settings that only some tasks have, such as the columns of a file of texts."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.config import JsonDict

from wildflower.plugins.invalid import must
from wildflower.plugins.nearest import LIKENESS, did_you_mean


class TaskArguments(BaseModel):
    """The arguments of a task, from `task-arguments` of a run: fields with a type, bounds, a default and a description.

    They travel within `wildflower.tasks.spec.TaskSpec`. Values must be hashable: tuples in place of lists.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


FOLDER: JsonDict = {"folder": True}
"""The `json_schema_extra` of a field that may name a folder. A relative one is below the place of the command."""

LISTS: dict[object, str] = {int: "[16, 16]", float: "[0.5, 0.25]", str: "['a', 'b']"}

Arguments = TypeVar("Arguments", bound=TaskArguments)


def read_arguments(task: str, kind: type[Arguments] | None, values: Mapping[str, Any]) -> Arguments | None:
    """Return the arguments of a task from values by name; ValueError says which is wrong, and what the task takes."""
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
    """Return what is wrong first, and what would be right; an argument that there is not before one that is missing."""
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


def _list_like(annotation: object) -> str:
    """Return a list of what a field holds, as it stands in an experiment file."""
    while get_origin(annotation) is not None:
        annotation = get_args(annotation)[0]
    return LISTS[annotation]
