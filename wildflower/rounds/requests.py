"""Work: what a round asks of its devices, and how it becomes messages."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property

from flwr.app import Message, MessageType

from wildflower.devices.budget import Budget
from wildflower.devices.clock import Timing
from wildflower.messages.encoding import Wire, encode
from wildflower.messages.orders import Batch, Update, WorkOrder
from wildflower.messages.packing import Layout, pack, unpack
from wildflower.messages.sums import WeightedSum, joined
from wildflower.messages.tensor_sets import TensorSets, Weights, digest, nbytes
from wildflower.messages.wire import to_records
from wildflower.models.architecture import Architecture
from wildflower.models.cost import Cost
from wildflower.models.family import Family
from wildflower.models.placement import leading
from wildflower.rounds.frozen import Frozen, Owed
from wildflower.strategies.client_step import tensor_sets_of
from wildflower.strategies.method import ClientStep, Contribution, Group, Order, Selection
from wildflower.strategies.run_settings import RoundSettings

MESSAGE_BYTES = 32 * 2**20  # of distinct payloads in one message; a round's further batches wait for their turn


@dataclass(frozen=True)
class Given:
    """The request to one device: an architecture under a selection, what it costs, and the client step that does it."""

    order: Order
    selection: Selection
    cost: Cost
    client_step: ClientStep

    @property
    def architecture(self) -> Architecture:
        """The architecture that the device trains."""
        return self.order.architecture


@dataclass(frozen=True, eq=False)
class Held:
    """The model that devices begin from whose updates count in a later round than the one in which they were asked.

    round: in which they were asked. sent: the tensor sets of their group as they were then.
    """

    round: int
    sent: TensorSets


@dataclass
class Assignment:
    """One order of one device in one round: what it may spend, what it was given (None: nothing), what came of it.

    Attributes:
        number: of the order in its exchange, which `Work` gives.
        earlier: an earlier order of the same device, whose trained model this one reads.
        kept: the device has kept something in an earlier round.
        frozen: what is frozen of the architecture, and what of it the device is sent because it lacks it.
        masked_with: the devices whose updates the server sees together with this one's, as one sum; [] where it sees
            each.
        held: what it begins from, under asynchronous rounds; None: the model of the round.
    """

    device: int
    tier: str
    budget: Budget
    given: Given | None
    timing: Timing | None = None
    node: int | None = None
    group: int = 0
    outcome: str = ""
    update: Update | None = None
    number: int = 0
    earlier: Assignment | None = None
    kept: bool = False
    frozen: Owed = field(default_factory=Owed)
    masked_with: list[int] = field(default_factory=list)
    held: Held | None = None

    @property
    def begun(self) -> int:
        """The round in which it was asked, where that may be an earlier one than its update's; else 0."""
        return 0 if self.held is None else self.held.round

    @property
    def task(self) -> Given:
        """Return what it was given; only for devices that were given something."""
        assert self.given is not None
        return self.given

    @property
    def flops_per_example(self) -> float:
        """Return FLOPs of its training, and of an earlier model's forward passes beside it: a third of what training
        that takes."""
        beside = 0.0 if self.earlier is None else self.earlier.task.cost.training_flops / 3
        return self.task.cost.training_flops + beside

    @property
    def simulated_seconds(self) -> float:
        """Download, training and upload by the virtual clock; 0 on hardware."""
        return self.timing.total_seconds if self.timing is not None else 0.0

    @property
    def limit_bytes(self) -> int:
        """Memory the device may use; 0, no limit, where it was given on purpose what its budget does not allow."""
        needed = self.task.cost.peak_training_memory_bytes
        return self.budget.memory_bytes if needed <= self.budget.memory_bytes else 0


def by_device(assignments: Iterable[Assignment]) -> dict[int, list[Assignment]]:
    """The orders of every device, as they were assigned."""
    found: dict[int, list[Assignment]] = {}
    for a in assignments:
        found.setdefault(a.device, []).append(a)
    return found


def devices_that_trained(assignments: Iterable[Assignment]) -> int:
    """Return how many devices did at least one of their orders."""
    return len({a.device for a in assignments if a.outcome == "trained"})


