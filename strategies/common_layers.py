"""The layers that architectures of different types have in common, as FlexiFed shares them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.strategies.exits import by_depth, require_one_exit

Signature = tuple[str, tuple[int, ...]]
"""A tensor's name and shape: tensors of two architectures with equal ones are of the same layer."""


def types_of(family: Family, widths: Sequence[float]) -> list[Architecture]:
    """The types' architectures, largest first: the family's candidates where two of them begin alike.

    Where none do, since they are cut in width, they are thirds of the depth. Raises ValueError where the family is not
    cut in depth either, or has several exits.
    """
    require_one_exit("flexifed", family)
    candidates = family.candidates(widths)
    firsts = [list(signatures_of(family, architecture).values()) for architecture in candidates]
    if any(common_length(pair) for pair in combinations(firsts, 2)):
        return candidates
    try:
        return by_depth(family)
    except ValueError as error:
        raise ValueError(
            f"flexifed needs architectures that begin with the same layers, and those of {family.name} do not: take "
            f"an encoder, a transformer, levels of different depth, or a choice ({error})"
        ) from None


def signatures_of(family: Family, architecture: Architecture) -> dict[str, Signature]:
    """The tensors of an architecture, in order, and what says whether another's are of the same layer.

    Members of a choice have their own names in front of their tensors', which do not count.
    """
    prefix, _, _ = family.member_of(architecture)
    return {name: (name.removeprefix(prefix), spec.shape) for name, spec in family.tensors(architecture).items()}


def common_length(signatures: Sequence[Sequence[Signature]]) -> int:
    """With how many tensors all these architectures begin alike."""
    length = 0
    for together in zip(*signatures, strict=False):
        if len(set(together)) > 1:
            break
        length += 1
    return length


def alike(signatures: Sequence[Sequence[Signature]]) -> list[list[int]]:
    """Return, for every tensor of every type, the first type that begins with the same tensors up to this one.

    Two types with the same first type begin alike up to there: to begin alike is an equivalence.
    """
    found: list[list[int]] = []
    for mine in signatures:
        others = list(range(len(signatures)))
        owners = []
        for place, signature in enumerate(mine):
            others = [o for o in others if place < len(signatures[o]) and signatures[o][place] == signature]
            owners.append(others[0])
        found.append(owners)
    return found
