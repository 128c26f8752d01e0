"""Secure aggregation: the server's side of a round in which it sees sums only (Bonawitz et al., CCS 2017, Figure 4).

Devices whose parcels are of the same tensors at the same coordinates are one sum, or several where they are many.
Before they train they agree on keys, in two exchanges beside the training. Each adds masks to its update that cancel in
the sum. After the training those whose updates have arrived reveal shares, of which the server takes the masks of those
that were lost. Sums are integers modulo 2^64, so that the sum is the same to the bit as without masks.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from logging import WARNING

import numpy as np
import torch
from flwr.app import Message, MessageType
from flwr.common import log
from flwr.serverapp import Grid
from torch import Tensor

from devices.validation import one_line
from messages.error import MessageError
from messages.masks import (
    MAX_MEMBERS,
    Words,
    add_common_masks,
    hash_of,
    is_seed_of_key,
    joined_seed,
    mask_key,
    own_mask,
    threshold_of,
)
from messages.orders import KeyAnswer, KeyBatch, KeyOrder, KeyReply, Member
from messages.sums import device_weight, disjoined
from messages.wire import from_records, key_limits, to_records
from rounds.exchange import Failure, each_by_itself, exchange
from rounds.population import Population
from rounds.work import Assignment, Work
from strategies.method import Contribution
from strategies.settings import RoundSettings

STEP_SECONDS = 120.0  # that real nodes have for a step beside the training
LOST = "failed: the sum of its group could not be unmasked"


@dataclass
class Sum:
    """Devices whose updates the server sees as one sum.

    Attributes:
        orders: their assignments, by device.
        threshold: how many of them must answer to the end.
        members: what is known of those that have made keys.
        sealed: sender -> the shares that it has sealed for each member, in their order.
        total: of the masked updates that have arrived, modulo 2^64.
        arrived: the devices of these.
    """

    orders: dict[int, Assignment]
    threshold: int
    members: list[Member] = field(default_factory=list)
    sealed: dict[int, list[str]] = field(default_factory=dict)
    total: Words | None = None
    arrived: list[int] = field(default_factory=list)

    def order(self, device: int, *, reveals: bool = False) -> KeyOrder:
        """The step that comes next for a device."""
        if not reveals:
            return KeyOrder(device=device, members=self.members, threshold=self.threshold)
        place = [member.device for member in self.members].index(device)
        sealed = [self.sealed[m.device][place] if m.device in self.sealed else "" for m in self.members]
        return KeyOrder(device=device, sealed=sealed, survivors=sorted(self.arrived))

    def add(self, device: int, values: Tensor) -> None:
        """Add a masked update."""
        words = values.numpy().view(np.uint64)
        self.total = words.copy() if self.total is None else self.total + words
        self.arrived.append(device)

    def leave_out(self, why: str) -> None:
        """Ask nothing of its devices any more."""
        for a in self.orders.values():
            a.outcome = a.outcome or why
            a.node = a.timing = None


class SecureRound:
    """The sums of one round. Its exchanges go over the grid beside those of the work."""

    def __init__(self, work: Work, settings: RoundSettings, population: Population) -> None:
        self.work, self.settings, self.population = work, settings, population
        self.bytes_down = self.bytes_up = 0
        self.sums: list[Sum] = []
        by_group: defaultdict[int, list[Assignment]] = defaultdict(list)
        for a in work.assignments:
            if a.node is not None:
                by_group[a.group].append(a)
        for assignments in by_group.values():
            for part in parts_of(len(assignments), settings.secure_minimum):
                orders = {assignments[place].device: assignments[place] for place in part}
                self.sums.append(Sum(orders, threshold_of(len(part), settings.secure_minimum)))

    # Before the training

    def agree(self, grid: Grid) -> None:
        """Let devices make keys and share their seeds; who does not answer does not train in this round."""
        for found in self.sums:
            self._hold(found, len(found.orders))
        answers = self._step(grid, lambda s: s.orders)
        for found in self._open():
            found.members = [
                answer.member
                for device in sorted(found.orders)
                if (answer := answers.get(device)) is not None
                and answer.member is not None
                and answer.member.device == device
            ]
            there = {member.device for member in found.members}
            self._without(found, there, "made no keys", answers)
            found.threshold = threshold_of(len(there), self.settings.secure_minimum)
            self._hold(found, len(there))
        answers = self._step(grid, lambda s: [member.device for member in s.members])
        for found in self._open():
            for member in found.members:
                answer = answers.get(member.device)
                if answer is not None and len(answer.sealed) == len(found.members) and all(answer.sealed):
                    found.sealed[member.device] = answer.sealed
            self._without(found, found.sealed.keys(), "did not share its seeds", answers)
            if len(found.sealed) < found.threshold:
                found.leave_out(f"failed: {len(found.sealed)} of its group shared their seeds, not {found.threshold}")
                continue
            for device in found.sealed:
                found.orders[device].masked_with = sorted(found.sealed)

    def _hold(self, found: Sum, count: int) -> None:
        """Leave a sum out that would be of too few devices."""
        if count < self.settings.secure_minimum:
            found.leave_out(
                f"skipped: the sum of its group would be of {count} devices, and secure-minimum is "
                f"{self.settings.secure_minimum}"
            )

    def _open(self) -> list[Sum]:
        """The sums that are not left out."""
        return [s for s in self.sums if any(a.node is not None for a in s.orders.values())]

    def _without(self, found: Sum, there: Collection[int], why: str, answers: Mapping[int, KeyAnswer]) -> None:
        for device, a in found.orders.items():
            if device not in there and a.node is not None:
                answer = answers.get(device)
                because = f": {answer.error}" if answer is not None and answer.error else ""
                a.outcome = a.outcome or one_line(f"failed: it {why}{because}")
                a.node = a.timing = None

    # While updates arrive

    def sum_of(self, a: Assignment) -> Sum:
        """The sum of a device's order."""
        return next(s for s in self.sums if s.orders.get(a.device) is a)

    # After the training

    def finish(self, grid: Grid) -> list[tuple[Contribution, list[Assignment]]]:
        """Take the masks off all sums that can be unmasked. -> the sums, with the orders that they are of.

        The outcome of devices whose sum is lost says so.
        """
        for found in self._open():
            if found.arrived and len(found.arrived) < found.threshold:
                self._lose(found, f"{len(found.arrived)} updates arrived, {found.threshold} are needed")
        ready = [s for s in self._open() if s.arrived]
        answers = self._step(grid, lambda s: s.arrived, reveals=True)
        contributions = []
        for found in ready:
            try:
                contributions.append((self._unmasked(found, answers), [found.orders[d] for d in sorted(found.arrived)]))
            except MessageError as error:
                self._lose(found, str(error))
        return contributions

    def _lose(self, found: Sum, why: str) -> None:
        log(WARNING, "Round %s: the sum over devices %s is lost: %s", self.work.round, sorted(found.orders), why)
        for device in found.arrived:
            found.orders[device].outcome = one_line(f"{LOST}: {why}")
        found.arrived.clear()

    def _unmasked(self, found: Sum, answers: Mapping[int, KeyAnswer]) -> Contribution:
        """The sum of those that have arrived, without masks. Raises MessageError where shares are missing or wrong."""
        masking = [member for member in found.members if member.device in found.sealed]
        places = {member.device: place for place, member in enumerate(found.members)}
        told = {
            device: [bytes.fromhex(share) for share in answers[device].shares]
            for device in sorted(found.arrived)
            if device in answers and len(answers[device].shares) == len(masking)
        }
        if len(told) < found.threshold:
            raise MessageError(f"{len(told)} devices revealed shares, {found.threshold} are needed")
        chosen = dict(list(told.items())[: found.threshold])
        assert found.total is not None
        total = found.total.copy()
        survivors = {m.device: m for m in masking if m.device in found.arrived}
        for number, member in enumerate(masking):
            seed = joined_seed({places[device]: shares[number] for device, shares in chosen.items()})
            if member.device in survivors:
                if hash_of(seed) != member.own_seed_hash:
                    raise MessageError(f"the shares of device {member.device}'s own seed are wrong")
                total -= own_mask(seed, len(total))
                continue
            if not is_seed_of_key(seed, member):
                raise MessageError(f"the shares of device {member.device}'s key are wrong")
            # What it would have added, were it there, takes away what the others have added for it.
            add_common_masks(total, member.device, mask_key(seed), survivors)
        return self._contribution(found, torch.from_numpy(total.view(np.int64)))

    def _contribution(self, found: Sum, values: Tensor) -> Contribution:
        orders = [found.orders[device] for device in sorted(found.arrived)]
        group, like = self.work.groups[orders[0].group], self.work.empty_sums(orders[0])
        examples = [a.update.examples for a in orders if a.update is not None]
        weights = {
            name: sum(device_weight(parcel.merge, count) for count in examples)
            for name, parcel in group.returned.items()
            if parcel.merge is not None
        }
        sums = disjoined(values, like, weights)
        return Contribution(group, [a.number for a in orders], [a.device for a in orders], sum(examples), sums, {})

    # Traffic

    def _step(
        self, grid: Grid, of: Callable[[Sum], Sequence[int] | Mapping[int, object]], *, reveals: bool = False
    ) -> dict[int, KeyAnswer]:
        """Ask the devices of all open sums for their next step. -> what each of them answered."""
        queues: dict[int, deque[list[KeyOrder]]] = {}
        by_node: defaultdict[int, list[KeyOrder]] = defaultdict(list)
        for found in self._open():
            for device in of(found):
                node = found.orders[device].node
                if node is not None:
                    by_node[node].append(found.order(device, reveals=reveals))
        for node, orders in by_node.items():
            queues[node] = deque([orders])
        simulated = self.population.simulated
        bound = self.population.answer_seconds(self.settings.deadline_seconds)
        seconds = None if simulated and bound is None else min(bound or STEP_SECONDS, STEP_SECONDS)

        # Orders and answers alone, so that the figure does not depend on how many of them a message holds.
        self.bytes_down += sum(len(order.model_dump_json()) for orders in by_node.values() for order in orders)

        def make(node: int, batch: list[KeyOrder]) -> Message:
            content = KeyBatch(
                run=self.settings.run,
                round=self.work.round,
                shared_process=simulated,
                state_dir=self.settings.state_dir,
                orders=batch,
            )
            return Message(to_records(content), node, MessageType.QUERY, ttl=seconds)

        answers: dict[int, KeyAnswer] = {}
        for batch, reply in exchange(
            grid,
            queues,
            make,
            deadline_seconds=seconds,
            busy=self.population.busy,
            poll_seconds=self.population.poll_seconds,
            parts=each_by_itself if simulated else None,
        ):
            if isinstance(reply, Failure):
                why = one_line(reply.why)
                answers |= {order.device: KeyAnswer(device=order.device, error=why) for order in batch}
            else:
                answers |= self._read(batch, reply)
        return answers

    def _read(self, batch: Sequence[KeyOrder], message: Message) -> dict[int, KeyAnswer]:
        """The answers of a reply, by device; none where it is no answer to the batch."""
        try:
            reply, _ = from_records(KeyReply, message.content, key_limits(len(batch), self.largest))
            if (reply.run, reply.round) != (self.settings.run, self.work.round):
                raise MessageError(f"the reply is for round {reply.round}, not for round {self.work.round}")
            found = {answer.device: answer for answer in reply.answers}
            if set(found) - {order.device for order in batch} or len(found) != len(reply.answers):
                raise MessageError(f"devices {sorted(found)[:5]} answer, which were not all asked, or answer twice")
        except MessageError as error:
            why = one_line(str(error))
            log(WARNING, "Round %s: an answer about keys is refused: %s", self.work.round, why)
            return {order.device: KeyAnswer(device=order.device, error=why) for order in batch}
        self.bytes_up += sum(len(answer.model_dump_json()) for answer in reply.answers)
        return found

    @property
    def largest(self) -> int:
        """How many devices the largest sum is of."""
        return max((len(s.orders) for s in self.sums), default=0)


def parts_of(count: int, minimum: int) -> list[range]:
    """How many devices are parted into sums of about equal size: of at most MAX_MEMBERS, where that leaves enough."""
    parts = max(1, min(-(-count // MAX_MEMBERS), count // minimum))
    edges = [count * part // parts for part in range(parts + 1)]
    return [range(first, last) for first, last in pairwise(edges)]
