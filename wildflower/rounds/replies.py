"""Reading replies: everything is checked before anything of it is used.

A reply that breaks the contract as a whole raises MessageError; one update that is wrong by itself is refused and
leaves the others of its message alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from flwr.app import Message
from torch import Tensor

from wildflower.devices.resource_report import DeviceReport
from wildflower.devices.validation import one_line, shown
from wildflower.messages.bound import bounded, bounded_change
from wildflower.messages.encoding import decode, restored
from wildflower.messages.orders import Reply, Update
from wildflower.messages.packing import MessageError, int64_vector, pick
from wildflower.messages.sums import MASKED, WeightedSum, device_weight, flatten, joined, magnitude, present_mask
from wildflower.messages.tensor_sets import TensorSets, Weights
from wildflower.messages.wire import from_records, reply_limits
from wildflower.models.base import VARIANCE
from wildflower.models.family import Family
from wildflower.plugins.flower_log import log
from wildflower.rounds.requests import Assignment, Work
from wildflower.strategies.method import ClientStep, Contribution


@dataclass
class Checked:
    """A reply that may be used, by the numbers of the orders: an outcome for every one, and what is to be absorbed.

    wrong: why updates are refused that the device itself calls trained.
    masked: updates under masks, which mean nothing by themselves.
    """

    outcomes: dict[int, str]
    updates: dict[int, Update]
    reports: dict[int, DeviceReport] = field(default_factory=dict)
    contributions: list[Contribution] = field(default_factory=list)
    wrong: dict[int, str] = field(default_factory=dict)
    masked: dict[int, Tensor] = field(default_factory=dict)


def read_reply(
    run: str,
    work: Work,
    batch: list[Assignment],
    message: Message,
    examples: Callable[[int], int],
    check_report: Callable[[int, DeviceReport], None],
) -> Checked:
    """Check a node's reply to a batch. Raises MessageError where the reply as a whole cannot be used.

    A real node carries one device and sends no sum: in one there would be nothing left to hold to the norm bound.

    Args:
        examples: how many a device holds for training: none can have trained on more.
        check_report: MessageError where a report cannot be of the node that carries its device.
    """
    tensor_sets = max((len(work.groups[a.group].returned) for a in batch), default=1)
    facts = max((sum(a.task.client_step.facts(work.family).values()) for a in batch), default=0)
    limits = reply_limits(len(batch), len({a.group for a in batch}), work.family.classes + facts, tensor_sets)
    reply, arrays = from_records(Reply, message.content, limits)
    if (reply.run, reply.round) != (run, work.round):
        raise MessageError(
            f"the reply is for round {reply.round} of run {shown(reply.run)}, not for round {work.round} of {run!r}"
        )
    if reply.sums and not work.adds_up:
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
        maximum = examples(update.device)
        if update.outcome == "trained" and not 1 <= update.examples <= maximum:
            raise MessageError(
                f"device {update.device} says that it trained on {update.examples} examples, its shard holds {maximum}"
            )
        if update.bounded and not work.adds_up:
            raise MessageError(f"device {update.device} says that it held itself to the norm bound, as the server does")
        answered[update.order] = update
    silent = dict.fromkeys(asked, "failed: the node's reply says nothing of this order")
    checked = Checked({**silent, **{n: one_line(u.outcome) for n, u in answered.items()}}, answered)
    for number, update in answered.items():
        if update.outcome != "trained":
            work.answered(asked[number])
            continue
        try:
            if update.report is not None:
                report = DeviceReport.from_json(update.report)
                check_report(update.device, report)
                checked.reports[number] = report
            _check_facts(update, asked[number].task.client_step, work.family)
            if asked[number].masked_with:
                checked.masked[number] = _masked(work, asked[number], update, arrays)
                checked.updates[number] = update
            elif update.payloads:
                contribution, far = own_contribution(work, asked[number], update, arrays)
                checked.contributions.append(contribution)
                checked.updates[number] = update.model_copy(update={"bounded": far or update.bounded})
        except ValueError as error:  # MessageError is one
            why = one_line(str(error))
            log.warning("Round %s: an update of device %s is refused: %s", work.round, update.device, why)
            checked.outcomes[number] = one_line(f"refused: {why}")
            checked.wrong[number] = why
        finally:
            work.answered(asked[number])
    checked.contributions += _sums(work, asked, checked, reply, arrays)
    covered = {n: set(work.groups[asked[n].group].returned) if n in checked.masked else set[str]() for n in asked}
    for contribution in checked.contributions:
        for number in contribution.orders:
            covered[number] |= contribution.sums.keys() | contribution.each.keys()
    for number, outcome in checked.outcomes.items():
        missing = work.groups[asked[number].group].returned.keys() - covered[number]
        if outcome == "trained" and missing:
            raise MessageError(
                f"device {asked[number].device} says it trained, but its tensor set {min(missing)!r} did not come"
            )
    return checked


def own_contribution(work: Work, a: Assignment, update: Update, arrays: list[bytes]) -> tuple[Contribution, bool]:
    """One order's own tensor sets, and whether they had to be moved back to the norm bound."""
    group, who = work.groups[a.group], f"device {a.device}"
    returned = group.returned
    wanted = {name for name, tensor_set in returned.items() if not work.adds_up or tensor_set.merge is None}
    if update.payloads.keys() != wanted:
        came = shown(sorted(update.payloads))
        raise MessageError(f"{who}: tensor sets {came} came, not {sorted(wanted)}")
    far = False
    sums: dict[str, WeightedSum] = {}
    each: TensorSets = {}
    for name, index in update.payloads.items():
        tensor_set = returned[name]
        contents = decode(pick(arrays, index, who), tensor_set.layout, work.wire)
        start: Weights = {}
        if work.reads_against_what_was_sent:
            start = work.start(a.group, name)
        if work.wire != "float32":
            contents = restored(contents, start, tensor_set.layout)
        for tensor, value in contents.items():
            if not bool(torch.isfinite(value.float()).all()):
                raise MessageError(f"{who}: tensor {tensor!r} of {name!r} holds values that are not finite")
            # Of it a norm takes the square root: one channel below 0 makes the model answer NaN.
            if tensor.endswith(VARIANCE) and bool((value < 0).any()):
                raise MessageError(f"{who}: tensor {tensor!r} of {name!r} holds variances below 0")
        if work.norm_bound:
            contents, moved = bounded(contents, start, work.norm_bound)
            far = far or moved
        if tensor_set.merge is None:
            each[name] = contents
            continue
        if work.clip:
            flat, moved = bounded_change(contents, start, tensor_set.layout, work.clip)
            far = far or moved
        else:
            flat = flatten(contents, tensor_set.layout)
        classes = work.family.classes if tensor_set.merge.present_classes else None
        sums[name] = WeightedSum.zeros(tensor_set.layout, classes)
        present = None if classes is None else present_mask(update.present_classes, classes, who)
        weight = device_weight(tensor_set.merge, update.examples, alike=work.clip > 0)
        sums[name].add(flat, weight, present, tensor_set.class_spans)
    return Contribution(group, [a.number], [a.device], update.examples, sums, each), far


