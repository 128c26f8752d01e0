"""Hypernetworks by rank: size, time and error, for UniMiB's VGG and for ResNet-18, and against naive ones.

    python -m benchmarks.hypemefed.hypernetworks [--devices 6] [--rounds 5] [--steps 20] [--networks vgg resnet18]
        [--ranks 25 ... naive]

Devices train the whole network together for some rounds, each on data of its own. In every round the hypernetworks
learn from what all but two of them return, and in the last one they guess the deep layers of these two, each from the
real layer before. Parameters and bytes follow from shapes; layers whose training does not fit into half of the free
memory are not run. Resumable: a case that stands in hypernetworks.json with the same settings is not run again, unless
there is memory now for layers that it lacks. Writes the tables in README.md too.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.hypemefed.local import train_all_exits
from benchmarks.tables import markdown, write_between
from wildflower.messages.orders import LocalTraining
from wildflower.messages.tensor_sets import Weights
from wildflower.models.base import Family
from wildflower.models.resnet import ResNet18
from wildflower.models.vgg import Vgg
from wildflower.strategies.hypemefed.layer_hypernetwork import (
    LowRankHypernetwork,
    Reading,
    fit,
    generate,
    mlp,
    shortfall,
    unit_of_changes,
)
from wildflower.strategies.hypemefed.pairs_of_layers import follow
from wildflower.strategies.submodel import initial_weights
from wildflower.tasks.data import Data
from wildflower.tasks.task import TASKS, Task, TaskSpec

HERE = Path(__file__).resolve().parent
FILE, README = HERE / "hypernetworks.json", HERE / "README.md"
EPOCHS = 25  # per round, as in the paper
# Name, and epochs per round of a naive hypernetwork: on one core, 25 of ResNet-18's would take an hour and a half.
NETWORKS: dict[str, tuple[str, Family, int]] = {
    "vgg": (
        "VGG of UniMiB SHAR (64 to 512, 1x18x25)",
        Vgg(input_shape=(1, 18, 25), block_channels=(64, 128, 256, 512), exits=(1, 2, 3)),
        5,
    ),
    "resnet18": ("ResNet-18", ResNet18(input_shape=(1, 28, 28), exits=(1, 2, 3, 4)), 1),
}
# What is guessed, and from how many singular vectors; None: by a naive hypernetwork.
KINDS: dict[str, tuple[Literal["change", "weight"], int | None]] = {
    "25": ("change", 25),
    "50": ("change", 50),
    "100": ("change", 100),
    "200": ("change", 200),
    "all": ("change", 10**6),
    "100, weights": ("weight", 100),
    "naive": ("weight", None),
    "100 as naive": ("weight", 100),  # as few epochs, and the same is guessed
}
AS_NAIVE = ("naive", "100 as naive")
HIDDEN = 512
STATES = 4  # weights, gradients and Adam's two moments
WITHHELD = 2
ERRORS = ("generated", "mean_of_others", "sent", "zeros", "random")
Round = tuple[Weights, list[Weights]]  # the convolutions that devices were sent, and what each returned
Layers = dict[str, dict[str, Any]]  # target -> its hypernetwork's figures


def scaled(devices: int, shape: tuple[int, ...]) -> Task:
    """Fashion-MNIST over some devices, its images scaled to the input of a network."""
    whole = TASKS["fashion-mnist"].load("")
    images = torch.cat([F.interpolate(part.float(), shape[1:]) for part in whole.train.inputs.split(5000)])
    data = replace(whole, train=Data(images.round().to(torch.uint8), whole.train.labels))
    return Task(TaskSpec(name="fashion-mnist", devices=devices, partition="dirichlet", alpha=0.5, seed=1), data)


def trained(family: Family, count: int, rounds: int, steps: int) -> list[Round]:
    """Rounds of FedAvg with all exits."""
    task = scaled(count, family.input_shape)
    training = LocalTraining(steps=steps, batch_size=16, learning_rate=0.02, momentum=0.9)
    weights = initial_weights(family, 1)
    found: list[Round] = []
    with TemporaryDirectory() as folder:
        for number in range(1, rounds + 1):
            models = train_all_exits(family, weights, range(count), training, task, folder, number)
            print(f"round {number} of {rounds}: {count} devices have trained", flush=True)
            found.append((_convolutions(weights), [_convolutions(model) for model in models]))
            weights = {name: torch.stack([model[name] for model in models]).mean(dim=0) for name in weights}
    return found


def _convolutions(weights: Weights) -> Weights:
    return {name: value for name, value in weights.items() if value.dim() == 4}


class FullHypernetwork(nn.Module):
    """The naive control: one MLP from all entries of the source weight to all entries of the target's."""

    def __init__(self, source: Sequence[int], target: Sequence[int], hidden: int) -> None:
        super().__init__()
        self.target = tuple(target)
        self.all = mlp(torch.Size(source).numel(), hidden, torch.Size(target).numel())

    def prepare(self, weight: Tensor) -> Tensor:
        """Return the weight's entries."""
        return weight.to(next(self.parameters()).device).float().flatten()

    def forward(self, entries: Tensor) -> Tensor:
        """Return the guessed weight of the target's shape."""
        return self.all(entries).reshape(self.target)


