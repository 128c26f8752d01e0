"""How good and how fast the two searchers are.

    python -m benchmarks.search.run

Three parts: equality of the exact searcher with brute force on spaces that can be enumerated; ResNet-152's spaces of
the paper's settings 4 and 1, each under 1,000 different budgets; and how far the thinned frontier of these large spaces
is from one with more labels, and from an upper bound.
"""

from __future__ import annotations

import itertools
import json
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import cpu_model
from benchmarks.tables import write_between
from wildflower.devices.budget import Budget, budget_of
from wildflower.devices.fleet import Fleet
from wildflower.models import frontier
from wildflower.models.architecture import Architecture
from wildflower.models.cost import FLOAT_BYTES, Cost, _cost, cost
from wildflower.models.family import make_family
from wildflower.models.frontier import BUFFERS, PARAMETERS, Frontier
from wildflower.models.space import Space
from wildflower.strategies.pricing import fits
from wildflower.strategies.search import ExactSearch, PoolSearch

HERE = Path(__file__).resolve().parent
RESULTS, TABLE = HERE / "results.json", HERE / "README.md"
BUDGETS = 1000
TOLERANCE = 0.02  # the method's default
RESNET = {"name": "resnet152", "norm": "static", "activation": "relu6"}  # as the method builds it
BATCH_SIZE, OPTIMIZER = 64, "sgd-momentum"
SHARES = {"setting 4": (0, 1 / 2, 1), "setting 1": (0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)}
MORE_LABELS = {"setting 4": 500_000, "setting 1": 240_000}
MB = 10**6
FLEET = HERE / "fleet.toml"  # of both spaces


