"""docs/your-devices.md is done as it stands there; its nodes are those of an in-process grid."""

import itertools
import json
import re
import shlex
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.grid import InProcessGrid
from tests.small_run import simulated_grid
from wildflower.cli.command import app
from wildflower.client_app.app import app as client
from wildflower.launch.experiment_file import place, resolve
from wildflower.server_app.app import run
from wildflower.server_app.run_folder import read_rounds
from wildflower.tasks.inspection import describe
from wildflower.tasks.task import TASKS, TaskSpec

PAGE = (Path(__file__).parents[2] / "docs" / "your-devices.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
PYTHON = [text for kind, text in BLOCKS if kind == "python"]
LINES = [shlex.split(line) for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the page's photos and files."""
    monkeypatch.chdir(tmp_path)
    exec(PYTHON[0], {})
    tables = [text for kind, text in BLOCKS if kind == "toml"]
    for name, text in zip(("photos.toml", "boards.toml"), tables, strict=True):
        Path(name).write_text(text)
    return tmp_path


def node_config(words):
    """What a node is told by its command line."""
    [config] = [word for before, word in itertools.pairwise(words) if before == "--node-config"]
    pairs = [pair.split("=", 1) for pair in shlex.split(config)]
    return {key: int(value) if value.isdecimal() else value for key, value in pairs}


def resolved(words):
    """The configuration of a line `wildflower run`."""
    overrides = [word for before, word in itertools.pairwise(words) if before == "--set"]
    return place(resolve(Path(words[2]), overrides).config, Path.cwd(), datetime(2026, 1, 1))[0]


@pytest.mark.thorough
def test_from_photos_to_a_model(here, caplog):
    nodes = [node_config(words) for words in LINES if words[0] == "wildflower-node"]
    runs = [words for words in LINES if words[:2] == ["wildflower", "run"]]
    others = [words for words in LINES if words[0] == "wildflower" and words[1] != "run"]
    assert [words[1] for words in others] == ["plan", "export", "predict"]
    assert len(nodes) == 3

    planned = CliRunner().invoke(app, others[0][1:])
    assert planned.exit_code == 0, planned.output
    simulated = run(simulated_grid(), resolved(runs[0]))
    assert read_rounds(simulated)[-1].devices_replied == 3
    caplog.clear()
    run_dir = run(InProcessGrid(client, 3, lambda node: nodes[node - 1]), resolved(runs[1]))
    last = read_rounds(run_dir)[-1]
    assert (last.devices_replied, last.scored_devices) == (3, 3)
    [logged] = re.findall(r"^    (3 devices .*)$", PAGE, re.MULTILINE)
    assert logged in caplog.text

    for words in others[1:]:
        shown = CliRunner().invoke(app, words[1:], env={"COLUMNS": "80"})
        assert shown.exit_code == 0, shown.output
    labels = json.loads(Path("photos.pt2.json").read_text())["labels"]
    assert labels == [f"digit-{number}" for number in range(10)]
    assert "digit-" in shown.output


def test_a_reader_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "recordings.py").write_text(PYTHON[1])
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "device"
    folder.mkdir()
    spec = TaskSpec(name="recordings:RECORDINGS", devices=1, data_dir=str(folder), partition="own", test_fraction=0.5)
    assert "no recordings" in describe(spec, 0, moments=True).problem
    for number, label in enumerate(["cough", "sneeze"] * 2):
        np.save(folder / f"{label}-{number}.npy", np.full(16, number))
    found = describe(spec, 0, moments=True)
    assert (found.examples, found.test_examples, found.label_names) == (2, 2, ("cough", "sneeze"))
    assert found.form.input_shape == (1, 16)


def test_all_tasks_that_devices_may_hold_are_listed():
    table = PAGE.partition("## What lies in a folder")[2].partition("##")[0]
    listed = re.findall(r"^\| `([a-z]+)` \|", table, re.MULTILINE)
    assert listed[0] == "task"
    assert set(listed[1:]) == {name for name, kind in TASKS.items() if kind.own}
