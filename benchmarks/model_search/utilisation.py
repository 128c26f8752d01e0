"""How much of memory and link is used: exact search, the paper's pool, and uniform widths, without any training.

    python -m benchmarks.model_search.utilisation

100 rounds of 120 devices (setting 5's ViT-tiny on FEMNIST's images of 28x28, batches of 64, AdamW) under real traces.
Needs ../shared/traces, beside the project's folder. Writes utilisation.json and the table in README.md.
"""

import json
import statistics
import time
from pathlib import Path

import numpy as np

from benchmarks.tables import markdown, write_between
from wildflower.devices.budget import Budget, budget_of
from wildflower.devices.fleet import Fleet
from wildflower.models.architecture import Architecture
from wildflower.models.cost import Cost, cost
from wildflower.models.space import Space
from wildflower.models.vit import VitTiny
from wildflower.strategies.pricing import fits
from wildflower.strategies.search import ExactSearch, PoolSearch

HERE = Path(__file__).resolve().parent
FAMILY = VitTiny(input_shape=(1, 28, 28), classes=62, norm="static")
ROUNDS, DEVICES_PER_ROUND, ROUND_SECONDS = 100, 120, 60.0
SPACES = {"{0, 1}": (0.0, 1.0), "{0, 1/4, 1/2, 3/4, 1}": (0.0, 0.25, 0.5, 0.75, 1.0)}
WIDTHS = (1.0, 0.5, 0.25, 0.125, 0.0625)


def price(architecture: Architecture) -> Cost:
    """What an architecture costs."""
    return cost(FAMILY, architecture, batch_size=64, optimizer="adamw")


class UniformWidth:
    """HeteroFL's assignment: the widest of five that fits."""

    def find(self, budget: Budget, rng: np.random.Generator) -> Architecture | None:
        """The widest that fits."""
        return next((a for a in map(FAMILY.width, WIDTHS) if fits(price(a), budget)), None)


def main() -> None:
    """Assign, measure, write."""
    fleet = Fleet(HERE / "utilisation-fleet.toml", devices=1000, seed=1)
    searchers = {"uniform width": UniformWidth()}
    for name, shares in SPACES.items():
        space = Space.of(FAMILY, shares)
        searchers[f"pool, {name}"] = PoolSearch(space, price)
        searchers[f"exact, {name}"] = ExactSearch(space, batch_size=64, optimizer="adamw", tolerance=0.02)
        searchers[f"exact, {name}, tolerance 0"] = ExactSearch(space, batch_size=64, optimizer="adamw", tolerance=0.0)
    results = {name: measure(fleet, searcher) for name, searcher in searchers.items()}
    (HERE / "utilisation.json").write_text(json.dumps(results, indent=1) + "\n")
    heads = ("assignment", "left out", "parameters", "memory used", "link used", "binding resource used", "ms each")
    rows = [
        [
            name,
            f"{r['left_out']} of {ROUNDS * DEVICES_PER_ROUND}",
            f"{r['parameters']:,.0f}",
            *(f"{100 * r[what]:.1f} %" for what in ("memory", "link", "binding")),
            f"{1000 * r['seconds']:.2f}",
        ]
        for name, r in results.items()
    ]
    print(write_between(HERE / "README.md", "utilisation", markdown(heads, rows)))


def measure(fleet: Fleet, searcher: UniformWidth | PoolSearch | ExactSearch) -> dict[str, float]:
    """Mean figures over all assignments; of the binding resource, over devices that cannot afford the whole model."""
    memory, link, binding, parameters, seconds = [], [], [], [], []
    left_out = 0
    whole = price(FAMILY.full())
    for number in range(ROUNDS):
        rng = np.random.default_rng([1, number])
        for device in rng.choice(fleet.size, DEVICES_PER_ROUND, replace=False):
            report = fleet.report(int(device), number * ROUND_SECONDS)
            budget = budget_of(report, memory_fraction=1.0, transfer_seconds=None, deadline_seconds=None)
            started = time.perf_counter()
            architecture = searcher.find(budget, rng)
            seconds.append(time.perf_counter() - started)
            if architecture is None:
                left_out += 1
                continue
            found = price(architecture)
            assert fits(found, budget)
            assert budget.both_ways_bytes
            memory.append(found.peak_training_memory_bytes / budget.memory_bytes)
            link.append(found.payload_bytes / budget.both_ways_bytes)
            parameters.append(found.parameters)
            if not fits(whole, budget):
                binding.append(max(memory[-1], link[-1]))
    return {
        "left_out": left_out,
        "parameters": statistics.mean(parameters),
        "memory": statistics.mean(memory),
        "link": statistics.mean(link),
        "binding": statistics.mean(binding),
        "seconds": statistics.mean(seconds),
    }


if __name__ == "__main__":
    main()
