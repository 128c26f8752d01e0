"""Classes that nothing could learn: one check for the data of every task."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from idx_files import idx_bytes
from text_files import write_lines

from tests.own_folders import image_folder
from wildflower.server_app.config import ConfigError, RunConfig
from wildflower.tasks.images import ImageArguments
from wildflower.tasks.spec import load_data_set
from wildflower.tasks.tables import TableArguments
from wildflower.tasks.task import TaskSpec, load_task
from wildflower.tasks.texts import OwnTextArguments

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 1, 8, 8), dtype=np.uint8)
FORMS = ("idx", "npz", "images", "table")


def spec_of(form: str, folder: Path, train: list[int], test: list[int]) -> TaskSpec:
    """Data of a form whose examples have these labels."""
    arguments: ImageArguments | TableArguments | None = None
    for part, labels in (("train", train), ("test", test)):
        inputs = PIXELS[: len(labels)]
        if form == "idx":
            for what, array in (("images-idx3", inputs[:, 0]), ("labels-idx1", np.array(labels))):
                (folder / f"{part}-{what}-ubyte").write_bytes(idx_bytes(array))
        elif form == "npz":
            np.savez(folder / f"{part}.npz", inputs=inputs, labels=np.array(labels))
        elif form == "images":
            image_folder(folder, inputs, labels, part)
            arguments = ImageArguments(color="gray")
        else:
            rows = [f"{image[0, 0, 0]},{label}" for image, label in zip(inputs, labels, strict=True)]
            (folder / f"{part}.csv").write_text("\n".join(["bright,label", *rows]))
            arguments = TableArguments(columns=("bright",), test="test.csv")
    return TaskSpec(name=form, devices=2, data_dir=str(folder), arguments=arguments)


@pytest.mark.parametrize("form", FORMS)
def test_a_class_that_only_test_examples_have_is_refused(form: str, tmp_path: Path) -> None:
    spec = spec_of(form, tmp_path, [0, 1, 0, 1, 0, 1], [0, 1, 2, 3])
    with pytest.raises(ValueError, match=r"test examples have labels '2', '3', which no training example has") as told:
        load_task(spec)
    assert str(told.value).startswith(f"{tmp_path}: ")


@pytest.mark.parametrize("form", FORMS)
def test_a_single_class_is_refused(form: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path}: all training examples have the label '0': at least two"):
        load_task(spec_of(form, tmp_path, [0, 0, 0, 0], [0, 0]))


@pytest.mark.parametrize("form", FORMS)
def test_test_examples_need_not_have_every_class(form: str, tmp_path: Path) -> None:
    assert load_task(spec_of(form, tmp_path, [0, 1, 2, 0, 1, 2], [0, 2])).classes == 3


def test_public_data_may_have_one_class(tmp_path: Path) -> None:
    """Their labels are not looked at."""
    spec = spec_of("npz", tmp_path, [0, 0, 0, 0], [0, 0])
    assert len(load_data_set(spec.name, spec.data_dir, spec.arguments).train) == 4


def test_named_files_with_more_classes_than_names_are_told_by_number(tmp_path: Path) -> None:
    spec_of("idx", tmp_path, [0, 1, 0, 1], [0, 12])
    with pytest.raises(ValueError, match="test examples have the label '12', which no"):
        load_task(TaskSpec(name="mnist", devices=2, data_dir=str(tmp_path)))


def test_classes_that_a_user_declares_of_texts_may_be_tested_on_alone(tmp_path: Path, tokenizer: str) -> None:
    write_lines(tmp_path / "train.jsonl", *({"text": text, "label": text} for text in ("good", "bad")))
    write_lines(tmp_path / "test.jsonl", {"text": "not", "label": "not"})
    arguments = OwnTextArguments(tokenizer=tokenizer, test="test.jsonl", classes=("bad", "good", "not"))
    task = load_task(TaskSpec(name="text", devices=2, data_dir=str(tmp_path), arguments=arguments))
    assert (task.classes, task.test.labels.tolist()) == (3, [2])


@pytest.mark.parametrize("argument", ["classes = ['a', 'b']", "input_shape = [1, 8, 8]", "mean = [0.5], std = [0.1]"])
def test_what_devices_with_data_of_their_own_agree_on_is_refused_elsewhere(argument: str) -> None:
    names = ", ".join(part.split(" ")[0] for part in argument.split(", ") if "=" in part)
    keys = {"task": "npz", "task-arguments": argument}
    with pytest.raises(ConfigError, match=f": {names} would be read under partition = 'own' only: under 'iid'"):
        RunConfig.from_run_config({**keys, "partition": "iid"})
    RunConfig.from_run_config({**keys, "partition": "own", "data-dir": "here"})
