"""Dimensions of a module's tensors that count the classes: found by building the module for one class more."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from wildflower.models.network import Network

TOLERANCE = 1e-3  # of what a class's own answer moves by


def growing(mine: Mapping[str, Tensor], grown: Mapping[str, Tensor], classes: int) -> dict[str, list[int]]:
    """Return the dimensions with an entry for each class, which have one more where there is one class more.

    Args:
        mine, grown: tensors by name for `classes` and for one more.
    """
    found = {
        name: [d for d, size in enumerate(tensor.shape) if size == classes and grown[name].shape[d] == size + 1]
        for name, tensor in mine.items()
    }
    return {name: dimensions for name, dimensions in found.items() if dimensions}


def of_classes(
    candidates: Mapping[str, list[int]], shapes: Mapping[str, Tensor], build: Callable[[], Network], inputs: Tensor
) -> dict[str, int]:
    """Return the dimension of each tensor whose k-th entry belongs to class k.

    Where a layer inside has as many channels as there are classes, its tensors and those that read it grow as well.
    Then entries are changed one by one. Only the answer of an entry's own class may move, or those of all other
    classes by the same amount, as behind a log-softmax.

    Args:
        candidates: the dimensions that are `growing`.
        shapes: the tensors, of which only the number of dimensions is read.
        build: returns the network for three classes or more.
        inputs: a batch of any inputs.
    """
    of_matrices = {tuple(dimensions) for name, dimensions in candidates.items() if shapes[name].dim() > 1}
    if len(of_matrices) <= 1 and all(len(dimensions) == 1 for dimensions in candidates.values()):
        return {name: dimensions[0] for name, dimensions in candidates.items()}
    network = build().eval()
    found: dict[str, int] = {}
    for name, tensor in network.state_dict().items():
        if tensor.is_floating_point():
            own = [d for d in candidates.get(name, ()) if _is_of_classes(network, tensor, d, inputs)]
            found.update((name, d) for d in own[:1])
    return found


@torch.no_grad()
def _is_of_classes(network: Network, tensor: Tensor, dimension: int, inputs: Tensor) -> bool:
    """Say whether the first and the last entry of a dimension move the answer of the first and of the last class."""
    before = network(inputs).transpose(0, 1).flatten(1)  # (classes, others)
    for place in (0, tensor.shape[dimension] - 1):
        entry = tensor.select(dimension, place)
        kept = entry.clone()
        entry += 1
        moved = network(inputs).transpose(0, 1).flatten(1) - before
        entry.copy_(kept)
        others = torch.cat([moved[:place], moved[place + 1 :]])
        common = others.mean(0)
        own = (moved[place] - common).abs().max()
        if not own > 0 or (others - common).abs().max() > TOLERANCE * own:
            return False
    return True
