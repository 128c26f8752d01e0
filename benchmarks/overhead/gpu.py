"""Workers that share one GPU, beside as many on the processors: seconds of a round, and memory on the GPU.

    python -m benchmarks.overhead.gpu [--workers 1 2 4 8]

`wildflower run` of two tasks of FedAvg, whose rounds are short: pfl-research's CNN of experiment.toml with 50 devices
per round, each of five steps of ten images of 32x32, and ResNet-18 with 10 devices of as many. A round's seconds are
those of the middle rounds in the median. Memory is the most that nvidia-smi shows above what it shows before the run.

Writes gpu.json beside this file, and the table in README.md. What gpu.json has of the same machine is not run again.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import cpu_model
from benchmarks.random_images import write_copy
from benchmarks.runs import rounds_of
from benchmarks.tables import markdown, write_between

HERE = Path(__file__).resolve().parent
RESULTS, TABLE = HERE / "gpu.json", HERE / "README.md"
IMAGES = 10_000  # 50 for each of 200 devices
RESNET = ("family=resnet18", "devices-per-round=10")
TASKS: dict[str, tuple[tuple[str, ...], int]] = {"pfl-cnn": ((), 8), "ResNet-18": (RESNET, 5)}


def used_bytes() -> int:
    """Memory of the first GPU that is taken, by whatever process."""
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout) * 2**20


def run(settings: tuple[str, ...], *, rounds: int, workers: int, gpu: bool, data: Path, folder: Path) -> dict[str, Any]:
    """One run of `wildflower run`: its rounds, and the most memory that it took on the GPU."""
    given = (f"data-dir={data}", f"rounds={rounds}", f"workers={workers}", f"output-dir={folder}", "run-name=run")
    command = [sys.executable, "-m", "wildflower", "run", str(HERE / "experiment.toml")]
    command += [part for setting in (*settings, *given) for part in ("--set", setting)]
    before, most, over = used_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.2):
            most = max(most, used_bytes())

    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "0" if gpu else ""}
    with ThreadPoolExecutor() as pool:
        watching = pool.submit(watch)
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
        finally:
            over.set()
        watching.result()
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    took = [r["wall_seconds"] for r in rounds_of(folder / "run")]
    return {
        "first_round_seconds": took[0],
        "round_seconds": statistics.median(took[1:-1]),
        "gpu_bytes": max(0, most - before),
    }


def this_machine() -> dict[str, Any]:
    """What figures are of."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }


def recorded(machine: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs in gpu.json where they are of this machine; else none, since figures of two say nothing together."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return known["runs"] if known.get("machine") == machine else []


def write(machine: dict[str, Any], found: list[dict[str, Any]]) -> None:
    """gpu.json, and the table in README.md between its two marks."""
    RESULTS.write_text(json.dumps({"machine": machine, "runs": found}, indent=1) + "\n")
    heads = ["task", "workers", "a round on the GPU, s", "on processors, s", "first round on the GPU, s"]
    rows = []
    for one in sorted((r for r in found if r["gpu"]), key=_which):
        other = next((r for r in found if not r["gpu"] and _which(r) == _which(one)), None)
        rows.append(
            [
                *(one["task"], str(one["workers"]), f"{one['round_seconds']:.2f}"),
                f"{other['round_seconds']:.2f}" if other else "",
                *(f"{one['first_round_seconds']:.1f}", f"{one['gpu_bytes'] / 1e6:.0f}"),
            ]
        )
    told = f"{machine['gpu']}, and {machine['cores']} cores of {machine['cpu']}; torch {machine['torch']}."
    write_between(TABLE, "gpu", "\n".join([markdown([*heads, "memory on the GPU, MB"], rows), "", told]))


def _which(run: dict[str, Any]) -> tuple[str, int]:
    return run["task"].lower(), run["workers"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    arguments = parser.parse_args()
    here = this_machine()
    runs = recorded(here)
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        data = Path(folder) / "data"
        write_copy(data, train=IMAGES, test=100)
        for task, (settings, rounds) in TASKS.items():
            for workers in arguments.workers:
                for gpu in (True, False):
                    which = {"task": task, "workers": workers, "gpu": gpu}
                    if any(which.items() <= done.items() for done in runs):
                        continue
                    into = Path(folder) / f"{task}-{workers}-{gpu}"
                    took = run(settings, rounds=rounds, workers=workers, gpu=gpu, data=data, folder=into)
                    runs.append(which | took)
                    print(json.dumps(runs[-1]), flush=True)
                    write(here, runs)
