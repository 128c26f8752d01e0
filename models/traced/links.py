"""A traced module as a chain of links, whose costs compose: what the exact search goes along.

A link ends where a single result is alive. A training step is followed once with primes for widths
(`wildflower.models.traced.price`), and what it allocates and frees is divided at the ends of links, on the way there
and on the way back. So the cost of a link is known for all widths, and that of the module composes from those of its
links as in `wildflower.models.composition`. A block that is left out is some links that are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wildflower.models.architecture import Architecture
from wildflower.models.composition import Frame, Profile, total
from wildflower.models.network import Network
from wildflower.models.trace import follow
from wildflower.models.traced.graph import Graph, Operation, StateTensor
from wildflower.models.traced.operators import GETITEM
from wildflower.models.traced.price import Computed, Event, Factors, Product, Recorder, convolutions_in, played
from wildflower.models.traced.program import INPUT, Program, reads

if TYPE_CHECKING:
    from wildflower.models.traced.family import Traced

CLOSE = 0.02  # share by which the memory of links may differ from that of the step
LOSS = -1  # the number of what is behind the last link
Part = tuple[bool, int]  # of a step: whether it is the way back, and the link


@dataclass(frozen=True)
class TracedPiece:
    """A link of an architecture: the kept channels of the groups on which its cost depends; 0 for all others."""

    family: Traced
    number: int
    widths: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of the link in a chain."""
        return f"link{self.number}"

    def profile(self, batch_size: int, *, piling: bool = True) -> Profile:
        """Return what it costs; see `wildflower.models.profile.profile`."""
        return _profile(self, batch_size, piling=piling)


@lru_cache(maxsize=65536)
def _profile(piece: TracedPiece, batch_size: int, *, piling: bool) -> Profile:
    ones = piece.family.ones(piece.widths)
    return _costs(piece.family, ones, batch_size, piling=piling)[piece.number].at(piece.widths)


def pieces_of(family: Traced, arch: Architecture) -> list[TracedPiece]:
    """Return the links of an architecture, in order; ValueError where their costs do not compose."""
    family.validate(arch)
    return _pieces(family, arch, *_shape(family))


def _pieces(
    family: Traced, arch: Architecture, blocks: list[tuple[int, ...]], needed: list[set[int]]
) -> list[TracedPiece]:
    found = []
    for number, (block, groups) in enumerate(zip(blocks, needed, strict=True)):
        if not block or arch.widths[block[0]]:
            found.append(TracedPiece(family, number, tuple(w * (g in groups) for g, w in enumerate(arch.widths))))
    return found


@dataclass
class LinkCost:
    """Costs that a link adds to a step, for all widths.

    Attributes:
        forward, backward: what it allocates and frees.
        carried: what is live more (1) or less (-1) as its backward pass begins than as its forward pass ended, but for
            gradients of parameters behind it.
        loss_bytes: what is counted as kept of the loss.
        tensors: those that it is the first to read.
        flops: forward and backward, of the whole batch.
    """

    forward: list[Event]
    backward: list[Event]
    carried: list[Event]
    loss_bytes: int
    tensors: list[StateTensor]
    flops: tuple[list[Product | Computed], list[Product | Computed]]
    examples: int
    graph: Graph

    def at(self, widths: Sequence[int]) -> Profile:
        """Return the costs for kept channels of all groups."""
        forward_peak, added = played(self.forward, widths)
        backward_peak, _ = played(self.backward, widths)
        _, carried = played(self.carried, widths)
        entries = [(math.prod(self.graph.shape(t, widths)), t.kind == "buffer") for t in self.tensors]
        parameters = [size for size, is_buffer in entries if not is_buffer]
        there, back = (sum(product.at(widths) for product in flops) for flops in self.flops)
        return Profile(
            parameters=sum(parameters),
            buffers=sum(size for size, is_buffer in entries if is_buffer),
            largest_parameter=max(parameters, default=0),
            added_bytes=added,
            forward_peak_bytes=forward_peak,
            backward_peak_bytes=added + carried - self.loss_bytes + backward_peak,
            training_flops=(there + back) // self.examples,
            keeps_result=False,
            convolutions=frozenset(convolutions_in(self.forward, widths)),
            macs=there // 2 // self.examples,
        )

    def groups(self) -> set[int]:
        """Return the numbers of the groups on which the costs depend."""
        products: list[Product] = []
        for what in (*chain(*self.flops), *(what for *_, what in (*self.forward, *self.backward, *self.carried))):
            products += [what] if isinstance(what, Product) else chain(*what.shapes)
        of_tensors = {stretch.group for t in self.tensors for parts in t.dimensions for stretch in parts} - {-1}
        return of_tensors | {n for product in products for terms in product.sums for _, *ns in terms for n in ns}


