"""Which methods take which modules that are cut by themselves: one round of each on the digits.

    python -m benchmarks.any_model.methods network:Net ... > matrix.md

Modules are named as in an experiment, and lie in the folder in which this is called, or are installed. A cell says the
first words of the error where a run does not begin.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
import warnings
from pathlib import Path

from tests.small_run import simulated_grid, small_config
from wildflower.plugins.beside import looked_for_beside
from wildflower.server_app.app import run
from wildflower.strategies import METHODS

SETTINGS = {
    "feddf": {"public.task": "digits", "public.examples": 40, "ensemble.steps": 4},
    "rafl": {"rafl.searcher": "pool"},
    "hypemefed": {"hypemefed.epochs": 1},
}
ARGUMENTS = {"torchvision.models": "arguments = {num_classes = 10}"}


def cell(module: str, method: str) -> str:
    """Return "yes" if a round of a method trains a module, and else why not."""
    keys = {"family": module, "strategy": method, "rounds": 1, "evaluate-every": 1, "below-smallest": "smallest"}
    with tempfile.TemporaryDirectory() as folder:
        try:
            run(simulated_grid(), small_config(Path(folder), **keys, **SETTINGS.get(method, {})))
        except Exception as error:  # of any kind: it is what the table is about
            return f"no: {str(error).splitlines()[0][:160]}"
    return "yes"


def main() -> None:
    """Print the table."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    modules = sys.argv[1:]
    print(f"| method | {' | '.join(modules)} |\n|{'---|' * (len(modules) + 1)}")
    with looked_for_beside(Path.cwd()):
        for method in METHODS:
            begin = time.perf_counter()
            cells = [cell(module, method) for module in modules]
            print(f"| `{method}` | {' | '.join(cells)} |", flush=True)
            print(f"{method}: {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
