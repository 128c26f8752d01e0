"""One evaluation order on one device: get the model, train it where that is asked, score it, keep nothing."""

from __future__ import annotations

from contextlib import closing

import torch

from wildflower.client_app.batches import batches_of
from wildflower.client_app.chance import seed_draws
from wildflower.client_app.context import DeviceContext, Workplace
from wildflower.client_app.kept_state import DeviceState
from wildflower.client_app.limits import out_of_memory_refused
from wildflower.client_app.memory import memory_limit
from wildflower.client_app.order import do_order
from wildflower.messages.orders import EvaluationBatch, EvaluationOrder, LocalTraining, Score
from wildflower.messages.packing import MessageError
from wildflower.models.base import Family
from wildflower.models.network import Network, pool_by_slices
from wildflower.strategies.method import Answer, client_step_of
from wildflower.strategies.statistics import take_statistics
from wildflower.tasks.scoring import Scored, Scoring
from wildflower.tasks.task import Task


def score_order(context: DeviceContext, batch: EvaluationBatch, task: Task) -> Score:
    """Do the evaluation order of a context, of a batch over a task. The device's state is as it was before.

    Raises:
        Refusal: the training cannot fit the budget, or it or the scoring grew beyond it.
        MessageError: the device keeps no such model or holds no test examples.
    """
    order, local, family, place = context.order, context.client_step, context.family, context.place
    assert isinstance(order, EvaluationOrder)
    if order.data == "test set":
        inputs, labels = task.test.inputs, task.test.labels
    else:
        inputs, labels = context.task.own_test(order.device)
        if not len(labels):
            raise MessageError(f"device {order.device} holds no test examples")
    alike = family.without_memory(context.architecture)
    # Training, batch norm's statistics and scoring have batches of their own sizes, each with code of its own.
    limit_bytes = min(context.limits.values(), default=None)
    answer: Answer | None = None
    beside: list[list[float]] = []
    with (
        out_of_memory_refused(order, place.available_bytes, context.meter),
        memory_limit(limit_bytes, place.device, alike, alike),
        closing(context),  # a client step that takes batches sets a limit of its own, which must end before this one
    ):
        if batch.training is None:
            model: Network | None = _untrained(context)
        else:
            answer = do_order(context).answer
            model = answer.model
        if model is None:
            raise MessageError(f"device {order.device}: {order.client_step.name} trained no model that could be scored")
        if family.with_statistics != family:
            model = _with_statistics(model, context)
        scored = local.scored(context, model) if order.data == "shard" else model
        own = context.task if order.data == "shard" else task
        found: Scored = place.ask(Scoring(scored, own, inputs, labels, batch.batch_size, place.device))
        if order.data == "shard":
            networks = local.beside(context, answer)
            if len(networks) != len(local.scored_beside):
                raise MessageError(
                    f"{order.client_step.name} gives {len(networks)} networks to score beside the model, and names "
                    f"{len(local.scored_beside)}"
                )
            for network in networks:
                figures: Scored = place.ask(Scoring(network, own, inputs, labels, batch.batch_size, place.device))
                beside.append(figures.sums)
    return Score(device=order.device, sums=found.sums, loss_sum=found.loss_sum, examples=found.examples, beside=beside)


def personal_model(context: DeviceContext) -> torch.nn.Module:
    """Return the model that an evaluation order would score on the device's own examples, on the processor.

    Raises MessageError where the device keeps no such model.
    """
    model = _untrained(context)
    if context.family.with_statistics != context.family:
        model = _with_statistics(model, context)
    return context.client_step.scored(context, model).cpu()


def evaluation_context(
    order: EvaluationOrder,
    batch: EvaluationBatch,
    family: Family,
    task: Task,
    arrays: list[bytes],
    state: DeviceState,
    place: Workplace,
) -> DeviceContext:
    """Return what the client step of an evaluation order works with, which is to be closed.

    Raises MessageError where the tensor sets are not those of the order.
    """
    local, before = client_step_of(order.client_step), batch.round + 1  # the device's own model is that of this round
    training = batch.training or LocalTraining(batch_size=batch.batch_size)
    return DeviceContext(
        order, local, before, training, family, task, arrays, state, place, evaluated_round=batch.round
    )


def _untrained(context: DeviceContext) -> Network:
    seed_draws(context.order.seed, context.device)  # a device that has not trained yet may lack layers of its own
    return context.client_step.model(context)


def _with_statistics(model: Network, context: DeviceContext) -> Network:
    """Return the model with the batch norm statistics of one pass over the device's training examples.

    While they train, norms of a "static" family keep none. Scored by the statistics of the batch instead, a device with
    few test examples would be scored by which of them come together.
    """
    scored = context.family.with_statistics.build(context.architecture).to(context.device)
    # What lacks are the statistics themselves, which the pass sets.
    scored.load_state_dict(model.state_dict(), strict=False)
    generator = torch.Generator().manual_seed(0)  # of the order in which examples are seen
    shard = context.task.shard(context.order.device).train
    pool_by_slices(scored)
    take_statistics(scored, batches_of(context.task, shard, context.training, generator, context.device, once=True))
    return scored
