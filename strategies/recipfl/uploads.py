"""Parts of every device's last upload that RecipFL's server keeps, and what stands for them before the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wildflower.messages.tensor_sets import Weights, parameters_of
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.strategies.contract_values import State
from wildflower.strategies.recipfl.network_graph import graph_of
from wildflower.strategies.recipfl.tensor_coders import digests
from wildflower.strategies.run_settings import RoundSettings

Owner = tuple[int, Architecture]  # a device, and which of its models


@dataclass
class Current:
    """Parts of a device's last upload: what the hypernetwork reads of it, and what it does not generate."""

    digests: Tensor
    kept: Weights


class Uploads:
    """Parts of uploads, by device and model.

    Attributes:
        current: of the last upload of each.
        initial: of devices that were written for before their first upload.
        fresh: of the round that runs.
    """

    def __init__(
        self,
        family: Family,
        settings: RoundSettings,
        candidates: Sequence[Architecture],
        given: Mapping[str, Tensor],
        decoders: nn.ModuleDict,
    ) -> None:
        """Begin without any upload.

        Args:
            given: weights that the run was given.
            decoders: of the hypernetwork, by the operators whose tensors they make.
        """
        self.family, self.settings, self.candidates = family, settings, candidates
        self.given, self.decoders = given, decoders
        self.current: dict[Owner, Current] = {}
        self.initial: dict[Owner, Current] = {}
        self.fresh: dict[Owner, Current] = {}

    def of(self, owner: Owner) -> Current:
        """A device's last upload; before its first, what the run was given, and a random initialization of its own."""
        if owner in self.current:
            return self.current[owner]
        if owner not in self.initial:
            self.initial[owner] = self._initial(owner)
        return self.initial[owner]

    def _initial(self, owner: Owner) -> Current:
        device, architecture = owner
        seed = self.settings.rng(0, 7, device, self.candidates.index(architecture)).integers(2**63)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(seed))
            drawn = self.family.build(architecture).state_dict()
        placement = self.family.place(architecture)
        given = placement.of(name for name in placement.coordinates if name in self.given).gather(self.given)
        return self._read(architecture, drawn | given)

    def _read(self, architecture: Architecture, weights: Weights) -> Current:
        """What is kept of a model's weights."""
        kept = {name: weights[name].detach().clone() for name in self.never_generated(architecture)}
        return Current(digests(graph_of(self.family, architecture), weights), kept)

    def never_generated(self, architecture: Architecture) -> list[str]:
        """Tensors that travel and that no decoder makes, statistics apart: norms' biases, those that no node has."""
        nodes = graph_of(self.family, architecture).tensors
        made = {node.tensor for node in nodes if node.operator in self.decoders}
        return [name for name in parameters_of(self.family.tensors(architecture)) if name not in made]

    def add(self, owner: Owner, weights: Weights) -> None:
        """Note what a device has returned in this round."""
        self.fresh[owner] = self._read(owner[1], weights)

    def finish_round(self) -> None:
        """Let this round's uploads become the devices' last ones."""
        self.current |= self.fresh
        self.initial = {owner: current for owner, current in self.initial.items() if owner not in self.current}
        self.fresh = {}

    def drop(self, device: int) -> None:
        """Forget a device."""
        for known in (self.current, self.initial):
            for owner in [owner for owner in known if owner[0] == device]:
                del known[owner]

    def add_to(self, state: State) -> None:
        """Add what is kept of every device to a state."""
        for (device, architecture), current in self.current.items():
            place = f"current/{device}/{self.candidates.index(architecture)}"
            state.tensors[f"{place}/digests"] = current.digests
            state.tensors |= {f"{place}/kept/{name}": value for name, value in current.kept.items()}

    def load(self, state: State) -> None:
        """Restore what `add_to` added."""
        self.current = {}
        for name, value in state.tensors.items():
            kind, _, rest = name.partition("/")
            if kind == "current":
                device, candidate, what, *tensor = rest.split("/", 3)
                owner = (int(device), self.candidates[int(candidate)])
                current = self.current.setdefault(owner, Current(torch.empty(0), {}))
                if what == "digests":
                    current.digests = value
                else:
                    current.kept[tensor[0]] = value
