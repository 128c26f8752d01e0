"""A family of one hidden layer, and devices that answer what a test says, for numbers worked out by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from flwr.app import Context, Message
from torch import Tensor, nn

from tests.grid import InProcessGrid
from wildflower.devices.fleet import Fleet
from wildflower.messages.error import MessageError
from wildflower.messages.orders import Batch, LocalTraining, Reply, SumHeader, Update, WorkOrder
from wildflower.messages.packing import int64_bytes, pack, unpack
from wildflower.messages.sums import WeightedSum, device_weight, flatten, present_mask
from wildflower.messages.tensor_sets import TensorSets, Weights
from wildflower.messages.wire import from_records, to_records
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.block_family import ImageFamily
from wildflower.models.cost import cost
from wildflower.models.layers import Block, Flatten, Linear, Relu
from wildflower.rounds.engine import Engine
from wildflower.rounds.population import Holdings
from wildflower.rounds.simulated_devices import SimulatedDevices
from wildflower.rounds.standard_hooks import standard_hooks
from wildflower.strategies.distillation import Distillation
from wildflower.strategies.method import ClientStep, Method, Setup, client_step_of
from wildflower.strategies.run_settings import RoundSettings
from wildflower.strategies.shared_losses import Loss

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
    """What a method is made of that runs over three devices; `changes` are fields of `RoundSettings`."""
    settings = {
        "run": "by hand",
        "task": {"devices": 3},
        "task_name": "none",
        "seed": 1,
        "rounds": 10,
        "devices_per_round": devices_per_round,
        "sampled_devices": 3,
        "training": LocalTraining(batch_size=2),
        "evaluate_every": 10,
    }
    return Setup(family, RoundSettings(**settings | changes), (1.0, 0.5, 0.25), shared={"distillation": Distillation()})


def engine_of(method: Method, folder: Path) -> Engine:
    """An engine over three devices, 0 of width 1, 1 of width 1/2, 2 of width 1/4, and one worker."""
    family = method.family

    def requirement(width: float) -> tuple[int, int]:
        price = cost(family, family.width(width), batch_size=2, optimizer="sgd")
        return price.peak_training_memory_bytes, price.payload_bytes

    (folder / "three.toml").write_text(FLEET)
    fleet = Fleet(folder / "three.toml", requirement=requirement)
    holdings = Holdings(lambda device: 4, lambda device: 0, 0)
    population = SimulatedDevices(fleet, 1, holdings, wait_seconds=0.0)
    return Engine(method, population, standard_hooks(method.settings, population))


Answer = Callable[[WorkOrder, Any], Any]


class Devices:
    """One worker, whose devices answer work orders with what `answer` makes of the tensor sets that they are sent.

    Where a client step is sent or returns only "weights", `answer` is given or returns these tensors, else the tensor
    sets.

    Args:
        examples: by device, how many it says that it trained on; 4 by default.
        classes: by device, which classes it holds; all by default.
        facts: what a device says beside its tensor sets.

    Attributes:
        received: by device, the tensors or the tensor sets of its newest order.
    """

    def __init__(
        self,
        family: Family,
        answer: Answer,
        examples: dict[int, int] | None = None,
        classes: dict[int, list[int]] | None = None,
        facts: Callable[[WorkOrder], dict[str, list[float]]] = lambda order: {},
    ) -> None:
        self.family, self.answer, self.facts = family, answer, facts
        self.examples, self.classes = examples or {}, classes or {}
        self.received: dict[int, Any] = {}
        self.orders: dict[int, WorkOrder] = {}
        self.grid = InProcessGrid(self._handle, 1)

    def _handle(self, message: Message, context: Context) -> Message:
        batch, arrays = from_records(Batch, message.content)
        updates, out = [], []
        sums: dict[tuple[int, str], tuple[WeightedSum, list[int]]] = {}
        for order in batch.orders:
            local, architecture = client_step_of(order.client_step), Architecture.from_json(order.architecture)
            sent = local.sent(self.family, architecture)
            tensor_sets = {
                name: unpack(arrays[order.payloads[name]], tensor_set.layout) for name, tensor_set in sent.items()
            }
            only_weights = tensor_sets.keys() == {"weights"}
            self.received[order.device] = received = tensor_sets["weights"] if only_weights else tensor_sets
            self.orders[order.device] = order
            answered = self.answer(order, received)
            if local.returned(self.family, architecture).keys() == {"weights"} and "weights" not in answered:
                answered = {"weights": answered}
            try:
                payloads = self._put(order, local, architecture, answered, out, sums)
            except MessageError as error:
                updates.append(Update(order=order.order, device=order.device, outcome=f"refused: {error}"))
                continue
            updates.append(
                Update(
                    order=order.order,
                    device=order.device,
                    outcome="trained",
                    payloads=payloads,
                    examples=self.examples.get(order.device, 4),
                    facts=self.facts(order),
                )
            )
        headers = []
        for (group, name), (total, orders) in sums.items():
            if not orders:
                continue
            by_class = None if total.class_weight is None else total.class_weight.tolist()
            headers.append(
                SumHeader(
                    group=group,
                    tensor_set=name,
                    orders=orders,
                    weight=total.weight,
                    class_weight=by_class,
                    payload=len(out),
                )
            )
            out.append(int64_bytes(total.total))
        reply = Reply(run=batch.run, round=batch.round, updates=updates, sums=headers)
        return Message(to_records(reply, out), reply_to=message)

    def _put(
        self,
        order: WorkOrder,
        local: ClientStep,
        architecture: Architecture,
        tensor_sets: TensorSets,
        out: list[bytes],
        sums: dict[tuple[int, str], tuple[WeightedSum, list[int]]],
    ) -> dict[str, int]:
        """Add the tensor sets of one device up that are merged, and put the others into the message."""
        payloads: dict[str, int] = {}
        for name, tensor_set in local.returned(self.family, architecture).items():
            if tensor_set.merge is None:
                payloads[name] = len(out)
                out.append(pack(tensor_sets[name], tensor_set.layout))
                continue
            classes = self.family.classes if tensor_set.merge.present_classes else None
            total, orders = sums.setdefault((order.group, name), (WeightedSum.zeros(tensor_set.layout, classes), []))
            weight = device_weight(tensor_set.merge, self.examples.get(order.device, 4))
            present = None
            if classes is not None:
                present = present_mask(self.classes.get(order.device, range(classes)), classes, "by hand")
            total.add(flatten(tensor_sets[name], tensor_set.layout), weight, present, tensor_set.class_spans)
            orders.append(order.order)
        return payloads


def filled(weights: Weights, value: float) -> Weights:
    """Tensors of the same shapes, all of one value."""
    return {name: torch.full_like(tensor, value) for name, tensor in weights.items()}


def no_scores(model: object) -> tuple[float, float]:
    raise AssertionError("these rounds are not scored")


# Losses of models whose logits are known


class Logits(nn.Module):
    """Ignores its input: the logits are its parameter, the same for every example."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.values.expand(len(inputs), -1).clone()


