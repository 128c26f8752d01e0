"""How much of the devices' budgets searched sub-networks use: Table 3 of RaFL with our search.

Each of 100 devices may spend a number of multiplications on one example, drawn uniformly between those of the smallest
and of the largest sub-network. Utilisation is the sum of what the found sub-networks need by the sum of the budgets.
Beside the search stands what the paper compares with, the same model for everybody. The weakest device must be able to
run it, so that at best it needs as much as that device has.

    python -m benchmarks.rafl.utilisation --output benchmarks/rafl/utilisation.json

With `--own` it is what federated runs of RaFL do: its exact search for the most parameters, on the ResNet of run.py,
under budgets of training memory alone and of payload alone.

    python -m benchmarks.rafl.utilisation --own --output benchmarks/rafl/utilisation-own.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rafl.run import STUDY, SUPERNETS_FAMILY
from wildflower.devices.budget import Budget
from wildflower.launch.experiment_file import resolve
from wildflower.models.architecture import Architecture
from wildflower.models.cost import cost
from wildflower.models.elastic import ElasticSpace
from wildflower.models.family import make_family
from wildflower.models.space import Space
from wildflower.strategies.evolution import EvolutionSearch
from wildflower.strategies.rafl import RaFLParams
from wildflower.strategies.search import ExactSearch

FAMILIES = ("ofa-resnet50", "mobilenet-v2", "mobilenet-v3")
RESOURCES = {"memory": "peak_training_memory_bytes", "payload": "payload_bytes"}
PAPER = {"ofa-resnet50": "91 to 93 %", "mobilenet-v2": "99 % (1.15 of 1.2: 96 %)", "mobilenet-v3": "91 %"}


def measure(name: str, *, side: int, devices: int, seed: int, population: int, generations: int) -> dict[str, Any]:
    """Search for every device, and return the figures of one row."""
    family = make_family({"name": name, "input_shape": [3, side, side], "halvings": 5})
    space = ElasticSpace.of(family)
    search = EvolutionSearch(space, batch_size=32, optimizer="sgd", population=population, generations=generations)
    least = search.prices.macs(space.smallest_picks())
    most = search.prices.macs([len(options) - 1 for options in space.options])
    budgets = np.random.default_rng([seed, 1]).integers(least, most + 1, devices)
    started = time.perf_counter()
    used = []
    for device, budget in enumerate(budgets):
        rng = np.random.default_rng([seed, 2, device])
        # Memory and links without bounds: the paper's table is about multiplications alone.
        found = search.find(Budget(2**60), rng, max_macs=int(budget))
        assert found is not None
        # Counted from the architecture itself, not from what the search adds up.
        used.append(family.inference_macs(found))
    seconds = time.perf_counter() - started
    shares = np.array(used) / budgets
    return {
        "family": name,
        "input_shape": [3, side, side],
        "devices": devices,
        "seed": seed,
        "population": population,
        "generations": generations,
        "smallest_macs": least,
        "largest_macs": most,
        "budgets_macs": int(budgets.sum()),
        "used_macs": int(sum(used)),
        "utilisation": float(sum(used) / budgets.sum()),
        "lowest_device": float(shares.min()),
        "uniform_utilisation": float(devices * budgets.min() / budgets.sum()),
        "seconds_per_device": seconds / devices,
    }


def measure_own(resource: str, *, devices: int, seed: int) -> dict[str, Any]:
    """The figures of RaFL's own search under budgets of one resource, in bytes, and without bounds of the other."""
    family = make_family({**SUPERNETS_FAMILY, "input_shape": [1, 28, 28], "classes": 10})
    params = RaFLParams()
    space = Space.of(family, params.shares, None)
    config = resolve(STUDY.experiment, []).config
    prices = {"batch_size": config.batch_size, "optimizer": config.optimizer}

    def need(architecture: Architecture) -> int:
        """Counted from the architecture itself, not from what the search adds up."""
        value: int = getattr(cost(family, architecture, **prices), RESOURCES[resource])
        return value

    least, most = need(space.smallest()), need(space.largest())
    budgets = np.random.default_rng([seed, 1]).integers(least, most + 1, devices)
    started = time.perf_counter()
    search = ExactSearch(space, **prices, tolerance=0.0)
    used = []
    for device, value in enumerate(budgets):
        budget = Budget(int(value)) if resource == "memory" else Budget(2**60, int(value), int(value))
        found = search.find(budget, np.random.default_rng([seed, 2, device]))
        assert found is not None
        used.append(need(found))
    seconds = time.perf_counter() - started
    shares = np.array(used) / budgets
    return {
        "family": family.name,
        "resource": resource,
        "devices": devices,
        "seed": seed,
        "smallest_bytes": least,
        "largest_bytes": most,
        "budgets_bytes": int(budgets.sum()),
        "used_bytes": sum(used),
        "utilisation": float(sum(used) / budgets.sum()),
        "mean_of_devices": float(shares.mean()),
        "lowest_device": float(shares.min()),
        "uniform_utilisation": float(devices * budgets.min() / budgets.sum()),
        "seconds_per_device": seconds / devices,
    }


def table_own(rows: list[dict[str, Any]]) -> str:
    """The rows of RaFL's own search in Markdown."""
    heads = ("budgets of", "budgets", "used", "utilisation", "mean of devices", "worst device", "one model for all")
    lines = [f"| {' | '.join(heads)} | s per device |", "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row['resource']} | {row['budgets_bytes'] / 1e6:,.0f} MB | {row['used_bytes'] / 1e6:,.0f} MB | "
            f"{row['utilisation']:.1%} | {row['mean_of_devices']:.1%} | {row['lowest_device']:.1%} | "
            f"{row['uniform_utilisation']:.1%} | {row['seconds_per_device']:.2f} |"
        )
    return "\n".join(lines)


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [
        "| family | budgets | used | utilisation | worst device | one model for all | paper's search | s per device |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| `{row['family']}` | {row['budgets_macs'] / 1e9:.2f} GMAC | {row['used_macs'] / 1e9:.2f} GMAC | "
            f"{row['utilisation']:.1%} | {row['lowest_device']:.1%} | {row['uniform_utilisation']:.1%} | "
            f"{PAPER[row['family']]} | {row['seconds_per_device']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print the table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--side", type=int, default=32, help="of the images, in pixels")
    parser.add_argument("--population", type=int, default=30)
    parser.add_argument("--generations", type=int, default=5)
    parser.add_argument("--own", action="store_true", help="RaFL's exact search under memory and payload")
    parser.add_argument("--output", type=Path, help="JSON file of the figures")
    given = parser.parse_args()
    rows = []
    for resource in RESOURCES if given.own else ():
        rows.append(measure_own(resource, devices=given.devices, seed=given.seed))
        print(table_own(rows), flush=True)
    for name in () if given.own else FAMILIES:
        sizes = {key: getattr(given, key) for key in ("side", "devices", "seed", "population", "generations")}
        rows.append(measure(name, **sizes))
        print(table(rows), flush=True)
    if given.output:
        given.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
