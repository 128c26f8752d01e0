"""What a device does with a message: trains, scores models, reports. JSON text and packed arrays in, and out again.

On hardware a node carries one device and answers with its weights; in a simulation it carries many, and adds up what
may be added up before it answers. Nothing of Flower in here: on hardware this runs in a process of its own.
"""

from __future__ import annotations

import json
import logging
import time
import traceback
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import torch

from client_app.memory import own_bytes
from client_app.report import device_report, gpu_trainer
from client_app.scoring import score_order
from client_app.state import DeviceState
from client_app.training import Refusal, Trained, train
from devices.probe import probe_machine
from devices.state import node_state_dir
from devices.validation import one_line
from messages.bound import bounded
from messages.error import MessageError
from messages.layouts import class_spans, returned_layout, sent_layout
from messages.orders import (
    Batch,
    EvaluationBatch,
    EvaluationOrder,
    EvaluationReply,
    NodeReport,
    Reply,
    Score,
    SumHeader,
    Update,
    WorkOrder,
    parse,
)
from messages.packing import int64_bytes, pack, pick, unpack
from messages.sums import WeightedSum, device_weight, flatten
from models.allocator import HEAP_FACTOR, keep_freed_memory, return_freed_memory
from models.architecture import Architecture
from models.family import Family, make_family
from models.layers import Network
from tasks.task import Task, TaskSpec, load_task

NodeConfig = Mapping[str, object]
log = logging.getLogger("flwr")  # what Flower's own log is called


def do(kind: str, text: str, arrays: list[bytes], config: NodeConfig) -> tuple[str, list[bytes]]:
    """Answer a message.

    Args:
        kind: "train", "evaluate" or "query".
        text: the message's JSON; empty for a query.
        arrays: its packed arrays.
        config: the node config.

    Raises:
        MessageError: the message is not one of ours.
        ValueError: the node config does not say what it must.
    """
    match kind:
        case "train":
            return _train(parse(Batch, text), arrays, config)
        case "evaluate":
            return _evaluate(parse(EvaluationBatch, text), arrays, config)
        case "query":
            return _report(config)
    raise ValueError(f"no message is called {kind!r}")


def _train(batch: Batch, arrays: list[bytes], config: NodeConfig) -> tuple[str, list[bytes]]:
    """Do the work orders of a batch; one device's failure is told in its update and leaves the others alone."""
    task, family, device = _prepare(batch, config)
    updates: list[Update] = []
    out: list[bytes] = []
    sums: dict[int, tuple[WorkOrder, WeightedSum, list[int]]] = {}
    own_device = None if batch.shared_process else _own_device(config)
    before_bytes = 0 if batch.shared_process else own_bytes()
    models: dict[int, tuple[int, Network]] = {}  # order -> its device and what it trained, of orders that teach later
    for place, order in enumerate(batch.orders):
        started = time.perf_counter()
        try:
            if own_device is not None and order.device != own_device:
                raise MessageError(f"this node carries device {own_device}, not {order.device}")
            data = None if order.payload is None else pick(arrays, order.payload, f"device {order.device}")
            state = DeviceState(_state_dir(batch, config), batch.run, order.device)
            available_bytes = _make_room(order, batch.shared_process)
            trained = train(
                order,
                batch.round,
                batch.training,
                family,
                task,
                data,
                state,
                device,
                available_bytes,
                _teacher(order, models),
                board=_board(batch, config),
            )
            updates.append(_answer(batch, order, family, trained, data, out, sums))
            models[order.order] = (order.device, trained.model)
        except Refusal as refusal:
            updates.append(_no(order, f"refused: {refusal}", started, overrun=refusal.overrun))
        except MessageError as error:
            updates.append(_no(order, f"refused: {error}", started))
        except Exception as error:  # one device's trouble must not take the others' work with it
            log.error("Device %s failed:\n%s", order.device, traceback.format_exc())
            updates.append(_no(order, f"failed: {type(error).__name__}: {error}", started))
        still_to_teach = {later.teacher for later in batch.orders[place + 1 :]}
        models = {number: model for number, model in models.items() if number in still_to_teach}
    headers: list[SumHeader] = []
    for group, (order, total, orders) in sums.items():
        if not orders:  # its only update was refused when it was added
            continue
        headers.append(
            SumHeader(
                group=group,
                orders=orders,
                digest=order.digest,
                weight=total.weight,
                class_weight=None if total.class_weight is None else total.class_weight.tolist(),
                payload=len(out),
            )
        )
        out.append(int64_bytes(total.total))
    if not batch.shared_process:
        # After the work, so that the report is of the device as the next round finds it: without what the work has left
        # in this process, which is about to end.
        traffic_bytes = sum(map(len, arrays)) + sum(map(len, out))
        left_bytes = max(0, own_bytes() - before_bytes) if device.type == "cpu" else 0
        try:
            report = device_report(config, traffic_bytes, left_bytes=left_bytes).to_json()
            updates = [update.model_copy(update={"report": report}) for update in updates]
        except (OSError, ValueError) as error:  # the work is done: the server goes on with the report it has
            log.error("This device's report could not be made: %s", error)
    return Reply(run=batch.run, round=batch.round, updates=updates, sums=headers).model_dump_json(), out


