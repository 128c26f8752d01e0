"""The tasks, what a run says of its task, and what reads the data of one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    Field,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from wildflower.plugins.invalid import in_words
from wildflower.plugins.nearest import LIKENESS, did_you_mean
from wildflower.plugins.reference import PluginError, is_reference, one_sentence, value_of
from wildflower.tasks import (
    digits,
    glue,
    hapt,
    hub,
    idx,
    images,
    npz,
    shakespeare,
    tables,
    texts,
    unimib,
)
from wildflower.tasks.arguments import TaskArguments, read_arguments
from wildflower.tasks.data import DataSet
from wildflower.tasks.device_data import Agreed, UnfitError
from wildflower.tasks.losses import TaskLoss
from wildflower.tasks.metrics import Metric
from wildflower.tasks.partitions import PartitionSettings


@dataclass(frozen=True)
class Kind:
    """A kind of task: how its data are loaded from a data folder, its family, its augmentation.

    `in_time`: the examples of each natural id lie in order of time. `loss` and `metric`: what is minimized and what is
    scored; they go with what the labels are, and None are the usual ones of such labels. `arguments`: the class of the
    task's own arguments; `load` then gets them after the data folder, and `metric` may be a function of them and the
    data set. `label_names`: of the classes, in their order; empty where numbers are all there is. `own`: as `load`, but
    of one device's folder: its examples as they are, with its own `label_names` and without normalization, of which
    those for training or those for testing may be none; None where devices cannot hold data of their own. `fixed`:
    there are as many classes as the task says, whichever of them the files have examples of.
    """

    load: Callable[..., DataSet]
    family: str
    crop_padding: int = 0
    flip: bool = False
    in_time: bool = False
    loss: TaskLoss | None = None
    metric: Metric | Callable[[Any, DataSet], Metric] | None = None
    arguments: type[TaskArguments] | None = None
    label_names: tuple[str, ...] = ()
    own: Callable[..., DataSet] | None = None
    fixed: bool = False


DIGITS = tuple("0123456789")
CLOTHES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
ENCODER = "transformers:AutoModel"  # of whose configuration the weights, or family-arguments, say the sizes

TASKS: dict[str, Kind] = {
    "digits": Kind(digits.load, "cnn3", label_names=DIGITS),
    "mnist": Kind(partial(idx.load, "mnist"), "lenet5", label_names=DIGITS),
    "fashion-mnist": Kind(partial(idx.load, "fashion-mnist"), "lenet5", label_names=CLOTHES),
    "idx": Kind(idx.load_any, "lenet5"),
    "npz": Kind(npz.load, "cnn3", arguments=npz.NpzArguments, own=npz.own),
    "images": Kind(images.load, "cnn3", arguments=images.ImageArguments, own=images.own),
    "table": Kind(tables.load, "mlp", arguments=tables.TableArguments, own=tables.own),
    "cifar10": Kind(partial(hub.load, "cifar10"), "resnet18", crop_padding=4, flip=True, label_names=CIFAR10),
    "cifar100": Kind(partial(hub.load, "cifar100"), "resnet18", crop_padding=4, flip=True),
    # A mirrored house number is another number or none.
    "svhn": Kind(partial(hub.load, "svhn"), "resnet18", crop_padding=4, label_names=DIGITS),
    "stl10": Kind(partial(hub.load, "stl10"), "resnet18", crop_padding=4, flip=True),
    "femnist": Kind(partial(hub.load, "femnist"), "lenet5", arguments=hub.FemnistArguments),
    "shakespeare": Kind(shakespeare.load, "bert-tiny", in_time=True, fixed=True),
    "hapt": Kind(hapt.load, "cnn3", in_time=True, fixed=True),
    "unimib-shar": Kind(unimib.load, "vgg"),
    "text": Kind(texts.load, ENCODER, metric=texts.metric, arguments=texts.OwnTextArguments, own=texts.own),
    **{
        f"glue-{name}": Kind(
            partial(glue.load, name), ENCODER, metric=partial(glue.metric, name), arguments=glue.GlueArguments
        )
        for name in glue.PARTS
    },
}


def kind_of(name: str) -> Kind:
    """Return the kind of a task by its name here, or by a reference to one from outside, "package.module:NAME".

    Raises ValueError with the nearest valid name, or with what is wrong with the reference.
    """
    if is_reference(name):
        return value_of(name, Kind, "a task")
    if name not in TASKS:
        meant = did_you_mean(name, TASKS, most=1, likeness=LIKENESS)
        raise ValueError(f"unknown task {name!r}{f', {meant}' if meant else ''} Valid: {', '.join(TASKS)}")
    return TASKS[name]


def _known(name: str) -> str:
    kind_of(name)
    return name


class TaskSpec(PartitionSettings):
    """All that a server and its clients must agree on to hold the same task.

    Attributes:
        name: of the task.
        data_dir: a folder, or "" for the usual places. Under the partition "own" the folder itself on a real device,
            and in a simulation a folder of each device below it.
        arguments: the task's own, of the class that its kind names; by name where they are read.
        device_folders: under the partition "own" the devices are simulated.
        agreed: what the data of all devices have in common; None until they have been asked.
        max_examples: bounds what a device may say that it has.
    """

    name: Annotated[str, AfterValidator(_known)]
    data_dir: str = ""
    arguments: SerializeAsAny[TaskArguments] | None = Field(None, validate_default=True)
    device_folders: bool = False
    agreed: Agreed | None = None
    max_examples: int = Field(1_000_000, ge=1)

    @field_validator("arguments", mode="plain")
    @classmethod
    def _of_task(cls, value: Any, info: ValidationInfo) -> TaskArguments | None:
        if "name" not in info.data:  # which is wrong itself
            return None
        name = info.data["name"]
        kind = kind_of(name).arguments
        if value is None or isinstance(value, Mapping):
            return read_arguments(name, kind, value or {})  # says what is missing, if anything must be given
        if not isinstance(value, kind or type(None)):
            raise ValueError(f"the task {name!r} takes {kind}, got {type(value)}")
        return value

    @model_validator(mode="after")
    def _has_reader(self) -> Self:
        if self.partition == "own":
            check_own(self.name)
        return self

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name; `from_json` gives an equal spec."""
        of_own = {"device_folders", "agreed", "max_examples"}
        return self.model_dump(mode="json", exclude=None if self.partition == "own" else of_own)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return the spec of `to_json`'s value; ValueError names the field that is wrong, and what would be right."""
        try:
            return cls.model_validate_json(json.dumps(value))
        except ValidationError as error:
            raise ValueError(f"task: {in_words(error)}") from None


