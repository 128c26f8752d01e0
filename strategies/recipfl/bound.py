"""The generalization bound of RecipFL's Theorem 4.1: how many examples each device needs."""

from __future__ import annotations

import math


def examples_needed(
    *,
    devices: int,
    hypernetwork_parameters: int,
    client_parameters: int = 0,
    epsilon: float,
    delta: float,
    radius: float,
    lipschitz: float,
) -> float:
    """Examples per device from which every mean empirical loss is within `epsilon` of the true one.

    With probability 1 - `delta`, for all hypernetworks and client vectors at once, as Shamsian et al. (ICML 2021,
    Theorem 1) have it for hypernetworks over clients, with the constants of Baxter (JAIR 2000):

        m = 64 / epsilon^2 (d / M ln(16 R K / epsilon) + ln(4 / delta) / M),  d = K_phi + M v

    Our assumptions, for the paper's own constants were not at hand: losses lie in [0, 1]; the K_phi parameters of the
    hypernetwork and the v of each client's learned vector (0 where it reads how labels are distributed, which is not
    learned) lie in balls of radius R; the loss is K-Lipschitz in them; and an epsilon / 16 cover of d parameters has
    (16 R K / epsilon)^d elements. This is the order of the theorem, not a number to plan data by: the hypernetwork's
    part falls with the number of devices.

    Args:
        devices: M.
        hypernetwork_parameters: K_phi.
        client_parameters: v, learned for each device by itself.
        epsilon: the gap, in (0, 1).
        delta: the probability that the gap is larger, in (0, 1).
        radius: R, of the balls that parameters lie in.
        lipschitz: K.

    Raises:
        ValueError: an argument out of bounds, or a cover that is a single point (16 R K <= epsilon).
    """
    for name, value, minimum in (
        ("devices", devices, 1),
        ("hypernetwork_parameters", hypernetwork_parameters, 1),
        ("client_parameters", client_parameters, 0),
    ):
        if value < minimum:
            raise ValueError(f"{name} must be at least {minimum}, not {value}")
    for name, share in (("epsilon", epsilon), ("delta", delta)):
        if not 0 < share < 1:
            raise ValueError(f"{name} must lie between 0 and 1, not be {share}")
    if not (radius > 0 and lipschitz > 0 and 16 * radius * lipschitz > epsilon):
        raise ValueError(f"16 R K must be above epsilon = {epsilon}, not 16 * {radius} * {lipschitz}")
    per_device = hypernetwork_parameters / devices + client_parameters
    cover = per_device * math.log(16 * radius * lipschitz / epsilon)
    return 64 / epsilon**2 * (cover + math.log(4 / delta) / devices)
