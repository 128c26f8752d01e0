"""A task: a data set, its partition over devices, the shape of inputs and labels and the default family."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, fields
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

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
    partition,
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
from wildflower.tasks.data import Data, DataSet, Vocabulary
from wildflower.tasks.device_data import (
    MAX_PROBLEM_LETTERS,
    Agreed,
    Summary,
    UnfitError,
    alike_in_words,
    check_labels,
    device_folder,
    fitted,
    form_of,
    label_names_of,
    moments_of,
)
from wildflower.tasks.labels import NO_LABEL, LabelKind, alike
from wildflower.tasks.losses import TaskLoss, usual_loss
from wildflower.tasks.metrics import METRICS, Metric, usual_metric
from wildflower.tasks.remarks import Remark, in_words

__all__ = ["PARTITIONS", "TASKS", "Agreed", "Data", "Kind", "Shard", "Task", "TaskSpec", "kind_of", "load_task"]

PARTITIONS = ("iid", "dirichlet", "natural", "strong-and-weak", "own")
BY_CLASS = ("dirichlet", "strong-and-weak")  # which need to know the class of every example
STRONG_TESTS = ("share", "whole")
HASHED_INPUTS = 1000  # of each part, about as many, which stand for all of them in `Task.identity`


@dataclass(frozen=True)
class Kind:
    """What is fixed about a task: how its data are loaded from a data folder, its family, its augmentation.

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


def _check_name(metric: Metric) -> None:
    """Raise ValueError where journals would take a metric from outside for another, or could not name it."""
    if METRICS.get(metric.name, type(metric)) is not type(metric):
        raise ValueError(f"the name {metric.name!r} is that of another metric: give {type(metric).__name__} its own")
    if not metric.name.isidentifier():
        raise ValueError(f"the name of a metric has letters, digits and underscores, {metric.name!r} has others")


