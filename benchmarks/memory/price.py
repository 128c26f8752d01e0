"""How long it takes to price 1,000 random ResNet-152 architectures: first from nothing, then from the cache.

    python -m benchmarks.memory.price

Writes price.json beside this file.
"""

import json
import os
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.machine import cpu_model
from wildflower.models.cost import cost
from wildflower.models.family import make_family

COUNT = 1000


def main() -> None:
    family = make_family({"name": "resnet152"})
    rng = np.random.default_rng(0)
    architectures = [family.sample(rng) for _ in range(COUNT)]
    seconds, cpu_seconds = [], []
    for _ in range(2):
        started, cpu_started = time.perf_counter(), time.process_time()
        for arch in architectures:
            cost(family, arch, batch_size=32, optimizer="sgd")
        seconds.append(round(time.perf_counter() - started, 4))
        cpu_seconds.append(round(time.process_time() - cpu_started, 4))
    report = {
        "command": "python -m benchmarks.memory.price",
        "torch": torch.__version__,
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count()},
        "architectures": len(set(architectures)),
        "first_seconds": seconds[0],
        "first_cpu_seconds": cpu_seconds[0],
        "cached_seconds": seconds[1],
    }
    Path(__file__).with_name("price.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"{COUNT} architectures: {seconds[0]} s ({cpu_seconds[0]} s CPU), from the cache {seconds[1]} s")


if __name__ == "__main__":
    main()
