"""The agreement of devices that hold their own data: what all have in common, and whose data do not fit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from wildflower.tasks.arguments import TaskArguments
from wildflower.tasks.data import DataSet, is_constant
from wildflower.tasks.device_data import (
    FLOAT32_MAX,
    MAX_NAMES,
    Agreed,
    Form,
    Moments,
    Summary,
    UnfitError,
    alike_in_words,
    check_labels,
    form_of,
    in_order,
)
from wildflower.tasks.labels import same, shown
from wildflower.tasks.outliers import far_off
from wildflower.tasks.remarks import named


@dataclass(frozen=True)
class Declared:
    """The declarations of the server, by task-arguments or by a test set of its own; the rest is to be agreed."""

    form: Form | None = None
    input_shape: tuple[int, ...] = ()
    label_names: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


def declared_by(arguments: TaskArguments | None, test: DataSet | None = None) -> Declared:
    """Return what task-arguments declare, and the form and labels of the server's test set, if it has one."""
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
    """Return what devices agree on, and why the data of some do not fit that.

    What is declared holds. Else the form is that of most devices, labels are all that occur, and inputs are normalized
    by the mean and deviation over all devices, but those far off the others. Of devices that are left out nothing is
    used.

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
            unfit[summary.device] = (
                f"its examples are {own}, the run's are {form or 'x'.join(map(str, declared.input_shape))}"
            )
    fitting = [summary for summary, _ in able if summary.device not in unfit]
    if not declared.mean:
        unfit |= far_off({summary.device: summary.moments for summary in fitting if summary.moments is not None})
        fitting = [summary for summary in fitting if summary.device not in unfit]
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
    """Return why what a device says cannot be right by itself, or what it says is wrong; "" for neither."""
    if summary.problem:
        return summary.problem
    if max(summary.examples, summary.test_examples) > max_examples:
        count = max(summary.examples, summary.test_examples)
        return f"it says that it has {count} examples, max-examples = {max_examples}"
    if not summary.examples:
        return "it has no training examples"
    if summary.form is None:
        return "it does not say what its examples look like"
    per_example = summary.form.input_shape[0] if summary.form.labels == "classes of tokens" else 1
    if len(summary.label_names) > (summary.examples + summary.test_examples) * per_example:
        return f"it has more labels than examples: {len(summary.label_names)} of {summary.examples}"
    if summary.cut_texts > (0 if summary.form.vocabulary is None else summary.examples + summary.test_examples):
        return f"it says that {summary.cut_texts} texts were cut, which are more than it has"
    moments, form = summary.moments, summary.form
    if moments is not None:
        return _implausible(moments, form, summary.examples)
    return ""


def _implausible(moments: Moments, form: Form, examples: int) -> str:
    """Return why sums cannot be of so many examples, such as by Cauchy and Schwarz; "" if they can."""
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
    """Return the form of most devices, of a declared shape; of several as frequent, the first by its text."""
    counts = Counter(form for form in forms if not shape or form.input_shape == tuple(shape))
    return min(counts, key=lambda form: (-counts[form], str(form)), default=None)


def _other_spellings(summaries: Sequence[Summary]) -> dict[int, str]:
    """Return the devices that write a label otherwise than most, as nobody can see, and why they are left out.

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
    """Return which labels may be slips for each other or stand for missing values, with the devices that have them."""
    devices: dict[str, list[int]] = {}
    for summary in summaries:
        for name in summary.label_names:
            devices.setdefault(name, []).append(summary.device)
    return alike_in_words({name: f" of {named(numbers)}" for name, numbers in devices.items()})


def _label_names(
    summaries: Sequence[Summary], declared: tuple[str, ...], form: Form | None
) -> tuple[tuple[str, ...], dict[int, str]]:
    """Return the labels of a run in order, and the devices that would bring too many, which are left out."""
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


def words_of(unfit: Mapping[int, str]) -> str:
    """Return which devices were left out and why, the first few of them."""
    told = [f"device {device}: {why}" for device, why in sorted(unfit.items())[:5]]
    return "; ".join(told) + (f"; and {len(unfit) - 5} more" if len(unfit) > 5 else "")
