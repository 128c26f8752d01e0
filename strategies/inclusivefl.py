"""InclusiveFL (Liu et al., "No One Left Behind", KDD 2022): models of different depth that share whole layers.

The types and their layers are in `wildflower.strategies.types_by_depth`, the client step in `own_layers`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import ClassVar, Literal

import torch
from pydantic import Field
from typing_extensions import override

from wildflower.messages.packing import MessageError
from wildflower.messages.tensor_sets import TensorSets, Weights
from wildflower.models.architecture import Architecture
from wildflower.plugins.flower_log import log
from wildflower.strategies.fedadam import FedAdamParams, ServerAdam
from wildflower.strategies.method import (
    ClientStep,
    Contribution,
    Group,
    Model,
    Order,
    Setup,
    State,
    Trained,
    Traits,
)
from wildflower.strategies.own_layers import TrainingWithOwnLayers
from wildflower.strategies.params import Fraction, Params
from wildflower.strategies.submodel import CandidateMethod, first_weights, learned
from wildflower.strategies.types_by_depth import alike_blocks, check_alike, deep_tensors, layers_of, types_of


class InclusiveFLParams(Params):
    """InclusiveFL's settings; those of the server's Adam are FedAdam's."""

    momentum: Fraction = Field(
        0.2, description="Share of the larger type's momentum in the update of a type's last layer (beta)"
    )
    server: Literal["adam", "mean"] = Field(
        "adam", description="What the server makes of a type's mean update: a step of Adam, or the update as it is"
    )
    share: Literal["layers", "none"] = Field(
        "layers", description="What types share: all layers but each type's last one, or nothing but momentum"
    )
    head: Literal["type", "own"] = Field(
        "type", description="Whose heads are: one per type, or one per device, which stays there"
    )


