"""Simulations on own workers: what is seen of every fault, how many finished rounds are lost, and how long it takes.

As recovery.py, which has the same for real nodes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.compose.watched_run import HINT, LONGEST_SECONDS, MB, Run, fill, quoted, small_disk

SIMULATED = """
task = "digits"
workers = 1
devices-per-round = 2
rounds = 1000
evaluate-every = 1000
learning-rate = 0.01
run-name = "one"
"""


@pytest.fixture
def simulation(tmp_path: Path) -> Iterator[Run]:
    (tmp_path / "experiment.toml").write_text(SIMULATED)
    run = Run(tmp_path)
    yield run
    run.stop()


def family_of(run: Run) -> dict[str, psutil.Process]:
    """The processes of a simulation, by what they are."""
    assert run.process is not None
    command = psutil.Process(run.process.pid)
    [server] = command.children()
    [fork_server] = server.children()
    [worker] = fork_server.children()
    return {"command": command, "server": server, "fork server": fork_server, "worker": worker}


@pytest.mark.parametrize("who", ["command", "server", "fork server"])
def test_a_process_of_a_simulation_is_killed(who, simulation, note):
    simulation.start().wait_for_round(2)
    family = family_of(simulation)
    family[who].kill()
    killed = time.monotonic()
    assert simulation.process is not None
    simulation.process.wait(LONGEST_SECONDS)
    told = time.monotonic() - killed
    said, before = simulation.said(), simulation.rounds()
    _, alive = psutil.wait_procs(list(family.values()), timeout=60)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
    if who == "command":
        seen = "nothing is left running"
    else:
        assert simulation.process.returncode == 1
        assert told < 10
        seen = f"after {told:.1f} s {quoted(said, 'The run failed.')}, and how to resume"
        assert HINT in said
    seconds = simulation.start("resume=true").next_round()
    note(f"kill -9: {who} of a simulation", seen, seconds, before, simulation.rounds())


def test_a_worker_of_a_simulation_is_killed(simulation, note):
    simulation.start().wait_for_round(2)
    before = simulation.rounds()
    family_of(simulation)["worker"].kill()
    seconds = simulation.next_round(2)
    log = simulation.log()
    assert "another one takes its place" in log
    assert {d.outcome for d in simulation.devices()} == {"trained"}
    seen = f"{quoted(log, 'Worker 1 was killed')}; its orders are done again, and no device fails"
    note("kill -9: worker of a simulation", seen, seconds, before, simulation.rounds())


def test_a_simulation_is_paused(simulation, note):
    simulation.start().wait_for_round(2)
    family = family_of(simulation)
    for process in family.values():
        process.suspend()
    before = simulation.rounds()
    time.sleep(3)
    assert len(simulation.rounds()) <= len(before) + 1
    for process in reversed(family.values()):
        process.resume()
    seconds = simulation.next_round()
    note("pause: all processes of a simulation", "nothing", seconds, before, simulation.rounds())


def test_the_disk_of_a_simulations_folder_fills(tmp_path, note):
    (tmp_path / "experiment.toml").write_text(SIMULATED)
    with small_disk(tmp_path / "runs", 64 * MB) as disk:
        run = Run(tmp_path, output=disk)
        try:
            run.start().wait_for_round(2)
            ballast = fill(disk)
            said, before = run.ends(1), run.rounds()
            assert HINT in said
            ballast.unlink()
            seconds = run.start("resume=true").next_round()
            seen = f"{quoted(said, 'The disk of').replace(str(disk), 'RUNS')}, and how to resume"
            note("full disk: the run's folder", seen, seconds, before, run.rounds())
        finally:
            run.stop()


def test_the_disk_is_full_before_the_first_checkpoint(tmp_path, note):
    (tmp_path / "experiment.toml").write_text(SIMULATED)
    with small_disk(tmp_path / "runs", 32 * MB) as disk:
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(32 * MB - 64 * 1024))
        run = Run(tmp_path, output=disk)
        try:
            said = run.start().ends(1)
            assert list((run.dir / "checkpoint").glob("round-*/SHA256SUMS")) == []
            ballast.unlink()
            started = time.monotonic()
            run.start("rounds=1").ends(0)
            seconds = time.monotonic() - started
            seen = quoted(said, "The disk of").replace(str(disk), "RUNS")
            note("full disk: before the first checkpoint", f"{seen}; the same command begins anew", seconds)
        finally:
            run.stop()


@pytest.mark.parametrize(
    ("what", "file", "words"),
    [
        ("the newest checkpoint", "checkpoint/round-4/state.safetensors", "going back to the checkpoint of round 3"),
        ("the journal of rounds", "rounds.jsonl", "going back to the checkpoint of round 3"),
        ("the journal of devices", "devices.jsonl", "going back to the checkpoint of round 3"),
        ("the best model", "models/best/models.json", ""),
        ("the summary", "summary.json", ""),
    ],
)
def test_a_file_is_torn(what, file, words, simulation, note):
    simulation.start("rounds=4", "evaluate-every=2").ends(0)
    before = simulation.rounds()
    torn = simulation.dir / file
    torn.write_bytes(torn.read_bytes()[:-30])
    seconds = simulation.start("resume=true", "rounds=5", "evaluate-every=2").wait_for_round(5)
    simulation.ends(0)
    assert [one == other for one, other in zip(before, simulation.rounds(), strict=False)] == [True] * 3 + [not words]
    seen = quoted(simulation.log(), words) if words else "nothing"
    note(f"torn file: {what}", seen, seconds, before, simulation.rounds())


def test_a_configuration_that_is_torn_stops_the_command_and_nothing_is_changed(simulation, note):
    simulation.start("rounds=2").ends(0)
    before, config = simulation.rounds(), simulation.dir / "config.json"
    data = config.read_bytes()
    config.write_bytes(data[:-30])
    said = simulation.start("resume=true", "rounds=3").ends(1)
    assert simulation.rounds() == before
    assert config.read_bytes() == data[:-30]
    config.write_bytes(data)
    seconds = simulation.start("resume=true", "rounds=3").wait_for_round(3)
    seen = f"{quoted(said, 'Without the configuration')}; with the file put back it goes on"
    note("torn file: config.json", seen, seconds, before, simulation.rounds())
