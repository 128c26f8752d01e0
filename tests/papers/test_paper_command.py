"""`wildflower paper`, by the commands of docs/paper-experiments.md."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from wildflower.cli.command import app
from wildflower.papers.catalog import entries
from wildflower.server_app.run_folder import read_summary

PAGE = Path("docs/paper-experiments.md").read_text()
COMMANDS = [line.split()[1:] for line in re.findall(r"```sh\n(wildflower .*)\n```", PAGE)]


def invoked(arguments, folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(folder)
    return CliRunner().invoke(app, arguments)


def test_the_page_has_every_option_that_runs_nothing_or_little():
    assert [options for _, *options in COMMANDS] == [
        [],
        ["recipfl/table-3-mnist", "--about"],
        ["hypemefed/figure-14", "--tiny"],
        ["hypemefed/figure-14", "--plan"],
        ["recipfl/table-3-mnist", "--row", "recipfl", "--row", "heterofl", "--seeds", "1-3"],
        ["recipfl/table-3-mnist", "--copy", "mine"],
    ]


def test_all_experiments_are_listed(tmp_path, monkeypatch):
    out = invoked(COMMANDS[0], tmp_path, monkeypatch).output
    assert all(one.name in out for one in entries())


def test_an_experiment_tells_what_the_paper_prints_and_leaves_open(tmp_path, monkeypatch):
    out = invoked(COMMANDS[1], tmp_path, monkeypatch).output
    assert "recipfl: 97.99 ± 0.58 strong, 95.44 ± 2.28 weak" in out
    assert "Open in the paper: Local training" in out
    assert (
        "Not here: FlexiFed, InclusiveFL, HeteroFL and DepthFL"
        in invoked(["paper", "recipfl/table-3-mnli", "--about"], tmp_path, monkeypatch).output
    )
    assert not any(tmp_path.iterdir())


def test_a_plan_names_rounds_hours_memory_and_models(tmp_path, monkeypatch):
    result = invoked(COMMANDS[3], tmp_path, monkeypatch)
    assert result.exit_code == 0, result.output
    assert re.search(
        r"hypemefed: 300 rounds of 10 of 50 devices, [\d.]+ simulated hours; at most \d+ MB", result.output
    )
    assert "5 exit 10" in result.output
    assert "31,562" in result.output  # parameters up to the first exit
    assert "285,956" in result.output  # and up to the tenth


def test_a_copy_is_all_that_its_command_needs(tmp_path, monkeypatch):
    result = invoked(COMMANDS[5], tmp_path, monkeypatch)
    assert result.output.splitlines() == ["cd mine", "wildflower sweep mnist.toml --rows mnist-rows.toml"]
    assert sorted(file.name for file in (tmp_path / "mine").iterdir()) == [
        "2-and-100-fleet.toml",
        "mnist-rows.toml",
        "mnist.toml",
    ]
    again = invoked(COMMANDS[5], tmp_path, monkeypatch)
    assert again.exit_code == 1
    assert "is there: name another folder" in again.output


def test_data_that_are_not_there_are_named_with_the_way_to_get_them(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    options = ["--row", "recipfl", "--seeds", "1", "--set", f"data-dir={tmp_path / 'empty'}"]
    result = invoked(["paper", "recipfl/table-3-cifar10-width", *options], tmp_path, monkeypatch)
    assert result.exit_code == 1
    assert "expected parquet files such as train-00000-of-00001.parquet" in result.output


@pytest.mark.parametrize("options", [["--row", "recipf"], ["--plan", "--row", "recipf"]])
def test_an_unknown_row_names_the_nearest(options, tmp_path, monkeypatch):
    result = invoked(["paper", "recipfl/table-3-mnist", *options], tmp_path, monkeypatch)
    assert result.exit_code == 1
    assert "has no row 'recipf': did you mean 'recipfl'" in result.output


@pytest.mark.thorough
def test_a_tiny_run_compares_all_rows(tmp_path, monkeypatch):
    result = invoked(COMMANDS[2], tmp_path, monkeypatch)
    assert result.exit_code == 0, result.output
    runs = sorted((tmp_path / "runs/hypemefed-figure-14-tiny").glob("*seed=1"))
    assert [run.name.partition(",")[0] for run in runs] == ["fedavg-s", "hypemefed"]
    assert all(read_summary(run).status == "finished" for run in runs)
