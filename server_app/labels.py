"""labels.json: how the labels of a simulation's training examples are spread over its devices, for the report.

On hardware the server does not know it, and is not told.
"""

from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from server_app.folders import file_written_whole
from server_app.journal import JournalError
from tasks.arguments import in_words
from tasks.scoring import MAX_CLASSES
from tasks.task import Task

FILE = "labels.json"
# Above these nobody could read a picture of it.
MAX_DEVICES = 200


class Labels(BaseModel):
    """Training examples by device and class: `counts[device][class]`, in the order of `classes`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    classes: Annotated[list[str], Field(max_length=MAX_CLASSES)]
    counts: Annotated[list[list[Annotated[int, Field(ge=0)]]], Field(max_length=MAX_DEVICES)]

    @model_validator(mode="after")
    def _whole(self) -> "Labels":
        if wrong := {len(row) for row in self.counts} - {len(self.classes)}:
            raise ValueError(f"every device needs {len(self.classes)} counts, and one has {wrong.pop()}")
        return self


def write_labels(run_dir: Path, task: Task) -> None:
    """Write the file where there are few enough devices and classes, and labels are classes."""
    if task.label_kind != "classes" or task.spec.devices > MAX_DEVICES or task.classes > MAX_CLASSES:
        return
    examples = [task.shard(device).train for device in range(task.spec.devices)]
    # All devices at once: device d counts its class c as number d * classes + c.
    owners = torch.arange(len(examples)).repeat_interleave(torch.tensor([len(own) for own in examples]))
    numbers = owners * task.classes + task.train.labels[torch.cat(examples)]
    counts = numbers.bincount(minlength=len(examples) * task.classes).view(-1, task.classes).tolist()
    with file_written_whole(run_dir / FILE) as file:
        file.write(Labels(classes=class_names(task), counts=counts).model_dump_json().encode())


def class_names(task: Task) -> list[str]:
    """What the classes of a task are called, each differently: their numbers where they have no names of their own."""
    names = list(task.label_names)
    return names if len(set(names)) == task.classes else [str(number) for number in range(task.classes)]


def read_labels(run_dir: Path) -> Labels | None:
    """What the file of a run holds; None where there is none. Raises JournalError for a file that is none of ours."""
    path = run_dir / FILE
    if not path.exists():
        return None
    try:
        return Labels.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise JournalError(f"{path}: {in_words(error)}") from None