def _whole(what: str, value: object, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{what} must be a whole number of at least {minimum}, got {value!r}")


@dataclass(frozen=True)
class Shard:
    """One device's examples: indices into the task's training data, int64; no index is in both.

    Where devices test on parts of the test set, `test` is empty; `Task.own_test` knows both cases.
    """

    train: Tensor
    test: Tensor


class Task:
    """A loaded task.

    `train` and `test` are the whole data set's; a device's examples are those of `shard(device)` in `train`.
    `classes` is how many outputs a model has per label, `label_kind` what labels are, `metric` how models are scored.
    `input_shape` is (channels, height, width), (channels, length) for signals or (sequence,) for tokens; `family` is
    the name of the default family. `label_names` are those of the classes, () where they have none. `label_sets`
    (sources, classes), bool, says which classes each natural source has, where each has its own. `vocabulary` is that
    of texts, which a model's embeddings must match. `remarks` are what a person should know of the data.
    """

    def __init__(self, spec: TaskSpec, data: DataSet) -> None:
        kind = kind_of(spec.name)
        self.spec = spec
        self.train = data.train
        self.test = data.test
        self.classes = data.classes
        self.label_kind: LabelKind = data.train.label_kind
        self.label_names = data.label_names or kind.label_names
        self.label_sets = data.label_sets if spec.partition == "natural" else None
        self.vocabulary = data.vocabulary
        metric = kind.metric(spec.arguments, data) if callable(kind.metric) else kind.metric
        self.metric: Metric = metric or usual_metric(self.label_kind, data.label_names)
        _check_name(self.metric)
        self._loss = kind.loss or usual_loss(self.label_kind)
        self._only: Tensor | None = None  # (classes,), bool: those of the device that `for_device` was asked for
        self.input_shape: tuple[int, ...] = tuple(data.train.inputs.shape[1:])
        self.family = kind.family
        self._crop_padding = kind.crop_padding
        self._flip = kind.flip
        self._in_time = kind.in_time
        self._mean, self._std = data.mean, data.std
        self.remarks = data.remarks
        self._natural_ids = data.natural_ids
        if spec.partition == "own":
            return  # the one device that these data are of has all of them
        by_class = self.label_kind == "classes"
        if not by_class and spec.partition in BY_CLASS:
            others = "'iid'" if data.natural_ids is None else "'iid' or 'natural'"
            raise ValueError(
                f"partition {spec.partition!r} deals out examples by their class, and the labels of the task "
                f"{spec.name!r} are {self.label_kind}: use {others}"
            )
        if spec.partition == "strong-and-weak":
            self._index, self._test_index = partition.strong_and_weak(
                data.train.labels.numpy(),
                data.test.labels.numpy(),
                strong=spec.strong_devices,
                share=spec.strong_share,
                alpha=spec.alpha,
                devices=spec.devices,
                seed=spec.seed,
            )
        elif spec.examples_per_device is None:
            self._index = partition.divide(
                spec.partition,
                # Other partitions than by class ask only how many there are.
                labels=data.train.labels.numpy() if by_class else np.zeros(len(data.train), dtype=np.int64),
                natural_ids=None if data.natural_ids is None else data.natural_ids.numpy(),
                alpha=spec.alpha,
                devices=spec.devices,
                seed=spec.seed,
                # Who has which classes is part of an experiment, such as the strongest device the most.
                in_order=data.label_sets is not None,
            )
        elif spec.examples_per_device > len(data.train):
            raise ValueError(
                f"examples-per-device = {spec.examples_per_device} is more than the {len(data.train)} training examples"
            )

    def identity(self) -> dict[str, Any]:
        """Return what identifies these data, as a run records it: counts, shape and a hash.

        The hash is of all labels, of the sources and the classes' names, of mean and deviation to five digits, and of
        evenly spaced inputs. To read all inputs would take as much memory as the data have.
        """
        # Two machines may differ in the last digits of a mean.
        normalized = [tensor for tensor in (self._mean, self._std) if tensor is not None]
        moments = [f"{value:.5g}" for tensor in normalized for value in tensor.flatten().tolist()]
        hashed = hashlib.sha256(json.dumps([self.label_names, moments]).encode())
        sampled = [part.inputs[:: max(1, len(part) // HASHED_INPUTS)] for part in (self.train, self.test)]
        for tensor in (self.train.labels, self.test.labels, self._natural_ids, *sampled):
            if tensor is not None:
                hashed.update(tensor.numpy().tobytes())
        return {
            "training-examples": len(self.train),
            "test-examples": len(self.test),
            "classes": self.classes,
            "input-shape": "x".join(map(str, self.input_shape)),
            "sha256": hashed.hexdigest(),
        }

    @cached_property
    def _members(self) -> list[np.ndarray]:
        """The training examples of each class for a Dirichlet partition, all in one group for iid."""
        if self.spec.partition == "iid":
            return [np.arange(len(self.train))]
        labels = self.train.labels.numpy()
        return [np.flatnonzero(labels == label) for label in range(self.classes)]

    def shard(self, device: int) -> Shard:
        """The examples of one device, the same on every machine; at least one is for training.

        IndexError unless 0 <= device < spec.devices.
        """
        spec = self.spec
        self._check(device)
        if spec.partition == "own" and len(self.test):
            return Shard(train=torch.arange(len(self.train)), test=torch.arange(0))
        if spec.partition == "own":
            examples = np.arange(len(self.train))
        elif spec.examples_per_device is None:
            examples = self._index[device]
        else:
            examples = partition.draw(
                self._members,
                alpha=None if spec.partition == "iid" else spec.alpha,
                device=device,
                seed=spec.seed,
                examples=spec.examples_per_device,
            )
        training = self._for_training(len(examples))
        if spec.partition == "natural" and self._in_time:
            # In order of time, so that nothing that is tested occurs in what comes before.
            ordered = torch.from_numpy(np.sort(examples))
            return Shard(train=ordered[:training], test=ordered[training:])
        shuffled = torch.from_numpy(np.random.default_rng([spec.seed, device, 1]).permutation(examples))
        for_test = len(examples) - training
        return Shard(train=shuffled[for_test:], test=shuffled[:for_test])

    def own_test(self, device: int) -> tuple[Tensor, Tensor]:
        """Inputs, as stored, and labels that a device tests on; IndexError unless 0 <= device < spec.devices.

        They are those kept from its own examples, of which there may be none, or its part of the test set or all of it.
        """
        if self.spec.partition == "own" and len(self.test):
            return self.test.inputs, self.test.labels
        kept = self.shard(device).test
        if self.spec.partition != "strong-and-weak":
            return self.train.inputs[kept], self.train.labels[kept]
        if self._tests_on_all(device):
            return self.test.inputs, self.test.labels
        part = torch.from_numpy(self._test_index[device])
        return self.test.inputs[part], self.test.labels[part]

    def training_examples(self, device: int) -> int:
        """How many examples `shard(device)` has for training, without drawing them; IndexError as there."""
        return self._for_training(self._examples(device))

    def test_examples(self, device: int) -> int:
        """How many examples `own_test(device)` has, without drawing them; IndexError as there."""
        if self.spec.partition == "own" and len(self.test):
            return len(self.test)
        if self.spec.partition == "strong-and-weak":
            self._check(device)
            return len(self.test.labels) if self._tests_on_all(device) else len(self._test_index[device])
        return self._examples(device) - self.training_examples(device)

    def _tests_on_all(self, device: int) -> bool:
        return self.spec.strong_test == "whole" and device < self.spec.strong_devices

    def _examples(self, device: int) -> int:
        self._check(device)
        if self.spec.partition == "own":
            return len(self.train)
        return self.spec.examples_per_device or len(self._index[device])

    def _check(self, device: int) -> None:
        if not 0 <= device < self.spec.devices:
            raise IndexError(f"device {device} is not one of 0 to {self.spec.devices - 1}")

    def _for_training(self, examples: int) -> int:
        if self.spec.partition == "own" and len(self.test):
            return examples  # the device has a test set of its own
        return examples - min(round(self.spec.test_fraction * examples), examples - 1)

    def label_set(self, device: int) -> Tensor | None:
        """The numbers, ascending, of the classes that a device has; None where it has all.

        A device has its source's, and device n is source n: see `label_sets`. IndexError unless it is one of
        0 to spec.devices - 1.
        """
        self._check(device)
        if self.label_sets is None:
            return None
        return self.label_sets[device].nonzero().flatten()

    def for_device(self, device: int) -> Task:
        """The task as a device has it: loss and scores are over the classes of its label set alone.

        Outputs of other classes are no answers, as if the head had none: they get no gradient. Under the partition
        "own" its examples are those of its folder as it is now; UnfitError where they do not fit what was agreed.
        """
        if self.spec.partition == "own":
            return device_task(self.spec, device)
        own = self.label_set(device)
        if own is None:
            return self
        found = copy(self)
        found._only = torch.zeros(self.classes, dtype=torch.bool).index_fill_(0, own, True)
        return found

    def answers(self, outputs: Tensor) -> Tensor:
        """A model's outputs (batch, classes, ...) with those of classes that the device does not have out of reach."""
        if self._only is None:
            return outputs
        # Not minus infinity: times a probability of 0, of which losses may have some, it is no number.
        foreign = ~self._only.to(outputs.device).view(1, -1, *[1] * (outputs.dim() - 2))
        return outputs.masked_fill(foreign, torch.finfo(outputs.dtype).min)

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of a batch, from a model's outputs."""
        return self._loss(self.answers(outputs), labels)

    def summed_loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The sum of the losses of a batch's examples."""
        return self._loss(self.answers(outputs), labels, reduction="sum")

    def class_counts(self, examples: Tensor) -> Tensor:
        """(classes,), how many of these training examples are of each class; ValueError where labels are no classes."""
        if self.label_kind != "classes":
            raise ValueError(f"the task {self.spec.name!r} has {self.label_kind} for labels, not one class per example")
        return self.train.labels[examples].bincount(minlength=self.classes)

    @property
    def normalization(self) -> tuple[Tensor, Tensor] | None:
        """Mean and deviation per channel, in the unit of inputs as stored; None where inputs are tokens."""
        return None if self._mean is None or self._std is None else (self._mean, self._std)

    def batch(self, inputs: Tensor, labels: Tensor, *, augment: Generator | None) -> tuple[Tensor, Tensor]:
        """What a model reads, and its labels: `prepare`, with the labels of tokens cut as the texts are."""
        prepared = self.prepare(inputs, augment=augment)
        if self.vocabulary is not None and self.label_kind == "classes of tokens":
            labels = labels[:, : prepared.shape[1]]
        return prepared, labels

    def prepare(self, inputs: Tensor, *, augment: Generator | None) -> Tensor:
        """Inputs as stored to what a model reads.

        Tokens (batch, sequence) become int64, and texts are cut to the longest of the batch. Images (batch, channels,
        height, width) and signals (batch, channels, length) become float32 normalized per channel; with a generator,
        tasks of color images are first augmented: every image is shifted by up to 4 pixels over a black border and,
        where the task allows it, mirrored with probability one half.
        """
        if augment is not None and self._crop_padding:
            inputs = crop_and_flip(inputs, augment, padding=self._crop_padding, flip=self._flip)
        return readable(inputs, self.normalization, self.vocabulary)


def readable(
    inputs: Tensor, normalization: tuple[Tensor, Tensor] | None, vocabulary: Vocabulary | None = None
) -> Tensor:
    """Inputs as stored to what a model reads.

    Images and signals become float32, normalized per channel by mean and deviation. Tokens, which have no
    normalization, become int64; with a vocabulary they are texts, which are cut to the longest of the batch.
    """
    if vocabulary is not None:
        used = (inputs != vocabulary.pad_id).any(dim=0).nonzero()
        inputs = inputs[:, : int(used.max()) + 1 if len(used) else 1]
    if normalization is None:
        return inputs.to(torch.int64, copy=True)  # what is done to it must not be done to the data set
    per_channel = (-1, *[1] * (inputs.dim() - 2))
    mean, std = (value.view(per_channel).to(inputs.device) for value in normalization)
    if inputs.dtype == torch.float64:  # of tables: what is common to all values is taken away before they are rounded
        return ((inputs - mean) / std).float()
    return (inputs.float() - mean).div_(std)


def crop_and_flip(images: Tensor, generator: Generator, *, padding: int, flip: bool) -> Tensor:
    """A random crop of every image, padded by `padding` zeros, to its own size, then with `flip` a coin's mirroring.

    `images` are (batch, channels, height, width). All images are gathered at once, from row and column numbers.
    """
    batch, channels, height, width = images.shape
    tops, lefts = torch.randint(0, 2 * padding + 1, (2, batch, 1), generator=generator, device=generator.device)
    rows = tops + torch.arange(height, device=generator.device)
    columns = lefts + torch.arange(width, device=generator.device)
    if flip:
        mirrored = torch.rand((batch, 1), generator=generator, device=generator.device) < 0.5
        columns = torch.where(mirrored, columns.flip(1), columns)
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    return padded[
        torch.arange(batch, device=images.device)[:, None, None, None],
        torch.arange(channels, device=images.device)[:, None, None],
        rows.to(images.device)[:, None, :, None],
        columns.to(images.device)[:, None, None, :],
    ]


def channels_last(inputs: Tensor) -> Tensor:
    """Images (batch, channels, height, width) with the channels of a pixel side by side; other inputs as they are.

    Convolutions give their outputs the layout of their inputs, so that the activations of a whole network have it.
    Weights and gradients stay as they are.
    """
    if inputs.dim() != 4 or not inputs.is_floating_point():
        return inputs
    # Of images of one channel `contiguous` would return the same tensor, by which convolutions do not know the layout.
    return torch.empty_like(inputs, memory_format=torch.channels_last).copy_(inputs)


def in_layout(inputs: Tensor, layout: str) -> Tensor:
    """Inputs in the run's `layout`: "channels-last" as of `channels_last`, "contiguous" as they are."""
    return channels_last(inputs) if layout == "channels-last" else inputs


def laid_out_for(model: object, inputs: Tensor) -> Tensor:
    """Inputs as a model computes fastest without gradients: images take up to half the time with `channels_last`.

    That is so for the project's networks, which say so. A module of somebody else's may call `view`, for which its
    inputs and what comes of them must be contiguous.
    """
    return channels_last(inputs) if getattr(model, "takes_channels_last", False) else inputs


@lru_cache(maxsize=8)
def load_task(spec: TaskSpec) -> Task:
    """The task of a spec, kept for the life of the process.

    FileNotFoundError when the data are nowhere, ValueError when a file or a setting is wrong, or when classes cannot be
    learned from these examples; both say what is right.
    Under the partition "own" the task has no examples itself: see `Task.for_device`.
    """
    if spec.partition == "own":
        if spec.agreed is None:
            raise ValueError("partition 'own': nothing is agreed of the devices' data yet")
        return Task(spec, spec.agreed.empty())
    data = load_data_set(spec.name, spec.data_dir, spec.arguments)
    _check_classes(spec, data)
    return Task(spec, data)


def _check_classes(spec: TaskSpec, data: DataSet) -> None:
    """Raise ValueError where there is one class only, or where some class has test examples and no training examples.

    The latter is allowed for classes that the task or a user has declared: first weights may know them already. It is
    allowed for tags too, because those of a user's own texts are compared where they are read.
    """
    if data.train.label_kind == "numbers":
        return
    kind = kind_of(spec.name)
    names = data.label_names or kind.label_names
    if len(names) != data.classes:  # labels are numbers only, or the files are not those that the names are of
        names = tuple(map(str, range(data.classes)))
    trained, tested = (part.labels[part.labels != NO_LABEL].unique() for part in (data.train, data.test))
    declared = kind.fixed or (isinstance(spec.arguments, texts.OwnTextArguments) and bool(spec.arguments.classes))
    foreign = sorted({*tested.tolist()} - {*trained.tolist()})
    where = spec.data_dir or f"the data of the task {spec.name!r}"
    if foreign and not declared and data.train.label_kind == "classes":
        told = ", ".join(repr(names[label]) for label in foreign[:5])
        raise ValueError(
            f"{where}: test examples have {'the label' if len(foreign) == 1 else 'labels'} {told}"
            f"{f' and {len(foreign) - 5} more' if len(foreign) > 5 else ''}, which no training example has, so that "
            f"nothing can be learned of them: {_meant(names[foreign[0]], [names[n] for n in trained.tolist()])}"
            "add training examples, or take these test examples out"
        )
    if len(trained) == 1:
        raise ValueError(
            f"{where}: all training examples have the label {names[int(trained)]!r}: at least two classes are needed"
        )


def _meant(name: str, names: Sequence[str]) -> str:
    """Which label is rather meant, in words before an advice; "" where none looks like it."""
    meant = [group for group in alike([name, *names]) if name in group and len(group) > 1]
    return f"write {name!r} as {next(each for each in meant[0] if each != name)!r} if that is meant, " if meant else ""


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


def device_task(spec: TaskSpec, device: int) -> Task:
    """The task with the examples of one device's folder, as they are now; UnfitError where they do not fit."""
    if not 0 <= device < spec.devices:
        raise IndexError(f"device {device} is not one of 0 to {spec.devices - 1}")
    if spec.agreed is None:
        raise UnfitError("nothing is agreed of the devices' data yet")
    data = fitted(own_data(spec, _folder(spec, device)), spec.agreed)
    count = max(len(data.train), len(data.test))
    if count > spec.max_examples:
        raise UnfitError(f"it has {count} examples, and max-examples = {spec.max_examples}")
    return Task(spec, data)


def describe(spec: TaskSpec, device: int, *, moments: bool) -> Summary:
    """What a device says of its data: never an example.

    Args:
        spec: where `agreed` is given, the data must fit it, and neither labels nor sums are told.
        device: its number.
        moments: whether sums per channel are needed.
    """
    try:
        data = own_data(spec, _folder(spec, device))
        form = form_of(data)
        cut_texts, remarks = data.cut_texts, data.remarks
        if spec.agreed is not None:
            data = fitted(data, spec.agreed)
        names = label_names_of(data) if spec.agreed is None else ()
        declared = getattr(spec.arguments, "classes", ())
        if declared:
            check_labels(names, declared)
            names = ()
        if not len(data.train):
            raise UnfitError(f"it has no training examples{_left_out(data)}")
        own = Task(spec, data)
        train = own.shard(device).train
        needed = moments and spec.agreed is None and form.stored != "int32" and len(data.train) <= spec.max_examples
        sums = moments_of(data.train.inputs[train]) if needed else None
    except UnfitError as error:
        why = " ".join(str(error).split())
        cut = why if len(why) <= MAX_PROBLEM_LETTERS else f"{why[: MAX_PROBLEM_LETTERS - 3]}..."
        return Summary(device=device, problem=cut)
    return Summary(
        device=device,
        examples=len(train),
        test_examples=own.test_examples(device),
        form=form,
        label_names=names,
        moments=sums,
        cut_texts=cut_texts,
        remarks=remarks,
    )


@dataclass(frozen=True)
class Inspection:
    """What there is to know before round 1 of a data set, or of the data of one device, for a person to read.

    Attributes:
        counts: of each label how many examples there are to train on and to test on; {} where labels are numbers.
        remarks: what was left out and why, and what is seldom meant.
        problem: why the data cannot be read, or cannot take part; "" where they can. The rest is then empty.
    """

    counts: dict[str, tuple[int, int]]
    remarks: tuple[Remark, ...] = ()
    problem: str = ""


def labels_alike(task: Task) -> list[str]:
    """Which labels of a user's files look alike or stand for missing values, where nobody has declared them."""
    declared = getattr(task.spec.arguments, "classes", ())
    if kind_of(task.spec.name).own is None or declared:
        return []
    return alike_in_words(dict.fromkeys(task.label_names, ""))


def inspect_device(spec: TaskSpec, device: int) -> Inspection:
    """Look at the data of a device under the partition "own", whose folder lies on this machine.

    Where `agreed` is given, the data must fit it.
    """
    try:
        data = own_data(spec, _folder(spec, device))
        found = Inspection(_counts(data), data.remarks)
        if spec.agreed is not None:
            fitted(data, spec.agreed)
        return found
    except UnfitError as error:
        return Inspection({}, problem=str(error))


def inspect_whole(task: Task) -> Inspection:
    """Look at the data of a task that deals them out."""
    data = DataSet(task.train, task.test, task.classes, label_names=task.label_names)
    return Inspection(_counts(data), task.remarks)


def _counts(data: DataSet) -> dict[str, tuple[int, int]]:
    """Of each label how many examples, or tokens with a label, there are to train on and to test on."""
    if data.train.label_kind == "numbers":
        return {}
    names = data.label_names or tuple(map(str, range(data.classes)))
    train, test = (
        part.labels[part.labels != NO_LABEL].bincount(minlength=len(names)).tolist() for part in (data.train, data.test)
    )
    return {name: (train[number], test[number]) for number, name in enumerate(names)}


def _left_out(data: DataSet) -> str:
    return f": {in_words(data.remarks)}" if data.remarks else ""


def _folder(spec: TaskSpec, device: int) -> str:
    """The folder of a device's data."""
    return str(device_folder(spec.data_dir, device)) if spec.device_folders else spec.data_dir


def server_test(spec: TaskSpec) -> DataSet | None:
    """The server's test set under the partition "own": what its own folder has for testing; None where there is none.

    ValueError where there is one that cannot be read.
    """
    if not spec.data_dir:
        return None
    try:
        data = own_data(spec, spec.data_dir)
    except UnfitError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise
    return data if len(data.test) else None


def with_test(task: Task, test: DataSet) -> Task:
    """The task with the test set that `server_test` found; UnfitError where it does not fit what is agreed."""
    assert task.spec.agreed is not None
    found = copy(task)
    data = fitted(test, task.spec.agreed)
    found.test, found.vocabulary, found.remarks = data.test, data.vocabulary, test.remarks
    return found


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
