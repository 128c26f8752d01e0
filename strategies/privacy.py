"""Central differential privacy of devices: bounded changes, Gaussian noise on their sum, and what that costs.

DP-FedAvg with user-level privacy (McMahan et al., ICLR 2018, "Learning Differentially Private Recurrent Language
Models", Algorithm 1): every device takes part in a round with the same probability q, whatever the others do; its
change is scaled down to the L2 norm S; all devices count alike; the sum gets noise of standard deviation z S; and it is
divided by the number of devices that is expected, not by the number that came (the paper's estimator f_f).
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from messages.sums import SCALE, UNIT
from plugins.extras import needed
from strategies.aggregation import CoordinateMean

MAX_CLIP = MAX_NOISE_MULTIPLIER = 1000.0  # so that noise and changes stay far below what a 64-bit integer holds
TOLERANCE = 1e-3  # of epsilon, where the noise is sought that reaches it


@dataclass(frozen=True)
class Privacy:
    """How a run protects its devices. Two runs are neighbors if one has one device more, with all its examples.

    Attributes:
        clip: the largest L2 norm of a device's change, S.
        noise_multiplier: standard deviation of the noise over `clip`, z.
        delta: the probability with which epsilon need not hold.
        sampling_rate: the probability with which a device takes part in a round, q.
        expected_devices: q times the number of devices.
        seeded: noise and sampling follow from the run's seed, as in a simulation, and not from the system's entropy.
    """

    clip: float
    noise_multiplier: float
    delta: float
    sampling_rate: float
    expected_devices: int
    seeded: bool

    def epsilon(self, rounds: int) -> float:
        """What so many rounds cost. Raises MissingExtraError."""
        return epsilon_after(rounds, self.noise_multiplier, self.sampling_rate, self.delta)


@lru_cache(maxsize=4096)
def epsilon_after(rounds: int, noise_multiplier: float, sampling_rate: float, delta: float) -> float:
    """The epsilon of so many rounds of the Gaussian mechanism under Poisson sampling, by Renyi accounting.

    Raises MissingExtraError where opacus is not installed.
    """
    accountants = _accountants()
    accountant = accountants.RDPAccountant()
    accountant.history = [(noise_multiplier, sampling_rate, rounds)]
    with warnings.catch_warnings():  # that the best order is the largest or smallest: the bound then holds all the same
        warnings.simplefilter("ignore")
        return float(accountant.get_epsilon(delta))


def noise_multiplier_for(epsilon: float, rounds: int, sampling_rate: float, delta: float) -> float:
    """The noise multiplier with which so many rounds cost at most `epsilon`, and hardly less.

    Raises:
        ValueError: no noise of at most MAX_NOISE_MULTIPLIER is enough.
        MissingExtraError: opacus is not installed.
    """
    low, high = 0.0, 1.0
    while epsilon_after(rounds, high, sampling_rate, delta) > epsilon:
        low, high = high, 2 * high
        if high > MAX_NOISE_MULTIPLIER:
            raise ValueError(
                f"no noise multiplier up to {MAX_NOISE_MULTIPLIER:g} reaches epsilon {epsilon:g} in {rounds} rounds"
            )
    while epsilon - epsilon_after(rounds, high, sampling_rate, delta) > TOLERANCE * epsilon and high - low > 1e-6:
        middle = (low + high) / 2
        if epsilon_after(rounds, middle, sampling_rate, delta) > epsilon:
            low = middle
        else:
            high = middle
    return high


def _accountants() -> Any:
    root = logging.getLogger()
    handlers, level = [*root.handlers], root.level
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with needed("opacus", "differential privacy"):
                import opacus.accountants
    finally:  # importing opacus sets up the root logger, which would say every line of ours a second time
        root.handlers[:] = handlers
        root.setLevel(level)
    return opacus.accountants


class PrivateMean(CoordinateMean):
    """The previous value and the noisy mean of the devices' changes, on every coordinate, whoever came.

    What is added are sums of bounded changes (`messages.bound.bounded_change`), of weight UNIT per device, in place of
    sums of weights. A coordinate's sum is divided by `Privacy.expected_devices` also where a part of the devices owns
    it: how many of the round's devices do is not for anybody to know, and a smaller divisor would enlarge the noise.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        privacy: Privacy,
        frozen: Collection[str],
        generator: Callable[[], np.random.Generator | None],
    ) -> None:
        super().__init__(weights)
        self.privacy, self._frozen, self._generator = privacy, set(frozen), generator

    @property
    def empty(self) -> bool:
        """Never: a round to which nobody came is a round like any other, and nobody is to tell."""
        return False

    def mean(self, previous: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The previous values and the noisy mean change, except of what is frozen; then start over."""
        generator, deviation = self._generator(), self.privacy.noise_multiplier * self.privacy.clip * UNIT * SCALE
        result = dict(previous)
        for name, old in previous.items():
            if name not in self._frozen:
                self._begin(self._totals, [name])  # there is none where no update has come, which the noise must hide
                total = self._totals.pop(name)
                # Sums are whole numbers: to round the noise is to round the sum with it, which reveals no more.
                noise = gaussian(total.numel(), generator).mul_(deviation).round_().to(torch.int64)
                change = (total + noise.view_as(total)).double() / (self.privacy.expected_devices * UNIT * SCALE)
                result[name] = (old.double() + change).to(old.dtype)
        self._start_over()
        return result


def gaussian(count: int, generator: np.random.Generator | None) -> Tensor:
    """(count,) float64, independent standard normal numbers: of a generator, or without one of the system's entropy."""
    if generator is not None:
        return torch.from_numpy(generator.standard_normal(count))
    # Box-Muller: two uniform numbers of 53 bits make two normal ones.
    pairs = (count + 1) // 2
    bits = np.frombuffer(os.urandom(16 * pairs), dtype=np.uint64) >> np.uint64(11)
    first, second = (bits.reshape(2, pairs).astype(np.float64) + 0.5) * 2.0**-53
    radius = np.sqrt(-2.0 * np.log(first))
    both = np.concatenate([radius * np.cos(2 * math.pi * second), radius * np.sin(2 * math.pi * second)])
    return torch.from_numpy(both[:count])
