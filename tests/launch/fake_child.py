"""Stands in for the processes of runs: writes a run's journal at once, without any learning."""

import signal
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import IO

from tests.server_app import fake_runs
from wildflower.devices.fleet import Fleet
from wildflower.launch.experiment_file import beside, place, resolve
from wildflower.plugins.beside import digests
from wildflower.server_app.inputs import fleet_path, task_spec
from wildflower.server_app.journal import Journal
from wildflower.tasks.task import load_task


class Process:
    """One that has ended with a code, or that goes on until it is interrupted (None)."""

    def __init__(self, returncode: int | None) -> None:
        self.returncode = returncode

    def poll(self) -> int | None:
        if self.returncode is None:
            signal.raise_signal(signal.SIGINT)  # Ctrl-C while it goes on
        return self.returncode

    def send_signal(self, number: int) -> None:
        assert number == signal.SIGINT
        self.returncode = 130

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and timeout is not None:
            signal.raise_signal(signal.SIGINT)
        assert self.returncode is not None
        return self.returncode


class Runs:
    """In place of `child.start`: what was asked, and what comes of it."""

    def __init__(self) -> None:
        self.asked: list[dict[str, str]] = []
        self.fails = ""  # in the names of runs that fail
        self.outcomes: dict[int, tuple[str, str]] = {}  # of the two devices of a round, in place of trained and late
        self.warns: list[str] = []  # of what runs warn before their rounds
        self.records_data = False  # as runs do; to read data takes a moment
        self.waits = False  # runs go on after their first round
        self.is_interrupted = False  # there is a Ctrl-C as soon as a run's process is there
        self.processes: list[Process] = []

    def start(self, experiment: Path, overrides: Sequence[str], output: IO[bytes]) -> Process:
        self.processes.append(self._start(overrides, experiment, output))
        if self.is_interrupted:
            signal.raise_signal(signal.SIGINT)
        return self.processes[-1]

    def _start(self, overrides: Sequence[str], experiment: Path, output: IO[bytes]) -> Process:
        self.asked.append(dict(override.split("=", 1) for override in overrides))
        with beside(experiment):
            config, run_dir = place(resolve(experiment, overrides).config, Path.cwd(), datetime.now())
            plugins = digests(config.modules())
            fleet = ""
            if config.fleet:
                fleet = Fleet(fleet_path(config), devices=config.devices, seed=0, requirement=lambda _: (1, 1)).digest
            data = load_task(task_spec(config)).identity() if self.records_data else {}
        said = [
            f"{config.run_name}: {config.strategy} on {config.task}, 2 rounds",
            *(f"Warning: {w}" for w in self.warns),
        ]
        fails = self.fails and self.fails in run_dir.name
        if fails:
            said += ["round 1/2, accuracy 3 %", "Warning: 2 warnings in app.log", "  Round 1: one (and 1 more like it)"]
            said.append("Error: no data are here")
        output.write("".join(f"{line}\n" for line in said).encode())
        output.flush()
        if fails:
            return Process(1)
        journal = Journal.open(
            run_dir,
            config.to_dict(),
            resume=config.resume,
            fleet=fleet,
            plugins=plugins,
            data=data,
        )
        for number in range(journal.last_round + 1, config.rounds + 1):
            scores = {"score": 0.5 + 0.1 * config.seed, "delivered_score": 0.4 + 0.1 * config.seed}
            record = fake_runs.a_round(number, strategy=config.strategy, **scores)
            one, other = self.outcomes.get(number, ("trained", "late"))
            devices = [fake_runs.a_device(number, 0, outcome=one), fake_runs.a_device(number, 1, outcome=other)]
            journal.write_round(record, devices)
            if self.waits:
                return Process(None)
        journal.finish("finished")
        return Process(0)


def in_place_of_processes() -> Runs:
    """Let all runs of this process be stood in for; for a notebook, which has no fixtures."""
    from wildflower.launch import child

    runs = Runs()
    child.start = runs.start  # type: ignore[assignment]
    return runs
