"""Hypernetworks by rank: size, time and error, for UniMiB's VGG and for ResNet-18, and against naive ones.

    python -m benchmarks.hypemefed.hypernetworks [--devices 6] [--rounds 5] [--steps 20] [--networks vgg resnet18]
        [--ranks 25 ... naive]

Devices train the whole network together for some rounds, each on data of its own. In every round the hypernetworks
learn from what all but two of them return, and in the last one they guess the deep layers of these two, each from the
real layer before. Parameters and bytes follow from shapes; layers whose training does not fit into half of the free
memory are not run. Resumable: a case that stands in hypernetworks.json with the same settings is not run again. Writes
the tables in README.md too.
"""

import argparse
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import psutil
import torch
import torch.nn.functional as F

from benchmarks.hypemefed.local import train_all_exits
from benchmarks.tables import markdown, write_between
from messages.orders import LocalTraining
from models.base import Family
from models.resnet import ResNet18
from models.vgg import Vgg
from strategies.hypemefed.hypemefed import follow
from strategies.hypemefed.hypernetwork import (
    FullHypernetwork,
    Hypernetwork,
    LowRankHypernetwork,
    Reading,
    fit,
    generate,
    shortfall,
    unit_of_changes,
)
from strategies.submodel import initial_weights
from strategies.work import Weights
from tasks.data import Data
from tasks.task import TASKS, Task, TaskSpec

HERE = Path(__file__).resolve().parent
FILE, README = HERE / "hypernetworks.json", HERE / "README.md"
# Name, and epochs per round: on one core, 25 of ResNet-18's would take an hour.
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
}
LIKE_NAIVE = "100, weights"  # guesses the same
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


def measure(
    family: Family, rounds: list[Round], guess: Literal["change", "weight"], rank: int | None, epochs: int
) -> Layers:
    """Size of the hypernetwork of every layer; seconds and errors of those that fit into memory."""
    pairs = {target: source for exit in follow(family).values() for target, source in exit.items()}
    shapes = {name: spec.shape for name, spec in family.tensors(family.full()).items()}

    def make(target: str) -> Hypernetwork:
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
        if training_bytes(parameters) > psutil.virtual_memory().available / 2:
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
    """Rows of every layer whose naive hypernetwork was run, beside that of the same layer at a rank."""
    rows = []
    for target in (target for target, layer in naive.items() if "seconds_per_epoch" in layer):
        first, second = ({target: layers[target]} for layers in (naive, low_rank))
        both = zip(figures(first)[1:7], figures(second)[1:7], strict=True)
        saved = 1 - low_rank[target]["parameters"] / naive[target]["parameters"]
        faster = naive[target]["seconds_per_epoch"] / low_rank[target]["seconds_per_epoch"]
        rows.append([target, *(f"{a} / {b}" for a, b in both), f"{100 * saved:.2f} %", f"{faster:.1f}"])
    return rows


def write(cases: dict[str, dict[str, Any]]) -> None:
    """Write both tables."""
    costs = ["parameters", "MB", "MB while training", "s to read", "s per epoch"]
    known = ["the others' mean", "what was sent", "zeros", "random weights"]
    heads = ["network", "k", "m", *costs, "error", *(f"error of {name}" for name in known)]
    found = [(key, rank) for key in NETWORKS for rank in KINDS if f"{key} {rank}" in cases]
    rows = [[NETWORKS[key][0], rank, *figures(cases[f"{key} {rank}"]["layers"])] for key, rank in found]
    print(write_between(README, "hypernetworks", markdown(heads, rows)))
    heads = ["network", "layer", *(f"{what}, naive / k = 100" for what in (*costs, "error")), "less memory", "faster"]
    both = [key for key in NETWORKS if f"{key} naive" in cases and f"{key} {LIKE_NAIVE}" in cases]
    rows = [
        [NETWORKS[key][0], *row]
        for key in both
        for row in compared(cases[f"{key} naive"]["layers"], cases[f"{key} {LIKE_NAIVE}"]["layers"])
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
        _, family, epochs = NETWORKS[key]
        settings = {name: getattr(arguments, name) for name in ("devices", "rounds", "steps")} | {"epochs": epochs}
        known = {rank: cases.get(f"{key} {rank}", {}) for rank in arguments.ranks}
        missing = [rank for rank, case in known.items() if {name: case.get(name) for name in settings} != settings]
        if not missing:
            continue
        rounds = trained(family, arguments.devices, arguments.rounds, arguments.steps)
        for rank in missing:
            cases[f"{key} {rank}"] = settings | {"layers": measure(family, rounds, *KINDS[rank], epochs)}
            FILE.write_text(json.dumps(cases, indent=1) + "\n")
            print(f"{key} {rank}: {figures(cases[f'{key} {rank}']['layers'])}", flush=True)
    write(cases)


if __name__ == "__main__":
    main()
