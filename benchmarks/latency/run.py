"""Seconds per round of two SuperNodes on this machine (README.md says what is measured and what came out).

python -m benchmarks.latency.run --name NAME [--app FOLDER] [--superexec-poll SECONDS]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from statistics import median

from tests.deployment import Deployment
from wildflower.server_app.run_folder import read_devices, read_rounds

HERE = Path(__file__).parent


def measure(app: Path | None, superexec_poll: float) -> dict[str, object]:
    """Run the experiment once; seconds of every round, and of the work inside it."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="wf-latency-") as name:
        folder = Path(name)
        deployment = Deployment(folder / "flower", {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": str(superexec_poll)})
        try:
            deployment.start_superlink()
            for device in range(2):
                deployment.start_node(device, of=2)
            arguments = [str(HERE / "latency.toml"), "--set", f"output-dir={folder}", "--set", "run-name=latency"]
            run = deployment.run(*arguments, *(["--app", str(app)] if app else []))
            said, _ = run.communicate()
            assert run.returncode == 0, said
        finally:
            deployment.close()
        rounds = read_rounds(folder / "latency")
        work = [device.seconds for device in read_devices(folder / "latency") if device.outcome == "trained"]
        assert len(work) == 2 * len(rounds), "a device did not train"
    seconds = [round(record.wall_seconds, 2) for record in rounds]
    return {
        "seconds_per_round": seconds,
        "median_after_the_first": median(seconds[1:]),
        "seconds_of_work_median": round(median(s for s in work if s is not None), 3),
        "superexec_poll_seconds": superexec_poll,
        "load_average_before_and_after": [round(load, 1), round(os.getloadavg()[0], 1)],
        "cpus": os.cpu_count(),
    }


def main() -> None:
    """Measure, and write the result under its name into results.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--app", type=Path)
    parser.add_argument("--superexec-poll", type=float, default=0.05)
    given = parser.parse_args()
    path = HERE / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    results[given.name] = measure(given.app, given.superexec_poll)
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results[given.name], indent=1))


if __name__ == "__main__":
    main()
