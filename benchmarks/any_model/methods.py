"""Which methods take which networks of others: one round of each, and why not where it does not begin.

    python -m benchmarks.any_model.methods [--models NAME ...] [--methods NAME ...]

Networks are those of `zoo.py`, whose packages must be installed. Cells are kept in methods.json beside this file, and
those that are named are made anew; then the table of docs/methods/models.md is written.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.any_model import zoo
from benchmarks.runs import devices_of
from benchmarks.tables import markdown, write_between
from tests.small_run import simulated_grid, small_config
from wildflower.server_app.app import run
from wildflower.strategies import METHODS

HERE = Path(__file__).parent
RECORDED = HERE / "methods.json"
PAGE = HERE.parents[1] / "docs" / "methods" / "models.md"
YES = "yes"
SETTINGS: dict[str, dict[str, Any]] = {
    "feddf": {"public.examples": 40, "ensemble.steps": 4},
    "rafl": {"rafl.searcher": "pool"},
    "hypemefed": {"hypemefed.epochs": 1},
    "model-search": {"distillation.steps": 2},
}
# Over tags, whose classes nobody can mask.
OF_TAGS: dict[str, dict[str, Any]] = {
    "heterofl": {"heterofl.masked-loss": False},
    "wildflower": {"wildflower.masked-loss": False},
    "model-search": {"distillation.steps": 0},
}
Cells = Mapping[str, Mapping[str, str]]  # model -> method -> "yes", or why not


def settings(model: str, method: str) -> dict[str, Any]:
    """Return the keys of a cell's run."""
    made = "TAGGED" if model in zoo.TAGGERS else "SENTENCES" if model in zoo.TEXTS else ""
    task = f"benchmarks.any_model.zoo:{made}" if made else "digits"
    family, arguments = zoo.TAGGERS.get(model, (f"benchmarks.any_model.zoo:{model}", ""))
    keys = {"task": task, "family": family, "family-arguments": arguments, "strategy": method, "rounds": 1}
    public = {"public.task": task} if method == "feddf" else {}
    tags = {"partition": "iid"} | OF_TAGS.get(method, {}) if model in zoo.TAGGERS else {}
    return keys | public | {"evaluate-every": 1, "below-smallest": "smallest"} | SETTINGS.get(method, {}) | tags


def cell(model: str, method: str) -> str:
    """Return "yes" if devices train a model by a method for a round, and else why not."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_dir = run(simulated_grid(), small_config(Path(folder), **settings(model, method)))
            outcomes = {device["outcome"] for device in devices_of(run_dir)} - {"trained"}
        except Exception as error:  # of any kind: it is what the table is about
            return str(error).splitlines()[0]
    return f"a device's outcome is {min(outcomes)}" if outcomes else YES


def page(cells: Cells) -> str:
    """Return the table of methods and models, and the reasons of every "no" behind it."""
    reasons: dict[str, str] = {}
    rows = []
    for method in METHODS:
        row = []
        for found in cells.values():
            why = found[method].replace(f"{method} ", "it ", 1)
            row.append(YES if why == YES else f"no ({reasons.setdefault(why, str(len(reasons) + 1))})")
        rows.append([f"[{method}]({method}.md)", *row])
    told = "\n".join(f"{number}. `{why.replace('`', chr(39))}`" for why, number in reasons.items())
    return markdown(["method", *(f"`{model}`" for model in cells)], rows) + (f"\n\n{told}" if told else "")


def main() -> None:
    """Make cells anew and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=zoo.MODELS, choices=zoo.MODELS, metavar="NAME")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS), metavar="NAME")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {"cells": {}}
    for model in arguments.models:
        cells = recorded["cells"].setdefault(model, {})
        for method in arguments.methods:
            begin = time.process_time()
            cells[method] = cell(model, method)
            print(f"{model}, {method}: {cells[method]} ({time.process_time() - begin:.1f} s)", flush=True)
        known = {
            model: {m: recorded["cells"][model][m] for m in METHODS}
            for model in zoo.MODELS
            if model in recorded["cells"]
        }
        RECORDED.write_text(json.dumps({"torch": torch.__version__, "cells": known}, indent=1) + "\n")
    print(write_between(PAGE, "models", page(known)))


if __name__ == "__main__":
    main()
