"""Prices of modules that are cut by themselves: memory against fresh processes, and how long 1,000 of them take.

    python -m benchmarks.any_model.prices [--models NAME ...]

Networks are those of `zoo.py`. Each is trained for two steps in three sizes, each in a process of its own that measures
as `benchmarks.memory.measure` does. Then 1,000 random architectures are priced; their time is the process's. What is
named is measured anew. Writes prices.json beside this file, and the table of README.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.any_model import zoo
from benchmarks.memory.measure import run_case
from benchmarks.tables import markdown, write_between
from wildflower.models.cost import cost
from wildflower.models.family import make_family

HERE = Path(__file__).parent
RECORDED = HERE / "prices.json"
ARCHITECTURES = 1000
# With batches of which the whole network takes 50 MB and more, so that the network and not the runtime is measured.
BATCHES = {
    **{"resnet18": 64, "mobilenet_v2": 256, "densenet121": 512, "convnext_tiny": 512, "swin_t": 256},
    **{"mobilenet_v3": 512, "efficientnet_b0": 256, "vit_b_16": 1024, "timm_vit_tiny": 512, "hf_vit": 2048},
    **{"unet": 1024, "lstm": 4096, "bert": 2048, "distilbert": 2048, "gpt2": 2048, "mlp": 65536},
}


def measured(model: str) -> dict[str, Any]:
    """Return a network's prices and measurements in three sizes, and the seconds for 1,000 prices."""
    shape = (8,) if model in zoo.TEXTS else (1, 8, 8)
    name = f"benchmarks.any_model.zoo:{model}"
    family = make_family({"name": name, "input_shape": shape, "tokens": model in zoo.TEXTS})
    drawn = np.random.default_rng(0)
    sizes = {"whole": family.full(), "half": family.width(0.5), "random": family.sample(drawn)}
    case = {"family": family.spec(), "batch_size": BATCHES[model], "optimizer": "sgd-momentum"}
    found = {
        size: run_case({**case, "size": size, "architecture": arch.to_json()}, default_allocator=False)
        for size, arch in sizes.items()
    }
    begin = time.process_time()
    for _ in range(ARCHITECTURES):
        cost(family, family.sample(drawn), batch_size=16, optimizer="sgd-momentum")
    seconds = round(time.process_time() - begin, 1)
    kept = ("predicted_bytes", "measured_bytes", "relative_error")
    return {"sizes": {s: {key: f[key] for key in kept} for s, f in found.items()}, "seconds_for_1000": seconds}


def main() -> None:
    """Measure what is named and write the table of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(BATCHES), choices=list(BATCHES), metavar="NAME")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = json.loads(RECORDED.read_text())["networks"] if RECORDED.exists() else {}
    for model in arguments.models:
        found[model] = measured(model)
        print(model, found[model], flush=True)
        errors = [abs(size["relative_error"]) for of in found.values() for size in of["sizes"].values()]
        overall = {"median_error": round(statistics.median(errors), 4), "worst_error": max(errors)}
        RECORDED.write_text(json.dumps({"torch": torch.__version__, **overall, "networks": found}, indent=1) + "\n")
    sizes = ("whole", "half", "random")
    rows = []
    for model, of in found.items():
        parts = [of["sizes"][size] for size in sizes]
        cells = [f"{part['measured_bytes'] / 1e6:.0f} ({part['relative_error']:+.1%})" for part in parts]
        rows.append([model, *cells, str(of["seconds_for_1000"])])
    heads = ["network", *(f"{size}, MB measured (error)" for size in sizes), "1,000 prices, s"]
    text = f"Median error {overall['median_error']:.1%}, worst {overall['worst_error']:.1%}."
    write_between(HERE / "README.md", "prices", f"{text}\n\n{markdown(heads, rows)}")


if __name__ == "__main__":
    main()
