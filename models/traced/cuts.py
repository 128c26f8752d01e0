"""Choices of a user on how a module is cut."""

from __future__ import annotations

from typing import NamedTuple


class Cuts(NamedTuple):
    """Choices of a user on how a module is cut.

    Attributes:
        keep: parts whose channels are not cut.
        together: patterns of groups that become one.
        depth: patterns of blocks that may be left out.
        exits: parts behind which there are exits.
        early_exits: whether exits are found where none are named.
    """

    keep: tuple[str, ...] = ()
    together: tuple[str, ...] = ()
    depth: tuple[str, ...] = ("*",)
    exits: tuple[str, ...] = ()
    early_exits: bool = False
