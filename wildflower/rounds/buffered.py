"""Asynchronous rounds: a new model for every `buffer` updates, while slower devices go on with the one that they have.

FedBuff (Nguyen et al. 2022, "Federated Learning with Buffered Asynchronous Aggregation", Algorithm 1). As many devices
are at work at any time as a round has (the concurrency M), and a round ends with its K-th update. An update is the
change of the model that its device was sent. It is applied to the model of now, with a weight that falls with the
number s of models that were made in between:

    x_{t+1, j} = x_{t, j} + sum_i w_i Delta_{i, j} / sum_i w_i,    w_i = n_i / sqrt(1 + s_i)

over the updates i of the round that own coordinate j. n_i is the weight that the method gives the device. The paper
divides by K in place of the sum of weights, and a method's mean over a coordinate's owners has no K.

Under a fleet the virtual clock says which devices are done next, and these train then: what is held of a device at work
is what it was sent, once for all that were sent the same. On real nodes a device trains as soon as it is asked.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import torch
from flwr.app import Message
from flwr.serverapp import Grid
from torch import Tensor
from typing_extensions import override

from wildflower.devices.budget import Budget
from wildflower.devices.clock import Timing
from wildflower.messages.encoding import start_of
from wildflower.messages.orders import StepReference
from wildflower.messages.sums import split
from wildflower.messages.tensor_sets import TensorSet, TensorSets, Weights
from wildflower.models.architecture import Architecture
from wildflower.models.family import Family
from wildflower.models.placement import Coordinates, leading
from wildflower.rounds.engine import Engine
from wildflower.rounds.exchange import Failure, pull
from wildflower.rounds.hooks import Round
from wildflower.rounds.requests import Assignment, Held, Work, by_device, devices_that_trained
from wildflower.strategies.method import Contribution, Group, Order, Selection, State, client_step_of

FRESH = 64
"""The weight of an update that is not stale. It multiplies the device's own weight.

