"""Reading replies: everything is checked before anything of it is used.

A reply that breaks the contract as a whole raises MessageError; one update that is wrong by itself is refused and
leaves the others of its message alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from logging import WARNING

import torch
from flwr.app import Message
from flwr.common import log

from devices.report import DeviceReport
from devices.validation import one_line, shown
from messages.bound import bounded
from messages.layouts import sent_layout
from messages.orders import Reply, Update
from messages.packing import MessageError, int64_vector, pick, unpack
from messages.sums import WeightedSum, device_weight, flatten, present_mask
from messages.wire import from_records, reply_limits
from strategies.work import Assignment, Contribution, Work


@dataclass
class Checked:
    """A reply that may be used, by the numbers of the orders: an outcome for every one, and what is to be absorbed."""

    outcomes: dict[int, str]
    updates: dict[int, Update]
    reports: dict[int, DeviceReport] = field(default_factory=dict)
    contributions: list[Contribution] = field(default_factory=list)


def read_reply(
    run: str,
    work: Work,
    batch: list[Assignment],
    message: Message,
    examples: Callable[[int], int],
    *,
    simulated: bool,
) -> Checked:
    """Check a node's reply to a batch. Raises MessageError where the reply as a whole cannot be used.

    `examples` says how many a device holds for training: none can have trained on more. `simulated`: the node is a
    worker of a simulation, which adds up what its devices trained. A real node carries one device and sends no sum: in
    one there would be nothing left to hold to the norm bound.
    """
    limits = reply_limits(len(batch), len({a.group for a in batch}), work.family.classes)
    reply, arrays = from_records(Reply, message.content, limits)
    if (reply.run, reply.round) != (run, work.round):
        raise MessageError(
            f"the reply is for round {reply.round} of run {shown(reply.run)}, not for round {work.round} of {run!r}"
        )
    if reply.sums and not simulated:
        raise MessageError("it holds a sum of updates, which only a worker of a simulation sends")
    asked = {a.number: a for a in batch}
    answered: dict[int, Update] = {}
    for update in reply.updates:
        if update.order not in asked:
            raise MessageError(f"order {update.order} was not in the batch, which holds {sorted(asked)}")
        if update.device != asked[update.order].device:
            raise MessageError(f"order {update.order} is device {asked[update.order].device}'s, not {update.device}'s")
        if update.order in answered:
            raise MessageError(f"device {update.device} answered order {update.order} twice")
        if update.outcome != "trained" and not update.outcome.startswith(("refused: ", "failed: ")):
            raise MessageError(
                f"device {update.device}: outcome {shown(update.outcome)} is not trained, refused: ... or failed: ..."
            )
        most = examples(update.device)
        if update.outcome == "trained" and not 1 <= update.examples <= most:
            raise MessageError(
                f"device {update.device} says that it trained on {update.examples} examples, its shard holds {most}"
            )
        if update.bounded and not simulated:
            raise MessageError(f"device {update.device} says that it held itself to the norm bound, as the server does")
        answered[update.order] = update
    silent = dict.fromkeys(asked, "failed: the node's reply says nothing of this order")
    checked = Checked({**silent, **{n: one_line(u.outcome) for n, u in answered.items()}}, answered)
    for number, update in answered.items():
        if update.outcome != "trained":
            continue
        try:
            if update.report is not None:
                checked.reports[number] = DeviceReport.from_json(update.report)
            if work.asks_class_counts and update.class_counts is None:
                raise MessageError("it was asked for class_counts and sent none")
            if update.class_counts is not None:
                _check_class_counts(update.class_counts, work.family.classes)
            if update.payload is not None:
                contribution, far = _own(work, asked[number], update, arrays)
                checked.contributions.append(contribution)
                checked.updates[number] = update.model_copy(update={"bounded": far})
        except ValueError as error:  # MessageError is one
            why = one_line(str(error))
            log(WARNING, "Round %s: an update of device %s is refused: %s", work.round, update.device, why)
            checked.outcomes[number] = one_line(f"refused: {why}")
    checked.contributions += _sums(work, asked, checked, reply, arrays)
    covered = {number for contribution in checked.contributions for number in contribution.orders}
    for number, outcome in checked.outcomes.items():
        if outcome == "trained" and work.payload is not None and number not in covered:
            raise MessageError(f"device {asked[number].device} says it trained, but no weights of it came")
    return checked


def _own(work: Work, a: Assignment, update: Update, arrays: list[bytes]) -> tuple[Contribution, bool]:
    """One order's weights, as an update of its own, and whether they had to be moved back to the norm bound."""
    group, who = work.groups[a.group], f"device {a.device}"
    assert update.payload is not None
    data = pick(arrays, update.payload, who)
    weights = unpack(data, group.layout)
    for name, value in weights.items():
        if not bool(torch.isfinite(value.float()).all()):
            raise MessageError(f"{who}: tensor {name!r} holds values that are not finite")
    far = False
    if work.norm_bound:
        sent = unpack(work.packed(a.group), sent_layout(work.family, group.architecture))
        weights, far = bounded(weights, sent, work.norm_bound)
    if work.merge is None:
        return Contribution(group, [a.number], [a.device], update.examples, None, weights), far
    classes = work.family.classes if work.merge.present_classes else None
    total = WeightedSum.zeros(group.layout, classes)
    present = None if classes is None else present_mask(update.present_classes, classes, who)
    flat = flatten(weights, group.layout)
    total.add(flat, device_weight(work.merge, update.examples), present, group.class_spans)
    return Contribution(group, [a.number], [a.device], update.examples, total, None), far


