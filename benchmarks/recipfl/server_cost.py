"""What a round of RecipFL costs the server: seconds to generate and to update for 10 devices, and peak memory.

One device of the ten is strong and has two models.

It is the method's own work, `RecipFL.generate`, `absorb` and `finish_round`, with devices that return what they were
sent and a little more. Every case runs in a process of its own, on one thread, best on a machine that does nothing
else: python -m benchmarks.recipfl.server_cost [CASE ...]

Writes server_cost.json, in which cases that are not run stay, and the table in README.md. Adam and the sum of
gradients hold six times the hypernetwork: the full decoders of ResNet-18 have 0.6 billion parameters.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.tables import markdown, write_between
from wildflower.models.family import make_family
from wildflower.rounds.round_records import peak_rss_bytes
from wildflower.server_app.app import build
from wildflower.server_app.config import RunConfig
from wildflower.strategies.client_step import tensor_sets_of
from wildflower.strategies.method import Contribution, Group, Order, Setup, Trained
from wildflower.strategies.recipfl import RecipFL, RecipFLParams

FILE = Path(__file__).resolve().parent / "server_cost.json"
DEVICES, STRONG = 10, 1  # a strong device trains both models
LENET = {
    "name": "choice",
    "input_shape": [1, 28, 28],
    "members": {"large": {"name": "lenet5"}, "small": {"name": "lenet5", "conv_channels": [6, 3], "hidden": [84]}},
}
RESNET = {
    "name": "choice",
    "input_shape": [3, 32, 32],
    "members": {"large": {"name": "resnet18"}, "small": {"name": "resnet18", "depth": 1}},
}
DENSENET = {
    "name": "choice",
    "input_shape": [3, 32, 32],
    "classes": 100,
    "members": {"large": {"name": "densenet121", "growth": 12}, "small": {"name": "densenet121", "growth": 6}},
}
CASES = {
    f"{name}, {decoders}": (spec, tile)
    for name, spec in (("lenet5", LENET), ("densenet121", DENSENET), ("resnet18", RESNET))
    for decoders, tile in (("tiled", 64), ("full", 0))
}


def method_of(case: str) -> RecipFL:
    """The method of a case; of the run's settings only the seed is used here."""
    spec, tile = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        values = {"task": "digits", "strategy": "fedavg", "widths": 1.0, "output-dir": folder, "run-name": "cost"}
        other, _ = build(RunConfig.from_run_config(values))
    return RecipFL(Setup(make_family(spec), other.settings, (1.0,)), RecipFLParams(tile=tile, hypernetwork="published"))


def measure(case: str) -> dict:
    """One round's work, after a first generation that imports what it needs."""
    torch.set_num_threads(1)
    method = method_of(case)
    parameters = sum(p.numel() for p in method.parameters.values())
    before = peak_rss_bytes() - 4 * parameters
    large, small = method.candidates
    owners = [(device, small) for device in range(DEVICES)] + [(device, large) for device in range(STRONG)]
    method.generate(owners)
    started = time.perf_counter()
    sent = method.generate(owners)
    generated = time.perf_counter()
    trained: list[Trained] = []
    counts = {"class_counts": [10] * method.family.classes}
    for number, (device, architecture) in enumerate(owners):
        order = Order(device, architecture)
        sent_tensor_sets, returned_tensor_sets = tensor_sets_of(method.client_step(order), method.family, architecture)
        selection, placement = method.selection(device, architecture), method.family.place(architecture)
        group = Group(architecture, selection, sent_tensor_sets, returned_tensor_sets, placement)
        returned = {name: value + 1e-3 for name, value in sent.pop((device, architecture)).items()}
        method.absorb(Contribution(group, [number], [device], 100, {}, {"weights": returned}))
        trained.append(Trained(order, "all", 100, 1.0, counts))
    method.finish_round(trained)
    updated = time.perf_counter()
    return {
        "hypernetwork_parameters": parameters,
        "generate_seconds": round(generated - started, 3),
        "update_seconds": round(updated - generated, 3),
        "peak_bytes_above_start": peak_rss_bytes() - before,
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(sys.argv[2])))
        sys.exit()
    results = json.loads(FILE.read_text()) if FILE.exists() else {}
    for case in sys.argv[1:] or CASES:
        command = [sys.executable, "-m", "benchmarks.recipfl.server_cost", "--measure", case]
        results[case] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        FILE.write_text(json.dumps(results, indent=1) + "\n")
    heads = ["networks, decoders", "parameters of the hypernetwork", "s to generate", "s to update", "peak, MB"]
    rows = [
        [
            case,
            f"{results[case]['hypernetwork_parameters']:,}",
            *(f"{results[case][key]:.2f}" for key in ("generate_seconds", "update_seconds")),
            f"{results[case]['peak_bytes_above_start'] / 1e6:,.0f}",
        ]
        for case in CASES
        if case in results
    ]
    print(write_between(FILE.parent / "README.md", "server cost", markdown(heads, rows)))
