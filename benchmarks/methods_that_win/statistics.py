"""Who should take batch norm statistics: HeteroFL's scores of one model by the number of devices and of their examples.

The model of one run is scored again and again, with the statistics of other devices each time. What differs between two
draws of as many devices is what the draw alone makes of a score.

    python -m benchmarks.methods_that_win.statistics [--twins cnn3 resnet6] [--seeds 1 2 3]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch

from benchmarks.tables import markdown, write_between
from tests.grid import InProcessGrid
from wildflower.client_app.app import app as client
from wildflower.launch.experiment_file import read_experiment
from wildflower.server_app.app import build
from wildflower.server_app.config import RunConfig

HERE = Path(__file__).parent
RESULTS, README = HERE / "statistics.json", HERE / "README.md"
TWINS, SEEDS = ("cnn3", "resnet6"), (1, 2, 3)
# So many of 100 devices, and the most that each passes of its 600 examples in the mean; 0: all.
COUNTS = ((10, 0), (10, 128), (30, 0), (30, 128), (30, 64), (30, 32), (100, 0))
DRAWS = 5
Scores = dict[str, list[float]]  # "devices, examples" -> delivered score by draw, and "whole ..." the whole model's


def scores_of(twin: str, seed: int) -> Scores:
    """Train HeteroFL in its experiment's setting but for the last round, and score the model with all choices."""
    found: Scores = {}
    with tempfile.TemporaryDirectory() as folder:
        given = read_experiment(HERE / f"{twin}.toml") | {"strategy": "heterofl", "seed": seed, "output-dir": folder}
        config = RunConfig.from_run_config(given | {"run-name": "run", "evaluate-every": given["rounds"]})
        engine, scorer = build(config)
        grid = InProcessGrid(client, 1)
        for number in range(1, config.rounds):  # the last one would be scored
            engine.run_round(grid, number, scorer)
        for devices, examples in COUNTS:
            engine.settings = replace(engine.settings, statistics_devices=devices, statistics_examples=examples)
            count = f"{devices}, {examples}"
            for draw in range(DRAWS if devices < config.devices else 1):
                engine.method.round = config.rounds + draw  # which devices are drawn depends on it
                evaluation = engine.evaluation.evaluate(grid, scorer)
                assert evaluation is not None
                assert evaluation.delivered is not None
                found.setdefault(count, []).append(evaluation.delivered.score)
                found.setdefault(f"whole {count}", []).append(evaluation.score)
    return found


def table(results: dict[str, Scores]) -> str:
    """Per twin, devices and examples: the mean over seeds and draws, and how far draws of one model lie apart."""
    rows = []
    for twin in TWINS:
        runs = [results[key] for seed in SEEDS if (key := f"{twin} {seed}") in results]
        for devices, examples in COUNTS if runs else ():
            count = f"{devices}, {examples}"
            cells = [twin, str(devices), str(examples or "all"), str(len(runs))]
            for name in (count, f"whole {count}"):
                apart = mean(max(run[name]) - min(run[name]) for run in runs)
                cells += [f"{100 * mean(mean(run[name]) for run in runs):.1f}", f"{100 * apart:.1f}"]
            rows.append(cells)
    heads = ["twin", "devices", "examples of each", "seeds", "delivered", "highest minus lowest of five draws"]
    return markdown([*heads, "whole model", "highest minus lowest of five draws"], rows)


def main() -> None:
    """Measure what is missing, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--twins", nargs="+", default=list(TWINS), choices=TWINS)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Scores] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for seed in arguments.seeds:
        for twin in arguments.twins:
            if f"{twin} {seed}" not in results:
                results[f"{twin} {seed}"] = scores_of(twin, seed)
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(write_between(README, "statistics", table(results)))


if __name__ == "__main__":
    main()
