"""The delivered score: the worth of what every device would be given now (docs/scores.md)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from wildflower.devices.budget import Budget
from wildflower.models.architecture import Architecture
from wildflower.models.cost import Cost
from wildflower.strategies.pricing import fits
from wildflower.tasks.metrics import Scale

MAX_ASKED = 500  # devices that are looked at in one evaluation; of more there are, so many evenly spread ones
MAX_TOLD = 200  # devices up to which the journal has the score of each
MAX_MODELS = 8  # that are scored for devices alone, beside those of the tiers and those that a method lists
SLACKS = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0)

Item = TypeVar("Item")


@dataclass(frozen=True)
class Recipient:
    """A device, and what its method would give it now.

    Attributes:
        architecture: the model; None where it would be assigned none.
        budget: what the device may spend; it may hold another model also where none would be assigned.
        affords: whether the budget allows the model.
    """

    device: int
    tier: str
    architecture: Architecture | None = None
    budget: Budget | None = None
    affords: bool = True


@dataclass(frozen=True)
class Delivered:
    """The mean test score of the models that devices would be given now, over all devices and over those of each tier.

    Attributes:
        devices: over how many devices this is.
        without: how many of them would be given no model. Each of them counts as one that knows nothing.
        beyond: how many of them would be given a model that their budget does not allow.
    """

    score: float
    score_by_tier: dict[str, float]
    devices: int
    without: int
    beyond: int


def evenly_spread(items: Sequence[Item], count: int = MAX_ASKED) -> list[Item]:
    """Up to `count` of the items, evenly spread. A fleet numbers its devices by tier, so each large tier is there."""
    return [items[place * len(items) // count] for place in range(count)] if len(items) > count else list(items)


def represented(
    recipients: Sequence[Recipient], known: Collection[Architecture], cost_of: Callable[[Architecture], Cost]
) -> dict[int, Architecture | None]:
    """Return which model stands for that of each device, so that few models are scored.

    A search may give every device an architecture of its own. The largest chosen architecture that fits the device
    stands for one that is not `known`, if it has at least 95 % of its parameters; else the device's own is chosen too.
    Where that chooses more than `MAX_MODELS` beside the known ones, the share is lowered (`SLACKS`). The score of a
    device is thus rather too low than too high.

    Args:
        known: architectures that are scored anyway, and those that a method gives as they are.
    """
    given = {r.device: r.architecture for r in recipients}
    others = [
        (r.device, r.architecture, r.budget)
        for r in recipients
        if r.architecture is not None and r.budget is not None and r.architecture not in known
    ]
    others.sort(key=lambda other: cost_of(other[1]).parameters)
    for slack in SLACKS:
        chosen = list(known)
        for device, architecture, budget in others:
            minimum = (1 - slack) * cost_of(architecture).parameters
            fitting = [a for a in chosen if cost_of(a).parameters >= minimum and fits(cost_of(a), budget)]
            if not fitting:
                chosen.append(architecture)
            given[device] = max(fitting, key=lambda a: cost_of(a).parameters, default=architecture)
        if len(chosen) <= len(known) + MAX_MODELS:
            break
    return given


def best_that_fit(
    recipients: Sequence[Recipient],
    given: Mapping[int, Architecture | None],
    held_out: Mapping[Architecture, float],
    scale: Scale,
    cost_of: Callable[[Architecture], Cost],
) -> dict[int, Architecture | None]:
    """Return, for each device, the model that fits it and scores best on held-out examples; of equal ones the largest.

    A device that would be assigned none chooses too, such as the smallest model that others train beside theirs.

    Args:
        given: what devices would be given otherwise, which is always among the models to choose from.
        held_out: the scores of the models.
    """
    ranked = sorted(held_out, key=lambda a: (scale.rank(held_out[a]), cost_of(a).parameters), reverse=True)
    chosen: dict[int, Architecture | None] = {}
    for r in recipients:
        own, budget = given[r.device], r.budget
        fitting = (a for a in ranked if a == own or (budget is not None and fits(cost_of(a), budget)))
        chosen[r.device] = next(fitting, own)
    return chosen


def most_common_by_tier(
    recipients: Sequence[Recipient], given: Mapping[int, Architecture | None]
) -> dict[str, Architecture]:
    """The model that most devices of each tier would be given; of equally common ones the first device's."""
    counts: defaultdict[str, Counter[Architecture]] = defaultdict(Counter)
    for r in recipients:
        if (architecture := given[r.device]) is not None:
            counts[r.tier][architecture] += 1
    return {tier: count.most_common(1)[0][0] for tier, count in counts.items()}


def delivered_models(
    recipients: Sequence[Recipient], given: Mapping[int, Architecture | None], of_device: Mapping[int, float]
) -> Delivered | None:
    """Return what devices are given of models that the server has scored; None where no device has a score.

    of_device: of `scores_of_devices`.
    """
    without = sum(given[r.device] is None for r in recipients)
    beyond = sum(
        r.device in of_device and given[r.device] is not None and given[r.device] == r.architecture and not r.affords
        for r in recipients
    )
    return _means({r.device: r.tier for r in recipients}, of_device, without, beyond)


def scores_of_devices(
    recipients: Sequence[Recipient],
    given: Mapping[int, Architecture | None],
    values: Mapping[Architecture, float],
    nothing: float,
) -> dict[int, float]:
    """Return what the model that each device is given scores.

    Args:
        values: the test scores of the models. Devices whose model could not be scored are left out.
        nothing: the score of a device without a model.
    """
    of_device: dict[int, float] = {}
    for r in recipients:
        architecture = given[r.device]
        if architecture is None:
            of_device[r.device] = nothing
        elif architecture in values:
            of_device[r.device] = values[architecture]
    return of_device


def delivered_on_devices(
    recipients: Sequence[Recipient],
    score_by_tier: Mapping[str, float],
    has_model: Callable[[int], bool],
    nothing: float,
) -> Delivered | None:
    """Return what devices are given that score models of their own, of which only some have been scored.

    A device counts as the mean of those of its tier that were scored. Devices of tiers without any are left out.

    Args:
        score_by_tier: the mean test score of the tier's devices that were scored last.
        has_model: whether a device has a model, or would be given one now.
    """
    of_device: dict[int, float] = {}
    without = beyond = 0
    for r in recipients:
        if r.architecture is None or not has_model(r.device):
            of_device[r.device] = nothing
            without += 1
        elif r.tier in score_by_tier:
            of_device[r.device] = score_by_tier[r.tier]
            beyond += not r.affords
    return _means({r.device: r.tier for r in recipients}, of_device, without, beyond)


def _means(tiers: Mapping[int, str], of_device: Mapping[int, float], without: int, beyond: int) -> Delivered | None:
    if not of_device:
        return None
    by_tier: defaultdict[str, list[float]] = defaultdict(list)
    for device in sorted(of_device):  # so that tiers stand as in the fleet file
        by_tier[tiers[device]].append(of_device[device])
    return Delivered(
        fmean(of_device.values()),
        {tier: fmean(values) for tier, values in by_tier.items()},
        len(of_device),
        without,
        beyond,
    )
