"""InclusiveFL (Liu et al., "No One Left Behind", KDD 2022): models of different depth that share whole layers.

The types and their layers are in `wildflower.strategies.types_by_depth`, the client step in `own_layers`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from typing_extensions import override

from wildflower.messages.packing import MessageError
from wildflower.messages.tensor_sets import TensorSets, Weights
from wildflower.models.architecture import Architecture
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
from wildflower.strategies.submodel import CandidateMethod, first_weights
from wildflower.strategies.types_by_depth import check_alike, layers_of, types_of


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
    """

    params_type: ClassVar[type[Params]] = InclusiveFLParams
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
        # The server's Adam steps nothing that is frozen.
        self.adams = {
            a: ServerAdam(adam, {n: v for n, v in weights.items() if not family.is_frozen(n)})
            for a, weights in self.weights.items()
            if params.server == "adam"
        }
        # What a type hands down to the next smaller one, by the names behind a layer's own.
        self.momentum: dict[Architecture, Weights] = {
            a: {suffix: torch.zeros_like(self.weights[a][name]) for suffix, name in self.layers[a].blocks[-1].items()}
            for a in self.candidates[:-1]
        }

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

    @classmethod
    def check(cls, params: InclusiveFLParams, *, both_models: bool) -> None:
        """A device that trains two models would have two heads."""
        if both_models and params.head == "own":
            raise ValueError("inclusivefl.head = 'own': a device has one head, set both-models = false")

    @override
    @classmethod
    def traits(cls, params: InclusiveFLParams) -> Traits:
        # How many devices a type has weighs its layers.
        return Traits(averages=True, tells_more=True, takes_initial_weights=True)

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
                smaller = self.candidates[place + 1] if place + 1 < len(self.candidates) else None
                self._step(architecture, received[architecture], handed_down.get(larger) if larger else None, smaller)
        if self.params.share != "none":
            self.share(users)
        return {}

    def _step(
        self, architecture: Architecture, received: Weights, momentum: Weights | None, smaller: Architecture | None
    ) -> None:
        """Lines 14 to 23 for one type: its update, what is injected into it, the server's Adam, its momentum."""
        weights, beta = self.weights[architecture], self.params.momentum
        update = {name: received[name] - weights[name] for name in weights}
        if momentum is not None and beta:
            for suffix, name in self.layers[architecture].blocks[-1].items():
                update[name] = beta * momentum[suffix] + (1 - beta) * update[name]
        if adam := self.adams.get(architecture):
            moved = {name: adam.step(name, weights[name], update[name]) for name in adam.m}
        else:
            # What is frozen is alike in all types, and momentum of a larger type must not move it.
            moved = {name: weights[name] + update[name] for name in weights if not self.family.is_frozen(name)}
        self.weights[architecture] = weights | moved
        if smaller is not None:
            first = len(self.layers[smaller].blocks) - 1  # the layer that is the smaller type's last
            span = self.layers[architecture].blocks[first:]
            self.momentum[architecture] = {
                suffix: torch.stack([update[block[suffix]] for block in span]).mean(dim=0) for suffix in span[0]
            }

    def share(self, users: Mapping[Architecture, int]) -> None:
        """Lines 26 to 28: a layer is the mean over the types whose last layer lies behind it; embeddings alike."""
        deepest = self.layers[self.candidates[0]]
        for number, block in enumerate(deepest.blocks, start=1):
            self.to_mean(self.sharing(number), block.values(), users)
        self.to_mean(self.candidates, deepest.embeddings, users)

    def sharing(self, number: int) -> list[Architecture]:
        """Return the types that share a layer, the first being number 1: those that have layers behind it."""
        return [a for a, layers in self.layers.items() if len(layers.blocks) > number]

    def to_mean(self, owners: Sequence[Architecture], names: Iterable[str], users: Mapping[Architecture, int]) -> None:
        """Set tensors of types to their mean, weighted by devices in the round; without such devices they are kept."""
        total = sum(users[a] for a in owners)
        if not total or len(owners) < 2:
            return
        for name in names:
            if self.family.is_frozen(name):
                continue  # it is alike in all types, and rounding must not change it
            mean = sum((self.weights[a][name] * (users[a] / total) for a in owners), torch.zeros(()))
            for architecture in owners:
                self.weights[architecture][name] = mean.clone()

    def models(self, architectures: Collection[Architecture]) -> dict[Architecture, Model]:
        """The types' models; none where heads are the devices' own."""
        if self.params.head == "own":
            return {}
        return {a: Model(self.family, a, self.weights[a]) for a in architectures}

    def frozen_weights(self) -> Weights:
        """Return what the run freezes of the largest type's model, of which the others' are part."""
        return {n: v for n, v in self.weights[self.candidates[0]].items() if self.family.is_frozen(n)}

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

    def _tensors(self) -> list[tuple[Weights, str, str, torch.Tensor]]:
        """Where every tensor of the state lies, its name there, its name in the state, and the tensor."""
        parts = {
            "weights": self.weights,
            "m": {a: adam.m for a, adam in self.adams.items()},
            "v": {a: adam.v for a, adam in self.adams.items()},
            "momentum": self.momentum,
        }
        found = []
        for part, by_type in parts.items():
            for place, architecture in enumerate(self.candidates):
                tensors = by_type.get(architecture, {})
                found += [(tensors, name, f"{part}/{place}/{name}", value) for name, value in tensors.items()]
        return found
