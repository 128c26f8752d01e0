"""Devices that hold data of their own: what each says of its folder, what is agreed, and who does not fit.

A task's reader (`wildflower.tasks.spec.Kind.own`) gives a folder's examples as they are. Before round 1 every device
says how many it has, of which shape, and which labels there are; where nobody has declared how inputs are normalized,
it also gives sums per channel. From these alone follows what all devices have in common (`Agreed`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from wildflower.plugins.raised_as import raised_as
from wildflower.tasks.arguments import TaskArguments
from wildflower.tasks.data import Data, DataSet, Vocabulary, center_of, channel_sums
from wildflower.tasks.labels import NO_LABEL, LabelKind, alike, label_text, shown
from wildflower.tasks.remarks import MAX_REMARKS, Remark

MAX_NAMES = 1000
"""Different labels of a run that are not declared; `classes` of task-arguments may declare more."""

MAX_NAME_LETTERS, MAX_CHANNELS, MAX_INPUT_VALUES = 100, 256, 2**26
MAX_PROBLEM_LETTERS = 500
MAX_LOST = 0.01
"""The part of the deviation of labels by which 32 bits may round them."""
FLOAT32_MAX = float(np.finfo(np.float32).max)


def _printable(name: str) -> str:
    """Return a label in the form in which labels are compared."""
    name = label_text(name)
    if not name or not name.isprintable():
        raise ValueError(f"the label {shown(name)} is empty or has letters that cannot be printed")
    return name


Stored = Literal["uint8", "float32", "float64", "int32"]
Side = Annotated[int, Field(ge=1, le=2**20)]
Shape = Annotated[tuple[Side, ...], Field(min_length=1, max_length=3)]
LabelName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_LETTERS), AfterValidator(_printable)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Claimed = Annotated[int, Field(ge=0, lt=2**63)]


class UnfitError(ValueError):
    """A device's data that cannot take part; the text says why, and what would be right."""


class OwnArguments(TaskArguments):
    """Arguments of a task whose devices bring their own data. Anything left out is agreed on before round 1.

    dealt_out: what of it is also read where the server deals out the data.
    """

    dealt_out: ClassVar[tuple[str, ...]] = ()

    classes: tuple[LabelName, ...] = Field(
        (), description="Under partition = 'own', names of the classes in order; empty takes those that devices have"
    )
    input_shape: tuple[Side, ...] = Field(
        (), description="Under partition = 'own', the shape of an input; empty takes that of most devices", max_length=3
    )
    mean: tuple[Finite, ...] = Field(
        (),
        description="Under partition = 'own', the mean per channel that inputs are normalized by; empty takes it from "
        "sums that devices give",
        max_length=MAX_CHANNELS,
    )
    std: tuple[Positive, ...] = Field((), description="The deviation per channel, beside mean", max_length=MAX_CHANNELS)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if len(set(self.classes)) != len(self.classes):
            raise ValueError("classes: a name is listed twice")
        if len(self.mean) != len(self.std):
            raise ValueError(f"mean has {len(self.mean)} values, std {len(self.std)}: both have one per channel")
        if self.mean and self.input_shape and len(self.mean) != self.input_shape[0]:
            raise ValueError(f"mean has {len(self.mean)} values, and input_shape has {self.input_shape[0]} channels")
        return self


