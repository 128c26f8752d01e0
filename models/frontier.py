"""The best architectures of a space for all budgets at once: Pareto labels along the chain of blocks.

A network's parameters and payload are sums over its blocks, and its peak training memory composes along their chain
(`wildflower.models.composition`). Labels stand for ends of networks, from the loss backward; one block at a time is put
in front. Two ends with the same decisions open towards the front and the same parameters are compared by what decides
whether a whole network fits: one that is better in nothing is left out. Nothing is lost by that, so the frontier is
exact, until a step holds more labels than it may; then they are thinned out over the range of parameters, from then on
to fewer labels, and `exact` is False.

Where a space says how many layers stay, labels are also told apart by how many do so far.

Which decisions a block depends on is found by changing one decision at a time; no family is known by name.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import add, itemgetter, lt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wildflower.models.composition import Frame, Profile, total
from wildflower.models.cost import CONVOLUTION_KERNEL_BYTES, FLOAT_BYTES, Cost
from wildflower.models.elastic import ElasticSpace
from wildflower.models.profile import AnyPiece, pieces
from wildflower.models.space import Space

Picks = tuple[int, ...]
Staying = tuple[int, ...]  # of every floor of the space: layers that stay, up to as many as must
State = tuple[Picks, int, Staying]
Whole = NDArray[np.int64]

MAX_LABELS = 1_000_000
"""Labels per block, over all open decisions, before they are thinned out."""
THINNED_LABELS = 120_000
"""Labels per block from then on: what cannot be exact need not take long."""
MAX_AT_ONCE = 2_000_000
"""Labels that are compared at once, which bounds this process's memory."""
MAX_TRANSITIONS = 1_000_000
"""Combinations of open decisions at one block; a space beyond that is no chain for our purposes."""

# Rows of a table of labels, one column per label. Bytes where not said otherwise.
PARAMETERS, BUFFERS, KERNELS, PEAK, LARGEST, PARENT, TRANSITION = range(7)
# PARAMETERS, BUFFERS and LARGEST (the largest parameter) are entries, KERNELS counts distinct convolutions; PEAK is the
# most that is live from here on, weights and optimizer state apart, relative to what is live before. PARENT is the
# label of the next block's table that was extended, TRANSITION how.


@dataclass(frozen=True)
class Link:
    """One block of the chain: its name, the decisions it depends on, its piece for their picks (None: removed)."""

    name: str
    decisions: tuple[int, ...]
    pieces: dict[Picks, AnyPiece | None]


class Chain:
    """The blocks of a space's largest architecture, and which decisions each depends on.

    Raises ValueError where an architecture's blocks are not determined one by one.
    """

    def __init__(self, space: Space | ElasticSpace) -> None:
        # Its blocks are looked at one by one.
        self.space = replace(space, floors=()) if isinstance(space, Space) else space
        self.counts = [len(options) for options in space.options]
        smallest, largest = [0] * len(self.counts), [count - 1 for count in self.counts]
        self.names = list(self._pieces(largest))
        influence: dict[str, set[int]] = {name: set() for name in self.names}
        for base in (largest, smallest):
            before = self._pieces(base)
            for decision, count in enumerate(self.counts):
                for pick in range(count):
                    after = self._pieces([*base[:decision], pick, *base[decision + 1 :]])
                    for name in self.names:
                        if before.get(name) != after.get(name):
                            influence[name].add(decision)
        self.links = []
        for name in self.names:
            decisions = tuple(sorted(influence[name]))
            self.check_ways(name, decisions)
            table = {}
            for picks in itertools.product(*(range(self.counts[decision]) for decision in decisions)):
                whole = smallest.copy()
                for decision, pick in zip(decisions, picks, strict=True):
                    whole[decision] = pick
                table[picks] = self._pieces(whole).get(name)
            self.links.append(Link(name, decisions, table))
        self._check()

    def pieces(self, picks: Sequence[int]) -> list[AnyPiece]:
        """Return the pieces of an architecture from the links, without asking the family."""
        found = (link.pieces[tuple(picks[decision] for decision in link.decisions)] for link in self.links)
        return [piece for piece in found if piece is not None]

    def _pieces(self, picks: Sequence[int]) -> dict[str, AnyPiece]:
        return {piece.name: piece for piece in pieces(self.space.family, self.space.architecture(picks))}

    def check_ways(self, block: str, decisions: Iterable[int]) -> None:
        """Raise ValueError if too many combinations of decisions meet at a block."""
        if (ways := math.prod(self.counts[decision] for decision in decisions)) > MAX_TRANSITIONS:
            raise ValueError(
                f"space of {self.space.family.name}: {ways} combinations of decisions meet at block {block}, at most "
                f"{MAX_TRANSITIONS} can be followed; give fewer shares or search with a pool"
            )

    def _check(self) -> None:
        """Compare the links with random architectures: decisions might act together in a way that none does alone."""
        rng = np.random.default_rng(0)
        for _ in range(8):
            picks = [int(rng.integers(count)) for count in self.counts]
            if self.pieces(picks) != list(pieces(self.space.family, self.space.architecture(picks))):
                raise ValueError(
                    f"space of {self.space.family.name}: which decisions a block depends on cannot be told by changing "
                    "one at a time, so it has no frontier; search it with a pool"
                )


