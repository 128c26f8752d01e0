"""Secure aggregation: the server's side of a round in which it sees sums only (Bonawitz et al., CCS 2017, Figure 4).

Devices whose tensor sets are of the same tensors at the same coordinates are one sum, or several where they are many.
Before they train they agree on keys, in two exchanges beside the training. Each adds masks to its update that cancel in
the sum. After the training those whose updates have arrived confirm to each other who they are, and reveal shares, of
which the server takes the masks of those that were lost. Sums are integers modulo 2^64, so that the sum is the same to
the bit as without masks.

A device that breaks the protocol loses its round, and after some of them its node is quarantined. What cannot be known
is whose update has spoilt a sum: such a sum is dropped, and nobody is blamed.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from flwr.app import Message, MessageType
from flwr.serverapp import Grid
from torch import Tensor

from wildflower.devices.validation import one_line, shown
from wildflower.messages.bound import check_sum
from wildflower.messages.error import MessageError
from wildflower.messages.masks import (
    MAX_MEMBERS,
    Words,
    add_common_masks,
    digest_of_asked,
    digest_of_members,
    digest_of_weights,
    digests_of,
    enough_of,
    is_own_seed,
    is_seed_of_key,
    mask_key,
    own_mask,
    threshold_of,
    with_keys_of_others,
    wrong_keys,
)
from wildflower.messages.orders import Batch, KeyAnswer, KeyBatch, KeyOrder, KeyReply, Member, parse
from wildflower.messages.sums import device_weight, disjoined
from wildflower.messages.wire import from_records, key_limits, to_records
from wildflower.plugins.flower_log import log
from wildflower.rounds.exchange import Failure, each_by_itself, exchange
from wildflower.rounds.population import Population
from wildflower.rounds.requests import Assignment, Work
from wildflower.rounds.shares import Shares
from wildflower.strategies.method import Contribution
from wildflower.strategies.run_settings import RoundSettings

STEP_SECONDS = 120.0  # that real nodes have for a step beside the training
LOST = "failed: the sum of its group could not be unmasked"
IMPLAUSIBLE = "failed: the sum of its group can be of no honest updates, and is dropped"


@dataclass
class Sum:
    """Devices whose updates the server sees as one sum.

    Attributes:
        orders: their assignments, by device.
        threshold: how many of them must answer to the end.
        minimum: the fewest devices of a block.
        complete: nobody may be lost: they have been a block of a sum from the same weights, and are in no other.
        members: what is known of those that have made keys.
        sealed: sender -> the shares that it has sealed for each member, in their order.
        share_hashes: sender -> of its shares of its own seed, in the members' order, then of its mask key's.
        total: of the masked updates that have arrived, modulo 2^64.
        arrived: the devices of these.
        confirmed: sender -> what it has confirmed to each member, in their order.
        blocks: the devices that have arrived, in blocks.
    """

    orders: dict[int, Assignment]
    threshold: int
    minimum: int
    complete: bool = False
    members: list[Member] = field(default_factory=list)
    sealed: dict[int, list[str]] = field(default_factory=dict)
    share_hashes: dict[int, list[str]] = field(default_factory=dict)
    total: Words | None = None
    arrived: list[int] = field(default_factory=list)
    confirmed: dict[int, list[str]] = field(default_factory=dict)
    blocks: list[list[int]] = field(default_factory=list)

    @property
    def needed(self) -> int:
        """Return how many updates must arrive."""
        return len(self.orders) if self.complete else self.threshold

    def sharing(self, device: int) -> KeyOrder:
        """Return what a device needs to share its seeds."""
        return KeyOrder(device=device, members=self.members, threshold=self.threshold, minimum=self.minimum)

    def confirming(self, device: int) -> KeyOrder:
        """Return what a device needs to confirm the devices of the sum."""
        return KeyOrder(device=device, blocks=self.blocks)

    def revealing(self, device: int) -> KeyOrder:
        """Return what a device needs to reveal shares."""
        place = [member.device for member in self.members].index(device)
        sealed, confirmed = (
            [given[m.device][place] if m.device in given else "" for m in self.members]
            for given in (self.sealed, self.confirmed)
        )
        return KeyOrder(device=device, blocks=self.blocks, sealed=sealed, confirmed=confirmed)

    def add(self, device: int, values: Tensor) -> None:
        """Add a masked update."""
        words = values.numpy().view(np.uint64)
        self.total = words.copy() if self.total is None else self.total + words
        self.arrived.append(device)

    def leave_out(self, why: str) -> None:
        """Ask nothing of its devices any more."""
        for a in self.orders.values():
            leave_out(a, why)


def leave_out(a: Assignment, why: str) -> None:
    """Ask nothing of a device any more."""
    a.outcome = a.outcome or one_line(why)
    a.node = a.timing = None


class SecureRound:
    """The sums of one round. Its exchanges go over the grid beside those of the work."""

    def __init__(self, work: Work, settings: RoundSettings, population: Population) -> None:
        self.work, self.settings, self.population = work, settings, population
        self.bytes_down = self.bytes_up = 0
        # Only who is asked the same is in one sum: all have to confirm that (`wildflower.messages.masks.digests_of`).
        alike: defaultdict[tuple[int, str], dict[int, Assignment]] = defaultdict(dict)
        for a in work.assignments:
            if a.node is not None:
                half = json.dumps(a.task.client_step.reference().model_dump(mode="json"), sort_keys=True)
                alike[a.group, half][a.device] = a
        minimum = settings.secure_minimum
        self.sums = [Sum(orders, threshold_of(len(orders), minimum), minimum) for orders in alike.values()]

    # Before the training

    def agree(self, grid: Grid) -> None:
        """Let devices make keys and share their seeds; who does not answer does not train in this round."""
        for found in self.sums:
            self._hold(found)
        weights = {id(found): self._weights(found) for found in self._open()}
        answers = self._step(
            grid, lambda s: s.orders, lambda s, device: KeyOrder(device=device, weights=weights[id(s)])
        )
        self.sums = [part for found in self._open() for part in self._parts(found, answers)]
        for found in self.sums:
            self._hold(found)
        answers = self._step(grid, lambda s: s.orders, Sum.sharing)
        for found in self._open():
            self._take_shares(found, answers)
            if len(found.sealed) < found.needed:
                found.leave_out(f"failed: {len(found.sealed)} of its group shared their seeds, not {found.needed}")
                continue
            for device in found.sealed:
                found.orders[device].masked_with = sorted(found.sealed)

    def _weights(self, found: Sum) -> str:
        first = next(iter(found.orders.values()))
        return digest_of_weights(self.work.packed(first.group), first.frozen.name)

    def _parts(self, found: Sum, answers: Mapping[int, KeyAnswer]) -> list[Sum]:
        """Part those of a group that have made keys into sums.

        Who has been in a sum from the same weights, as where a run was resumed or the sum was dropped, is in one of its
        block then.
        """
        members: dict[int, Member] = {}
        for device, a in found.orders.items():
            answer = answers.get(device, KeyAnswer(device=device))
            if answer.member is None:
                leave_out(a, f"failed: it made no keys{_because(answer)}")
            elif answer.member.device != device:
                self._blame(a, f"it made keys for device {answer.member.device}, not {device}")
            elif why := wrong_keys(answer.member):
                self._blame(a, f"nothing can be agreed with its keys: {why}")
            elif answer.only_with and device not in answer.only_with:
                self._blame(a, f"it says that it is bound to a block of others, {shown(answer.only_with)}")
            else:
                members[device] = answer.member
        for device in with_keys_of_others(members.values()):
            leave_out(found.orders[device], "failed: another device has the same keys")  # which of them has copied?
            del members[device]
        parts: defaultdict[frozenset[int], list[int]] = defaultdict(list)
        bound = {device: frozenset(answers[device].only_with) for device in members}
        for block, count in Counter(block for block in bound.values() if block).items():
            # Those of a block that have not confirmed it are not bound to it, and join the others.
            agree = all(bound.get(device, block) in (block, frozenset()) for device in block)
            if agree and block <= members.keys() and 2 * count > len(block):
                parts[block] = sorted(block)
        taken = {device for devices in parts.values() for device in devices}
        for device in sorted(members.keys() - taken):
            if bound[device]:
                before = sorted(bound[device])
                why = f"from these weights it has been in a sum together with devices {before}, and not all are there"
                leave_out(found.orders[device], f"failed: {why}")
            else:
                parts[frozenset()].append(device)
        sums = []
        for block, devices in parts.items():
            for part in [range(len(devices))] if block else parts_of(len(devices), found.minimum):
                orders = {devices[place]: found.orders[devices[place]] for place in part}
                threshold = threshold_of(len(orders), found.minimum)
                known = [members[device] for device in orders]
                sums.append(Sum(orders, threshold, found.minimum, bool(block), known))
        return sums

    def _take_shares(self, found: Sum, answers: Mapping[int, KeyAnswer]) -> None:
        count = len(found.members)
        for device, a in found.orders.items():
            answer = answers.get(device, KeyAnswer(device=device))
            if answer.error or not answer.sealed:
                leave_out(a, f"failed: it did not share its seeds{_because(answer)}")
            elif len(answer.sealed) != count or not all(answer.sealed) or len(answer.share_hashes) != 2 * count:
                self._blame(
                    a, f"it did not share its seeds: shares for {count} members were to come, with 2 hashes each"
                )
            else:
                found.sealed[device], found.share_hashes[device] = answer.sealed, answer.share_hashes

    def _hold(self, found: Sum) -> None:
        """Leave a sum out that would be of too few devices."""
        if len(found.orders) < self.settings.secure_minimum:
            found.leave_out(
                f"skipped: the sum of its group would be of {len(found.orders)} devices, and "
                f"secure-aggregation.minimum is {self.settings.secure_minimum}"
            )

    def _open(self) -> list[Sum]:
        """The sums that are not left out."""
        return [s for s in self.sums if any(a.node is not None for a in s.orders.values())]

    def _blame(self, a: Assignment, why: str) -> None:
        """Leave out a device that has broken the protocol, and count it for its node."""
        self._broken(a, why)
        leave_out(a, f"failed: {why}")

    def _broken(self, a: Assignment, why: str) -> None:
        if a.node is not None:
            self._broken_by(a.node, f"device {a.device}: {why}")

    def _broken_by(self, node: int, why: str) -> None:
        self.work.broke[node] = why = one_line(why)
        log.warning("Round %s: node %s breaks secure aggregation: %s", self.work.round, node, why)

    # While updates arrive

    def sum_of(self, a: Assignment) -> Sum:
        """The sum of a device's order."""
        return next(s for s in self.sums if s.orders.get(a.device) is a)

    # After the training

    def finish(self, grid: Grid) -> None:
        """Take the masks off all sums that can be unmasked, and absorb those that are plausible.

        The outcome of devices whose sum is lost says so.
        """
        for found in self._open():
            if found.arrived and len(found.arrived) < found.needed:
                self._lose(found, f"{len(found.arrived)} updates arrived, {found.needed} are needed")
            found.blocks = [sorted(found.arrived)] if found.complete else self._blocks(sorted(found.arrived))
        answers = self._step(grid, lambda s: s.arrived, Sum.confirming)
        for found in self._open():
            for device in found.arrived:
                answer = answers.get(device, KeyAnswer(device=device))
                if len(answer.confirmed) == len(found.members):
                    found.confirmed[device] = answer.confirmed
                elif answer.confirmed:
                    self._broken(found.orders[device], f"it confirmed a sum to {len(answer.confirmed)} others")
            enough = all(len(found.confirmed.keys() & block) >= enough_of(len(block)) for block in found.blocks)
            if found.arrived and (len(found.confirmed) < found.threshold or not enough):
                told = f"only {sorted(found.confirmed)} confirmed the sum, of {found.blocks}: {found.threshold} must, "
                self._lose(found, f"{told}and more than 2/3 of each block{_first(answers, found.arrived)}")
        answers = self._step(grid, lambda s: s.confirmed if s.arrived else (), Sum.revealing)
        for found in self._open():
            if not found.arrived:
                continue
            try:
                contribution = self._unmasked(found, answers)
            except MessageError as error:
                self._lose(found, str(error))
                continue
            try:
                self._check(found, contribution)
                self.work.absorb(contribution)
            except MessageError as error:
                self._lose(found, str(error), IMPLAUSIBLE)

    def _blocks(self, devices: list[int]) -> list[list[int]]:
        parts = _even_parts(len(devices), block_count(len(devices), self.settings.secure_minimum))
        return [devices[part.start : part.stop] for part in parts]

    def _lose(self, found: Sum, why: str, outcome: str = LOST) -> None:
        log.warning("Round %s: the sum over devices %s is lost: %s", self.work.round, sorted(found.orders), why)
        for device in found.arrived:
            found.orders[device].outcome = one_line(f"{outcome}: {why}")
        found.arrived.clear()

    def _unmasked(self, found: Sum, answers: Mapping[int, KeyAnswer]) -> Contribution:
        """The sum of those that have arrived, without masks. Raises MessageError where shares are missing or wrong."""
        masking = [member for member in found.members if member.device in found.sealed]
        told: dict[int, list[str]] = {}
        for device in found.arrived:
            answer = answers.get(device, KeyAnswer(device=device))
            if len(answer.shares) == len(masking):
                told[device] = answer.shares
            elif answer.shares:
                self._broken(found.orders[device], f"it revealed {len(answer.shares)} shares, not {len(masking)}")
        if len(told) < found.threshold:
            few = f"{len(told)} devices revealed shares, {found.threshold} are needed"
            raise MessageError(few + _first(answers, found.arrived))
        places = {member.device: place for place, member in enumerate(found.members)}
        shares = Shares(told, places, found.threshold)
        seeds: list[tuple[Member, bytes]] = []
        problems = []
        for number, member in enumerate(masking):
            hashes = found.share_hashes[member.device]
            if member.device in found.arrived:
                name, hashes, is_right = "own seed", hashes[: len(places)], is_own_seed
            else:
                name, hashes, is_right = "key", hashes[len(places) :], is_seed_of_key
            seed = shares.seed(number, member.device, hashes, partial(is_right, member=member))
            if seed is None:
                problems.append(f"the shares of device {member.device}'s {name} are wrong")
            else:
                seeds.append((member, seed))
        for device, why in shares.liars().items():
            self._broken(found.orders[device], why)
        if problems:
            raise MessageError("; ".join(problems[:3]))
        assert found.total is not None
        total, asked = found.total.copy(), self._asked(found)
        survivors = {member.device: member for member in masking if member.device in found.arrived}
        for member, seed in seeds:
            if member.device in survivors:
                total -= own_mask(seed, len(total))
            else:
                # What it would have added, were it there, takes away what the others have added for it.
                add_common_masks(total, member.device, mask_key(seed), survivors, asked)
        return self._contribution(found, torch.from_numpy(total.view(np.int64)))

    def _asked(self, found: Sum) -> str:
        """The digest of what the devices of a sum have been told, as they have computed it."""
        content, arrays = self.work.content(self.settings, [found.orders[found.arrived[0]]])
        batch = parse(Batch, content.model_dump_json())
        members = digest_of_members(found.members, found.threshold, found.minimum)
        return digest_of_asked(members, found.sealed, *digests_of(batch, batch.orders[0], arrays))

    def _contribution(self, found: Sum, values: Tensor) -> Contribution:
        orders = [found.orders[device] for device in sorted(found.arrived)]
        group, like = self.work.groups[orders[0].group], self.work.empty_sums(orders[0])
        examples = [a.update.examples for a in orders if a.update is not None]
        weights = {
            name: sum(device_weight(tensor_set.merge, count) for count in examples)
            for name, tensor_set in group.returned.items()
            if tensor_set.merge is not None
        }
        sums = disjoined(values, like, weights)
        return Contribution(group, [a.number for a in orders], [a.device for a in orders], sum(examples), sums, {})

    def _check(self, found: Sum, contribution: Contribution) -> None:
        """MessageError where a sum can be of no honest updates."""
        group = next(iter(found.orders.values())).group
        for name, total in contribution.sums.items():
            tensor_set = contribution.group.returned[name]
            sent = self.work.start(group, name)
            check_sum(total, tensor_set.layout, sent, tensor_set.class_spans, self.work.norm_bound)

    # Traffic

    def _step(
        self,
        grid: Grid,
        of: Callable[[Sum], Collection[int]],
        order: Callable[[Sum, int], KeyOrder],
    ) -> dict[int, KeyAnswer]:
        """Ask devices of all open sums for their next step. -> what each of them answered."""
        queues: dict[int, deque[list[KeyOrder]]] = {}
        by_node: defaultdict[int, list[KeyOrder]] = defaultdict(list)
        for found in self._open():
            for device in of(found):
                node = found.orders[device].node
                if node is not None:
                    by_node[node].append(order(found, device))
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
                of = f"the reply is for round {reply.round} of run {shown(reply.run)}"
                raise MessageError(f"{of}, not for round {self.work.round} of {shown(self.settings.run)}")
            found = {answer.device: answer for answer in reply.answers}
            if set(found) - {order.device for order in batch} or len(found) != len(reply.answers):
                raise MessageError(f"devices {sorted(found)[:5]} answer, which were not all asked, or answer twice")
        except MessageError as error:
            why = one_line(str(error))
            self._broken_by(message.metadata.src_node_id, f"its answer is refused: {why}")
            return {order.device: KeyAnswer(device=order.device, error=why) for order in batch}
        self.bytes_up += sum(len(answer.model_dump_json()) for answer in reply.answers)
        return found

    @property
    def largest(self) -> int:
        """Return how many devices the largest sum is of."""
        return max((len(s.orders) for s in self.sums), default=0)


def _because(answer: KeyAnswer) -> str:
    return f": {one_line(answer.error)}" if answer.error else ""


def _first(answers: Mapping[int, KeyAnswer], devices: Sequence[int]) -> str:
    """What the first device says that refused a step; "" where none has."""
    told = (f": device {d} says: {one_line(answers[d].error or '')}" for d in sorted(devices) if d in answers)
    return next((text for text in told if not text.endswith(": ")), "")


def parts_of(count: int, minimum: int) -> list[range]:
    """Return how many devices are parted into sums of about equal size: of at most MAX_MEMBERS, where that leaves
    enough."""
    return _even_parts(count, max(1, min(-(-count // MAX_MEMBERS), count // minimum)))


def block_count(devices: int, minimum: int) -> int:
    """The number of blocks of a sum, of which some can go on if one is broken: three at most.

    In each some may be lost before they have confirmed it, which takes four devices.
    """
    return max(1, devices // max(minimum, 4, devices // 3))


def _even_parts(count: int, parts: int) -> list[range]:
    edges = [count * part // parts for part in range(parts + 1)]
    return [range(first, last) for first, last in pairwise(edges)]