class _Said(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Form(_Said):
    """The form of examples, which fit each other if it is equal.

    Attributes:
        stored: as what inputs are stored; int32 are tokens.
        input_shape: of one input.
        labels: what labels are.
        vocabulary: how many tokens there are and which one pads, of texts.
        separator: the token behind each text of a pair, as in `wildflower.tasks.data.Vocabulary`.
    """

    stored: Stored
    input_shape: Shape
    labels: LabelKind
    vocabulary: tuple[Side, Annotated[int, Field(ge=0, lt=2**20)]] | None = None
    separator: Annotated[int, Field(ge=-1, lt=2**20)] = -1

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if math.prod(self.input_shape) > MAX_INPUT_VALUES:
            raise ValueError(f"an input of {math.prod(self.input_shape)} values is larger than {MAX_INPUT_VALUES}")
        if (self.stored == "int32") != (self.vocabulary is not None):
            raise ValueError("tokens have a vocabulary, and nothing else has one")
        return self

    def __str__(self) -> str:
        kind = {"uint8": "bytes", "float32": "numbers", "float64": "numbers of 64 bits", "int32": "tokens"}[self.stored]
        words = "" if self.vocabulary is None else f" of {self.vocabulary[0]}"
        pairs = "" if self.separator < 0 else " in pairs"
        return f"{'x'.join(map(str, self.input_shape))} {kind}{words}{pairs} with {self.labels} for labels"


class Moments(_Said):
    """Sums and sums of squares of a device's training inputs per channel, each over so many values.

    centers: what is taken from the values before; () for nothing. See `wildflower.tasks.data.center_of`.
    """

    values: Annotated[int, Field(ge=1, lt=2**63)]
    sums: Annotated[tuple[Finite, ...], Field(max_length=MAX_CHANNELS)]
    squares: Annotated[tuple[Finite, ...], Field(max_length=MAX_CHANNELS)]
    centers: Annotated[tuple[Finite, ...], Field(max_length=MAX_CHANNELS)] = ()


class Summary(_Said):
    """All that a device says of its data.

    Attributes:
        examples, test_examples: for training, and those that it keeps for testing.
        form: None where nothing could be read.
        label_names: the labels that occur; () where labels are numbers, or where the server has declared them.
        moments: None where nobody needs them.
        cut_texts: how many of both kinds of examples are texts that were longer than the limit, and were cut.
        remarks: what was left out of its folder, and what is seldom meant.
        problem: why its data cannot take part; "" where they can.
        resting_seconds: until it is worth asking again, where its owner lets it take no part now, and looks at nothing.
    """

    device: Claimed
    examples: Claimed = 0
    test_examples: Claimed = 0
    form: Form | None = None
    label_names: Annotated[tuple[LabelName, ...], Field(max_length=MAX_NAMES)] = ()
    moments: Moments | None = None
    cut_texts: Claimed = 0
    remarks: Annotated[tuple[Remark, ...], Field(max_length=MAX_REMARKS)] = ()
    problem: Annotated[str, Field(max_length=MAX_PROBLEM_LETTERS)] = ""
    resting_seconds: Positive | None = None


class Agreed(_Said):
    """The properties that all devices of a run have in common.

    Attributes:
        label_names: of the classes or tags, in order; () where labels are numbers.
        mean, std: per channel; () where inputs are tokens.
    """

    form: Form
    label_names: tuple[str, ...] = ()
    mean: tuple[Finite, ...] = ()
    std: tuple[Positive, ...] = ()

    def misfit(self, form: Form) -> str:
        """Return why examples of this form do not fit; "" where they do.

        A run without a separator goes on without one: what was agreed before there were any says nothing of it.
        """
        compared = form.model_copy(update={"separator": -1}) if self.form.separator < 0 else form
        return "" if compared == self.form else f"its examples are {form}, the run's are {self.form}"

    @property
    def classes(self) -> int:
        """Return a model's outputs."""
        return len(self.label_names) or 1

    def empty(self) -> DataSet:
        """Return a data set of this form without examples."""
        form = self.form
        labels = torch.empty(
            (0, *form.input_shape) if form.labels == "classes of tokens" else 0,
            dtype=torch.float32 if form.labels == "numbers" else torch.int64,
        )
        precision = torch.float64 if form.stored == "float64" else torch.float32
        nothing = Data(torch.empty((0, *form.input_shape), dtype=getattr(torch, form.stored)), labels)
        return DataSet(
            train=nothing,
            test=nothing,
            classes=self.classes,
            mean=torch.tensor(self.mean, dtype=precision) if self.mean else None,
            std=torch.tensor(self.std, dtype=precision) if self.std else None,
            label_names=self.label_names,
            vocabulary=None if form.vocabulary is None else Vocabulary(*form.vocabulary, separator=form.separator),
        )


def alike_in_words(whose: Mapping[str, str]) -> list[str]:
    """Return sentences about the labels that `labels.alike` finds; whose: what is said behind each of the labels."""
    found = []
    for group in alike(whose):
        told = ", ".join(f"{shown(name)}{whose[name]}" for name in group[:5]) + (", ..." if len(group) > 5 else "")
        if len(group) > 1:
            found.append(f"These labels look alike, and are classes of their own: {told}")
        else:
            found.append(f"This label is what programs write where a value is missing, and is a class here: {told}")
    return found


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Return labels by their number where all of them are whole numbers, else by their text."""
    found = set(names)
    whole = all(name.removeprefix("-").isdecimal() for name in found)
    return tuple(sorted(found, key=(lambda name: (int(name), name)) if whole else None))


# On the device --------------------------------------------------------------------------------------------------------


def form_of(data: DataSet) -> Form:
    """Return the form of a data set; UnfitError where it is none that a run could have."""
    inputs, vocabulary = data.train.inputs, data.vocabulary
    with raised_as(UnfitError, f"inputs of {inputs.dtype} and shape {tuple(inputs.shape[1:])} cannot be learned: "):
        return Form(
            stored=str(inputs.dtype).removeprefix("torch."),  # type: ignore[arg-type]
            input_shape=tuple(inputs.shape[1:]),
            labels=data.train.label_kind,
            vocabulary=None if vocabulary is None else (vocabulary.tokens, vocabulary.pad_id),
            separator=-1 if vocabulary is None else vocabulary.separator,
        )


def fitted(data: DataSet, agreed: Agreed) -> DataSet:
    """Return a device's examples with the labels and the normalization of the run; UnfitError where they do not fit."""
    form = form_of(data)
    if why := agreed.misfit(form):
        raise UnfitError(why)
    train, test = (renamed(part, data.label_names, agreed.label_names) for part in (data.train, data.test))
    found = replace(agreed.empty(), train=train, test=test)
    if data.vocabulary is None or found.vocabulary is None:
        return found
    return replace(found, vocabulary=replace(found.vocabulary, unclear_pair=data.vocabulary.unclear_pair))


def renamed(part: Data, own: Sequence[str], names: Sequence[str]) -> Data:
    """Return examples with the numbers that their labels have in the run."""
    if part.label_kind == "numbers" or not len(part):
        return part
    number_of = {name: number for number, name in enumerate(names)}
    used = part.labels[part.labels != NO_LABEL].unique().tolist()
    check_labels([own[number] for number in used], names)
    table = torch.tensor([number_of.get(name, 0) for name in own] or [0])
    labels = torch.where(part.labels == NO_LABEL, NO_LABEL, table[part.labels.clamp_min(0)])
    return Data(part.inputs, labels)


def check_labels(own: Iterable[str], names: Sequence[str]) -> None:
    """Raise UnfitError where labels occur that the run does not have."""
    known = set(names)
    if unknown := sorted(set(own) - known):
        told = ", ".join(shown(name[:MAX_NAME_LETTERS]) for name in unknown[:3]) + (", ..." if len(unknown) > 3 else "")
        there = ", ".join(map(shown, names[:5])) + (", ..." if len(names) > 5 else "")
        meant = [group for group in alike([unknown[0], *names]) if unknown[0] in group and len(group) > 1]
        hint = f"; is {shown(next(name for name in meant[0] if name in known))} meant?" if meant else ""
        raise UnfitError(f"the run has no label {told}: it has {there}{hint}")


def label_names_of(data: DataSet) -> tuple[str, ...]:
    """Return the names that occur in either part; UnfitError where they are too many or too long for names."""
    if data.train.label_kind == "numbers":
        return ()
    labels = torch.cat([data.train.labels.flatten(), data.test.labels.flatten()])
    names = in_order(data.label_names[number] for number in labels[labels != NO_LABEL].unique().tolist())
    if len(names) > MAX_NAMES:
        raise UnfitError(f"it has {len(names)} different labels, at most {MAX_NAMES} are possible")
    if wrong := [name for name in names if not 1 <= len(name) <= MAX_NAME_LETTERS or not name.isprintable()]:
        raise UnfitError(
            f"the label {shown(wrong[0][:40])} is empty, longer than {MAX_NAME_LETTERS} letters, or cannot be printed"
        )
    return names


def moments_of(inputs: Tensor) -> Moments:
    """Return the sums of training inputs (examples, channels, ...)."""
    centers = [center_of(channel) for channel in inputs.unbind(1)]
    pairs = [channel_sums(channel, center) for channel, center in zip(inputs.unbind(1), centers, strict=True)]
    return Moments(
        centers=tuple(centers) if inputs.dtype == torch.float64 else (),
        values=inputs[:, 0].numel(),
        sums=tuple(float(total) for total, _ in pairs),
        squares=tuple(float(square) for _, square in pairs),
    )


def made(parts: Sequence[tuple[Any, Sequence[object]]]) -> DataSet:
    """Return training and test examples of one folder, from inputs (tensors or arrays) and label names.

    Args:
        parts: the inputs and the labels of the training examples, and of the test examples, if there are any. Labels
            are names or whole numbers, which stand for names; or all of them are floats, for tasks of numbers.

    Raises ValueError where a label of the latter is no finite number of 32 bits.
    """
    floats = [label for _, labels in parts for label in labels if isinstance(label, float)]
    numbers = len(floats) == sum(len(labels) for _, labels in parts)
    if floats and not numbers:
        raise ValueError(f"some labels are fractions such as {floats[0]:g} and others are names: make them alike")
    if numbers:
        check_numbers(floats)
    names = () if numbers else in_order(label_text(label) for _, labels in parts for label in labels)
    number_of = {name: number for number, name in enumerate(names)}
    found = []
    for inputs, labels in parts:
        values = labels if numbers else [number_of[label_text(label)] for label in labels]
        tensor = torch.tensor(np.array(values, np.float32 if numbers else np.int64))
        found.append(Data(torch.as_tensor(inputs), tensor))
        _check_finite(found[-1].inputs)
    train = found[0]
    test = found[1] if len(found) > 1 else Data(train.inputs[:0], train.labels[:0])
    return DataSet(train, test, classes=len(names) or 1, label_names=names)


def check_numbers(labels: Sequence[float]) -> None:
    """Raise ValueError where a label is no finite number of 32 bits, or 32 bits hold too little of it."""
    for number in labels:
        if not abs(number) <= FLOAT32_MAX:  # neither is NaN
            raise ValueError(f"a label is {number:g}, it must be a finite number of at most 32 bits")
    values = np.array(labels, np.float64)
    lost = float(np.abs(values - values.astype(np.float32)).max(initial=0))
    spread = float(values.std()) if len(values) else 0.0
    if spread and lost > MAX_LOST * spread:
        largest = max(labels, key=abs)
        raise ValueError(
            f"labels such as {largest!r} are rounded by up to {lost:g} as numbers of 32 bits, which is much of how far "
            "they differ: subtract a number from all of them"
        )


def _check_finite(inputs: Tensor) -> None:
    """Raise ValueError where an input is no finite number."""
    if inputs.is_floating_point() and not bool(inputs.isfinite().all()):
        first = int((~inputs.isfinite()).flatten(1).any(dim=1).nonzero()[0])
        raise ValueError(
            f"input {first}, counted from 0, holds values that are not finite: leave it out, or fill in what is missing"
        )