def measure(
    family: Family, rounds: list[Round], guess: Literal["change", "weight"], rank: int | None, epochs: int
) -> Layers:
    """Size of the hypernetwork of every layer; seconds and errors of those that fit into memory."""
    pairs = {target: source for exit in follow(family).values() for target, source in exit.items()}
    shapes = {name: spec.shape for name, spec in family.tensors(family.full()).items()}

    def make(target: str) -> LowRankHypernetwork | FullHypernetwork:
        if rank is None:
            return FullHypernetwork(shapes[pairs[target]], shapes[target], HIDDEN)
        source = shapes[pairs[target]]
        return LowRankHypernetwork(source, shapes[target], rank, HIDDEN, from_zero=guess == "change")

    random = initial_weights(family, 2)  # devices began from those of another seed
    layers: Layers = {}
    for target, source in pairs.items():
        with torch.device("meta"):
            parameters = sum(p.numel() for p in make(target).parameters())
            times = getattr(make(target), "times", 1)  # m
        layers[target] = {"parameters": parameters, "times": times, "entries": math.prod(shapes[target])}
        if not fits(parameters):
            print(f"{target}: {training_bytes(parameters) / 1e9:.1f} GB are too many", flush=True)
            continue
        torch.manual_seed(0)
        network = make(target)
        reading = learning = 0.0
        for sent, models in rounds:
            started = time.perf_counter()
            owners = models[:-WITHHELD]
            units = {n: unit_of_changes(sent[n], [model[n] for model in owners]) for n in (source, target)}
            layer = Reading(guess, sent, units)
            samples = [
                (layer.inputs(network, source, model[source]), layer.wanted(target, model[target])) for model in owners
            ]
            reading += time.perf_counter() - started
            started = time.perf_counter()
            fit(network, samples, epochs=epochs, learning_rate=5e-4)
            learning += time.perf_counter() - started
        layers[target]["seconds_to_read"] = reading / len(rounds)
        layers[target]["seconds_per_epoch"] = learning / len(rounds) / epochs
        mean = torch.stack([model[target] for model in models[:-WITHHELD]]).mean(dim=0)
        errors = dict.fromkeys(ERRORS, 0.0)
        shift = shortfall(network, samples, [1.0] * len(samples)) if guess == "change" else 0.0
        for model in models[-WITHHELD:]:
            guessed = layer.guessed(target, generate(network, layer.inputs(network, source, model[source])) + shift)
            known = (guessed, mean, sent[target], torch.zeros_like(mean), random[target])
            for name, value in zip(ERRORS, known, strict=True):
                errors[name] += (value - model[target]).abs().mean().item() / WITHHELD
        layers[target]["mean_absolute_error"] = errors
    return layers


def missing(case: dict[str, Any], settings: dict[str, Any]) -> bool:
    """Whether a case has to be run: it was not with these settings, or some of its layers would fit into memory now."""
    if {name: case.get(name) for name in settings} != settings:
        return True
    unmeasured = [layer for layer in case["layers"].values() if "seconds_per_epoch" not in layer]
    return any(fits(layer["parameters"]) for layer in unmeasured)


def fits(parameters: int) -> bool:
    """Whether a hypernetwork may be trained here."""
    return training_bytes(parameters) <= psutil.virtual_memory().available / 2


def training_bytes(parameters: int) -> int:
    """Bytes that stay while a hypernetwork learns: its parameters, their gradients, and Adam's moments."""
    return 4 * STATES * parameters


