"""Devices that hold data of their own: what each says of its folder, what is agreed, and who does not fit.

A task's reader (`wildflower.tasks.spec.Kind.own`) gives a folder's examples as they are. Before round 1 every device
says how many it has, of which shape, and which labels there are; where nobody has declared how inputs are normalized,
it also gives sums per channel. From these alone follows what all devices have in common (`Agreed`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from wildflower.tasks.arguments import TaskArguments
from wildflower.tasks.data import Data, DataSet, Vocabulary, center_of, channel_sums, is_constant
from wildflower.tasks.labels import NO_LABEL, LabelKind, alike, label_text, same, shown
from wildflower.tasks.remarks import MAX_REMARKS, Remark, named

MAX_NAMES = 1000
"""Different labels of a run that are not declared; `classes` of task-arguments may declare more."""

MAX_NAME_LETTERS, MAX_CHANNELS, MAX_INPUT_VALUES = 100, 256, 2**26
MAX_PROBLEM_LETTERS = 500
MAX_LOST = 0.01
"""The part of the deviation of labels by which 32 bits may round them."""
FLOAT32_MAX = float(np.finfo(np.float32).max)


def _printable(name: str) -> str:
    """A label in the form in which labels are compared."""
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
    """What a task takes whose devices may hold data of their own. All of it may be left to be agreed.

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
    """What examples look like: they fit each other where this is equal.

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


class Agreed(_Said):
    """What all devices of a run have in common.

    Attributes:
        label_names: of the classes or tags, in order; () where labels are numbers.
        mean, std: per channel; () where inputs are tokens.
    """

    form: Form
    label_names: tuple[str, ...] = ()
    mean: tuple[Finite, ...] = ()
    std: tuple[Positive, ...] = ()

    def misfit(self, form: Form) -> str:
        """Why examples of this form do not fit; "" where they do.

        A run without a separator goes on without one: what was agreed before there were any says nothing of it.
        """
        compared = form.model_copy(update={"separator": -1}) if self.form.separator < 0 else form
        return "" if compared == self.form else f"its examples are {form}, the run's are {self.form}"

    @property
    def classes(self) -> int:
        """A model's outputs."""
        return len(self.label_names) or 1

    def empty(self) -> DataSet:
        """A data set of this form without examples."""
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


@dataclass(frozen=True)
class Declared:
    """What the server says beforehand, by task-arguments or by a test set of its own; the rest is to be agreed."""

    form: Form | None = None
    input_shape: tuple[int, ...] = ()
    label_names: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


def declared_by(arguments: TaskArguments | None, test: DataSet | None = None) -> Declared:
    """What task-arguments declare, and beside them the form and the labels of the server's test set, if it has one."""
    form = None if test is None else form_of(test)
    names = getattr(arguments, "classes", ())
    return Declared(
        form,
        getattr(arguments, "input_shape", ()) or (() if form is None else form.input_shape),
        names or (() if test is None else test.label_names),
        getattr(arguments, "mean", ()),
        getattr(arguments, "std", ()),
    )


def agree(summaries: Iterable[Summary], declared: Declared, max_examples: int) -> tuple[Agreed, dict[int, str]]:
    """What devices agree on, and why the data of some do not fit that.

    What is declared holds. Else the form is that of most devices, labels are all that occur, and inputs are normalized
    by the mean and deviation over all devices. Of devices that are left out nothing is used.

    Raises:
        ValueError: no device is left.
    """
    unfit: dict[int, str] = {}
    able: list[tuple[Summary, Form]] = []
    for summary in sorted(summaries, key=lambda s: s.device):
        why = problem_of(summary, max_examples)
        if why or summary.form is None:
            unfit[summary.device] = why
        else:
            able.append((summary, summary.form))
    form = declared.form or _usual_form([form for _, form in able], declared.input_shape)
    for summary, own in able:
        if own != form:
            unfit[summary.device] = f"its examples are {own}, the run's are {form or _shape(declared.input_shape)}"
    fitting = [summary for summary, _ in able if summary.device not in unfit]
    if not declared.label_names:
        unfit |= _other_spellings(fitting)
        fitting = [summary for summary in fitting if summary.device not in unfit]
    names, too_many = _label_names(fitting, declared.label_names, form)
    unfit |= too_many
    fitting = [summary for summary in fitting if summary.device not in unfit]
    if form is None or not fitting:
        raise ValueError(f"no device has data that fit: {words_of(unfit) or 'none has answered'}")
    if form.labels != "numbers" and len(names) < 2:
        raise ValueError(
            f"all devices together have one label, {names[0]!r}: declare classes in task-arguments, or wait for more "
            "devices"
            if names
            else "no device says which labels it has"
        )
    mean, std = declared.mean, declared.std
    if form.stored != "int32" and not mean:
        mean, std = normalization([s.moments for s in fitting if s.moments is not None])
    if form.stored != "int32" and len(mean) != form.input_shape[0]:
        raise ValueError(f"mean has {len(mean)} values, and the devices' inputs have {form.input_shape[0]} channels")
    return Agreed(form=form, label_names=names, mean=mean, std=std), unfit


