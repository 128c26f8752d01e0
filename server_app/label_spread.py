"""labels.json: how the labels of a simulation's training examples are spread over its devices, for the report.

On hardware the server does not know it, and is not told.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, model_validator

from wildflower.server_app.run_folder import read_if_there
from wildflower.server_app.run_records import Record
from wildflower.server_app.whole_files import write_whole
from wildflower.tasks.scoring import MAX_CLASSES
from wildflower.tasks.task import Task

FILE = "labels.json"
MAX_DEVICES = 1000  # of more, those with the lowest numbers are counted; so many take a quarter of a second


class Labels(Record):
    """Training examples by device and class: `counts[device][class]`, in the order of `classes`.

    Attributes:
        tiers: of the devices that are counted.
        devices: how many the run has, of which the first ones are counted.
    """

    classes: Annotated[list[str], Field(max_length=MAX_CLASSES)]
    counts: Annotated[list[list[Annotated[int, Field(ge=0)]]], Field(max_length=MAX_DEVICES)]
    tiers: Annotated[list[str], Field(max_length=MAX_DEVICES)]
    devices: Annotated[int, Field(ge=1)]

    @model_validator(mode="after")
    def _whole(self) -> "Labels":
        if wrong := {len(row) for row in self.counts} - {len(self.classes)}:
            raise ValueError(f"every device needs {len(self.classes)} counts, and one has {wrong.pop()}")
        if len(self.tiers) != len(self.counts):
            raise ValueError(f"{len(self.counts)} devices have {len(self.tiers)} tiers")
        return self


def write_labels(run_dir: Path, task: Task, tier_of: Callable[[int], str]) -> None:
    """Write the file where labels are classes, and these are few enough. `tier_of` gives a device's tier."""
    if task.label_kind != "classes" or task.classes > MAX_CLASSES:
        return
    devices = range(min(task.spec.devices, MAX_DEVICES))
    examples = [task.shard(device).train for device in devices]
    # All devices at once: device d counts its class c as number d * classes + c.
    owners = torch.arange(len(examples)).repeat_interleave(torch.tensor([len(own) for own in examples]))
    numbers = owners * task.classes + task.train.labels[torch.cat(examples)]
    counts = numbers.bincount(minlength=len(examples) * task.classes).view(-1, task.classes).tolist()
    tiers = [tier_of(device) for device in devices]
    labels = Labels(classes=class_names(task), counts=counts, tiers=tiers, devices=task.spec.devices)
    write_whole(run_dir / FILE, labels.model_dump_json())


def class_names(task: Task) -> list[str]:
    """Return what the classes of a task are called, each differently: their numbers where they have no names of their
    own."""
    names = list(task.label_names)
    return names if len(set(names)) == task.classes else [str(number) for number in range(task.classes)]


def read_labels(run_dir: Path) -> Labels | None:
    """Return what the file of a run holds; None where there is none. Raises JournalError for a file that is none of
    ours."""
    return read_if_there(run_dir / FILE, Labels)