def _check_class_counts(counts: list[int], classes: int) -> None:
    if len(counts) != classes or not any(counts):
        raise MessageError(f"class_counts must hold {classes} counts, not all of them 0, and not be {counts}")


def _sums(
    work: Work, asked: dict[int, Assignment], checked: Checked, reply: Reply, arrays: list[bytes]
) -> list[Contribution]:
    """The sums that a node with many simulated devices made."""
    answered = checked.updates
    result: list[Contribution] = []
    seen: set[int] = set()
    for header in reply.sums:
        who = f"the sum over orders {header.orders}"
        if work.merge is None:
            raise MessageError(f"{who}: this strategy wants every update by itself")

        def belongs(number: int, group: int = header.group) -> bool:
            update = answered.get(number)
            summed = update is not None and update.payload is None and checked.outcomes[number] == "trained"
            return summed and asked[number].group == group and number not in seen

        wrong = [number for number in header.orders if not belongs(number)]
        if wrong or len(set(header.orders)) != len(header.orders):
            raise MessageError(f"{who}: orders {wrong} are not of group {header.group}, or are counted twice")
        seen.update(header.orders)
        group = work.groups[header.group]
        if header.digest != group.layout.digest:
            raise MessageError(f"{who}: layout {header.digest} instead of {group.layout.digest}")
        weight = sum(device_weight(work.merge, answered[number].examples) for number in header.orders)
        if header.weight != weight:
            raise MessageError(f"{who}: weight {header.weight} instead of {weight}")
        class_weight = None
        if work.merge.present_classes:
            counted = header.class_weight or []
            if len(counted) != work.family.classes or not 0 < max(counted) <= weight:
                raise MessageError(f"{who}: class weights {counted} do not fit {work.family.classes} classes")
            class_weight = torch.tensor(counted, dtype=torch.int64)
        total = int64_vector(pick(arrays, header.payload, who), group.layout.numel, who)
        added = WeightedSum(total, weight, class_weight, max(float(total.max()), -float(total.min())))
        examples = sum(answered[number].examples for number in header.orders)
        devices = [asked[number].device for number in header.orders]
        result.append(Contribution(group, header.orders, devices, examples, added, None))
    return result
