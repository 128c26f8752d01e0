"""FlexiFed (Wang et al., WWW 2023): models of different architectures share the layers with which they begin alike.

Which layers those are says `wildflower.strategies.common_layers`; the client step is in `own_layers`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field
from typing_extensions import override

from wildflower.messages.packing import Layout
from wildflower.messages.tensor_sets import TensorSets, Weights
from wildflower.models.architecture import Architecture
from wildflower.models.placement import Placement
from wildflower.strategies.common_layers import Signature, alike, common_length, signatures_of, types_of
from wildflower.strategies.method import (
    LEADING,
    ClientStep,
    Contribution,
    Group,
    Model,
    Order,
    Selection,
    Setup,
    State,
    Trained,
    Traits,
)
from wildflower.strategies.own_layers import TrainingWithOwnLayers
from wildflower.strategies.params import Params
from wildflower.strategies.submodel import CandidateMethod, first_weights


class FlexiFedParams(Params):
    """FlexiFed's settings."""

    sharing: Literal["basic", "clustered", "max"] = Field(
        "clustered",
        description="What is averaged: layers with which all types begin (basic), also the others within each type "
        "(clustered), or each layer over the types that begin alike up to it (max)",
    )


class FlexiFed(CandidateMethod[FlexiFedParams]):
    """Types of devices have different architectures; a layer is the mean over the devices that share it, unweighted.

    With common(j, l) the layers up to l of type j, and C the layers with which all types begin:

        basic:      l in C: mean over all devices; else l stays on the device
        clustered:  l in C: mean over all devices; else over the devices of type j
        max:        mean over the devices of all types i with common(i, l) = common(j, l)

    Whatever is averaged over the same devices is held once.

    Attributes:
        keys: type -> its tensors' names -> where they are held, "largest type that shares it/name".
        weights: what is held, by these keys.
        begun: device -> places of the types of which it keeps layers, the newest last.
    """

    def __init__(self, setup: Setup, params: FlexiFedParams) -> None:
        family = setup.family
        super().__init__(setup, params, types_of(family, setup.widths))
        self.sharing = params.sharing
        signatures = [list(signatures_of(family, a).values()) for a in self.candidates]
        self.common = common_length(signatures)
        if not self.common and self.sharing != "max":
            raise ValueError(
                f"flexifed.sharing = {self.sharing!r}: there is no layer with which all types of "
                f"{family.name} begin: take flexifed.sharing = 'max', or other members"
            )
        owners = alike(signatures) if self.sharing == "max" else self._common_to_all(signatures)
        first = first_weights(setup)
        self.frozen = {name: tensor for name, tensor in first.items() if family.is_frozen(name)}
        self.keys: dict[Architecture, dict[str, str]] = {}
        self.places: dict[Architecture, Placement] = {}
        self.weights: Weights = {}
        for number, architecture in enumerate(self.candidates):
            tensors, names = family.tensors(architecture), signatures_of(family, architecture)
            # What is frozen is what it is in each type, and nobody returns it.
            keys = {
                name: f"{number if tensors[name].frozen else owner}/{common}"
                for (name, (common, _)), owner in zip(names.items(), owners[number], strict=True)
            }
            self.keys[architecture] = keys
            self.places[architecture] = Placement(
                {keys[name]: tuple(slice(0, size) for size in spec.shape) for name, spec in tensors.items()},
                {keys[name]: spec.axes for name, spec in tensors.items()},
            )
            for name, value in family.place(architecture).gather(first).items():
                self.weights.setdefault(keys[name], value)
        self.mean = self.running_mean(self.weights)
        self.begun: dict[int, list[int]] = {}

    def _common_to_all(self, signatures: Sequence[Sequence[Signature]]) -> list[list[int]]:
        """Of every type's tensors, who holds them: the largest type what is common to all, each type all others."""
        return [[0] * self.common + [number] * (len(found) - self.common) for number, found in enumerate(signatures)]

    @override
    @classmethod
    def traits(cls, params: FlexiFedParams) -> Traits:
        return Traits(averages=True, personal=params.sharing == "basic", takes_initial_weights=True)

    # What devices get

    def client_step(self, order: Order) -> ClientStep:
        """Plain training, every device counting alike; with "basic" what is not common to all is the device's own."""
        place = self.candidates.index(order.architecture)
        return self._half(order.architecture, begins=place not in self.begun.get(order.device, []))

    def _half(self, architecture: Architecture, *, begins: bool) -> TrainingWithOwnLayers:
        if self.sharing != "basic":
            return TrainingWithOwnLayers(weighting="uniform")
        own = tuple(self.family.tensors(architecture))[self.common :]
        return TrainingWithOwnLayers(weighting="uniform", own=own, begins=begins)

    @override
    def priced_step(self, architecture: Architecture) -> ClientStep:
        return self._half(architecture, begins=True)  # as in a device's first round, when its own layers travel to it

    def payload(self, group: Group) -> TensorSets:
        """The common tensors, or all, of the devices' type, and what a device begins with."""
        weights = self._weights_of(group.architecture)
        return {
            name: {entry.name: weights[entry.name] for entry in tensor_set.layout.entries}
            for name, tensor_set in group.sent.items()
        }

    def _weights_of(self, architecture: Architecture) -> Weights:
        return {name: self.weights[key] for name, key in self.keys[architecture].items()}

    def frozen_weights(self) -> Weights:
        """Return what the run freezes of all types."""
        return self.frozen

    # What comes back

    def absorb(self, contribution: Contribution) -> None:
        """Add the devices' tensors to those that they share."""
        group = contribution.group
        keys = self.keys[group.architecture]
        layout = Layout(tuple(replace(e, name=keys[e.name]) for e in group.returned["weights"].layout.entries))
        self.mean.add(self.places[group.architecture], layout, contribution.sum_of("weights"))

    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        """Every tensor becomes the mean over the devices that share it; what nobody trained keeps its value."""
        self.weights = self.mean.mean(self.weights)
        for done in reversed(trained) if self.sharing == "basic" else ():  # so that the first order of a device is last
            place = self.candidates.index(done.order.architecture)
            kept = [other for other in self.begun.get(done.device, []) if other != place]
            self.begun[done.device] = [*kept, place]
        return {}

    # What is scored and kept

    def models(self, architectures: Collection[Architecture]) -> dict[Architecture, Model]:
        """The types' models; with "basic" they are on the devices only."""
        if self.sharing == "basic":
            return {}
        return {a: Model(self.family, a, self._weights_of(a)) for a in architectures}

    def scored_on_devices(self) -> list[tuple[int, Architecture, Selection]] | None:
        """With "basic" all devices that have trained score their own models."""
        if self.sharing != "basic":
            return None
        return [(device, self.candidates[places[-1]], LEADING) for device, places in sorted(self.begun.items())]

    def left(self, device: int) -> None:
        """Its layers are gone with the device."""
        self.begun.pop(device, None)

    def has_model(self, device: int) -> bool:
        """Return whether the device has trained, with "basic": the layers behind the shared ones stay on the
        devices."""
        return self.sharing != "basic" or device in self.begun

    def state(self) -> State:
        """Return what is held, and who keeps layers of which types."""
        tensors = {f"weights/{key}": value for key, value in self.weights.items()}
        return State(tensors, {"begun": [[device, places] for device, places in sorted(self.begun.items())]})

    def load(self, state: State) -> None:
        """Restore `state`; ValueError where it is of other types, or of another sharing."""
        found = {key.removeprefix("weights/"): value for key, value in state.tensors.items()}
        if {k: v.shape for k, v in found.items()} != {k: v.shape for k, v in self.weights.items()}:
            raise ValueError("the checkpoint is of other types or another flexifed.sharing than the configuration")
        begun = {int(device): [int(place) for place in places] for device, places in state.values["begun"]}
        wrong = [place for places in begun.values() for place in places if not 0 <= place < len(self.candidates)]
        if wrong or any(not places for places in begun.values()):
            raise ValueError(f"the checkpoint names types {wrong}, and there are {len(self.candidates)}")
        self.weights = {key: found[key] for key in self.weights}
        self.begun = begun
