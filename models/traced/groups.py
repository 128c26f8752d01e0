"""Channel groups of a traced module: which dimensions of which tensors are cut together, and what is never cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from wildflower.models.frozen import parts_of
from wildflower.models.traced.layouts import Atom, Layout, resolved, size_of, unify
from wildflower.models.traced.propagation import Layouts, Propagation

INNER = "it lies inside of another dimension that is cut"
SIDE = "it is a side of a kernel"
NO_TENSOR = "no parameter has it"


@dataclass
class Group:
    """Channels that are cut together.

    Attributes:
        name: of the first tensor's module that makes them.
        size: of the full model.
        tensors: names of tensors and their dimensions that are tied.
    """

    name: str
    size: int
    atom: Atom
    tensors: list[tuple[str, int]] = field(default_factory=list)


def groups_of(
    found: Propagation, parameters: Sequence[str], keep: Sequence[str], together: Sequence[str] = ()
) -> list[Group]:
    """Return the groups in the order in which the module's parameters come; all else is pinned then.

    Args:
        parameters: names of tensors that are trained.
        keep: parts of the module whose channels are not cut, or patterns of them.
        together: patterns of names of groups; those of one size that one of them fits become one.
    """
    _pin_inner(found)
    groups = _free_groups(found, parameters)
    for pattern in together:
        first: dict[int, Atom] = {}
        for group in groups.values():
            if fnmatchcase(group.name, pattern):
                unify(((first.setdefault(group.size, group.atom),),), ((group.atom,),))
        groups = _free_groups(found, parameters)
    kept = {
        atom: part
        for atom, group in groups.items()
        for part in keep
        if any(fnmatchcase(inside, part) for name, _ in group.tensors[:1] for inside in parts_of([name]))
    }
    for atom, part in kept.items():
        atom.pinned = f"keep has {part}"
        del groups[atom]
    for layouts in _all(found):
        for layout in layouts:
            for atom in _free(layout):
                if atom not in groups:
                    atom.pinned = NO_TENSOR
    return list(groups.values())


def _free_groups(found: Propagation, parameters: Sequence[str]) -> dict[Atom, Group]:
    groups: dict[Atom, Group] = {}
    for name in (*parameters, *(other for other in found.state if other not in set(parameters))):
        for dimension, layout in enumerate(found.state.get(name, ())):
            for atom in _free(layout):
                if atom not in groups:
                    if name not in parameters:
                        continue
                    groups[atom] = Group(_name(name, groups.values()), atom.size, atom)
                if (name, dimension) not in groups[atom].tensors:
                    groups[atom].tensors.append((name, dimension))
    return groups


def _name(tensor: str, groups: Iterable[Group]) -> str:
    taken = {group.name for group in groups}
    base = tensor.rpartition(".")[0] or tensor
    number, name = 2, base
    while name in taken:
        name, number = f"{base}#{number}", number + 1
    return name


def _pin_inner(found: Propagation) -> None:
    """Of several free atoms in one product let the outermost be cut alone: heads, not the channels of a head."""
    changed = True
    while changed:
        changed = False
        for layouts in _all(found):
            for layout in layouts:
                for segment in resolved(layout):
                    for atom in [atom for atom in segment if not atom.pinned][1:]:
                        atom.pinned, changed = INNER, True


def _all(found: Propagation) -> Iterator[Layouts]:
    for layouts in (*found.layouts.values(), *found.state.values()):
        for entry in layouts or []:
            if isinstance(entry, tuple):
                yield [entry]
            elif isinstance(entry, list):
                yield entry


def _free(layout: Layout) -> Iterator[Atom]:
    return (atom for segment in resolved(layout) for atom in segment if not atom.pinned)


def pinned_of(found: Propagation, parameters: Sequence[str]) -> dict[str, str]:
    """Return the dimensions of parameters of which nothing is cut, such as "conv1.weight[1]", and why."""
    why: dict[str, str] = {}
    for name in parameters:
        for dimension, layout in enumerate(found.state.get(name, ())):
            atoms = [atom for segment in resolved(layout) for atom in segment]
            of_kernel = any(atom.pinned == SIDE for atom in atoms)  # which nobody expects to be cut
            if size_of(layout) > 1 and not of_kernel and all(atom.pinned for atom in atoms):
                why[f"{name}[{dimension}]"] = atoms[0].pinned
    return why
