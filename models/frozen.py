"""The parts that `freeze` of a family leaves untrained; it names something, and leaves something to train."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from wildflower.models.architecture import Architecture
from wildflower.models.base import STATISTICS, Family, lies_in
from wildflower.models.layers import TensorSpec
from wildflower.models.network import Network
from wildflower.plugins.nearest import LIKENESS, did_you_mean


def without_gradients(family: Family, network: Network) -> Network:
    """Let what a family freezes of a network have no gradients; return the network."""
    for name, parameter in network.named_parameters() if family.freeze else ():
        if family.is_frozen(name):  # others are left alone, because a module may keep some of them still itself
            parameter.requires_grad_(False)
    return network


def marked(family: Family, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return the specs of tensors, with what is frozen marked."""
    return {name: replace(spec, frozen=family.is_frozen(name)) for name, spec in specs.items()}


def check_freeze(family: Family) -> None:
    """Raise ValueError if an entry of `freeze` names nothing, or if nothing is left to train."""
    check_parts(family, family.freeze)
    if _all_frozen(family, family.tensors(family.full())):
        raise ValueError(f"{family.name}: with freeze = {', '.join(family.freeze)} nothing is left to train")


def check_left(family: Family, arch: Architecture) -> None:
    """Raise ValueError if nothing of an architecture is left to train."""
    if family.freeze and _all_frozen(family, family.tensors(arch)):
        learned = (spec.shape for name, spec in family.tensors(arch).items() if not name.endswith(STATISTICS))
        parameters = sum(math.prod(shape) for shape in learned)
        raise ValueError(
            f"{family.name}: with freeze = {', '.join(family.freeze)} nothing is left to train of the model of "
            f"{parameters:,} parameters, which devices may get"
        )


def check_trained(family: Family, parts: Iterable[str]) -> None:
    """Raise ValueError if a part names nothing, or only what is frozen."""
    parts = list(parts)
    check_parts(family, parts)
    for part in parts if family.freeze else ():
        if _all_frozen(family, (name for name in family.tensor_names() if lies_in(name, part))):
            raise ValueError(f"{part} is frozen, so that no learning rate makes a difference: leave it out")


def check_parts(family: Family, parts: Iterable[str]) -> None:
    """Raise ValueError if a part, the beginning of tensors' names in front of a dot, names nothing."""
    names = family.tensor_names()
    for part in parts:
        if not any(lies_in(name, part) for name in names):
            known = parts_of(names)
            outermost = ", ".join(dict.fromkeys(name.partition(".")[0] for name in known))
            meant = did_you_mean(part, known, likeness=LIKENESS) or f"its outermost parts are {outermost}"
            raise ValueError(f"{family.name} has no part {part!r}; {meant}")
        for further, first in family.further_names().items():
            if lies_in(further, part) and not lies_in(first, part):
                raise ValueError(
                    f"{family.name}: the part {part!r} holds {further}, which is one tensor with {first}. The "
                    f"tensor goes by the name {first}: name a part that holds that"
                )


def _all_frozen(family: Family, names: Iterable[str]) -> bool:
    """Say whether all of these tensors that gradients could train are frozen."""
    return all(family.is_frozen(name) for name in names if not name.endswith(STATISTICS))


def parts_of(names: Iterable[str]) -> dict[str, None]:
    """Return what tensors' names begin with in front of a dot, and the names themselves, in order."""
    split = [name.split(".") for name in names]
    return dict.fromkeys(".".join(parts[:end]) for parts in split for end in range(1, len(parts) + 1))
