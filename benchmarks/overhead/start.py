"""What setting a run up and ending it takes, beside loading PyTorch alone.

    python -m benchmarks.overhead.start [--turns 6]

Both take turns. The run has rounds of two clients on one worker. What its rounds take is the slope between their ends,
as in `benchmarks.overhead.run`, and all else is start and end. Writes start.json and the table in README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from benchmarks.machine import cpu_model
from benchmarks.overhead.measure import Usage, measure
from benchmarks.overhead.run import CPU, TABLE, WALL, environment, make_data, start_up
from benchmarks.tables import markdown, median_and_range, write_between

HERE = Path(__file__).resolve().parent
SETTINGS = {"workers": 1, "rounds": 14, "devices-per-round": 2, "run-name": "run"}
IMPORT, RUN = "`import torch` alone", "a run without its rounds"


def turn(folder: Path, take: Callable[[list[str], Path], Usage]) -> dict[str, dict[str, float]]:
    """Measure each once: its wall and CPU seconds.

    Args:
        folder: where the data lie and runs are kept.
        take: measures a command that writes the journal of rounds which the path names.
    """
    nothing = folder / "no rounds"
    alone = take([sys.executable, "-c", "import torch"], nothing)
    with tempfile.TemporaryDirectory(dir=folder) as runs:
        command = [sys.executable, "-m", "wildflower", "run", str(HERE / "experiment.toml")]
        settings = SETTINGS | {"data-dir": folder / "data" / "parquet", "output-dir": runs}
        command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        whole = asdict(take(command, Path(runs) / "run" / "rounds.jsonl"))
    return {
        IMPORT: {"wall_seconds": alone.wall_seconds, "cpu_seconds": alone.cpu_seconds},
        RUN: {"wall_seconds": start_up(whole, WALL), "cpu_seconds": start_up(whole, CPU)},
    }


def main(turns: int) -> None:
    """Measure in turns and write both files."""
    loads, found = [], []
    with tempfile.TemporaryDirectory(prefix="start-") as name:
        folder = Path(name)
        make_data(folder / "data")
        env, log = environment(folder / "cache"), folder / "log.txt"

        def take(command: list[str], journal: Path) -> Usage:
            return measure(command, env=env, cwd=folder, log=log, rounds_file=journal)

        turn(folder, take)  # reads the data set for the first time, and fills the disk's cache
        for number in range(turns):
            loads.append(os.getloadavg()[0])
            found.append(turn(folder, take))
            print(number + 1, found[-1], flush=True)
    machine = {"cpu": cpu_model(), "cores": os.cpu_count(), "torch": version("torch")}
    (HERE / "start.json").write_text(json.dumps({"machine": machine, "load": loads, "turns": found}, indent=1) + "\n")
    rows = [
        [what, *(median_and_range([one[what][f"{clock}_seconds"] for one in found]) for clock in ("wall", "cpu"))]
        for what in (IMPORT, RUN)
    ]
    text = markdown(["", "wall, s", "CPU, s"], rows)
    text += f"\n\nMedians of {turns} turns; {machine['cores']} cores of {machine['cpu']}, torch {machine['torch']}; "
    text += f"load average before a turn {min(loads):.1f} to {max(loads):.1f}."
    write_between(TABLE, "start", text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=6)
    main(parser.parse_args().turns)
