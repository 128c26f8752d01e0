"""The generalization bound of RecipFL's Theorem 4.1: how many examples each device needs."""

from __future__ import annotations

import math


def examples_needed(
    *, devices: int, parameters: int, epsilon: float, delta: float, radius: float, lipschitz: float
) -> float:
    """Examples per device from which the mean true loss is at most the mean empirical one plus `epsilon` (Eq. 11).

        N >= max(4 d / (M epsilon^2) log(4 R K sqrt(d) / epsilon) + 4 / (M epsilon^2) log(4 / delta), 1 / epsilon^2)

    With probability at least 1 - `delta`, for all hypernetworks at once. Losses lie in [0, 1]. The logarithm's
    argument is the root of a number of cubes, so that it is at least 1 here; the paper assumes a large R.

    Args:
        devices: M.
        parameters: d, of the hypernetwork, learned vectors of clients included.
        epsilon: the gap, in (0, 1).
        delta: the probability that the gap is larger, in (0, 1).
        radius: R; every parameter lies in [-R, R].
        lipschitz: K, of the loss in the parameters, by the Euclidean distance.

    Raises:
        ValueError: an argument out of bounds.
    """
    for name, value in (("devices", devices), ("parameters", parameters)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    for name, share in (("epsilon", epsilon), ("delta", delta)):
        if not 0 < share < 1:
            raise ValueError(f"{name} must lie between 0 and 1, not be {share}")
    for name, size in (("radius", radius), ("lipschitz", lipschitz)):
        if not 0 < size < math.inf:
            raise ValueError(f"{name} must be above 0 and finite, not {size}")
    cubes = max(1.0, 4 * radius * lipschitz * math.sqrt(parameters) / epsilon)
    capacity = parameters * math.log(cubes) + math.log(4 / delta)
    return max(4 / (devices * epsilon**2) * capacity, 1 / epsilon**2)
