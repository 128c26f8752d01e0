"""Rounds with a time budget against rounds that wait, on devices of unequal speeds; resumable, one run after the other.

python -m benchmarks.time_budget.run          # runs what results.json lacks
python -m benchmarks.time_budget.run --table  # the tables alone
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import server_app.app
from benchmarks.runs import rounds_of
from client_app.app import app as client
from server_app.config import RunConfig
from server_app.journal import read_devices
from tests.grid import InProcessGrid

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
SEEDS = (1, 2)
COMMON: dict[str, Any] = {
    "fleet": str(HERE / "fleet.toml"),
    "partition": "dirichlet",
    "alpha": 0.5,
    "learning-rate": 0.02,
    "momentum": 0.0,
    "rounds": 30,
    "evaluate-every": 1,
    "evaluate-tiers": False,
    # As many as a round has devices, and all that they hold, which was the default when the rows were recorded.
    "statistics-devices": 10,
    "statistics-examples": 0,
    "strategy": "heterofl",
    "workers": 1,
}
# "deadline" is what there was before: devices train the whole model, and who is late is dropped.
VARIANTS: dict[str, dict[str, Any]] = {
    "waits for all": {},
    "deadline-seconds = 3": {"deadline-seconds": 3.0},
    "round-seconds = 3": {"round-seconds": 3.0},
}
MOMENTS = (30, 60, 90, 200, 400)  # simulated seconds at which accuracies are compared


def run_one(variant: str, seed: int) -> dict[str, Any]:
    """Simulated seconds and accuracy of every evaluation, and what the tiers trained."""
    with tempfile.TemporaryDirectory() as folder:
        own = {"seed": seed, "output-dir": folder, "run-name": "run"}
        run_dir = server_app.app.run(
            InProcessGrid(client, 1), RunConfig.from_run_config(COMMON | VARIANTS[variant] | own)
        )
        lines = rounds_of(run_dir)
        devices = list(read_devices(run_dir))
    tiers = {
        tier: [round(mean(d.parameters or 0 for d in of)), sum(d.outcome == "trained" for d in of), len(of)]
        for tier in sorted({d.tier for d in devices if d.tier})
        if (of := [d for d in devices if d.tier == tier])
    }
    curve = [[round(line["simulated_seconds"], 3), line["score"]] for line in lines if line["score"] is not None]
    return {"curve": curve, "tiers": tiers, "rounds": len(lines)}


def at(curve: Sequence[Sequence[float]], seconds: float) -> float | None:
    """The accuracy of the last evaluation by a moment; None where the run was over long before, or none was made."""
    if curve[-1][0] < seconds:
        return None
    return next((score for when, score in reversed(curve) if when <= seconds), None)


def tables(results: dict[str, Any]) -> str:
    """Time per round and accuracy over simulated time; then what every tier trained. Means over the seeds."""
    moments = " | ".join(f"after {seconds} s" for seconds in MOMENTS)
    lines = [
        f"| | seconds per round | {moments} | last, of 30 rounds |",
        "|---|---|" + "---|" * (len(MOMENTS) + 1),
    ]
    found = {variant: [results[k] for s in SEEDS if (k := f"{variant} {s}") in results] for variant in VARIANTS}
    for variant, runs in found.items():
        if runs:
            seconds = mean(run["curve"][-1][0] / run["rounds"] for run in runs)
            scores = [[at(run["curve"], moment) for run in runs] for moment in MOMENTS]
            cells = [f"{100 * mean(s):.1f} %" if None not in s else "" for s in scores]  # type: ignore[type-var]
            last = mean(mean(score for _, score in run["curve"][-3:]) for run in runs)
            lines.append(f"| {variant} | {seconds:.2f} | {' | '.join(cells)} | {100 * last:.1f} % |")
    tiers = next(iter(results.values()))["tiers"]
    lines += ["", f"| | {' | '.join(tiers)} |", "|---|" + "---|" * len(tiers)]
    for variant, runs in found.items():
        if runs:
            cells = [
                f"{mean(run['tiers'][t][0] for run in runs):,.0f} parameters, trained "
                f"{sum(run['tiers'][t][1] for run in runs)} of {sum(run['tiers'][t][2] for run in runs)}"
                for t in tiers
            ]
            lines.append(f"| {variant} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Do the runs that are missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for seed in () if arguments.table else SEEDS:
        for variant in VARIANTS:
            key = f"{variant} {seed}"
            if key not in results:
                results[key] = run_one(variant, seed)
                RESULTS.write_text(json.dumps(results) + "\n")
    print(tables(results))


if __name__ == "__main__":
    main()
