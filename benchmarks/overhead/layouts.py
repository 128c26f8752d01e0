"""CPU time of a training step, as it is and with channels-last tensors and fused optimizers, against a plain loop's.

    python -m benchmarks.overhead.layouts

The networks are the families' own, on random images. The plain loop trains the same network with PyTorch's pools, each
behind its ReLU, and PyTorch's optimizers at their defaults. In every turn each variant of a network takes a few steps,
one variant after the other, in one process with one thread, so that whatever else the machine does hits all alike. A
ratio is of the fastest turns: what is slower was disturbed. Moving the batch into the layout is part of the step.
"Fused" sgd is PyTorch's; `adam.fused` is for Adam and AdamW alone.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.machine import cpu_model
from benchmarks.tables import markdown, write_between
from wildflower.client_app.sgd import Sgd
from wildflower.models.family import FAMILIES
from wildflower.models.network import BlockModule
from wildflower.tasks.inputs import channels_last

HERE = Path(__file__).resolve().parent
RESULTS, TABLE = HERE / "layouts.json", HERE / "README.md"
RATE = 0.01
CLASSES = 10
# Family, input shape, batch size, steps per turn.
NETWORKS: list[tuple[str, tuple[int, int, int], int, int]] = [
    ("pfl-cnn", (3, 32, 32), 10, 5),
    ("lenet5", (1, 28, 28), 32, 10),
    ("cnn3", (1, 28, 28), 32, 5),
    ("cnn3", (3, 32, 32), 32, 3),
    ("vgg", (3, 32, 32), 10, 1),
    ("resnet18", (3, 32, 32), 10, 1),
    ("mobilenet-v2", (3, 32, 32), 10, 1),
]
MADE: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "loop, sgd": lambda p: torch.optim.SGD(p, lr=RATE),
    "loop, adam": lambda p: torch.optim.Adam(p, lr=RATE),
    "sgd": lambda p: Sgd([{"params": p, "lr": RATE}], momentum=0.0, weight_decay=0.0),
    "sgd, fused": lambda p: torch.optim.SGD(p, lr=RATE, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=RATE),
    "adam, fused": lambda p: torch.optim.Adam(p, lr=RATE, fused=True),
}
VARIANTS = [
    *(("contiguous", name) for name in MADE),
    *(("channels-last", name) for name in MADE if not name.startswith("loop")),
]


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, last: bool, x: torch.Tensor, y: torch.Tensor) -> None:
    """One step of training."""
    optimizer.zero_grad()
    F.cross_entropy(model(channels_last(x) if last else x), y).backward()
    optimizer.step()


def take_pytorchs_pools(model: nn.Module) -> None:
    """Put PyTorch's own pools into a network, each behind its ReLU, where our networks have it in front."""
    for block in model.modules():
        if not isinstance(block, BlockModule):
            continue
        for place, name in enumerate(block.order):
            if isinstance(pool := block.get_submodule(name), nn.MaxPool2d):
                block.add_module(name, nn.MaxPool2d(pool.kernel_size, pool.stride, pool.padding))
                following = block.order[place + 1 : place + 2]
                if following and isinstance(block.get_submodule(following[0]), nn.ReLU):
                    block.order[place : place + 2] = [*following, name]


def measure(family: str, shape: tuple[int, int, int], batch_size: int, count: int, turns: int) -> dict[str, float]:
    """Seconds of CPU per step of each variant, of its fastest turn."""
    made = FAMILIES[family](input_shape=shape, classes=CLASSES)  # type: ignore[call-arg]
    x, y = torch.randn(batch_size, *shape), torch.randint(0, CLASSES, (batch_size,))
    found: dict[str, float] = {}
    trained: dict[str, tuple[nn.Module, torch.optim.Optimizer, bool]] = {}
    for layout, name in VARIANTS:
        model = made.build(made.full())
        model.load_state_dict(made.initial())
        if name.startswith("loop"):
            take_pytorchs_pools(model)
        optimizer = MADE[name](list(model.parameters()))
        trained[f"{layout}, {name}"] = model.train(), optimizer, layout == "channels-last"
    for turn in range(turns + 1):
        for name, (model, optimizer, last) in trained.items():
            started = time.process_time()
            for _ in range(count):
                steps(model, optimizer, last, x, y)
            seconds = (time.process_time() - started) / count
            if turn:  # the first one warms up
                found[name] = min(seconds, found.get(name, seconds))
    return found


def table(networks: list[dict[str, Any]]) -> str:
    """Milliseconds of a plain loop's step, and what the others take of it."""
    heads = ["network", "optimizer", "a plain loop's step, ms", "as it is", "fused", "channels-last", "both"]
    rows = []
    for network in networks:
        for name in ("sgd", "adam"):
            found = network["seconds"]
            plain = found[f"contiguous, loop, {name}"]
            kinds = (name, f"{name}, fused")
            others = [f"{layout}, {kind}" for layout in ("contiguous", "channels-last") for kind in kinds]
            rows.append([network["name"], name, f"{1e3 * plain:.2f}", *(f"{found[key] / plain:.2f}" for key in others)])
    return markdown(heads, rows)


def main(turns: int) -> None:
    """Measure all networks, and write what is found after each."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    networks: list[dict[str, Any]] = []
    for family, shape, batch_size, count in NETWORKS:
        name = f"{family}, {'x'.join(map(str, shape))}, batches of {batch_size}"
        networks.append({"name": name, "seconds": measure(family, shape, batch_size, count, turns)})
        print(name, flush=True)
        write(networks, turns)


def write(networks: list[dict[str, Any]], turns: int) -> None:
    """layouts.json and the table, of the networks so far."""
    machine = {"cpu": cpu_model(), "torch": torch.__version__, "turns": turns, "load average": os.getloadavg()[0]}
    RESULTS.write_text(json.dumps({"machine": machine, "networks": networks}, indent=1) + "\n")
    what = f"one core of {machine['cpu']}, torch {machine['torch']}; load average at the end {os.getloadavg()[0]:.0f}"
    write_between(TABLE, "layouts", f"{table(networks)}\n\nThe fastest of {turns} turns; {what}.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10)
    main(parser.parse_args().turns)