def seed_of(settings: RoundSettings, round_number: int, device: int, place: int = 0) -> int:
    """The seed of a device's order in a round; `place` counts the orders of one device."""
    return int(settings.rng(round_number, 1, device, *([place] if place else [])).integers(2**63))


@dataclass(kw_only=True)
class Orders:
    """The requests to some devices in one exchange, and how their tensor sets get to them.

    Attributes:
        payload: the contents of the tensor sets that a group is sent.
        frozen: what is frozen of the model; None where nothing is.
        each_by_itself: nodes of many devices add nothing up, also where tensor sets might be.
    """

    round: int
    assignments: list[Assignment]
    family: Family
    payload: Callable[[Group], TensorSets]
    frozen: Frozen | None = None
    each_by_itself: bool = False
    groups: list[Group] = field(init=False, default_factory=list)
    _packed: dict[int, dict[str, bytes]] = field(init=False, default_factory=dict)
    _awaited: set[int] = field(init=False, default_factory=set)  # groups of which `_packed` is kept in any case

    def __post_init__(self) -> None:
        """Number the orders, and collect those whose tensor sets are of the same tensors at the same coordinates."""
        index: dict[tuple[Architecture, Selection, str, Held | None], int] = {}
        for number, a in enumerate(self.assignments):
            a.number = number
            if a.given is None:
                continue
            architecture, selection = a.given.architecture, a.given.selection
            sent, returned = tensor_sets_of(a.given.client_step, self.family, architecture)
            key = architecture, selection, digest(sent, returned), a.held
            if key not in index:
                index[key] = len(self.groups)
                placement = self.family.place(architecture, selection.select)
                self.groups.append(Group(architecture, selection, sent, returned, placement))
            a.group = index[key]

    def batches(self) -> dict[int, deque[list[Assignment]]]:
        """The batches of every node in order; a batch's distinct payloads stay under MESSAGE_BYTES.

        Its orders were asked in one round, which has a learning rate. All orders of a device are in one batch, which
        may be larger where they alone are.
        """
        by_node: dict[int, list[list[Assignment]]] = defaultdict(list)
        for orders in by_device(a for a in self.assignments if a.node is not None).values():
            assert orders[0].node is not None
            by_node[orders[0].node].append(orders)
        queues: dict[int, deque[list[Assignment]]] = {}
        for node, mine in by_node.items():
            mine.sort(key=lambda orders: (orders[0].begun, [a.group for a in orders]))
            queue: deque[list[Assignment]] = deque()
            size, groups = 0, set[int]()
            for orders in mine:
                added = self._added_bytes(orders, groups)
                another = not queue or orders[0].begun != queue[-1][0].begun
                if another or (added and size + added > MESSAGE_BYTES):
                    queue.append([])
                    size, groups = 0, set()
                    added = self._added_bytes(orders, groups)
                queue[-1] += orders
                groups |= {a.group for a in orders}
                size += added
            queues[node] = queue
        return queues

    def _added_bytes(self, orders: list[Assignment], groups: set[int]) -> int:
        """What orders add to a message and to its reply, where the message holds some groups' tensor sets already.

        Tensor sets that are not merged come back from every device.
        """
        new = {a.group for a in orders} - groups
        shared = sum(max(nbytes(self.groups[g].sent), self._returned_bytes(g, merged=True)) for g in new)
        return shared + sum(self._returned_bytes(a.group, merged=False) + a.frozen.nbytes for a in orders)

    def _returned_bytes(self, group: int, *, merged: bool) -> int:
        tensor_sets = self.groups[group].returned.values()
        adds_up = not self.each_by_itself
        return sum(
            tensor_set.layout.nbytes
            for tensor_set in tensor_sets
            if (tensor_set.merge is not None and adds_up) == merged
        )

    def arrays(
        self, batch: list[Assignment], of_group: Callable[[int], dict[str, bytes]] | None = None
    ) -> tuple[list[bytes], dict[int, dict[str, int]]]:
        """The tensor sets of a batch, those that several devices share once, and where each group's are.

        of_group: what gives the tensor sets of a group; as they are packed by default.
        """
        of_group = of_group or self.packed
        found: list[bytes] = []
        places: dict[int, dict[str, int]] = {}
        for group in sorted({a.group for a in batch}):
            places[group] = {}
            for name, data in of_group(group).items():
                places[group][name] = len(found)
                found.append(data)
        return found, places

    def add_frozen(self, batch: list[Assignment], arrays: list[bytes]) -> dict[int, int]:
        """Put what devices of a batch lack of the frozen tensors behind its arrays; order -> where it is."""
        where: dict[Owed, int] = {}
        for a in batch:
            if a.frozen.nbytes and a.frozen not in where:
                assert self.frozen is not None
                where[a.frozen] = len(arrays)
                arrays.append(self.frozen.packed(a.task.architecture, a.task.selection, a.frozen.places))
        return {a.number: where[a.frozen] for a in batch if a.frozen.nbytes}

    def packed(self, group: int) -> dict[str, bytes]:
        """The packed tensor sets of a group, kept while they are small because other nodes want them too."""
        if not self.groups[group].sent:
            return {}
        if group not in self._packed:
            wanted = self.groups[group]
            contents = self.payload(wanted)
            if contents.keys() != wanted.sent.keys():
                raise ValueError(f"the payload holds tensor sets {sorted(contents)}, not {sorted(wanted.sent)}")
            data = {name: _pack(contents[name], tensor_set.layout) for name, tensor_set in wanted.sent.items()}
            size = sum(len(array) for tensor_sets in self._packed.values() for array in tensor_sets.values())
            if size + sum(map(len, data.values())) > MESSAGE_BYTES:
                self._packed = {g: tensor_sets for g, tensor_sets in self._packed.items() if g in self._awaited}
            self._packed[group] = data
        return self._packed[group]


