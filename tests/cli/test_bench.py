"""The recorded benchmarks as the command knows them."""

import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from wildflower.cli.bench import BenchError, benchmarks_of, start
from wildflower.cli.command import app

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path):
    for name, text in {
        "one/run.py": '"""The first\nof two; resumable.\n\nMore."""\nif __name__ == "__main__":\n    print()\n',
        "one/other.py": '"""Beside it."""\nif __name__ == "__main__":\n    print()\n',
        "one/parts.py": '"""No benchmark."""\n',
        "shared.py": '"""None either."""\nif __name__ == "__main__":\n    print()\n',
    }.items():
        path = tmp_path / "benchmarks" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_benchmarks_are_files_that_can_be_run(project, tmp_path):
    assert benchmarks_of(project) == {"one": "The first of two", "one.other": "Beside it."}
    with pytest.raises(BenchError, match="belong to a clone"):
        benchmarks_of(tmp_path / "benchmarks")


@pytest.mark.parametrize(("name", "module"), [("one", "benchmarks.one.run"), ("one.other", "benchmarks.one.other")])
def test_a_benchmark_is_run_in_the_projects_folder(name, module, project, monkeypatch):
    called = []
    monkeypatch.setattr(os, "execv", lambda *arguments: called.append((*arguments, Path.cwd())))
    monkeypatch.chdir(ROOT)
    start(project, name, ["--jobs", "2"])
    assert called == [(sys.executable, [sys.executable, "-m", module, "--jobs", "2"], project)]


def test_a_name_that_is_none_is_told(project):
    with pytest.raises(BenchError, match=r"no benchmark 'on': did you mean 'one'\?"):
        start(project, "on", [])


def test_the_command_lists_those_of_this_clone_and_passes_arguments_on(monkeypatch):
    listed = CliRunner().invoke(app, ["bench"], env={"COLUMNS": "160"})
    assert listed.exit_code == 0
    names = {line.split("│")[1].strip() for line in listed.output.splitlines() if line.startswith("│")}
    assert names - {""} == set(benchmarks_of(ROOT))
    assert {"fashion_mnist", "overhead", "hypemefed.guesses"} <= names
    called = []
    monkeypatch.setattr("wildflower.cli.bench.start", lambda *arguments: called.append(arguments))
    assert CliRunner().invoke(app, ["bench", "scale", "--jobs", "2", "x"]).exit_code == 0
    assert called == [(ROOT, "scale", ["--jobs", "2", "x"])]
    assert CliRunner().invoke(app, ["bench", "--help"]).exit_code == 0


def test_every_benchmark_says_what_it_is_about():
    assert all(benchmarks_of(ROOT).values())
