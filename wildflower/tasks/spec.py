"""Which tasks there are, what a run says of its task, and what reads the data of one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

from wildflower.plugins.nearest import LIKENESS, did_you_mean
from wildflower.plugins.reference import PluginError, is_reference, one_sentence, value_of
from wildflower.tasks import (
    digits,
    glue,
    hapt,
    hub,
    idx,
    images,
    nero,
    npz,
    sentiment,
    shakespeare,
    stl10,
    svhn,
    tables,
    texts,
    trec,
    unimib,
)
from wildflower.tasks.arguments import TaskArguments, read_arguments
from wildflower.tasks.data import DataSet
from wildflower.tasks.device_data import Agreed, UnfitError, device_folder
from wildflower.tasks.losses import TaskLoss
from wildflower.tasks.metrics import Metric

PARTITIONS = ("iid", "dirichlet", "natural", "strong-and-weak", "own")
BY_CLASS = ("dirichlet", "strong-and-weak")  # which need to know the class of every example
STRONG_TESTS = ("share", "whole")


@dataclass(frozen=True)
class Kind:
    """What is fixed about a task: how its data are loaded from a data folder, its family, its augmentation.

    `in_time`: the examples of each natural id lie in order of time. `loss` and `metric`: what is minimized and what is
    scored; they go with what the labels are, and None are the usual ones of such labels. `arguments`: the class of the
    task's own arguments; `load` then gets them after the data folder, and `metric` may be a function of them and the
    data set. `label_names`: of the classes, in their order; empty where numbers are all there is. `own`: as `load`, but
    of one device's folder: its examples as they are, with its own `label_names` and without normalization, of which
    those for training or those for testing may be none; None where devices cannot hold data of their own. `fixed`:
    there are as many classes as the task says, whichever of them the files have examples of. `in_order`: under the
    partition natural, device n has the examples of natural id n.
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
    in_order: bool = False


DIGITS = tuple("0123456789")
CLOTHES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

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
    "svhn": Kind(svhn.load, "resnet18", crop_padding=4, label_names=DIGITS),
    "stl10": Kind(stl10.load, "resnet18", crop_padding=4, flip=True),
    "femnist": Kind(hub.load_femnist, "lenet5", arguments=hub.FemnistArguments),
    "shakespeare": Kind(shakespeare.load, "bert-tiny", in_time=True, fixed=True),
    "hapt": Kind(hapt.load, "cnn3", in_time=True, fixed=True),
    "unimib-shar": Kind(unimib.load, "vgg"),
    "text": Kind(texts.load, "encoder", metric=texts.metric, arguments=texts.OwnTextArguments, own=texts.own),
    "sentiment": Kind(sentiment.load, "encoder", arguments=sentiment.SentimentArguments),
    "trec": Kind(trec.load, "encoder", arguments=trec.TrecArguments, fixed=True),
    "nero": Kind(nero.load, "encoder", arguments=nero.NeroArguments),
    **{
        f"glue-{name}": Kind(
            partial(glue.load, name), "encoder", metric=partial(glue.metric, name), arguments=glue.GlueArguments
        )
        for name in glue.PARTS
    },
}


def kind_of(name: str) -> Kind:
    """The kind of a task by its name here, or by a reference to one from outside, "package.module:NAME".

    Raises ValueError with the nearest valid name, or with what is wrong with the reference.
    """
    if is_reference(name):
        return value_of(name, Kind, "a task")
    _one_of("task", name, TASKS)
    return TASKS[name]


