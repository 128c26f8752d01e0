"""Start-up times and memory of a deployment in containers, and the peak of a node that trains models of 1 to 40 MB.

    python -m benchmarks.deployment.measure OUT.json

With WILDFLOWER_IMAGES the images of that prefix are measured, else they are built, as for the container tests.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from threading import Event, Thread
from typing import Any

from tests.compose.engine import NODES, Deployment, build_images, engine, run, wait_for

# ResNet-18 from that many channels: 1.1, 11 and 45 MB of weights.
CHANNELS = (10, 32, 64)
SERVICES = ("superlink", "gate", "bandwidth", *NODES)
# Memory that processes hold, without pages of files, which the kernel takes back when it likes.
HELD = ("total_rss", "anon")
GROUPS = ("sys/fs/cgroup/memory/docker/{id}/memory.stat", "sys/fs/cgroup/docker/{id}/memory.stat")


def held_bytes(container: str) -> int:
    """What the processes of a container hold now."""
    for group in GROUPS:
        file = Path("/") / group.format(id=container)
        if file.exists():
            values = dict(line.split() for line in file.read_text().splitlines())
            return next(int(values[key]) for key in HELD if key in values)
    raise FileNotFoundError(f"there is no control group of container {container}")


class Peak(Thread):
    """The most that a container's processes hold, looked at twenty times a second."""

    def __init__(self, container: str) -> None:
        super().__init__(daemon=True)
        self.container, self.max_bytes, self._over = container, 0, Event()

    def run(self) -> None:
        """Look until `stop`."""
        while not self._over.wait(0.05):
            self.max_bytes = max(self.max_bytes, held_bytes(self.container))

    def stop(self) -> int:
        """The peak."""
        self._over.set()
        self.join()
        return self.max_bytes


def train(deployment: Deployment, channels: int) -> dict[str, Any]:
    """Two rounds of one model on the largest node, the only one that runs."""
    name = f"channels-{channels}"
    settings = [f"family-arguments=first_channels = {channels}", "widths=1", "strategy=fedavg", "fedavg.use=all-small"]
    settings += [
        "rounds=2",
        "devices-per-round=1",
        "evaluate-every=2",
        "budget.memory-fraction=1.0",
        "budget.transfer-seconds=0",
    ]
    peak = Peak(deployment.container("node-3"))
    peak.start()
    deployment.finish(deployment.start_run(name, *settings), name, 400)
    max_bytes = peak.stop()
    device = deployment.journal(name, "devices")[-1]
    rounds = deployment.journal(name)
    assert device["outcome"] == "trained", device
    return {
        "payload_bytes": device["download_bytes"],
        "predicted_training_bytes": device["predicted_memory_bytes"],
        "measured_training_bytes": device["measured_memory_bytes"],
        "node_peak_bytes": max_bytes,
        "node_after_bytes": held_bytes(deployment.container("node-3")),
        "training_seconds": device["seconds"],
        "round_seconds": [record["wall_seconds"] for record in rounds],
    }


def measure(folder: Path) -> dict[str, Any]:
    """All figures of one deployment."""
    found: dict[str, Any] = {}
    with engine(folder):
        deployment = Deployment(folder, build_images(folder))
        try:
            started = time.monotonic()
            deployment.up()
            found["seconds_until_nodes_are_healthy"] = time.monotonic() - started
            found["idle_bytes"] = {service: held_bytes(deployment.container(service)) for service in SERVICES}
            process = deployment.start_run("first", "rounds=1")
            wait_for("the first round's folder", lambda: deployment.read("first/config.json"), 200)
            found["seconds_until_the_run_began"] = time.monotonic() - started
            deployment.finish(process, "first", 600)
            (record,) = deployment.journal("first")
            found["seconds_until_round_1_ended"] = time.monotonic() - started
            found["round_1_seconds"] = record["wall_seconds"]
            found["bytes_between_messages"] = {
                service: held_bytes(deployment.container(service)) for service in SERVICES
            }
            run("docker", "stop", *(deployment.container(node) for node in NODES[:3]))
            found["models"] = [train(deployment, channels) for channels in CHANNELS]
        finally:
            try:
                deployment.keep_logs_and_runs()
            finally:
                deployment.down()
        found["load"] = os.getloadavg()
    return found


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    figures = measure(Path(tempfile.mkdtemp(prefix="wildflower-measure-")))
    Path(sys.argv[1]).write_text(json.dumps(figures, indent=2) + "\n")
