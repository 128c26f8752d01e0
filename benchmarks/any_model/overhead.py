"""What a training step of the interpreted graph takes, against the module's own, in turns in one process.

    python -m benchmarks.any_model.overhead

A step is forward, backward and SGD of one thread; its time is the process's, so that others on the machine do not
count. The ratio is the median over pairs of steps, of which each kind goes first in turn. Writes overhead.json beside
this file, and the table of README.md.
"""

from __future__ import annotations

import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.any_model import zoo
from benchmarks.tables import markdown, write_between
from wildflower.models.family import make_family
from wildflower.models.weights import with_weights

HERE = Path(__file__).parent
MODELS = ("resnet18", "mobilenet_v2", "vit_b_16", "bert", "mlp")
BATCH, PAIRS = 16, 60


def step_of(network: nn.Module, inputs: Tensor, labels: Tensor) -> Callable[[], float]:
    """Return what makes one training step and says its seconds."""
    optimizer = torch.optim.SGD(network.train().parameters(), 0.01)

    def step() -> float:
        begin = time.process_time()
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(_logits(network(inputs)), labels).backward()
        optimizer.step()
        return time.process_time() - begin

    return step


def _logits(answer: Any) -> Tensor:
    found: Tensor = getattr(answer, "logits", answer)
    return found


def measured(model: str) -> dict[str, float]:
    """Return milliseconds of a step of both, and the median ratio."""
    tokens = model in zoo.TEXTS
    shape = (8,) if tokens else (1, 8, 8)
    family = make_family({"name": f"benchmarks.any_model.zoo:{model}", "input_shape": shape, "tokens": tokens})
    torch.manual_seed(0)
    inputs = torch.randint(1, zoo.VOCABULARY, (BATCH, *shape)) if tokens else torch.randn(BATCH, *shape)
    own = getattr(zoo, model)(10)
    program = with_weights(family, family.full(), family.initial())
    steps = [step_of(network, inputs, torch.arange(BATCH) % 10) for network in (own, program)]
    times: list[list[float]] = [[], []]
    for pair in range(-5, PAIRS):
        for kind in (0, 1) if pair % 2 else (1, 0):
            seconds = steps[kind]()
            if pair >= 0:
                times[kind].append(seconds)
    ratio = statistics.median(graph / module for module, graph in zip(*times, strict=True))
    module_ms, graph_ms = (round(1e3 * statistics.median(of), 3) for of in times)
    return {"module_ms": module_ms, "graph_ms": graph_ms, "ratio": round(ratio, 3)}


def main() -> None:
    """Measure all and write the table."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = {}
    for model in MODELS:
        found[model] = measured(model)
        print(model, found[model], flush=True)
    (HERE / "overhead.json").write_text(json.dumps({"torch": torch.__version__, "steps": found}, indent=1) + "\n")
    rows = [[model, f"{f['module_ms']:.1f}", f"{f['graph_ms']:.1f}", f"{f['ratio']:.2f}"] for model, f in found.items()]
    write_between(HERE / "README.md", "overhead", markdown(["network", "module, ms", "graph, ms", "ratio"], rows))


if __name__ == "__main__":
    main()
