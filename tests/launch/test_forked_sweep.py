"""Runs of a sweep that are forked from its command."""

import subprocess
import sys
from pathlib import Path

import pytest

from wildflower.launch import child, sweeps
from wildflower.launch.terminal import terminal

ROOT = Path(__file__).parents[2]
EXPERIMENT = """
task = "digits"
fleet = "digits-demo"
devices = 20
devices-per-round = 4
rounds = 1
workers = 1
local-epochs = 1
"""


def wildflower(*arguments):
    command = [sys.executable, "-m", "wildflower", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)


@pytest.mark.thorough
def test_a_forked_run_has_the_bits_of_one_by_itself(tmp_path):
    (tmp_path / "exp.toml").write_text(EXPERIMENT)
    done = wildflower("sweep", str(tmp_path / "exp.toml"), "--seeds", "1-2", "--folder", str(tmp_path / "sweep"))
    assert "2/2 seed=2: delivered accuracy" in done.stdout
    sets = ["seed=2", f"output-dir={tmp_path}", "run-name=alone"]
    wildflower("run", str(tmp_path / "exp.toml"), *(word for each in sets for word in ("--set", each)))
    alone, forked = tmp_path / "alone", tmp_path / "sweep" / "seed=2"
    models = [file.relative_to(alone) for file in sorted(alone.rglob("*.safetensors"))]
    assert Path("models/best/global.safetensors") in models
    for model in models:
        assert (alone / model).read_bytes() == (forked / model).read_bytes(), model


@pytest.mark.parametrize("alone", [True, False])
def test_runs_of_the_command_are_forked(alone, tmp_path, runs, monkeypatch):
    begun, loaded = [], []

    def fork(experiment, overrides, output, hooks, shared):
        begun.append(hooks)
        with output.open("ab") as file:
            return runs.start(experiment, overrides, file)

    monkeypatch.setattr(child, "load_for_forks", lambda: loaded.append(1) or True)
    monkeypatch.setattr(child, "fork", fork)
    (tmp_path / "exp.toml").write_text(EXPERIMENT)
    asked = sweeps.SweepRequest(tmp_path / "exp.toml", [], tmp_path / "sweep", [1, 2], alone=alone)
    outcome = sweeps.sweep(asked, terminal())
    assert [run.seed for run in outcome.finished] == [1, 2]
    assert begun == ([(), ()] if alone else [])
    assert bool(loaded) is alone
