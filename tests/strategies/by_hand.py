"""A family of one hidden layer, and devices that answer what a test says, for numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from flwr.app import Context, Message
from messages.layouts import returned_layout, sent_layout
from strategies.base import Setup
from strategies.population import Holdings, SimulatedDevices
from strategies.work import RoundSettings
from torch import Tensor

from devices.fleet import Fleet
from messages.orders import Batch, LocalTraining, Reply, Update, WorkOrder
from messages.packing import pack, unpack
from messages.wire import from_records, to_records
from models.architecture import Architecture
from models.base import Family, ImageFamily
from models.cost import cost
from models.layers import Block, Flatten, Linear, Relu
from tests.grid import InProcessGrid

FC, FC_BIAS, CLASSIFIER, CLASSIFIER_BIAS = (
    "all.fc.weight",
    "all.fc.bias",
    "all.classifier.weight",
    "all.classifier.bias",
)


@dataclass(frozen=True)
class OneHidden(ImageFamily):
    """One input, four hidden channels, three classes."""

    name: ClassVar[str] = "one-hidden"

    input_shape: tuple[int, ...] = (1, 1, 1)
    classes: int = 3

    @cached_property
    def groups(self) -> dict[str, int]:
        return {"hidden": 4}

    def blocks(self, arch: Architecture) -> list[Block]:
        hidden = self.channels(arch)["hidden"]
        layers = (Flatten(), Linear("fc", self.inputs, hidden), Relu(), Linear("classifier", hidden, self.outputs))
        return [Block("all", layers)]


FLEET = """
[[group]]
name = "whole"
count = 1
fits_width = 1.0

[[group]]
name = "half"
count = 1
fits_width = 0.5

[[group]]
name = "quarter"
count = 1
fits_width = 0.25
"""


def setup(folder: Path, family: Family, devices_per_round: int = 3, **changes: Any) -> Setup:
    """Three devices, 0 of width 1, 1 of width 1/2, 2 of width 1/4, and one worker."""
    training = LocalTraining(batch_size=2)

    def requirement(width: float) -> tuple[int, int]:
        price = cost(family, family.width(width), batch_size=2, optimizer="sgd")
        return price.peak_training_memory_bytes, price.payload_bytes

    (folder / "three.toml").write_text(FLEET)
    fleet = Fleet.load(folder / "three.toml", requirement=requirement)
    settings = {
        "run": "by hand",
        "task": {},
        "task_name": "none",
        "seed": 1,
        "rounds": 10,
        "devices_per_round": devices_per_round,
        "sampled_devices": 3,
        "training": training,
        "evaluate_every": 10,
    }
    population = SimulatedDevices(fleet, 1, Holdings(lambda device: 4, lambda device: 0, 0), wait_seconds=0.0)
    return Setup(family, population, RoundSettings(**settings | changes), (1.0, 0.5, 0.25))


Answer = Callable[[WorkOrder, dict[str, Tensor]], dict[str, Tensor]]


class Devices:
    """Answers work orders with what `answer` makes of the weights; `received` keeps the weights by device."""

    def __init__(
        self,
        family: Family,
        answer: Answer,
        examples: dict[int, int] | None = None,
        classes: dict[int, list[int]] | None = None,
    ) -> None:
        self.family, self.answer, self.examples, self.classes = family, answer, examples or {}, classes or {}
        self.received: dict[int, dict[str, Tensor]] = {}
        self.orders: dict[int, WorkOrder] = {}
        self.grid = InProcessGrid(self._handle, 1)

    def _handle(self, message: Message, context: Context) -> Message:
        batch, arrays = from_records(Batch, message.content)
        updates, out = [], []
        for order in batch.orders:
            architecture = Architecture.from_json(order.architecture)
            assert order.payload is not None
            weights = unpack(arrays[order.payload], sent_layout(self.family, architecture))
            self.received[order.device], self.orders[order.device] = weights, order
            layout = returned_layout(self.family, architecture, order.objective.kind)
            out.append(pack(self.answer(order, weights), layout))
            updates.append(
                Update(
                    order=order.order,
                    device=order.device,
                    outcome="trained",
                    payload=len(out) - 1,
                    examples=self.examples.get(order.device, 4),
                    present_classes=self.classes.get(order.device, list(range(self.family.classes))),
                )
            )
        return Message(to_records(Reply(run=batch.run, round=batch.round, updates=updates), out), reply_to=message)


def filled(weights: dict[str, Tensor], value: float) -> dict[str, Tensor]:
    """Tensors of the same shapes, all of one value."""
    return {name: torch.full_like(tensor, value) for name, tensor in weights.items()}


def no_scores(model: object) -> tuple[float, float]:
    raise AssertionError("these rounds are not scored")
