"""Pairs of tensors, of which HypeMeFed guesses one from the other in a network with several exits (section 4.4)."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Literal

from wildflower.models.base import Family

Source = str  # the tensor that a deeper one is guessed from


def follow(family: Family, generate: Literal["layers", "all"] = "layers") -> dict[int, dict[str, Source]]:
    """Return which tensor each one behind the first exit is guessed from: exit -> {target: source}.

    Layers are the weights of convolutions and linear layers between an exit and the one before, but for those of
    heads; "all" are also their biases, the norms' scales and shifts, and the segment's head. Running statistics
    are measured and never guessed. A target's source is the one of the same name in the segment before (conv1 of block
    2 from conv1 of block 1). Of several those nearest to the exit go together, and so on towards the front: where the
    first exit comes behind blocks 0 and 1, block 2 follows block 1. Where there is none of that name, a target's source
    is the segment's last of the same kind, else its last layer.

    Raises:
        ValueError: a segment has no layer.
    """
    specs = family.tensors(family.full())
    parameters = [name for name, _ in family.without_memory(family.full()).named_parameters()]

    def of_head(name: str) -> bool:
        return name.startswith(tuple(f"{head}." for head in family.segments))

    def kind_of(name: str) -> tuple[bool, int, str]:
        """Return whether it is a head's, of how many dimensions, and a weight or a bias: a norm's scale is no shift."""
        return of_head(name), len(specs[name].shape), name.rpartition(".")[2]

    segments: list[tuple[list[str], list[str]]] = []  # layers, and all that is generated
    known: set[str] = set()  # tensors in front
    for number, head in enumerate(family.segments, start=1):
        new = family.tensors(family.up_to(number)).keys() - known
        known |= new
        inside = [name for name in parameters if name in new and not of_head(name)]
        layers = [name for name in inside if len(specs[name].shape) >= 2]
        if not layers:
            raise ValueError(
                f"hypemefed has nothing to guess in front of {head}: {family.name} has no convolution and no linear "
                "layer between this exit and the one before (or the input); choose other exits in family-arguments"
            )
        own = [name for name in parameters if name.startswith(f"{head}.")]
        segments.append((layers, [*inside, *own] if generate == "all" else layers))
    found: dict[int, dict[str, Source]] = {}
    for exit, ((layers, before), (_, here)) in enumerate(pairwise(segments), start=2):
        found[exit] = {}
        by_name: dict[str, list[str]] = defaultdict(list)
        for name in before:
            by_name[_path(name)].append(name)
        for target in reversed(here):
            path, kind = _path(target), kind_of(target)
            if path in by_name:
                same = by_name[path]
                found[exit][target] = same.pop() if len(same) > 1 else same[0]
            else:
                alike = [name for name in before if kind_of(name) == kind]
                found[exit][target] = (alike or layers)[-1]
        found[exit] = {target: found[exit][target] for target in here}
    return found


def _path(name: str) -> str:
    """Return what a tensor is called inside of its block: "conv1.weight" in block2.conv1.weight and in layer1.0."""
    parts = name.split(".")
    first = next((place for place, part in enumerate(parts) if part.isdecimal()), 0)
    return ".".join(parts[first + 1 :])
