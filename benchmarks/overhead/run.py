"""CPU seconds per round of several ways to run the same training, side by side.

    python -m benchmarks.overhead.run --pfl-python PATH_TO_PYTHON_WITH_PFL

Contestants take turns (A B C D A B C D ...), so that whatever else the machine does hits all alike. Each turn runs a
contestant as a process tree of its own. The cost of a round is the slope from the end of round 1 to the end of the last
round but one (the last has Wildflower's evaluation in it); all the rest is start-up and end. Finished turns are kept in
results.json: the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import cpu_model
from benchmarks.overhead.measure import measure
from benchmarks.random_images import write_copy
from benchmarks.tables import markdown, median_and_range, write_between

HERE = Path(__file__).resolve().parent
RESULTS, TABLE = HERE / "results.json", HERE / "README.md"
TRAIN, TEST = 10_000, 20
ROUNDS = 5
WALL, CPU = 0, 1  # places in `Usage.rounds`


def commands(pfl_python: str, data: Path, runs: Path) -> dict[str, list[str]]:
    """Contestant -> its command. Each writes a line per round to `runs / "run" / "rounds.jsonl"`."""
    wildflower = [sys.executable, "-m", "wildflower", "run", str(HERE / "experiment.toml")]
    for key, value in {"data-dir": data / "parquet", "output-dir": runs, "run-name": "run", "rounds": ROUNDS}.items():
        wildflower += ["--set", f"{key}={value}"]
    loop = [str(data), str(ROUNDS), str(runs / "run" / "rounds.jsonl")]
    bare = [sys.executable, str(HERE / "bare.py")]
    seen, unseen = (shlex.join([*bare, *loop[:2], file, "2"]) for file in (loop[2], os.devnull))
    beside = f"{unseen} & other=$!; {seen} && wait $other"
    channels_last = ["--set", "compute.layout=channels-last"]
    return {
        "bare PyTorch loop": [*bare, *loop],
        "two bare loops side by side, half of the clients each": ["bash", "-c", beside],
        "pfl": [pfl_python, str(HERE / "pfl_loop.py"), *loop],
        "Flower FedAvg": [sys.executable, str(HERE / "stock_flower.py"), *loop],
        "Wildflower, 2 workers": [*wildflower, "--set", "workers=2"],
        "Wildflower, 1 worker": [*wildflower, "--set", "workers=1"],
        "Wildflower, 1 worker, channels-last": [*wildflower, "--set", "workers=1", *channels_last],
    }


def make_data(folder: Path) -> None:
    """Random images in CIFAR-10's format, since only the work counts here: as parquet files and as plain arrays."""
    images, labels = write_copy(folder / "parquet", train=TRAIN, test=TEST)
    np.save(folder / "images.npy", np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
    np.save(folder / "labels.npy", labels)


def environment(cache: Path) -> dict[str, str]:
    """One thread per process for all, a cache of their own, and compiled modules kept, as those of a package are."""
    paths = [str(HERE.parents[1]), str(HERE / "flower_app")]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {
        **{key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"},
        **threads,
        "PYTHONPATH": os.pathsep.join(paths),
        "WILDFLOWER_CACHE": str(cache),
        "PFL_PYTORCH_DEVICE": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
    }


def turns(pfl_python: str, repetitions: int, only: tuple[str, ...]) -> list[dict[str, Any]]:
    """Run what is not in results.json yet; all turns."""
    found: list[dict[str, Any]] = json.loads(RESULTS.read_text())["turns"] if RESULTS.exists() else []
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        data, runs = Path(folder) / "data", Path(folder) / "runs"
        make_data(data)
        env = environment(Path(folder) / "cache")
        decode = f"from wildflower.tasks.hub import load; load('cifar10', {str(data / 'parquet')!r})"
        subprocess.run([sys.executable, "-c", decode], env=env, check=True)
        for repetition in range(repetitions):
            for contestant, command in commands(pfl_python, data, runs).items():
                done = {(t["contestant"], t["repetition"]) for t in found}
                if (contestant, repetition) in done or not contestant.startswith(only):
                    continue
                (runs / "run").mkdir(parents=True)
                log, rounds_file = Path(folder) / "log.txt", runs / "run" / "rounds.jsonl"
                load = os.getloadavg()[0]
                usage = measure(command, env=env, cwd=Path(folder), log=log, rounds_file=rounds_file)
                shutil.rmtree(runs)
                log.unlink()
                turn = {"contestant": contestant, "repetition": repetition, "load_average": load, **asdict(usage)}
                found.append(turn)
                write(found, pfl_python)
                print(contestant, repetition, f"{per_round(turn, CPU):.2f} CPU s per round", flush=True)
    return found


def per_round(turn: Mapping[str, Any], what: int) -> float:
    """Seconds of one round, WALL or CPU."""
    ends = turn["rounds"]
    return float(ends[-2][what] - ends[0][what]) / (len(ends) - 2)


def start_up(turn: Mapping[str, Any], what: int) -> float:
    """Seconds that are not rounds, WALL or CPU."""
    whole = turn["cpu_seconds"] if what == CPU else turn["wall_seconds"]
    return float(whole - len(turn["rounds"]) * per_round(turn, what))


def write(found: list[dict[str, Any]], pfl_python: str) -> None:
    """results.json and the table in README.md, between its two marks."""
    pfl = subprocess.run(
        [pfl_python, "-c", "import importlib.metadata as m; print(m.version('pfl'), m.version('torch'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    machine = {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "flwr": version("flwr"),
        "ray": version("ray"),
        "pfl": pfl[0],
        "torch beside pfl": pfl[1],
    }
    RESULTS.write_text(json.dumps({"machine": machine, "rounds": ROUNDS, "turns": found}, indent=1) + "\n")
    heads = ["", "CPU s per round", "against the bare loop", "wall s per round"]
    heads += ["start-up and end, CPU s", "start-up and end, wall s", "peak memory, MB"]
    rows = []
    by_name: dict[str, list[dict[str, Any]]] = {}
    for turn in found:
        by_name.setdefault(turn["contestant"], []).append(turn)
    bare = {t["repetition"]: per_round(t, CPU) for t in by_name.get("bare PyTorch loop", [])}
    for name, mine in by_name.items():
        ratios = [per_round(t, CPU) / bare[t["repetition"]] for t in mine if t["repetition"] in bare]
        cpu, wall, start_cpu, start_wall = (
            f"{statistics.median(seconds(turn, what) for turn in mine):.2f}"
            for seconds in (per_round, start_up)
            for what in (CPU, WALL)
        )
        peak = f"{statistics.median(turn['peak_pss_bytes'] for turn in mine) / 1e6:.0f}"
        rows.append([name, cpu, median_and_range(ratios) if ratios else "", wall, start_cpu, start_wall, peak])
    loads = [t["load_average"] for t in found]
    counts = [len(mine) for mine in by_name.values()]
    how = f"Medians of {min(counts)} to {max(counts)} turns; {machine['cores']} cores of {machine['cpu']}, "
    how += ", ".join(f"{k} {machine[k]}" for k in ("python", "torch", "flwr", "ray", "pfl"))
    how += f"; load average before a turn {min(loads):.1f} to {max(loads):.1f}."
    write_between(TABLE, "table", f"{markdown(heads, rows)}\n\n{how}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pfl-python", required=True, help="a Python with pfl 0.6.0 and the same torch installed")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[""], help="contestants whose name starts with one of these")
    arguments = parser.parse_args()
    turns(arguments.pfl_python, arguments.repetitions, tuple(arguments.only))
