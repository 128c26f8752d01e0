"""What all methods share that cut sub-models out of one global model and average every coordinate over its owners."""

from __future__ import annotations

import torch
from flwr.serverapp import Grid

from devices.budget import Budget
from models.architecture import Architecture
from models.cost import Cost
from models.family import Family
from strategies.aggregation import CoordinateMean
from strategies.base import Model, Setup, State, Strategy
from strategies.work import Contribution, Group, Weights


class SubModelStrategy(Strategy):
    """A global model, candidate widths, and the running mean over the coordinates that devices return."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.weights = initial_weights(setup.family, setup.settings.seed)
        self.mean = CoordinateMean(self.weights)
        self.candidates = [setup.family.width(width) for width in sorted(setup.widths, reverse=True)]
        self.below_smallest = setup.below_smallest

    def assign(self, device: int, budget: Budget) -> Architecture | None:
        """The widest candidate that fits."""
        for architecture in self.candidates:
            if fits(self.cost(architecture), budget):
                return architecture
        return self.candidates[-1] if self.below_smallest == "smallest" else None

    def payload(self, group: Group) -> Weights:
        """The group's cut of the global model."""
        return group.placement.gather(self.weights)

    def absorb(self, contribution: Contribution) -> None:
        """Add the devices' weights to the running sums of their coordinates."""
        assert contribution.total is not None
        self.mean.add(contribution.group.placement, contribution.group.layout, contribution.total)

    def finish_round(self) -> None:
        """Every coordinate becomes the mean over its owners; what nobody trained keeps its value."""
        self.weights = self.mean.mean(self.weights)

    @property
    def scored_architecture(self) -> Architecture:
        """The widest candidate."""
        return self.candidates[0]

    def models(self, grid: Grid) -> dict[Architecture, Model]:
        """The leading cut of every architecture that is scored."""
        return {a: self.leading_cut(a) for a in (self.scored_architecture, *self.tier_architectures.values())}

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


def fits(cost: Cost, budget: Budget) -> bool:
    """Whether a device can train an architecture of this cost, and its weights can travel."""
    within_link = budget.payload_bytes is None or cost.payload_bytes <= budget.payload_bytes
    return cost.peak_training_memory_bytes <= budget.memory_bytes and within_link


def initial_weights(family: Family, seed: int) -> Weights:
    """The global model's first weights, the same for the same family and seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        state = family.build(family.full()).state_dict()
    return {name: value.detach().clone() for name, value in state.items()}
