"""The cost of a traced module's sub-models, from one training step that is followed with widths that are primes.

The operators of a step and their order are the same in every width; sizes are products of widths. So the step is
followed once, on tensors without memory, with a prime as the width of each group. The bytes of each storage then say of
which widths they are a product, and an architecture is priced by playing back what is allocated and freed when.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, shape_wrapper

from wildflower.models.cost import Convolution, forward_copies
from wildflower.models.layers import TensorSpec
from wildflower.models.network import Network
from wildflower.models.trace import KERNELS_ON_CPUS, Step, Storages, follow, memory_inside
from wildflower.models.traced.graph import Graph

aten = torch.ops.aten
COUNTED = {**flop_registry, **{name: shape_wrapper(count) for name, count in KERNELS_ON_CPUS.items()}}
RECURRENT = (aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default)
MAX_INPUTS = 64  # to a group of a convolution
DRAWS = 20  # of primes
FIRST_PRIME = 1_000_003
LAST_PRIME = 1_300_000  # bytes of three widths are still a number of 64 bits


@dataclass(frozen=True)
class Product:
    """A number that grows with widths: a factor, times sums of products of widths."""

    factor: int
    sums: tuple[tuple[tuple[int, ...], ...], ...] = ()

    def at(self, widths: Sequence[int]) -> int:
        """Return the number for some widths."""
        found = self.factor
        for terms in self.sums:
            found *= sum(factor * math.prod(widths[number] for number in numbers) for factor, *numbers in terms)
        return found


@dataclass(frozen=True)
class Computed:
    """A number that a function counts of some shapes, such as memory that an operator takes inside."""

    counted: Callable[..., int]
    shapes: tuple[tuple[Product, ...], ...]

    def at(self, widths: Sequence[int]) -> int:
        """Return the number for some widths."""
        return self.counted(*[[size.at(widths) for size in shape] for shape in self.shapes])


Event = tuple[int, int, Product | Computed]
"""What is allocated (1), freed (-1) or only needed inside of an operator (0); the number of its storage; its bytes."""


def played(events: Iterable[Event], widths: Sequence[int]) -> tuple[int, int]:
    """Return the most bytes that are live more than at the beginning, and those at the end."""
    live = peak = 0
    for sign, _, what in events:
        size = what.at(widths)
        live += sign * size
        peak = max(peak, live if sign else live + size)
    return peak, live


def convolutions_in(events: Iterable[Event], widths: Sequence[int]) -> set[Convolution]:
    """Return the distinct convolutions that are computed forward."""
    found: set[Convolution] = set()
    for _, _, what in events:
        if isinstance(what, Computed) and isinstance(what.counted, partial) and what.counted.func is forward_copies:
            read, weight, made = (tuple(size.at(widths) for size in shape) for shape in what.shapes)
            found.add((read[1:], made[1:], weight[-1]))
    return found


class Recorder(Storages):
    """Follows a step with primes for widths, and notes what is allocated and freed when."""

    def __init__(self, fixed: list[Tensor], factors: Factors) -> None:
        super().__init__(fixed)
        self.factors = factors
        self.held: dict[int, tuple[int, Product]] = {}  # storage -> its number and its bytes
        self.events: list[Event] = []
        self.flops: list[Product | Computed] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what an operator takes inside of it before its result is held."""
        at = len(self.events)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        counted = COUNTED.get(func._overloadpacket)
        if counted is not None and func in RECURRENT:  # whose operations are a sum of two products
            self.flops.append(Computed(counted, tuple(self._shape(tensor) for tensor in args[:3])))
        elif counted is not None:
            self.flops.append(self.factors.of(counted(*args, **(kwargs or {}), out_val=result)))
        if (inside := memory_inside(func, args, result)) is not None:
            counting, tensors = inside
            self.events.insert(at, (0, -1, Computed(counting, tuple(self._shape(tensor) for tensor in tensors))))
        return result

    def hold(self, tensor: Tensor) -> None:
        """See `Storages.hold`."""
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        is_new = storage._cdata not in self._known
        super().hold(tensor)
        if is_new:
            self.held[storage._cdata] = len(self.events), self.factors.of(storage.nbytes())
            self.events.append((1, *self.held[storage._cdata]))

    def _release(self, key: int, size: int) -> None:
        super()._release(key, size)
        self.events.append((-1, *self.held.pop(key)))

    def _shape(self, tensor: Tensor) -> tuple[Product, ...]:
        return tuple(self.factors.of(size) for size in tensor.shape)