def _masked(work: Work, a: Assignment, update: Update, arrays: list[bytes]) -> Tensor:
    """An update under masks; MessageError where it is not of the form that was asked for."""
    who = f"device {a.device}"
    if update.payloads.keys() != {MASKED} or update.present_classes is not None:
        raise MessageError(f"{who}: tensor sets {shown(sorted(update.payloads))} came, not one that is masked")
    return int64_vector(pick(arrays, update.payloads[MASKED], who), joined(work.empty_sums(a)).numel(), who)


def _check_facts(update: Update, local: ClientStep, family: Family) -> None:
    """ValueError where the facts are not those that the client step lists, or cannot be right."""
    facts, wanted = update.facts, local.facts(family)
    came = {name: len(values) for name, values in facts.items()}
    if came != wanted:
        raise MessageError(f"facts {shown(came)} came, not {wanted}")
    for name, values in facts.items():
        if not all(map(math.isfinite, values)):
            raise MessageError(f"the fact {name!r} holds numbers that are not finite")
    local.check_facts(facts, update.examples)


def _sums(
    work: Work, asked: dict[int, Assignment], checked: Checked, reply: Reply, arrays: list[bytes]
) -> list[Contribution]:
    """The sums that a node with many simulated devices made, those over the same devices together."""
    answered = checked.updates
    result: dict[tuple[int, tuple[int, ...]], Contribution] = {}
    seen: dict[str, set[int]] = {}
    for header in reply.sums:
        who = f"the sum over orders {shown(header.orders)}"
        counted = seen.setdefault(header.tensor_set, set())

        def belongs(number: int, group: int = header.group, counted: set[int] = counted) -> bool:
            trained = number in answered and checked.outcomes[number] == "trained"
            return trained and asked[number].group == group and number not in counted

        wrong = [number for number in header.orders if not belongs(number)]
        if wrong or len(set(header.orders)) != len(header.orders):
            raise MessageError(f"{who}: orders {shown(wrong)} are not of group {header.group}, or are counted twice")
        counted.update(header.orders)
        group = work.groups[header.group]
        tensor_set = group.returned.get(header.tensor_set)
        if tensor_set is None or tensor_set.merge is None:
            raise MessageError(f"{who}: a tensor set {shown(header.tensor_set)} is not to be added up")
        alike = work.clip > 0
        weight = sum(
            device_weight(tensor_set.merge, answered[number].examples, alike=alike) for number in header.orders
        )
        if header.weight != weight:
            raise MessageError(f"{who}: weight {header.weight} instead of {weight}")
        class_weight = None
        if tensor_set.merge.present_classes:
            counts = header.class_weight or []
            if len(counts) != work.family.classes or not 0 < max(counts) <= weight:
                raise MessageError(f"{who}: class weights {shown(counts)} do not fit {work.family.classes} classes")
            class_weight = torch.tensor(counts, dtype=torch.int64)
        total = int64_vector(pick(arrays, header.payload, who), tensor_set.layout.numel, who)
        added = WeightedSum(total, weight, class_weight, magnitude(total))
        key = header.group, tuple(header.orders)
        if key not in result:
            examples = sum(answered[number].examples for number in header.orders)
            devices = [asked[number].device for number in header.orders]
            result[key] = Contribution(group, header.orders, devices, examples, {}, {})
        result[key].sums[header.tensor_set] = added
    for contribution in result.values():
        merged = {name for name, tensor_set in contribution.group.returned.items() if tensor_set.merge is not None}
        if missing := merged - contribution.sums.keys():
            who = f"the sum over orders {shown(contribution.orders)}"
            raise MessageError(f"{who}: the tensor set {min(missing)!r} is not summed over the same orders")
    return list(result.values())
