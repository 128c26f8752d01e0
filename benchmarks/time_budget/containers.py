"""Four nodes in containers with unequal CPU quotas: rounds with a time budget against rounds that wait for all.

    python -m benchmarks.time_budget.containers          # runs what containers.json lacks
    python -m benchmarks.time_budget.containers --table  # the tables alone

With WILDFLOWER_IMAGES the images of that prefix are used, else they are built, as for the container tests.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from tests.compose.engine import NODES, Deployment, build_images, engine

RESULTS = Path(__file__).with_name("containers.json")
QUOTAS = (0.1, 0.2, 0.4, 0.8)  # of a CPU, by device
MEMORY = "1200m"  # the same for all, and more than any model needs
SETTINGS = (
    "rounds=4",
    "local-steps=60",
    "evaluate-every=1",
    "evaluate-tiers=false",
    "budget.memory-fraction=0.5",
    "budget.transfer-seconds=0",
    "deadline-seconds=900",
    "seed=1",
)
BUDGET_SECONDS = 5
VARIANTS = {
    "waits for all": (),
    f"round-seconds = {BUDGET_SECONDS}": (f"budget.round-seconds={BUDGET_SECONDS}",),
}
WARM_UP_ROUNDS = 1  # in which nodes start their workers and, in the first run, measure their speed


def run_one(deployment: Deployment, name: str, settings: tuple[str, ...]) -> dict[str, Any]:
    """What a run's journal says of its rounds and devices, and what the nodes report."""
    deployment.finish(deployment.start_run(name, *SETTINGS, *settings), name, 3000)
    rounds = [
        {
            "seconds": line["wall_seconds"] - line["server_seconds"].get("evaluate", 0.0),
            "seconds_with_evaluation": line["wall_seconds"],
            "score": line["score"],
        }
        for line in deployment.journal(name)
    ]
    kept = ("round", "device", "parameters", "seconds", "outcome")
    devices = [{key: line[key] for key in kept} for line in deployment.journal(name, "devices")]
    reports = {str(n["device"]): n["report"] for n in json.loads(deployment.read(f"{name}/nodes.json"))}
    speeds = {device: {key: report[key] for key in ("cpus", "flop_per_s")} for device, report in reports.items()}
    load, _, _ = os.getloadavg()
    return {"rounds": rounds, "devices": devices, "nodes": dict(sorted(speeds.items())), "load": round(load, 1)}


def tables(results: dict[str, Any]) -> str:
    """Seconds per round and accuracy after them; then what every device trained, and how long."""
    found = {variant: results[variant] for variant in VARIANTS if variant in results}
    count = max(len(run["rounds"]) for run in found.values())
    heads = [f"round {number}" for number in range(1, count + 1)]
    mean_of = f"mean of rounds {WARM_UP_ROUNDS + 1} to {count}"
    lines = [f"| seconds per round | {' | '.join(heads)} | {mean_of} |", "|---|" + "---|" * (count + 1)]
    for variant, run in found.items():
        seconds = [line["seconds"] for line in run["rounds"]]
        warm = seconds[WARM_UP_ROUNDS:]
        cells = [f"{value:.0f}" for value in [*seconds, sum(warm) / len(warm)]]
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    lines += ["", f"| accuracy, and seconds since the start | {' | '.join(heads)} |", "|---|" + "---|" * count]
    for variant, run in found.items():
        cells, since = [], 0.0
        for line in run["rounds"]:
            since += line["seconds"]
            cells.append(f"{100 * line['score']:.1f} %, {since:.0f} s")
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    heads = [f"{quota:g} of a CPU" for quota in QUOTAS]
    lines += ["", f"| parameters, seconds of training | {' | '.join(heads)} |", "|---|" + "---|" * len(QUOTAS)]
    for variant, run in found.items():
        cells = []
        for device in range(len(QUOTAS)):
            own = [d for d in run["devices"] if d["device"] == device and d["round"] > WARM_UP_ROUNDS]
            trained = [d for d in own if d["outcome"] == "trained"]
            if trained:
                mean = sum(d["seconds"] for d in trained) / len(trained)
                cells.append(f"{trained[-1]['parameters']:,}, {mean:.0f} s, {len(trained)} of {len(own)} trained")
            else:
                cells.append(f"none of {len(own)} trained")
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Do the runs that are missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    missing = [variant for variant in VARIANTS if variant not in results]
    if missing and not arguments.table:
        other = {
            node: {"cpus": quota, "mem_limit": MEMORY, "memswap_limit": MEMORY}
            for node, quota in zip(NODES, QUOTAS, strict=True)
        }
        with tempfile.TemporaryDirectory() as folder, engine(Path(folder)):
            deployment = Deployment(Path(folder), build_images(Path(folder)), other)
            try:
                deployment.up(600)
                for variant in missing:
                    results[variant] = run_one(deployment, f"run-{list(VARIANTS).index(variant)}", VARIANTS[variant])
                    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            finally:
                deployment.down()
    print(tables(results))


if __name__ == "__main__":
    main()
