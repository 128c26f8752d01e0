"""Types of models that differ in depth and share whole layers, as InclusiveFL has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wildflower.messages.tensor_sets import STATISTICS
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.strategies.submodel import by_depth, require_one_exit


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
    """Return the layers of an architecture of a family with one stack; ValueError if it has none or several."""
    if len(family.stacks) != 1:
        raise ValueError(
            f"inclusivefl needs a family with one stack of layers alike, {family.name} has {len(family.stacks)}: "
            "take an encoder, a ViT, a BERT, or a function whose levels have more or fewer layers in an nn.ModuleList "
            "(names such as layers.0)"
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


def types_of(family: Family, widths: Sequence[float]) -> list[Architecture]:
    """Return the types' architectures, largest first.

    They are the family's candidates if those differ in depth, and otherwise thirds of its depth, as the paper's 12, 8
    and 4. Raises ValueError if the family is not cut in depth, or has several exits.
    """
    require_one_exit("inclusivefl", family)
    candidates = family.candidates(widths)
    if len({len(layers_of(family, architecture).blocks) for architecture in candidates}) > 1:
        return candidates
    return by_depth(family)


def check_alike(family: Family, layers: Mapping[Architecture, Layers]) -> None:
    """Raise ValueError if types share tensors of different shapes, or have statistics that Adam must not step."""
    shapes: dict[str, tuple[int, ...]] = {}
    for architecture, found in layers.items():
        for name, spec in family.tensors(architecture).items():
            if name.endswith(STATISTICS):
                raise ValueError(
                    f"inclusivefl needs a family without batch norm's statistics, {family.name} has {name}"
                )
            if shapes.setdefault(name, spec.shape) != spec.shape and name not in found.head:
                raise ValueError(
                    f"inclusivefl shares whole layers, but {name} of {family.name} has shape {spec.shape} in one type "
                    f"and {shapes[name]} in another: cut it in depth only"
                )
        if any(block.keys() != found.blocks[0].keys() for block in found.blocks):
            raise ValueError(f"inclusivefl needs layers of the same tensors; those of {architecture} differ")
