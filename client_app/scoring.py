"""One evaluation order on one device: get the model, train it where that is asked, score it, keep nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from client_app.memory import MemoryMeter
from client_app.objectives import Masked
from client_app.state import DeviceState
from client_app.training import batches_of, load_statistics, take_statistics, train, within_limits
from messages.layouts import sent_layout
from messages.orders import EvaluationBatch, EvaluationOrder, LocalTraining, Score
from messages.packing import MessageError, unpack
from models.architecture import Architecture
from models.base import Family, with_weights
from models.layers import Network
from tasks.scoring import score
from tasks.task import Task


def score_order(
    order: EvaluationOrder,
    batch: EvaluationBatch,
    family: Family,
    task: Task,
    data: bytes | None,
    state: DeviceState,
    device: torch.device,
    available_bytes: int | None,
    board: Path | None = None,
) -> Score:
    """Do an evaluation order; arguments as of `training.train`. The device's state is as it was before.

    Raises:
        Refusal: the training cannot fit the budget, or it or the scoring grew beyond it.
        MessageError: the weights are not those of the architecture, the device keeps no such model or holds no test
            examples.
    """
    architecture = Architecture.from_json(order.architecture)
    if order.data == "test set":
        inputs, labels = task.test.inputs, task.test.labels
    else:
        inputs, labels = task.own_test(order.device)
        if not len(labels):
            raise MessageError(f"device {order.device} holds no test examples")
    with torch.device("meta"):
        alike = family.build(architecture)
    # Training, batch norm's statistics and scoring have batches of their own sizes, each with code of its own.
    with within_limits(order, available_bytes, device, MemoryMeter(device), alike, alike):
        if batch.training is not None:
            after = batch.round + 1  # the device's own model is that of this round
            model = train(
                order,
                after,
                batch.training,
                family,
                task,
                data,
                state,
                device,
                available_bytes,
                board=board,
                keep=False,
                statistics_since=batch.round,  # older ones are of weights that have moved since
            ).model
        else:
            model = _given(order, batch.round, family, architecture, data, state)
        if order.data == "shard" and family.norm == "static":
            model = _with_statistics(model, family, architecture, task, order.device, batch, device)
        scored: nn.Module = model
        if order.data == "shard" and order.objective.kind == "masked cross entropy":
            held = task.train.labels[task.shard(order.device).train]
            scored = Masked(model, held.bincount(minlength=task.classes) > 0)
        correct, loss, examples = score(scored, task, inputs, labels, batch_size=batch.batch_size, device=device)
    return Score(device=order.device, correct=correct, loss_sum=loss, examples=examples)


def _given(
    order: EvaluationOrder,
    round_number: int,
    family: Family,
    architecture: Architecture,
    data: bytes | None,
    state: DeviceState,
) -> Network:
    """The model as it was sent, or as the device keeps it."""
    layout = sent_layout(family, architecture)
    if order.digest != layout.digest:
        raise MessageError(f"device {order.device}: server and device disagree about the tensors of {architecture}")
    weights = state.load(f"model-{layout.digest}", round_number + 1) if data is None else unpack(data, layout)
    if weights is None:
        raise MessageError(f"device {order.device} keeps no model of {architecture}")
    model = with_weights(family, architecture, weights)
    if order.keeps_statistics:
        load_statistics(model, state, f"model-{layout.digest}", round_number + 1)
    return model


def _with_statistics(
    model: Network,
    family: Family,
    architecture: Architecture,
    task: Task,
    number: int,
    batch: EvaluationBatch,
    device: torch.device,
) -> Network:
    """The model with the batch norm statistics of one pass over the device's training examples.

    While they train, norms of a "static" family keep none. Scored by the statistics of the batch instead, a device with
    few test examples would be scored by which of them come together.
    """
    scored = replace(family, norm="batch").build(architecture).to(device)
    # What lacks are the statistics themselves, which the pass sets.
    scored.load_state_dict(model.state_dict(), strict=False)
    training = batch.training or LocalTraining(batch_size=batch.batch_size)
    generator = torch.Generator().manual_seed(0)  # of the order in which examples are seen
    take_statistics(scored, batches_of(task, task.shard(number).train, training, generator, device, once=True))
    return scored
