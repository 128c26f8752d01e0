"""Sweeps, with a stand-in for the processes of `wildflower run` that writes a run's journal at once."""

import re

import pytest
from typer.testing import CliRunner

from server_app.journal import read_config, read_summary
from tests.wildflower.fake_child import Runs
from wildflower import sweeps
from wildflower.command import app
from wildflower.settings import SettingsError

EXPERIMENT = 'task = "digits"\nrounds = 1\ndevices = 10\n'


@pytest.fixture
def runs(monkeypatch):
    made = Runs()
    monkeypatch.setattr("wildflower.child.start", made.start)
    monkeypatch.setattr(sweeps, "LOOK_SECONDS", 0.0)
    return made


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "exp.toml").write_text(EXPERIMENT)
    return tmp_path


def swept(folder, *arguments):
    command = ["sweep", str(folder / "exp.toml"), "--folder", str(folder / "out"), *arguments]
    return CliRunner().invoke(app, command, env={"COLUMNS": "200"})


@pytest.mark.parametrize(
    ("text", "seeds"), [("1-3", [1, 2, 3]), ("4", [4]), ("1, 4 ,7-8,1", [1, 4, 7, 8]), ("0-0", [0])]
)
def test_seeds(text, seeds):
    assert sweeps.parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "a", "3-1", "1-", "-1", "1-99999", "1.5", "1 2", "9" * 30])
def test_seeds_that_are_none(text):
    with pytest.raises(SettingsError, match="--seeds"):
        sweeps.parse_seeds(text)


def test_a_grid_is_of_keys_and_their_values():
    texts = ["strategy=heterofl, fedrolex", 'widths="1, 0.5","1, 0.25"']
    assert sweeps.parse_grid(texts) == {"strategy": ["heterofl", "fedrolex"], "widths": ["1, 0.5", "1, 0.25"]}


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["strategy"], "not of the form"),
        (["=a,b"], "not of the form"),
        (["strategy="], "not of the form"),
        (["strategy=a", "strategy=b"], "given twice"),
        (["strategy=a,,b"], "empty"),
        (["strategy=a,a"], "twice"),
    ],
)
def test_grids_that_are_none(texts, words):
    with pytest.raises(SettingsError, match=words):
        sweeps.parse_grid(texts)


def test_names_tell_runs_apart_and_are_names_of_folders():
    assert sweeps.run_name(["strategy=heterofl", "seed=1"]) == "strategy=heterofl,seed=1"
    assert sweeps.run_name(["fleet=/a b/c.toml"]) == "fleet=_a_b_c.toml"
    long = [sweeps.run_name([f"widths={'1,' * 100}{last}"]) for last in (1, 2)]
    assert long[0] != long[1]
    assert max(map(len, long)) <= sweeps.MAX_NAME_LETTERS


def test_every_value_is_run_with_every_seed_and_laid_side_by_side(folder, runs):
    done = swept(
        folder, "--seeds", "1-2", "--grid", "strategy=heterofl,fedrolex", "--set", "batch-size=7", "--jobs", "2"
    )
    assert done.exit_code == 0, done.output
    asked = [(call["strategy"], call["seed"], call["batch-size"]) for call in runs.asked]
    assert asked == [(s, seed, "7") for s in ("heterofl", "fedrolex") for seed in ("1", "2")]
    run_dir = folder / "out" / "strategy=fedrolex,seed=2"
    assert read_config(run_dir)["config"]["strategy"] == "fedrolex"
    assert f"4/4 {run_dir.name}: delivered accuracy 60 %, whole model 70 % in" in done.output
    # Two rows of two seeds each, which deliver 50 % and 60 %; the whole models have 60 % and 70 %.
    assert len(re.findall(r"1-2 .* 55\.0 ± 7\.1 .* 65\.0 ± 7\.1 ", done.output)) == 2


def test_what_is_finished_is_not_run_again(folder, runs):
    assert swept(folder, "--seeds", "1-2").exit_code == 0
    done = swept(folder, "--seeds", "1-3")
    assert done.exit_code == 0
    assert "3 runs" in done.output
    assert "2 of them finished" in done.output
    assert [call["seed"] for call in runs.asked] == ["1", "2", "3"]


def test_a_run_that_fails_leaves_the_others_alone_and_is_tried_again(folder, runs):
    runs.fails = "seed=2"
    done = swept(folder, "--seeds", "1-3")
    assert done.exit_code == 1
    assert "seed=2: failed; see" in done.output
    assert "no data are here" in done.output
    assert "seed=3: delivered accuracy 70 %, whole model 80 %" in done.output
    runs.fails = ""
    assert swept(folder, "--seeds", "1-3").exit_code == 0
    assert [call["seed"] for call in runs.asked] == ["1", "2", "3", "2"]


def test_settings_that_no_run_can_start_with_are_said_before_any_is_started(folder, runs):
    done = swept(folder, "--grid", "strategy=heterofl,fedrolecks")
    assert done.exit_code == 1
    assert "fedrolecks" in done.output
    done = swept(folder, "--grid", "no-such-key=1,2")
    assert done.exit_code == 1
    assert "no-such-key" in done.output
    done = swept(folder, "--grid", "rounds=1,many")
    assert done.exit_code == 1
    assert "rounds" in done.output
    done = swept(folder, "--set", "seed=3")
    assert done.exit_code == 1
    assert "seed is given for all runs" in done.output
    for key, words in (("seed=1,2", "give the seeds as such"), ("run-name=a", "sets it for every run")):
        done = swept(folder, "--grid", key)
        assert done.exit_code == 1
        assert words in done.output
    assert runs.asked == []
    assert not (folder / "out").exists()


def test_a_folder_with_runs_of_other_settings_is_refused(folder, runs):
    assert swept(folder, "--seeds", "1").exit_code == 0
    done = swept(folder, "--seeds", "1", "--set", "batch-size=7")
    assert done.exit_code == 1
    assert "batch-size was" in done.output
    assert "another folder" in done.output
    assert len(runs.asked) == 1


def test_more_rounds_go_on_where_a_run_ended(folder, runs):
    assert swept(folder, "--seeds", "1").exit_code == 0
    done = swept(folder, "--seeds", "1", "--set", "rounds=2")
    assert "0 of them finished" in done.output
    assert runs.asked[1]["resume"] == "true"


def test_a_sweep_that_is_stopped_stops_its_runs_and_goes_on_later(folder, runs):
    runs.waits = True
    done = swept(folder, "--seeds", "1-2")
    assert done.exit_code == 130
    assert "Stopped" in done.output
    runs.waits = False
    assert swept(folder, "--seeds", "1-2").exit_code == 0
    asked = [(call["seed"], "resume" in call) for call in runs.asked]
    assert asked == [("1", False), ("1", True), ("2", False)]
    assert read_summary(folder / "out" / "seed=1").status == "finished"
