"""Searches: what is asked of trials, which of them are ended, how a search goes on, and what compare says of it."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from typer.testing import CliRunner

import wildflower as wf
from tests.server_app import fake_runs
from wildflower.cli.command import app
from wildflower.launch import child, tuning
from wildflower.launch.tuning import checked_space, parse_space
from wildflower.server_app.run_records import RoundRecord


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exp.toml").write_text('task = "digits"\nrounds = 2\ndevices-per-round = 3\n')
    return "exp.toml"


def test_what_is_searched():
    space = parse_space(["learning-rate = 0.001..0.3", "batch-size=8..32", "strategy=heterofl, fedavg"])
    assert space == {
        "learning-rate": FloatDistribution(0.001, 0.3, log=True),
        "batch-size": IntDistribution(8, 32),
        "strategy": CategoricalDistribution(["heterofl", "fedavg"]),
    }


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ({}, "there is no key to search"),
        ({"learning-rate": 0.1}, r"search learning-rate = 0.1: must be two numbers \(lowest, highest\)"),
        ({"learning-rate": (0.3, 0.1)}, "must be two numbers"),
        ({"learning-rate": [0.3]}, "must be two numbers"),
        ({"seed": [1, 2]}, "search seed: it is the same in all trials"),
    ],
)
def test_what_cannot_be_searched(space, words):
    with pytest.raises(wf.SettingsError, match=words):
        checked_space(space)


def test_a_search_finds_the_best_goes_on_and_is_told_by_compare(experiment, runs, capsys):
    search = {"learning_rate": (0.001, 0.1), "fedprox": {"mu": [0.1, 1]}}
    found = wf.tune(experiment, search=search, trials=3, strategy="fedprox")
    assert (found.trials, found.pruned, found.folder) == (3, 0, Path("runs/exp-tune").absolute())
    assert found.best.keys() == {"learning-rate", "fedprox.mu"}
    assert 0.001 <= found.best["learning-rate"] <= 0.1
    assert found.score == pytest.approx(0.5)
    assert len(runs.asked) == len(found.runs) == 3
    assert len({asked["learning-rate"] for asked in runs.asked}) == 3
    # The same call has nothing left to do, and one of more trials only those.
    assert wf.tune(experiment, search=search, trials=3, strategy="fedprox").best == found.best
    assert len(wf.tune(experiment, search=search, trials=4, strategy="fedprox").runs) == len(runs.asked) == 4
    (told,) = [table for table in wf.compare(found.folder).tables if table.title == "Search for settings"]
    assert told.rows[0][1] == "4 trials (0 ended early) over learning-rate, fedprox.mu"
    with pytest.raises(wf.SettingsError, match="holds a search over other keys or settings"):
        wf.tune(experiment, search={"learning_rate": (0.001, 0.2)}, trials=4, strategy="fedprox")


def test_a_search_that_was_stopped_goes_on_with_the_trial_that_it_was_in(experiment, runs):
    search = {"learning_rate": (0.001, 0.1)}
    runs.waits = True
    with pytest.raises(KeyboardInterrupt):
        wf.tune(experiment, search=search, trials=2)
    runs.waits = False
    assert wf.tune(experiment, search=search, trials=2).trials == 2
    stopped, again, _ = runs.asked
    assert again["run-name"] == stopped["run-name"]
    assert ("resume" in stopped, again.get("resume")) == (False, "true")


def test_a_search_whose_runs_fail_says_why(experiment, runs):
    runs.fails = "learning-rate"
    with pytest.raises(wf.RunError, match=r"no trial is finished(.|\n)*no data are here"):
        wf.tune(experiment, search={"learning_rate": (0.001, 0.1)}, trials=2)
    with pytest.raises(wf.SettingsError, match="unknown key 'learning-rat'"):
        wf.tune(experiment, search={"learning_rat": (0.001, 0.1)})
    with pytest.raises(wf.SettingsError, match="trials = 0: must be a whole number from 1 on"):
        wf.tune(experiment, search={"learning_rate": (0.001, 0.1)}, trials=0)


def test_a_trial_below_the_median_is_stopped(tmp_path, monkeypatch):
    stopped, told = [], []
    process = SimpleNamespace(poll=lambda: None, returncode=None)
    monkeypatch.setattr(child, "start", lambda *_: process)
    monkeypatch.setattr(child, "stop", stopped.append)
    records = [
        RoundRecord(**fake_runs.a_round(number, delivered_score=score)) for number, score in ((1, 0.1), (2, 0.2))
    ]
    monkeypatch.setattr(tuning, "JournalWatch", lambda _: SimpleNamespace(rounds=lambda: records))
    trial = SimpleNamespace(report=lambda value, step: told.append((step, value)), should_prune=lambda: True)
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(tuning, "SWEEP_LOGS", "logs")
    assert tuning._run(Path("exp.toml"), [], trial, tmp_path, "one", ()) is None
    assert stopped == [[process]]
    assert told == [(1, 0.1), (2, 0.2)]


def test_the_command(experiment, runs):
    said = CliRunner().invoke(app, ["tune", experiment, "--search", "learning-rate=0.01..0.02", "--trials", "2"])
    assert said.exit_code == 0, said.output
    assert "Best of 2 trials (0 ended early): 0.5000" in said.output
    assert "--set learning-rate=0.01" in said.output.splitlines()[-1]
    assert json.loads(Path("runs/exp-tune/search.json").read_text())["keys"] == ["learning-rate"]
    wrong = CliRunner().invoke(app, ["tune", experiment, "--search", "learning-rate"])
    assert "must be like learning-rate=0.001..0.3" in wrong.stderr