class InclusiveFL(CandidateMethod[InclusiveFLParams]):
    """Types of devices have models of different depth L_a < L_b < ... and share all layers but each type's last.

    In every round (Algorithm 1), with g^j the mean update of type j's devices, k the next larger type of j and L- the
    depth of its next smaller one:

        g^{j,L_j} = beta m^k + (1 - beta) g^{j,L_j}                      (line 17; not for the largest type)
        w^j = FedAdam(g^j, w^j), or w^j + g^j where `server` is "mean"   (line 19)
        m^j = 1 / (L_j - L- + 1) sum_{l = L-..L_j} g^{j,l}               (line 22; not for the smallest type)
        theta^l = sum_{i: L_i > l} n_i theta^{i,l} / sum_{i: L_i > l} n_i  (lines 26 and 27)

    where n_i devices of type i were in the round. Embeddings are shared by all types; the last layer and the head are
    each type's own.

    In a choice among networks a layer is a block. Types share those with which they begin as the largest does, batch
    norm's statistics too, which no Adam steps; m^j is the mean over tensors of one name and shape, if there are any.
    """

    shared_params: ClassVar[Mapping[str, type[Params]]] = {"fedadam": FedAdamParams}

    def __init__(self, setup: Setup, params: InclusiveFLParams) -> None:
        family = setup.family
        super().__init__(setup, params, types_of(family, setup.widths))
        self.layers = {a: layers_of(family, a) for a in self.candidates}
        check_alike(family, self.layers)
        whole = first_weights(setup)
        self.weights: dict[Architecture, Weights] = {a: family.place(a).gather(whole) for a in self.candidates}
        if params.head == "own":
            self._leave_out_heads()
        self.means = {a: self.running_mean(weights) for a, weights in self.weights.items()}
        adam = setup.shared["fedadam"]
        assert isinstance(adam, FedAdamParams)
        # The server's Adam steps nothing that is frozen, and no statistics.
        self.adams = {
            a: ServerAdam(adam, {n: v for n, v in learned(weights).items() if not family.is_frozen(n)})
            for a, weights in self.weights.items()
            if params.server == "adam"
        }
        # What a type hands down to the next smaller one, by the names behind a layer's own.
        self.spans = {one[0]: deep_tensors(family, one, other) for one, other in pairwise(self.layers.items())}
        if self.spans and not any(self.spans.values()):
            log.info("No larger type has layers like the last one of a smaller type: they hand down no momentum")
        self.momentum: dict[Architecture, Weights] = {
            a: {suffix: torch.zeros_like(self.weights[a][names[0]]) for suffix, names in span.items()}
            for a, span in self.spans.items()
        }
        largest = next(iter(self.layers.items()))
        self.alike = {one[0]: alike_blocks(family, largest, one) for one in self.layers.items()}

    def _leave_out_heads(self) -> None:
        """Leave heads to the devices; ValueError if there are none, or none that they may train."""
        heads = sorted({name for layers in self.layers.values() for name in layers.head})
        if not heads:
            raise ValueError(
                f"inclusivefl.head = 'own': {self.family.name} has no head, that is no tensors behind its last layer"
            )
        if frozen := list(filter(self.family.is_frozen, heads)):
            raise ValueError(
                f"inclusivefl.head = 'own': every device trains a head of its own, and freeze names {frozen[0]}: "
                "leave the head out of it"
            )
        for architecture, weights in self.weights.items():
            for name in self.layers[architecture].head:
                del weights[name]

    @override
    @classmethod
    def traits(cls, params: InclusiveFLParams) -> Traits:
        why = "with inclusivefl.head = 'own' a device has one head: leave it false" if params.head == "own" else ""
        # How many devices a type has weighs its layers.
        return Traits(averages=True, tells_more=True, takes_initial_weights=True, one_model=why)

    def client_step(self, order: Order) -> ClientStep:
        """Plain training; with heads of the devices' own their names."""
        own = tuple[str, ...]()
        if self.params.head == "own":
            # A fleet whose budgets are those of a width has that priced, and it is no type.
            own = (self.layers.get(order.architecture) or layers_of(self.family, order.architecture)).head
        return TrainingWithOwnLayers(weighting="uniform", own=own)

    def payload(self, group: Group) -> TensorSets:
        """The model of the devices' type."""
        return {"weights": self.weights[group.architecture]}

    def absorb(self, contribution: Contribution) -> None:
        """Add the devices' weights to the sum of their type."""
        group, added = contribution.group, contribution.sum_of("weights")
        if group.architecture not in self.means:
            raise MessageError("an update of an architecture that is no type's")
        self.means[group.architecture].add(group.placement, group.returned["weights"].layout, added)

    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        """Lines 9 to 29 of Algorithm 1; a type without devices in the round makes no step of its own."""
        users = dict.fromkeys(self.candidates, 0)
        for done in trained:
            users[done.order.architecture] += 1
        received = {a: self.means[a].mean(self.weights[a]) for a in self.candidates}
        handed_down = dict(self.momentum)  # of the round before
        for place, architecture in enumerate(self.candidates):
            if users[architecture]:
                larger = self.candidates[place - 1] if place else None
                self._step(architecture, received[architecture], handed_down.get(larger) if larger else None)
        if self.params.share != "none":
            self.share(users)
        return {}

    def _step(self, architecture: Architecture, received: Weights, momentum: Weights | None) -> None:
        """Lines 14 to 23 for one type: its update, what is injected into it, the server's Adam, its momentum."""
        weights, beta = self.weights[architecture], self.params.momentum
        update = {name: received[name] - weights[name] for name in weights}
        if momentum is not None and beta:
            last = self.layers[architecture].blocks[-1]
            for suffix, handed_down in momentum.items():
                update[last[suffix]] = beta * handed_down + (1 - beta) * update[last[suffix]]
        # What is frozen is alike in all types, and momentum of a larger type must not move it.
        moved = {name: weights[name] + update[name] for name in weights if not self.family.is_frozen(name)}
        if adam := self.adams.get(architecture):
            moved |= {name: adam.step(name, weights[name], update[name]) for name in adam.m}
        self.weights[architecture] = weights | moved
        if span := self.spans.get(architecture):
            self.momentum[architecture] = {
                suffix: torch.stack([update[name] for name in names]).mean(dim=0) for suffix, names in span.items()
            }

    def share(self, users: Mapping[Architecture, int]) -> None:
        """Lines 26 to 28: a layer is the mean over the types whose last layer lies behind it; embeddings alike."""
        deepest = self.layers[self.candidates[0]]
        for number, block in enumerate(deepest.blocks, start=1):
            owners = self.sharing(number)
            for suffix in block:
                self.to_mean({a: self.layers[a].blocks[number - 1][suffix] for a in owners}, users)
        for name in deepest.embeddings:
            self.to_mean(dict.fromkeys(self.candidates, name), users)

    def sharing(self, number: int) -> list[Architecture]:
        """Return the types that share a layer, the first being number 1.

        Those are the types that begin as the largest one does up to this layer, and have layers behind it.
        """
        return [a for a, layers in self.layers.items() if number < len(layers.blocks) and number <= self.alike[a]]

    def to_mean(self, names: Mapping[Architecture, str], users: Mapping[Architecture, int]) -> None:
        """Set a tensor of types, of these names, to its mean, weighted by devices in the round.

        Without such devices it is kept, and so is what is frozen: that is alike in all types, and rounding must not
        change it.
        """
        total = sum(users[a] for a in names)
        if not total or len(names) < 2 or any(map(self.family.is_frozen, names.values())):
            return
        mean = sum((self.weights[a][name] * (users[a] / total) for a, name in names.items()), torch.zeros(()))
        for architecture, name in names.items():
            self.weights[architecture][name] = mean.clone()

    def models(self, architectures: Collection[Architecture]) -> dict[Architecture, Model]:
        """The types' models; none where heads are the devices' own."""
        if self.params.head == "own":
            return {}
        return {a: Model(self.family, a, self.weights[a]) for a in architectures}

    def frozen_weights(self) -> Weights:
        """Return what the run freezes of all types."""
        return {n: v for weights in self.weights.values() for n, v in weights.items() if self.family.is_frozen(n)}

    def state(self) -> State:
        """Return, for every type, its weights, both moments of the server's Adam, and its momentum."""
        return State({key: value for _, _, key, value in self._tensors()}, {})

    def load(self, state: State) -> None:
        """Restore `state`; ValueError where it is of another model."""
        expected = {key: value.shape for _, _, key, value in self._tensors()}
        if {key: value.shape for key, value in state.tensors.items()} != expected:
            raise ValueError("the checkpoint is of other types of models than the configuration's")
        for tensors, name, key, _ in list(self._tensors()):
            tensors[name] = state.tensors[key]

    def _tensors(self) -> Iterator[tuple[Weights, str, str, torch.Tensor]]:
        """Where every tensor of the state lies, its name there, its name in the state, and the tensor."""
        parts = {
            "weights": self.weights,
            "m": {a: adam.m for a, adam in self.adams.items()},
            "v": {a: adam.v for a, adam in self.adams.items()},
            "momentum": self.momentum,
        }
        for part, by_type in parts.items():
            for place, architecture in enumerate(self.candidates):
                tensors = by_type.get(architecture, {})
                yield from ((tensors, name, f"{part}/{place}/{name}", value) for name, value in tensors.items())
