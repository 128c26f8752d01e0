"""Wildflower from Python: what stands in for the processes of runs is in fake_child, but for one that is real."""

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

import wildflower as wf
from wildflower.launch import child, python, sweeps
from wildflower.server_app.config import RunConfig
from wildflower.server_app.resuming import check_resumable
from wildflower.server_app.run_folder import is_held

ROOT = Path(__file__).parents[2]


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exp.toml").write_text('task = "digits"\nrounds = 2\ndevices-per-round = 3\n')
    return "exp.toml"


def test_importing_it_imports_nothing_heavy():
    loaded = "[m for m in ('torch', 'pandas', 'flwr') if m in sys.modules]"
    code = f"import sys, wildflower, wildflower.launch.child; print({loaded})"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout == "[]\n"


def test_what_is_offered_is_there():
    assert {getattr(wf, name).__name__ for name in wf.__all__} == set(wf.__all__)
    assert set(wf.__all__) <= set(dir(wf))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = wf.nothing


def test_names_of_arguments_are_no_keys():
    keys = {key.replace("-", "_") for key in RunConfig().to_dict()}
    assert keys.isdisjoint({"experiment", "seeds", "grid", "jobs", "folder"})


def test_a_run_and_what_it_left(experiment, runs):
    run = wf.run(experiment, strategy="fedprox", seed=1, run_name="one", fedprox={"mu": 0.5}, learning_rate=0.25)
    assert (run.status, run.summary.rounds, run.config["learning-rate"]) == ("finished", 2, 0.25)
    assert run.config["fedprox.mu"] == 0.5
    assert run.folder == Path("runs/one").absolute()
    assert list(run.rounds.index) == [1, 2]
    assert list(run.rounds["delivered_score"]) == [0.5, 0.5]
    assert list(run.rounds["delivered_score_by_tier.small"]) == [0.05, 0.1]
    assert "delivered_score_by_tier" not in run.rounds
    assert list(run.devices["outcome"]) == ["trained", "late"] * 2
    assert run.devices["architecture"][0] == {"widths": [3, 8]}
    assert run.report.exists()
    assert "<td style" in run._repr_html_()
    assert repr(wf.load("runs/one")) == f"<Run {Path('runs/one').absolute()}: finished, 2 rounds>"


def test_rounds_without_evaluation_are_nan(experiment, runs, monkeypatch):
    run = wf.run(experiment, run_name="one")
    lines = (run.folder / "rounds.jsonl").read_text().splitlines()
    gone = lines[0].replace('"delivered_score_by_tier":{"small":0.05,"large":0.1}', '"delivered_score_by_tier":null')
    assert gone != lines[0]
    (run.folder / "rounds.jsonl").write_text(f"{gone}\n{lines[1]}\n")
    by_tier = wf.load(run.folder).rounds["delivered_score_by_tier.small"]
    assert np.isnan(by_tier[1])
    assert by_tier[2] == 0.1


def test_values_are_what_they_are_in_python(experiment, runs):
    settings = {"rounds": np.int64(1), "alpha": np.float32(0.5), "widths": [1, 0.5], "evaluate_tiers": True}
    run = wf.run(experiment, **settings, data_dir=Path("here"), run_name="007")
    assert run.folder.name == run.config["run-name"] == "007"
    assert (run.config["rounds"], run.config["alpha"], run.config["widths"]) == (1, 0.5, "1, 0.5")
    assert run.config["evaluate-tiers"] is True
    assert run.config["data-dir"] == str(Path("here").absolute())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stratgy": "fedavg"}, "unknown key 'stratgy' = 'fedavg': did you mean 'strategy'"),
        ({"rounds": "3"}, "rounds = '3': must be a whole number"),
        ({"rounds": 2.5}, "rounds = 2.5: must be a whole number"),
        ({"rounds": True}, "rounds = True: must be a whole number"),
        ({"rounds": None}, "rounds = None: must be a text, a number"),
        ({"strategy": "fedprox", "fedprox": {"mu": "much"}}, "fedprox.mu = 'much': must be a number"),
        ({"fedprox": {"nu": 1}}, "unknown key 'fedprox.nu'"),
        ({"fleet": ""}, "need a fleet"),
        ({"resume": True}, "needs the run-name"),
    ],
)
def test_bad_settings_are_told_before_anything_is_started(settings, words, experiment, runs):
    with pytest.raises(wf.SettingsError, match=words):
        wf.run(experiment, **settings)
    assert runs.asked == []
    assert not Path("runs").exists()


