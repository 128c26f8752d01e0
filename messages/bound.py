"""A bound on how far one device can move the model."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from messages.packing import Layout


def bounded(
    returned: Mapping[str, Tensor], sent: Mapping[str, Tensor], maximum: float
) -> tuple[dict[str, Tensor], bool]:
    """A device's weights, no further from those that it was sent than `most`, and whether they were further.

    The distance is the L2 norm over all tensors that it returns, batch norm's running statistics among them, since
    wrong ones do as much harm. Beyond the bound the change keeps its direction and is scaled down (norm clipping, Sun
    et al. 2019, "Can You Really Backdoor Federated Learning?"). A tensor that was not sent counts from zero.

    Args:
        returned, sent: finite tensors by name; those of one name have one shape.
        most: above 0.
    """
    start = {
        name: sent[name].double() if name in sent else torch.zeros_like(v).double() for name, v in returned.items()
    }
    moved = {name: value.double() - start[name] for name, value in returned.items()}
    norm = math.sqrt(sum(float(change.square().sum()) for change in moved.values()))
    if norm <= maximum:
        return dict(returned), False
    return {
        name: (start[name] + change * (maximum / norm)).to(returned[name].dtype) for name, change in moved.items()
    }, True


def bounded_change(
    returned: Mapping[str, Tensor], sent: Mapping[str, Tensor], layout: Layout, maximum: float
) -> tuple[Tensor, bool]:
    """How a device has changed what it was sent, at most of the L2 norm `maximum`, and whether it was further.

    Unlike in `bounded`, where the result is of the weights' own type, no rounding takes it beyond the bound but that of
    a 64-bit float. A tensor that was not sent counts from zero.

    Args:
        returned, sent: finite tensors by name; those of one name have one shape.
        layout: the tensors of `returned`.
        maximum: above 0.

    Returns:
        All tensors of the layout in one float64 vector.
    """
    pieces = []
    for entry in layout.entries:
        value = returned[entry.name].detach().reshape(-1).to("cpu", torch.float64)
        pieces.append(value - sent[entry.name].reshape(-1).double() if entry.name in sent else value)
    change = torch.cat(pieces)
    norm = float(change.norm())
    return (change, False) if norm <= maximum else (change * (maximum / norm), True)
