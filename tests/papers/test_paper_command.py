"""`wildflower paper`, by the commands of docs/paper-experiments.md."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from wildflower.cli.command import app
from wildflower.launch.experiment_file import beside
from wildflower.launch.sweeps import plan
from wildflower.papers.catalog import entries, entry
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


# One whose rows have no fleet of their own, and of each paper with such rows one.
SOME = (
    "hypemefed/figure-14",
    "hypemefed/figure-15",
    "inclusivefl/table-2-rte",
    "rafl/table-1-cifar100",
    "recipfl/figure-5-weak",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(one.name, marks=() if one.name in SOME else pytest.mark.thorough) for one in entries()],
)
def test_runs_of_all_rows_can_be_started(name, tmp_path, monkeypatch):
    planned = []

    def plan_alone(request, html):
        with beside(request.experiment):
            planned.extend(plan(request))

    monkeypatch.setattr("wildflower.cli.paper_command.do_sweep", plan_alone)
    result = invoked(["paper", name, "--tiny"], tmp_path, monkeypatch)
    assert result.exit_code == 0, result.output
    rows = entry(name).methods()
    assert [run.row for run in planned] == [row.name for row in rows]
    for run, row in zip(planned, rows, strict=True):
        [own] = [text for text in row.overrides if text.startswith("fleet=")] or entry(name).settings()
        [last] = [text for text in run.overrides if text.startswith("fleet=")][-1:]
        # Of a fleet of strong and weak devices a copy with fewer weak ones may stand in its place.
        assert last == own or Path(last).name.endswith(f"-of-{Path(own).name}")


def test_data_that_are_not_there_are_named_with_the_way_to_get_them(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    options = ["--row", "recipfl", "--seeds", "1", "--set", f"data-dir={tmp_path / 'empty'}"]
    result = invoked(["paper", "recipfl/table-3-cifar10-width", *options], tmp_path, monkeypatch)
    assert result.exit_code == 1
    assert "expected parquet files such as train-00000-of-00001.parquet" in result.output


def test_the_name_of_a_paper_lists_its_experiments(tmp_path, monkeypatch):
    listed = invoked(["paper", "rafl"], tmp_path, monkeypatch)
    assert listed.exit_code == 0
    found = re.findall(r"(\w+)/(?:table|figure)-", listed.output)
    assert len(found) == sum(one.name.startswith("rafl/") for one in entries())
    assert set(found) == {"rafl"}


@pytest.mark.parametrize("name", ["recipfl/table-2", "recipfl/x"])
def test_an_unknown_table_of_a_paper_names_what_lists_its_own(name, tmp_path, monkeypatch):
    result = invoked(["paper", name, "--tiny"], tmp_path, monkeypatch)
    assert result.exit_code == 1
    assert "`wildflower paper recipfl` lists that paper's" in " ".join(result.output.split())
    assert "rafl/" not in result.output


@pytest.mark.parametrize("arguments", [["recipfl/table-3"], ["recipfl", "--row", "heterofl"], ["rec"]])
def test_what_would_run_an_experiment_that_is_cut_off_fails(arguments, tmp_path, monkeypatch):
    result = invoked(["paper", *arguments], tmp_path, monkeypatch)
    assert result.exit_code == 1
    assert "that begin so: recipfl/table-3-cifar10-depth" in " ".join(result.output.split())


@pytest.mark.parametrize("options", [["--tiny"], ["--row", "heterofl"]])
def test_options_without_an_experiment_are_told_what_lists_them(options, tmp_path, monkeypatch):
    result = invoked(["paper", *options], tmp_path, monkeypatch)
    assert result.exit_code == 2
    assert "name an experiment" in result.output


def test_the_help_says_what_the_argument_is(tmp_path, monkeypatch):
    assert "recipfl/table-3-mnist" in invoked(["paper", "--help"], tmp_path, monkeypatch).output


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
