import io
import json
import os
import signal
import stat
import sys
import tempfile
import time
import tomllib
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from tests.server_app import fake_runs
from wildflower.devices.fleet import Fleet, bundled_fleet
from wildflower.launch import superlink
from wildflower.launch.app_log import last_traceback, log_since, waiting_text, warnings_text
from wildflower.launch.before import Deployment, check_buildable
from wildflower.launch.experiment import find_app, run_experiment
from wildflower.launch.experiment_file import SettingsError, place, resolve
from wildflower.launch.showing import Lines, progress, seconds_left
from wildflower.server_app.journal import Journal
from wildflower.server_app.run_folder import COMMAND_LOCK, alone_in, is_held
from wildflower.server_app.run_records import RoundRecord, Summary


def a_round(number: int = 1, **changes) -> RoundRecord:
    values = {
        "score": 0.5,
        "delivered_score": 0.4,
        "loss": 1.25,
        "score_by_tier": {"small": 0.25},
        "training_bytes_down": 2_000_000,
        "training_bytes_up": 1_500_000,
        "statistics_bytes_down": 600_000,
        "statistics_bytes_up": 40_000,
        "scoring_bytes_down": 7_000_000,
        "simulated_seconds": 60.0,
        "wall_seconds": 2.0,
    }
    return RoundRecord.model_validate(fake_runs.a_round(number, **(values | changes)))


SUMMARY = Summary(
    status="finished",
    rounds=1,
    metric="accuracy",
    higher_is_better=True,
    final_score=0.5,
    best_score=0.5,
    best_round=1,
    score_by_tier={"[small]": 0.25},
    score_by_exit=None,
    personal_score=0.625,
    personal_score_by_tier={"[small]": 0.5},
    training_bytes_down=2_000_000,
    training_bytes_up=1_500_000,
    statistics_bytes_down=600_000,
    statistics_bytes_up=40_000,
    scoring_bytes_down=7_000_000,
    devices_by_outcome={"trained": 2, "failed": 1},
    simulated_seconds=60.0,
    wall_seconds=2.0,
    error=None,
)


SOMEWHERE = Deployment("fl.example:8000", None)


