"""Orders that are done at once: those of one client step, of one message or of several runs'."""

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
from wildflower.models.block_family import BlockFamily
from wildflower.models.cost import cost

# Operations of a step that narrower networks may take more as rows of a wider one. A small network's step is mostly the
# calls of its operators: a stack that is saved has been measured to be worth about so many.
JOINED_FLOPS = 25 * 10**6
AnyOrder = TypeVar("AnyOrder", bound=ModelOrder)


class Ordered(NamedTuple, Generic[AnyOrder]):
    """An order, and the place of its message among those that are done together."""

    message: int
    order: AnyOrder


def kind_of(orders: Sequence[Ordered[AnyOrder]], batch: Batch | EvaluationBatch) -> tuple[str, str, int] | None:
    """Return what orders have in common whose batches take equally long; None where nobody asks what is faster."""
    if isinstance(batch.side_by_side, int) or len(orders) == 1:
        return None
    architectures = sorted({json.dumps(each.order.architecture) for each in orders})
    size = batch.training.batch_size if isinstance(batch, Batch) else batch.batch_size
    return orders[0].order.client_step.model_dump_json(), json.dumps(architectures), size


def groups(
    orders_of: Sequence[Sequence[AnyOrder]], batches: Sequence[Batch | EvaluationBatch], device: torch.device
) -> Iterator[list[Ordered[AnyOrder]]]:
    """Yield the orders of one client step that are done at once, as many as the machine has memory for.

    They are of one architecture, or few of several small ones. Those that read an earlier order's model, or are masked,
    are by themselves.
    """
    alone: list[list[Ordered[AnyOrder]]] = []
    of_steps: dict[Hashable, dict[str, list[Ordered[AnyOrder]]]] = {}  # by what they have in common, by architecture
    for message, (orders, batch) in enumerate(zip(orders_of, batches, strict=True)):
        asked = batch.side_by_side
        turns = not batch.shared_process or asked == 1 or (asked == "auto" and device.type == "cpu")
        settings = _settings(batch) if len(batches) > 1 else ""
        for order in orders:
            ordered = Ordered(message, order)
            if turns or (isinstance(order, WorkOrder) and (order.after is not None or order.masked_with)):
                alone.append([ordered])
                continue
            kind = settings, order.frozen, order.client_step.model_dump_json()
            of_steps.setdefault(kind, {}).setdefault(json.dumps(order.architecture), []).append(ordered)
    for by_architecture in of_steps.values():
        for alike in _joined(list(by_architecture.values()), batches, device):
            count = -(-len(alike) // (_most(alike, batches, device) if len(alike) > 1 else 1))
            yield from (alike[first::count] for first in range(count))
    yield from alone  # after those whose models they read


def _joined(
    groups: list[list[Ordered[AnyOrder]]], batches: Sequence[Batch | EvaluationBatch], device: torch.device
) -> list[list[Ordered[AnyOrder]]]:
    """Join the orders of narrower architectures to those of the next wider one, where that takes less time."""
    batch = batches[groups[0][0].message]
    family = family_of(json.dumps(batch.family))
    if len(groups) == 1 or not isinstance(batch, Batch) or not isinstance(family, BlockFamily):
        return groups
    size, optimizer = batch.training.examples_at_once, batch.training.priced_optimizer
    found: list[list[Ordered[AnyOrder]]] = []
    priced: list[tuple[int, list[Ordered[AnyOrder]]]] = []  # with the operations of a step
    for group in groups:
        try:
            architecture = Architecture.from_json(group[0].order.architecture)
            price = cost(family, architecture, batch_size=size, optimizer=optimizer)
        except ValueError:  # which its own devices will tell
            found.append(group)
        else:
            priced.append((size * price.training_flops, group))
    narrower: list[Ordered[AnyOrder]] = []
    narrower_flops = 0  # of a step of all of them, each in its own width
    for flops, wider in sorted(priced, key=lambda each: each[0]):
        more = flops * len(narrower) - narrower_flops
        together = [*wider, *narrower]
        if narrower and (more > JOINED_FLOPS or len(together) > _most(together, batches, device)):
            found.append(narrower)
            together, narrower_flops = wider, 0
        narrower = together
        narrower_flops += flops * len(wider)
    return [*found, narrower] if narrower else found


def _most(alike: Sequence[Ordered[AnyOrder]], batches: Sequence[Batch | EvaluationBatch], device: torch.device) -> int:
    """Return how many of some orders may be done at once."""
    batch = batches[alike[0].message]
    if isinstance(batch.side_by_side, int):
        return batch.side_by_side
    return _number_at_once([each.order for each in alike], batch, device)


def _settings(batch: Batch | EvaluationBatch) -> str:
    """Return what messages of several runs must have in common beside the orders: all but how data are dealt out."""
    training = None if batch.training is None else batch.training.model_dump(mode="json")
    return json.dumps([{**batch.task, "seed": 0}, batch.family, training, batch.side_by_side], sort_keys=True)


def _number_at_once(alike: Sequence[ModelOrder], batch: Batch | EvaluationBatch, device: torch.device) -> int:
    """Return how many of some orders, of which the first is the largest, fit into the memory that is free."""
    order_bytes = max(order.predicted_memory_bytes for order in alike)
    if batch.training is None:  # the models are scored alone
        return number_at_once(device, order_bytes, 0)
    family, architecture = family_of(json.dumps(batch.family)), Architecture.from_json(alike[0].architecture)
    return number_at_once(device, *price_at_once(family, architecture, batch.training, order_bytes))