A power of 2, so that rounds in which nothing is stale have the bits of synchronous ones.
"""
_TENSORS = "at-work/"


@dataclass
class AtWork:
    """A device that was asked, and whose update has not come.

    end: under a fleet the simulated second at which it is done; on real nodes that of `time.monotonic` at which it is
        given up.
    work: on real nodes that of the round in which it was asked.
    """

    device: int
    orders: list[Assignment]
    end: float
    work: Work | None = None


class BufferedEngine(Engine):
    """An engine whose rounds are asynchronous.

    Attributes:
        at_work: the devices that were asked and are not done; as many as a round has at most.
    """

    def __init__(self, *args: Any, **keys: Any) -> None:
        super().__init__(*args, **keys)
        self.at_work: dict[int, AtWork] = {}
        self._messages: dict[str, int] = {}  # on real nodes: message -> its device
        self._seconds = 0.0

    @override
    def sample(self, grid: Grid, number: int) -> Round:
        """Begin a round with as many new devices as there are places."""
        if self.population.simulated:  # the update of who left is lost
            there = set(self.population.connected(grid, list(self.at_work)))
            self.at_work = {device: found for device, found in self.at_work.items() if device in there}
        round = super().sample(grid, number)
        round.devices = [device for device in round.devices if device not in self.at_work]
        if self.population.simulated:
            del round.devices[self._free :]
        return round

    @override
    def places(self) -> int:
        """Under a fleet devices at work are sampled too, and left out then."""
        return self.settings.devices_per_round if self.population.simulated else self._free

    @property
    def _free(self) -> int:
        return self.settings.devices_per_round - len(self.at_work)

    @override
    def gather(self, round: Round) -> None:
        """Let the new devices begin, and absorb the next `buffer` updates: these are the round's."""
        asked = [a for a in round.assignments if a.given is not None and not a.outcome]
        nothing = [a for a in round.assignments if a.given is None or a.outcome]
        self._hold(round, asked)
        begun = self._done_by_clock if self.population.simulated else self._listen
        self.assignments = round.assignments = nothing
        begun(round, asked)

    def _hold(self, round: Round, asked: list[Assignment]) -> None:
        """Keep what devices are sent, which the method is about to change."""
        held: dict[int, Held] = {}
        for a in asked:
            if a.group not in held:
                group = round.asked.groups[a.group]
                sent = _listed(self.method.payload(group) if group.sent else {}, group)
                copied = {s: {name: tensor.clone() for name, tensor in sent[s].items()} for s in sent}
                held[a.group] = Held(round.number, copied)
            a.held = held[a.group]

    def _bind(self, work: Work) -> Work:
        """Make work of what its devices were sent when they were asked, and of their changes updates of now."""
        held = {id(work.groups[a.group]): a.held for a in work.assignments if a.held is not None}
        work.payload = lambda group: _listed(held[id(group)].sent, group)
        work.absorb = partial(self._absorb, held)
        return work

    def _work(self, round: Round) -> Work:
        made = round.asked
        assignments, norm_bound = round.assignments, self.settings.norm_bound
        devices = len(by_device(assignments))
        return self._bind(
            self.asking.work(assignments, made.family, made.payload, made.absorb, devices, norm_bound=norm_bound)
        )

    def _absorb(self, held: Mapping[int, Held], contribution: Contribution) -> None:
        """Let the method absorb changes as if they had been made to the model of now; MessageError refuses them."""
        group = contribution.group
        start = held[id(group)]
        staleness = self.method.round - start.round
        now = self.method.payload(group) if staleness and group.sent else {}
        times = weight_of(staleness)
        for name, total in contribution.sums.items():
            by = _way(start.sent.get(name, {}), now.get(name, {}), group.returned[name])
            contribution.sums[name] = total.moved(by, times, group.returned[name].class_spans)
        self.method.absorb(contribution)

    # Under a fleet

    def _done_by_clock(self, round: Round, asked: list[Assignment]) -> None:
        now = self.population.now_seconds
        for device, orders in by_device(asked).items():
            self.at_work[device] = AtWork(device, orders, now + orders[0].simulated_seconds)
        due = sorted(self.at_work.values(), key=lambda found: (found.end, found.device))[: self.settings.buffer]
        for found in due:
            del self.at_work[found.device]
            round.assignments += found.orders
            for a in found.orders:  # it may have been sent some of it since
                a.frozen = self.asking.frozen.owed(a.device, a.task.architecture, a.task.selection)
        # A round that nobody takes part in still takes a second, or links that carry nothing now never would again.
        self._seconds = max(0.0, due[-1].end - now) if due else 1.0
        round.work = self._work(round)
        self.asking.route(round.grid, round.work)
        self.sending.run(round.grid, round.work, on_reply=partial(self._replied, round))

    @override
    def seconds(self, round: Round) -> float:
        return self._seconds

    # On real nodes

    def _listen(self, round: Round, asked: list[Assignment]) -> None:
        work = self._bind(round.asked)
        limit_seconds = self.population.answer_seconds(self.settings.deadline_seconds) or math.inf
        refused: dict[int, str] = {}
        for node, batches in work.batches().items():
            for batch in batches:  # one, because a node carries one device
                found = AtWork(batch[0].device, batch, time.monotonic() + limit_seconds, work)
                sent = [i for i in round.grid.push_messages([self.sending.message(work, node, batch)]) if i]
                if not sent:
                    self._take(round, found, Failure("Flower did not take the message for this node"), refused)
                    continue
                self.at_work[found.device] = found
                self._messages[sent[0]] = found.device
                self.population.at_work.add(node)
        while self.at_work and devices_that_trained(round.assignments) < self.settings.buffer:
            self._read(round, refused)
        round.work = self._work(round)
        round.work.refused |= refused

    def _read(self, round: Round, refused: dict[int, str]) -> None:
        """Take the replies that have come, up to as many as the round wants, or wait a little; give up who is late."""
        began = time.monotonic()
        waiting = {message: self.at_work[device] for message, device in self._messages.items()}
        left = self.settings.buffer - devices_that_trained(round.assignments)
        came = False
        for message, reply in pull(round.grid, {message: _node(found) for message, found in waiting.items()}):
            came = True
            self._take(round, self._done(message), reply, refused)
            left -= devices_that_trained(waiting[message].orders)
            if not left:
                return
        late = [message for message in self._messages if waiting[message].end <= time.monotonic()]
        for message in late:
            why = f"no reply within the deadline of {self.settings.deadline_seconds:g} s"
            self._take(round, self._done(message), Failure(why, late=True), refused)
        if not came:
            # To look after many nodes takes long: for most of the time the SuperLink is left to them.
            time.sleep(max(self.population.poll_seconds, 4 * (time.monotonic() - began)))

    def _done(self, message: str) -> AtWork:
        return self.at_work.pop(self._messages.pop(message))

    def _take(self, round: Round, found: AtWork, reply: Message | Failure, refused: dict[int, str]) -> None:
        """Absorb one reply."""
        assert found.work is not None
        node = _node(found)
        self.population.at_work.discard(node)
        if isinstance(reply, Failure) and reply.late:
            self.population.busy.add(node)
        self.sending.take(found.work, found.orders, reply, partial(self._replied, round))
        if node in found.work.refused:
            refused[node] = found.work.refused.pop(node)
        round.assignments += found.orders

    # What a round leaves

    @override
    def finish(self, round: Round) -> None:
        super().finish(round)
        stale = [
            round.number - orders[0].begun
            for orders in by_device(a for a in round.assignments if a.outcome == "trained").values()
        ]
        if stale:
            round.metrics |= {"staleness_mean": sum(stale) / len(stale), "staleness_max": float(max(stale))}

    @override
    def state(self) -> State:
        """Under a fleet also the devices at work, and what they were sent. Real nodes are asked anew."""
        state = super().state()
        if not (self.population.simulated and self.at_work):
            return state
        numbers: dict[Held, int] = {}
        devices = []
        for found in self.at_work.values():
            orders = [
                _to_json(a, numbers.setdefault(a.held, len(numbers)), self.method.family)
                for a in found.orders
                if a.held is not None
            ]
            devices.append({"device": found.device, "end": found.end, "orders": orders})
        tensors = {
            f"{_TENSORS}{number}/{tensor_set}/{name}": tensor
            for held, number in numbers.items()
            for tensor_set, contents in held.sent.items()
            for name, tensor in contents.items()
        }
        at_work = {"devices": devices, "rounds": [held.round for held in numbers]}
        return State({**state.tensors, **tensors}, {**state.values, "at_work": at_work})

    @override
    def load(self, state: State) -> None:
        own = {name: tensor for name, tensor in state.tensors.items() if not name.startswith(_TENSORS)}
        super().load(State(own, state.values))
        at_work = state.values.get("at_work", {"devices": [], "rounds": []})
        held = [Held(number, {}) for number in at_work["rounds"]]
        for name in state.tensors.keys() - own.keys():
            _, number, tensor_set, tensor = name.split("/", 3)
            held[int(number)].sent.setdefault(tensor_set, {})[tensor] = state.tensors[name]
        for values in at_work["devices"]:
            orders: list[Assignment] = []
            for order in values["orders"]:
                orders.append(self._asked_before(values["device"], order, held[order["held"]]))
                orders[-1].earlier = None if order["after"] is None else orders[order["after"]]
            self.at_work[values["device"]] = AtWork(values["device"], orders, values["end"])

    def _asked_before(self, device: int, values: Mapping[str, Any], held: Held) -> Assignment:
        """An order of a device at work, from `_to_json`; what is not in there follows from the round."""
        self.method.round = held.round
        architecture = Architecture.from_json(values["architecture"])
        self.method.family.validate(architecture)
        order = Order(device, architecture, values["place"], values["after"])
        step = client_step_of(StepReference(**values["client_step"]))
        selection = self.method.selection(device, architecture)
        if values["selected"] != _selected(self.method.family, architecture, selection):
            # It followed from the model of then.
            indices = {group: torch.tensor(kept) for group, kept in values["selected"].items()}
            selection = Selection(lambda _: lambda group, full, kept: indices[group])
        a = self.asking.ask(order, selection, Budget(**values["budget"]), step)
        a.held, a.timing = held, Timing(*values["timing"])
        return a


