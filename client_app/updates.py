"""The update of a device that has trained: its tensor sets go into sums, under masks, or into the message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wildflower.client_app.context import DeviceContext
from wildflower.client_app.order import Done
from wildflower.messages.bound import bounded, bounded_change
from wildflower.messages.error import MessageError
from wildflower.messages.orders import Batch, SumHeader, Update, WorkOrder
from wildflower.messages.packing import int64_bytes, pack
from wildflower.messages.sums import MASKED, WeightedSum, device_weight, joined, new_bound, not_finite, vectors
from wildflower.messages.tensor_sets import TensorSet, Weights


@dataclass
class _Sum:
    """The sum of one tensor set over the devices of one group."""

    tensor_set: TensorSet
    total: WeightedSum
    orders: list[int] = field(default_factory=list)


Sums = dict[tuple[int, str], _Sum]  # by group and tensor set


def sum_headers(sums: Sums, out: list[bytes]) -> list[SumHeader]:
    """Put the sums into a message, and return what it says of them."""
    headers = []
    for (group, name), found in sums.items():
        if not found.orders:  # its only update was refused when it was added
            continue
        weights = found.total.class_weight
        headers.append(
            SumHeader(
                group=group,
                tensor_set=name,
                orders=found.orders,
                weight=found.total.weight,
                class_weight=None if weights is None else weights.tolist(),
                payload=len(out),
            )
        )
        out.append(int64_bytes(found.total.total))
    return headers


def update_of(
    batch: Batch,
    order: WorkOrder,
    context: DeviceContext,
    done: Done,
    out: list[bytes],
    sums: Sums,
    masks: Callable[[Tensor], bytes] | None,
) -> Update:
    """Return the update of a device that trained: each of its tensor sets goes into a sum or into the message.

    masks: masks a vector, for an order whose tensor sets the server may not see.
    """
    adds_up = (batch.shared_process and not batch.each_by_itself) or bool(order.masked_with)
    merged = {name for name, tensor_set in context.returned.items() if tensor_set.merge is not None and adds_up}
    far = False
    added: dict[str, list[Tensor]] = {}
    for name in merged:
        contents = context.restored(name, done.encoded[name]) if done.encoded else done.answer.tensor_sets[name]
        added[name], moved = _bounded(batch, context, name, contents)
        far = far or moved
    if merged:
        _check_finite(context, {name: done.answer.tensor_sets[name] for name in context.returned.keys() - merged})
    elif not (batch.norm_bound or batch.clip):  # else the server shrinks what is too large
        _check_addable(context, done)
    payloads: dict[str, int] = {}
    if masks is not None:
        payloads[MASKED] = len(out)
        out.append(masks(_joined(batch, order, context, done, added)))
    else:
        _add(batch, order, context, done, added, sums)
    for name, tensor_set in context.returned.items():
        if name in merged:
            continue
        payloads[name] = len(out)
        if done.encoded:
            out.append(done.encoded[name])
        else:
            contents = done.answer.tensor_sets[name]
            out.append(pack({e.name: contents[e.name].cpu() for e in tensor_set.layout.entries}, tensor_set.layout))
    update: dict[str, Any] = {
        "order": order.order,
        "device": order.device,
        "outcome": "trained",
        "payloads": payloads,
        "examples": done.examples,
        "seconds": done.seconds,
        "measured_memory_bytes": done.measured_memory_bytes,
        "state_kept": done.state_kept,
        "state_lost": done.state_lost,
    }
    if order.masked_with:  # what else would tell something of this device alone stays with it
        return Update(**update)
    if payloads and any(found.merge and found.merge.present_classes for found in context.returned.values()):
        update["present_classes"] = context.class_counts.nonzero().flatten().tolist()
    return Update(**update, loss=done.answer.loss, bounded=far, facts=done.answer.facts)


def check_maskable(context: DeviceContext) -> None:
    """Raise MessageError if an order under masks would also return something by itself."""
    if bare := [name for name, tensor_set in context.returned.items() if tensor_set.merge is None]:
        raise MessageError(
            f"the order is under masks, and its client step {context.order.client_step.name} returns the "
            f"tensor set {bare[0]!r} without any"
        )


def _joined(
    batch: Batch, order: WorkOrder, context: DeviceContext, done: Done, tensor_sets: Mapping[str, list[Tensor]]
) -> Tensor:
    """Return a device's tensor sets as they are masked: weighted, in one vector.

    Raises MessageError if a value is too large for the sum of all.
    """
    own: Sums = {}
    _add(batch, order, context, done, tensor_sets, own)
    sums = {name: found.total for (_, name), found in own.items()}
    for found in sums.values():
        new_bound(0.0, found.largest * len(order.masked_with))
    return joined(sums)


def _bounded(batch: Batch, context: DeviceContext, name: str, contents: Weights) -> tuple[list[Tensor], bool]:
    """Return a tensor set as it is added up, in vectors and within the bounds, and whether it was beyond them.

    Before a sum only the node can bound it; else the server does.
    """
    layout = context.returned[name].layout
    if batch.clip:
        change, moved = bounded_change(contents, context.sent_again(name), layout, batch.clip)
        return [change], moved
    if not batch.norm_bound:
        return vectors(contents, layout), False
    tensors = {entry.name: contents[entry.name].detach() for entry in layout.entries}
    within, moved = bounded(tensors, context.sent_again(name), batch.norm_bound)
    return vectors(within, layout), moved


def _check_finite(context: DeviceContext, tensor_sets: Mapping[str, Weights]) -> None:
    """Raise MessageError if the server would refuse a tensor set, when the device's others were in a sum already."""
    for name, contents in tensor_sets.items():
        # As the server reads them: numbers of 64 bits that 32 cannot hold are none.
        if found := not_finite({e.name: contents[e.name].float() for e in context.returned[name].layout.entries}):
            raise MessageError(
                f"device {context.order.device}: tensor {found!r} of {name!r} holds values that are not finite"
            )


def _check_addable(context: DeviceContext, done: Done) -> None:
    """Raise MessageError if the server would refuse to add a tensor set, when the device has kept what goes with it."""
    for name, tensor_set in context.returned.items():
        if tensor_set.merge is None:
            continue
        _check_finite(context, {name: done.answer.tensor_sets[name]})
        weight = device_weight(tensor_set.merge, done.examples)
        WeightedSum(torch.zeros(0)).check(vectors(done.answer.tensor_sets[name], tensor_set.layout), weight)


def _add(
    batch: Batch,
    order: WorkOrder,
    context: DeviceContext,
    done: Done,
    tensor_sets: Mapping[str, list[Tensor]],
    sums: Sums,
) -> None:
    """Add a device's tensor sets to the sums of its group: all of them or, where one is too large, none."""
    ready = []
    for name, values in tensor_sets.items():
        tensor_set = context.returned[name]
        assert tensor_set.merge is not None
        if (order.group, name) not in sums:
            classes = context.family.classes if tensor_set.merge.present_classes else None
            sums[order.group, name] = _Sum(tensor_set, WeightedSum.zeros(tensor_set.layout, classes))
        into = sums[order.group, name]
        weight = device_weight(tensor_set.merge, done.examples, alike=batch.clip > 0)
        if len(tensor_sets) > 1:
            into.total.check(values, weight)
        ready.append((into, values, weight, context.class_counts > 0 if tensor_set.merge.present_classes else None))
    for into, values, weight, present in ready:
        into.total.add(values, weight, present, into.tensor_set.class_spans)
        into.orders.append(order.order)
