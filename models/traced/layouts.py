"""Layouts: what the dimensions of tensors are made of.

A dimension is a sum of segments that lie one behind another, and a segment is a product of atoms, the outermost first.
So the rows of a fused projection of queries, keys and values are one segment (3, heads, head size), and the result of a
concatenation has one segment per input. An atom is joined with others that must have the same size in every sub-model
(union-find), or refined into smaller ones once an operator takes it apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MOST_COPIES = 16  # of a sum inside of a pinned atom that are written out
MOST_STEPS = 10_000  # of one comparison, which ends long before


class Atom:
    """A number of entries that is cut as a whole, or not at all.

    Attributes:
        size: in the full model.
        pinned: why it is never cut; "" if it may be.
        is_batch: whether it counts the examples of a batch.
        bound: what it has become: another atom, or a layout of smaller ones.
    """

    __slots__ = ("bound", "is_batch", "pinned", "size")

    def __init__(self, size: int, pinned: str = "", *, is_batch: bool = False) -> None:
        self.size, self.pinned, self.is_batch = size, pinned, is_batch
        self.bound: Layout | None = None

    def __repr__(self) -> str:
        return f"<{self.size}{'!' if self.pinned else ''}>"


Segment = tuple[Atom, ...]
Layout = tuple[Segment, ...]
ONE: Layout = ((),)
"""The layout of a dimension of size 1."""


class CannotAlignError(Exception):
    """Dimensions that cannot be followed through an operator; they are pinned then."""


def segment_size(segment: Segment) -> int:
    """Return the entries of a segment in the full model."""
    return math.prod(atom.size for atom in segment)


def size_of(layout: Layout) -> int:
    """Return the entries of a dimension in the full model."""
    return sum(map(segment_size, layout))


def fresh(size: int, pinned: str = "") -> Layout:
    """Return the layout of a dimension of which nothing is known yet but its size."""
    return ONE if size == 1 else ((Atom(size, pinned),),)


def representative(atom: Atom) -> Atom:
    """Return the atom that stands for all that this one was joined with."""
    while atom.bound is not None and len(atom.bound) == 1 and len(atom.bound[0]) == 1:
        atom = atom.bound[0][0]
    return atom


def resolved(layout: Layout) -> Layout:
    """Return a layout with every atom replaced by what it has become."""
    return tuple(segment for before in layout for segment in _resolved_segment(before))


def _resolved_segment(segment: Segment) -> list[Segment]:
    found: list[Segment] = [()]
    for before in segment:
        atom = representative(before)
        if atom.size == 1 and not atom.is_batch:
            continue
        if atom.bound is None:
            found = [(*outer, atom) for outer in found]
            continue
        inner = resolved(atom.bound)
        if len(inner) == 1:
            found = [outer + inner[0] for outer in found]
        elif found == [()]:
            found = list(inner)
        elif all(_is_small_constant(outer) for outer in found):
            found = [part for outer in found for part in list(inner) * segment_size(outer)]
        else:  # a sum below an atom that may be cut: it stays one atom, which may not
            pin(inner, "a concatenation inside of another dimension")
            atom.pinned = atom.pinned or "a concatenation inside of another dimension"
            found = [(*outer, atom) for outer in found]
    return found


def _is_small_constant(segment: Segment) -> bool:
    return segment_size(segment) <= MOST_COPIES and all(atom.pinned and not atom.is_batch for atom in segment)


def pin(layout: Layout, why: str) -> None:
    """Let nothing of a dimension be cut. The first reason stays."""
    for segment in resolved(layout):
        for atom in segment:
            _pin_atom(atom, why)


def _pin_atom(atom: Atom, why: str) -> None:
    if atom.bound is not None:
        pin(atom.bound, why)
    atom.pinned = atom.pinned or why


def is_pinned(layout: Layout) -> bool:
    """Say whether nothing of a dimension may be cut."""
    return all(atom.pinned for segment in resolved(layout) for atom in segment)


def _join(first: Atom, second: Atom) -> None:
    kept, joined = representative(first), representative(second)
    if kept is joined:
        return
    if joined.bound is not None and kept.bound is None:
        kept, joined = joined, kept
    if joined.bound is not None and kept.bound is not None:
        unify(kept.bound, joined.bound)
    if joined.is_batch:
        kept, joined = joined, kept
    kept.pinned = kept.pinned or joined.pinned
    joined.bound = ((kept,),)


def _split_product(atom: Atom, outer: int, inner: int) -> None:
    """Refine an atom into a product."""
    if atom.bound is not None or 1 in (outer, inner):
        raise CannotAlignError("it takes a concatenation apart")
    atom.bound = ((Atom(outer, atom.pinned), Atom(inner, atom.pinned)),)


def _split_sum(segment: Segment, first: int) -> bool:
    """Refine a segment so that another one of `first` entries begins it; False if its outermost atom does not allow."""
    if not segment:
        return False
    atom, inner = segment[0], segment_size(segment[1:])
    kept, rest = divmod(first, inner)
    if rest or atom.is_batch or not 0 < kept < atom.size:
        return False
    atom.bound = tuple((Atom(size, atom.pinned),) if size > 1 else () for size in (kept, atom.size - kept))
    return True


def unify(first: Layout, second: Layout) -> bool:
    """Make two layouts one: what is cut of the first is cut of the second. False, and both pinned, if that fails.

    Raises ValueError for dimensions of different sizes.
    """
    for _ in range(MOST_STEPS):
        first, second = resolved(first), resolved(second)
        if size_of(first) != size_of(second):
            raise ValueError(f"dimensions of {size_of(first)} and {size_of(second)} entries cannot be one")
        if first == second:
            return True
        mine, other = next(pair for pair in zip(first, second, strict=False) if pair[0] != pair[1])
        sizes = segment_size(mine), segment_size(other)
        if sizes[0] == sizes[1]:
            possible = _unify_segments(mine, other)
        else:
            larger = mine if sizes[0] > sizes[1] else other
            possible = _split_sum(larger, min(sizes))
        if not possible:
            break
    pin(first, "two ways of taking it apart")
    pin(second, "two ways of taking it apart")
    return False


def _unify_segments(first: Segment, second: Segment) -> bool:
    while first and second and first[0] is second[0]:
        first, second = first[1:], second[1:]
    while first and second and first[-1] is second[-1]:
        first, second = first[:-1], second[:-1]
    if not first or not second:
        return not first and not second
    one, two = first[0], second[0]
    if one.is_batch and two.is_batch:
        return False
    if one.size != two.size and (one.is_batch or two.is_batch):
        one, two = first[-1], second[-1]
        if one.is_batch or two.is_batch:
            return False
        return _join_ends(one, two, innermost=True)
    return _join_ends(one, two, innermost=False)


def _join_ends(one: Atom, two: Atom, *, innermost: bool) -> bool:
    """Join two atoms with which segments begin or end, or refine the larger so that a next step can."""
    if one.size == two.size:
        _join(one, two)
        return True
    larger, smaller = (one, two) if one.size > two.size else (two, one)
    if larger.size % smaller.size == 0:
        factors = (larger.size // smaller.size, smaller.size)
        _split_product(larger, *(factors if innermost else reversed(factors)))
        return True
    common = math.gcd(one.size, two.size)
    if common == 1 or innermost:
        return False
    _split_product(one, common, one.size // common)
    _split_product(two, common, two.size // common)
    return True


def cut_at(layout: Layout, offsets: Sequence[int]) -> list[Layout] | None:
    """Return the parts of a dimension between ascending offsets; None if one lies inside of what cannot be split."""
    for _ in range(MOST_STEPS):
        layout = resolved(layout)
        position = 0
        for segment in layout:
            size = segment_size(segment)
            inside = next((offset for offset in offsets if position < offset < position + size), None)
            if inside is not None:
                if not _split_sum(segment, inside - position):
                    return None
                break
            position += size
        else:
            break
    edges = [0, *offsets, size_of(layout)]
    parts: list[list[Segment]] = [[] for _ in edges[1:]]
    position = number = 0
    for segment in layout:
        while position >= edges[number + 1] and number + 1 < len(parts):
            number += 1
        parts[number].append(segment)
        position += segment_size(segment)
    return [tuple(part) for part in parts]


def take_inner(layout: Layout, inner: int) -> tuple[Layout, Layout] | None:
    """Divide a dimension into an outer one and an inner one of a size; None if that is impossible."""
    if inner == 1:
        return layout, ONE
    for _ in range(MOST_STEPS):
        layout = resolved(layout)
        outer, inside = [], []
        for segment in layout:
            place, rest = len(segment), inner
            while rest > 1 and place > 0 and rest % segment[place - 1].size == 0:
                place -= 1
                rest //= segment[place].size
            if rest > 1:
                atom = segment[place - 1] if place else None
                if atom is None or atom.is_batch or atom.size % rest:
                    return None
                _split_product(atom, atom.size // rest, rest)
                break
            outer.append(segment[:place])
            inside.append(segment[place:])
        else:
            first: Layout = (inside[0],)
            differing = next((part for part in inside[1:] if resolved((part,)) != resolved(first)), None)
            if differing is None:
                return tuple(outer), first
            if not unify((differing,), first):
                return None
    return None


def product(dimensions: Sequence[Layout]) -> Layout:
    """Return the layout of several dimensions that become one, the outermost first."""
    present = [found for found in map(resolved, dimensions) if found != ONE]
    if not present:
        return ONE
    inner: Segment = ()
    for layout in present[1:]:
        if len(layout) == 1:
            inner += layout[0]
        else:
            atom = Atom(size_of(layout))
            atom.bound = layout
            inner = (*inner, atom)
    return resolved(tuple(segment + inner for segment in present[0]))
