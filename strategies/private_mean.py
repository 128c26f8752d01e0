"""The noised mean of devices' bounded changes, under differential privacy."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping
from hashlib import sha256
from itertools import count

import numpy as np
import torch
from torch import Tensor

from wildflower.messages.sums import SCALE, UNIT
from wildflower.strategies.aggregation import CoordinateMean
from wildflower.strategies.privacy import NOISE, Privacy


class PrivateMean(CoordinateMean):
    """The previous value and the noisy mean of the devices' changes, on every coordinate, whoever came.

    What is added are sums of bounded changes (`wildflower.messages.bound.bounded_change`), of weight UNIT per device,
    in place of sums of weights. A coordinate's sum is divided by `Privacy.expected_devices` also where a part of the
    devices owns
    it: how many of the round's devices do is not for anybody to know, and a smaller divisor would enlarge the noise.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        privacy: Privacy,
        frozen: Collection[str],
        round_number: Callable[[], int],
        rng: Callable[..., np.random.Generator],
    ) -> None:
        """Make a mean of the values at the coordinates of `weights`.

        Args:
            frozen: names of tensors that stay as they are, and get no noise.
            round_number: tells which round runs.
            rng: makes the generator of a round, a purpose and further numbers, in a simulation.
        """
        super().__init__(weights)
        self.privacy, self._frozen, self._round, self._rng = privacy, set(frozen), round_number, rng

    @property
    def empty(self) -> bool:
        """Never: a round to which nobody came is a round like any other, and nobody is to tell."""
        return False

    def mean(self, previous: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The previous values and the noisy mean change, except of what is frozen; then start over.

        When this returns, it is in the run's account. Where noise follows from the seed, a round that is done again has
        the same noise. If its values are the same too, nothing new is told. If they are not, the difference of both
        would tell the devices' changes without noise: then other noise is drawn, and that is a release more.

        Raises:
            BudgetSpentError: the run would cost more than it may.
        """
        privacy, number = self.privacy, self._round()
        place = privacy.account.next_place(number)
        if privacy.seeded:
            earlier = [release.sha256 for release in privacy.account.earlier(number, place)]
            for again in count():
                result = self._noised(previous, self._rng(number, NOISE, place, *([again] if again else [])))
                digest = digest_of(result)
                if again == len(earlier):
                    privacy.account.add(privacy.release(number, place, digest))
                elif digest != earlier[again]:
                    continue
                break
        else:
            privacy.account.add(privacy.release(number, place))
            result = self._noised(previous, None)
        self._start_over()
        return result

    def _noised(self, previous: Mapping[str, Tensor], generator: np.random.Generator | None) -> dict[str, Tensor]:
        deviation = self.privacy.noise_multiplier * self.privacy.clip * UNIT * SCALE
        result = dict(previous)
        for name, old in previous.items():
            if name not in self._frozen:
                self._begin(self._totals, [name])  # there is none where no update has come, which the noise must hide
                total = self._totals[name]
                # Sums are whole numbers: to round the noise is to round the sum with it, which reveals no more.
                noise = gaussian(total.numel(), generator).mul_(deviation).round_().to(torch.int64)
                change = (total + noise.view_as(total)).double() / (self.privacy.expected_devices * UNIT * SCALE)
                result[name] = (old.double() + change).to(old.dtype)
        return result


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the names and the bytes of tensors."""
    found = sha256()
    for name in sorted(tensors):
        found.update(f"{name} {tuple(tensors[name].shape)}".encode())
        found.update(tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


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