# Dividing a step ------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def _shape(family: Traced) -> tuple[list[tuple[int, ...]], list[set[int]]]:
    """Return of each link the groups of the block in which it lies, or none, and those on which its costs depend."""
    graph, ends = family.read, _ends(family)
    numbers = {group: number for number, group in enumerate(graph.groups)}
    inside: list[tuple[int, ...]] = [()] * len(ends)
    for block, groups in graph.blocks.items():
        result, before = graph.bypassed[block][0]
        if result not in ends or before not in ends:
            raise ValueError(f"{family.function}: something else is alive where {block} begins or ends")
        for link in range(ends.index(before) + 1, ends.index(result) + 1):
            inside[link] = tuple(numbers[group] for group in groups)
    costs = _costs(family, (), 2, piling=True)
    found = inside, [cost.groups() for cost in costs]
    for arch in (family.full(), family.width(0.5), family.smallest()):
        profiles = [piece.profile(2) for piece in _pieces(family, arch, *found)]
        mine, true = (
            total(profiles, Frame.of(family, 2, "sgd")),
            family.step(arch, 2, accumulates=False).cost(2, "sgd"),
        )
        memory, wanted = mine.peak_training_memory_bytes, true.peak_training_memory_bytes
        sizes = (mine.parameters, mine.download_bytes) == (true.parameters, true.download_bytes)
        if not sizes or abs(memory - wanted) > CLOSE * wanted:
            raise ValueError(
                f"{family.function}: costs of its parts do not add up to those of the whole: {mine.parameters:,} of "
                f"{true.parameters:,} parameters, {memory:,} of {wanted:,} bytes"
            )
    return found


def _ends(family: Traced) -> list[int]:
    """Return the nodes of the training graph at which links end, that of the answer last."""
    graph = family.read
    if family.freeze or any(tensor.kind == "frozen" for tensor in graph.state.values()):
        raise ValueError(f"{family.function}: parts of it are not trained")
    trained: set[int] = set()
    of_input: set[int] = {INPUT}
    last: dict[int, int] = {}
    changed: set[int] = set()
    for number, node in enumerate(graph.training):
        read, names = reads(node)
        if not of_input.isdisjoint(read):
            of_input.add(number)
        if not trained.isdisjoint(read) or any(name in graph.state for name in names):
            trained.add(number)
        last |= dict.fromkeys(read, number)
        if node.op == GETITEM or node.op.partition(".")[0].endswith("_"):  # of several results, or changed in place
            changed.update(reads(Operation(op=node.op, args=node.args[:1]))[0])
    live = {INPUT}
    ends = []
    for number in range(len(graph.training) - 1):
        if number in of_input:
            live.add(number)
        live = {at for at in live if last.get(at, -1) > number}
        if live == {number} and number in trained and number not in changed:
            ends.append(number)
    return [*ends, len(graph.training) - 1]


class _Marking(Recorder):
    """A recorder that notes where each link begins, there and back."""

    def __init__(self, fixed: list[Tensor], factors: Factors) -> None:
        super().__init__(fixed, factors)
        self.marks: list[tuple[Part, int, int]] = []  # with the events and the operations before

    def mark(self, part: Part) -> None:
        """Note that a part of the step begins."""
        self.marks.append((part, len(self.events), len(self.flops)))


