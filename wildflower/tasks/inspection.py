"""Reports of data before round 1: what a device says of its own, and what a person sees of any."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

from wildflower.tasks.data import DataSet
from wildflower.tasks.device_data import (
    MAX_PROBLEM_LETTERS,
    Summary,
    UnfitError,
    alike_in_words,
    check_labels,
    fitted,
    form_of,
    label_names_of,
    moments_of,
)
from wildflower.tasks.labels import NO_LABEL
from wildflower.tasks.remarks import Remark, in_words
from wildflower.tasks.spec import TaskSpec, folder_of, kind_of, own_data
from wildflower.tasks.task import Task
from wildflower.tasks.two_parts import seldom_meant


def describe(spec: TaskSpec, device: int, *, moments: bool) -> Summary:
    """Return what a device says of its data: never an example.

    Args:
        spec: where `agreed` is given, the data must fit it, and neither labels nor sums are told.
        device: its number.
        moments: whether sums per channel are needed.
    """
    try:
        data = own_data(spec, folder_of(spec, device))
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
            left_out = f": {in_words(remarks)}" if remarks else ""
            raise UnfitError(f"it has no training examples{left_out}")
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
    """The facts of a data set, or of one device's data, that a person should know before round 1.

    Attributes:
        counts: of each label how many examples there are to train on and to test on; {} where labels are numbers.
        remarks: what was left out and why, and what is seldom meant.
        problem: why the data cannot be read, or cannot take part; "" where they can. The rest is then empty.
    """

    counts: dict[str, tuple[int, int]]
    remarks: tuple[Remark, ...] = ()
    problem: str = ""


def labels_alike(task: Task) -> list[str]:
    """Return which labels of a user's files look alike or stand for missing values, where nobody has declared them."""
    declared = getattr(task.spec.arguments, "classes", ())
    if kind_of(task.spec.name).own is None or declared:
        return []
    return alike_in_words(dict.fromkeys(task.label_names, ""))


def inspect_device(spec: TaskSpec, device: int) -> Inspection:
    """Look at the data of a device under the partition "own", whose folder lies on this machine.

    Where `agreed` is given, the data must fit it.
    """
    try:
        data = own_data(spec, folder_of(spec, device))
        found = Inspection(_counts(data), data.remarks)
        if spec.agreed is not None:
            fitted(data, spec.agreed)
        return found
    except UnfitError as error:
        return Inspection({}, problem=str(error))


def inspect_whole(task: Task) -> Inspection:
    """Look at the data of a task that deals them out."""
    data = DataSet(task.train, task.test, task.classes, label_names=task.label_names)
    return Inspection(_counts(data), (*task.remarks, *seldom_meant(task.train, task.test)))


def _counts(data: DataSet) -> dict[str, tuple[int, int]]:
    """Count the examples, or tokens, of each label, to train on and to test on."""
    if data.train.label_kind == "numbers":
        return {}
    names = data.label_names or tuple(map(str, range(data.classes)))
    train, test = (
        part.labels[part.labels != NO_LABEL].bincount(minlength=len(names)).tolist() for part in (data.train, data.test)
    )
    return {name: (train[number], test[number]) for number, name in enumerate(names)}


def server_test(spec: TaskSpec) -> DataSet | None:
    """Return the server's test set under the partition "own", from its own folder; None if there is none.

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
    """Return the task with the test set that `server_test` found; UnfitError where it does not fit what is agreed."""
    assert task.spec.agreed is not None
    found = copy(task)
    data = fitted(test, task.spec.agreed)
    found.test, found.vocabulary, found.remarks = data.test, data.vocabulary, test.remarks
    return found
