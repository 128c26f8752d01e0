"""One work order on one device: check the budget, build the sub-model, train it, say what it took."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from client_app import board_gpu
from client_app.dynamic import DynamicRegularizer
from client_app.memory import MemoryMeter, is_out_of_memory, memory_limit, touched_bytes
from client_app.objectives import Loss, local_loss
from client_app.state import DeviceState
from messages.layouts import STATISTICS, returned_layout, sent_layout
from messages.orders import EvaluationOrder, LocalTraining, Objective, WorkOrder
from messages.packing import MessageError, unpack
from models.architecture import Architecture
from models.base import Family, with_weights
from models.layers import Network
from tasks.task import Task

log = logging.getLogger("flwr")  # what Flower's own log is called


class Refusal(Exception):
    """The device does not do this work; the text says why.

    `overrun`: less memory was there than the device had promised: work of its budget outgrew it, or was not begun since
    what is free now is less than predicted.
    """

    def __init__(self, why: str, *, overrun: bool = False) -> None:
        super().__init__(why)
        self.overrun = overrun


@dataclass
class Trained:
    """The result of a work order: the trained model, its tensors to return, and the figures of the update."""

    model: Network
    returned: dict[str, Tensor]
    examples: int
    loss: float | None
    seconds: float
    measured_memory_bytes: int | None  # None in a simulation
    class_counts: Tensor  # examples of every class that the device holds

    @property
    def present(self) -> Tensor:
        """Which classes the device holds (bool)."""
        return self.class_counts > 0


def train(
    order: WorkOrder | EvaluationOrder,
    round_number: int,
    training: LocalTraining,
    family: Family,
    task: Task,
    data: bytes | None,
    state: DeviceState,
    device: torch.device,
    available_bytes: int | None,
    teacher: Network | None = None,
    *,
    board: Path | None = None,
    keep: bool = True,
    statistics_since: int = 0,
) -> Trained:
    """Do a work order, or the training of an evaluation order.

    Args:
        data: the packed weights to start from; None where the device keeps a model of its own.
        state: the device's folder, where its own model lies.
        device: where to compute.
        available_bytes: memory that this machine has free now, which may be less than it reported; the work may not
            outgrow it or its budget. None in a simulation, where many devices share the machine.
        teacher: the trained model of an earlier order of the same device, for objectives that learn from one.
        board: socket of the trainer that has the board's GPU (`client_app.board_gpu`), where the node has one.
            Objectives that it cannot compute are trained on `device`, and the log says so.
        keep: a device's own model becomes what is trained here; False leaves the device's state as it is.
        statistics_since: batch norm statistics that the device kept in an earlier round than this are not used, but
            taken anew while it trains.

    Raises:
        Refusal: the work cannot fit the budget, or grew beyond it.
        MessageError: the weights are not those of the architecture.
        board_gpu.BoardError: the board's trainer does not answer, or failed.
    """
    started = time.perf_counter()
    architecture = Architecture.from_json(order.architecture)
    family.validate(architecture)
    if order.digest != returned_layout(family, architecture, order.objective.kind).digest:
        raise MessageError(f"device {order.device}: server and device disagree about the tensors of {architecture}")
    statistics = order.objective.kind == "batch norm statistics"
    for what, limit_bytes in _limits(order, available_bytes).items():
        if not statistics and order.predicted_memory_bytes > limit_bytes:
            raise Refusal(
                f"training needs about {order.predicted_memory_bytes} bytes, {what} {limit_bytes} bytes",
                # Within its budget, so the memory shrank after the report. Work without one may never have fitted.
                overrun=0 < order.predicted_memory_bytes <= order.memory_bytes,
            )
    shard = task.shard(order.device).train
    if not len(shard):
        raise Refusal("the device holds no training examples")
    class_counts = task.train.labels[shard].bincount(minlength=task.classes)

    meter = MemoryMeter(device)
    torch.manual_seed(order.seed)  # dropout, and the first weights of a device's own model
    key = f"model-{sent_layout(family, architecture).digest}"
    weights = state.load(key, round_number) if data is None else unpack(data, sent_layout(family, architecture))
    model = family.build(architecture) if weights is None else with_weights(family, architecture, weights)
    fresh = order.keeps_statistics and not load_statistics(model, state, key, round_number, statistics_since)
    model.to(device)
    generator = torch.Generator().manual_seed(order.seed)
    if teacher is not None:
        teacher.to(device).eval().requires_grad_(False)
    kind = order.objective.kind
    if board is not None and kind not in board_gpu.OBJECTIVES:
        board = None
        if not statistics:
            log.warning("Device %s: the board's GPU trainer has no %r: trained on the CPU", order.device, kind)
    objective = Objective() if board and kind == "proximal" else order.objective  # the board's trainer pulls by itself
    loss = local_loss(objective, model, (class_counts > 0).to(device), family, architecture, order.seed, teacher)
    batches = batches_of(task, shard, training, generator, device, once=statistics)
    dynamic: DynamicRegularizer | None = None
    correction = state.load("correction", round_number) if order.objective.alpha else None
    if order.objective.alpha:
        dynamic = DynamicRegularizer(model, order.objective.alpha, correction)
        loss = loss if board else dynamic.added_to(loss)
    mean_loss: float | None = None
    measured_bytes: int | None = None
    computing = [model] if teacher is None else [model, teacher]
    with within_limits(order, available_bytes, device, meter, *computing) as watched:
        if statistics:
            take_statistics(model, batches)
        elif board is not None:
            try:
                mean_loss, measured_bytes = board_gpu.fit(
                    board,
                    model,
                    loss,
                    batches,
                    training,
                    seed=order.seed,
                    limit_bytes=min(watched.values(), default=None),
                    new_statistics=fresh,
                    pull=order.objective.mu + order.objective.alpha,
                    pull_is_told=kind == "proximal",
                    correction=correction,
                )
            except MemoryError as error:
                words = "".join(f", {what} {limit_bytes} bytes" for what, limit_bytes in watched.items())
                raise Refusal(f"out of memory on the board's GPU{words}: {error}", overrun=True) from error
        else:
            mean_loss = _fit(model, loss, batches, training, meter, watched, new_statistics=fresh)
            model.zero_grad(set_to_none=True)  # they would be held for nothing where the model is scored or teaches
    returned = {name: value.detach() for name, value in model.state_dict().items()}
    wanted = returned_layout(family, architecture, order.objective.kind)
    if data is None and keep:
        state.save(key, round_number, returned)
    if dynamic is not None and keep:
        state.save("correction", round_number, dynamic.after())
    if order.keeps_statistics and keep:
        own = {name: value for name, value in returned.items() if name.endswith(STATISTICS)}
        if own:
            state.save(_statistics_key(key), round_number, own)
    if board is None and available_bytes is not None:
        measured_bytes = meter.peak_bytes()
    return Trained(
        model,
        {entry.name: returned[entry.name] for entry in wanted.entries},
        len(shard),
        mean_loss,
        time.perf_counter() - started,
        measured_bytes,
        class_counts,
    )


def _limits(order: WorkOrder | EvaluationOrder, available_bytes: int | None) -> dict[str, int]:
    """What bounds the memory of an order's work, by the words that say so in a refusal."""
    limits = {"the budget is": order.memory_bytes or None, "this device has free": available_bytes}
    return {what: limit_bytes for what, limit_bytes in limits.items() if limit_bytes is not None}