def main() -> None:
    """Measure everything; write results.json and the tables in README.md."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {
        "versions": {package: version(package) for package in ("numpy", "torch")}
        | {"python": platform.python_version()},
        "processor": cpu_model(),
        "brute_force": [],
        "resnet152": [],
    }
    for name, space in enumerable_spaces().items():
        for batch_size, optimizer in ((BATCH_SIZE, OPTIMIZER), (4, "adam")):
            results["brute_force"].append(brute_force(name, space, batch_size, optimizer))
            print(results["brute_force"][-1], file=sys.stderr)
    for name, shares in SHARES.items():
        results["resnet152"] += large_space(name, Space.of(make_family(RESNET), shares))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    write_tables(results)


def enumerable_spaces() -> dict[str, Space]:
    """Spaces of at most some 20,000 architectures."""
    deep = make_family(RESNET)
    # Four blocks of stage 3 and its stream may change; of the others there are only first ones, halved.
    free = ("stage3_1", "stage3_2", "stage3_3", "stage3_4", "stage3.stream")
    inside = {group for groups in deep.removable.values() for group in groups}
    fixed = {layer: [0] for layer in deep.removable} | {g: [0.5] for g in deep.groups if g not in inside}
    return {
        "lenet5, shares of setting 1": Space.of(make_family({"name": "lenet5"}), SHARES["setting 1"]),
        "cnn3 with 5x5 kernels, shares of setting 1": Space.of(
            make_family({"name": "cnn3", "kernel": 5}), SHARES["setting 1"]
        ),
        "vgg, shares of setting 4": Space.of(make_family({"name": "vgg"}), SHARES["setting 4"]),
        "resnet18, shares of setting 4": Space.of(make_family({"name": "resnet18"}), SHARES["setting 4"]),
        "part of resnet152": Space.of(
            deep, SHARES["setting 4"], {name: shares for name, shares in fixed.items() if name not in free}
        ),
        "vit-tiny of 6 blocks, shares of setting 4": Space.of(
            make_family({"name": "vit-tiny", "depth": 6}), SHARES["setting 4"]
        ),
        "bert-tiny of 5 blocks, shares of setting 4": Space.of(
            make_family({"name": "bert-tiny", "depth": 5}), SHARES["setting 4"]
        ),
    }


def brute_force(name: str, space: Space, batch_size: int, optimizer: str) -> dict[str, Any]:
    """Ask for the optimum under random budgets, and look for it in the costs of all architectures."""

    def cost_of(arch: Architecture) -> Cost:
        return cost(space.family, arch, batch_size=batch_size, optimizer=optimizer)

    every = itertools.product(*(range(len(options)) for options in space.options))
    costs = [cost_of(space.architecture(picks)) for picks in every if space.keeps_enough(picks)]
    parameters = np.array([c.parameters for c in costs])
    memory = np.array([c.peak_training_memory_bytes for c in costs])
    payload = np.array([c.payload_bytes for c in costs])
    searcher = ExactSearch(space, batch_size, optimizer, TOLERANCE)
    rng = np.random.default_rng(0)
    equal = outside = nothing = 0
    for number in range(BUDGETS):
        if number % 2:  # exactly what some architecture needs, or a byte less
            one = costs[int(rng.integers(len(costs)))]
            less = rng.integers(2, size=2)
            limits = one.peak_training_memory_bytes - int(less[0]), one.payload_bytes - int(less[1])
        else:
            limits = (
                int(rng.uniform(0.95, 1) * rng.uniform(memory.min(), memory.max())),
                int(rng.uniform(0.95, 1) * rng.uniform(payload.min(), payload.max())),
            )
        budget = _budget(*limits)
        fitting = (memory <= limits[0]) & (payload <= limits[1])
        best = int(parameters[fitting].max()) if fitting.any() else None
        equal += searcher.optimum(budget) == best
        found = searcher.find(budget, rng)
        nothing += best is None
        if best is None:
            outside += found is not None
        else:
            found_cost = cost_of(found) if found else None
            outside += found_cost is None or not fits(found_cost, budget) or found_cost.parameters < 0.98 * best
    return {
        "space": name,
        "batch_size": batch_size,
        "optimizer": optimizer,
        "architectures": space.size,
        "budgets": BUDGETS,
        "budgets_below_all": nothing,
        "optimum_equals_brute_force": equal,
        "found_outside_tolerance_or_budget": outside,
        "labels": len(searcher.frontier.parameters),
        "exact": searcher.exact,
    }


def large_space(name: str, space: Space) -> list[dict[str, Any]]:
    """Both searchers under the same budgets, drawn from the whole space's needs, and from the fleet of the setting."""

    def cost_of(arch: Architecture) -> Cost:
        return cost(space.family, arch, batch_size=BATCH_SIZE, optimizer=OPTIMIZER)

    build_seconds, build_cpu_seconds, exact = timed(lambda: ExactSearch(space, BATCH_SIZE, OPTIMIZER, TOLERANCE))
    labels = {"max_labels": MORE_LABELS[name], "thinned_labels": MORE_LABELS[name]}
    more = Frontier(space, batch_size=BATCH_SIZE, optimizer=OPTIMIZER, **labels)
    bound = Bound(space, batch_size=BATCH_SIZE, optimizer=OPTIMIZER, **labels)
    minimum, maximum = cost_of(space.smallest()), cost_of(space.largest())
    payload = (minimum.payload_bytes, maximum.payload_bytes)
    memory = (minimum.peak_training_memory_bytes, maximum.peak_training_memory_bytes)
    rng = np.random.default_rng(1)
    budgets_of = {
        "whole space": [_budget(int(rng.uniform(*memory)), int(rng.uniform(*payload))) for _ in range(BUDGETS)],
        "fleet": budgets_of_fleet(),
    }
    rows = []
    for source, budgets in budgets_of.items():
        pool = PoolSearch(space, cost_of)
        optima = np.array([exact.optimum(budget) or 0 for budget in budgets])
        fitting = optima > 0
        row: dict[str, Any] = {
            "space": name,
            "architectures": float(space.size),
            "budgets": source,
            "payload_range_bytes": ends([budget.both_ways_bytes or 0 for budget in budgets]),
            "memory_range_bytes": ends([budget.memory_bytes for budget in budgets]),
            "build_seconds": build_seconds,
            "build_cpu_seconds": build_cpu_seconds,
            "labels": len(exact.frontier.parameters),
            "thinned": not exact.exact,
            "budgets_below_all": int((~fitting).sum()),
        }
        for searcher_name, searcher in (("exact", exact), ("pool", pool)):
            figures = find_all(searcher, budgets, cost_of)
            share = figures.pop("parameters")[fitting] / optima[fitting]
            row[searcher_name] = figures | {
                "share_of_optimum": {"mean": float(share.mean()), "worst": float(share.min())}
            }
        row["pool"]["pool_size"] = len(pool.pool)
        for reference_name, reference in (("more_labels", more), ("bound", bound)):
            there = np.array([best_of(reference, budget) for budget in budgets])[fitting]
            if reference is bound:  # every parameter travels
                there = np.minimum(there, [(b.both_ways_bytes or 0) // FLOAT_BYTES for b in np.array(budgets)[fitting]])
            share = optima[fitting] / there
            row[reference_name] = {
                "labels": len(reference.parameters),
                "mean": float(share.mean()),
                "worst": float(share.min()),
            }
        print(row, file=sys.stderr)
        rows.append(row)
    return rows


def find_all(
    searcher: ExactSearch | PoolSearch, budgets: list[Budget], cost_of: Callable[[Architecture], Cost]
) -> dict[str, Any]:
    """Find for all budgets in turn; parameters are 0 where nothing was found."""
    rng = np.random.default_rng(2)
    _cost.cache_clear()  # nobody has seen what is drawn now
    seconds, cpu_seconds, found = [], [], []
    for budget in budgets:
        start, start_cpu = time.perf_counter(), time.thread_time()
        found.append(searcher.find(budget, rng))
        cpu_seconds.append(time.thread_time() - start_cpu)
        seconds.append(time.perf_counter() - start)
    costs = [None if arch is None else cost_of(arch) for arch in found]
    for one, budget in zip(costs, budgets, strict=True):
        assert one is None or fits(one, budget)
    used = np.array(
        [
            (one.peak_training_memory_bytes / budget.memory_bytes, one.payload_bytes / budget.both_ways_bytes)
            for one, budget in zip(costs, budgets, strict=True)
            if one is not None and budget.both_ways_bytes
        ]
    )
    return {
        "find_ms": {
            "mean": 1000 * float(np.mean(seconds)),
            "median": 1000 * float(np.median(seconds)),
            "worst": 1000 * max(seconds),
            "cpu_mean": 1000 * float(np.mean(cpu_seconds)),
            "cpu_worst": 1000 * max(cpu_seconds),
        },
        "found": len(used),
        "distinct_architectures": len(set(found) - {None}),
        "binding_resource_used": float(used.max(axis=1).mean()),
        "binding_resource_used_95_percent": float((used.max(axis=1) >= 0.95).mean()),
        "memory_binds": float((used[:, 0] >= used[:, 1]).mean()),
        "parameters": np.array([0 if one is None else one.parameters for one in costs]),
    }


class Bound(Frontier):
    """An upper bound, not architectures: where labels are too many, one takes the best of several in everything."""

    def _thin(self, states: list[np.ndarray], maximum: int) -> list[np.ndarray]:
        return [self._merge(labels, max(1, maximum // len(states))) for labels in states]

    def _merge(self, labels: np.ndarray, maximum: int) -> np.ndarray:
        if labels.shape[1] <= maximum:
            return labels
        self.exact = False
        starts = frontier._ranges(labels[PARAMETERS], maximum)
        merged = np.minimum.reduceat(labels, starts, axis=1)
        merged[PARAMETERS] = np.maximum.reduceat(labels[PARAMETERS], starts)
        # Weights, optimizer state and gradients of the most parameters must not cost more than those of any in the
        # range: what they cost too much is taken off the buffers.
        times = self.frame.copies + self.frame.piling
        entries = np.minimum.reduceat(labels[PARAMETERS] * times + labels[BUFFERS], starts)
        merged[BUFFERS] = entries - times * merged[PARAMETERS]
        return merged


def best_of(labels: Frontier, budget: Budget) -> int:
    """The most parameters of any label that fits."""
    fitting = (labels.memory_bytes <= budget.memory_bytes) & (labels.payload_bytes <= budget.both_ways_bytes)
    return int(labels.parameters[fitting].max(initial=0))


def _budget(memory_bytes: int, payload_bytes: int) -> Budget:
    """Of a device whose links carry as much both ways."""
    return Budget(memory_bytes, payload_bytes, payload_bytes)


def budgets_of_fleet() -> list[Budget]:
    """Of the settings' devices, in ten rounds."""
    fleet = Fleet(FLEET, devices=None, seed=1, requirement=None)
    reports = [fleet.report(number % fleet.size, float(number // fleet.size)) for number in range(BUDGETS)]
    return [budget_of(report, memory_fraction=1.0, transfer_seconds=None, deadline_seconds=None) for report in reports]


def ends(values: list[int]) -> list[int]:
    """The least and the most."""
    return [min(values), max(values)]


def timed(make: Callable[[], ExactSearch]) -> tuple[float, float, ExactSearch]:
    """Seconds, seconds of this process, and what was made."""
    start, start_cpu = time.perf_counter(), time.process_time()
    made = make()
    return time.perf_counter() - start, time.process_time() - start_cpu, made


def add_searcher(line: Callable[[str, Callable[[dict[str, Any]], str]], None], name: str) -> None:
    """The lines of one searcher."""
    line(
        f"`{name}`: ms per find, mean (worst)",
        lambda r: f"{r[name]['find_ms']['mean']:.2f} ({r[name]['find_ms']['worst']:.1f})",
    )
    line(
        f"`{name}`: ms per find of this process, mean (worst)",
        lambda r: f"{r[name]['find_ms']['cpu_mean']:.2f} ({r[name]['find_ms']['cpu_worst']:.1f})",
    )
    line(
        f"`{name}`: parameters / optimum, mean (worst)",
        lambda r: "{mean:.4f} ({worst:.4f})".format(**r[name]["share_of_optimum"]),
    )
    line(f"`{name}`: binding resource used, mean", lambda r: f"{r[name]['binding_resource_used']:.1%}")
    line(
        f"`{name}`: binding resource used at least 95 %",
        lambda r: f"{r[name]['binding_resource_used_95_percent']:.1%}",
    )
    line(f"`{name}`: memory binds", lambda r: f"{r[name]['memory_binds']:.0%}")
    line(f"`{name}`: distinct architectures", lambda r: f"{r[name]['distinct_architectures']:,}")


def write_tables(results: dict[str, Any]) -> None:
    """The tables in README.md, between their marks."""
    brute = [
        "| space | architectures | batch, optimizer | labels | optimum equals brute force | found outside |",
        "|---|---|---|---|---|---|",
    ]
    for row in results["brute_force"]:
        brute.append(
            f"| {row['space']} | {row['architectures']:,} | {row['batch_size']}, {row['optimizer']} "
            f"| {row['labels']:,} | {row['optimum_equals_brute_force']:,} of {row['budgets']:,} "
            f"| {row['found_outside_tolerance_or_budget']} |"
        )
    rows = results["resnet152"]
    large = [
        "| | " + " | ".join(f"{row['space']}, {row['budgets']}" for row in rows) + " |",
        "|---" * (len(rows) + 1) + "|",
    ]

    def line(title: str, value: Callable[[dict[str, Any]], str]) -> None:
        large.append(f"| {title} | " + " | ".join(value(row) for row in rows) + " |")

    line("architectures", lambda r: f"{r['architectures']:.1e}")
    line("payload budgets, MB", lambda r: " to ".join(f"{end / MB:.1f}" for end in r["payload_range_bytes"]))
    line("memory budgets, MB", lambda r: " to ".join(f"{end / MB:,.0f}" for end in r["memory_range_bytes"]))
    line("budgets that nothing fits", lambda r: str(r["budgets_below_all"]))
    line("frontier: seconds (of this process)", lambda r: f"{r['build_seconds']:.1f} ({r['build_cpu_seconds']:.1f})")
    line("frontier: labels", lambda r: f"{r['labels']:,}{', thinned' if r['thinned'] else ''}")
    for name in ("exact", "pool"):
        add_searcher(line, name)
    line(
        "optimum / that of a frontier of more labels, mean (worst)",
        lambda r: "{mean:.5f} ({worst:.5f}), {labels:,} labels".format(**r["more_labels"]),
    )
    line("optimum / upper bound, mean (worst)", lambda r: "{mean:.4f} ({worst:.4f})".format(**r["bound"]))
    versions = ", ".join(f"{package} {number}" for package, number in results["versions"].items())
    large += ["", f"One thread, {results['processor']}, with {versions}."]
    write_between(TABLE, "brute force", "\n".join(brute))
    write_between(TABLE, "resnet152", "\n".join(large))


if __name__ == "__main__":
    main()
