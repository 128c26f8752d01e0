"""`wildflower predict`: what a model of a run, or an exported one, says of the images of a folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from wildflower.devices.validation import one_line
from wildflower.messages.programs import (
    FORMATS,
    ExportError,
    Facts,
    Program,
    asked,
    check_numbers,
    read_program,
    with_preparation,
)
from wildflower.plugins.beside import looked_for_beside
from wildflower.plugins.user_error import UserError
from wildflower.server_app.export import facts_of
from wildflower.server_app.models import Which, load_model, modules_of
from wildflower.tasks.class_folders import SUFFIXES, is_image
from wildflower.tasks.decoding import read_image

MAX_IMAGES = 10_000
MODES = {1: "L", 3: "RGB"}  # by the number of channels
ASKED_TOGETHER = 64


class PredictError(UserError):
    """A folder or a model that predictions cannot be made with; the text says why."""


@dataclass(frozen=True)
class Prediction:
    """The model's answer for one file.

    Attributes:
        label: its name, or its number where the task has no names; None where the file cannot be read.
        share: of the softmax; None where the model says numbers and no classes.
        value: what the model says where it says a number.
        problem: why the file cannot be read.
    """

    file: str
    label: str | None = None
    share: float | None = None
    value: float | None = None
    problem: str | None = None


def predict(source: Path, folder: Path, *, which: Which = "best", tier: str | None = None) -> list[Prediction]:
    """Ask a model about every image of a folder, in the order of their names.

    An image becomes gray or RGB, as the model has one channel or three, and is scaled to the size that the model reads.
    Values of its pixels, 0 to 255, are handed on as they are.

    Args:
        source: the folder of a run, or an exported model. A module of one's own that a safetensors file goes into lies
            beside that file.
        folder: the images; other files are not looked at, nor are folders in it.
        which, tier: of a run, as of `wildflower.server_app.models.load_model`.

    Raises:
        PredictError: there are no images or too many, or the model does not read images.
        ModelError, ExportError: there is no such model.
    """
    # Modules are looked for until all is predicted: one of a user's own may import others as late as when it is asked.
    if source.is_file() or (not source.is_dir() and source.suffix.removeprefix(".") in FORMATS):
        if tier is not None:
            raise ExportError(f"{source} is one model: --tier is about the models of a run")
        with looked_for_beside(source.parent):
            return _predict(*read_program(source), folder)
    with modules_of(source):
        return _predict(*_of_run(source, which, tier), folder)


def _predict(program: Program, facts: Facts, folder: Path) -> list[Prediction]:
    if len(facts.input_shape) != 3 or facts.input_shape[0] not in MODES or facts.input_dtype == "int64":
        shape = "x".join(map(str, facts.input_shape))
        raise PredictError(
            f"the model of the task {facts.task!r} reads {shape} inputs, and `wildflower predict` is for models of "
            "images only: `wildflower export` writes others for programs of your own (docs/export.md)"
        )
    try:
        files = sorted(path for path in folder.iterdir() if is_image(path) and path.is_file())
    except OSError as error:
        raise PredictError(f"cannot read the folder {folder}: {error.strerror}") from None
    if not files:
        raise PredictError(f"{folder} holds no images: their names end in {', '.join(SUFFIXES)}")
    if len(files) > MAX_IMAGES:
        raise PredictError(f"{folder} holds {len(files)} images: at most {MAX_IMAGES} at once")
    return list(_predictions(files, program, facts))


def _of_run(source: Path, which: Which, tier: str | None) -> tuple[Program, Facts]:
    model, info = load_model(source, which, tier)
    facts = facts_of(info, "safetensors")
    return asked(with_preparation(model, facts)), facts


def _predictions(files: list[Path], program: Program, facts: Facts) -> Iterator[Prediction]:
    for start in range(0, len(files), ASKED_TOGETHER):
        read: list[Tensor | str] = [_read(path, facts) for path in files[start : start + ASKED_TOGETHER]]
        inputs = [image for image in read if isinstance(image, Tensor)]
        outputs: Iterator[Tensor] = iter(())
        if inputs:
            said = program(torch.stack(inputs))
            check_numbers(said, f"the model of the task {facts.task!r}")
            outputs = iter(said)
        for path, image in zip(files[start:], read, strict=False):
            if isinstance(image, str):
                yield Prediction(path.name, problem=image)
            else:
                yield _prediction(path.name, next(outputs), facts)


def _prediction(file: str, output: Tensor, facts: Facts) -> Prediction:
    if facts.classes == 1:
        return Prediction(file, value=float(output.flatten()[0]))
    shares = output.softmax(dim=-1)
    number = int(shares.argmax())
    return Prediction(file, facts.labels[number] if facts.labels else str(number), float(shares[number]))


def _read(path: Path, facts: Facts) -> Tensor | str:
    """The image as the model reads it, (channels, height, width), or what is wrong with the file."""
    channels, height, width = facts.input_shape
    try:
        pixels = read_image(path, MODES[channels], (height, width))
    except ValueError as error:
        return one_line(str(error), 200)
    return pixels.float() if facts.input_dtype == "float32" else pixels