@contextmanager
def within_limits(
    order: WorkOrder | EvaluationOrder,
    available_bytes: int | None,
    device: torch.device,
    meter: MemoryMeter,
    *models: nn.Module,
) -> Iterator[dict[str, int]]:
    """Hold what is done in a `with` block to an order's limits, which it yields; Refusal where memory runs out.

    In a simulation (`available_bytes` None) there are none: many devices in one process share its allocator, so that
    what one of them holds cannot be told from outside. `models` compute in the block.
    """
    limits = {} if available_bytes is None else _limits(order, available_bytes)
    try:
        with memory_limit(min(limits.values(), default=None), device, *models):
            yield limits
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        words = "".join(f", {what} {limit_bytes} bytes" for what, limit_bytes in limits.items())
        said = str(error).split("\n")[0] or type(error).__name__
        raise Refusal(f"out of memory after {meter.peak_bytes()} bytes{words}: {said}", overrun=True) from error


def load_statistics(model: Network, state: DeviceState, key: str, before_round: int, since_round: int = 0) -> bool:
    """Give the model the batch norm statistics that the device keeps for the model of a key; whether there are any."""
    own = state.load(_statistics_key(key), before_round, since_round)
    if own is not None:
        model.load_state_dict(own, strict=False)
    return own is not None