def test_what_is_there_is_not_overwritten(experiment, runs):
    wf.run(experiment, run_name="one")
    with pytest.raises(wf.JournalError, match="already holds a finished run"):
        wf.run(experiment, run_name="one")
    with pytest.raises(wf.JournalError, match=r"another configuration: alpha was 0\.5 and is 0.1"):
        wf.run(experiment, run_name="one", resume=True, alpha=0.1)
    assert len(runs.asked) == 1
    with pytest.raises(wf.JournalError, match=r"no config\.json"):
        wf.load("runs")


def test_a_run_that_is_interrupted_says_how_it_goes_on_and_does(experiment, runs):
    runs.waits = True
    with pytest.raises(KeyboardInterrupt, match=r"1 of 2 rounds are in .*run_name='one', resume=True goes on"):
        wf.run(experiment, run_name="one")
    stopped = wf.load("runs/one")
    assert (stopped.status, len(stopped.rounds)) == ("unfinished", 1)
    check_resumable(stopped.folder, stopped.config | {"resume": True})
    runs.waits = False
    run = wf.run(experiment, run_name="one", resume=True)
    assert (run.status, len(run.rounds)) == ("finished", 2)


def test_an_interrupt_while_a_run_is_started_leaves_no_process_behind(experiment, runs):
    runs.waits = runs.is_interrupted = True
    with pytest.raises(KeyboardInterrupt, match="1 of 2 rounds are in"):
        wf.run(experiment, run_name="one")
    with pytest.raises(KeyboardInterrupt, match="0 of 1 runs are finished"):
        wf.sweep(experiment, seeds=[1])
    assert [process.returncode for process in runs.processes] == [130, 130]  # both were told to end


def test_a_run_that_does_not_end_by_itself_is_killed():
    deaf = "import signal, sys; signal.signal(2, signal.SIG_IGN); signal.signal(15, signal.SIG_IGN); print(flush=True)"
    command = [sys.executable, "-S", "-c", f"{deaf}; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # from now on it does not hear
        child.stop([process], grace_seconds=0.05)
        assert process.returncode == -signal.SIGKILL


def test_a_run_that_fails_says_why(experiment, runs):
    runs.fails, runs.warns = "one", ["a tensor is not in the file"]
    with pytest.raises(wf.RunError) as error, pytest.warns(UserWarning, match="a tensor is not in the file"):
        wf.run(experiment, run_name="one")
    assert str(error.value) == "one: no data are here"


def test_what_a_run_warns_of_before_its_rounds_is_told_once_and_while_it_goes_on(experiment, runs, monkeypatch):
    runs.warns = ["a tensor is not in the file", "a text is cut"]
    told_at = []
    ended = python.has_ended

    def ends_when_asked_again(process):
        told_at.append(len(caught))
        return len(told_at) == 3 and ended(process)

    monkeypatch.setattr(python, "has_ended", ends_when_asked_again)
    with pytest.warns(UserWarning, match="in the file|is cut") as caught:
        wf.run(experiment)
    assert [str(warning.message) for warning in caught] == runs.warns
    assert told_at == [0, 2, 2]


def test_what_was_said_of_keys_that_nothing_reads_is_a_warning(experiment, runs):
    with pytest.warns(UserWarning, match=r"does not read: fedprox.mu = 0.5"):
        wf.run(experiment, fedprox={"mu": 0.5})


def test_a_sweep_and_its_tables(experiment, runs):
    swept = wf.sweep(
        experiment, seeds=range(1, 3), grid={"strategy": ["heterofl", "fedrolex"], "learning_rate": [0.1]}, jobs=2
    )
    assert swept.folder == Path("runs/exp-sweep").absolute()
    assert [run.folder.name for run in swept.runs] == list(swept.table.index)
    assert list(swept.table["strategy"]) == ["heterofl", "fedrolex"] * 2
    assert list(swept.table["seed"]) == [1, 1, 2, 2]
    assert list(swept.table["learning-rate"]) == [0.1] * 4
    assert list(swept.table["delivered_score"]) == pytest.approx([0.5, 0.5, 0.6, 0.6])
    assert "That it is better than" in repr(swept.comparison)
    assert "<table>" in swept.comparison._repr_html_()
    # The command calls the same runs by the same names.
    assert swept.table.index[0] == sweeps.run_name(["strategy=heterofl", "learning-rate=0.1", "seed=1"])
    again = wf.sweep(experiment, seeds=[1, 2], grid={"strategy": ["heterofl", "fedrolex"], "learning-rate": [0.1]})
    assert len(again.runs) == len(runs.asked) == 4
    assert wf.compare([again.runs[0], again.runs[1].folder]).target == 0.5
    # One that stands for several, by itself or in a list.
    for given in (again, again.folder, str(again.folder), [again], [str(again.folder)]):
        assert sorted(wf.compare(given).csv.splitlines()) == sorted(again.comparison.csv.splitlines())
    assert wf.compare(again.runs[0]).csv == wf.compare([again.runs[0]]).csv


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "there is nothing to compare: give runs or their folders"),
        ("runs", "runs is neither the folder of a run"),
        ([3], "3 is neither a run nor a sweep, nor the name of a folder"),
    ],
)
def test_what_is_no_run_is_not_compared(given, words, experiment):
    with pytest.raises(wf.JournalError, match=words):
        wf.compare(given)


