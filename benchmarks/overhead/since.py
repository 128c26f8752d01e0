"""CPU seconds of the demo's rounds and of a sweep, of an earlier commit and of this one, in turns.

    git worktree add /tmp/before e175f396
    python -m benchmarks.overhead.since --before /tmp/before --repetitions 4

Every turn is a whole command. A round's cost is the slope, as in `benchmarks.overhead.run`; a sweep's is all that it
takes. Finished turns are kept in since.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.machine import cpu_model
from benchmarks.overhead import versions
from benchmarks.overhead.measure import measure
from benchmarks.overhead.run import CPU, HERE, environment, per_round
from benchmarks.tables import markdown, median_and_range, write_between

RESULTS, TABLE = HERE / "since.json", HERE / "README.md"
NOW, ROUNDS, SWEEP = HERE.parents[1], "a round of the demo", "a sweep of 12 runs"
# What is run, as of which commit, and `compute.side-by-side`; the first of each is what the others are a share of.
WAYS = [(what, commit, way) for what in (ROUNDS, SWEEP) for commit in ("before", "now") for way in ("off", "32")]
COMMANDS = {
    ROUNDS: ["run", "{demo}", "--set=rounds=31", "--set=workers=1", "--set=run-name=run", "--set=output-dir={folder}"],
    SWEEP: [
        *("sweep", "{demo}", "--seeds=1-3", "--grid=strategy=heterofl,fedrolex,fjord,wildflower", "--grid=rounds=10"),
        *("--jobs=1", "--folder={folder}/sweep"),
    ],
}


def turns(before: Path, repetitions: int) -> None:
    """Run what is not in since.json yet."""
    found: list[dict[str, Any]] = json.loads(RESULTS.read_text())["turns"] if RESULTS.exists() else []
    done = {(turn["what"], turn["commit"], turn["way"], turn["repetition"]) for turn in found}
    wanted = [(*way, repetition) for repetition in range(repetitions) for way in WAYS]
    for what, commit, way, repetition in [turn for turn in wanted if turn not in done]:
        root = before if commit == "before" else NOW
        with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
            demo = root / "benchmarks" / "demo" / "digits.toml"
            words = [word.format(demo=demo, folder=folder) for word in COMMANDS[what]]
            usage = measure(
                [sys.executable, "-m", "wildflower", *words, f"--set=compute.side-by-side={way}"],
                env=environment(Path(folder) / "cache") | {"PYTHONPATH": str(root)},
                cwd=Path(folder),
                log=Path(folder) / "log.txt",
                rounds_file=Path(folder) / "run" / "rounds.jsonl",
            )
        seconds = per_round(asdict(usage), CPU) if what == ROUNDS else usage.cpu_seconds
        turn = {"what": what, "commit": commit, "way": way, "repetition": repetition, "cpu_seconds": round(seconds, 4)}
        found.append(turn | {"load_average": round(os.getloadavg()[0], 1)})
        content = {"cpu": cpu_model(), "before": versions.commit(before), "turns": found}
        RESULTS.write_text(json.dumps(content, indent=1) + "\n")
        print(turn, flush=True)
    write(found)


def write(found: list[dict[str, Any]]) -> None:
    """The table in README.md."""
    rows = []
    for what, commit, way in WAYS:
        mine = [
            turn["cpu_seconds"] for turn in found if (turn["what"], turn["commit"], turn["way"]) == (what, commit, way)
        ]
        first = [t["cpu_seconds"] for t in found if (t["what"], t["commit"], t["way"]) == (what, "before", "off")]
        shares = [a / b for a, b in zip(mine, first, strict=True)]
        seconds = f"{min(mine):.3f}" if what == ROUNDS else f"{min(mine):.1f}"
        rows.append([what, commit, f"`{way}`", seconds, f"{min(mine) / min(first):.2f}", median_and_range(shares)])
    heads = [
        "",
        "commit",
        "`side-by-side`",
        "CPU s, least",
        "of the first, least",
        "of the first, median of turns (all)",
    ]
    loads = [turn["load_average"] for turn in found]
    about = f"{len(found) // len(WAYS)} turns; load average {min(loads):.0f} to {max(loads):.0f}."
    write_between(TABLE, "since", f"{markdown(heads, rows)}\n\n{about}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the earlier commit")
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    turns(arguments.before.resolve(), arguments.repetitions)