def _statistics_key(key: str) -> str:
    return f"statistics-of-{key}"


def batches_of(
    task: Task, shard: Tensor, training: LocalTraining, generator: torch.Generator, device: torch.device, once: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled batches: whole epochs (the last batch may be short), or exactly `steps` batches."""
    size, done = training.batch_size, 0
    epochs = 1 if once else training.epochs
    augment = generator if training.augment and not once else None
    epoch = 0
    while True:
        order = shard[torch.randperm(len(shard), generator=generator)]
        for start in range(0, len(order), size):
            picked = order[start : start + size]
            if len(picked) == 1 < min(size, len(order)):
                continue  # batch norm cannot normalize a single example over a 1x1 map
            yield (
                task.prepare(task.train.inputs[picked].to(device), augment=augment),
                task.train.labels[picked].to(device),
            )
            done += 1
            if training.steps and not once and done == training.steps:
                return
        epoch += 1
        if (once or not training.steps) and epoch == epochs:
            return


def _fit(
    model: nn.Module,
    loss_of: Loss,
    batches: Iterator[tuple[Tensor, Tensor]],
    training: LocalTraining,
    meter: MemoryMeter,
    limits: Mapping[str, int],
    *,
    new_statistics: bool,
) -> float:
    """Train; returns the mean loss over the examples seen. The most that was held stays within the limits.

    With `new_statistics` those of batch norm begin as the mean over the first batches, and not with 0 and 1, from which
    a few batches would not lead away.
    """
    optimizer = _optimizer(model, training)
    model.train()
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)] if new_statistics else []
    beside_bytes = touched_bytes(model)
    seen, total = 0, torch.zeros((), dtype=torch.float64)
    for number, (inputs, labels) in enumerate(batches, start=1):
        for norm in norms:
            norm.momentum = max(0.1, 1 / number)
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(inputs, labels)
        loss.backward()
        if training.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm)
        optimizer.step()
        seen += len(labels)
        total += loss.detach().to("cpu", torch.float64) * len(labels)
        # Not what is held now: the activations, most of it, are gone by the end of a step.
        peak = meter.peak_bytes() if limits else 0
        for what, limit_bytes in limits.items():
            if peak > limit_bytes + beside_bytes:
                raise Refusal(f"training grew to {peak} bytes, {what} {limit_bytes} bytes", overrun=True)
    return float(total) / max(1, seen)


def _optimizer(model: nn.Module, training: LocalTraining) -> torch.optim.Optimizer:
    rate, decay = training.learning_rate, training.weight_decay
    if training.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=rate, momentum=training.momentum, weight_decay=decay)
    kind = torch.optim.Adam if training.optimizer == "adam" else torch.optim.AdamW
    return kind(model.parameters(), lr=rate, betas=training.betas, weight_decay=decay)


def take_statistics(model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]]) -> None:
    """One pass in training mode without gradients; batch norm's statistics become the mean over the batches."""
    model.train()
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    with torch.no_grad():
        for number, (inputs, _) in enumerate(batches, start=1):
            for norm in norms:
                norm.momentum = 1.0 / number
            model(inputs)
