"""Predicted against measured peak training memory on a GPU, where PyTorch's allocator counts it.

    python -m benchmarks.memory.gpu

The cases are those of measure.py, one after the other in one process. Measured is what `wildflower.client_app.memory`
measures for a device: the most that was allocated during two steps, above what was allocated before the model was
built. What CUDA and its libraries take for themselves, 900 MB per process, is not in it, as PyTorch's code is not on a
processor. Each case is then trained again under the limit of a work order, which is what was predicted and 64 MiB:
cuDNN, which takes room for faster convolutions where there is some, does without it then.

Writes results-gpu.json and results-gpu.md beside this file.
"""

import gc
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.memory.measure import STEPS, cases, picture, table_rows, train
from wildflower.client_app.memory import MemoryMeter, is_out_of_memory, memory_limit
from wildflower.models.architecture import Architecture
from wildflower.models.cost import cost
from wildflower.models.family import make_family

HERE = Path(__file__).parent


def measure(case: dict, device: torch.device) -> dict:
    """The case with what was predicted and measured."""
    family, arch = make_family(case["family"]), Architecture.from_json(case["architecture"])
    batch_size, optimizer = case["batch_size"], case["optimizer"]
    train(family, family.smallest(), 2, optimizer, STEPS, device)  # takes the libraries' workspaces
    gc.collect()
    meter = MemoryMeter(device)
    training = partial(train, family, arch, batch_size, optimizer, STEPS, device)
    training()
    measured = meter.peak_bytes()
    predicted = cost(family, arch, batch_size=batch_size, optimizer=optimizer).peak_training_memory_bytes
    return {
        **case,
        "predicted_bytes": predicted,
        "measured_bytes": measured,
        "relative_error": round(predicted / measured - 1, 4),
        "trains_within_prediction": trains_within(predicted, training, device),
    }


def trains_within(limit_bytes: int, training: Callable[[], None], device: torch.device) -> bool:
    """Whether a training ends under the limit that a work order of so many bytes has."""
    gc.collect()
    torch.cuda.empty_cache()
    try:
        with memory_limit(limit_bytes, device):
            training()
    except RuntimeError as error:
        if is_out_of_memory(error):
            return False
        raise
    return True


if __name__ == "__main__":
    gpu = torch.device("cuda", torch.cuda.current_device())
    found = []
    for case in cases():
        found.append(measure(case, gpu))
        print(case["family"]["name"], case["size"], f"{found[-1]['relative_error']:+.1%}", flush=True)
    errors = [abs(case["relative_error"]) for case in found]
    report = {
        "command": "python -m benchmarks.memory.gpu",
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(gpu),
        "median_error": round(statistics.median(errors), 4),
        "worst_error": max(errors),
        "cases": found,
    }
    (HERE / "results-gpu.json").write_text(json.dumps(report, indent=1) + "\n")
    head = [
        "# Predicted and measured peak training memory on a GPU",
        "",
        *picture("memory-gpu"),
        f"Command: `{report['command']}`. PyTorch {report['torch']}, {report['gpu']}, {len(found)} cases:",
        f"median error {report['median_error']:.1%}, worst {report['worst_error']:.1%}",
        "(of the absolute values; a positive error is a prediction above the measurement).",
        f"{sum(case['trains_within_prediction'] for case in found)} of them train under the limit of a work order,",
        "which is the prediction and 64 MiB. How it is measured stands at the top of `gpu.py`.",
        "",
    ]
    (HERE / "results-gpu.md").write_text("\n".join([*head, *table_rows(found)]) + "\n")
