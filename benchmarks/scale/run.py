"""What the number of devices costs the server: memory by devices per round, seconds and memory by devices in all.

    python -m benchmarks.scale.run

Memory: the peak resident memory of the process that the ServerApp runs in (in a simulation the one that also drives
Ray), in whole runs of `wildflower run`, 40 rounds of 10 and 8 rounds of 200 devices. Seconds: rounds of 50 out of
100 and of 50 out of 100,000 devices take turns in one process, over a grid in that process, and so do rounds of 1,000
out of 1,000 and of 1,000 out of 100,000; medians. Memory by devices in all: whole runs of `wildflower run` with 1,000
devices per round, on the local engine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import cpu_model
from benchmarks.random_images import write_copy
from benchmarks.runs import rounds_of
from benchmarks.tables import write_between
from tests.grid import InProcessGrid
from wildflower.client_app.app import app
from wildflower.launch.experiment_file import read_experiment
from wildflower.server_app.app import build
from wildflower.server_app.config import RunConfig

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS, TABLE = HERE / "results.json", HERE / "README.md"
ROUNDS = {10: 40, 200: 8}  # by devices per round: until the peak grows no more
STRATEGIES = ("fedavg", "federated-dropout")
DEVICES = {50: (100, 100_000), 1000: (1000, 100_000)}  # in all, by devices per round
LARGE_ROUNDS = 12
Row = dict[str, Any]


def memory(repetitions: int) -> list[Row]:
    """Peak memory of the server's process, by strategy and devices per round."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        write_copy(Path(folder) / "data", train=2000, test=20, side=40)
        env = {**os.environ, "WILDFLOWER_CACHE": str(Path(folder) / "cache"), "OMP_NUM_THREADS": "1"}
        for repetition in range(repetitions):
            for strategy in STRATEGIES:
                for devices, rounds_in_all in ROUNDS.items():
                    name = f"{strategy}-{devices}-{repetition}"
                    settings = {
                        "data-dir": Path(folder) / "data",
                        "fleet": HERE / "random-fleet.toml",
                        "output-dir": folder,
                        "run-name": name,
                        "strategy": strategy,
                        "devices-per-round": devices,
                        "rounds": rounds_in_all,
                    }
                    rounds = whole_run("memory.toml", settings, env)
                    rows.append(
                        {
                            "strategy": strategy,
                            "devices_per_round": devices,
                            "payload_bytes": rounds[0]["bytes_down"] // devices,
                            "server_peak_rss_bytes": rounds[-1]["server_peak_rss_bytes"],
                            "peak_rss_bytes_by_round": [r["server_peak_rss_bytes"] for r in rounds],
                            "load_average": os.getloadavg()[0],
                        }
                    )
                    print(rows[-1], flush=True)
    return rows


def whole_run(experiment: str, settings: Row, env: dict[str, str]) -> list[Row]:
    """The rounds of a `wildflower run` in whose every round all sampled devices reply; else this program ends."""
    command = [sys.executable, "-m", "wildflower", "run", str(HERE / experiment)]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
    rounds = rounds_of(Path(settings["output-dir"]) / str(settings["run-name"]))
    if {record["devices_replied"] for record in rounds} != {settings["devices-per-round"]}:
        sys.exit(f"{settings['run-name']}: not all devices of a round replied")
    return rounds


def large() -> list[Row]:
    """The server's peak memory after every round of 1,000 devices, with few and with many devices in all."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        for devices in DEVICES[1000]:
            settings = {
                "fleet": HERE / "random-fleet.toml",
                "output-dir": folder,
                "run-name": devices,
                "devices": devices,
                "devices-per-round": 1000,
                "rounds": LARGE_ROUNDS,
                "workers": 2,
            }
            records = whole_run("sampling.toml", settings, {**os.environ, "OMP_NUM_THREADS": "1"})
            row: Row = {"devices": devices}
            for key in ("server_peak_rss_bytes", "wall_seconds"):
                row[key + "_by_round"] = [record[key] for record in records]
            rows.append(row)
    return rows


def sampling(per_round: int, rounds: int) -> list[Row]:
    """Seconds of every round, of the server alone and of the whole, with few and with many devices in all."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        runs = {}
        for devices in DEVICES[per_round]:
            values = {
                **read_experiment(HERE / "sampling.toml"),
                "devices": devices,
                "devices-per-round": per_round,
                "fleet": str(HERE / "random-fleet.toml"),
                "output-dir": folder,
                "run-name": f"{devices}",
            }
            engine, scorer = build(RunConfig.from_run_config(values))
            runs[devices] = (engine, scorer, InProcessGrid(app, 2))
        for number in range(1, rounds + 1):
            # Whoever goes first goes second the next time.
            for devices in DEVICES[per_round] if number % 2 else DEVICES[per_round][::-1]:
                engine, scorer, grid = runs[devices]
                record = engine.run_round(grid, number, scorer).record
                grid.sent.clear()
                if number > 2:  # the first rounds fill caches
                    server = record["server_seconds"]
                    rows.append(
                        {
                            "devices_per_round": per_round,
                            "devices": devices,
                            "round": number,
                            "devices_replied": record["devices_replied"],
                            "wall_seconds": record["wall_seconds"],
                            "server_seconds": sum(server.values()),
                            "assign_seconds": server["assign"],
                        }
                    )
    return rows


