"""Starts of messages on busy nodes: how often each message is started, and how long a round takes.

python -m benchmarks.trust.starts            # writes starts.json
python -m benchmarks.trust.starts --table    # the table alone

A SuperLink and two SuperNodes are processes of this machine, beside which `BUSY` processes do nothing but compute. A
start is a process that begins to work on a message; they are counted by looking ten times a second, so that one which
ends at once may not be seen.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.trust.small_runs import small_run
from tests.deployment import Deployment
from wildflower.launch.experiment_file import write_toml
from wildflower.server_app.run_folder import JournalError, read_rounds

RESULTS = Path(__file__).with_name("starts.json")
BUSY, DEVICES, ROUNDS = 25, 2, 2
LONGEST_SECONDS = 300.0
EXPERIMENT = small_run(DEVICES, ROUNDS) | {"task": "digits", "local-steps": 5, "seed": 1}


class Starts:
    """Counts the processes of messages below the nodes, and how many of them were there at once."""

    def __init__(self, nodes: list[psutil.Process]) -> None:
        self.seen: set[tuple[int, float]] = set()
        self.most = 0
        self._nodes, self._ends = nodes, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._ends.wait(0.1):
            for node in self._nodes:
                now = set()
                with suppress(psutil.Error):
                    for starter in node.children():
                        now |= {(child.pid, child.create_time()) for child in starter.children()}
                self.seen |= now
                self.most = max(self.most, len(now))

    def end(self) -> None:
        """Count no more."""
        self._ends.set()
        self._thread.join()


def measure(folder: Path) -> dict[str, Any]:
    """One run beside busy processes."""
    folder.mkdir()
    deployment = Deployment(folder / "flower", {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5"})
    busy = []
    try:
        deployment.start_superlink()
        nodes = [psutil.Process(deployment.start_node(device, DEVICES).pid) for device in range(DEVICES)]
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY)]
        starts = Starts(nodes)
        experiment = folder / "experiment.toml"
        experiment.write_text(write_toml(EXPERIMENT | {"output-dir": str(folder), "run-name": "one"}))
        run = deployment.run(str(experiment))
        began = time.monotonic()
        with suppress(subprocess.TimeoutExpired):
            run.communicate(timeout=LONGEST_SECONDS)
        run.kill()
        starts.end()
        logs = "".join((folder / "flower" / f"node-{device}.log").read_text() for device in range(DEVICES))
        seconds: list[float] = []
        with suppress(JournalError, FileNotFoundError):
            seconds = [record.wall_seconds for record in read_rounds(folder / "one")]
        return {
            "messages": logs.count("Received successfully"),
            "starts": len(starts.seen),
            "at once": starts.most,
            "401": logs.count("401 Unauthorized"),
            "round seconds": [round(s, 1) for s in seconds],
            "seconds": round(time.monotonic() - began, 1),
        }
    finally:
        for process in busy:
            process.kill()
            process.wait()
        deployment.close()


def table(found: dict[str, Any]) -> str:
    """Return what was measured as a table of Markdown."""
    return (
        "| messages | starts that were seen | at once on a node | answers 401 | seconds of the rounds |\n"
        "|---|---|---|---|---|\n"
        f"| {found['messages']} | {found['starts']} | {found['at once']} | {found['401']} | "
        f"{', '.join(map(str, found['round seconds']))} |"
    )


def main() -> None:
    """Measure, unless only the table is asked for, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true")
    if not parser.parse_args().table:
        with tempfile.TemporaryDirectory() as folder:
            RESULTS.write_text(json.dumps(measure(Path(folder) / "run"), indent=1) + "\n")
    print(table(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
