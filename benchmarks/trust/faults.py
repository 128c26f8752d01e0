"""What is seen of every fault, finished rounds that are lost, and seconds until the run goes on; writes faults.json.

python -m benchmarks.trust.faults [words of pytest's -k]  # runs TESTS; needs root, to fill disks, and docker
python -m benchmarks.trust.faults --table                 # the table alone
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("faults.json")
TESTS = (
    *(ROOT / "tests/compose" / name for name in ("simulations.py", "recovery.py")),
    ROOT / "tests/compose/faults.py::test_a_killed_gate_is_started_again",
)


class Collected:
    """Writes down what tests note, one row after the other, so that a later run may replace single rows."""

    def __init__(self) -> None:
        self.rows: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the rows of a test that has passed."""
        if report.when != "call" or not report.passed:
            return
        for name, row in report.user_properties:
            if name == "fault":
                assert isinstance(row, dict)
                load, _, _ = os.getloadavg()
                self.rows[row["fault"]] = row | {"load": round(load, 1)}
                RESULTS.write_text(json.dumps(self.rows, indent=1, ensure_ascii=False) + "\n")


def table(rows: dict[str, Any]) -> str:
    """The rows in Markdown, by kind."""
    lines = [
        "| fault | what is seen | finished rounds lost | done again | seconds until the next round was finished |",
        "|---|---|---|---|---|",
    ]
    for row in sorted(rows.values(), key=lambda row: row["fault"]):
        cells = (row["fault"], row["seen"], row["rounds_lost"], row["rounds_again"], f"{row['seconds']:.0f}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> int:
    """Run the tests and print the table; pytest's exit code."""
    collected, code = Collected(), 0
    if sys.argv[1:] != ["--table"]:
        words = ["-k", sys.argv[1]] if sys.argv[1:] else []
        code = int(pytest.main(["-q", "-p", "no:cacheprovider", *map(str, TESTS), *words], plugins=[collected]))
    print(table(collected.rows))
    return code


if __name__ == "__main__":
    sys.exit(main())
