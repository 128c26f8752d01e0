"""RaFL with 3,000 devices of which a tenth is replaced after every round: whether the server's memory stays flat.

python -m benchmarks.rafl.sporadic     # writes sporadic.json
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.runs import devices_of, rounds_of

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Do the run, and write what the server held after each round."""
    with tempfile.TemporaryDirectory(prefix="sporadic-") as folder:
        settings = [f"output-dir={folder}", "run-name=run"]
        command = [sys.executable, "-m", "wildflower", "run", str(HERE / "sporadic.toml")]
        command += [part for setting in settings for part in ("--set", setting)]
        subprocess.run(command, cwd=HERE.parents[1], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
        rounds, devices = rounds_of(Path(folder) / "run"), devices_of(Path(folder) / "run")
    peaks = [record["server_peak_rss_bytes"] for record in rounds]
    found = {
        "rounds": len(rounds),
        "devices_replied": sum(record["devices_replied"] for record in rounds),
        "devices_sampled": sum(record["devices_sampled"] for record in rounds),
        "largest_device_number": max(device["device"] for device in devices),
        "server_peak_rss_bytes_by_round": peaks,
        "last_over_fifth": peaks[-1] / peaks[4],
        "bytes_by_round": [record["bytes_down"] + record["bytes_up"] for record in rounds],
    }
    (HERE / "sporadic.json").write_text(json.dumps(found, indent=1) + "\n")
    print({key: value for key, value in found.items() if not isinstance(value, list)})


if __name__ == "__main__":
    main()