def test_a_grid_over_a_methods_own_keys(experiment, runs):
    swept = wf.sweep(experiment, seeds=[1], grid={"fedprox": {"mu": [0.1, 1]}}, strategy="fedprox")
    assert [run.config["fedprox.mu"] for run in swept.runs] == [0.1, 1]
    assert list(swept.table["fedprox.mu"]) == [0.1, 1]


def test_a_sweep_of_rows(experiment, runs):
    rows = {
        "few-steps": {"strategy": "heterofl", "local_steps": 1},
        "local": {"strategy": "fedprox", "fedprox": {"mu": 0.5}, "seeds": range(2, 9)},
    }
    swept = wf.sweep(experiment, seeds=[1, 2], rows=rows, rounds=1)
    assert list(swept.table.index) == ["few-steps,seed=1", "few-steps,seed=2", "local,seed=2"]
    assert list(swept.table["row"]) == ["few-steps", "few-steps", "local"]
    assert swept.runs[2].config["fedprox.mu"] == 0.5
    assert {row[0] for row in swept.comparison.tables[0].rows} == {"few-steps", "local"}
    # The same rows in a file are the same runs.
    Path("rows.toml").write_text(
        '[few-steps]\nstrategy = "heterofl"\nlocal-steps = 1\n'
        '[local]\nstrategy = "fedprox"\nfedprox.mu = 0.5\nseeds = [2]\n'
    )
    again = wf.sweep(experiment, seeds=[1, 2], rows="rows.toml", rounds=1)
    assert list(again.table.index) == list(swept.table.index)
    assert len(runs.asked) == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"grid": {"stratgy": ["fedavg"]}}, "unknown key 'stratgy'"),
        ({"grid": {"rounds": [1, "many"]}}, "rounds = 'many': must be a whole number"),
        ({"grid": {"strategy": "fedavg"}}, "must be a list of values"),
        ({"grid": {"strategy": []}}, "there is no value"),
        ({"grid": ["strategy"]}, r"grid = \['strategy'\]: must be a dict of keys and their values"),
        ({"grid": "strategy=fedavg"}, "must be a dict of keys and their values"),
        (
            {"grid": {"fedprox": [{"mu": 0.1}, {"mu": 1}]}},
            r"grid fedprox: \{'mu': 0.1\} is a set of .* lists of values: \{'fedprox': \{'mu': \[0.1, ...\]\}\}",
        ),
        ({"grid": {"fedprox": 3}}, "grid fedprox = 3: must be a list of values"),
        ({"grid": {"fedprox": {"mu": [1]}, "fedprox.mu": [2]}}, "grid fedprox.mu: it is given twice"),
        ({"rows": [{"rounds": 1}]}, "must be a dict of named settings"),
        ({"grid": {"rounds": [1, 1]}}, "stands there twice"),
        ({"grid": {"seed": [1]}}, "seed cannot be in the grid"),
        ({"grid": {"rounds": [1]}, "rounds": 2}, "rounds is given for all runs"),
        ({"seeds": "1-3"}, "seeds must be whole numbers"),
        ({"seeds": [1.5]}, "seeds must be whole numbers"),
        ({"seeds": []}, "seeds must be whole numbers"),
        ({"rows": {}}, "there is no row"),
        ({"rows": {"a": ["strategy=fedavg"]}}, "belongs to no row"),
        ({"rows": {"a": {"strategy": object()}}}, "row a: strategy = <object"),
        ({"rows": {"a": {"rounds": 1}}, "rounds": 2}, "rounds is given for all runs"),
        ({"jobs": 0}, "jobs = 0"),
    ],
)
def test_sweeps_that_cannot_be(arguments, words, experiment, runs):
    with pytest.raises(wf.SettingsError, match=words):
        wf.sweep(experiment, **arguments)
    assert runs.asked == []


