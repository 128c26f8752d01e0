"""Predicted against measured peak memory of devices that are trained at once, each case in a fresh process.

    python -m benchmarks.memory.stacks

A stack takes two steps on random data with one thread. It is measured as in `benchmarks.memory.measure`, which says
how; before that the process has trained a stack of the family's two smallest sub-models. Writes stacks.json and the
table of README.md.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.memory.measure import HERE, resident_bytes
from benchmarks.tables import markdown, write_between
from wildflower.client_app.fitting import Fit
from wildflower.client_app.stack import fit_stacked
from wildflower.client_app.stack_price import stack_bytes
from wildflower.messages.orders import LocalTraining
from wildflower.models.allocator import return_freed_memory
from wildflower.models.architecture import Architecture
from wildflower.models.cost import cost
from wildflower.models.family import Family, make_family
from wildflower.strategies.shared_losses import PureLoss

RECORDED = HERE / "stacks.json"
STATIC = {"norm": "static"}
# Family, its width, devices, examples at once, optimizer.
CASES: list[tuple[dict[str, Any], float, int, int, str]] = [
    ({"name": "cnn3"}, 0.25, 8, 32, "sgd"),
    ({"name": "cnn3"}, 1.0, 8, 32, "sgd-momentum"),
    ({"name": "cnn3"} | STATIC, 0.5, 8, 32, "sgd"),
    ({"name": "lenet5"}, 1.0, 16, 64, "sgd"),
    ({"name": "lenet5"}, 1.0, 32, 32, "sgd"),
    ({"name": "pfl-cnn"}, 1.0, 8, 10, "sgd"),
    ({"name": "pfl-cnn"}, 1.0, 8, 32, "sgd"),
    ({"name": "mlp"}, 1.0, 16, 32, "sgd"),
    ({"name": "mlp"}, 1.0, 16, 32, "adam"),
    ({"name": "vgg"}, 0.5, 8, 16, "sgd-momentum"),
]


class RandomTask:
    """A task of classes whose examples the fits bring."""

    sums_examples = True

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        return F.cross_entropy(outputs, labels)

    def losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy of each example."""
        return F.cross_entropy(outputs, labels, reduction="none")

    def asks_the_same(self, other: RandomTask) -> bool:
        """Say that all stacks here have one loss."""
        return self is other


def predicted(family: Family, architecture: Architecture, devices: int, batch_size: int, optimizer: str) -> int:
    """Return the bytes of a stack."""
    each_bytes, beside_bytes = stack_bytes(family, architecture, batch_size, optimizer)
    return devices * each_bytes + beside_bytes


def train(family: Family, architecture: Architecture, devices: int, batch_size: int, optimizer: str) -> None:
    """Let a stack take two steps."""
    training = LocalTraining(
        batch_size=batch_size,
        steps=2,
        learning_rate=0.01,
        momentum=0.9 if optimizer == "sgd-momentum" else 0.0,
        optimizer="adam" if optimizer == "adam" else "sgd",
    )
    task: Any = RandomTask()
    fits = []
    for _ in range(devices):
        model = family.build(architecture)
        batch = torch.rand(batch_size, *family.input_shape), torch.randint(family.classes, (batch_size,))
        picks = [torch.arange(batch_size)] * 2
        fits.append(
            Fit(
                model,
                PureLoss(task, model),
                lambda picks=picks: iter(picks),
                lambda _, batch=batch: batch,
                batch_size,
                training,
                torch.device("cpu"),
            )
        )
    fit_stacked(fits, [torch.get_rng_state()] * devices)


def measured(case: int) -> int:
    """Return the bytes that a stack takes, in this process."""
    spec, width, devices, batch_size, optimizer = CASES[case]
    torch.set_num_threads(1)
    if not return_freed_memory():
        raise RuntimeError("this C library cannot be told to return freed memory")
    torch.manual_seed(0)
    family = make_family(spec)
    train(family, family.smallest(), 2, 2, optimizer)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before_bytes = resident_bytes("VmRSS")
    train(family, family.width(width), devices, batch_size, optimizer)
    return resident_bytes("VmHWM") - before_bytes


def main() -> None:
    """Measure all cases, and write the file and the table."""
    found = []
    for number, (spec, width, devices, batch_size, optimizer) in enumerate(CASES):
        command = [sys.executable, "-m", "benchmarks.memory.stacks", str(number)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        family = make_family(spec)
        architecture = family.width(width)
        alone = cost(family, architecture, batch_size=batch_size, optimizer=optimizer).peak_training_memory_bytes
        found.append(
            {
                "predicted_bytes": predicted(family, architecture, devices, batch_size, optimizer),
                "measured_bytes": int(done.stdout),
                "alone_bytes": alone,
            }
        )
        print(spec, width, devices, batch_size, optimizer, found[-1], flush=True)
    RECORDED.write_text(json.dumps({"torch": torch.__version__, "cases": found}, indent=1) + "\n")
    rows = []
    for (spec, width, devices, batch_size, optimizer), case in zip(CASES, found, strict=True):
        name = f"{spec['name']}, width {width:g}{', static norm' if 'norm' in spec else ''}"
        error = case["predicted_bytes"] / case["measured_bytes"] - 1
        megabytes = [f"{case[key] / 1e6:.1f}" for key in ("predicted_bytes", "measured_bytes")]
        of_alone = case["measured_bytes"] / devices / case["alone_bytes"]
        rows.append([name, str(devices), str(batch_size), optimizer, *megabytes, f"{error:+.1%}", f"{of_alone:.2f}"])
    heads = ["model", "devices", "batch", "optimizer", "predicted MB", "measured MB", "error", "of a device alone"]
    write_between(HERE / "README.md", "stacks", markdown(heads, rows))


if __name__ == "__main__":
    if sys.argv[1:]:
        print(measured(int(sys.argv[1])))
    else:
        main()