class World:
    """A folder to type commands in, with Flower's commands replaced."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.here = folder / "here"
        self.temporary = folder / "tmp"
        self.pids = folder / "pids"
        commands = folder / "bin"
        for path in (self.here, self.temporary, commands):
            path.mkdir()
        script = Path(__file__).with_name("fake_flower.py").read_text()
        # A first line may not name an interpreter whose path has a space: shell and Python both read what follows.
        (commands / "flwr").write_text(f"#!/bin/sh\n'''exec' '{sys.executable}' \"$0\" \"$@\"\n' '''\n{script}")
        (commands / "flwr").chmod(stat.S_IRWXU)
        (self.here / "experiment.toml").write_text('rounds = 1\nrun-name = "one"\nworkers = 2\nengine = "nodes"\n')
        (self.here / "pyproject.toml").write_text("")
        monkeypatch.chdir(self.here)
        monkeypatch.setattr(tempfile, "tempdir", str(self.temporary))
        monkeypatch.setenv("FAKE_PIDS", str(self.pids))
        monkeypatch.setenv("FAKE_ROUND", a_round().model_dump_json())
        monkeypatch.setenv("FAKE_SUMMARY", SUMMARY.model_dump_json())
        environment = superlink.flower_environment
        monkeypatch.setattr(
            superlink,
            "flower_environment",
            lambda outer, folder: environment(outer, folder) | {"PATH": f"{commands}{os.pathsep}{outer['PATH']}"},
        )
        self._monkeypatch = monkeypatch
        self.run_dir = self.here / "runs" / "one"

    def run(self, mode: str, *overrides: str, deployment: Deployment | None = SOMEWHERE) -> tuple[int, str]:
        self._monkeypatch.setenv("FAKE_FLOWER", mode)
        text = io.StringIO()
        console = Console(file=text, width=80)
        code = run_experiment(
            Path("experiment.toml"), overrides, self.here if deployment else None, console, deployment
        )
        return code, text.getvalue()

    def left_behind(self) -> tuple[list[int], list[Path]]:
        pids = {int(line) for line in self.pids.read_text().split()} if self.pids.exists() else set()
        # A dead process whose parent is gone stays in the list until the system's first process collects it.
        alive = [p.pid for p in psutil.process_iter(["status"]) if p.info["status"] != psutil.STATUS_ZOMBIE]
        return sorted(pids & set(alive)), list(self.temporary.iterdir())


@pytest.fixture
def world(tmp_path, monkeypatch) -> World:
    return World(tmp_path, monkeypatch)


@pytest.mark.thorough
def test_a_finished_run(world):
    code, text = world.run("finish", "fedprox.mu=0.5")
    assert code == 0
    assert (
        "round 1/1, delivered accuracy 40 %, whole model 50 %, loss 1.25, 2 of 3 devices, training 2 MB down, " in text
    )
    assert "1.5 MB up, 2 s\n" in text
    for part in ("tier [small]", "25 %", "2 trained, 1 failed", f"Report: {world.run_dir / 'report.html'}\n"):
        assert part in text
    ignored = "Warning: Keys of other methods, which strategy = 'heterofl' does not read: fedprox.mu = 0.5\n"
    assert text.index(ignored) < text.index("round 1/1")
    assert f"Warning: 1 warning in {world.run_dir / 'app.log'}\n  Round 1: [one] device is gone\n" in text
    submitted = json.loads((world.run_dir / "submitted.json").read_text())
    assert submitted["arguments"][0] == str(world.here)
    assert "--federation-config" not in submitted["arguments"]
    assert submitted["config"]["fedprox.mu"] == 0.5
    assert submitted["config"]["output-dir"] == str(world.here / "runs")
    assert len(world.pids.read_text().split()) == 1
    assert world.left_behind() == ([], [])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["fleet=digits-dmo"], "no fleet 'digits-dmo' comes with the project, did you mean 'digits-demo'?"),
        (["fleet=hypemefed-testbed"], "add up to 12, and devices = 20: set devices = 12"),
        (["task=fashion-mnist", "data-dir=nowhere"], "here/nowhere"),
        (["family=vgg"], "does not go with the 1x8x8 inputs of 'digits'"),
        (["fleet="], "need a fleet"),
    ],
)
def test_what_cannot_be_built_stops_before_anything_is_started(world, settings, words):
    code, text = world.run("finish", "engine=local", *settings, deployment=None)
    assert code == 1
    assert words in text.replace("\n", " ")
    assert not world.pids.exists()
    assert not world.run_dir.exists()


@pytest.mark.thorough
def test_a_run_that_fails_shows_the_last_traceback(world):
    code, text = world.run("crash")
    assert code == 1
    assert "finished:failed: it broke" in text
    assert "File 'server.py', line 9, in main\n    run()\nValueError: no [bold] family\n" in text
    assert "an old one" not in text
    assert "bye" not in text
    assert str(world.run_dir / "app.log") in text
    assert world.left_behind() == ([], [])


@pytest.mark.thorough
def test_a_run_without_a_summary_has_not_finished(world):
    code, text = world.run("no summary")
    assert code == 1
    assert "summary.json" in text


@pytest.mark.thorough
def test_a_summary_that_says_failed_counts_more_than_flower(world, monkeypatch):
    failed = SUMMARY.model_copy(update={"status": "failed", "error": "Traceback ...\nValueError: from the summary"})
    monkeypatch.setenv("FAKE_SUMMARY", failed.model_dump_json())
    code, text = world.run("finish")
    assert code == 1
    assert "ValueError: from the summary" in text


@pytest.mark.thorough
def test_a_run_that_says_in_words_why_it_failed_shows_no_frames(world, monkeypatch):
    failed = SUMMARY.model_copy(update={"status": "failed", "error": "nobody trained"})
    monkeypatch.setenv("FAKE_SUMMARY", failed.model_dump_json())
    code, text = world.run("no progress")
    assert code == 1
    assert "The run failed. nobody trained\nLogs: " in text
    assert "Traceback" not in text


@pytest.mark.thorough
@pytest.mark.parametrize("error", ["its workers are gone", "no room: go on with --set resume=true --set run-name=one"])
def test_a_run_that_fails_in_words_after_a_round_says_once_how_it_goes_on(world, monkeypatch, error):
    failed = SUMMARY.model_copy(update={"status": "failed", "error": error})
    monkeypatch.setenv("FAKE_SUMMARY", failed.model_dump_json())
    code, text = world.run("finish", "rounds=2")
    assert code == 1
    assert f"The run failed. {error}" in text
    assert text.count("--set resume=true --set run-name=one") == 1


@pytest.mark.thorough
def test_a_run_that_fails_in_words_after_its_last_round_does_not_go_on(world, monkeypatch):
    failed = SUMMARY.model_copy(update={"status": "failed", "error": "no device trained in any of 1 rounds"})
    monkeypatch.setenv("FAKE_SUMMARY", failed.model_dump_json())
    code, text = world.run("finish", "rounds=1")
    assert (code, "resume=true" in text) == (1, False)


@pytest.mark.thorough
def test_an_app_that_flower_does_not_take(world):
    code, text = world.run("bad app")
    assert (code, text.splitlines()[-1]) == (1, "Error: Flower did not start the app: no such app")
    assert world.left_behind() == ([], [])


@pytest.mark.thorough
def test_a_server_process_that_is_killed_is_told_at_once_with_the_command_that_resumes(world, monkeypatch):
    monkeypatch.setenv("FAKE_DIES", str(world.here / "up"))
    looks = []

    def kill_once_seen(run_dir):
        held = is_held(run_dir)
        if held and (world.here / "up").exists() and not looks:
            looks.append(time.monotonic())
            os.kill(int(world.pids.read_text().split()[-1]), signal.SIGKILL)
        return held

    monkeypatch.setattr("wildflower.launch.following.is_held", kill_once_seen)
    code, text = world.run("server dies", "rounds=5")
    assert time.monotonic() - looks[0] < 10
    assert code == 1
    assert "The server's process has ended without a word" in text
    assert "1 of 5 rounds" in text
    assert text.rstrip().endswith("--set resume=true --set run-name=one")
    assert world.left_behind() == ([], [])


@pytest.mark.thorough
@pytest.mark.parametrize(("stream", "status"), [("stays", "failed"), ("breaks off", "finished")])
def test_a_run_that_has_ended_is_told_although_flower_cannot_store_it(world, monkeypatch, stream, status):
    error = "The disk is full: go on with --set resume=true" if status == "failed" else None
    ended = SUMMARY.model_copy(update={"status": status, "error": error})
    seen = world.here / "seen"
    monkeypatch.setenv("FAKE_SUMMARY", ended.model_dump_json())
    monkeypatch.setenv("FAKE_STREAM", stream)
    monkeypatch.setenv("FAKE_SEEN", str(seen))
    monkeypatch.setattr("wildflower.launch.following.LOG_SECONDS", 0.5)

    def look(run_dir):
        if held := is_held(run_dir):
            seen.touch()
        return held

    monkeypatch.setattr("wildflower.launch.following.is_held", look)
    code, text = world.run("superlink is full")
    assert code == (1 if status == "failed" else 0), text
    assert ("The run failed. The disk is full: go on with --set resume=true\n" in text) == (status == "failed")
    assert world.left_behind() == ([], [])


def deployment(world: World) -> Deployment:
    certificate = world.here / 'ca "1".crt'
    certificate.write_text("")
    return Deployment("fl.example:8000", certificate)


def test_a_run_on_real_devices_goes_to_their_superlink(world, monkeypatch):
    monkeypatch.setenv("FAKE_CONNECTION", str(world.here / "connection.toml"))
    code, text = world.run("finish", "engine=local", "fleet=", deployment=deployment(world))
    assert code == 0, text
    assert "10 of 20 devices per round, at fl.example:8000" in text
    connection = tomllib.loads((world.here / "connection.toml").read_text())["superlink"]["wildflower"]
    assert connection == {"address": "fl.example:8000", "root-certificates": str(world.here / 'ca "1".crt')}
    submitted = json.loads((world.run_dir / "submitted.json").read_text())
    assert "--federation-config" not in submitted["arguments"]
    assert world.left_behind() == ([], [])


@pytest.mark.parametrize("terminate", ["", "yes"])
def test_a_run_on_real_devices_is_stopped_there_with_the_command(world, monkeypatch, terminate):
    monkeypatch.setenv("FAKE_TERM", terminate)
    monkeypatch.setenv("FAKE_STOPPED", str(world.here / "stopped"))
    code, text = world.run("interrupt", "engine=local", "fleet=", "rounds=5", deployment=deployment(world))
    assert code == 130
    assert "1 of 5 rounds" in text
    assert "--set resume=true --set run-name=one" in text
    assert (world.here / "stopped").read_text() == "17"
    assert world.left_behind() == ([], [])


def test_real_devices_have_no_fleet_and_a_certificate_to_trust(world):
    code, text = world.run("finish", "engine=local", deployment=deployment(world))
    assert code == 1
    assert "--set fleet= leaves the fleet out" in text.replace("\n", " ")
    code, text = world.run(
        "finish", "engine=local", "fleet=", deployment=Deployment("fl.example:8000", world.here / "none.crt")
    )
    assert code == 1
    assert "no root certificates" in text
    assert world.left_behind() == ([], [])


def test_nothing_starts_over_an_earlier_run(world):
    world.run_dir.mkdir(parents=True)
    (world.run_dir / "rounds.jsonl").write_text("")
    (world.run_dir / "checkpoint" / "round-1").mkdir(parents=True)
    code, text = world.run("finish")
    assert code == 1
    assert "resume=true" in text
    assert not world.pids.exists()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("batch-size=32", "cannot be resumed with another configuration: batch-size was 16 and is 32"),
        ("rounds=1", "rounds = 1, but the run in "),
        ("checkpoints.resume-from=1", "has no checkpoint of that round; there are none"),
        ("fleet=changed.toml", "or a trace that it names is not what it was when the run began"),
    ],
)
def test_a_run_that_cannot_be_resumed_so_starts_nothing(world, setting, words):
    (world.here / "changed.toml").write_text('[[group]]\nname = "all"\ncount = 20\nmemory = "1 GB"\n')
    config = resolve(world.here / "experiment.toml", [setting] if setting.startswith("fleet") else []).config
    config = place(config, world.here, datetime.now())[0]
    journal = Journal.open(world.run_dir, config.to_dict(), False, fleet=bundled_digest())
    for number in (1, 2):
        journal.write_round(fake_runs.a_round(number), [])
    code, text = world.run("finish", "resume=true", "rounds=3", setting)
    assert code == 1
    assert words in text
    assert "CheckpointError" not in text
    assert len(text.splitlines()) == 1
    assert not world.pids.exists()


def test_a_run_that_goes_on_is_not_resumed(world):
    config = place(resolve(world.here / "experiment.toml", []).config, world.here, datetime.now())[0]
    journal = Journal.open(world.run_dir, config.to_dict(), False, fleet=bundled_digest())
    for number in (1, 2):
        journal.write_round(fake_runs.a_round(number), [])
    with alone_in(world.run_dir):
        code, text = world.run("finish", "resume=true", "rounds=3")
    assert code == 1
    assert text.startswith("Error: the run in ")
    assert "goes on in another process: wait for its end, or stop that one" in text
    assert len(text.splitlines()) == 1
    assert not world.pids.exists()


def test_a_run_that_another_command_has_begun_is_not_begun_again(world):
    with alone_in(world.run_dir):
        code, text = world.run("finish")
    assert code == 1
    assert "goes on in another process" in text
    assert "Traceback" not in text
    assert not world.pids.exists()


def test_a_run_that_another_command_begins_meanwhile_is_not_begun_again(world, monkeypatch):
    held = ExitStack()

    def other_begins(config, hooks):
        held.enter_context(alone_in(world.run_dir))
        return check_buildable(config, hooks)

    monkeypatch.setattr("wildflower.launch.experiment.check_buildable", other_begins)
    with held:
        code, text = world.run("finish")
    assert code == 1
    assert "goes on in another process" in text
    assert not world.pids.exists()


@pytest.mark.parametrize("ended", [False, True])
def test_of_two_commands_at_one_moment_the_second_says_so_in_one_line(world, monkeypatch, ended):
    """The other one has not started its server yet, or has ended its run, while this one was built."""
    held = ExitStack()

    def other_begins(config, hooks):
        if ended:
            journal = Journal.open(world.run_dir, config.to_dict(), False, fleet=bundled_digest())
            for number in (1, 2):
                journal.write_round(fake_runs.a_round(number), [])
            journal.finish("finished")
        else:
            held.enter_context(alone_in(world.run_dir, COMMAND_LOCK))
        return check_buildable(config, hooks)

    monkeypatch.setattr("wildflower.launch.experiment.check_buildable", other_begins)
    with held:
        code, text = world.run("finish")
    assert code == 1
    assert text.startswith("Error: ")
    assert ("already holds a finished run" if ended else "another process writes the run in") in text
    assert len(text.splitlines()) == 1
    assert not world.pids.exists()
    assert not (world.run_dir / COMMAND_LOCK).exists()


def test_a_tracker_that_is_not_installed_starts_nothing(world, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    code, text = world.run("finish", "engine=local", "tracker=mlflow", deployment=None)
    assert code == 1
    assert text.startswith(
        "Error: tracker = 'mlflow' needs mlflow, which is not installed: in a clone of the project, type"
    )
    assert len(text.splitlines()) == 1
    assert not world.run_dir.exists()


def test_a_run_over_other_data_starts_nothing(world):
    config = place(resolve(world.here / "experiment.toml", []).config, world.here, datetime.now())[0]
    recorded = {"classes": 9, "input-shape": "1x8x8"}
    journal = Journal.open(world.run_dir, config.to_dict(), False, fleet=bundled_digest(), data=recorded)
    for number in (1, 2):
        journal.write_round(fake_runs.a_round(number), [])
    code, text = world.run("finish", "resume=true", "rounds=3")
    assert code == 1
    assert "its data are not what they were when the run began (classes: 9 then, 10 now); put the old data" in text
    assert len(text.splitlines()) == 1
    assert not world.pids.exists()


def bundled_digest() -> str:
    return Fleet(bundled_fleet("digits-demo"), devices=20, seed=1, requirement=lambda width: (1, 1)).digest


@pytest.mark.thorough
def test_a_run_is_resumed_with_what_may_change(world):
    config = place(resolve(world.here / "experiment.toml", []).config, world.here, datetime.now())[0]
    Journal.open(world.run_dir, config.to_dict(), False, fleet=bundled_digest())
    code, text = world.run("finish", "resume=true", "rounds=3", "workers=1")
    assert (code, "round 1/3" in text) == (0, True)


def test_nothing_starts_with_a_wrong_setting(world):
    code, text = world.run("finish", "rouns=3")
    assert code == 1
    assert "'rouns'" in text
    assert "'rounds'" in text
    assert not world.pids.exists()


def test_own_workers_run_the_installed_app_and_no_other(world):
    text = io.StringIO()
    console = Console(file=text, width=80)
    assert run_experiment(Path("experiment.toml"), ["engine=local"], world.here, console) == 1
    assert f"--app {world.here}: simulations run the app of this installation" in text.getvalue().replace("\n", " ")
    assert not world.run_dir.exists()


def test_find_app(tmp_path):
    with pytest.raises(SettingsError, match="--app"):
        find_app(tmp_path)
    (tmp_path / "pyproject.toml").write_text("")
    assert find_app(tmp_path) == tmp_path.resolve()
    assert (find_app(None) / "wildflower" / "launch" / "experiment.py").exists()


def test_lines_of_a_resumed_run_begin_where_it_goes_on():
    text = io.StringIO()
    lines = Lines(Console(file=text, width=200), total=6, earlier=4)
    lines.rounds([a_round(n) for n in (1, 2, 3, 4)])
    assert text.getvalue() == ""
    lines.rounds([a_round(n) for n in (1, 2, 3)])  # the checkpoint was of round 3
    lines.rounds([a_round(n) for n in (1, 2, 3, 4)])
    lines.rounds([a_round(n) for n in (1, 2, 3, 4)])
    lines.rounds([*(a_round(n) for n in (1, 2, 3, 4)), a_round(5, score=None, delivered_score=None, loss=None)])
    assert [line.split(",")[0] for line in text.getvalue().splitlines()] == ["round 4/6", "round 5/6"]
    assert text.getvalue().splitlines()[1] == "round 5/6, 2 of 3 devices, training 2 MB down, 1.5 MB up, 2 s, 2 s left"


def test_what_a_run_waits_for_is_shown(tmp_path):
    log = tmp_path / "app.log"
    assert waiting_text(log, 0) == ""
    waiting = "Waiting for nodes: 0 connected so far, 4 wanted, fewer from 14:10:00 on"
    log.write_text(f"INFO :      {waiting}\n")
    text = io.StringIO()
    lines = Lines(Console(file=text), total=3, earlier=0)
    for _ in range(2):
        lines.rounds([], waiting_text(log, 0))
    assert text.getvalue() == f"{waiting}\n"

    def bar(*waiting: str) -> str:
        shown = io.StringIO()
        with progress(Console(file=shown, width=120, force_terminal=True), 3, 0) as show:
            for what in waiting:
                show.rounds([], what)
        return shown.getvalue()

    assert "Waiting for nodes: 0 connected so far" in bar(waiting_text(log, 0))
    assert "Waiting for nodes" not in bar(waiting_text(log, 0), "")
    log.write_text(log.read_text() + "INFO :      Round 1\n")
    assert waiting_text(log, 0) == ""


def test_what_an_earlier_run_waited_for_is_not_shown(tmp_path):
    """A resumed run writes on in the log of the one that was stopped while it waited."""
    log = tmp_path / "app.log"
    log.write_text("INFO :      Waiting for nodes: 2 connected so far\n")
    start = log.stat().st_size
    assert waiting_text(log, start) == ""
    log.write_text(log.read_text().rstrip())  # it was stopped before the end of its line
    assert waiting_text(log, log.stat().st_size) == ""
    log.write_text(log.read_text() + "INFO :      Round 3\n")
    assert waiting_text(log, start - 1) == ""
    log.write_text(log.read_text() + "INFO :      Waiting for nodes: 0 connected so far\n")
    assert waiting_text(log, start) == "Waiting for nodes: 0 connected so far"


def test_bar_on_a_terminal_shows_accuracy_bytes_and_time_left():
    text = io.StringIO()
    with progress(Console(file=text, force_terminal=True, width=120), total=4, earlier=0) as show:
        show.rounds([])
        show.rounds([a_round(1), a_round(2, score=None, delivered_score=None)])
    for part in ("round 2/4", "40 %", "7 MB", "4 s left"):
        assert part in text.getvalue()


def test_seconds_left_is_not_fooled_by_the_first_round():
    assert seconds_left([], 10) == 0
    assert seconds_left([a_round(1, wall_seconds=30.0), *(a_round(n, wall_seconds=2.0) for n in (2, 3))], 10) == 14.0
    assert seconds_left([a_round(1)], 1) == 0


def test_no_traceback_in_a_log(tmp_path):
    log = tmp_path / "app.log"
    assert log_since(log, 0) == ""
    log.write_text("Traceback (most recent call last):\n  old\nValueError: old\n\n")
    assert last_traceback(log_since(log, log.stat().st_size), tmp_path) is None
    old = "Traceback (most recent call last):\n  old\nValueError: old"
    assert last_traceback(log_since(log, 0), tmp_path) == old


def test_warnings_of_the_app_are_counted_and_one_of_each_kind_is_shown(monkeypatch):
    monkeypatch.setattr("wildflower.launch.app_log.MAX_WARNINGS", 2)
    already = "Keys of other methods, which strategy = 'heterofl' does not read: fedprox.mu = 0.5"
    log = (
        "INFO :      round 1/3: a WARNING : is no warning here\n"
        f"WARNING :   {already}\n"
        "WARNING :   Round 1: 2 of 4 work orders failed\n"
        "WARNING :   Round 2: 3 of 4 work orders failed\n"
        "WARNING :   [nodes] are busy: all\n"
        "WARNING :   a third kind\n"
    )
    assert warnings_text(log, Path("app.log"), [f"{already}\nand a second line"]) == (
        "4 warnings in app.log\n"
        "  Round 1: 2 of 4 work orders failed (and 1 more like it)\n"
        "  [nodes] are busy: all\n"
        "  and 1 of other kinds"
    )
    assert warnings_text(log[: log.index("WARNING :   Round")], Path("app.log"), [already]) == ""


def test_a_traceback_without_flowers_frames_and_with_the_apps_own_files(tmp_path):
    log = tmp_path / "app.log"
    log.write_text(
        "\x1b[91mERROR\x1b[0m:  Simulation raised an exception\n"
        "Traceback (most recent call last):\n"
        '  File "/lib/site-packages/flwr/simulation/app.py", line 337, in run\n'
        "    result = _run(\n"
        "             ^^^^^\n"
        '  File "/tmp/wf-x/home/apps/a.b.0.1.0.ff/server_app/app.py", line 39, in main\n'
        "    run()\n"
        "ValueError: one\n"
        "  two\n"
        "INFO :  more\n"
    )
    assert last_traceback(log_since(log, 0), Path("/project")) == (
        "Traceback (most recent call last):\n"
        '  File "/project/server_app/app.py", line 39, in main\n'
        "    run()\n"
        "ValueError: one\n"
        "  two"
    )


def test_a_superlink_that_is_gone_is_not_taken_for_one_that_has_lost_the_run(monkeypatch, tmp_path):
    link = superlink.SuperLink(tmp_path, {})
    answers = iter([{"success": False, "error-message": "\nConnection is unavailable"}, {"success": True, "runs": []}])
    monkeypatch.setattr(superlink.SuperLink, "_ask", lambda *arguments: next(answers))
    with pytest.raises(superlink.FlowerError, match="does not say how run 17 is doing: Connection is unavailable"):
        link.status("17")
    with pytest.raises(superlink.FlowerError, match=r"knows nothing of run 17$"):
        link.status("17")
