"""The surroundings of work on a message: task, family and device of a node, and what a device has kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from wildflower.client_app.context import Workplace
from wildflower.client_app.device_report import gpu_trainer, resting
from wildflower.client_app.kept_state import DeviceState
from wildflower.client_app.limits import Refusal
from wildflower.client_app.side_by_side import Asked
from wildflower.devices.node_config import own_device
from wildflower.devices.probe import probe_machine
from wildflower.devices.state_folder import node_state_dir
from wildflower.messages.delivery import Delivery
from wildflower.messages.error import MessageError
from wildflower.messages.orders import Batch, DataQuestion, EvaluationBatch, KeyBatch, ModelOrder
from wildflower.models.allocator import HEAP_FACTOR, keep_freed_memory, return_freed_memory
from wildflower.models.family import Family, make_family
from wildflower.plugins.raised_as import raised_as
from wildflower.tasks.device_data import UnfitError
from wildflower.tasks.task import Task, TaskSpec, load_task

NodeConfig = Mapping[str, object]
RESTING = "the device takes no part now"


def prepare(batch: Batch | EvaluationBatch, config: NodeConfig) -> tuple[Task, Family, torch.device]:
    """Return the task and family of a batch, kept from one message to the next, and where to compute."""
    if batch.shared_process:
        use_one_core()
    return load_task(task_of(batch, config)), family_of(json.dumps(batch.family)), compute_device()


def use_one_core() -> None:
    """In a simulation, whose workers share the machine: one thread, and freed memory is kept for the next batch."""
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)  # two workers with two threads each on two cores were 4 to 8 times slower
    keep_freed_memory()


def compute_device() -> torch.device:
    """Return the CUDA device of this process, or else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())  # with its number, which memory limits want


def task_of(batch: Batch | EvaluationBatch | DataQuestion | Delivery, config: NodeConfig) -> TaskSpec:
    """Return the task of a message. A node may hold its data elsewhere than the server: `data-dir` in its node config.

    UnfitError where every device has data of its own, and this node does not say where.
    """
    own = config.get("data-dir")
    spec = TaskSpec.from_json({**batch.task, "data_dir": str(Path(str(own)).expanduser())} if own else batch.task)
    if spec.partition == "own" and not spec.device_folders and not own:
        raise UnfitError(
            "its node config has no data-dir, the folder of its own data "
            "(wildflower-node --node-config 'data-dir=\"/home/me/photos\"')"
        )
    return spec


def state_of(device: int, batch: Batch | EvaluationBatch | KeyBatch, config: NodeConfig) -> DeviceState:
    """Return what a device has kept of the run; MessageError if this node carries another device.

    On hardware the node decides where its devices' state lies: `state-dir` in its node config.
    """
    if not batch.shared_process and device != own_device(config):
        raise MessageError(f"this node carries device {own_device(config)}, not {device}")
    if batch.shared_process and batch.state_dir and not config.get("state-dir"):
        return DeviceState(batch.state_dir, batch.run, device)
    return DeviceState(str(node_state_dir(config)), batch.run, device)


def workplace(
    order: ModelOrder,
    batch: Batch | EvaluationBatch,
    config: NodeConfig,
    device: torch.device,
    ask: Callable[[Asked], Any],
) -> Workplace:
    """Return where an order is done: a simulation holds no device to limits, and hardware shares no steps."""
    simulated = batch.shared_process
    return Workplace(
        device,
        available_bytes=None if simulated else _make_room(order),
        board=None if simulated else gpu_trainer(config),
        ask=ask,
        captures=simulated and batch.side_by_side != 1,
    )


@lru_cache(maxsize=8)
def family_of(spec_json: str) -> Family:
    """Return the family of a message, kept for the next ones. Raises MessageError if it is none of this app's."""
    with raised_as(MessageError, "the server's "):
        return make_family(json.loads(spec_json))


def _make_room(order: ModelOrder) -> int:
    """Return the memory that this machine has free; if it is tight, give freed memory back."""
    available_bytes = probe_machine().memory_available_bytes
    if HEAP_FACTOR * order.predicted_memory_bytes > min(order.memory_bytes or available_bytes, available_bytes):
        return_freed_memory()  # slower, but the work then holds no more than was predicted
    return available_bytes


def check_takes_part(config: NodeConfig) -> None:
    """Raise Refusal where the owner of this node lets its device take no part now."""
    if (rest := resting(config)) is not None:
        raise Refusal(f"{RESTING}: {rest.why}")
