"""Runs of a sweep that differ in the seed alone train in the same workers."""

import json
import multiprocessing
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import safetensors.torch
import torch

from wildflower.launch import child, sweeps, together
from wildflower.launch.terminal import terminal
from wildflower.server_app.run_folder import read_rounds, read_summary

ROOT = Path(__file__).parents[2]
EXPERIMENT = """
task = "digits"
fleet = "digits-demo"
strategy = "fedavg"
fedavg.use = "all-small"
devices = 20
devices-per-round = 4
rounds = 2
workers = 1
local-epochs = 1
"""


class End:
    """One run's end of a process that forks workers."""

    def __init__(self):
        self.is_closed = False

    def close(self):
        self.is_closed = True


@pytest.fixture
def begun(runs, monkeypatch):
    """The runs that were begun: the seed, and how many ends of shared workers it was given, all of them open."""
    found = []

    def fork(experiment, overrides, output, hooks, shared):
        assert not any(end.is_closed for end in shared)
        seed = next(int(text.partition("=")[2]) for text in overrides if text.startswith("seed="))
        found.append((seed, len(shared)))
        with output.open("ab") as file:
            return runs.start(experiment, overrides, file)

    monkeypatch.setattr(child, "load_for_forks", lambda: True)
    monkeypatch.setattr(child, "fork", fork)
    monkeypatch.setattr(
        together,
        "shared_workers",
        lambda experiment, planned, log: (None, [End() for _ in planned] if planned[1:] else []),
    )
    return found


def sweep(tmp_path, seeds, *overrides, **changes):
    (tmp_path / "exp.toml").write_text(EXPERIMENT)
    asked = sweeps.SweepRequest(tmp_path / "exp.toml", overrides, tmp_path / "sweep", seeds, alone=True, **changes)
    return sweeps.sweep(asked, terminal())


@pytest.mark.parametrize("way", ["fastest", "8"])
def test_seeds_of_one_combination_are_begun_together(way, tmp_path, begun):
    outcome = sweep(tmp_path, [1, 2, 3], f"compute.side-by-side={way}", grid={"learning-rate": ["0.1", "0.2"]})
    assert len(outcome.finished) == 6
    assert begun == [(1, 3), (2, 2), (3, 1)] * 2
    rates = [run.run_dir.name.partition(",")[0] for run in outcome.planned if run.seed == 1]
    assert rates == ["learning-rate=0.1", "learning-rate=0.2"]


@pytest.mark.parametrize("way", ["off", "1", "auto"])
def test_seeds_that_train_in_turn_share_nothing(way, tmp_path, begun, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sweep(tmp_path, [1, 2], f"compute.side-by-side={way}", grid={"learning-rate": ["0.1", "0.2"]})
    assert begun == [(1, 0), (1, 0), (2, 0), (2, 0)]


def test_so_many_seeds_at_a_time_and_one_by_itself(tmp_path, begun, monkeypatch):
    monkeypatch.setattr(together, "MOST_TOGETHER", 2)
    sweep(tmp_path, [1, 2, 3], "compute.side-by-side=8")
    assert begun == [(1, 2), (2, 1), (3, 0)]


def test_what_is_missing_of_a_combination_is_begun_together(tmp_path, begun, runs):
    runs.fails = "seed=2"
    outcome = sweep(tmp_path, [1, 2, 3], "compute.side-by-side=8")
    assert [run.seed for run in outcome.failed] == [2]
    runs.fails = ""
    begun.clear()
    sweep(tmp_path, [1, 2, 3, 4], "compute.side-by-side=8")
    assert begun == [(2, 2), (4, 1)]


def test_a_sweep_that_is_stopped_waits_for_no_process_that_still_loads_data(tmp_path, begun, monkeypatch):
    loading = []

    def shared_workers(experiment, planned, log):
        loading.append(multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True))
        loading[0].start()
        return loading[0], [End() for _ in planned]

    def fork(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(together, "shared_workers", shared_workers)
    monkeypatch.setattr(child, "fork", fork)
    assert sweep(tmp_path, [1, 2, 3], "compute.side-by-side=8").interrupted
    assert loading[0].exitcode == -signal.SIGKILL


def test_a_run_that_cannot_be_started_leaves_none_of_its_group_behind(tmp_path, begun, monkeypatch):
    real, stopped = child.fork, []

    def fork(experiment, overrides, output, hooks, shared):
        if "seed=2" in overrides:
            raise BlockingIOError("no more processes")
        return real(experiment, overrides, output, hooks, shared)

    monkeypatch.setattr(child, "fork", fork)
    monkeypatch.setattr(child, "stop", lambda processes: stopped.extend(processes))
    with pytest.raises(BlockingIOError):
        sweep(tmp_path, [1, 2, 3], "compute.side-by-side=8")
    assert len(stopped) == 1


def wildflower(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "wildflower", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def at_once(run_dir):
    return [json.loads(line)["at_once"] for line in (run_dir / "devices.jsonl").read_text().splitlines()]


def model(run_dir):
    return safetensors.torch.load_file(run_dir / "models" / "best" / "global.safetensors")


@pytest.mark.thorough
def test_seeds_side_by_side_are_interrupted_finished_and_come_to_what_each_comes_to_by_itself(tmp_path):
    (tmp_path / "exp.toml").write_text(EXPERIMENT)
    words = [
        "sweep",
        str(tmp_path / "exp.toml"),
        "--seeds",
        "1-3",
        "--set",
        "rounds=6",
        "--set",
        "workers=1",
        "--folder",
        str(tmp_path / "s"),
    ]
    stacked = [*words, "--set", "compute.side-by-side=16"]
    process = wildflower(*stacked)
    dirs = [tmp_path / "s" / f"seed={seed}" for seed in (1, 2, 3)]
    while not all(path.is_dir() and read_rounds(path) for path in dirs):
        assert process.poll() is None, process.communicate()[0]
    running = psutil.Process(process.pid).children(recursive=True)
    # Three runs, each with its server, and the process that forks workers with the one worker of all of them.
    assert len(running) == 8
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    _, alive = psutil.wait_procs(running, timeout=5)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
    said = wildflower(*stacked).communicate()[0]
    assert "3 runs in" in said
    for path in dirs:
        summary = read_summary(path)
        assert summary is not None, said
        assert (summary.status, summary.rounds) == ("finished", 6)
        assert max(at_once(path)) > 4  # devices per round: some of other seeds were among them
    in_turn = tmp_path / "in-turn"
    assert "3 runs in" in wildflower(*words[:-1], str(in_turn)).communicate()[0]
    for path in dirs:
        # As vectors of all weights: six rounds carry rounding into single small tensors, a bias of two numbers say.
        wanted, found = (
            torch.cat([t.flatten().double() for t in model(at).values()]) for at in (in_turn / path.name, path)
        )
        assert torch.linalg.norm(found - wanted) <= 1e-3 * torch.linalg.norm(wanted)
