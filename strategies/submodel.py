"""The base of methods that cut sub-models out of one global model and average every coordinate over its owners."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from wildflower.devices.budget import Budget
from wildflower.messages.tensor_sets import STATISTICS, TensorSets, Weights
from wildflower.models.architecture import Architecture
from wildflower.models.family import Family
from wildflower.models.placement import Placement
from wildflower.strategies.aggregation import CoordinateMean
from wildflower.strategies.method import (
    LEADING,
    Contribution,
    Group,
    Method,
    Model,
    P,
    Selection,
    Setup,
    State,
    Trained,
    Traits,
)
from wildflower.strategies.pricing import fit_in_turn, fits

Cut = tuple[Architecture, Placement]
"""A sub-model of the global model, and where it lies in it."""


def without_statistics(models: Mapping[Architecture, Model]) -> dict[Architecture, Model]:
    """Models without batch norm's statistics, which devices then take before a model is scored (`statistics.devices`).

    This is for methods that do not end at the mean of the devices' weights. The mean of the devices' statistics would
    not fit such a model.
    """
    return {
        architecture: replace(model, weights={n: v for n, v in model.weights.items() if not n.endswith(STATISTICS)})
        for architecture, model in models.items()
    }


def learned(weights: Weights) -> Weights:
    """Return what is learned of a model: all but batch norm's running statistics, which are measured."""
    return {name: value for name, value in weights.items() if not name.endswith(STATISTICS)}


def zeros(weights: Weights) -> Weights:
    """Return zeros in the shapes of some tensors."""
    return {name: torch.zeros_like(value) for name, value in weights.items()}


class CandidateMethod(Method[P]):
    """Devices get the largest of some candidates that they can afford.

    Candidates come largest first; where a method names none they are the family's for the run's widths.
    """

    def __init__(self, setup: Setup, params: P, candidates: list[Architecture] | None = None) -> None:
        super().__init__(setup, params)
        self.candidates = candidates or setup.family.candidates(setup.widths)
        self.both_models = setup.both_models

    def assign(self, device: int, budget: Budget) -> Architecture | None:
        """Return the largest candidate that fits; below the smallest what `below-smallest` says."""
        for architecture in self.candidates:
            if fits(self.cost(architecture), budget):
                return architecture
        return self.below_the_smallest

    @property
    def below_the_smallest(self) -> Architecture | None:
        """Return what a device gets that cannot afford the smallest architecture: nothing, or that all the same."""
        return None if self.below_smallest == "skip" else self.candidates[-1]

    def extra_architectures(self, device: int, budget: Budget, architecture: Architecture) -> list[Architecture]:
        """With `both_models` the smallest candidate as well, where the budget allows one after the other."""
        smallest = self.candidates[-1]
        if not self.both_models or architecture == smallest:
            return []
        return [smallest] if fit_in_turn([self.cost(architecture), self.cost(smallest)], budget) else []

    @property
    def smallest_architecture(self) -> Architecture:
        """The smallest candidate."""
        return self.candidates[-1]

    @property
    def scored_architecture(self) -> Architecture:
        """The largest candidate."""
        return self.candidates[0]

    @property
    def deliverable(self) -> list[Architecture]:
        """All candidates."""
        return self.candidates


class SubModelMethod(CandidateMethod[P]):
    """A global model, candidates cut out of it, and the running mean over the coordinates that devices return.

    The tensor sets that devices return are named tensors of the global model. scored_family: how models are built that
    are scored.
    """

    fit_for: ClassVar[Traits] = Traits(averages=True, takes_initial_weights=True)

    def __init__(self, setup: Setup, params: P, candidates: list[Architecture] | None = None) -> None:
        super().__init__(setup, params, candidates)
        self.weights = first_weights(setup)
        self.mean = self.running_mean(self.weights)
        self.scored_family = setup.family

    def payload(self, group: Group) -> TensorSets:
        """Return the group's cut of the global model."""
        return {"weights": group.placement.gather(self.weights)}

    def absorb(self, contribution: Contribution) -> None:
        """Add the devices' tensors to the running sums of their coordinates, but for those that are not averaged."""
        returned = contribution.group.returned
        self.average(
            self.mean, contribution, [name for name, tensor_set in returned.items() if tensor_set.merge is not None]
        )

    def average(self, mean: CoordinateMean, contribution: Contribution, tensor_sets: Iterable[str]) -> None:
        """Add some of the devices' tensor sets to a running mean: all of them or, where one is too large, none."""
        group, names = contribution.group, list(tensor_sets)
        for name in names:
            mean.check(contribution.sum_of(name))
        for name in names:
            mean.add(group.placement, group.returned[name].layout, contribution.sum_of(name), tensor_set=name)

    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        """Set every coordinate to the mean over its owners; what nobody trained keeps its value."""
        self.weights = self.mean.mean(self.weights)
        return {}

    def scored_selection(self, architecture: Architecture) -> Selection:
        """Return which channels of the global model the scored sub-model of an architecture has."""
        return LEADING

    def scored_cut(self, architecture: Architecture) -> Cut:
        """Return the sub-model of an architecture as it is scored."""
        return architecture, self.family.place(architecture, self.scored_selection(architecture).select)

    def personal(self, device: int, budget: Budget) -> tuple[Architecture, Selection] | None:
        """Return the architecture of `assign`, cut as it is scored."""
        found = super().personal(device, budget)
        return None if found is None else (found[0], self.scored_selection(found[0]))

    def models(self, architectures: Collection[Architecture]) -> dict[Architecture, Model]:
        """Return the cut of every architecture as it is scored."""
        cuts = (self.scored_cut(architecture) for architecture in architectures)
        return {a: Model(self.scored_family, a, placement.gather(self.weights)) for a, placement in cuts}

    def frozen_weights(self) -> Weights:
        """Return those of the global model: nobody returns them, so that they stay what they were."""
        return {name: tensor for name, tensor in self.weights.items() if self.family.is_frozen(name)}

    def beside_weights(self) -> Mapping[str, Weights]:
        """Return what a resumed run needs beside the weights, by what it is called: such as a server's momentum.

        `load` fills these dictionaries.
        """
        return {}

    def state(self) -> State:
        """Return the global weights, and what is beside them."""
        parts = {"weights": self.weights, **self.beside_weights()}
        return State({f"{part}/{name}": v for part, tensors in parts.items() for name, v in tensors.items()}, {})

    def load(self, state: State) -> None:
        """Restore `state`; ValueError if the weights are not this family's, or what is beside them is missing."""
        prefix = "weights/"
        found = {name.removeprefix(prefix): v for name, v in state.tensors.items() if name.startswith(prefix)}
        if {n: v.shape for n, v in found.items()} != {n: v.shape for n, v in self.weights.items()}:
            raise ValueError("the checkpoint's weights are of another model than the configuration's family")
        for part, tensors in self.beside_weights().items():
            if missing := [name for name in tensors if f"{part}/{name}" not in state.tensors]:
                raise ValueError(f"the checkpoint holds no {part} of {missing[0]}: its run had other settings")
            tensors.update({name: state.tensors[f"{part}/{name}"] for name in tensors})
        self.weights = {name: found[name] for name in self.weights}


def first_weights(setup: Setup) -> Weights:
    """The global model's first weights: those that the run was given, and all others drawn."""
    return {**initial_weights(setup.family, setup.settings.seed), **setup.initial}


def initial_weights(family: Family, seed: int) -> Weights:
    """The global model's first weights, the same for the same family and seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return family.initial()