@dataclass(frozen=True)
class Transition:
    """One way to put a block in front: its picks, its profile (None: removed) and the new bits of its convolutions.

    `staying`: of every floor, the layers that stay by these picks and of which no block behind knew.
    """

    picks: Picks
    profile: Profile | None
    convolutions: int
    staying: Staying


class Prices:
    """Costs of the architectures of a space, added up from their blocks: some fifty times as fast as `cost`."""

    def __init__(self, space: Space | ElasticSpace, *, batch_size: int, optimizer: str) -> None:
        self.chain = Chain(space)
        self.frame = Frame.of(space.family, batch_size, optimizer)
        self.profiles = [
            {
                picks: None if piece is None else piece.profile(batch_size, piling=self.frame.piling)
                for picks, piece in link.pieces.items()
            }
            for link in self.chain.links
        ]

    def total(self, picks: Sequence[int]) -> Cost:
        """Return parameters, payload and memory of an architecture of the space."""
        return total(self._of(picks), self.frame)

    def macs(self, picks: Sequence[int]) -> int:
        """Return the multiplications of one example's forward pass, as `BlockFamily.inference_macs` does."""
        return sum(found.macs for found in self._of(picks))

    def parameters_by_block(self, picks: Sequence[int]) -> list[int]:
        """Return the parameters of every block that is there."""
        return [found.parameters for found in self._of(picks)]

    def _of(self, picks: Sequence[int]) -> list[Profile]:
        found = (table[getter(picks)] for getter, table in self._tables)
        return [block for block in found if block is not None]

    @cached_property
    def _tables(self) -> list[tuple[Callable[[Sequence[int]], Any], dict[Any, Profile | None]]]:
        """Of every link what takes its picks out of all, and its profiles by them: a single pick is not in a tuple."""
        found: list[tuple[Callable[[Sequence[int]], Any], dict[Any, Profile | None]]] = []
        for link, table in zip(self.chain.links, self.profiles, strict=True):
            match link.decisions:
                case ():
                    found.append((lambda _: (), dict(table)))
                case (one,):
                    found.append((itemgetter(one), {picks[0]: block for picks, block in table.items()}))
                case several:
                    found.append((itemgetter(*several), dict(table)))
        return found


