"""The command with the real app on its own workers: started, interrupted, resumed, finished."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from wildflower.server_app.run_folder import read_rounds, read_summary
from wildflower.server_app.run_records import RoundRecord

ROOT = Path(__file__).parents[2]


def start(experiment: Path, *overrides: str) -> subprocess.Popen[str]:
    arguments = [word for override in overrides for word in ("--set", override)]
    return subprocess.Popen(
        [sys.executable, "-m", "wildflower", "run", str(experiment), *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def write_experiment(folder: Path) -> Path:
    experiment = folder / "experiment.toml"
    experiment.write_text(
        f'''task = "digits"\nworkers = 1\ndevices-per-round = 2\nrounds = 500
evaluate-every = 1\nlearning-rate = 0.01\noutput-dir = "{folder}"\nrun-name = "one"\n'''
    )
    return experiment


def wait_for_round(process: subprocess.Popen[str], number: int) -> None:
    assert process.stdout is not None
    before = []
    for line in process.stdout:
        before.append(line)
        if line.startswith(f"round {number}/"):
            break
    assert before[-1].startswith(f"round {number}/500, delivered accuracy "), "".join(before)


def check_resumed(experiment: Path, run_dir: Path, before: list[RoundRecord]) -> None:
    """Resume a run that was stopped behind these rounds, for one round more."""
    rounds = len(before) + 1
    resumed = start(experiment, "resume=true", f"rounds={rounds}")
    said = resumed.communicate()[0]
    assert resumed.returncode == 0, said
    assert f"Report: {run_dir / 'report.html'}" in said
    assert f"round {rounds}/{rounds}, delivered accuracy " in said
    summary = read_summary(run_dir)
    assert summary is not None
    assert (summary.status, summary.rounds) == ("finished", rounds)
    # The last round may be done again; the ones before it are those of the first start.
    assert read_rounds(run_dir)[: len(before) - 1] == before[:-1]


@pytest.mark.thorough
def test_what_is_found_while_a_run_is_built_is_told_before_its_rounds_and_once(tmp_path):
    torch.save({"block1.conv.bias": torch.zeros(6)}, tmp_path / "part.pth")
    settings = ("rounds=1", "family=lenet5", f"initial.weights={tmp_path / 'part.pth'}")
    process = start(write_experiment(tmp_path), *settings)
    said = process.communicate()[0]
    assert process.returncode == 0, said
    assert 0 < said.index("drawn at random: block1.conv.weight") < said.index("round 1/1")
    assert said.count("drawn at random") == 1


@pytest.mark.thorough
def test_a_run_on_own_workers_is_interrupted_resumed_killed_and_finished(tmp_path):
    experiment, run_dir = write_experiment(tmp_path), tmp_path / "one"
    process = start(experiment)
    wait_for_round(process, 2)
    running = psutil.Process(process.pid).children(recursive=True)
    assert len(running) == 3  # the server, the process that forks workers, and one worker
    process.send_signal(signal.SIGTERM)
    after = process.communicate()[0]
    assert process.returncode == 130, after
    assert "Stopped, and everything that was started with it." in after
    assert "--set resume=true --set run-name=one" in after
    _, alive = psutil.wait_procs(running, timeout=5)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
    assert read_summary(run_dir) is None
    interrupted = read_rounds(run_dir)
    assert len(interrupted) >= 2

    process = start(experiment, "resume=true")
    wait_for_round(process, len(interrupted) + 1)
    (server,) = psutil.Process(process.pid).children()
    running = [server, *server.children(recursive=True)]
    server.kill()
    after = process.communicate()[0]
    assert process.returncode == 1, after
    assert "The run failed. The server's process has ended without a word" in after
    assert "(SIGKILL)" in after
    assert "--set resume=true --set run-name=one" in after
    _, alive = psutil.wait_procs(running, timeout=5)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
    killed = read_rounds(run_dir)
    assert killed[: len(interrupted) - 1] == interrupted[:-1]

    check_resumed(experiment, run_dir, killed)


@pytest.mark.thorough
def test_a_run_on_own_workers_that_fails_tells_why(tmp_path):
    experiment = write_experiment(tmp_path)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "checkpoint").write_text("in the way")
    process = start(experiment)
    said = process.communicate()[0]
    assert process.returncode == 1, said
    assert "The run failed. The run's server has ended with an error" in said
    assert "Traceback (most recent call last)" in said
    assert "Error: [Errno 20] Not a directory: " in said
    assert f"Logs: {tmp_path / 'one' / 'app.log'}\n" in said
