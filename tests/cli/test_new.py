"""`wildflower new method`: what it writes runs, with its test."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.programs import run_python
from wildflower.cli.command import app

ROOT = Path(__file__).parents[2]


def invoke(*words):
    return CliRunner().invoke(app, ["new", "method", *words])


def test_names_become_files_and_classes(tmp_path):
    said = invoke("MyBest-2", "--folder", str(tmp_path / "new"))
    assert said.exit_code == 0, said.output
    assert said.stdout.splitlines()[-1] == "wildflower run EXPERIMENT.toml --set strategy=my_best_2:MyBest2"
    text = (tmp_path / "new/my_best_2.py").read_text()
    assert "class MyBest2(SubModelMethod[MyBest2Params])" in text
    assert len(text.splitlines()) <= 60
    assert invoke("my-best-2", "--folder", str(tmp_path / "new")).stderr.endswith("another name or --folder\n")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("2nd", "must be letters, digits and hyphens"),
        ("a/b", "must be letters"),
        ("class", "must be letters"),
        ("fedavg", "there is a method of this name"),
    ],
)
def test_other_names_are_refused(name, words, tmp_path):
    said = invoke(name, "--folder", str(tmp_path))
    assert said.exit_code == 1
    assert words in said.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
def test_what_is_written_passes_its_test(tmp_path):
    assert invoke("half-way", "--folder", str(tmp_path)).exit_code == 0
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path)))}
    ran = run_python("-m", "pytest", "-q", "test_half_way.py", folder=tmp_path, environment=environment)
    assert "1 passed" in ran.stdout, ran.stdout + ran.stderr