def tables(results: Row) -> list[str]:
    """The results as markdown."""
    lines = [
        "| strategy | model, MB | peak memory at 10 devices per round, MB | at 200, MB | ratio |",
        "|---|---|---|---|---|",
    ]
    for strategy in STRATEGIES:
        mine = [row for row in results["memory"] if row["strategy"] == strategy]
        few, many = (
            statistics.median([r["server_peak_rss_bytes"] for r in mine if r["devices_per_round"] == n]) for n in ROUNDS
        )
        model = mine[0]["payload_bytes"] / 1e6
        lines.append(f"| {strategy} | {model:.1f} | {few / 1e6:.0f} | {many / 1e6:.0f} | {many / few:.3f} |")
    for per_round, (fewest, most) in DEVICES.items():
        lines += [
            "",
            f"| seconds of a round of {per_round:,}, median | out of {fewest:,} | out of {most:,} | ratio |",
            "|---|---|---|---|",
        ]
        for key, words in (
            ("wall_seconds", "whole round"),
            ("server_seconds", "server"),
            ("assign_seconds", "of these, sampling and assignment"),
        ):
            mine = [row for row in results["sampling"] if row["devices_per_round"] == per_round]
            few, many = (statistics.median([row[key] for row in mine if row["devices"] == n]) for n in (fewest, most))
            lines.append(f"| {words} | {few:.4f} | {many:.4f} | {many / few:.3f} |")
    lines += [
        "",
        "| devices in all, 1,000 per round | server's peak memory after round 2, MB | after half of the rounds "
        "| after the last | seconds of a round, median |",
        "|---|---|---|---|---|",
    ]
    for row in results["large"]:
        peaks = [peak / 1e6 for peak in row["server_peak_rss_bytes_by_round"]]
        seconds = statistics.median(row["wall_seconds_by_round"][1:])
        half, last = peaks[len(peaks) // 2 - 1], peaks[-1]
        lines.append(f"| {row['devices']:,} | {peaks[1]:.0f} | {half:.0f} | {last:.0f} | {seconds:.1f} |")
    loads = [row["load_average"] for row in results["memory"]] + [results["load_average"]]
    machine = results["machine"]
    lines += [
        "",
        f"{machine['cores']} cores of {machine['cpu']}, "
        + ", ".join(f"{k} {machine[k]}" for k in ("python", "torch", "flwr", "ray"))
        + f"; load average {min(loads):.1f} to {max(loads):.1f}.",
    ]
    return lines


def main() -> None:
    """Measure, write results.json and the tables in README.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=2, help="of the runs that measure memory")
    parser.add_argument("--rounds", type=int, default=40, help="of 50 devices, and half as many of 1,000")
    parser.add_argument("--part", choices=["memory", "sampling", "large"], help="measure one part, keep the others")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: Row = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if arguments.part in (None, "memory"):
        results["memory"] = memory(arguments.repetitions)
    if arguments.part in (None, "large"):
        results["large"] = large()
    if arguments.part in (None, "sampling"):
        results["sampling"] = sampling(50, arguments.rounds) + sampling(1000, arguments.rounds // 2)
        results["load_average"] = os.getloadavg()[0]
    results["machine"] = {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "flwr", "ray")},
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    write_between(TABLE, "tables", "\n".join(tables(results)))


if __name__ == "__main__":
    main()