def check_own(name: str) -> None:
    """Raise ValueError where devices cannot hold data of their own for a task."""
    if kind_of(name).own is None:
        able = ", ".join(task for task, kind in TASKS.items() if kind.own is not None)
        raise ValueError(f"the task {name!r} has no reader for partition 'own': take one of {able}")


def load_data_set(name: str, data_dir: str, arguments: TaskArguments | None) -> DataSet:
    """Return the data of a task by its name; errors as those of `load_task`."""
    return _read(name, "load", kind_of(name).load, data_dir, arguments)


def own_data(spec: TaskSpec, folder: str) -> DataSet:
    """Return the examples of a folder, as its task's reader gives them; UnfitError says why there are none."""
    read = kind_of(spec.name).own
    assert read is not None  # the spec has seen to it
    try:
        return _read(spec.name, "own", read, folder, spec.arguments)
    except (OSError, ValueError) as error:
        raise UnfitError(str(error)) from error


def _read(
    name: str, function: str, read: Callable[..., DataSet], folder: str, arguments: TaskArguments | None
) -> DataSet:
    """Return what a reader of a task gives; PluginError if one from outside fails without saying what is wrong."""
    try:
        data = read(folder) if arguments is None else read(folder, arguments)
    except (OSError, ValueError):
        raise  # which say what is wrong with the data
    except Exception as error:
        if not is_reference(name):
            raise
        raise PluginError(f"the data of {name} cannot be loaded: {one_sentence(error)}") from error
    if not isinstance(data, DataSet):
        raise PluginError(
            f"the function `{function}` of {name} must return a wildflower.tasks.data.DataSet, not {type(data)}"
        )
    return data


def folder_of(spec: TaskSpec, device: int) -> str:
    """Return the folder of a device's data; simulated devices have their own below the run's data-dir."""
    return str(Path(spec.data_dir).expanduser() / "devices" / f"{device:04d}") if spec.device_folders else spec.data_dir
