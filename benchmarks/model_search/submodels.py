"""Which sub-model of a trained global model is best, and how often the one that is scored was trained.

    python -m benchmarks.model_search.submodels RUN_FOLDER ... [--inputs 2000]

A run's final accuracy is that of the largest architecture, as in the papers, which few devices can afford. From the
checkpoint of a finished run: accuracy of that one, of the best candidate of the method, and of what the last thirty
devices trained, the mean and the best. Scored without training statistics: a static batch norm takes those of the
batch. Writes submodels.json and the table in README.md.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.model_search.distillation import says
from benchmarks.runs import from_test_set, trained_method
from benchmarks.tables import markdown, write_between
from wildflower.models.architecture import Architecture

HERE = Path(__file__).resolve().parent
FILE = HERE / "submodels.json"
LAST = 30


def measure(run: Path, examples: int) -> dict[str, Any]:
    """The figures of one run."""
    method, _, _ = trained_method(run)
    family = method.family
    inputs, labels = from_test_set(method, examples)
    lines = (json.loads(line) for line in (run / "devices.jsonl").read_text().splitlines())
    trained = [Architecture.from_json(line["architecture"]) for line in lines if line["outcome"] == "trained"]
    known: dict[Architecture, float] = {}

    def accuracy(architecture: Architecture) -> float:
        if architecture not in known:
            found = says(family, method.weights, method.scored_cut(architecture), inputs).argmax(dim=1)
            known[architecture] = float((found == labels).double().mean())
        return known[architecture]

    candidates = [accuracy(architecture) for architecture in method.candidates]
    own = [accuracy(architecture) for architecture in trained[-LAST:]]
    best = max(range(len(candidates)), key=lambda number: candidates[number])
    return {
        "scored": accuracy(method.scored_architecture),
        "trained_the_scored": sum(a == method.scored_architecture for a in trained),
        "trained": len(trained),
        "best_candidate": candidates[best],
        "its_parameters": method.cost(method.candidates[best]).parameters,
        "devices_mean": statistics.mean(own),
        "devices_best": max(own),
    }


def main() -> None:
    """Measure every run, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="none: only the table is written anew")
    parser.add_argument("--inputs", type=int, default=2000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = json.loads(FILE.read_text()) if FILE.exists() else {}
    for run in arguments.runs:
        name = f"{run.resolve().parent.name.removeprefix('model_search_')}, {run.name}"
        results[name] = measure(run, arguments.inputs)
        print(name, results[name], flush=True)
        FILE.write_text(json.dumps(results, indent=1) + "\n")
    heads = [
        "run",
        "scored",
        "trainings of it",
        "best candidate",
        "its parameters",
        "devices' own, mean",
        "best of them",
    ]
    rows = [
        [
            name,
            f"{100 * r['scored']:.1f}",
            f"{r['trained_the_scored']} of {r['trained']}",
            f"{100 * r['best_candidate']:.1f}",
            f"{r['its_parameters']:,}",
            f"{100 * r['devices_mean']:.1f}",
            f"{100 * r['devices_best']:.1f}",
        ]
        for name, r in results.items()
    ]
    print(write_between(HERE / "README.md", "submodels", markdown(heads, rows)))


if __name__ == "__main__":
    main()
