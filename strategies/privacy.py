"""Central differential privacy of devices: bounded changes, Gaussian noise on their sum, and what that costs.

DP-FedAvg with user-level privacy (McMahan et al., ICLR 2018, "Learning Differentially Private Recurrent Language
Models", Algorithm 1): every device takes part in a round with the same probability q, whatever the others do; its
change is scaled down to the L2 norm S; all devices count alike; the sum gets noise of standard deviation z S; and it is
divided by the number of devices that is expected, not by the number that came (the paper's estimator f_f).
"""

from __future__ import annotations

import logging
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from wildflower.plugins.extras import needed

MAX_CLIP = MAX_NOISE_MULTIPLIER = 1000.0  # so that noise and changes stay far below what a 64-bit integer holds
TOLERANCE = 1e-3  # of epsilon, where the noise is sought that reaches it
NOISE = 10  # the purpose of the generator that noise is drawn from, in a simulation


class BudgetSpentError(RuntimeError):
    """One more noised model would cost more than the run may cost; the text says what was released so far."""


@dataclass(frozen=True)
class Release:
    """One noised mean that a run gives out, or was about to give out.

    Attributes:
        round: in which it was made.
        place: which mean of that round it is, from 1 on.
        noise_multiplier, sampling_rate: with which it was made.
        sha256: of its values, where noise follows from the seed: the same values again tell nothing new. "" where noise
            comes from the system's entropy.
    """

    round: int
    place: int
    noise_multiplier: float
    sampling_rate: float
    sha256: str = ""


class Account:
    """Everything noised that a run has released, also in rounds that were done again, and what it costs.

    Attributes:
        releases: what was written, the earliest first.
        record: called with a release and its epsilon before anything of it is given out; `wildflower.server_app.ledger`
        writes it.
    """

    def __init__(self, delta: float, budget: float = 0.0) -> None:
        """Make an account.

        Args:
            delta: for which epsilon is told.
            budget: the epsilon that must not be exceeded; 0: none.
        """
        self.delta, self.budget = delta, budget
        self.releases: list[Release] = []
        self.record: Callable[[Release, float], None] | None = None
        self._begun = (0, 0)  # a round, and how many of its means this process has begun

    def epsilon(self, *further: Release) -> float:
        """Return what all releases cost, with `further` ones. Raises MissingExtraError."""
        return epsilon_of(costs_of([*self.releases, *further]), self.delta)

    def next_place(self, round_number: int) -> int:
        """Return which mean of a round is made next."""
        last, place = self._begun
        self._begun = (round_number, place + 1 if last == round_number else 1)
        return self._begun[1]

    def earlier(self, round_number: int, place: int) -> list[Release]:
        """Return what was released at this place before the round was done again."""
        return [release for release in self.releases if (release.round, release.place) == (round_number, place)]

    def begin_in_memory(self) -> None:
        """Forget what was released, write nothing, and have no budget: nothing of what comes is given out."""
        self.releases, self.record, self.budget = [], None, 0.0

    def check_room(self, release: Release) -> None:
        """Raise BudgetSpentError where a release would exceed the budget."""
        if not self.budget or self.epsilon(release) <= self.budget:
            return
        rounds = len({earlier.round for earlier in self.releases})
        again = len(self.releases) - rounds
        raise BudgetSpentError(
            f"dp.epsilon = {self.budget:g} is spent: the ledger counts {len(self.releases)} noised models of {rounds} "
            f"rounds ({again} of rounds that were done again), which cost epsilon {self.epsilon():.4g}; with that of "
            f"round {release.round} it would be {self.epsilon(release):.4g}. The run ends here and its last model "
            "stays: resume=true does not go on with it"
        )

    def add(self, release: Release) -> None:
        """Write a release, which may be given out when this returns. Raises BudgetSpentError."""
        self.check_room(release)
        if self.record is not None:
            self.record(release, self.epsilon(release))
        self.releases.append(release)


@dataclass(frozen=True)
class Privacy:
    """The protection of a run's devices. Two runs are neighbors if one has one device more, with all its examples.

    Attributes:
        clip: the largest L2 norm of a device's change, S.
        noise_multiplier: standard deviation of the noise over `clip`, z.
        delta: the probability with which epsilon need not hold.
        sampling_rate: the probability with which a device takes part in a round, q.
        expected_devices: q times the number of devices.
        seeded: noise and sampling follow from the run's seed, as in a simulation, and not from the system's entropy.
        budget: the epsilon that the run must not exceed; 0: none.
        account: what the run has released.
    """

    clip: float
    noise_multiplier: float
    delta: float
    sampling_rate: float
    expected_devices: int
    seeded: bool
    budget: float = 0.0
    account: Account = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "account", Account(self.delta, self.budget))

    def epsilon(self, rounds: int) -> float:
        """Return what so many rounds cost that are done once. Raises MissingExtraError."""
        return epsilon_after(rounds, self.noise_multiplier, self.sampling_rate, self.delta)

    def check_room(self, round_number: int) -> None:
        """Raise BudgetSpentError before a round whose model would exceed the budget, so that nobody trains for it."""
        # In a simulation a round that is done again tells nothing new, as a rule.
        if not (self.seeded and self.account.earlier(round_number, 1)):
            self.account.check_room(self.release(round_number))

    def release(self, round_number: int, place: int = 1, digest: str = "") -> Release:
        """The release of a mean of a round under this noise."""
        return Release(round_number, place, self.noise_multiplier, self.sampling_rate, digest)


Costs = tuple[tuple[float, float, int], ...]
"""Noise multiplier, sampling rate, and how many releases have both, sorted."""


def costs_of(releases: Iterable[Release]) -> Costs:
    """Return what the accountant composes.

    Real nodes are sampled anew when a round is done again, so that each release stands by itself. In a simulation the
    same devices are sampled again: k releases of one round are then no k samples, but k looks at one sample, which
    together are as one look with noise that is smaller by sqrt(k).
    """
    found: Counter[tuple[float, float]] = Counter()
    of_one_sample: Counter[tuple[int, int, float, float]] = Counter()
    for r in releases:
        if r.sha256:
            of_one_sample[r.round, r.place, r.noise_multiplier, r.sampling_rate] += 1
        else:
            found[r.noise_multiplier, r.sampling_rate] += 1
    for (_, _, noise, rate), looks in of_one_sample.items():
        found[noise / math.sqrt(looks), rate] += 1
    return tuple(sorted((noise, rate, number) for (noise, rate), number in found.items()))


def epsilon_after(rounds: int, noise_multiplier: float, sampling_rate: float, delta: float) -> float:
    """The epsilon of so many rounds of the Gaussian mechanism under Poisson sampling, by Renyi accounting.

    Raises MissingExtraError where opacus is not installed.
    """
    return epsilon_of(((noise_multiplier, sampling_rate, rounds),), delta)


@lru_cache(maxsize=4096)
def epsilon_of(costs: Costs, delta: float) -> float:
    """The epsilon of releases of several kinds, by Renyi accounting. Raises MissingExtraError."""
    if not costs:
        return 0.0
    accountants = _accountants()
    accountant = accountants.RDPAccountant()
    accountant.history = list(costs)
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