def problem_of(summary: Summary, max_examples: int) -> str:
    """Why what a device says cannot be right by itself, or what it says is wrong; "" for neither."""
    if summary.problem:
        return summary.problem
    if max(summary.examples, summary.test_examples) > max_examples:
        count = max(summary.examples, summary.test_examples)
        return f"it says that it has {count} examples, max-examples = {max_examples}"
    if not summary.examples:
        return "it has no training examples"
    if summary.form is None:
        return "it does not say what its examples look like"
    if len(summary.label_names) > (summary.examples + summary.test_examples) * _labels_per_example(summary.form):
        return f"it has more labels than examples: {len(summary.label_names)} of {summary.examples}"
    if summary.cut_texts > (0 if summary.form.vocabulary is None else summary.examples + summary.test_examples):
        return f"it says that {summary.cut_texts} texts were cut, which are more than it has"
    moments, form = summary.moments, summary.form
    if moments is not None:
        return _implausible(moments, form, summary.examples)
    return ""


def _labels_per_example(form: Form) -> int:
    return form.input_shape[0] if form.labels == "classes of tokens" else 1


def _implausible(moments: Moments, form: Form, examples: int) -> str:
    """Why sums cannot be of so many examples, such as by the inequality of Cauchy and Schwarz; "" where they can."""
    channels, per_input = form.input_shape[0], math.prod(form.input_shape[1:])
    if (len(moments.sums), len(moments.squares)) != (channels, channels):
        return f"it gives sums of {len(moments.sums)} channels, its inputs have {channels}"
    if len(moments.centers) != (channels if form.stored == "float64" else 0):
        return f"it gives {len(moments.centers)} centers of its sums, of {channels} channels of {form.stored} values"
    if moments.values != examples * per_input:
        return f"it gives sums over {moments.values} values, {examples} of its inputs have {examples * per_input}"
    largest = 255 if form.stored == "uint8" else FLOAT32_MAX
    if any(abs(center) > largest for center in moments.centers):
        return f"it gives a center that no {form.stored} values have"
    largest *= 2 if moments.centers else 1  # how far a value may be from a center
    for total, square in zip(moments.sums, moments.squares, strict=True):
        if abs(total) > largest * moments.values or square > largest**2 * moments.values:
            return f"it gives sums that no {form.stored} values have"
        if square < 0 or total * total > moments.values * square * (1 + 1e-9):
            return "it gives sums that no numbers have"
        if form.stored == "uint8" and total < 0:
            return "it gives sums that no uint8 values have"
    return ""


def _usual_form(forms: Sequence[Form], shape: Sequence[int]) -> Form | None:
    """The form of most devices, among those of a declared shape; of several as frequent, the first by its text."""
    counts = Counter(form for form in forms if not shape or form.input_shape == tuple(shape))
    return min(counts, key=lambda form: (-counts[form], str(form)), default=None)


def _other_spellings(summaries: Sequence[Summary]) -> dict[int, str]:
    """The devices that write a label otherwise than most, in a way that nobody can see, and why they are left out.

    A device that has both spellings is not left out, because it may mean two classes; nor is any where as many write a
    label in one way as in the other, so that one device alone rules out none. See `label_warnings` for both.
    """
    unfit: dict[int, str] = {}
    devices = Counter(name for summary in summaries for name in summary.label_names)
    for group in same(devices):
        usual = min(group, key=lambda name: (-devices[name], name))
        for summary in summaries:
            theirs = [name for name in group if name in summary.label_names]
            if theirs and max(devices[name] for name in theirs) < devices[usual]:
                other = f"{shown(usual)}, which {devices[usual]} other devices have"
                why = f"its label {shown(theirs[0])} looks like {other}"
                unfit.setdefault(summary.device, f"{why}: write it alike, or declare classes in task-arguments")
    return unfit


def label_warnings(summaries: Iterable[Summary]) -> list[str]:
    """Which labels may be slips for each other or stand for missing values, with the devices that have them."""
    devices: dict[str, list[int]] = {}
    for summary in summaries:
        for name in summary.label_names:
            devices.setdefault(name, []).append(summary.device)
    return alike_in_words({name: f" of {named(numbers)}" for name, numbers in devices.items()})


def alike_in_words(whose: Mapping[str, str]) -> list[str]:
    """Sentences about the labels that `labels.alike` finds; whose: what is said behind each of the labels."""
    found = []
    for group in alike(whose):
        told = ", ".join(f"{shown(name)}{whose[name]}" for name in group[:5]) + (", ..." if len(group) > 5 else "")
        if len(group) > 1:
            found.append(f"These labels look alike, and are classes of their own: {told}")
        else:
            found.append(f"This label is what programs write where a value is missing, and is a class here: {told}")
    return found


