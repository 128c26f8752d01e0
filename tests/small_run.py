"""Small runs for tests: six devices of three widths that share the digits, or one device per node."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message

from tests.grid import InProcessGrid
from wildflower.client_app.app import app as client
from wildflower.messages.orders import Reply
from wildflower.messages.wire import from_records, to_records
from wildflower.rounds.engine import Engine
from wildflower.rounds.evaluation import Scorer
from wildflower.server_app.app import build
from wildflower.server_app.config import RunConfig
from wildflower.strategies import METHODS as ALL_METHODS

FLEET = """
[[group]]
name = "whole"
count = 2
fits_width = 1.0
link = "100 Mbit/s"
speed = 3.0

[[group]]
name = "half"
count = 2
fits_width = 0.5
link = "20 Mbit/s"
speed = 2.0

[[group]]
name = "quarter"
count = 2
fits_width = 0.25
link = "5 Mbit/s"
speed = { uniform = [0.5, 1.0] }
"""

EXITS = {"family": "vgg", "family-arguments": "block_channels = [2, 4, 32], exits = [0, 1, 2]"}
CHOICE = {
    "family": "choice",
    "family-arguments": "members = {large = {name = 'lenet5'}, small = {name = 'lenet5', conv_channels = [6, 3], "
    "hidden = [84]}}",
}
PUBLIC = {"public.task": "digits", "public.examples": 32, "ensemble.steps": 3, "ensemble.batch-size": 8}
# Methods whose defaults do not suit the small run, and variants of some.
_WITH_SETTINGS: dict[str, dict[str, Any]] = {
    "all-large": {"strategy": "fedavg"},
    "all-small": {"strategy": "fedavg", "fedavg.use": "all-small"},
    "exclusive": {"strategy": "fedavg", "fedavg.use": "exclusive"},
    "fedprox": {"strategy": "fedprox", "fedprox.mu": 0.1},
    "heterofl dynamic": {"strategy": "heterofl", "heterofl.dynamic": True},
    "hypemefed": {
        "strategy": "hypemefed",
        "hypemefed.epochs": 1,
        "hypemefed.hidden": 8,
        "hypemefed.guess": "change",
    }
    | EXITS,
    "recipfl": {
        "strategy": "recipfl",
        "recipfl.hidden": 8,
        "recipfl.decoder-hidden": 8,
        "recipfl.tile": 8,
        "below-smallest": "smallest",  # which is larger than a quarter of the large one
    }
    | CHOICE,
    "depthfl": {"strategy": "depthfl", "depthfl.ramp-rounds": 4} | EXITS,
    "scalefl": {"strategy": "scalefl", "scalefl.gamma": 1.0} | EXITS,
    "model-search": {
        "strategy": "model-search",
        "model-search.shares": "0.25, 0.5, 1",
        "model-search.searcher": "exact",
        "model-search.masked-loss": True,
        "model-search.norm": "static",
        "distillation.steps": 0,
    },
    "model-search pool": {
        "strategy": "model-search",
        "model-search.shares": "0.25, 0.5, 1",
        "distillation.steps": 1,
    },
    "inclusivefl": {
        "strategy": "inclusivefl",
        "family": "vit-tiny",
        "family-arguments": "hidden = 12, depth = 3, heads = 2, mlp = 16",
        "below-smallest": "smallest",  # one layer of the full width is more than a quarter of all layers
    },
    "rafl ensemble": {"strategy": "rafl", "rafl.fusion": "ensemble"} | PUBLIC,
    "feddf": {"strategy": "feddf"} | PUBLIC,
    "flexifed": {
        "strategy": "flexifed",
        "family": "vit-tiny",
        "family-arguments": "hidden = 12, depth = 3, heads = 2, mlp = 16",
        "below-smallest": "smallest",
    },
    "flexifed max": {
        "strategy": "flexifed",
        "flexifed.sharing": "max",
        "below-smallest": "smallest",
    }
    | CHOICE,
    "lotteryfl": {"strategy": "lotteryfl", "lotteryfl.threshold": 0.0},
    "fednas": {
        "strategy": "fednas",
        "family": "darts",
        "family-arguments": "channels = 2, cells = 3, nodes = 1",
        "below-smallest": "smallest",
    },
    "fjord without distillation": {"strategy": "fjord", "fjord.distillation": False},
}
# All methods: those that stand in `strategies.METHODS` and not above run with their defaults. The rows of fedavg are
# its uses.
METHODS: dict[str, dict[str, Any]] = {
    name: {"strategy": name} for name in ALL_METHODS if name != "fedavg" and name not in _WITH_SETTINGS
} | _WITH_SETTINGS
# Of tests over all methods `make test` takes these: nested widths, one model with a state on devices, exits with
# training on the server, and models of different families.
REPRESENTATIVE = ("heterofl", "scaffold", "hypemefed", "recipfl")


def by_method(names: Iterable[str] = METHODS) -> pytest.MarkDecorator:
    """Parametrize a test with `method`, one of `names`; all but the representative ones are thorough."""
    thorough = pytest.mark.thorough
    params = [pytest.param(name, marks=() if name in REPRESENTATIVE else thorough) for name in names]
    return pytest.mark.parametrize("method", params)


def small_config(folder: Path, **changes: Any) -> RunConfig:
    """A run of six simulated devices, four per round, one step each; `changes` are keys with _ for -."""
    fleet = folder / "six.toml"
    fleet.write_text(FLEET)
    values = {
        "fleet": str(fleet),
        "output-dir": str(folder / "runs"),
        "run-name": "small",
        "devices": 6,
        "devices-per-round": 4,
        "widths": "1, 0.5, 0.25",
        "rounds": 4,
        "evaluate-every": 4,
        "deliver": "largest",
        "local-steps": 1,
        "seed": 3,
        "family": "lenet5",
        "examples-per-device": 24,  # few enough that devices lack classes
    }
    return RunConfig.from_run_config(
        values | {key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}
    )


def started(config: RunConfig) -> tuple[Engine, Scorer]:
    """The engine of a configuration, before round 1, and its scorer."""
    return build(config)


def simulated_grid(nodes: int = 2) -> InProcessGrid:
    """Nodes that carry simulated devices with the real client."""
    return InProcessGrid(client, nodes)


def connected_grid(devices: int, folder: Path) -> InProcessGrid:
    """One device per node, as on hardware: node n carries device n - 1."""
    return InProcessGrid(
        client,
        devices,
        lambda node: {"partition-id": node - 1, "num-partitions": devices, "state-dir": str(folder / f"node-{node}")},
    )


def same_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Whether two states hold the same tensors, bit for bit."""
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype
        and first[name].shape == second[name].shape
        and first[name].numpy().tobytes() == second[name].numpy().tobytes()
        for name in first
    )


Change = Callable[[dict[str, Any], list[bytes]], None]


def changed_reply(change: Change) -> Callable[[Message], Message]:
    """A tamper for `InProcessGrid` that edits the JSON and the arrays of a training reply in place."""

    def tamper(message: Message) -> Message:
        reply, arrays = from_records(Reply, message.content)
        value = json.loads(reply.model_dump_json())
        change(value, arrays)
        content = to_records(reply, arrays)
        content["wildflower"] = ConfigRecord({"json": json.dumps(value)})
        message.content = content
        return message

    return tamper


class FakeTime:
    """A clock for `wildflower.rounds.exchange` and the devices of `wildflower.rounds` that only `sleep` moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
