"""How many hostile inputs were tried, accepted and crashed, and the slowest; writes fuzz.json.

python -m benchmarks.trust.fuzz
"""

from __future__ import annotations

import json
import tempfile
import tracemalloc
from pathlib import Path

from tests.fuzz.harness import fuzz
from tests.fuzz.targets import all_targets

RESULTS = Path(__file__).with_name("fuzz.json")
MEASURED = 50  # inputs whose memory is measured, which makes everything slower


def main() -> None:
    """Read all inputs of the test suite, and of some of them measure the memory; a crash ends this with the input."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for target in all_targets(Path(folder)):
            tally = fuzz(target, target.count)
            tracemalloc.start()
            fuzz(target, MEASURED)
            _, peak_bytes = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            found[target.name] = {
                "tried": tally.tried,
                "accepted": tally.accepted,
                "crashed": 0,
                "slowest_seconds": tally.slowest_seconds,
                "peak_bytes_with_the_input": peak_bytes,
            }
            print(target.name, found[target.name], flush=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