class Frontier:
    """Parameters, payload and memory of the best architectures of a space, in ascending order of parameters.

    Building it takes up to a minute for a network of 50 blocks. `exact`: no architecture that could be the largest
    under some budget was left out.

    Attributes:
        parameters, payload_bytes, memory_bytes: of every label, as in `wildflower.models.cost.Cost`.
        total: parameters, payload and memory of any picks, `Prices.total`.
        interchangeable: Sets of decisions whose picks can be exchanged: only memory may differ, a little.
    """

    def __init__(
        self,
        space: Space | ElasticSpace,
        *,
        batch_size: int,
        optimizer: str,
        max_labels: int = MAX_LABELS,
        thinned_labels: int = THINNED_LABELS,
    ) -> None:
        self.space = space
        self._prices = Prices(space, batch_size=batch_size, optimizer=optimizer)
        self.chain, self.frame = self._prices.chain, self._prices.frame
        self.total = self._prices.total
        self.max_labels, self.thinned_labels = max_labels, thinned_labels
        self.exact = True
        self._profiles = self._prices.profiles
        self._places = [
            [place for place, link in enumerate(self.chain.links) if decision in link.decisions]
            for decision in range(len(space.options))
        ]
        # A layer that must be counted is so at the last block that depends on it, the first that is looked at.
        self._counted: list[list[tuple[int, int]]] = [[] for _ in self.chain.links]
        fixed = []
        for number, decisions in enumerate(space.floor_decisions.values()):
            fixed.append(sum(len(space.options[d]) == 1 and any(space.options[d][0]) for d in decisions))
            for decision in decisions:
                if places := self._places[decision]:
                    self._counted[places[-1]].append((number, decision))
        self._least: Staying = tuple(floor.minimum for floor in space.floors)
        self._always = tuple(map(min, fixed, self._least))
        self._bits: dict[object, int] = {}
        self._history: list[tuple[Whole, list[Picks]]] = []  # of every block from the last: parents, transitions; picks
        self._build()
        self.interchangeable = self._interchangeable()

    @cached_property
    def training_flops(self) -> Whole:
        """Return the operations of every label, as in `wildflower.models.cost.Cost`.

        Labels were not compared by it: of two with as many parameters, the one with fewer operations may be missing.
        """
        flops = np.zeros(1, dtype=np.int64)  # the history begins behind the last block, with one label for all ends
        for table, (back, transitions) in zip(reversed(self._profiles), self._history, strict=True):
            blocks = [table[picks] for picks in transitions]
            added = np.array([0 if block is None else block.training_flops for block in blocks], dtype=np.int64)
            flops = flops[back[0]] + added[back[1]]
        return flops

    def picks(self, label: int) -> list[int]:
        """Return the picks of a label."""
        found = [0] * len(self.chain.counts)
        for link, (back, transitions) in zip(self.chain.links, reversed(self._history), strict=True):
            for decision, pick in zip(link.decisions, transitions[back[1, label]], strict=True):
                found[decision] = pick
            label = int(back[0, label])
        return found

    def parameters_more(self, picks: Sequence[int], decision: int, pick: int) -> int:
        """Return how many more parameters there are with another pick in one decision; far quicker than `total`."""
        changed = [*picks[:decision], pick, *picks[decision + 1 :]]
        return sum(
            self._parameters(place, changed) - self._parameters(place, picks) for place in self._places[decision]
        )

    def _parameters(self, place: int, picks: Sequence[int]) -> int:
        found = self._profiles[place][tuple([picks[decision] for decision in self.chain.links[place].decisions])]
        return 0 if found is None else found.parameters

    def _interchangeable(self) -> list[list[int]]:
        alike: dict[object, list[int]] = defaultdict(list)
        for decision, count in enumerate(self.chain.counts):
            if count == 1:
                continue
            signature = []
            for link, table in zip(self.chain.links, self._profiles, strict=True):
                if decision in link.decisions:
                    at = link.decisions.index(decision)
                    rows = {(key[at], key[:at] + key[at + 1 :]): value for key, value in table.items()}
                    others = link.decisions[:at] + link.decisions[at + 1 :]
                    signature.append((others, frozenset(rows.items())))
            floor = [number for number, found in enumerate(self.space.floor_decisions.values()) if decision in found]
            alike[count, tuple(floor), tuple(signature)].append(decision)
        return [decisions for decisions in alike.values() if len(decisions) > 1]

    # Building

    def _build(self) -> None:
        links = self.chain.links
        open_decisions = [self._open(position) for position in range(len(links) + 1)]
        transitions = [
            self._transitions(position, open_decisions[position], open_decisions[position + 1])
            for position in range(len(links))
        ]
        recurring = self._recurring(transitions)
        end = np.zeros((7, 1), dtype=np.int64)
        end[PEAK] = self.frame.loss_peak_bytes
        states: dict[State, Whole] = {((), 0, self._always): end}
        for position in reversed(range(len(links))):
            coming = [number for counted in self._counted[:position] for number, _ in counted]
            needed = tuple(minimum - coming.count(number) for number, minimum in enumerate(self._least))
            states = self._extend(states, transitions[position], recurring[position], needed)
        (labels,) = states.values()
        self._finish(labels)

    def _open(self, position: int) -> tuple[int, ...]:
        """Return the decisions on which blocks on both sides of a position depend."""
        links = self.chain.links
        before = {decision for link in links[:position] for decision in link.decisions}
        return tuple(sorted(before & {decision for link in links[position:] for decision in link.decisions}))

    def _transitions(
        self, position: int, before: tuple[int, ...], after: tuple[int, ...]
    ) -> dict[Picks, list[tuple[Picks, Transition]]]:
        """Picks of the decisions open behind a block -> of those open before it, and how the block looks then."""
        link, counts = self.chain.links[position], self.chain.counts
        involved = sorted({*link.decisions, *after})
        self.chain.check_ways(link.name, involved)
        found: dict[Picks, list[tuple[Picks, Transition]]] = defaultdict(list)
        for picks in itertools.product(*(range(counts[decision]) for decision in involved)):
            of = dict(zip(involved, picks, strict=True))
            own = tuple(of[decision] for decision in link.decisions)
            block = self._profiles[position][own]
            convolutions = 0
            for convolution in block.convolutions if block else ():
                convolutions |= 1 << self._bits.setdefault(convolution, len(self._bits))
            staying = [0] * len(self._least)
            for number, decision in self._counted[position]:
                staying[number] += any(self.space.options[decision][of[decision]])
            found[tuple(of[decision] for decision in after)].append(
                (tuple(of[decision] for decision in before), Transition(own, block, convolutions, tuple(staying)))
            )
        return found

    def _recurring(self, transitions: Sequence[dict[Picks, list[tuple[Picks, Transition]]]]) -> list[dict[Picks, int]]:
        """Return, by position and picks of its open decisions, the convolutions that may still come, as bits."""
        found: list[dict[Picks, int]] = [{(): 0}]
        for ways in transitions:
            behind: dict[Picks, int] = defaultdict(int)
            for after, options in ways.items():
                for before, transition in options:
                    behind[after] |= found[-1][before] | transition.convolutions
            found.append(dict(behind))
        return found

    def _extend(
        self,
        states: dict[State, Whole],
        ways: dict[Picks, list[tuple[Picks, Transition]]],
        recurring: dict[Picks, int],
        needed: Staying,
    ) -> dict[State, Whole]:
        """Put one block in front of all labels.

        A state is the picks of open decisions, convolutions that recur, and the layers that stay. Fewer than `needed`
        could not become enough any more.
        """
        distinct: dict[Picks, int] = {}
        gathered: dict[State, list[tuple[Whole, int, Transition, int, int]]] = defaultdict(list)
        offset = 0
        for (after, seen, stay), labels in states.items():
            for before, transition in ways[after]:
                staying = tuple(map(min, map(add, stay, transition.staying), self._least))
                if any(map(lt, staying, needed)):
                    continue
                number = distinct.setdefault(transition.picks, len(distinct))
                state = before, (seen | transition.convolutions) & recurring[before], staying
                new = (transition.convolutions & ~seen).bit_count()
                gathered[state].append((labels, offset, transition, number, new))
            offset += labels.shape[1]
        # States that differ only in their convolutions share one allowance: that difference is small.
        alike: dict[tuple[Picks, Staying], list[State]] = defaultdict(list)
        for state in gathered:
            alike[state[0], state[2]].append(state)
        maximum = max(2, (self.max_labels if self.exact else self.thinned_labels) // len(alike))
        extended: dict[State, Whole] = {}
        for group in alike.values():
            thinned = self._thin([self._gather(gathered[state], maximum) for state in group], maximum)
            extended |= {state: kept for state, kept in zip(group, thinned, strict=True) if kept.shape[1]}
        back = [labels[[PARENT, TRANSITION]] for labels in extended.values()]
        self._history.append((np.concatenate(back, axis=1), list(distinct)))
        return extended

    def _gather(self, parts: list[tuple[Whole, int, Transition, int, int]], maximum: int) -> Whole:
        """Return all labels of one state, pruned."""
        pending: list[Whole] = []
        size = 0
        for labels, start, transition, number, kernels in parts:
            pending.append(self._in_front(labels, start, transition.profile, number, kernels))
            size += labels.shape[1]
            if size > MAX_AT_ONCE:
                pending = self._thin([self._prune(np.concatenate(pending, axis=1))], maximum)
                size = pending[0].shape[1]
        return self._prune(np.concatenate(pending, axis=1))

    def _in_front(self, labels: Whole, start: int, block: Profile | None, number: int, kernels: int) -> Whole:
        found = labels.copy()
        found[PARENT] = np.arange(start, start + labels.shape[1])
        found[TRANSITION] = number
        if block is None:
            return found
        # The recurrence of `wildflower.models.composition.total`.
        later = FLOAT_BYTES * self.frame.piling * labels[PARAMETERS] + (
            self.frame.loss_kept_bytes + block.backward_peak_bytes
        )
        peak = np.maximum(labels[PEAK] + block.added_bytes, later)
        found[PEAK] = np.maximum(peak, block.forward_peak_bytes)
        found[PARAMETERS] += block.parameters
        found[BUFFERS] += block.buffers
        found[KERNELS] += kernels
        found[LARGEST] = np.maximum(labels[LARGEST], block.largest_parameter)
        return found

    def _fixed_bytes(self, labels: Whole) -> Whole:
        entries = labels[PARAMETERS] * self.frame.copies + labels[BUFFERS]
        return FLOAT_BYTES * entries + CONVOLUTION_KERNEL_BYTES * labels[KERNELS]

    def _prune(self, labels: Whole) -> Whole:
        """Leave out labels that another with the same parameters makes superfluous; sorted by parameters."""
        # Where all else is the same, the smallest peak is enough.
        same = [PARAMETERS, BUFFERS, KERNELS, LARGEST]
        order = _order(labels[same])
        labels = labels[:, order]
        new = np.ones(labels.shape[1], dtype=bool)
        new[1:] = (labels[same, 1:] != labels[same, :-1]).any(axis=0)
        starts = np.flatnonzero(new)
        labels = labels[:, _first_min(labels[PEAK], starts)]
        # What is left has equals in parameters only where buffers, kernels or the largest parameter differ.
        needs = np.stack(
            [labels[BUFFERS], labels[LARGEST], self._fixed_bytes(labels), self._fixed_bytes(labels) + labels[PEAK]]
        )
        superfluous = np.zeros(labels.shape[1], dtype=bool)
        for distance in range(1, 4):
            if labels.shape[1] <= distance:
                break
            equal = labels[PARAMETERS, distance:] == labels[PARAMETERS, :-distance]
            if not equal.any():
                break
            front, back = needs[:, :-distance], needs[:, distance:]
            superfluous[distance:] |= equal & (front <= back).all(axis=0)
            superfluous[:-distance] |= equal & (back <= front).all(axis=0) & (back < front).any(axis=0)
        return labels[:, ~superfluous]

    def _thin(self, states: list[Whole], maximum: int) -> list[Whole]:
        """Keep at most about `most` labels of all states together.

        Ranges of parameters are equally wide in proportion; of each, the label with most of them and the leanest stay.
        """
        sizes = [labels.shape[1] for labels in states]
        if sum(sizes) <= maximum:
            return states
        self.exact = False
        labels = np.concatenate(states, axis=1)
        order = np.argsort(labels[PARAMETERS], kind="stable")
        parameters = labels[PARAMETERS, order]
        starts = _ranges(parameters, max(1, maximum // 2))
        leanest = _first_min((self._fixed_bytes(labels) + labels[PEAK])[order], starts)
        kept = np.zeros(labels.shape[1], dtype=bool)
        kept[order[leanest]] = True
        kept[order[np.append(starts[1:], len(order)) - 1]] = True
        ends = np.cumsum(sizes)
        return [state[:, kept[end - size : end]] for state, size, end in zip(states, sizes, ends, strict=True)]

    def _finish(self, labels: Whole) -> None:
        update = FLOAT_BYTES * (self.frame.piling * labels[PARAMETERS] + self.frame.temporary * labels[LARGEST])
        self.parameters = labels[PARAMETERS]
        self.payload_bytes = FLOAT_BYTES * (labels[PARAMETERS] + labels[BUFFERS])
        self.memory_bytes = self._fixed_bytes(labels) + self.frame.batch_bytes + np.maximum(labels[PEAK], update)


def _order(rows: Whole) -> Whole:
    """Return an order of columns that brings equal ones together, by the first row first."""
    # Ascending runs, of which the columns consist, make a stable sort fast; one key is faster than one per row.
    key = np.zeros(rows.shape[1], dtype=np.int64)
    maximum = 1
    for row in rows:
        low, high = int(row.min()), int(row.max())
        maximum *= high - low + 1
        if maximum >= 2**62:
            return np.lexsort(rows[::-1])
        key = key * (high - low + 1) + (row - low)
    return np.argsort(key, kind="stable")


def _first_min(values: Whole, starts: Whole) -> Whole:
    """Return the position of the first least value of every segment that begins at one of `starts`."""
    lengths = np.diff(starts, append=len(values))
    positions = np.flatnonzero(values == np.repeat(np.minimum.reduceat(values, starts), lengths))
    segment = np.searchsorted(starts, positions, side="right")
    return positions[np.diff(segment, prepend=0) > 0]


def _ranges(ascending: Whole, maximum: int) -> Whole:
    """Return where ranges begin that are equally wide in proportion, at most `most` of them, leaving out empty ones."""
    logarithms = np.log1p(ascending)
    span = logarithms[-1] - logarithms[0]
    ranges = (logarithms - logarithms[0]) * ((maximum - 1) / span if span else 0)
    return np.flatnonzero(np.diff(ranges.astype(np.int64), prepend=-1))
