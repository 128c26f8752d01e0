"""RaFL against methods with one uniform model on label-skewed images; resumable, one run after the other.

python -m benchmarks.rafl.run                                         # runs what results.json lacks
python -m benchmarks.rafl.run --only "rafl a" --alphas 0.5 --seeds 1  # some of it
python -m benchmarks.rafl.run --table                                 # the table in README.md alone
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import server_app.app
from benchmarks.rafl.public import pretrained, write_digits
from benchmarks.tables import markdown, write_between
from client_app.app import app as client
from server_app.config import RunConfig
from tests.grid import InProcessGrid

RESULTS, README = (Path(__file__).with_name(name) for name in ("results.json", "README.md"))
RUNS = Path(__file__).parents[2] / "runs" / "rafl"  # where the pretrained supernets lie
SEEDS = (1, 2, 3)
ALPHAS = (0.5, 0.1)
TARGET = 0.7  # accuracy whose price in bytes is compared
COMMON: dict[str, Any] = {
    "task": "fashion-mnist",
    "partition": "dirichlet",
    "devices": 100,
    "devices-per-round": 10,
    "rounds": 40,
    "local-steps": 10,
    "batch-size": 32,
    "optimizer": "sgd",
    "learning-rate": 0.1,
    "momentum": 0.0,
    "weight-decay": 0.0,
    "workers": 1,
    "family": "resnet18",
    "family-arguments": "first_channels = 8",
    "evaluate-every": 5,
    "evaluate-tiers": False,
    "personal-every": 40,
    "transfer-seconds": 1.0,
    "test-fraction": 0.1,
}
# The public data are digits (public.py), which the server holds without labels.
PUBLIC: dict[str, Any] = {"public-task": "npz", "ensemble.steps": 100, "ensemble.batch-size": 32}
# A supernet that was trained on the digits, with their labels; its classifier is drawn anew.
PRETRAINED: dict[str, Any] = {"initial-names": "'head.classifier' = false"}
# As RaFL makes it: its supernet and the network of the others have the same tensors.
SUPERNET: dict[str, Any] = {"name": "resnet18", "first_channels": 8, "norm": "batch", "scaler": False}
# MobileNetV3 with the shortest of its stages and kernels of 3x3, of 2,498,202 parameters. It halves the image five
# times, as the networks do whose multiplications the paper counts. Parcels are about fifteen times as large, and may
# travel ten times as long.
MOBILENET: dict[str, Any] = {
    "family": "mobilenet-v3",
    "family-arguments": "kernel_sizes = [3], depths = [2], expand_ratios = [3, 4], halvings = 5",
    "transfer-seconds": 10.0,
}
# Methods with one uniform model train it on every device, whatever its budget.
METHODS: dict[str, dict[str, Any]] = {
    "rafl a": {"strategy": "rafl"},
    # Ours: devices draw the first weights of their models, which are random in any case, and never receive any.
    "rafl a, drawn": {"strategy": "rafl", "rafl.first": "drawn"},
    "rafl b": {"strategy": "rafl", "rafl.fusion": "ensemble"} | PUBLIC,
    "rafl c": {"strategy": "rafl"} | PRETRAINED,
    "fedavg": {"strategy": "fedavg"},
    "fedavg, pretrained": {"strategy": "fedavg"} | PRETRAINED,
    "fedprox": {"strategy": "fedprox", "fedprox.mu": 0.01},
    "fednova": {"strategy": "fednova"},
    "scaffold": {"strategy": "scaffold"},
    "feddf": {"strategy": "feddf"} | PUBLIC,
    "spatl": {"strategy": "spatl"},
    # Ours: values travel as int8, which every method can.
    "rafl a, drawn, int8": {"strategy": "rafl", "rafl.first": "drawn", "wire": "int8"},
    "fedavg, int8": {"strategy": "fedavg", "wire": "int8"},
    "rafl a, MobileNetV3": {"strategy": "rafl"} | MOBILENET,
    "rafl a, drawn, MobileNetV3": {"strategy": "rafl", "rafl.first": "drawn"} | MOBILENET,
    "fedavg, MobileNetV3": {"strategy": "fedavg"} | MOBILENET,
}
# Links bound what a device may get: parcels may take a second one way.
FLEET = """
[[group]]
name = "slow"
share = 0.5
memory = "{memory}"
link = { uniform = ["1 Mbit/s", "2.5 Mbit/s"] }