def test_a_sweep_over_runs_of_other_settings_is_refused(experiment, runs):
    wf.sweep(experiment, seeds=[1])
    with pytest.raises(wf.SettingsError, match=r"alpha was 0\.5 and is 0\.1.*another folder"):
        wf.sweep(experiment, seeds=[1], alpha=0.1)


def test_a_sweep_with_a_run_that_fails_keeps_the_others(experiment, runs):
    runs.fails = "seed=1"
    with pytest.raises(wf.RunError, match=r"1 of 2 runs have failed(.|\n)*no data are here"):
        wf.sweep(experiment, seeds=[1, 2])
    runs.fails = ""
    assert len(wf.sweep(experiment, seeds=[1, 2]).runs) == 2
    assert [asked["seed"] for asked in runs.asked] == ["1", "2", "1"]


def test_a_sweep_that_is_interrupted_goes_on(experiment, runs):
    runs.waits = True
    with pytest.raises(KeyboardInterrupt, match="0 of 2 runs are finished"):
        wf.sweep(experiment, seeds=[1, 2])
    runs.waits = False
    assert len(wf.sweep(experiment, seeds=[1, 2]).runs) == 2
    assert [(asked["seed"], "resume" in asked) for asked in runs.asked] == [("1", False), ("1", True), ("2", False)]


def test_a_real_run(experiment, capsys):
    run = wf.run(experiment, rounds=1, devices_per_round=1, workers=1, run_name="one")
    assert (run.status, list(run.rounds.index)) == ("finished", [1])
    assert capsys.readouterr().out.startswith("round 1/1, delivered accuracy ")


@pytest.mark.thorough
def test_a_run_ends_with_the_process_that_started_it(experiment):
    code = (
        "import sys, time; from pathlib import Path; from wildflower.launch import child\n"
        "run = child.start(Path('exp.toml'), ['rounds=100000', 'run-name=one', 'workers=1'], sys.stderr.buffer)\n"
        "print(run.pid, flush=True); run.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        run = psutil.Process(int(parent.stdout.readline()))
        next(line for line in parent.stderr if line.startswith(b"round 1/100000"))  # it is in the middle of its work
        processes = [run, *run.children(recursive=True)]
        assert is_held(Path("runs/one"))
        parent.kill()
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert alive == []
    assert len(processes) >= 4  # the command, its server, the fork server, a worker
    assert not is_held(Path("runs/one"))
