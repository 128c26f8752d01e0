"""What docs/plan.md and docs/export.md type is done as it stands there."""

import json
import os
import re
import shlex
import shutil
from datetime import datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.programs import run_python
from tests.small_run import simulated_grid
from wildflower.cli.command import app
from wildflower.launch.experiment_file import place, resolve
from wildflower.server_app.app import run

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(sh|python|text)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page):
    return BLOCK.findall((ROOT / "docs" / page).read_text())


def typed(line):
    """One line of a shell; a run is done in this process, and not by Flower's."""
    program, *words = shlex.split(line, comments=True)
    assert program == "wildflower"
    if words[0] == "run":
        assert words[2::2] == ["--set"] * (len(words[2:]) // 2)
        config, _ = place(resolve(Path(words[1]), words[3::2]).config, Path.cwd(), datetime(2026, 1, 1))
        run(simulated_grid(), config)
        return ""
    shown = CliRunner().invoke(app, words, env={"COLUMNS": "80"})
    assert shown.exit_code == 0, shown.output
    return shown.output


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the experiments of the project."""
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_plan(here):
    shown = [typed(line) for kind, text in blocks("plan.md") if kind == "sh" for line in text.splitlines()]
    [printed] = [text for kind, text in blocks("plan.md") if kind == "text"]
    said = [line.split() for line in shown[0].splitlines() if line.strip()]
    assert [line.split() for line in printed.splitlines() if line.strip()] == said[: len(said)]
    assert json.loads(shown[1])["method"] == "fedavg"
    whole, parts = (" ".join(text.split()) for text in shown[2:4])
    assert "50 board 2,198 to" in whole
    assert "50 board 7,842 to" in parts
    assert "A round waits for tier speed-1/20" in shown[4]
    assert "A round waits" not in shown[5]


@pytest.mark.thorough
def test_the_model(here):
    pytest.importorskip("onnxruntime")
    said = []
    for kind, text in blocks("export.md"):
        if kind == "sh":
            said += [typed(line) for line in text.splitlines()]
        else:
            environment = {"PATH": os.environ["PATH"], "HOME": str(here), "OMP_NUM_THREADS": "1"}
            done = run_python("-c", text, folder=here, environment=environment)
            assert done.returncode == 0, done.stderr
            said.append(done.stdout.strip())
    _, _, made, small, _, digit, table, predictions = said
    assert made == ""
    assert digit in set("0123456789")
    assert small in set("0123456789")
    assert "3.png" in table
    assert [p["label"] for p in json.loads(predictions) if p["file"] == "3.png"] == [digit]
