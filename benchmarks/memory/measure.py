"""Predicted against measured peak training memory, each case in a fresh process.

    python -m benchmarks.memory.measure

A case is trained for two steps on random data with one thread. Measured is the growth of the resident set's high-water
mark (VmHWM, reset through /proc/self/clear_refs) over the resident set just before the model is built. Before that, the
process has imported PyTorch and trained the family's smallest sub-model for two steps on two examples: libraries, the
autograd engine and the first compiled kernels belong to the runtime, not to an architecture.

The process returns freed tensors to the system, as a device with a budget should (`wildflower.models.allocator`). With
`--default-allocator` it leaves the C library alone: that shows what fragmentation costs.

Writes results.json and results.md beside this file (with that option, results-default-allocator.*). With `--only` and
names of families, only those are measured; the recorded cases of the others are kept, and the results say so.
"""

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.machine import cpu_model
from wildflower.models.allocator import return_freed_memory
from wildflower.models.architecture import Architecture
from wildflower.models.block_family import BlockFamily
from wildflower.models.cost import ACCUMULATED, cost
from wildflower.models.family import Family, make_family
from wildflower.plugins.reference import is_reference

CPU = torch.device("cpu")
STEPS = 2  # the optimizer's state is there in the second one
HERE = Path(__file__).parent
COMMAND = "python -m benchmarks.memory.measure"

LEVELS = [{"blocks": 1}, {"blocks": 2}, {"blocks": 4}]

# (family, optimizer, two batch sizes): tens of megabytes and more, so that the model and not the runtime is measured.
PLAN: list[tuple[dict[str, Any], str, tuple[int, int]]] = [
    ({"name": "lenet5"}, "sgd", (512, 2048)),
    ({"name": "cnn3"}, "adamw", (128, 512)),
    ({"name": "pfl-cnn"}, "sgd", (64, 128)),
    ({"name": "vgg"}, "adam", (64, 128)),
    ({"name": "resnet18", "norm": "static", "scaler": True}, "sgd-momentum", (16, 32)),
    ({"name": "resnet34"}, "sgd", (8, 16)),
    ({"name": "resnet152"}, "sgd", (4, 8)),
    ({"name": "vit-tiny"}, "adamw", (8, 32)),
    ({"name": "bert", "hidden": 512, "depth": 6, "heads": 8, "mlp": 2048}, "sgd-momentum", (8, 32)),
    # A plain module of PyTorch's, which is traced; others are in benchmarks/any_model.
    ({"name": "benchmarks.memory.plain:Plain", "input_shape": [3, 32, 32], "levels": LEVELS}, "adam", (16, 64)),
    # Micro-batches, whose gradients are added up: the sizes are those of a micro-batch.
    ({"name": "mlp", "hidden": [2000, 2000, 2000]}, "sgd" + ACCUMULATED, (8, 32)),
    ({"name": "vgg"}, "sgd-momentum" + ACCUMULATED, (8, 32)),
    ({"name": "resnet18", "norm": "static", "scaler": True}, "sgd" + ACCUMULATED, (2, 8)),
    ({"name": "vit-tiny"}, "adamw" + ACCUMULATED, (2, 8)),
]


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    parameters = model.parameters()
    match name:
        case "sgd":
            return torch.optim.SGD(parameters, lr=0.01)
        case "sgd-momentum":
            return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=5e-4)
        case "adam":
            return torch.optim.Adam(parameters, weight_decay=5e-4)
        case "adamw":
            return torch.optim.AdamW(parameters)
    raise ValueError(name)


def train(
    family: Family, arch: Architecture, batch_size: int, optimizer: str, steps: int, device: torch.device = CPU
) -> None:
    model = family.build(arch).to(device).train()
    optim = make_optimizer(optimizer.removesuffix(ACCUMULATED), model)
    micro_batches = 3 if optimizer.endswith(ACCUMULATED) else 1
    if family.input_dtype == torch.int64:
        inputs = torch.randint(family.classes, (batch_size, *family.input_shape), device=device)
    else:
        inputs = torch.rand(batch_size, *family.input_shape, device=device)
    labels = torch.randint(family.classes, (batch_size,), device=device)
    for _ in range(steps):
        optim.zero_grad(set_to_none=True)
        for _ in range(micro_batches):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
        optim.step()


