"""Arguments of a task: settings that only some tasks have, such as the columns of a file of texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError


class TaskArguments(BaseModel):
    """What `task-arguments` of a run give a task: fields with a type, bounds, a default and a description.

    They travel within `tasks.task.TaskSpec`. Values must be hashable: tuples in place of lists.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


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
        first = error.errors(include_url=False)[0]
        what = ".".join(map(str, first["loc"]))
        why = first["msg"].removeprefix("Value error, ")
        wrong = f"{what}: {why}" if what else why
        raise ValueError(
            f"arguments of the task {task!r}: {wrong}; the task takes {', '.join(kind.model_fields)}"
        ) from None
