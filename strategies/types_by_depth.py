"""Types of models that differ in depth and share whole layers, as InclusiveFL has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wildflower.messages.tensor_sets import STATISTICS
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.strategies.exits import by_depth, require_one_exit


@dataclass(frozen=True)
class Layers:
    """The tensors of a type's model by the layer that they are of.

    Attributes:
        embeddings: names of what is in front of the first layer.
        blocks: of each layer in order: the name behind the layer's own -> the tensor's whole name.
        head: names of what is behind the last layer, and of all that grows with the number of classes.
    """

    embeddings: tuple[str, ...]
    blocks: tuple[Mapping[str, str], ...]
    head: tuple[str, ...]


def layers_of(family: Family, architecture: Architecture) -> Layers:
    """Return the layers of an architecture of a family with one stack, or the blocks of a member of a choice.

    ValueError if the family is no choice and has no stack, or several.
    """
    if len(family.alternatives) > 1:
        return _blocks_of(family, architecture)
    if len(family.stacks) != 1:
        raise ValueError(
            f"inclusivefl needs a family with one stack of layers alike, {family.name} has {len(family.stacks)}: "
            "take an encoder, a ViT, a BERT, a choice among networks that begin alike, or a function whose levels have "
            "more or fewer layers in an nn.ModuleList (names such as layers.0)"
        )
    [prefixes] = family.stacks.values()
    blocks: list[dict[str, str]] = [{} for _ in prefixes]
    embeddings: list[str] = []
    head: list[str] = []
    for name, spec in family.tensors(architecture).items():
        number = next((n for n, prefix in enumerate(prefixes) if name.startswith((f"{prefix}.", f"{prefix}_"))), None)
        if number is not None:
            blocks[number][name[len(prefixes[number]) :]] = name
        else:
            # A module of the user's may define its head first.
            (head if any(blocks) or spec.of_classes else embeddings).append(name)
    kept = [block for block in blocks if block]
    if blocks[: len(kept)] != kept:
        raise ValueError(f"inclusivefl needs the first layers of {family.name}, and {architecture} leaves out some")
    return Layers(tuple(embeddings), tuple(kept), tuple(head))


def _blocks_of(family: Family, architecture: Architecture) -> Layers:
    """The blocks of a network in order; the one that ends in the classes is the head."""
    prefix, member, own = family.member_of(architecture)
    tensors = member.tensors(own)
    blocks: dict[str, dict[str, str]] = {}
    for name in tensors:
        block = name.partition(".")[0]
        blocks.setdefault(block, {})[name.removeprefix(block)] = prefix + name
    heads = {name.partition(".")[0] for name, spec in tensors.items() if spec.of_classes}
    head = tuple(name for block in heads for name in blocks[block].values())
    return Layers((), tuple(found for block, found in blocks.items() if block not in heads), head)


def alike_blocks(family: Family, one: tuple[Architecture, Layers], other: tuple[Architecture, Layers]) -> int:
    """Return with how many blocks of tensors of the same names and shapes two types begin."""
    shapes = [family.tensors(architecture) for architecture, _ in (one, other)]
    count = 0
    for blocks in zip(one[1].blocks, other[1].blocks, strict=False):
        first, second = (
            {suffix: tensors[name].shape for suffix, name in block.items()}
            for tensors, block in zip(shapes, blocks, strict=True)
        )
        if first != second:
            break
        count += 1
    return count


def deep_tensors(
    family: Family, larger: tuple[Architecture, Layers], smaller: tuple[Architecture, Layers]
) -> dict[str, list[str]]:
    """Return the larger type's tensors, from the smaller one's last layer on, that are like those of that layer.

    They are keyed by the name behind the layer's own, and of the same shape; what is not learned is left out.
    """
    has, wanted = family.tensors(larger[0]), family.tensors(smaller[0])
    deep = larger[1].blocks[len(smaller[1].blocks) - 1 :]
    found = {
        suffix: [b[suffix] for b in deep if suffix in b and has[b[suffix]].shape == wanted[name].shape]
        for suffix, name in smaller[1].blocks[-1].items()
        if not name.endswith(STATISTICS)
    }
    return {suffix: names for suffix, names in found.items() if names}


def types_of(family: Family, widths: Sequence[float]) -> list[Architecture]:
    """Return the types' architectures, largest first.

    They are the family's candidates if those differ in depth, or are members of a choice, and otherwise thirds of its
    depth, as the paper's 12, 8 and 4. Raises ValueError if the family is not cut in depth, or has several exits.
    """
    require_one_exit("inclusivefl", family)
    candidates = family.candidates(widths)
    if (
        len(family.alternatives) > 1
        or len({len(layers_of(family, architecture).blocks) for architecture in candidates}) > 1
    ):
        return candidates
    return by_depth(family)


def check_alike(family: Family, layers: Mapping[Architecture, Layers]) -> None:
    """Raise ValueError if types share tensors of different shapes, or no layer at all."""
    if len(family.alternatives) > 1:
        largest, *others = layers.items()
        if not all(alike_blocks(family, largest, other) for other in others):
            raise ValueError(
                f"inclusivefl shares whole layers, and the members of {family.name} begin with different ones"
            )
        return
    shapes: dict[str, tuple[int, ...]] = {}
    for architecture, found in layers.items():
        for name, spec in family.tensors(architecture).items():
            if shapes.setdefault(name, spec.shape) != spec.shape and name not in found.head:
                raise ValueError(
                    f"inclusivefl shares whole layers, but {name} of {family.name} has shape {spec.shape} in one type "
                    f"and {shapes[name]} in another: cut it in depth only"
                )
        if any(block.keys() != found.blocks[0].keys() for block in found.blocks):
            raise ValueError(f"inclusivefl needs layers of the same tensors; those of {architecture} differ")
