"""Wildflower, a method of this project: few nested levels, each of which learns in every step.

A level is a cut of the next larger one. Levels are chosen once, in the first round, for the budgets of the fleet, and
stay. A device gets the largest level that it affords, and in every local step it trains all smaller levels as well,
with the labels. Each coordinate of the global model is the mean over the devices that trained it.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from messages.packing import MessageError
from models.architecture import Architecture
from models.base import BlockFamily, Family
from models.cost import CONVOLUTION_KERNEL_BYTES, Cost, cost
from models.layers import Network
from strategies.heterofl import HeteroFL, StatisticsParams
from strategies.losses import Loss
from strategies.method import Bench, Local, Means, Order, Setup, State, Training
from strategies.nested import convolutions, leading_cut, step_bytes
from strategies.params import CountOrZero, Params

log = logging.getLogger("flwr")  # what Flower's own log is called

WIDTHS = 16  # widths from which those of levels are chosen
# Shares of the blocks of a stack, from its first on, that a level may keep in place of all.
DEPTHS = (0.25, 0.5, 0.75)

# The device half ------------------------------------------------------------------------------------------------------


class LevelTraining(Training):
    """L = sum over the levels l up to the device's own of CE(f_l(x), y), of shared parameters.

    The own level's term is differentiated first, and each before the next is computed: a device never holds the
    activations of two levels, and those of its own level go before all gradients are there.

    lower: the levels below the device's own, largest first; each is a cut of the one before.
    """

    lower: tuple[Architecture, ...] = Field(max_length=64)

    def loss(self, bench: Bench, model: Network) -> Loss:
        """The summed cross-entropy; all terms but the last are differentiated already."""
        family, own = bench.family, bench.architecture
        for larger, level in pairwise((own, *self.lower)):
            try:
                family.validate(level)
            except ValueError as error:
                raise MessageError(f"a level is no sub-model: {error}") from None
            if not is_cut(family, level, larger):
                raise MessageError(f"a level must be a cut of the one above it, and {level} is none of {larger}")
        if self.lower and next(model.buffers(), None) is not None:
            raise MessageError("levels would mix their batch norm statistics: use norm = 'static'")
        levels: list[Callable[[Tensor], Tensor]] = [model]
        levels += [leading_cut(model, family, own, level) for level in self.lower]

        def loss(inputs: Tensor, labels: Tensor) -> Tensor:
            done = torch.zeros((), device=inputs.device)
            for level in levels[:-1]:
                value = bench.task.loss(level(inputs), labels)
                value.backward()
                done = done + value.detach()
            return done + bench.task.loss(levels[-1](inputs), labels)

        return loss


@lru_cache(maxsize=16384)
def is_cut(family: Family, smaller: Architecture, larger: Architecture) -> bool:
    """Whether every tensor of one architecture is a part of the larger one's tensor of that name."""
    if smaller == larger:
        return False
    outer = family.tensors(larger)
    return all(
        name in outer and all(size <= limit for size, limit in zip(spec.shape, outer[name].shape, strict=True))
        for name, spec in family.tensors(smaller).items()
    )


# The server half ------------------------------------------------------------------------------------------------------


class WildflowerParams(StatisticsParams):
    """Wildflower's settings."""

    levels: CountOrZero = Field(
        4,
        description="Levels at most, chosen in the first round for the fleet's budgets between the smallest and the "
        "largest of `widths`; 0: the levels are `widths` themselves",
    )


