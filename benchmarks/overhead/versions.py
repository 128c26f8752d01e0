"""CPU seconds per round of two versions of Wildflower and of the bare loop, side by side.

    git worktree add ../before COMMIT
    python -m benchmarks.overhead.versions --before ../before

The three take turns, each as a process tree of its own, on one worker. Finished turns are kept in versions.json: the
same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.overhead.measure import measure
from benchmarks.overhead.run import CPU, HERE, ROUNDS, TABLE, environment, make_data, per_round
from benchmarks.tables import markdown, median_and_range, write_between

RESULTS = HERE / "versions.json"
LOOP = "bare PyTorch loop"


def command(contestant: str, folder: Path, data: Path, runs: Path) -> list[str]:
    """The command of the loop, or of the Wildflower in a folder."""
    if contestant == LOOP:
        return [sys.executable, str(HERE / "bare.py"), str(data), str(ROUNDS), str(runs / "run" / "rounds.jsonl")]
    run = [sys.executable, "-m", "wildflower", "run", str(folder / "benchmarks/overhead/experiment.toml")]
    values = {"data-dir": data / "parquet", "output-dir": runs, "run-name": "run", "rounds": ROUNDS, "workers": 1}
    for key, value in values.items():
        run += ["--set", f"{key}={value}"]
    return run


def turns(before: Path, repetitions: int) -> list[dict[str, Any]]:
    """Run what is not in versions.json yet; all turns."""
    found: list[dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    now = HERE.parents[1]
    contestants = {LOOP: now, f"Wildflower at {commit(before)}": before, f"Wildflower at {commit(now)}": now}
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        data, runs = Path(folder) / "data", Path(folder) / "runs"
        make_data(data)
        for repetition in range(repetitions):
            for contestant, checkout in contestants.items():
                if (contestant, repetition) in {(turn["contestant"], turn["repetition"]) for turn in found}:
                    continue
                paths = os.pathsep.join([str(checkout), str(checkout / "benchmarks/overhead/flower_app")])
                # Each version decodes the data into a cache of its own, before it is measured.
                env = environment(Path(folder) / f"cache-{checkout.name}") | {"PYTHONPATH": paths}
                decode = f"from wildflower.tasks.hub import load; load('cifar10', {str(data / 'parquet')!r})"
                subprocess.run([sys.executable, "-c", decode], env=env, cwd=checkout, check=True)
                (runs / "run").mkdir(parents=True)
                log, load = Path(folder) / "log.txt", os.getloadavg()[0]
                usage = measure(
                    command(contestant, checkout, data, runs),
                    env=env,
                    cwd=checkout,
                    log=log,
                    rounds_file=runs / "run" / "rounds.jsonl",
                )
                shutil.rmtree(runs)
                log.unlink()
                turn = {"contestant": contestant, "repetition": repetition, "load_average": load}
                turn["cpu_seconds_per_round"] = per_round({"rounds": usage.rounds}, CPU)
                found.append(turn)
                RESULTS.write_text(json.dumps(found, indent=1) + "\n")
                print(turn, flush=True)
    return found


def commit(folder: Path) -> str:
    """The short name of a checkout's commit."""
    arguments = ["git", "-C", str(folder), "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(arguments, capture_output=True, text=True, check=True).stdout.strip()


def table(found: list[dict[str, Any]]) -> str:
    """Medians, and the ratio to the bare loop of the same repetition."""
    seconds: dict[str, dict[int, float]] = {}
    for turn in found:
        seconds.setdefault(turn["contestant"], {})[turn["repetition"]] = turn["cpu_seconds_per_round"]
    rows = []
    for contestant, mine in seconds.items():
        ratios = [value / seconds[LOOP][repetition] for repetition, value in mine.items()]
        rows.append([contestant, f"{statistics.median(mine.values()):.2f}", median_and_range(ratios)])
    loads = [turn["load_average"] for turn in found]
    text = markdown(["", "CPU s per round", "against the bare loop"], rows)
    return f"{text}\n\nLoad average before a turn {min(loads):.1f} to {max(loads):.1f}."


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, type=Path, help="a checkout of the earlier version")
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    write_between(TABLE, "versions", table(turns(arguments.before.resolve(), arguments.repetitions)))
