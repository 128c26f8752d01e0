"""CPU seconds per round with devices in turn and side by side, in turns (A B C A B C ...).

    python -m benchmarks.overhead.side_by_side --repetitions 3

Every turn is a whole run, as in `benchmarks.overhead.run`. Finished turns are kept in side_by_side.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.machine import cpu_model
from benchmarks.overhead.measure import measure
from benchmarks.overhead.run import CPU, HERE, WALL, environment, per_round
from benchmarks.tables import markdown, median_and_range, write_between

RESULTS, TABLE = HERE / "side_by_side.json", HERE / "README.md"
FLEET = HERE.parents[1] / "wildflower" / "devices" / "fleets" / "digits-demo.toml"
DEMO = HERE.parent / "demo" / "digits.toml"
MANY = [
    "devices=10000",
    "devices-per-round=1000",
    "examples-per-device=32",
    "evaluate-every=1000",
    "local-epochs=1",
    "rounds=3",
]
# What is run -> its settings beside the demo's.
WORKLOADS = {
    "the demo, 10 of 20 devices in a round": ["rounds=12"],
    "FedAvg on the width 1/4, 1,000 of 10,000 devices in a round": [
        *MANY,
        "strategy=fedavg",
        "widths=0.25",
        "evaluate-every=9",
    ],
    "wildflower, 100 of 1,000 devices in a round": [
        *MANY,
        "strategy=wildflower",
        "devices=1000",
        "devices-per-round=100",
        "rounds=12",
    ],
}
WAYS = ("off", "32", "fastest")


def turns(repetitions: int) -> None:
    """Run what is not in side_by_side.json yet."""
    found: list[dict[str, Any]] = json.loads(RESULTS.read_text())["turns"] if RESULTS.exists() else []
    done = {(turn["workload"], turn["way"], turn["repetition"]) for turn in found}
    wanted = [(w, way, repetition) for w in WORKLOADS for repetition in range(repetitions) for way in WAYS]
    for workload, way, repetition in [turn for turn in wanted if turn not in done]:
        with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
            fleet = re.sub(r"count = (\d+)", lambda found: f"share = {int(found[1]) / 20}", FLEET.read_text())
            (Path(folder) / "many.toml").write_text(fleet)
            sets = [*WORKLOADS[workload], f"compute.side-by-side={way}", "workers=1", f"output-dir={folder}"]
            if WORKLOADS[workload][0] == MANY[0]:
                sets.append(f"fleet={folder}/many.toml")
            command = [sys.executable, "-m", "wildflower", "run", str(DEMO), "--set", "run-name=run"]
            usage = measure(
                [*command, *(word for each in sets for word in ("--set", each))],
                env=environment(Path(folder) / "cache"),
                cwd=Path(folder),
                log=Path(folder) / "log.txt",
                rounds_file=Path(folder) / "run" / "rounds.jsonl",
            )
        turn = {"workload": workload, "way": way, "repetition": repetition, **asdict(usage)}
        found.append(turn | {"load_average": os.getloadavg()[0]})
        RESULTS.write_text(json.dumps({"cpu": cpu_model(), "turns": found}, indent=1) + "\n")
        write(found)
        print(workload, way, repetition, f"{per_round(turn, CPU):.2f} CPU s per round", flush=True)


def write(found: list[dict[str, Any]]) -> None:
    """The table in README.md."""
    rows = []
    by_way: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for turn in found:
        by_way[turn["workload"], turn["way"]].append(turn)
    for (workload, way), mine in by_way.items():
        cpu, wall = ([per_round(turn, what) for turn in mine] for what in (CPU, WALL))
        of_off = [a / per_round(b, CPU) for a, b in zip(cpu, by_way[workload, "off"], strict=False)]
        seconds, rate = f"{statistics.median(cpu):.2f}", f"{60 / statistics.median(wall):.1f}"
        rows.append([workload, f"`{way}`", seconds, median_and_range(of_off), rate])
    loads = [turn["load_average"] for turn in found]
    how = f"One worker; load average of the machine's {os.cpu_count()} cores {min(loads):.0f} to {max(loads):.0f}."
    heads = ["", "`side-by-side`", "CPU s per round", "of `off`", "rounds per minute"]
    write_between(TABLE, "side by side", f"{markdown(heads, rows)}\n\n{how}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    turns(parser.parse_args().repetitions)