def weight_of(staleness: int) -> int:
    """The weight of an update in whole parts of `FRESH`: 1 / sqrt(1 + staleness) of it, and one part at least."""
    return max(1, round(FRESH / math.sqrt(1 + staleness)))


def _way(then: Weights, now: Weights, tensor_set: TensorSet) -> Tensor:
    """(elements,) float64, how far what a device was sent has moved since; 0 where it returns no weights of that."""
    by = torch.zeros(tensor_set.layout.numel, dtype=torch.float64)
    for entry in tensor_set.layout.entries:
        start = start_of(then, entry)
        if start is not None and entry.name in now:
            split(by, tensor_set.layout)[entry.name].copy_(now[entry.name].double() - start.double())
    return by


def _listed(contents: TensorSets, group: Group) -> TensorSets:
    """What travels to a group of what there is, in the order of its layouts."""
    return {
        name: {entry.name: contents[name][entry.name] for entry in tensor_set.layout.entries}
        for name, tensor_set in group.sent.items()
    }


def _node(found: AtWork) -> int:
    node = found.orders[0].node
    assert node is not None
    return node


def _selected(family: Family, architecture: Architecture, selection: Selection) -> dict[str, list[int]]:
    """Return which channels a sub-model takes of every group; {} where these are the leading ones."""
    found: dict[str, list[int]] = {}

    def select(group: str, full: int, kept: int) -> Coordinates:
        coordinates = selection.select(group, full, kept)
        found[group] = list(range(full))[coordinates] if isinstance(coordinates, slice) else coordinates.tolist()
        return coordinates

    if selection.select is not leading:
        family.place(architecture, select)
    return found


def _to_json(a: Assignment, held: int, family: Family) -> dict[str, Any]:
    assert a.timing is not None
    order = a.task.order
    return {
        "place": order.place,
        "after": order.after,
        "architecture": order.architecture.to_json(),
        "selected": _selected(family, order.architecture, a.task.selection),
        "budget": a.budget.to_json(),
        "client_step": a.task.client_step.reference().model_dump(mode="json"),
        "timing": list(astuple(a.timing)),
        "held": held,
    }