def _label_names(
    summaries: Sequence[Summary], declared: tuple[str, ...], form: Form | None
) -> tuple[tuple[str, ...], dict[int, str]]:
    """The labels of a run in order, and the devices that would bring too many, which are left out."""
    unfit: dict[int, str] = {}
    if declared or form is None or form.labels == "numbers":
        for summary in summaries:
            try:
                check_labels(summary.label_names, declared)
            except UnfitError as error:
                unfit[summary.device] = str(error)
        return declared, unfit
    found: set[str] = set()
    for summary in sorted(summaries, key=lambda s: (len(s.label_names), s.device)):
        if len(found | set(summary.label_names)) > MAX_NAMES:
            unfit[summary.device] = (
                f"with its {len(summary.label_names)} labels the run would have more than {MAX_NAMES}: declare classes"
            )
        else:
            found |= set(summary.label_names)
    return in_order(found), unfit


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Labels by their number where all of them are whole numbers, else by their text."""
    found = set(names)
    whole = all(name.removeprefix("-").isdecimal() for name in found)
    return tuple(sorted(found, key=(lambda name: (int(name), name)) if whole else None))


def normalization(moments: Sequence[Moments]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation per channel over all devices, whatever their order."""
    values = sum(each.values for each in moments)
    channels = len(moments[0].sums) if moments else 0
    pairs = [_mean_and_std(moments, channel, values) for channel in range(channels)]
    constant = [is_constant(mean, std) for mean, std in pairs]
    if any(constant):
        raise ValueError(
            f"channel {constant.index(True)} of all devices' inputs, counted from 0, has one value only, so it cannot "
            "be normalized"
        )
    return tuple(mean for mean, _ in pairs), tuple(std for _, std in pairs)


def _mean_and_std(moments: Sequence[Moments], channel: int, values: int) -> tuple[float, float]:
    """Return those of a channel, from sums about one center: the median of the devices', or 0 where they have none."""
    centers = sorted(each.centers[channel] for each in moments if each.centers)
    center = centers[len(centers) // 2] if centers else 0.0
    sums, squares = [], []
    for each in moments:
        total, square = each.sums[channel], each.squares[channel]
        if each.centers:
            away = each.centers[channel] - center
            square += 2 * away * total + each.values * away * away
            total += each.values * away
        sums.append(total)
        squares.append(square)
    mean = math.fsum(sums) / values
    return center + mean, math.sqrt(max(0.0, math.fsum(squares) / values - mean * mean))


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def words_of(unfit: Mapping[int, str]) -> str:
    """Which devices were left out and why, the first few of them."""
    told = [f"device {device}: {why}" for device, why in sorted(unfit.items())[:5]]
    return "; ".join(told) + (f"; and {len(unfit) - 5} more" if len(unfit) > 5 else "")


# On the device --------------------------------------------------------------------------------------------------------


def form_of(data: DataSet) -> Form:
    """The form of a data set; UnfitError where it is none that a run could have."""
    inputs, vocabulary = data.train.inputs, data.vocabulary
    try:
        return Form(
            stored=str(inputs.dtype).removeprefix("torch."),  # type: ignore[arg-type]
            input_shape=tuple(inputs.shape[1:]),
            labels=data.train.label_kind,
            vocabulary=None if vocabulary is None else (vocabulary.tokens, vocabulary.pad_id),
            separator=-1 if vocabulary is None else vocabulary.separator,
        )
    except ValueError as error:
        raise UnfitError(
            f"inputs of {inputs.dtype} and shape {tuple(inputs.shape[1:])} cannot be learned: {error}"
        ) from None


def fitted(data: DataSet, agreed: Agreed) -> DataSet:
    """A device's examples with the labels and the normalization of the run; UnfitError where they do not fit."""
    form = form_of(data)
    if why := agreed.misfit(form):
        raise UnfitError(why)
    train, test = (renamed(part, data.label_names, agreed.label_names) for part in (data.train, data.test))
    found = replace(agreed.empty(), train=train, test=test)
    if data.vocabulary is None or found.vocabulary is None:
        return found
    return replace(found, vocabulary=replace(found.vocabulary, unclear_pair=data.vocabulary.unclear_pair))


def renamed(part: Data, own: Sequence[str], names: Sequence[str]) -> Data:
    """Examples with the numbers that their labels have in the run."""
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
    """The names that occur in either part; UnfitError where they are too many or too long for names."""
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
    """The sums of training inputs (examples, channels, ...)."""
    centers = [center_of(channel) for channel in inputs.unbind(1)]
    pairs = [channel_sums(channel, center) for channel, center in zip(inputs.unbind(1), centers, strict=True)]
    return Moments(
        centers=tuple(centers) if inputs.dtype == torch.float64 else (),
        values=inputs[:, 0].numel(),
        sums=tuple(float(total) for total, _ in pairs),
        squares=tuple(float(square) for _, square in pairs),
    )


def made(parts: Sequence[tuple[Any, Sequence[object]]]) -> DataSet:
    """What readers give: training and test examples of one folder, from inputs (tensors or arrays) and label names.

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


def device_folder(data_dir: str, device: int) -> Path:
    """Where the data of a simulated device lie: a folder of its own below the run's data-dir."""
    return Path(data_dir).expanduser() / "devices" / f"{device:04d}"
