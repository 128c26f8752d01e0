"""What all methods share that cut sub-models out of one global model and average every coordinate over its owners."""

from __future__ import annotations

from dataclasses import replace
from logging import INFO, WARNING

import numpy as np
import torch
from flwr.common import log
from flwr.serverapp import Grid

from devices.budget import Budget
from models.architecture import Architecture
from models.family import Family
from strategies.aggregation import CoordinateMean
from strategies.base import Model, Setup, State, Strategy
from strategies.distillation import Cut, Distillation, distill
from strategies.work import LEADING, Contribution, Group, Selection, Weights, fit_in_turn, fits


class CandidateStrategy(Strategy):
    """Devices get the largest of some candidates that they can afford.

    Candidates come largest first; where a method names none they are the family's for the run's widths.
    """

    def __init__(self, setup: Setup, candidates: list[Architecture] | None = None) -> None:
        super().__init__(setup)
        self.candidates = candidates or setup.family.candidates(setup.widths)
        self.both_models = setup.both_models

    def assign(self, device: int, budget: Budget) -> Architecture | None:
        """The largest candidate that fits."""
        for architecture in self.candidates:
            if fits(self.cost(architecture), budget):
                return architecture
        return self.below_the_smallest

    @property
    def below_the_smallest(self) -> Architecture | None:
        """What a device gets that cannot afford the smallest architecture: nothing, or that all the same."""
        return None if self.below_smallest == "skip" else self.smallest

    def further(self, device: int, budget: Budget, architecture: Architecture) -> list[Architecture]:
        """With `both_models` the smallest candidate as well, where the budget allows one after the other."""
        if not self.both_models or architecture == self.smallest:
            return []
        return [self.smallest] if fit_in_turn([self.cost(architecture), self.cost(self.smallest)], budget) else []

    @property
    def smallest(self) -> Architecture:
        """The smallest candidate."""
        return self.candidates[-1]

    @property
    def least(self) -> Architecture:
        """The smallest candidate."""
        return self.smallest

    @property
    def scored_architecture(self) -> Architecture:
        """The largest candidate."""
        return self.candidates[0]


class SubModelStrategy(CandidateStrategy):
    """A global model, candidates cut out of it, and the running mean over the coordinates that devices return."""

    def __init__(self, setup: Setup, candidates: list[Architecture] | None = None) -> None:
        super().__init__(setup, candidates)
        self.weights = initial_weights(setup.family, setup.settings.seed)
        self.mean = CoordinateMean(self.weights)
        self.distillation = setup.distillation

    def payload(self, group: Group) -> Weights:
        """The group's cut of the global model."""
        return group.placement.gather(self.weights)

    def absorb(self, contribution: Contribution) -> None:
        """Add the devices' weights to the running sums of their coordinates."""
        assert contribution.total is not None
        self.mean.add(contribution.group.placement, contribution.group.layout, contribution.total)

    def finish_round(self) -> None:
        """Every coordinate becomes the mean over its owners; what nobody trained keeps its value. Then distillation."""
        self.weights = self.mean.mean(self.weights)
        if self.distillation is not None and any(a.outcome == "trained" for a in self.assignments):
            with self._timed("distill"):
                self._distill(self.distillation)

    def _distill(self, settings: Distillation) -> None:
        """In-place distillation of as many sub-models as a round has devices: the smallest, and random ones.

        Its learning rate falls with that of local training, or late rounds could not mend what distillation moves.
        """
        rate = settings.learning_rate * self.settings.rate_factor_in(self.round)
        settings = replace(settings, learning_rate=rate)
        rng = self.rng(5)
        students = self.students(rng)
        seed = int(rng.integers(2**63))
        try:
            distilled = distill(
                self.family, self.weights, self.scored_cut(self.scored_architecture), students, settings, seed
            )
        except FloatingPointError as error:
            log(WARNING, "Round %s: %s; the round's weights stay undistilled", self.round, error)
            return
        self.weights, self.distilled = distilled.weights, distilled
        if distilled.told_apart_nats is not None:
            text = "Round %s: %s sub-models distilled, %.1f steps/s, noise told apart by %.3f nats"
            log(INFO, text, self.round, len(students), distilled.steps_per_second, distilled.told_apart_nats)

    def students(self, rng: np.random.Generator) -> list[Cut]:
        """The sub-models of one distillation, as many as a round has devices."""
        subnets = [self.smallest, *(self.subnet(rng) for _ in range(self.settings.devices_per_round - 1))]
        return [self.scored_cut(architecture) for architecture in subnets]

    def subnet(self, rng: np.random.Generator) -> Architecture:
        """A random candidate, for distillation."""
        return self.candidates[int(rng.integers(len(self.candidates)))]

    def scored_selection(self, architecture: Architecture) -> Selection:
        """Which channels of the global model the scored sub-model of an architecture has."""
        return LEADING

    def scored_cut(self, architecture: Architecture) -> Cut:
        """The sub-model of an architecture as it is scored."""
        return architecture, self.family.place(architecture, self.scored_selection(architecture).select)

    def personal(self, device: int, budget: Budget) -> tuple[Architecture, Selection] | None:
        """The architecture of `assign`, cut as it is scored."""
        found = super().personal(device, budget)
        return None if found is None else (found[0], self.scored_selection(found[0]))

    def models(self, grid: Grid) -> dict[Architecture, Model]:
        """The leading cut of every architecture that is scored."""
        return {a: self.leading_cut(a) for a in (self.scored_architecture, *self.scored_tiers.values())}

    def leading_cut(self, architecture: Architecture) -> Model:
        """The model of the leading channels."""
        return Model(self.family, architecture, self.family.place(architecture).gather(self.weights))

    def state_dict(self) -> State:
        """The global weights, and the tiers' architectures."""
        state = super().state_dict()
        state.tensors |= {f"weights/{name}": value for name, value in self.weights.items()}
        return state

    def load_state_dict(self, state: State) -> None:
        """Restore the global weights; ValueError where they are not this family's."""
        super().load_state_dict(state)
        prefix = "weights/"
        found = {name.removeprefix(prefix): v for name, v in state.tensors.items() if name.startswith(prefix)}
        if {n: v.shape for n, v in found.items()} != {n: v.shape for n, v in self.weights.items()}:
            raise ValueError("the checkpoint's weights are of another model than the configuration's family")
        self.weights = {name: found[name] for name in self.weights}


def by_exit(family: Family) -> list[Architecture]:
    """The networks up to each exit of a family, deepest first."""
    return [family.up_to(exit) for exit in range(len(family.segments), 0, -1)]


def require_exits(method: str, family: Family) -> None:
    """Raise ValueError where a method that trains exits is given a family that has one only."""
    if len(family.segments) < 2:
        raise ValueError(
            f"{method} needs a family with several exits, {family.name} has one: set family-arguments, "
            "such as 'exits = [1, 2, 3]' (docs/families.md)"
        )


def initial_weights(family: Family, seed: int) -> Weights:
    """The global model's first weights, the same for the same family and seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return family.initial()
