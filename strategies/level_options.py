"""Candidates for the levels of wildflower: cuts of a family, and what a search finds layer by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.group_family import GroupFamily
from wildflower.models.space import Space
from wildflower.plugins.flower_log import log
from wildflower.strategies.ascent_search import AscentSearch
from wildflower.strategies.search import ExactSearch

TOLERANCE = 0.02  # share of the most parameters that what is searched for levels may lack
WIDTHS = 16  # widths from which those of levels are chosen
# Shares of the blocks of a stack, from its first on, that a level may keep in place of all.
DEPTHS = (0.25, 0.5, 0.75)


def space_within(family: Family, widest: float, shares: Sequence[float]) -> Space | None:
    """Return the architectures whose layers each keep a share of their own, within a width.

    None: there are no shares, or architectures of this family are not chosen layer by layer.
    """
    try:
        return Space.of(family, sorted({*(share for share in shares if share < widest), widest})) if shares else None
    except ValueError as error:
        log.info("Wildflower: levels are not searched layer by layer: %s", error)
        return None


def searcher_of(
    space: Space, criterion: Literal["parameters", "balanced"], batch_size: int, optimizer: str
) -> ExactSearch | AscentSearch | None:
    """Return the search of a criterion; None where a space is too large for the exact one."""
    try:
        if criterion == "balanced":
            return AscentSearch(space, batch_size, optimizer, "balanced")
        return ExactSearch(space, batch_size, optimizer, TOLERANCE)
    except ValueError as error:
        log.warning("Wildflower: levels are not searched layer by layer: %s", error)
        return None


def sizes_between(family: Family, widths: Sequence[float], depths: Sequence[float] = DEPTHS) -> list[Architecture]:
    """Return what levels may be: cuts in width and in depth.

    Of a family that is cut in width these are `WIDTHS` widths between the smallest and the largest, and the given ones.
    Where it has stacks of blocks, they are also those widths with the first part of every stack alone (`depths`). Other
    families name their own.
    """
    named = family.candidates(widths)
    if len(family.candidates([1.0])) > 1:
        return named
    rates = dict.fromkeys([*widths, *np.geomspace(min(widths), max(widths), WIDTHS).tolist()])
    found = [family.width(rate) for rate in rates]
    if isinstance(family, GroupFamily) and len(family.segments) == 1:
        for share in depths:
            without = [
                block
                for blocks in family.stacks.values()
                for block in blocks[math.ceil(share * len(blocks)) :]
                if block in family.removable
            ]
            whole = [dict(zip(family.groups, family.width(rate).widths, strict=True)) for rate in rates]
            found += [family.architecture(kept, without) for kept in whole]
    return list(dict.fromkeys(found))
