"""How alike are models that devices of different tiers train: linear CKA of the same layers' activations.

    python -m benchmarks.hypemefed.cka RUN_FOLDER [RUN_FOLDER ...] [--devices 5] [--epochs 20] [--images 1000]

Every run's checkpoint holds the global model. From it devices of each tier train their part of the network on their own
data, for some epochs at the run's first learning rate: after the few steps of a last round, at a rate that has decayed,
all of them would still be the global model. The activations of these models on the same test images are compared
(Kornblith et al. 2019, "Similarity of Neural Network Representations Revisited"). Writes cka.json and the table in
README.md.
"""

import argparse
import json
import statistics
from collections import defaultdict
from itertools import combinations, product
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.hypemefed.local import train_locally
from benchmarks.runs import trained_method
from benchmarks.tables import markdown, write_between
from wildflower.client_app.kept_state import DeviceState
from wildflower.models.architecture import Architecture
from wildflower.models.network import Network
from wildflower.rounds.asking import budget_in_round
from wildflower.rounds.requests import seed_of
from wildflower.strategies.method import Order
from wildflower.strategies.submodel import SubModelMethod
from wildflower.tasks.task import Task, TaskSpec, load_task

HERE = Path(__file__).resolve().parent
Grams = dict[str, Tensor]  # layer -> centered Gram matrix of its activations, (images, images)


def linear_cka(x: Tensor, y: Tensor) -> float:
    """||Y^T X||^2 / (||X^T X|| ||Y^T Y||) of centered activations (examples, features), in Frobenius norms: 0 to 1.

    Neither rotations nor a common factor of the features change it, and the two may have different numbers of them.
    """
    return cka_of_grams(gram(x), gram(y))


def gram(activations: Tensor) -> Tensor:
    """X X^T (examples, examples) of activations (examples, ...) that are centered over the examples."""
    flat = activations.flatten(1).double()
    flat = flat - flat.mean(dim=0)
    return flat @ flat.T


def cka_of_grams(x: Tensor, y: Tensor) -> float:
    """Linear CKA from both Gram matrices, since ||Y^T X||^2 is the inner product of X X^T and Y Y^T."""
    size = x.norm() * y.norm()
    if not size:
        raise ValueError("activations that are the same for all examples are like no others")
    return float((x * y).sum() / size)


def activations(model: Network, inputs: Tensor, heads: set[str]) -> dict[str, Tensor]:
    """What every block but the heads makes of the inputs, in evaluation mode."""
    found: dict[str, list[Tensor]] = defaultdict(list)
    hooks = [
        block.register_forward_hook(lambda _, __, output, name=name: found[name].append(output))
        for name, block in model.named_children()
        if name not in heads
    ]
    model.eval()
    with torch.no_grad():
        for part in inputs.split(250):
            model(part)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts) for name, parts in found.items()}


def train(method: SubModelMethod, task: Task, device: int, architecture: Architecture, epochs: int) -> Network:
    """A device's model after so many epochs of local training from the global model, at the first learning rate."""
    settings, number = method.settings, method.round + 1
    return train_locally(
        method.family,
        architecture,
        method.family.place(architecture).gather(method.weights),
        method.client_step(Order(device, architecture)),
        settings.training_in(1).model_copy(update={"epochs": epochs, "steps": 0}),
        task,
        DeviceState(settings.state_dir, settings.run, device),
        device=device,
        round_number=number,
        seed=seed_of(settings, number, device),
    )


def grams_by_tier(run: Path, devices: int, images: int, epochs: int) -> dict[str, list[Grams]]:
    """Gram matrices of the models of some devices of every tier of a run, tiers from the shallowest on."""
    method, engine, config = trained_method(run)
    task = load_task(TaskSpec.from_json(method.settings.task))
    population = engine.population
    inputs = task.prepare(task.test.inputs[:images], augment=None)
    by_tier: dict[str, list[tuple[int, Architecture]]] = defaultdict(list)
    for device in range(config.devices):
        architecture = method.assign(device, budget_in_round(device, population, method.settings))
        if architecture is not None and len(by_tier[population.tier(device)]) < devices:
            by_tier[population.tier(device)].append((device, architecture))
    ordered = sorted(by_tier.items(), key=lambda tier: method.family.exit_of(tier[1][0][1]))
    heads = set(method.family.segments)
    return {
        tier: [
            {name: gram(a) for name, a in activations(train(method, task, *member, epochs), inputs, heads).items()}
            for member in members
        ]
        for tier, members in ordered
    }


def compare(tiers: dict[str, list[Grams]]) -> dict[str, dict[str, float]]:
    """Of every pair of tiers and every layer that both have: the mean CKA over all pairs of their devices."""
    found = {}
    for (first, ours), (second, theirs) in combinations(tiers.items(), 2):
        layers = [name for name in ours[0] if name in theirs[0]]
        found[f"{first}, {second}"] = {
            name: statistics.mean(cka_of_grams(a[name], b[name]) for a, b in product(ours, theirs)) for name in layers
        }
    return found


def main() -> None:
    """Compare the tiers of every run, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--devices", type=int, default=5, help="of each tier")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    file = HERE / "cka.json"
    results: dict[str, dict[str, dict[str, float]]] = json.loads(file.read_text()) if file.exists() else {}
    for run in arguments.runs:
        results[run.name] = compare(grams_by_tier(run, arguments.devices, arguments.images, arguments.epochs))
        file.write_text(json.dumps(results, indent=1) + "\n")
    rows = [
        [run, pair, _by_layer(layers), _mean(layers)]
        for run, pairs in results.items()
        for pair, layers in pairs.items()
    ]
    table = markdown(["run", "tiers", "by layer", "mean"], rows)
    print(write_between(HERE / "README.md", "cka", table))


def _by_layer(layers: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in layers.items())


def _mean(layers: dict[str, float]) -> str:
    return f"{statistics.mean(layers.values()):.3f}"


if __name__ == "__main__":
    main()
