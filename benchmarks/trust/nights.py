"""Two nights of a small fleet of real nodes: what became of its rounds, its messages and its models.

python -m benchmarks.trust.nights            # runs tests/compose/nights.py, 40 minutes; writes nights.json
python -m benchmarks.trust.nights --table    # the table alone
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("nights.json")


class Collected:
    """Writes down what the test has found, if it passed."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """See pytest."""
        if report.when == "call" and report.passed:
            RESULTS.write_text(json.dumps(dict(report.user_properties)["nights"], indent=1) + "\n")


def main() -> int:
    """Run the test and print the table; pytest's exit code."""
    code = 0
    if sys.argv[1:] != ["--table"]:
        words = ["-q", "-p", "no:cacheprovider", str(ROOT / "tests/compose/nights.py")]
        code = int(pytest.main(words, plugins=[Collected()]))
    print("| | |\n|---|---|")
    for what, value in json.loads(RESULTS.read_text()).items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        print(f"| {what} | {text} |")
    return code


if __name__ == "__main__":
    sys.exit(main())