def _teacher(order: WorkOrder, models: Mapping[int, tuple[int, Network]]) -> Network | None:
    """The model that teaches in an order; MessageError where it names none that its device has just trained."""
    if order.teacher is None:
        return None
    device, model = models.get(order.teacher, (None, None))
    if device != order.device:
        raise MessageError(
            f"device {order.device}: order {order.order} is to be taught by order {order.teacher}, which is none that "
            "this device has done before in this message"
        )
    return model


def _answer(
    batch: Batch,
    order: WorkOrder,
    family: Family,
    trained: Trained,
    data: bytes | None,
    out: list[bytes],
    sums: dict[int, tuple[WorkOrder, WeightedSum, list[int]]],
) -> Update:
    """The update of a device that trained: its weights go into a sum, into the message, or stay."""
    architecture = Architecture.from_json(order.architecture)
    layout = returned_layout(family, architecture, order.objective.kind)
    payload: int | None = None
    far = False
    if batch.merge is not None and batch.shared_process and data is not None:
        if order.group not in sums:
            classes = family.classes if batch.merge.present_classes else None
            sums[order.group] = (order, WeightedSum.zeros(layout, classes), [])
        _, total, orders = sums[order.group]
        weight = device_weight(batch.merge, trained.examples)
        present = trained.present if batch.merge.present_classes else None
        returned = trained.returned
        if batch.norm_bound:  # what others can only do before they add, the server does with a single update
            returned, far = bounded(returned, unpack(data, sent_layout(family, architecture)), batch.norm_bound)
        total.add(flatten(returned, layout), weight, present, class_spans(family, architecture, layout))
        orders.append(order.order)
    elif order.payload is not None:
        payload = len(out)
        out.append(pack({name: value.cpu() for name, value in trained.returned.items()}, layout))
    wants_classes = batch.merge is not None and batch.merge.present_classes and payload is not None
    return Update(
        order=order.order,
        device=order.device,
        outcome="trained",
        payload=payload,
        examples=trained.examples,
        loss=trained.loss,
        seconds=trained.seconds,
        measured_memory_bytes=trained.measured_memory_bytes,
        bounded=far,
        present_classes=trained.present.nonzero().flatten().tolist() if wants_classes else None,
        class_counts=trained.class_counts.tolist() if order.asks_class_counts else None,
    )


def _no(order: WorkOrder, outcome: str, started: float, *, overrun: bool = False) -> Update:
    return Update(
        order=order.order,
        device=order.device,
        outcome=one_line(outcome),
        seconds=time.perf_counter() - started,
        overrun=overrun,
    )


