"""Predictions of a folder of images are those of the scorer, and what is no image is told."""

import json

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from tests.small_run import simulated_grid, small_config
from wildflower.cli import predict as module
from wildflower.cli.command import app
from wildflower.cli.predict import PredictError, predict
from wildflower.server_app.app import build, run
from wildflower.server_app.export import export
from wildflower.tasks.task import TaskSpec, load_task


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    keys = {"rounds": 1, "evaluate-every": 1, "local-steps": 10, "examples-per-device": 200}
    config = small_config(tmp_path_factory.mktemp("run"), **keys)
    task = load_task(TaskSpec.from_json(build(config)[0].settings.task))
    return run(simulated_grid(), config), task


@pytest.fixture
def images(a_run, tmp_path):
    """Twenty images of the test set, a file that is none, and another that is not looked at."""
    folder = tmp_path / "images"
    folder.mkdir()
    for number, image in enumerate(a_run[1].test.inputs[:20]):
        Image.fromarray(image[0].numpy()).save(folder / f"{number:02}.png")
    (folder / "zz.jpg").write_bytes(b"no image")
    (folder / "notes.txt").write_text("not looked at")
    return folder


@pytest.mark.thorough
def test_a_run_and_its_export_say_what_the_model_says(a_run, images, tmp_path):
    run_dir, task = a_run
    from wildflower.server_app.models import load_model

    model, info = load_model(run_dir)
    with torch.no_grad():
        right = model(info.prepare(task.test.inputs[:20])).softmax(1)
    found = predict(run_dir, images)
    assert [p.file for p in found] == [*(f"{n:02}.png" for n in range(20)), "zz.jpg"]
    assert [p.label for p in found[:20]] == [str(int(n)) for n in right.argmax(1)]
    assert [p.share for p in found[:20]] == pytest.approx(right.amax(1).tolist(), abs=1e-6)
    assert "of no image format" in found[-1].problem
    for file_format in ("pt2", "safetensors"):
        exported = predict(export(run_dir, file_format=file_format, out=tmp_path / f"m.{file_format}"), images)
        assert [(p.file, p.label, p.problem) for p in exported] == [(p.file, p.label, p.problem) for p in found]


def test_other_sizes_and_colors_become_what_the_model_reads(a_run, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    image = Image.fromarray(a_run[1].test.inputs[3][0].numpy())
    image.save(folder / "a.png")
    image.resize((64, 64), Image.Resampling.NEAREST).convert("RGBA").save(folder / "b.png")
    image.save(folder / "c.pgm")  # which training reads too
    first, second, third = predict(a_run[0], folder)
    assert first.label == second.label == third.label
    assert (second.problem, third.problem) == (None, None)


def test_bounds_hold(a_run, images, tmp_path, monkeypatch):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(PredictError, match="holds no images: their names end in"):
        predict(a_run[0], empty)
    with pytest.raises(PredictError, match="cannot read the folder"):
        predict(a_run[0], tmp_path / "nowhere")
    monkeypatch.setattr(module, "MAX_IMAGES", 3)
    with pytest.raises(PredictError, match="21 images: at most 3"):
        predict(a_run[0], images)
    monkeypatch.setattr(module, "MAX_IMAGES", 30)
    monkeypatch.setattr("wildflower.tasks.decoding.MAX_PIXELS", 63)
    assert all(p.problem for p in predict(a_run[0], images))
    facts = module._of_run(a_run[0], "best", None)[1].model_copy(update={"task": "text", "input_shape": [13]})
    monkeypatch.setattr(module, "_of_run", lambda *which: (None, facts))
    with pytest.raises(PredictError, match="reads 13 inputs, and `wildflower predict` is for models of images only"):
        predict(a_run[0], images)


def test_the_command(a_run, images):
    def invoke(*arguments):
        return CliRunner().invoke(app, ["predict", *map(str, arguments)], env={"COLUMNS": "100"})

    shown = invoke(a_run[0], images)
    assert (shown.exit_code, "07.png" in shown.output, "its bytes" in shown.output) == (1, True, True)
    (images / "zz.jpg").unlink()
    shown = invoke(a_run[0], images, "--tier", "half", "--json")
    assert shown.exit_code == 0, shown.output
    assert len(json.loads(shown.stdout)) == 20
    shown = invoke(images, images)
    assert (shown.exit_code, "is not the folder of a run" in shown.stderr) == (1, True)
