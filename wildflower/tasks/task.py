"""A task: a data set, its partition over devices, the shape of inputs and labels and the default family."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from copy import copy
from functools import lru_cache
from typing import Any

import torch
from torch import Generator, Tensor

from wildflower.tasks import texts
from wildflower.tasks.data import Data, DataSet
from wildflower.tasks.device_data import Agreed, UnfitError, fitted
from wildflower.tasks.inputs import crop_and_flip, readable
from wildflower.tasks.labels import NO_LABEL, LabelKind, alike
from wildflower.tasks.losses import usual_loss
from wildflower.tasks.metrics import METRICS, Metric, usual_metric
from wildflower.tasks.partitions import PARTITIONS, Shard
from wildflower.tasks.spec import TASKS, Kind, TaskSpec, folder_of, kind_of, load_data_set, own_data

__all__ = ["TASKS", "Agreed", "Data", "Kind", "Shard", "Task", "TaskSpec", "kind_of", "load_task"]

HASHED_INPUTS = 1000  # of each part, about as many, which stand for all of them in `Task.identity`


def _check_name(metric: Metric) -> None:
    """Raise ValueError where journals would take a metric from outside for another, or could not name it."""
    if METRICS.get(metric.name, type(metric)) is not type(metric):
        raise ValueError(f"the name {metric.name!r} is that of another metric: give {type(metric).__name__} its own")
    if not metric.name.isidentifier():
        raise ValueError(f"the name of a metric has letters, digits and underscores, {metric.name!r} has others")


class Task:
    """A loaded task.

    `train` and `test` are the whole data set's; a device's examples are those of `shard(device)` in `train`.
    `classes` is how many outputs a model has per label, `label_kind` what labels are, `metric` how models are scored.
    `input_shape` is (channels, height, width), (channels, length) for signals or (sequence,) for tokens; `family` is
    the name of the default family. `label_names` are those of the classes, `columns`
    those of a table's inputs; () where they have none. `label_sets`
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
        self.columns = data.columns
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
        self._mean, self._std = data.mean, data.std
        self.remarks = data.remarks
        self._natural_ids = data.natural_ids
        kind_of_partition = PARTITIONS[spec.partition]
        if kind_of_partition.by_class and self.label_kind != "classes":
            others = "'iid'" if data.natural_ids is None else "'iid' or 'natural'"
            raise ValueError(
                f"partition {spec.partition!r} deals out examples by their class, and the labels of the task "
                f"{spec.name!r} are {self.label_kind}: use {others}"
            )
        self._partition = kind_of_partition(spec, data, in_time=kind.in_time)

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

    def shard(self, device: int) -> Shard:
        """Return the examples of one device, the same on every machine; at least one is for training.

        IndexError unless 0 <= device < spec.devices.
        """
        self._check(device)
        return self._partition.shard(device)

    def own_test(self, device: int) -> tuple[Tensor, Tensor]:
        """Return inputs, as stored, and labels that a device tests on; IndexError unless 0 <= device < spec.devices.

        They are those kept from its own examples, of which there may be none, or its part of the test set or all of it.
        """
        self._check(device)
        part = self._partition.tests(device)
        if part is not None:
            return self.test.inputs[part], self.test.labels[part]
        kept = self.shard(device).test
        return self.train.inputs[kept], self.train.labels[kept]

    def training_examples(self, device: int) -> int:
        """Return how many examples `shard(device)` has for training, without drawing them; IndexError as there."""
        self._check(device)
        return self._partition.training_examples(device)

    def test_examples(self, device: int) -> int:
        """Return how many examples `own_test(device)` has, without drawing them; IndexError as there."""
        self._check(device)
        part = self._partition.tests(device)
        if part is not None:
            return len(self.test.labels[part])
        return self._partition.count(device) - self._partition.training_examples(device)

    def _check(self, device: int) -> None:
        if not 0 <= device < self.spec.devices:
            raise IndexError(f"device {device} is not one of 0 to {self.spec.devices - 1}")

    def label_set(self, device: int) -> Tensor | None:
        """Return the numbers, ascending, of the classes that a device has; None where it has all.

        A device has its source's, and device n is source n: see `label_sets`. IndexError unless it is one of
        0 to spec.devices - 1.
        """
        self._check(device)
        if self.label_sets is None:
            return None
        return self.label_sets[device].nonzero().flatten()

    def for_device(self, device: int) -> Task:
        """Return the task as a device has it: loss and scores are over the classes of its label set alone.

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

    def asks_the_same(self, other: Task) -> bool:
        """Say whether a loss is the same under both tasks: they are of the same data, perhaps dealt out otherwise."""
        if self is other:
            return True
        if self.spec.partition == "own" or self._only is not None or other._only is not None:
            return False
        return self.spec.model_copy(update={"seed": other.spec.seed}) == other.spec

    def answers(self, outputs: Tensor) -> Tensor:
        """Return a model's outputs (batch, classes, ...) with those of classes that the device lacks out of reach."""
        if self._only is None:
            return outputs
        # Not minus infinity: times a probability of 0, of which losses may have some, it is no number.
        foreign = ~self._only.to(outputs.device).view(1, -1, *[1] * (outputs.dim() - 2))
        return outputs.masked_fill(foreign, torch.finfo(outputs.dtype).min)

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of a batch, from a model's outputs."""
        return self._loss(self.answers(outputs), labels)

    def summed_loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the losses of a batch's examples."""
        return self._loss(self.answers(outputs), labels, reduction="sum")

    @property
    def sums_examples(self) -> bool:
        """Say whether the loss of a batch is the mean of its examples' own, which `losses` gives."""
        return kind_of(self.spec.name).loss is None

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the losses (batch,) of a batch's examples; only where `sums_examples`."""
        return self._loss(self.answers(outputs), labels, reduction="none")

    def class_counts(self, examples: Tensor) -> Tensor:
        """Return how many of these training examples, or of their labeled tokens, are of each class, (classes,).

        ValueError where labels are no classes.
        """
        if self.label_kind == "numbers":
            raise ValueError(f"the task {self.spec.name!r} has {self.label_kind} for labels, not one class per example")
        labels = self.train.labels[examples]
        return labels[labels != NO_LABEL].bincount(minlength=self.classes)

    @property
    def normalization(self) -> tuple[Tensor, Tensor] | None:
        """Mean and deviation per channel, in the unit of inputs as stored; None where inputs are tokens."""
        return None if self._mean is None or self._std is None else (self._mean, self._std)

    def batch(self, inputs: Tensor, labels: Tensor, *, augment: Generator | None) -> tuple[Tensor, Tensor]:
        """Return what a model reads, and its labels: `prepare`, with the labels of tokens cut as the texts are."""
        prepared = self.prepare(inputs, augment=augment)
        if self.vocabulary is not None and self.label_kind == "classes of tokens":
            labels = labels[:, : prepared.shape[1]]
        return prepared, labels

    def prepare(self, inputs: Tensor, *, augment: Generator | None) -> Tensor:
        """Turn inputs as stored into what a model reads.

        Tokens (batch, sequence) become int64, and texts are cut to the longest of the batch. Images (batch, channels,
        height, width) and signals (batch, channels, length) become float32 normalized per channel; with a generator,
        tasks of color images are first augmented: every image is shifted by up to 4 pixels over a black border and,
        where the task allows it, mirrored with probability one half.
        """
        if augment is not None and self._crop_padding:
            inputs = crop_and_flip(inputs, augment, padding=self._crop_padding, flip=self._flip)
        return readable(inputs, self.normalization, self.vocabulary)


@lru_cache(maxsize=8)
def load_task(spec: TaskSpec) -> Task:
    """Return the task of a spec, kept for the life of the process.

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
    """Return which label is rather meant, in words before an advice; "" where none looks like it."""
    meant = [group for group in alike([name, *names]) if name in group and len(group) > 1]
    return f"write {name!r} as {next(each for each in meant[0] if each != name)!r} if that is meant, " if meant else ""


def device_task(spec: TaskSpec, device: int) -> Task:
    """Return the task with the examples of one device's folder, as they are now; UnfitError where they do not fit."""
    if not 0 <= device < spec.devices:
        raise IndexError(f"device {device} is not one of 0 to {spec.devices - 1}")
    if spec.agreed is None:
        raise UnfitError("nothing is agreed of the devices' data yet")
    data = fitted(own_data(spec, folder_of(spec, device)), spec.agreed)
    count = max(len(data.train), len(data.test))
    if count > spec.max_examples:
        raise UnfitError(f"it has {count} examples, and max-examples = {spec.max_examples}")
    return Task(spec, data)