def _evaluate(batch: EvaluationBatch, arrays: list[bytes], config: NodeConfig) -> tuple[str, list[bytes]]:
    """Score the models of a batch, each on its device's shard or on the task's test set."""
    task, family, device = _prepare(batch, config)
    scores = [_score(order, batch, arrays, task, family, device, config) for order in batch.orders]
    return EvaluationReply(run=batch.run, round=batch.round, scores=scores).model_dump_json(), []


def _score(
    order: EvaluationOrder,
    batch: EvaluationBatch,
    arrays: list[bytes],
    task: Task,
    family: Family,
    device: torch.device,
    config: NodeConfig,
) -> Score:
    try:
        if not batch.shared_process and order.device != _own_device(config):
            raise MessageError(f"this node carries device {_own_device(config)}, not {order.device}")
        data = None if order.payload is None else pick(arrays, order.payload, f"device {order.device}")
        state = DeviceState(_state_dir(batch, config), batch.run, order.device)
        available_bytes = _make_room(order, batch.shared_process)
        board = _board(batch, config)
        return score_order(order, batch, family, task, data, state, device, available_bytes, board)
    except Exception as error:  # as in training: told, and the others go on
        return Score(device=order.device, error=one_line(f"{type(error).__name__}: {error}"))


def _make_room(order: WorkOrder | EvaluationOrder, shared_process: bool) -> int | None:
    """The memory that this machine has free, None in a simulation; where it is tight, freed memory is given back."""
    if shared_process:
        return None
    available_bytes = probe_machine().memory_available_bytes
    if HEAP_FACTOR * order.predicted_memory_bytes > min(order.memory_bytes or available_bytes, available_bytes):
        return_freed_memory()  # slower, but the work then holds no more than was predicted
    return available_bytes


def _report(config: NodeConfig) -> tuple[str, list[bytes]]:
    """Which device this node carries, and what it can spend now."""
    return NodeReport(device=_own_device(config), report=device_report(config).to_json()).model_dump_json(), []


def preload(kind: str, text: str, config: NodeConfig) -> None:
    """Load the data and family of a message, so that processes forked from this one have them."""
    if kind != "query":
        batch = parse(Batch, text) if kind == "train" else parse(EvaluationBatch, text)
        load_task(_task(batch, config))
        _family(json.dumps(batch.family))


def _prepare(batch: Batch | EvaluationBatch, config: NodeConfig) -> tuple[Task, Family, torch.device]:
    """The task and family of a batch, kept from one message to the next, and where to compute."""
    if batch.shared_process and torch.get_num_threads() != 1:
        torch.set_num_threads(1)  # two workers with two threads each on two cores were 4 to 8 times slower
    if batch.shared_process:
        keep_freed_memory()
    return load_task(_task(batch, config)), _family(json.dumps(batch.family)), compute_device()


def compute_device() -> torch.device:
    """The CUDA device of this process, or else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())  # with its number, which memory limits want


def _task(batch: Batch | EvaluationBatch, config: NodeConfig) -> TaskSpec:
    """The task of a batch. A node may hold its data elsewhere than the server: `data-dir` in its node config."""
    own = config.get("data-dir")
    return TaskSpec.from_json({**batch.task, "data_dir": str(own)} if own else batch.task)


def _state_dir(batch: Batch | EvaluationBatch, config: NodeConfig) -> str:
    """On hardware the node decides where its devices' state lies: `state-dir` in its node config."""
    if batch.shared_process and batch.state_dir and not config.get("state-dir"):
        return batch.state_dir
    return str(node_state_dir(config))


def _board(batch: Batch | EvaluationBatch, config: NodeConfig) -> Path | None:
    return None if batch.shared_process else gpu_trainer(config)


def _own_device(config: NodeConfig) -> int:
    number = config.get("partition-id")
    if type(number) is not int or number < 0:
        raise ValueError(
            f"node config partition-id = {number!r}: a whole number from 0 says which device this node carries "
            '(wildflower-node --node-config "partition-id=0 num-partitions=4")'
        )
    return number


@lru_cache(maxsize=8)
def _family(spec_json: str) -> Family:
    return make_family(json.loads(spec_json))
