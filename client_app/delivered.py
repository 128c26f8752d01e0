"""Models that a device uses: a folder for each version, checked before `current` leads to it.

state-dir/model/VERSION/model.pt2 (or .onnx, .pte) and model.pt2.json are what `wildflower export` writes. `current`
leads to the version in use and `previous` to the one before it; others are removed. Both are links, which are replaced
whole, so that a program that opens `current/model.pt2` finds one version or the other.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from wildflower.client_app.context import DeviceContext
from wildflower.client_app.evaluation import personal_model
from wildflower.devices.private import sync
from wildflower.devices.validation import one_line
from wildflower.messages.delivery import Delivered, Delivery
from wildflower.messages.error import MessageError
from wildflower.messages.programs import (
    CHECKED,
    Facts,
    ProgramFormat,
    examples,
    facts_path,
    label_texts,
    program_of,
    read_program,
    with_preparation,
)
from wildflower.tasks.task import Task

FOLDER, CURRENT, PREVIOUS = "model", "current", "previous"
ASKED_TOGETHER = 64


class ModelFolderError(ValueError):
    """There is no model to use; the text says why."""


def own_program(
    file_format: ProgramFormat, round_number: int, task: Task, context: DeviceContext
) -> tuple[bytes, Mapping[str, Any]]:
    """Return the program of a device's personal model, and its facts, of which nothing is sent.

    Args:
        round_number: the one that the model is of.
        context: of the delivery's order.

    Raises MessageError where there is no such model, ExportError where it cannot be written here.
    """
    order, model = context.order, personal_model(context)
    inputs, _ = task.own_test(order.device)
    facts = Facts(
        format=file_format,
        task=task.spec.name,
        input_shape=list(task.input_shape),
        input_dtype=str(inputs.dtype).removeprefix("torch."),
        classes=task.classes,
        labels=label_texts(task.label_names, task.classes),
        columns=list(task.columns),
        mean=task.normalization and task.normalization[0].tolist(),
        std=task.normalization and task.normalization[1].tolist(),
        family=context.family.spec(),
        architecture=order.architecture,
        exits="deepest",
        metric=task.metric.name,
        score=None,
        round=round_number,
    )
    program = program_of(with_preparation(model, facts), facts, f"device {order.device}")
    return program, facts.model_dump(mode="json")


def take(delivery: Delivery, program: bytes, facts: Mapping[str, Any], task: Task, folder: Path) -> Delivered:
    """Keep a model, compare it with the one in use, and use it unless it is worse.

    Args:
        facts: of the program.
        task: whose test examples of this device are the ones held out. Without any, a model must answer numbers.
        folder: `FOLDER` in the device's state folder.

    Raises MessageError where the program is not the one that was sent.
    """
    if delivery.own is None and hashlib.sha256(program).hexdigest() != delivery.sha256:
        raise MessageError("the model that came is not the one that was sent: its sha256 is another")
    place, current = folder / delivery.version, folder / CURRENT
    beside = folder / f".{delivery.version}.{os.getpid()}.part"
    shutil.rmtree(beside, ignore_errors=True)  # of a process of the same number, which was killed
    beside.mkdir(parents=True)
    score = before = None
    why = ""
    try:
        file = beside / f"model.{delivery.file_format}"
        _write(file, program)
        _write(facts_path(file), json.dumps(facts, indent=2).encode())
        try:
            score = score_of(beside, task, delivery.device)
            if delivery.own is not None:
                _write(facts_path(file), json.dumps({**facts, "score": score}, indent=2).encode())
        except Exception as error:  # of any kind: PyTorch's reader has many
            why = one_line(f"it cannot be used here: {type(error).__name__}: {error}")
        if not why and current.exists() and current.resolve() != place.resolve():
            with suppress(Exception):  # the one in use is broken: any that works is better
                before = score_of(current, task, delivery.device)
            rank = task.metric.scale.rank
            if score is not None and before is not None and rank(score) < rank(before):
                held_out = len(task.own_test(delivery.device)[1])
                why = f"it is worse than the model in use on this device's {held_out} examples"
        if not why:
            if not _holds(place / file.name, program):
                shutil.rmtree(place, ignore_errors=True)
                os.replace(beside, place)
            use(folder, delivery.version)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return Delivered(
        run=delivery.run,
        device=delivery.device,
        version=delivery.version,
        used=not why,
        why=why,
        score=score,
        before=before,
    )


def _write(file: Path, data: bytes) -> None:
    """Write a file that is whole also after the board loses its power."""
    file.write_bytes(data)
    sync(file)


def _holds(file: Path, program: bytes) -> bool:
    """Whether a version is there already: one that is in use stays while it is read."""
    try:
        return file.read_bytes() == program
    except OSError:
        return False


def program_in(place: Path) -> Path:
    """Return the program in the folder of a version. Raises ModelFolderError without one."""
    for file in sorted(place.glob("model.*")):
        if file.suffix != ".json":
            return file
    raise ModelFolderError(f"{place} holds no program of a model")


def score_of(place: Path, task: Task, device: int) -> float | None:
    """Return the task's metric of a model on a device's held-out examples; None where the device holds none out.

    Raises ExportError where the model cannot be read or its library is not here, ValueError where it reads other inputs
    than the task's or says what are no numbers, and whatever its library raises.
    """
    program, facts = read_program(program_in(place))
    if facts.input_shape != list(task.input_shape):
        raise ValueError(f"it reads inputs of shape {facts.input_shape}, and the task's have {list(task.input_shape)}")
    inputs, labels = task.own_test(device)
    if not len(labels):
        _finite(program(examples(facts, CHECKED)))
        return None
    sums: list[float] = []
    for start in range(0, len(labels), ASKED_TOGETHER):
        part = slice(start, start + ASKED_TOGETHER)
        _, y = task.batch(inputs[part], labels[part], augment=None)
        found = task.metric.sums(task.answers(_finite(program(inputs[part]))), y)
        sums = [a + float(b) for a, b in zip(sums or [0.0] * len(found), found, strict=True)]
    return task.metric.value(sums, len(labels))


def _finite(outputs: Tensor) -> Tensor:
    if not bool(outputs.isfinite().all()):
        raise ValueError("what it says are no finite numbers")
    return outputs


def use(folder: Path, version: str) -> None:
    """Let `current` lead to a version, and `previous` to the one before; other versions are removed."""
    now = version_of(folder / CURRENT)
    if now != version:
        if now is not None:
            _lead(folder / PREVIOUS, now)
        _lead(folder / CURRENT, version)
    kept = {version_of(folder / CURRENT), version_of(folder / PREVIOUS)}
    for other in folder.iterdir():
        if other.is_dir() and not other.is_symlink() and other.name not in kept:
            shutil.rmtree(other)


def roll_back(folder: Path) -> str:
    """Use the version before the one in use, which becomes `previous`. -> it. Raises ModelFolderError without one."""
    now, before = version_of(folder / CURRENT), version_of(folder / PREVIOUS)
    if now is None or before is None:
        raise ModelFolderError(f"{folder} holds no model from before the one in use")
    _lead(folder / CURRENT, before)
    _lead(folder / PREVIOUS, now)
    return before


def version_of(link: Path) -> str | None:
    """Return the version that a link leads to; None where it leads to none."""
    return os.readlink(link) if link.is_symlink() and link.exists() else None


def _lead(link: Path, version: str) -> None:
    beside = link.with_name(f".{link.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    beside.symlink_to(version)
    os.replace(beside, link)