def figures(layers: Layers) -> list[str]:
    """Of some layers together: m, parameters, their MB, MB while training, seconds, mean absolute errors.

    Seconds are those to read a round's devices, and those of an epoch.
    """
    parameters = sum(layer["parameters"] for layer in layers.values())
    times = sorted({layer["times"] for layer in layers.values()})
    cells = [" to ".join(str(m) for m in {times[0]: 0, times[-1]: 0})]
    cells += [f"{parameters:,}", f"{4 * parameters / 1e6:,.0f}", f"{training_bytes(parameters) / 1e6:,.0f}"]
    if any("seconds_per_epoch" not in layer for layer in layers.values()):
        return [*cells, "does not fit", "", *("" for _ in ERRORS)]
    entries = sum(layer["entries"] for layer in layers.values())
    for name in ("seconds_to_read", "seconds_per_epoch"):
        cells.append(f"{sum(layer[name] for layer in layers.values()):.2f}")
    for name in ERRORS:
        total = sum(layer["mean_absolute_error"][name] * layer["entries"] for layer in layers.values())
        cells.append(f"{total / entries:.5f}")
    return cells


def compared(naive: Layers, low_rank: Layers) -> list[list[str]]:
    """Rows of every layer whose naive hypernetwork was run, beside that of the same layer at a rank, and of all."""
    run = [target for target, layer in naive.items() if "seconds_per_epoch" in layer]
    rows = []
    for name, targets in [*((target, [target]) for target in run), ("together", run)]:
        first, second = ({target: layers[target] for target in targets} for layers in (naive, low_rank))
        both = zip(figures(first)[1:7], figures(second)[1:7], strict=True)
        slow, fast = (sum(layer["seconds_per_epoch"] for layer in layers.values()) for layers in (first, second))
        rows.append([name, *(f"{a} / {b}" for a, b in both), less(second, first), f"{slow / fast:.1f}"])
    return rows


def less(layers: Layers, naive: Layers) -> str:
    """How much less memory parameters take than those of naive hypernetworks of the same layers."""
    parameters, of_naive = (sum(layer["parameters"] for layer in found.values()) for found in (layers, naive))
    return f"{100 * (1 - parameters / of_naive):.2f} %"


def write(cases: dict[str, dict[str, Any]]) -> None:
    """Write both tables."""
    costs = ["parameters", "MB", "MB while training", "s to read", "s per epoch"]
    known = ["the others' mean", "what was sent", "zeros", "random weights"]
    heads = [
        "network",
        "k",
        "epochs",
        "m",
        *costs,
        "error",
        *(f"error of {name}" for name in known),
        "less memory than naive",
    ]
    rows = []
    for key, rank in ((key, rank) for key in NETWORKS for rank in KINDS if rank != AS_NAIVE[1]):
        layers, naive = (cases.get(f"{key} {name}", {}).get("layers") for name in (rank, "naive"))
        if layers:
            saved = less(layers, naive) if naive and rank != "naive" else ""
            epochs = str(cases[f"{key} {rank}"]["epochs"])
            rows.append([NETWORKS[key][0], rank, epochs, *figures(layers), saved])
    print(write_between(README, "hypernetworks", markdown(heads, rows)))
    heads = ["network", "layer", *(f"{what}, naive / k = 100" for what in (*costs, "error")), "less memory", "faster"]
    both = [key for key in NETWORKS if all(f"{key} {name}" in cases for name in AS_NAIVE)]
    rows = [
        [NETWORKS[key][0], *row]
        for key in both
        for row in compared(*(cases[f"{key} {name}"]["layers"] for name in AS_NAIVE))
    ]
    print(write_between(README, "naive hypernetworks", markdown(heads, rows)))


def main() -> None:
    """Measure what is missing, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="of every device in every round")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--ranks", nargs="+", choices=KINDS, default=list(KINDS))
    arguments = parser.parse_args()
    if arguments.devices <= WITHHELD:
        parser.error(f"--devices must be more than the {WITHHELD} that are withheld")
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    torch.set_num_threads(1)
    cases: dict[str, dict[str, Any]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    for key in arguments.networks:
        _, family, naive_epochs = NETWORKS[key]
        common = {name: getattr(arguments, name) for name in ("devices", "rounds", "steps")}
        settings = {rank: common | {"epochs": naive_epochs if rank in AS_NAIVE else EPOCHS} for rank in arguments.ranks}
        todo = [rank for rank in arguments.ranks if missing(cases.get(f"{key} {rank}", {}), settings[rank])]
        if not todo:
            continue
        rounds = trained(family, arguments.devices, arguments.rounds, arguments.steps)
        for rank in todo:
            layers = measure(family, rounds, *KINDS[rank], settings[rank]["epochs"])
            cases[f"{key} {rank}"] = settings[rank] | {"layers": layers}
            FILE.write_text(json.dumps(cases, indent=1) + "\n")
            print(f"{key} {rank}: {figures(cases[f'{key} {rank}']['layers'])}", flush=True)
    write(cases)


if __name__ == "__main__":
    main()
