"""How much of the devices' budgets searched sub-networks use: Table 3 of RaFL with our search.

Each of 100 devices may spend a number of multiplications on one example, drawn uniformly between those of the smallest
and of the largest sub-network. Utilisation is the sum of what the found sub-networks need by the sum of the budgets.
Beside the search stands what the paper compares with, the same model for everybody. The weakest device must be able to
run it, so that at best it needs as much as that device has.

    python -m benchmarks.rafl.utilisation --output benchmarks/rafl/utilisation.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from devices.budget import Budget
from models.cost import inference_macs
from models.elastic import ElasticSpace
from models.family import make_family
from strategies.evolution import EvolutionParams, EvolutionSearch

FAMILIES = ("ofa-resnet50", "mobilenet-v2", "mobilenet-v3")
PAPER = {"ofa-resnet50": "91 to 93 %", "mobilenet-v2": "99 % (1.15 of 1.2: 96 %)", "mobilenet-v3": "91 %"}


def measure(name: str, *, shape: tuple[int, ...], devices: int, seed: int, params: EvolutionParams) -> dict[str, Any]:
    """Search for every device, and return the figures of one row."""
    family = make_family({"name": name, "input_shape": list(shape), "halvings": 5})
    space = ElasticSpace.of(family)
    search = EvolutionSearch(space, batch_size=32, optimizer="sgd", params=params)
    least = search.prices.macs(space.smallest_picks())
    most = search.prices.macs([len(options) - 1 for options in space.options])
    budgets = np.random.default_rng([seed, 1]).integers(least, most + 1, devices)
    started = time.perf_counter()
    used = []
    for device, budget in enumerate(budgets):
        rng = np.random.default_rng([seed, 2, device])
        # Memory and links without bounds: the paper's table is about multiplications alone.
        found = search.find(Budget(2**60, None, None), rng, max_macs=int(budget))
        assert found is not None
        # Counted from the architecture itself, not from what the search adds up.
        used.append(inference_macs(family, found))
    seconds = time.perf_counter() - started
    shares = np.array(used) / budgets
    return {
        "family": name,
        "input_shape": list(shape),
        "devices": devices,
        "seed": seed,
        "population": params.population,
        "generations": params.generations,
        "smallest_macs": least,
        "largest_macs": most,
        "budgets_macs": int(budgets.sum()),
        "used_macs": int(sum(used)),
        "utilisation": float(sum(used) / budgets.sum()),
        "lowest_device": float(shares.min()),
        "uniform_utilisation": float(devices * budgets.min() / budgets.sum()),
        "seconds_per_device": seconds / devices,
    }


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
    parser.add_argument("--output", type=Path, help="JSON file of the figures")
    given = parser.parse_args()
    params = EvolutionParams(population=given.population, generations=given.generations)
    rows = []
    for name in FAMILIES:
        shape = (3, given.side, given.side)
        rows.append(measure(name, shape=shape, devices=given.devices, seed=given.seed, params=params))
        print(table(rows), flush=True)
    if given.output:
        given.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