class TwoExits(nn.Module):
    """Ignores its input: every exit's logits are a parameter, the same for every example."""

    def __init__(self, shallow: list[float], deep: list[float], between: tuple[list[float], ...] = ()) -> None:
        super().__init__()
        self.shallow = nn.Parameter(torch.tensor(shallow))
        self.deep = nn.Parameter(torch.tensor(deep))
        self.between = between

    def exits(self, inputs: Tensor) -> list[Tensor]:
        middle = [torch.tensor(logits) for logits in self.between]
        exits = (self.shallow, *middle, self.deep)
        return [logits.expand(len(inputs), *logits.shape) for logits in exits]


def task_with(loss: Any, label_kind: str = "classes", sums_examples: bool = True) -> Any:
    """What a client step asks of its task when it makes a loss; all classes are the device's."""
    return SimpleNamespace(loss=loss, label_kind=label_kind, sums_examples=sums_examples, answers=lambda logits: logits)


def a_context(family: Family | None = None, architecture: Architecture | None = None, **changes: Any) -> Any:
    """What a client step asks of its context when it makes a loss; the device holds one example of every class."""
    family = family or OneHidden()
    values = {
        "family": family,
        "architecture": architecture or family.full(),
        "task": task_with(F.cross_entropy),
        "class_counts": torch.ones(family.classes, dtype=torch.int64),
        "device": torch.device("cpu"),
        "chance": random.Random(0),
        "earlier": None,
    }
    return SimpleNamespace(**values | changes)


def loss_of(local: ClientStep, model: Any, **changes: Any) -> Loss:
    """The loss of a client step; `changes` are of the context."""
    return local.loss(a_context(**changes), model)  # type: ignore[attr-defined]
