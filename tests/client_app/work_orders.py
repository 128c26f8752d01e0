"""Batches of work orders for tests, as a server would send them, and the context in which a device does one."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor

from wildflower.client_app.app import app
from wildflower.client_app.context import DeviceContext, Workplace
from wildflower.client_app.kept_state import DeviceState
from wildflower.client_app.order import Done, do_order
from wildflower.messages.encoding import Wire
from wildflower.messages.orders import Batch, LocalTraining, NodeReport, Reply, WorkOrder
from wildflower.messages.packing import pack
from wildflower.messages.tensor_sets import TensorSet, digest
from wildflower.messages.wire import from_records, to_records
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.lenet import LeNet5
from wildflower.models.network import Network
from wildflower.strategies.method import ClientStep, Training, client_step_of
from wildflower.strategies.submodel import initial_weights
from wildflower.tasks.task import Task, TaskSpec, load_task

CPU = torch.device("cpu")
LENET = LeNet5(input_shape=(1, 8, 8))
SPEC = TaskSpec(
    name="digits", devices=4, seed=1, partition="dirichlet", alpha=0.3, examples_per_device=40, test_fraction=0.1
)


class Apart(Training):
    """Plain training, whose weights the server wants of each device by themselves."""

    def returned(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        return {"weights": TensorSet.of(family.tensors(architecture))}


def digits() -> Task:
    return load_task(SPEC)


def cut(family: Family, architecture: Architecture) -> dict[str, Tensor]:
    """First weights of a sub-model."""
    return family.place(architecture).gather(initial_weights(family, 1))


def work_order(
    device: int = 0,
    family: Family = LENET,
    width: float = 0.5,
    local: ClientStep = Training(),
    *,
    of: Architecture | None = None,
    **changes: Any,
) -> WorkOrder:
    """An order to train a width, or the architecture `of`; `changes` are fields of it."""
    architecture = of or family.width(width)
    sent, returned = local.sent(family, architecture), local.returned(family, architecture)
    values = {
        "order": device,  # unless a test says otherwise, one order per device
        "device": device,
        "tier": "all",
        "architecture": architecture.to_json(),
        "payloads": {name: index for index, name in enumerate(sent)},
        "group": 0,
        "digest": digest(sent, returned),
        "client_step": local.reference(),
        "seed": 7 + device,
        "memory_bytes": 0,
        "predicted_memory_bytes": 10**6,
    }
    return WorkOrder(**values | changes)


def batch(*orders: WorkOrder, family: Family = LENET, **changes: Any) -> Batch:
    values = {
        "run": "a run",
        "round": 1,
        "task": SPEC.to_json(),
        "family": family.spec(),
        "training": LocalTraining(batch_size=10, learning_rate=0.05),
        "shared_process": True,
        "orders": list(orders),
    }
    return Batch(**values | changes)


@lru_cache
def payload(family: Family = LENET, width: float = 0.5) -> bytes:
    """Packed first weights of a width."""
    return packed(family, family.width(width))


def packed(family: Family, architecture: Architecture) -> bytes:
    """Packed first weights of an architecture."""
    return pack(cut(family, architecture), weights_of(family, architecture).layout)


def weights_of(family: Family, architecture: Architecture) -> TensorSet:
    """The tensor set of all tensors of an architecture."""
    return TensorSet.of(family.tensors(architecture))


def context_of(
    order: WorkOrder,
    how: LocalTraining = LocalTraining(batch_size=10, learning_rate=0.05),
    *,
    family: Family = LENET,
    arrays: list[bytes] | None = None,
    state: DeviceState | None = None,
    available_bytes: int | None = None,
    board: Path | None = None,
    captures: bool = False,
    round_number: int = 1,
    evaluated_round: int | None = None,
    earlier: Network | None = None,
    wire: Wire = "float32",
) -> DeviceContext:
    """The context of an order. Without `arrays` the message brings the first weights of the order's architecture."""
    local = client_step_of(order.client_step)
    if arrays is None:
        architecture = Architecture.from_json(order.architecture)
        arrays = [packed(family, architecture)] if order.payloads else []
    return DeviceContext(
        order,
        local,
        round_number,
        how,
        family,
        digits(),
        arrays,
        state or DeviceState("/nowhere", "no run", order.device),
        Workplace(CPU, available_bytes, board, captures=captures),
        earlier=earlier,
        evaluated_round=evaluated_round,
        wire=wire,
    )


def do(order: WorkOrder, *arguments: Any, **options: Any) -> Done:
    """Do a work order; the arguments are those of `context_of`."""
    return do_order(context_of(order, *arguments, **options))


def message(content: object, arrays: list[bytes], kind: str = "train") -> Message:
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    made = Message(to_records(content, arrays), 1, kind)
    made.metadata.__dict__["_message_id"] = "question"
    return made


def report_query() -> Message:
    """The question which device a node carries, and what it can spend."""
    question = message(NodeReport(device=0, report={}), [], "query")
    question.content = RecordDict()
    return question


def context(**node_config: Any) -> Context:
    return Context(1, 1, {key.replace("_", "-"): value for key, value in node_config.items()}, RecordDict(), {})


def answers(content: Batch, arrays: list[bytes] | None = None, **node_config: Any) -> tuple[Reply, list[bytes]]:
    """What the client replies to a batch."""
    reply = app(message(content, [payload()] if arrays is None else arrays), context(**node_config))
    return from_records(Reply, reply.content)


def close(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first, second, rtol=0, atol=1e-6)