[[group]]
name = "fast"
share = 0.5
memory = "{memory}"
link = { uniform = ["2.5 Mbit/s", "8 Mbit/s"] }
"""
MEMORY = {"resnet18": "40 MB", "mobilenet-v3": "100 MB"}
Figures = dict[str, Any]


def run(method: str, alpha: float, seed: int) -> Figures:
    """One run: accuracy, bytes and simulated hours up to every evaluation, the mean use of budgets, and the last scores
    of what devices hold.
    """
    settings = COMMON | METHODS[method]
    memory = MEMORY[settings["family"]]
    digits: dict[str, float] | None = None
    with tempfile.TemporaryDirectory() as folder:
        fleet = Path(folder) / "fleet.toml"
        fleet.write_text(FLEET.replace("{memory}", memory))
        own = {"fleet": str(fleet), "alpha": alpha, "seed": seed, "output-dir": folder, "run-name": "run"}
        if "public-task" in settings:
            own["public-data-dir"] = str(write_digits(Path(folder) / "digits"))
        if "initial-names" in settings:
            file, digits = pretrained(RUNS, SUPERNET, seed)
            own["initial-weights"] = str(file)
        run_dir = server_app.app.run(InProcessGrid(client, 1), RunConfig.from_run_config(settings | own))
        records = [json.loads(line) for line in (run_dir / "rounds.jsonl").read_text().splitlines()]
    bytes_so_far, rows = 0, []
    for record in records:
        bytes_so_far += record["bytes_down"] + record["bytes_up"]
        if record["score"] is not None:
            rows.append([record["round"], record["score"], bytes_so_far, record["simulated_seconds"] / 3600])
    used = [record["bandwidth_utilisation"] for record in records if record["bandwidth_utilisation"]]
    return {
        "rounds": rows,
        "bandwidth_utilisation": mean(used) if used else None,
        "personal_score": records[-1]["personal_score"],
        **({"accuracy_on_digits": digits} if digits else {}),
    }


def bytes_to(rows: list[list[float]], target: float) -> float | None:
    """Bytes until an accuracy is reached; None where it never is."""
    return next((row[2] for row in rows if row[1] >= target), None)


def table(results: dict[str, Figures]) -> str:
    """Per alpha and method: accuracy early and at the end, bytes in all and to the target, simulated minutes, use of
    links, and what devices' own models score on their own test examples.
    """
    heads = ["alpha", "method", "seeds", "accuracy after round 5", "accuracy, mean of the last fifth", "MB in all"]
    heads += [f"MB to {TARGET:.0%}", "simulated minutes", "link budget used", "personal accuracy"]
    rows = []
    for alpha in ALPHAS:
        for method in METHODS:
            runs = [results[key] for seed in SEEDS if (key := f"{method} {alpha} {seed}") in results]
            if not runs:
                continue
            last = mean(mean(row[1] for row in r["rounds"][-max(1, len(r["rounds"]) // 5) :]) for r in runs)
            to_target = [bytes_to(r["rounds"], TARGET) for r in runs]
            reached = [value for value in to_target if value is not None]
            price = f"{mean(reached) / 1e6:.0f}" if len(reached) == len(runs) else f"{len(reached)} of {len(runs)}"
            used = [r["bandwidth_utilisation"] for r in runs if r["bandwidth_utilisation"]]
            own = [r["personal_score"] for r in runs if r["personal_score"] is not None]
            cells = [str(alpha), method, str(len(runs)), f"{100 * mean(r['rounds'][0][1] for r in runs):.1f}"]
            cells += [f"{100 * last:.1f}", f"{mean(r['rounds'][-1][2] for r in runs) / 1e6:.0f}", price]
            cells += [f"{60 * mean(r['rounds'][-1][3] for r in runs):.1f}", f"{mean(used):.0%}" if used else ""]
            rows.append([*cells, f"{100 * mean(own):.1f}" if own else ""])
    return markdown(heads, rows)


def main() -> None:
    """Do the runs that are missing, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--only", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--alphas", nargs="+", type=float, default=ALPHAS, choices=ALPHAS)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Figures] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for seed in () if arguments.table else arguments.seeds:
        for alpha in arguments.alphas:
            for method in arguments.only:
                key = f"{method} {alpha} {seed}"
                if key not in results:
                    results[key] = run(method, alpha, seed)
                    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(write_between(README, "rafl", table(results)))


if __name__ == "__main__":
    main()