@lru_cache(maxsize=64)
def _costs(family: Traced, ones: tuple[int, ...], batch_size: int, *, piling: bool) -> list[LinkCost]:
    """Return the costs of all links where some groups have one channel."""
    factors, ends = Factors(family.read, ones), _ends(family)
    recorders: list[_Marking] = []

    def following(fixed: list[Tensor]) -> _Marking:
        recorders.append(_Marking(fixed, factors))
        return recorders[-1]

    def build() -> Network:
        program = family.program(factors.primes)
        _mark(program, ends, lambda part: recorders[-1].mark(part))
        return program

    dtype = torch.int64 if family.tokens else torch.float32
    step = follow(
        build, batch_size, family.input_shape, dtype, family.classes, accumulates=not piling, following=following
    )
    if len(step.answer) > 1:
        raise ValueError(f"{family.function}: it answers for each position")
    return _divided(family, ends, recorders[-1], batch_size)


def _mark(program: Program, ends: Sequence[int], mark: Callable[[Part], None]) -> None:
    """Let a program say where links begin: in front of their first steps, and as gradients of their results arrive."""
    steps = program.steps

    def begun(function: Callable[..., Any], link: int) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            mark((False, link))
            return function(*arguments, **options)

        return call

    def ended(function: Callable[..., Any], link: int) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            found = function(*arguments, **options)
            found.register_hook(lambda _: mark((True, link)))
            if link == len(ends) - 1:
                mark((False, LOSS))
            return found

        return call

    begin = 0
    for link, node in enumerate(ends):
        end = max(place for place, step in enumerate(steps) if step.result == node)
        steps[begin].function = begun(steps[begin].function, link)
        steps[end].function = ended(steps[end].function, link)
        begin = end + 1


def _divided(family: Traced, ends: Sequence[int], recorder: _Marking, batch_size: int) -> list[LinkCost]:
    """Return the costs of links from what was followed; of two passes the second."""
    count = len(ends)
    order = [(False, link) for link in (*range(count), LOSS)] + [(True, link) for link in reversed(range(count))]
    marks = recorder.marks[-len(order) :]
    if [part for part, _, _ in marks] != order:
        raise ValueError(f"{family.function}: its training step is no chain")
    # Gradients stay to the end; what is freed behind the last operator is the whole step.
    end = max(place for place, (sign, *_) in enumerate(recorder.events) if sign >= 0) + 1
    edges = [(events, flops) for _, events, flops in marks] + [(end, len(recorder.flops))]
    size_of = {number: size for sign, number, size in recorder.events if sign > 0}
    made: dict[int, int] = {}  # storage -> the place of the part that allocates it
    gone: dict[int, int] = {}
    parts = [recorder.events[first:end] for (first, _), (end, _) in pairwise(edges)]
    for place, part in enumerate(parts):
        for sign, number, _ in part:
            if sign:
                (made if sign > 0 else gone).setdefault(number, place)
    flops = [recorder.flops[first:end] for (_, first), (_, end) in pairwise(edges)]
    tensors, loss_bytes = _own_tensors(family, ends), Frame.of(family, batch_size, "sgd").loss_kept_bytes
    found = []
    for link in range(count):
        there, back = link, len(order) - 1 - link
        carried: list[Event] = []
        for number, place in made.items():
            end = gone.get(number, len(order))
            stays = back <= end < len(order) or (end == len(order) and place == count)
            if there < place < back and stays:
                carried.append((1, number, size_of[number]))
            elif place <= there < end < back:
                carried.append((-1, number, size_of[number]))
        of_link = (flops[there], flops[back])
        costs = parts[there], parts[back], carried, loss_bytes, tensors[link], of_link, max(2, batch_size), family.read
        found.append(LinkCost(*costs))
    return found


def _own_tensors(family: Traced, ends: Sequence[int]) -> list[list[StateTensor]]:
    """Return the tensors that each link is the first to read."""
    left = dict(family.read.state)
    if family.norm == "static":
        left = {name: tensor for name, tensor in left.items() if name in family.tensor_names()}
    found = []
    for begin, end in pairwise([-1, *ends]):
        names = {name for node in family.read.training[begin + 1 : end + 1] for name in reads(node)[1]}
        found.append([left.pop(name) for name in sorted(names & left.keys())])
    return found
