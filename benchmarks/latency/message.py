"""CPU seconds and seconds per train message: in a process of its own that loads all it needs, and through the worker.

python -m benchmarks.latency.message
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import psutil

from tests.client_app.work_orders import batch, payload, work_order

HERE = Path(__file__).parent
MESSAGES = 5
# What flwr-clientapp imports before it loads an app.
FLOWER = "import sys; import flwr.supernode.runtime.run_clientapp; "
READ = "text, config, array = sys.argv[1], __import__('json').loads(sys.argv[2]), open(sys.argv[3], 'rb').read(); "
ALONE = FLOWER + READ + "from wildflower.client_app import work; work.do('train', text, [array], config)"
MESSENGER = (
    FLOWER
    + READ
    + "import wildflower.client_app.app; wildflower.client_app.app.worker.ask('train', text, [array], config)"
)


def timed(code: str, *arguments: str) -> tuple[float, float]:
    """Run a Python process; its CPU seconds (with those of children it has waited for), and seconds."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-c", code, *arguments], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu, time.perf_counter() - started


def children_cpu(process: psutil.Process) -> float:
    """CPU seconds of the children that a process has waited for."""
    times = process.cpu_times()
    return float(times.children_user + times.children_system)


def main() -> None:
    """Measure both ways and write the figures into messages.json."""
    os.environ["OMP_NUM_THREADS"] = "1"
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="wf-message-") as folder:
        (Path(folder) / "payload").write_bytes(payload())
        text = batch(work_order(1), shared_process=False).model_dump_json()
        arguments = (text, json.dumps({"partition-id": 1, "state-dir": folder}), str(Path(folder) / "payload"))
        timed(ALONE, *arguments)  # the data go into the cache folder
        alone = [timed(ALONE, *arguments) for _ in range(MESSAGES)]
        first = timed(MESSENGER, *arguments)  # starts the worker, which belongs to this process
        worker = _worker()
        in_worker, messenger = [], []
        for _ in range(MESSAGES):
            before = children_cpu(worker)
            messenger.append(timed(MESSENGER, *arguments))
            psutil.wait_procs(worker.children(), timeout=30)
            in_worker.append(children_cpu(worker) - before)
        worker.kill()
    result = {
        "own_process": {"cpu_seconds": median(c for c, _ in alone), "seconds": median(s for _, s in alone)},
        "worker": {
            "cpu_seconds_of_the_messenger": median(c for c, _ in messenger),
            "cpu_seconds_of_the_child": median(in_worker),
            "seconds": median(s for _, s in messenger),
            "seconds_of_the_first_message": first[1],
        },
        "load_average_before_and_after": [load, os.getloadavg()[0]],
        "cpus": os.cpu_count(),
    }
    (HERE / "messages.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def _worker() -> psutil.Process:
    """The worker that belongs to this process."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "wildflower.client_app.worker" in words and words[-1] == str(os.getpid()):
            return process
    raise RuntimeError("no worker was started")


if __name__ == "__main__":
    main()