class Factors:
    """Reads of a number which widths it is a product of; those of `ones` are 1."""

    def __init__(self, graph: Graph, ones: Collection[int] = ()) -> None:
        sums = {tuple(sorted(terms)) for terms in _sums(graph)}
        for seed in range(DRAWS):
            drawn = _primes(len(graph.groups), seed)
            self.primes = primes = [1 if number in ones else prime for number, prime in enumerate(drawn)]
            values = {terms: sum(t[0] * math.prod(primes[n] for n in t[1:]) for t in terms) for terms in sums}
            if all(value % prime for value in values.values() for prime in primes if prime > 1):
                break  # no sum is read as a product, but of a width that all of its parts have
        single = {((1, number),): prime for number, prime in enumerate(primes) if prime > 1}
        self.known = dict(sorted(values.items(), key=lambda entry: -entry[1])) | single

    def of(self, value: int) -> Product:
        """Return the product that a number is."""
        found: list[tuple[tuple[int, ...], ...]] = []
        for terms, size in self.known.items():
            while value >= FIRST_PRIME and value % size == 0:
                value //= size
                found.append(terms)
        # PyTorch's count of a grouped convolution's way back is k w (1 + i w), of i inputs to a group. Other
        # large numbers are constants, such as pixels of a batch times those of a kernel.
        widths = [terms for terms in found if len(terms) == 1] if value >= FIRST_PRIME else []
        for terms, inputs in itertools.product(widths, range(1, MAX_INPUTS + 1)):
            factor, rest = divmod(value, inputs * self.known[terms] + 1)
            if not rest:
                return Product(1, (*found, ((factor * inputs, *terms[0][1:]), (factor,))))
        return Product(value, tuple(found))


def _sums(graph: Graph) -> list[tuple[tuple[int, ...], ...]]:
    """Return the sizes of a graph that are sums of several widths."""
    found: list[list[tuple[int, ...]]] = []
    for tensor in graph.state.values():
        for parts in tensor.dimensions:
            found.append([(p.before * p.after, *([p.group] if p.group >= 0 else [])) for p in parts])
    for node in (*graph.training, *graph.evaluation):
        found += [[tuple(term) for term in value["s"]] for value in node.objects() if "s" in value]
        found += [[tuple(term) for term in node.scaled]] if node.scaled else []
    merged = []
    for terms in found:
        by_groups: dict[tuple[int, ...], int] = {}
        for factor, *numbers in terms:
            by_groups[tuple(numbers)] = by_groups.get(tuple(numbers), 0) + factor
        if len(by_groups) > 1 and not any(-1 in numbers for numbers in by_groups):
            common = math.gcd(*by_groups.values())
            merged.append(tuple((factor // common, *numbers) for numbers, factor in by_groups.items()))
    return merged


@dataclass(frozen=True)
class Recorded:
    """A step that was followed with primes, to be played back in other widths.

    Attributes:
        step: as it was followed.
        share: of its operations that count: those of a first pass, of the examples that were asked for.
        constant_bytes: of what is in no state.
    """

    step: Step
    events: list[Event]
    flops: list[Product | Computed]
    share: Fraction
    constant_bytes: int

    def at(self, widths: Sequence[int], tensors: Mapping[str, TensorSpec], learned: Collection[str]) -> Step:
        """Return the step of an architecture.

        Args:
            widths: kept channels of every group.
            tensors: of its state; parameters are those that are no statistics.
            learned: names of those that have gradients.
        """
        entries = {name: math.prod(spec.shape) for name, spec in tensors.items()}
        state_bytes = sum(entries[name] * spec.dtype.itemsize for name, spec in tensors.items())
        return replace(
            self.step,
            peak_bytes=played(self.events, widths)[0],
            trained=sum(entries[name] for name in learned),
            largest=max((entries[name] for name in learned), default=0),
            state_bytes=state_bytes,
            held_bytes=state_bytes + self.constant_bytes,
            flops=int(self.share * sum(product.at(widths) for product in self.flops)),
            convolutions=convolutions_in(self.events, widths),
        )


def record(
    graph: Graph,
    build: Callable[[Sequence[int]], Network],
    left_out: Collection[int],
    ones: Collection[int],
    batch_size: int,
    input_shape: tuple[int, ...],
    classes: int,
    *,
    tokens: bool,
    accumulates: bool,
) -> Recorded:
    """Return a step followed with a prime for the width of each group.

    Args:
        build: makes the program of some widths.
        left_out: groups that are 0.
        ones: groups that are 1, where PyTorch makes views of what it copies otherwise.
    """
    factors = Factors(graph, ones)
    widths = [0 if number in left_out else prime for number, prime in enumerate(factors.primes)]
    recorders: list[Recorder] = []

    def following(fixed: list[Tensor]) -> Storages:
        recorders.append(Recorder(fixed, factors))
        return recorders[-1]

    dtype = torch.int64 if tokens else torch.float32
    step = follow(
        lambda: build(widths), batch_size, input_shape, dtype, classes, accumulates=accumulates, following=following
    )
    [recorder] = recorders
    share = Fraction(batch_size, max(2, batch_size) * (2 if accumulates else 1))
    constant_bytes = sum(constant.tensor().nbytes for constant in graph.constants.values())
    return Recorded(step, recorder.events, recorder.flops, share, constant_bytes)


def _primes(size: int, seed: int) -> list[int]:
    """Draw primes, because a sum of neighbors is often a multiple of another."""
    drawn, found = random.Random(seed), dict[int, None]()
    while len(found) < size:
        number = drawn.randrange(FIRST_PRIME, LAST_PRIME, 2)
        if all(number % divisor for divisor in range(3, math.isqrt(number) + 1, 2)):
            found[number] = None
    return list(found)
