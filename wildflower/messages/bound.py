"""Bounds on how far one device can move the model, and on what a sum of several can be that nobody sees singly."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from wildflower.messages.error import MessageError
from wildflower.messages.packing import Layout
from wildflower.messages.sums import ADDABLE, SCALE, ClassSpan, WeightedSum, magnitude, split
from wildflower.models.base import STATISTICS, VARIANCE

PLAUSIBLE = 10.0  # times a tensor's largest coordinate: how far a mean is believed to move in one round
ROOM = 16.0  # how many times a mean must fit into what honest devices can add up


def bounded(
    returned: Mapping[str, Tensor], sent: Mapping[str, Tensor], maximum: float
) -> tuple[dict[str, Tensor], bool]:
    """Return a device's weights, no further from those that it was sent than `most`, and whether they were further.

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
    """Return a device's change of what it was sent, of the L2 norm `maximum` at most, and whether it was further.

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


def check_sum(
    total: WeightedSum,
    layout: Layout,
    sent: Mapping[str, Tensor],
    class_spans: tuple[ClassSpan, ...] = (),
    norm_bound: float = 0.0,
) -> None:
    """Raise MessageError where a sum of updates that nobody has seen by themselves can be of no honest ones.

    With a norm bound, to which every device holds itself, the sum must lie within weight x bound of what was sent. Else
    every coordinate must lie within weight x `PLAUSIBLE` x the largest one of its tensor, which counts as 1 at least;
    batch norm's statistics, which follow the data, may be of any size. In either case so much room is left that honest
    devices can still train from the mean, and no variance is below 0.

    Args:
        total: of one tensor set.
        layout: the tensors of the tensor set.
        sent: what all devices of the sum began from, by name; a tensor that was not sent counts from zero.
        class_spans: as of the tensor set.
    """
    weights = split(total.weight_at(class_spans), layout)
    moved_square = start_square = 0.0
    for name, value in split(total.total, layout).items():
        if not magnitude(value) <= ADDABLE / ROOM:
            raise MessageError(f"{name!r} holds a mean of {magnitude(value) / SCALE / total.weight:.3g}")
        if name.endswith(VARIANCE) and bool((value < 0).any()):
            raise MessageError(f"{name!r} holds a variance below 0")
        start_value = sent[name].double() if name in sent else torch.zeros(value.shape, dtype=torch.float64)
        change = (value.double() / SCALE - start_value * weights[name]) / total.weight
        moved_square += float(change.square().sum())
        start_square += float(start_value.square().sum())
        limit = PLAUSIBLE * max(1.0, magnitude(start_value))
        if not norm_bound and not name.endswith(STATISTICS) and magnitude(change) > limit:
            raise MessageError(
                f"a coordinate of {name!r} has moved by {magnitude(change):.3g}, and {limit:.3g} is the most that is "
                "plausible in one round: aggregation.norm-bound sets another bound, and where training has diverged, a "
                "smaller learning-rate helps"
            )
    # Devices round what they have scaled down to 32-bit floats, and sums are in steps of 1 / SCALE.
    slack = 2.0**-24 * (math.sqrt(start_square) + norm_bound) + math.sqrt(layout.numel) / SCALE
    if norm_bound and math.sqrt(moved_square) > norm_bound + slack:
        raise MessageError(
            f"the mean has moved by {math.sqrt(moved_square):.4g}, and aggregation.norm-bound is {norm_bound:g}"
        )