@dataclass(frozen=True)
class TaskSpec:
    """All that a server and its clients must agree on to hold the same task.

    `data_dir`: a folder, or "" for the usual places. `alpha`: of the Dirichlet partition. `test_fraction`: the part of
    each device's examples that it keeps for testing. `examples_per_device`: None deals out every example once; a number
    lets each device draw that many for itself, so that devices may share examples and be as many as one likes.
    `strong_devices`, `strong_share`: of the partition strong-and-weak, in which the first so many devices hold that
    part of the training examples, and devices test on parts of the test set. `strong_test`: what a strong device tests
    on, its "share" like all others, or the "whole" test set, whose mix of classes is its own. `arguments`: the task's
    own, by name; of the class that its kind names.

    Under the partition "own" every device has what lies in its own folder: `data_dir` itself on a real device, and in a
    simulation, where `device_folders` says so, a folder of each device below it. `agreed` is what the data of all
    devices have in common; None until they have been asked. `max_examples` bounds what one may say that it has.
    """

    name: str
    devices: int
    data_dir: str = ""
    partition: str = "iid"
    alpha: float = 0.5
    seed: int = 0
    test_fraction: float = 0.0
    examples_per_device: int | None = None
    strong_devices: int = 0
    strong_share: float = 0.5
    strong_test: str = "share"
    arguments: TaskArguments | None = None
    device_folders: bool = False
    agreed: Agreed | None = None
    max_examples: int = 1_000_000

    def __post_init__(self) -> None:
        kind = kind_of(self.name).arguments
        if self.arguments is None:
            # Says what is missing, if anything must be given.
            object.__setattr__(self, "arguments", read_arguments(self.name, kind, {}))
        if not isinstance(self.arguments, kind or type(None)):
            raise ValueError(f"the task {self.name!r} takes {kind}, got {type(self.arguments)}")
        _one_of("partition", self.partition, PARTITIONS)
        if not isinstance(self.data_dir, str):
            raise ValueError(f"data_dir must be a text, got {self.data_dir!r}")
        _whole("devices", self.devices, 1)
        _whole("seed", self.seed, 0)
        if not _is_number(self.alpha) or not 0 < self.alpha < math.inf:
            raise ValueError(f"alpha must be a number above 0, got {self.alpha!r}")
        if not _is_number(self.test_fraction) or not 0 <= self.test_fraction < 1:
            raise ValueError(f"test_fraction must be a number from 0 to below 1, got {self.test_fraction!r}")
        if self.examples_per_device is not None:
            _whole("examples_per_device", self.examples_per_device, 1)
            if self.partition == "natural":
                raise ValueError("examples_per_device does not go with partition 'natural', which says who holds what")
        _whole("strong_devices", self.strong_devices, 0)
        if not _is_number(self.strong_share) or not 0 < self.strong_share < 1:
            raise ValueError(f"strong_share must be a number between 0 and 1, got {self.strong_share!r}")
        _one_of("strong_test", self.strong_test, STRONG_TESTS)
        _whole("max_examples", self.max_examples, 1)
        if self.partition == "own":
            check_own(self.name)
            if self.examples_per_device is not None:
                raise ValueError("examples_per_device does not go with partition 'own': devices have what they have")
        if self.partition == "strong-and-weak":
            if not 0 < self.strong_devices < self.devices:
                raise ValueError(
                    f"partition 'strong-and-weak' needs strong_devices from 1 to {self.devices - 1}, "
                    f"got {self.strong_devices}"
                )
            if self.test_fraction or self.examples_per_device is not None:
                raise ValueError(
                    "partition 'strong-and-weak' deals out the test set too: "
                    "test_fraction and examples_per_device do not go with it"
                )

    def to_json(self) -> dict[str, Any]:
        """The fields by name; `from_json` gives an equal spec."""
        found = {**asdict(self), "arguments": None, "agreed": None}
        for name in ("arguments", "agreed"):
            value = getattr(self, name)
            found[name] = None if value is None else value.model_dump(mode="json")
        return found if self.partition == "own" else {name: found[name] for name in found.keys() - _OF_OWN}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TaskSpec:
        """The spec of `to_json`'s value; ValueError names an unknown or missing field and a value out of range."""
        if not isinstance(value, Mapping):
            raise ValueError(f"a task spec is an object with named fields, got {value!r}")
        names = [field.name for field in fields(cls)]
        for name in value:
            _one_of("field of a task spec", name, names)
        for name in ("name", "devices"):
            if name not in value:
                raise ValueError(f"a task spec needs the field '{name}'")
        given = value.get("arguments") or {}
        if not isinstance(given, Mapping):
            raise ValueError(f"the arguments of a task are an object with named fields, got {given!r}")
        arguments = read_arguments(value["name"], kind_of(value["name"]).arguments, given)
        agreed = value.get("agreed")
        if agreed is not None:
            try:
                agreed = Agreed.model_validate_json(json.dumps(agreed))
            except ValueError as error:
                raise ValueError(f"what is agreed of the devices' data cannot be read: {error}") from None
        return cls(**{**value, "arguments": arguments, "agreed": agreed})


_OF_OWN = {"device_folders", "agreed", "max_examples"}


def check_own(name: str) -> None:
    """Raise ValueError where devices cannot hold data of their own for a task."""
    if kind_of(name).own is None:
        able = ", ".join(task for task, kind in TASKS.items() if kind.own is not None)
        raise ValueError(f"the task {name!r} has no reader for partition 'own': take one of {able}")


def _one_of(what: str, name: object, valid: Iterable[str]) -> None:
    valid = list(valid)
    if name in valid:
        return
    meant = did_you_mean(name, valid, most=1, likeness=LIKENESS)
    raise ValueError(f"unknown {what} {name!r}{f', {meant}' if meant else ''} Valid: {', '.join(valid)}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(what: str, value: object, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{what} must be a whole number of at least {minimum}, got {value!r}")


def load_data_set(name: str, data_dir: str, arguments: TaskArguments | None) -> DataSet:
    """The data of a task by its name; errors as those of `load_task`."""
    kind = kind_of(name)
    given = (data_dir,) if arguments is None else (data_dir, arguments)
    if not is_reference(name):
        return kind.load(*given)
    try:
        data = kind.load(*given)
    except (OSError, ValueError):
        raise  # which say what is wrong with the data
    except Exception as error:
        raise PluginError(f"the data of {name} cannot be loaded: {one_sentence(error)}") from error
    if not isinstance(data, DataSet):
        raise PluginError(
            f"the function `load` of {name} must return a wildflower.tasks.data.DataSet, not {type(data)}"
        )
    return data


def own_data(spec: TaskSpec, folder: str) -> DataSet:
    """The examples of a folder, as its task's reader gives them; UnfitError says why there are none."""
    read = kind_of(spec.name).own
    assert read is not None  # the spec has seen to it
    try:
        data = read(folder) if spec.arguments is None else read(folder, spec.arguments)
    except (OSError, ValueError) as error:
        raise UnfitError(str(error)) from error
    except Exception as error:
        if not is_reference(spec.name):
            raise
        raise UnfitError(f"the data of {spec.name} cannot be read: {one_sentence(error)}") from error
    if not isinstance(data, DataSet):
        raise UnfitError(
            f"the function `own` of {spec.name} must return a wildflower.tasks.data.DataSet, not {type(data)}"
        )
    return data


def folder_of(spec: TaskSpec, device: int) -> str:
    """The folder of a device's data."""
    return str(device_folder(spec.data_dir, device)) if spec.device_folders else spec.data_dir
