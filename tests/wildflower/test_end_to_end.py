"""The command with the real app, on its own workers and on Flower's: started, interrupted, resumed, finished."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from server_app.journal import read_rounds, read_summary

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


def left_running(folder: Path) -> list[str]:
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        if str(folder) in " ".join([*(process.info["cmdline"] or []), *(process.info["environ"] or {}).values()]):
            found.append(str(process))
    return found


def write_experiment(folder: Path, engine: str) -> Path:
    experiment = folder / "experiment.toml"
    experiment.write_text(
        f'''task = "digits"\nworkers = 1\ndevices-per-round = 2\nrounds = 500\nengine = "{engine}"
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
    assert before[-1].startswith(f"round {number}/500, accuracy "), "".join(before)


def test_a_run_on_own_workers_is_interrupted_resumed_killed_and_finished(tmp_path):
    experiment, run_dir = write_experiment(tmp_path, "local"), tmp_path / "one"
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

    rounds = len(killed) + 1
    resumed = start(experiment, "resume=true", f"rounds={rounds}")
    said = resumed.communicate()[0]
    assert resumed.returncode == 0, said
    assert f"Report: {run_dir / 'report.html'}" in said
    assert f"round {rounds}/{rounds}, accuracy " in said
    summary = read_summary(run_dir)
    assert summary is not None
    assert (summary.status, summary.rounds) == ("finished", rounds)
    assert read_rounds(run_dir)[: len(killed) - 1] == killed[:-1]
    assert not (run_dir / "superlink.log").exists()


def test_a_run_on_own_workers_that_fails_tells_why(tmp_path):
    experiment = write_experiment(tmp_path, "local")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "checkpoint").write_text("in the way")
    process = start(experiment)
    said = process.communicate()[0]
    assert process.returncode == 1, said
    assert "The run failed. The run's server has ended with an error" in said
    assert "Traceback (most recent call last)" in said
    assert "Error: [Errno 20] Not a directory: " in said
    assert f"Logs: {tmp_path / 'one' / 'app.log'}\n" in said


@pytest.mark.flower
def test_a_run_on_flowers_engine_is_interrupted_resumed_and_finished_with_the_bits_of_own_workers(tmp_path):
    experiment, run_dir = write_experiment(tmp_path, "flower"), tmp_path / "one"
    process = start(experiment)
    wait_for_round(process, 2)
    process.send_signal(signal.SIGINT)
    after = process.communicate()[0]
    assert process.returncode == 130, after
    assert "--set resume=true --set run-name=one" in after
    (folder,) = set(
        re.findall(r"Successfully installed wildflower to (\S+)/home/apps", (run_dir / "app.log").read_text())
    )
    assert not Path(folder).exists()
    assert left_running(Path(folder)) == []
    assert read_summary(run_dir) is None
    interrupted = read_rounds(run_dir)
    assert len(interrupted) >= 2

    rounds = len(interrupted) + 1
    resumed = start(experiment, "resume=true", f"rounds={rounds}")
    said = resumed.communicate()[0]
    assert resumed.returncode == 0, said
    assert f"Report: {run_dir / 'report.html'}" in said
    assert f"round {rounds}/{rounds}, accuracy " in said
    summary = read_summary(run_dir)
    assert summary is not None
    assert (summary.status, summary.rounds) == ("finished", rounds)
    # The last round may be done again; the ones before it are those of the first start.
    assert read_rounds(run_dir)[: len(interrupted) - 1] == interrupted[:-1]
    assert (run_dir / "report.html").read_text().startswith("<!doctype html>")

    own = start(experiment, "engine=local", "workers=2", "run-name=two", f"rounds={rounds}")
    said = own.communicate()[0]
    assert own.returncode == 0, said
    states = [tmp_path / run / "checkpoint" / f"round-{rounds}" / "state.safetensors" for run in ("one", "two")]
    assert states[0].read_bytes() == states[1].read_bytes()
    assert [(r.score, r.loss) for r in read_rounds(tmp_path / "two")] == [
        (r.score, r.loss) for r in read_rounds(run_dir)
    ]