def _pack(contents: Weights, layout: Layout) -> bytes:
    """The tensors of a layout out of a payload, which may hold frozen ones beside them."""
    names = {entry.name for entry in layout.entries}
    return pack({name: tensor for name, tensor in contents.items() if name in names}, layout)


@dataclass(kw_only=True)
class Work(Orders):
    """Orders to do, and what becomes of what comes back.

    Attributes:
        absorb: takes in tensor sets.
        enough: devices that trained, after which the rest is not waited for.
        simulated: nodes carry many devices, and add up what may be added up.
        norm_bound: how far a tensor set may be from what its device was sent (`wildflower.messages.bound`); 0: as far
        as it likes.
        clip: changes of at most this norm are added up in place of weights, all devices counting alike; 0: weights are.
        wire: as what tensor sets travel.
        oldest_checkpoint: the round of the oldest checkpoint that the run may go on from; None: that of the last one.
        refused: nodes of which the server has refused something, and why.
        broke: nodes that have provably broken the protocol of secure aggregation, and how.
    """

    absorb: Callable[[Contribution], None]
    enough: int
    simulated: bool
    norm_bound: float = 0.0
    clip: float = 0.0
    wire: Wire = "float32"
    oldest_checkpoint: int | None = None
    refused: dict[int, str] = field(init=False, default_factory=dict)
    broke: dict[int, str] = field(init=False, default_factory=dict)
    _encoded: dict[int, dict[str, bytes]] = field(init=False, default_factory=dict)

    @property
    def reads_against_what_was_sent(self) -> bool:
        """Return whether a reply means something only beside what its device was sent, or is held to be near it."""
        return bool(self.norm_bound or self.clip) or self.wire != "float32"

    @property
    def adds_up(self) -> bool:
        """Return whether nodes send sums of the tensor sets that may be merged."""
        return self.simulated and not self.each_by_itself

    def bytes_down(self, a: Assignment) -> int:
        """Bytes of the tensor sets that a device is sent, and of what it lacks of the frozen tensors."""
        return nbytes(self.groups[a.group].sent, self.wire) + a.frozen.nbytes

    def bytes_up(self, a: Assignment) -> int:
        """Bytes of the tensor sets that a device returns; under masks, of 64-bit integers in their place."""
        if a.masked_with:
            return 8 * joined(self.empty_sums(a)).numel()
        return nbytes(self.groups[a.group].returned, self.wire)

    def encoded(self, group: int) -> dict[str, bytes]:
        """The tensor sets of a group as they travel, kept while they are small because other nodes want them too."""
        if group not in self._encoded:
            sent = self.groups[group].sent
            found = {
                name: encode(unpack(data, sent[name].layout), sent[name].layout, self.wire)
                for name, data in self.packed(group).items()
            }
            size = sum(len(array) for tensor_sets in (*self._encoded.values(), found) for array in tensor_sets.values())
            if size > MESSAGE_BYTES:
                self._encoded.clear()
            self._encoded[group] = found
        return self._encoded[group]

    def start(self, group: int, tensor_set: str) -> Weights:
        """Return what the server had for devices of a group under this name, before the wire rounded it; {} for
        nothing."""
        sent = self.packed(group).get(tensor_set)
        return {} if sent is None else unpack(sent, self.groups[group].sent[tensor_set].layout)

    def answered(self, a: Assignment) -> None:
        """Keep no longer what was sent for an order alone: its reply is read."""
        if a.group in self._awaited:
            self._awaited.remove(a.group)
            self._packed.pop(a.group, None)

    @cached_property
    def _groups_of_one_order(self) -> set[int]:
        orders_of = Counter(a.group for a in self.assignments if a.given is not None)
        return {group for group, count in orders_of.items() if count == 1}

    def empty_sums(self, a: Assignment) -> dict[str, WeightedSum]:
        """An empty sum of every tensor set of an order that is added up."""
        return {
            name: WeightedSum.zeros(
                tensor_set.layout, self.family.classes if tensor_set.merge.present_classes else None
            )
            for name, tensor_set in self.groups[a.group].returned.items()
            if tensor_set.merge is not None
        }

    def content(self, settings: RoundSettings, batch: list[Assignment]) -> tuple[Batch, list[bytes]]:
        """Return what the message that carries a batch to its node says, and its packed arrays."""
        travels_in_full = self.simulated or self.wire == "float32"
        if self.reads_against_what_was_sent:
            # What several orders are sent is a cut of the model, and cheap to cut again. What is made for one order may
            # be dear to make again: it is kept until the reply is read, as the reply itself is in many methods.
            self._awaited |= {a.group for a in batch} & self._groups_of_one_order
        arrays, position = self.arrays(batch, None if travels_in_full else self.encoded)
        frozen = self.add_frozen(batch, arrays)
        places = {a.number: place for orders in by_device(batch).values() for place, a in enumerate(orders)}
        orders = [
            WorkOrder(
                order=a.number,
                device=a.device,
                tier=a.tier,
                architecture=a.task.architecture.to_json(),
                payloads=position[a.group],
                group=a.group,
                digest=digest(self.groups[a.group].sent, self.groups[a.group].returned),
                client_step=a.task.client_step.reference(),
                seed=seed_of(settings, self.round, a.device, places[a.number]),
                memory_bytes=a.limit_bytes,
                predicted_memory_bytes=a.task.cost.peak_training_memory_bytes,
                after=None if a.earlier is None else a.earlier.number,
                kept=a.kept,
                frozen=a.frozen.name,
                frozen_payload=frozen.get(a.number),
                feedback=a.task.selection.select is leading,
                masked_with=a.masked_with,
            )
            for a in batch
        ]
        content = Batch(
            run=settings.run,
            round=self.round,
            task=settings.task,
            family=self.family.spec(),
            training=settings.training_in(batch[0].begun or self.round),
            shared_process=self.simulated,
            wire=self.wire,
            each_by_itself=self.each_by_itself,
            norm_bound=self.norm_bound,
            clip=self.clip,
            state_dir=settings.state_dir,
            oldest_checkpoint=self.oldest_checkpoint,
            side_by_side=settings.side_by_side,
            orders=orders,
        )
        return content, arrays

    def message(self, settings: RoundSettings, node: int, batch: list[Assignment], ttl: float | None) -> Message:
        """The message that carries a batch to its node; it expires after `ttl` seconds, or never."""
        content, arrays = self.content(settings, batch)
        return Message(to_records(content, arrays), node, MessageType.TRAIN, ttl=ttl, group_id=str(self.round))
