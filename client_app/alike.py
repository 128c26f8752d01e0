"""Orders that are done at once: those of one architecture and client step, of one message or of several runs'."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch

from wildflower.client_app.prepared import family_of
from wildflower.client_app.side_by_side import number_at_once
from wildflower.client_app.stack_price import price_at_once
from wildflower.messages.orders import Batch, EvaluationBatch, ModelOrder, WorkOrder
from wildflower.models.architecture import Architecture

AnyOrder = TypeVar("AnyOrder", bound=ModelOrder)


class Ordered(NamedTuple, Generic[AnyOrder]):
    """An order, and the place of its message among those that are done together."""

    message: int
    order: AnyOrder


def kind_of(orders: Sequence[Ordered[AnyOrder]], batch: Batch | EvaluationBatch) -> tuple[str, str, int] | None:
    """Return what orders have in common whose batches take equally long; None where nobody asks what is faster."""
    if isinstance(batch.side_by_side, int) or len(orders) == 1:
        return None
    first = orders[0].order
    size = batch.training.batch_size if isinstance(batch, Batch) else batch.batch_size
    return first.client_step.model_dump_json(), json.dumps(first.architecture), size


def groups(
    orders_of: Sequence[Sequence[AnyOrder]], batches: Sequence[Batch | EvaluationBatch], device: torch.device
) -> Iterator[list[Ordered[AnyOrder]]]:
    """Yield the orders of one architecture and client step, as many at once as the machine has memory for.

    Those that read an earlier order's model, or are masked, are by themselves.
    """
    found: dict[Hashable, list[Ordered[AnyOrder]]] = {}
    for message, (orders, batch) in enumerate(zip(orders_of, batches, strict=True)):
        asked = batch.side_by_side
        turns = not batch.shared_process or asked == 1 or (asked == "auto" and device.type == "cpu")
        settings = _settings(batch) if len(batches) > 1 else ""
        for place, order in enumerate(orders):
            by_itself = isinstance(order, WorkOrder) and (order.after is not None or order.masked_with)
            step = order.client_step.model_dump_json()
            kind = (settings, json.dumps(order.architecture), order.frozen, step)
            found.setdefault((message, place) if turns or by_itself else kind, []).append(Ordered(message, order))
    for alike in found.values():
        number = 1
        if len(alike) > 1:
            batch = batches[alike[0].message]
            asked = batch.side_by_side
            orders = [each.order for each in alike]
            number = asked if isinstance(asked, int) else _number_at_once(orders, batch, device)
        count = -(-len(alike) // number)
        yield from (alike[first::count] for first in range(count))


def _settings(batch: Batch | EvaluationBatch) -> str:
    """Return what messages of several runs must have in common beside the orders: all but how data are dealt out."""
    training = None if batch.training is None else batch.training.model_dump(mode="json")
    return json.dumps([{**batch.task, "seed": 0}, batch.family, training, batch.side_by_side], sort_keys=True)


def _number_at_once(alike: Sequence[ModelOrder], batch: Batch | EvaluationBatch, device: torch.device) -> int:
    """Return how many of some orders of one architecture fit into the memory that the machine has free."""
    order_bytes = max(order.predicted_memory_bytes for order in alike)
    if batch.training is None:  # the models are scored alone
        return number_at_once(device, order_bytes, 0)
    family, architecture = family_of(json.dumps(batch.family)), Architecture.from_json(alike[0].architecture)
    return number_at_once(device, *price_at_once(family, architecture, batch.training, order_bytes))
