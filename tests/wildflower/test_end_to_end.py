"""The command with the real Flower and the real app: started, interrupted, resumed, finished."""

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


@pytest.mark.flower
def test_a_run_is_interrupted_resumed_and_finished(tmp_path):
    experiment = tmp_path / "experiment.toml"
    experiment.write_text(
        f'''task = "digits"\nworkers = 1\ndevices-per-round = 2\nrounds = 500
evaluate-every = 1\nlearning-rate = 0.01\noutput-dir = "{tmp_path}"\nrun-name = "one"\n'''
    )
    run_dir = tmp_path / "one"
    process = start(experiment)
    assert process.stdout is not None
    before = []
    for line in process.stdout:
        before.append(line)
        if line.startswith("round 2/"):
            break
    assert before[-1].startswith("round 2/500, accuracy "), "".join(before)
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
