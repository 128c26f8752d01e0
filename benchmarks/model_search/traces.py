"""Mahimahi's packet-delivery traces as the link traces that fleets read.

    python -m benchmarks.model_search.traces MAHIMAHI_FOLDER ../shared/traces/lte

Mahimahi ships the traces of Winstein, Sivaraman and Balakrishnan (NSDI 2013) under GPL-3.0, in its folder `traces`, as
files like `ATT-LTE-driving.down`: a line per packet of 1,500 bytes that the link could carry, with its time in
milliseconds. Out comes `ATT-LTE-driving-down.csv` with what it could carry in every second.
"""

import csv
import sys
from collections import Counter
from pathlib import Path

PACKET_BITS = 1500 * 8


def mbit_per_s(lines: list[str]) -> list[float]:
    """What a link could carry in every second, up to the last whole one; ValueError where a line is no time."""
    times = [int(line) for line in lines if line.strip()]
    if not times or min(times) < 0:
        raise ValueError("a packet-delivery trace has one time in milliseconds per line, 0 or later")
    packets = Counter(time // 1000 for time in times)
    return [packets[second] * PACKET_BITS / 1e6 for second in range(max(1, max(times) // 1000))]


def main() -> None:
    """Convert every trace of a folder."""
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, target = map(Path, sys.argv[1:])
    found = sorted(file for file in source.iterdir() if file.suffix in (".down", ".up"))
    if not found:
        sys.exit(f"{source}: no file ends in .down or .up")
    target.mkdir(parents=True, exist_ok=True)
    for file in found:
        rates = mbit_per_s(file.read_text().splitlines())
        with (target / f"{file.stem}-{file.suffix[1:]}.csv").open("w", newline="") as out:
            rows = csv.writer(out)
            rows.writerow(("seconds", "mbit_per_s"))
            rows.writerows((second, f"{rate:.3f}") for second, rate in enumerate(rates))
        print(f"{file.name}: {len(rates)} seconds")


if __name__ == "__main__":
    main()
