"""How much nearer the mean over all of a round's devices is with guesses than without.

    python -m benchmarks.hypemefed.guesses [--rounds 24] [--epochs 5 25]

Ten devices of the preliminary study train the whole network in every round, though only some of them may count: those
whose tier has a layer are its owners. What the others would have changed of it is guessed, and compared with what they
did change. All devices count alike. FedAvg over owners goes on from round to round. Writes guesses.json and the table
in README.md.
"""

import argparse
import json
import statistics
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from benchmarks.hypemefed.local import train_all_exits
from benchmarks.tables import markdown, write_between
from wildflower.messages.orders import LocalTraining
from wildflower.messages.tensor_sets import Weights
from wildflower.models.cnn import Cnn3
from wildflower.strategies.hypemefed.guesses import HypeMeFedParams
from wildflower.strategies.hypemefed.layer_hypernetwork import (
    Factors,
    LowRankHypernetwork,
    Reading,
    fit,
    generate,
    shortfall,
    unit_of_changes,
)
from wildflower.strategies.hypemefed.pairs_of_layers import follow
from wildflower.strategies.submodel import initial_weights
from wildflower.tasks.task import Task, TaskSpec, load_task

HERE = Path(__file__).resolve().parent
FILE, README = HERE / "guesses.json", HERE / "README.md"
FAMILY = Cnn3(input_shape=(1, 28, 28), exits=(1, 2, 3))
PARTITIONS = {"IID": ("iid", 0.0), "Dirichlet 0.5": ("dirichlet", 0.5), "Dirichlet 0.1": ("dirichlet", 0.1)}
DEVICES, PER_ROUND, TIERS = 50, 10, 3
PARAMS = HypeMeFedParams()
WAYS = ("shifted", "as guessed")
# target: source, its exit
PAIRS = {target: (source, exit) for exit, pairs in follow(FAMILY).items() for target, source in pairs.items()}
Round = tuple[Weights, list[Weights], list[int]]  # what was sent, what each device returned, each device's exit


def rounds_of(partition: str, alpha: float, count: int) -> list[Round]:
    """Rounds of the preliminary study in which all devices train the whole."""
    study = tomllib.loads((HERE / "preliminary.toml").read_text())
    task: Task = load_task(
        TaskSpec(name=study["task"], devices=DEVICES, partition=partition, alpha=alpha or 0.5, seed=1)
    )
    training = LocalTraining(
        steps=study["local-steps"],
        batch_size=study["batch-size"],
        optimizer=study["optimizer"],
        learning_rate=study["learning-rate"],
    )
    weights: Weights = dict(initial_weights(FAMILY, 1))
    generator = torch.Generator().manual_seed(0)
    found: list[Round] = []
    exits = {exit: set(FAMILY.tensors(FAMILY.up_to(exit))) for exit in range(1, TIERS + 1)}
    with TemporaryDirectory() as folder:
        for number in range(1, count + 1):
            devices = torch.randperm(DEVICES, generator=generator)[:PER_ROUND].tolist()
            models = train_all_exits(FAMILY, weights, devices, training, task, folder, number)
            tiers = [1 + device % TIERS for device in devices]
            found.append((_kept(weights), [_kept(model) for model in models], tiers))
            mean: Weights = {}
            for name, old in weights.items():
                own = [m[name] for m, tier in zip(models, tiers, strict=True) if name in exits[tier]]
                mean[name] = torch.stack(own).mean(dim=0) if own else old
            weights = mean
    return found


def _kept(weights: Weights) -> Weights:
    return {name: value.clone() for name, value in weights.items() if name in {*PAIRS, *(s for s, _ in PAIRS.values())}}


def errors(rounds: list[Round], epochs: int) -> dict[str, dict[str, float]]:
    """For every deep layer: the mean square error of the mean change over all devices, relative to the owners' mean's.

    "shifted": with the guesses that the strategy makes; "as guessed": without the shift. Means over the second half of
    the rounds.
    """
    torch.manual_seed(0)
    shapes = {name: value.shape for name, value in rounds[0][0].items()}
    networks = {
        target: LowRankHypernetwork(shapes[source], shapes[target], PARAMS.rank, PARAMS.hidden, from_zero=True)
        for target, (source, _) in PAIRS.items()
    }
    found: dict[str, dict[str, list[float]]] = {target: {way: [] for way in WAYS} for target in PAIRS}
    for number, (sent, models, tiers) in enumerate(rounds):
        # What devices have of each layer, real or guessed.
        known = {way: {name: [model[name] for model in models] for name in sent} for way in WAYS}
        reading = Reading("change", sent, units_of(sent, models, tiers))
        for target, (source, exit) in PAIRS.items():
            network, owners = networks[target], [i for i, tier in enumerate(tiers) if tier >= exit]
            if not owners:
                break  # nor has anybody what is behind it: there is nothing to compare with
            real = [reading.wanted(target, model[target]) for model in models]
            samples: list[tuple[Factors, Tensor]] = [
                (reading.inputs(network, source, models[i][source]), real[i]) for i in owners
            ]
            fit(network, samples, epochs=epochs, learning_rate=PARAMS.learning_rate)
            shift = shortfall(network, samples, [1.0] * len(owners))
            true = torch.stack(real).mean(dim=0)
            lacking = torch.stack([real[i] for i in owners]).mean(dim=0) - true
            for way in WAYS:
                guessed = [
                    real[i]
                    if i in owners
                    else generate(network, reading.inputs(network, source, value)) + (way == "shifted") * shift
                    for i, value in enumerate(known[way][source])
                ]
                known[way][target] = [reading.guessed(target, value) for value in guessed]
                if len(owners) < len(models) and number >= len(rounds) // 2:
                    error = torch.stack(guessed).mean(dim=0) - true
                    found[target][way].append(float(error.square().mean() / lacking.square().mean()))
    return {target: {way: statistics.mean(values) for way, values in ways.items()} for target, ways in found.items()}


def units_of(sent: Weights, models: list[Weights], tiers: list[int]) -> dict[str, float]:
    """Units of what a round's owners changed of each layer."""
    units = {}
    for name, begun in sent.items():
        exit = PAIRS[name][1] if name in PAIRS else 1
        own = [model[name] for model, tier in zip(models, tiers, strict=True) if tier >= exit]
        units[name] = unit_of_changes(begun, own) if own else 0.0
    return units


def main() -> None:
    """Measure all partitions, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--epochs", type=int, nargs="+", default=[5, 25])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name, (partition, alpha) in PARTITIONS.items():
        rounds = rounds_of(partition, alpha, arguments.rounds)
        results[name] = {epochs: errors(rounds, epochs) for epochs in arguments.epochs}
        print(name, results[name], flush=True)
    FILE.write_text(json.dumps(results, indent=1) + "\n")
    heads = ["data", "epochs", *(f"{target.split('.')[0]}, {way}" for target in PAIRS for way in WAYS)]
    rows = [
        [name, str(epochs), *(f"{by_target[target][way]:.2f}" for target in PAIRS for way in WAYS)]
        for name, by_epochs in results.items()
        for epochs, by_target in by_epochs.items()
    ]
    print(write_between(README, "guesses", markdown(heads, rows)))


if __name__ == "__main__":
    main()