class Wildflower(HeteroFL):
    """W_j <- mean over the devices that trained coordinate j, unweighted; untouched coordinates are kept.

    Batch norm is HeteroFL's: devices normalize by their batch, each level by its own, and statistics are taken for
    every level that is scored.
    """

    params_type: ClassVar[type[Params]] = WildflowerParams
    shared_params: ClassVar[Mapping[str, type[Params]]] = {}

    def __init__(self, setup: Setup, params: WildflowerParams) -> None:
        super().__init__(setup, params)
        self.params: WildflowerParams = params
        self.widths = setup.widths

    @classmethod
    def family_defaults(cls, params: Any) -> dict[str, Any]:
        """No scaler."""
        return {}

    def survey(self, fleet: Iterable[Means]) -> None:
        """Choose the levels for what the devices of the fleet may spend now."""
        if not self.params.levels:
            return
        smallest = self.cost(self.family.candidates(self.widths)[-1]).parameters
        options = [a for a in sizes_between(self.family, self.widths) if self.cost(a).parameters >= smallest]
        found = fitted_levels(self.family, options, list(fleet), self.params.levels, self.price)
        if not found:
            log.warning("Wildflower: no device affords any level now, so the levels are those of `widths`")
            return
        self.candidates = found
        parameters = ", ".join(f"{self.cost(level).parameters:,}" for level in self.candidates)
        log.info("Wildflower: levels of %s parameters", parameters)

    def local(self, order: Order) -> Local:
        """Training of the device's level and of all below."""
        return LevelTraining(weighting="uniform", lower=below(self.family, order.architecture, self.candidates))

    def training_cost(self, architecture: Architecture) -> Cost:
        """That of the architecture and of all levels below it."""
        return self._training_cost(architecture, below(self.family, architecture, self.candidates))

    def price(self, architecture: Architecture, lower: Sequence[Architecture]) -> Cost:
        """The cost of an architecture if these were the levels below it, largest first."""
        return replace(
            self._training_cost(architecture, tuple(lower)), payload_bytes=self.cost(architecture).payload_bytes
        )

    def _training_cost(self, architecture: Architecture, lower: tuple[Architecture, ...]) -> Cost:
        batch_size, optimizer = self.settings.training.batch_size, self.settings.optimizer
        return training_cost(self.family, architecture, lower, batch_size, optimizer)

    def state(self) -> State:
        """HeteroFL's, and the levels."""
        state = super().state()
        state.values["levels"] = [level.to_json() for level in self.candidates]
        return state

    def load(self, state: State) -> None:
        """Restore `state`."""
        super().load(state)
        levels = [Architecture.from_json(level) for level in state.values["levels"]]
        for level in levels:
            self.family.validate(level)
        if not levels:
            raise ValueError("the checkpoint holds no levels")
        self.candidates = levels


def below(family: Family, architecture: Architecture, levels: Sequence[Architecture]) -> tuple[Architecture, ...]:
    """Those of some levels, which come largest first, that lie inside an architecture and inside one another."""
    found: list[Architecture] = []
    for level in levels:
        if is_cut(family, level, found[-1] if found else architecture):
            found.append(level)
    return tuple(found)


