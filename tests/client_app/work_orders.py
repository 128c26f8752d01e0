"""Batches of work orders for tests, as a server would send them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from messages.layouts import returned_layout, sent_layout
from torch import Tensor

from client_app.app import app
from messages.orders import Batch, LocalTraining, Merge, Objective, Reply, WorkOrder
from messages.packing import pack
from messages.wire import from_records, to_records
from models.architecture import Architecture
from models.base import Family
from models.lenet import LeNet5
from strategies.submodel import initial_weights
from tasks.task import Task, TaskSpec, load_task

LENET = LeNet5(input_shape=(1, 8, 8))
SPEC = TaskSpec(
    name="digits", devices=4, seed=1, partition="dirichlet", alpha=0.3, examples_per_device=40, test_fraction=0.1
)


def digits() -> Task:
    return load_task(SPEC)


def cut(family: Family, architecture: Architecture) -> dict[str, Tensor]:
    """First weights of a sub-model."""
    return family.place(architecture).gather(initial_weights(family, 1))


def work_order(device: int = 0, family: Family = LENET, width: float = 0.5, **changes: Any) -> WorkOrder:
    architecture = family.width(width)
    objective = changes.get("objective", Objective())
    values = {
        "order": device,  # unless a test says otherwise, one order per device
        "device": device,
        "tier": "all",
        "architecture": architecture.to_json(),
        "payload": 0,
        "group": 0,
        "digest": returned_layout(family, architecture, objective.kind).digest,
        "objective": objective,
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
        "merge": Merge(),
        "shared_process": True,
        "orders": list(orders),
    }
    return Batch(**values | changes)


@lru_cache
def payload(family: Family = LENET, width: float = 0.5) -> bytes:
    """Packed first weights of a width."""
    architecture = family.width(width)
    return pack(cut(family, architecture), sent_layout(family, architecture))


def message(content: object, arrays: list[bytes], kind: str = "train") -> Message:
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    made = Message(to_records(content, arrays), 1, kind)
    made.metadata.__dict__["_message_id"] = "question"
    return made


def context(**node_config: Any) -> Context:
    return Context(1, 1, {key.replace("_", "-"): value for key, value in node_config.items()}, RecordDict(), {})


def answers(content: Batch, arrays: list[bytes] | None = None, **node_config: Any) -> tuple[Reply, list[bytes]]:
    """What the client replies to a batch."""
    reply = app(message(content, [payload()] if arrays is None else arrays), context(**node_config))
    return from_records(Reply, reply.content)


def close(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first, second, rtol=0, atol=1e-6)
