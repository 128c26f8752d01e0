"""What mutual learning costs a device beside training its personal model alone: peak memory and seconds per step.

    python -m benchmarks.rafl.burden

Each case is measured in a fresh process, as in benchmarks/memory, and written to burden.json. `--families NAME ...`
measures those alone and keeps the other rows.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.memory.measure import resident_bytes
from wildflower.messages.orders import LocalTraining
from wildflower.models.allocator import return_freed_memory
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.cost import ACCUMULATED, cost
from wildflower.models.family import make_family
from wildflower.models.space import Space
from wildflower.strategies.rafl import RaFLParams, learn_mutually

RESULTS = Path(__file__).with_name("burden.json")
STEPS = 2
# (family, personal model, knowledge network, batch size, micro-batch size or 0); networks are named by their width, or
# as the largest and the smallest model that RaFL gives by default.
Named = float | str
CASES: list[tuple[dict[str, Any], Named, Named, int, int]] = [
    ({"name": "resnet18", "input_shape": [1, 28, 28]}, 1.0, 0.25, 32, 0),
    ({"name": "resnet18", "input_shape": [3, 32, 32]}, 0.5, 0.25, 32, 0),
    ({"name": "cnn10", "input_shape": [1, 28, 28]}, 1.0, 0.25, 128, 0),
    ({"name": "vgg", "input_shape": [3, 32, 32]}, 1.0, 0.5, 32, 0),
    # As in the runs of MobileNetV3.
    (
        {
            "name": "mobilenet-v3",
            "input_shape": [1, 28, 28],
            "kernel_sizes": [3],
            "depths": [2],
            "expand_ratios": [3, 4],
            "halvings": 5,
        },
        "largest",
        "smallest",
        32,
        0,
    ),
    ({"name": "resnet18", "input_shape": [1, 28, 28]}, 1.0, 0.25, 32, 8),
    ({"name": "resnet18", "input_shape": [3, 32, 32]}, 0.5, 0.25, 32, 8),
    ({"name": "cnn10", "input_shape": [1, 28, 28]}, 1.0, 0.25, 128, 8),
    ({"name": "vgg", "input_shape": [3, 32, 32]}, 1.0, 0.5, 32, 8),
]


class StepsContext:
    """Random batches, and SGD with momentum."""

    def __init__(self, family: Family, batch_size: int, micro_batch_size: int, steps: int) -> None:
        self.family, self._size, self._steps = family, batch_size, steps
        self._parts = batch_size // micro_batch_size if micro_batch_size else 1
        self.training = LocalTraining(steps=steps, learning_rate=0.01)
        self.task = SimpleNamespace(loss=F.cross_entropy)

    def steps(self, *models: torch.nn.Module) -> Any:
        """A batch for each step."""
        for _ in range(self._steps):
            yield (self._part(self._size // self._parts) for _ in range(self._parts))

    def _part(self, examples: int) -> tuple[Tensor, Tensor, float]:
        inputs = torch.rand(examples, *self.family.input_shape)
        return inputs, torch.randint(self.family.classes, (examples,)), examples / self._size

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """As the runs have it."""
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)


def named(family: Family, name: Named) -> Architecture:
    """The architecture of a width, or the largest or the smallest of RaFL's space of shares."""
    if isinstance(name, str):
        space = Space.of(family, sorted(RaFLParams().shares))
        return space.largest() if name == "largest" else space.smallest()
    return family.width(name)


def train(
    family: Family, architectures: list[Architecture], batch_size: int, micro_batch_size: int, steps: int
) -> float:
    """Train one network by itself or two mutually; seconds per step."""
    models = [family.build(architecture) for architecture in architectures]
    context: Any = StepsContext(family, batch_size, micro_batch_size, steps)
    started = time.perf_counter()
    if len(models) == 2:
        learn_mutually(context, *models)
    else:
        [model] = models
        optimizer = context.optimizer(model.train())
        for batch in context.steps(model):
            optimizer.zero_grad(set_to_none=True)
            for inputs, labels, weight in batch:
                (weight * F.cross_entropy(model(inputs), labels)).backward()
            optimizer.step()
    return (time.perf_counter() - started) / steps


def measure(spec: dict[str, Any], networks: list[Named], batch_size: int, micro_batch_size: int) -> dict[str, float]:
    """Peak bytes above what the process held before, and seconds per step, in this process."""
    torch.set_num_threads(1)
    return_freed_memory()
    torch.manual_seed(0)
    family = make_family(spec)
    train(family, [family.smallest(), family.smallest()], 2, 0, 2)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes("VmRSS")
    seconds = train(family, [named(family, network) for network in networks], batch_size, micro_batch_size, STEPS)
    return {"bytes": resident_bytes("VmHWM") - before, "seconds": seconds}


def main() -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", help="one case, as JSON, in this process (used internally)")
    families = list(dict.fromkeys(case[0]["name"] for case in CASES))
    parser.add_argument("--families", nargs="+", choices=families, help="measure these alone, and keep the other rows")
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(*json.loads(arguments.case))))
        return
    asked = [case for case in CASES if case[0]["name"] in (arguments.families or families)]
    kept = json.loads(RESULTS.read_text()) if arguments.families else []
    rows = [row for row in kept if row["family"] not in arguments.families]
    for spec, personal, knowledge, batch_size, part in asked:
        found = {}
        for networks in ([personal], [personal, knowledge]):
            case = json.dumps([spec, networks, batch_size, part])
            command = [sys.executable, "-m", "benchmarks.rafl.burden", "--case", case]
            found[len(networks)] = json.loads(
                subprocess.run(command, capture_output=True, check=True, text=True).stdout
            )
        family = make_family(spec)
        optimizer = "sgd-momentum" + (ACCUMULATED if part else "")
        prices = [
            cost(family, named(family, network), batch_size=part or batch_size, optimizer=optimizer)
            for network in (personal, knowledge)
        ]
        predicted = sum(price.peak_training_memory_bytes for price in prices)
        rows.append(
            {
                "family": family.name,
                "input_shape": list(family.input_shape),
                "networks": [personal, knowledge],
                "batch_size": batch_size,
                "micro_batch_size": part,
                "alone": found[1],
                "mutual": found[2],
                "predicted_bytes": predicted,
                "relative_error": predicted / found[2]["bytes"] - 1,
                "predicted_flops_ratio": sum(p.training_flops for p in prices) / prices[0].training_flops,
            }
        )
        print(
            f"{family.name} {personal} + {knowledge}, batches of {batch_size} in parts of {part or batch_size}: "
            f"alone {found[1]['bytes'] / 1e6:.0f} MB "
            f"{found[1]['seconds']:.3f} s, mutual {found[2]['bytes'] / 1e6:.0f} MB {found[2]['seconds']:.3f} s; "
            f"predicted {predicted / 1e6:.0f} MB ({rows[-1]['relative_error']:+.1%}), "
            f"{rows[-1]['predicted_flops_ratio']:.2f} times the FLOPs"
        )
    # Rows of a family stay in their order, and those with micro-batches come last, as in CASES.
    rows.sort(key=lambda row: (row["micro_batch_size"] > 0, families.index(row["family"])))
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