def resident_bytes(field: str) -> int:
    """Read VmRSS or VmHWM of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure(family: Family, arch: Architecture, batch_size: int, optimizer: str, *, default_allocator: bool) -> int:
    torch.set_num_threads(1)
    if not default_allocator and not return_freed_memory():
        raise RuntimeError("this C library cannot be told to return freed memory; use --default-allocator")
    torch.manual_seed(0)
    train(family, family.smallest(), 2, optimizer, 2)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    baseline = resident_bytes("VmRSS")
    train(family, arch, batch_size, optimizer, STEPS)
    return resident_bytes("VmHWM") - baseline


def cases() -> list[dict]:
    """Each family of the plan at full width, half width and one random architecture, at both batch sizes."""
    found = []
    for spec, optimizer, batch_sizes in PLAN:
        family = make_family(spec)
        described = isinstance(family, BlockFamily)
        random = {"random": family.sample(np.random.default_rng(3))} if described else {}
        sizes = {
            "full": family.full(),
            "width 0.5": family.width(0.5),
            **random,
        }
        for size, arch in sizes.items():
            found += [
                {
                    "family": family.spec(),
                    "size": size,
                    "architecture": arch.to_json(),
                    "batch_size": batch_size,
                    "optimizer": optimizer,
                }
                for batch_size in batch_sizes
            ]
    return found


def run_case(case: dict, *, default_allocator: bool) -> dict:
    family, arch = make_family(case["family"]), Architecture.from_json(case["architecture"])
    predicted = cost(family, arch, batch_size=case["batch_size"], optimizer=case["optimizer"])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.memory.measure", "--case", json.dumps(case)),
            *(["--default-allocator"] if default_allocator else []),
        ],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    measured = int(done.stdout)
    error = predicted.peak_training_memory_bytes / measured - 1
    return {
        **case,
        "predicted_bytes": predicted.peak_training_memory_bytes,
        "measured_bytes": measured,
        "relative_error": round(error, 4),
    }


def picture(name: str) -> list[str]:
    """Return the lines that show a figure that `make figures` has drawn of the cases."""
    return [
        "<picture>",
        f'  <source media="(prefers-color-scheme: dark)" srcset="../../docs/images/{name}-dark.svg">',
        '  <img alt="Predicted over measured peak memory of training, a dot for each row of the table" '
        f'src="../../docs/images/{name}-light.svg">',
        "</picture>",
        "",
    ]


def table(results: dict, figure: str) -> str:
    machine, kept = results["machine"], results["kept_from_an_earlier_run"]
    lines = [
        "# Predicted and measured peak training memory",
        "",
        *picture(figure),
        f"Command: `{results['command']}`.",
        f"PyTorch {results['torch']}, one thread,",
        f"{machine['cores']} cores of {machine['cpu']} ({machine['capability']}).",
        f"{len(results['cases'])} cases:",
        f"median error {results['median_error']:.1%}, worst {results['worst_error']:.1%}",
        "(of the absolute values; a positive error is a prediction above the measurement).",
        *([f"Kept from an earlier run: {', '.join(kept)}."] if kept else []),
        "How it is measured stands at the top of `measure.py`.",
        "",
        *table_rows(results["cases"]),
    ]
    return "\n".join(lines) + "\n"


def table_rows(cases: list[dict]) -> list[str]:
    """The lines of the table in Markdown."""
    lines = [
        "| family | size | batch | optimizer | predicted MB | measured MB | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        spec = case["family"]
        shape = "x".join(map(str, spec["input_shape"]))
        own = is_reference(spec["name"])  # of a function with arguments, which has no defaults
        whole = spec if own else make_family({key: spec[key] for key in ("name", "input_shape")}).spec()
        changed = [f"{key} {value}" for key, value in spec.items() if key != "input_shape" and value != whole[key]]
        family = ", ".join([f"{spec['name']} {shape}", *changed])
        lines.append(
            f"| {family} | {case['size']} | {case['batch_size']} | {case['optimizer']} "
            f"| {case['predicted_bytes'] / 1e6:.1f} | {case['measured_bytes'] / 1e6:.1f} "
            f"| {case['relative_error']:+.1%} |"
        )
    return lines


def main(*, default_allocator: bool, only: list[str]) -> None:
    name = "results-default-allocator" if default_allocator else "results"
    recorded = json.loads((HERE / f"{name}.json").read_text()) if only else {"cases": []}
    results = [case for case in recorded["cases"] if case["family"]["name"] not in only]
    kept = sorted({case["family"]["name"] for case in results})
    for case in cases():
        if only and case["family"]["name"] not in only:
            continue
        results.append(run_case(case, default_allocator=default_allocator))
        print(
            f"{case['family']['name']:10} {case['size']:9} batch {case['batch_size']:5} {case['optimizer']:13}"
            f" predicted {results[-1]['predicted_bytes'] / 1e6:8.1f} MB measured"
            f" {results[-1]['measured_bytes'] / 1e6:8.1f} MB {results[-1]['relative_error']:+.1%}",
            flush=True,
        )
    errors = [abs(case["relative_error"]) for case in results]
    report = {
        "command": COMMAND + " --default-allocator" * default_allocator + (" --only " + " ".join(only)) * bool(only),
        "kept_from_an_earlier_run": kept,
        "torch": torch.__version__,
        "machine": {
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "capability": torch.backends.cpu.get_cpu_capability(),
        },
        "median_error": round(statistics.median(errors), 4),
        "worst_error": max(errors),
        "cases": results,
    }
    (HERE / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    (HERE / f"{name}.md").write_text(table(report, name.replace("results", "memory")))
    print(f"median error {report['median_error']:.1%}, worst {report['worst_error']:.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--default-allocator", action="store_true", help="leave the C library's allocator alone")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="FAMILY", help="measure these, keep the others' results"
    )
    parser.add_argument("--case", help="measure one case, as JSON, in this process (used internally)")
    arguments = parser.parse_args()
    if arguments.case is None:
        main(default_allocator=arguments.default_allocator, only=arguments.only)
    else:
        case = json.loads(arguments.case)
        print(
            measure(
                make_family(case["family"]),
                Architecture.from_json(case["architecture"]),
                case["batch_size"],
                case["optimizer"],
                default_allocator=arguments.default_allocator,
            )
        )