def fitted_levels(
    family: Family,
    options: Iterable[Architecture],
    fleet: Sequence[Means],
    count: int,
    price: Callable[[Architecture, Sequence[Architecture]], Cost],
) -> list[Architecture]:
    """Levels under which the sum over devices of log(parameters) is large, of the largest level that each affords.

    A level is priced with the training of all smaller ones. First of all as many devices as possible afford any level.
    Levels are added one by one, as long as that makes the sum larger, and then each is exchanged for a better one until
    there is none: no exchange and no addition of one level would serve the fleet better.

    Args:
        options: what levels may be, in any order.
        fleet: what its devices may spend; those that afford no option have no say.
        count: how many levels at most.
        price: of training a level with some smaller ones, which come largest first.

    Returns:
        The levels, largest first; none where no device affords any option.
    """
    sizes = {option: price(option, ()).parameters for option in options}
    ordered = sorted(sizes, key=lambda option: (sizes[option], option.widths, option.kernels))
    fleet = [means for means in fleet if any(means.afford(option, price(option, ())) for option in ordered)]
    if not fleet:
        return []
    by_level: dict[tuple[Architecture, ...], NDArray[np.float64]] = {}  # of the last of some levels, by device

    def worth(levels: tuple[Architecture, ...]) -> tuple[int, float]:
        """How many devices afford any of some levels, smallest first, and the sum over these of log(parameters)."""
        logs = np.full(len(fleet), -math.inf)
        for number, level in enumerate(levels, start=1):
            key = levels[:number]
            if key not in by_level:
                cost = price(level, key[-2::-1])
                able = [means.afford(level, cost) for means in fleet]
                by_level[key] = np.where(able, math.log(sizes[level]), -math.inf)
            logs = np.maximum(logs, by_level[key])
        served = logs[logs > -math.inf]
        return len(served), round(math.fsum(served), 9)

    def better(levels: tuple[Architecture, ...], others: tuple[Architecture, ...]) -> tuple[Architecture, ...]:
        """The best of some levels and what they become with one more beside `others`."""
        best, value = levels, worth(levels)
        for option in ordered:
            place = bisect(others, sizes[option], key=sizes.__getitem__)
            changed = (*others[:place], option, *others[place:])
            near = pairwise(changed[max(0, place - 1) : place + 2])
            if all(is_cut(family, small, large) for small, large in near) and (other := worth(changed)) > value:
                best, value = changed, other
        return best

    found: tuple[Architecture, ...] = ()
    while True:
        before = found
        if len(found) < count:
            found = better(found, found)
        for level in found:
            if level in found:
                found = better(found, tuple(other for other in found if other != level))
        if found == before:
            return list(found[::-1])


def sizes_between(family: Family, widths: Sequence[float]) -> list[Architecture]:
    """What levels may be: cuts in width and in depth.

    Of a family that is cut in width these are `WIDTHS` widths between the smallest and the largest, and the given ones.
    Where it has stacks of blocks, they are also those widths with the first part of every stack alone (`DEPTHS`). Other
    families name their own.
    """
    named = family.candidates(widths)
    if len(family.candidates([1.0])) > 1:
        return named
    rates = dict.fromkeys([*widths, *np.geomspace(min(widths), max(widths), WIDTHS).tolist()])
    found = [family.width(rate) for rate in rates]
    if isinstance(family, BlockFamily) and len(family.segments) == 1:
        for share in DEPTHS:
            without = [
                block
                for blocks in family.stacks.values()
                for block in blocks[math.ceil(share * len(blocks)) :]
                if block in family.removable
            ]
            whole = [dict(zip(family.groups, family.width(rate).widths, strict=True)) for rate in rates]
            found += [family.architecture(kept, without) for kept in whole]
    return list(dict.fromkeys(found))


@lru_cache(maxsize=16384)
def training_cost(
    family: Family, architecture: Architecture, lower: tuple[Architecture, ...], batch_size: int, optimizer: str
) -> Cost:
    """What training an architecture and some lower levels in every step costs: more than training it alone.

    Memory is that of the dearest part of a step. The own level's is that of training it alone; in the others' all
    gradients are there already (`strategies.nested.step_bytes`). Compiled convolutions of all levels are kept. FLOPs
    are the sum. Parameters and payload are the architecture's.
    """
    whole = cost(family, architecture, batch_size=batch_size, optimizer=optimizer)
    if not lower:
        return whole
    kernels = [convolutions(family, level) for level in (architecture, *lower)]
    alone_bytes = whole.peak_training_memory_bytes - CONVOLUTION_KERNEL_BYTES * len(kernels[0])
    lower_bytes = [
        step_bytes(family, architecture, level, batch_size=batch_size, optimizer=optimizer, gradients_held=True)
        for level in lower
    ]
    flops = [cost(family, level, batch_size=batch_size, optimizer=optimizer).training_flops for level in lower]
    return replace(
        whole,
        peak_training_memory_bytes=max(alone_bytes, *lower_bytes)
        + CONVOLUTION_KERNEL_BYTES * len(frozenset().union(*kernels)),
        training_flops=whole.training_flops + sum(flops),
    )
