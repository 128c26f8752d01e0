"""RecipFL (Zhang et al., WWW 2024): a hypernetwork on the server writes the weights of every device's own model.

The hypernetwork reads a model's graph, the device's current parameters and how its labels are distributed. What devices
learn goes back into it, so that strong and weak devices teach each other although their models share no tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field

from wildflower.devices.budget import Budget
from wildflower.messages.tensor_sets import STATISTICS, TensorSets, Weights
from wildflower.models.architecture import Architecture
from wildflower.plugins.extras import check_installed
from wildflower.plugins.flower_log import log
from wildflower.strategies.method import (
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
    of_one_device,
)
from wildflower.strategies.params import PositiveRate
from wildflower.strategies.recipfl.device import TaughtTraining
from wildflower.strategies.recipfl.graph_hypernetwork import Hypernetwork, Request, ShapeParams
from wildflower.strategies.recipfl.hypernetwork_step import HypernetworkStep, check_memory
from wildflower.strategies.recipfl.network_graph import graph_of
from wildflower.strategies.recipfl.uploads import Owner, Uploads
from wildflower.strategies.submodel import CandidateMethod, first_weights
from wildflower.strategies.training_steps import ClassCounts

CLIENTS_PER_PASS = 16


class RecipFLParams(ShapeParams):
    """RecipFL's settings; those of the hypernetwork are in `hypernetwork.ShapeParams`."""

    eta: PositiveRate = Field(1e-3, description="Learning rate of Adam on the hypernetwork (eta_s)")
    transfer: Literal["teacher", "both"] = Field(
        "teacher",
        description="How strong devices train the smallest model too: from their larger one (teacher), or from labels "
        "alone (both)",
    )


class RecipFL(CandidateMethod[RecipFLParams]):
    """phi <- Adam(phi, sum over devices k of (d theta_k / d phi)^T (theta_k sent - theta_k returned)).

    That is Eq. 4 with the sign mended: as printed the step leads away from what devices returned.

    Every device is a group of its own, because no two are sent the same. What was sent is generated once more when a
    reply is absorbed: between the two the server holds nothing of a device but what it keeps of every device's last
    upload.

    What the run freezes is neither generated nor sent with the weights: it is as the run was given it, or drawn, and a
    device is sent it once.

    The client step is `wildflower.strategies.recipfl.device.TaughtTraining`.
    """

    fit_for: ClassVar[Traits] = Traits(
        personal=True,
        takes_initial_weights=True,
        takes_tokens=True,
        one_model="recipfl says itself what strong devices train: leave it false, and see recipfl.transfer",
    )

    def __init__(self, setup: Setup, params: RecipFLParams) -> None:
        check_installed("torch_geometric", "the hypernetwork of strategy = 'recipfl'")
        super().__init__(setup, params)
        self.first_question = ClassCounts()
        self.both_models = True
        self.graphs = {a: graph_of(setup.family, a) for a in self.candidates}
        if setup.initial and not setup.family.freeze:
            raise ValueError(
                "initial.weights: recipfl writes all weights itself, and takes of given ones only what `freeze` names: "
                "freeze the parts that must stay as they are, or leave initial.weights out"
            )
        kinds = {n: t.dtype for n, t in setup.family.tensors(setup.family.full()).items() if t.dtype.is_floating_point}
        if other := next((f"{n} is {str(kind)[6:]}" for n, kind in kinds.items() if kind != torch.float32), ""):
            raise ValueError(f"recipfl: its hypernetwork writes float32, and {other}: make the model by .float()")
        self.frozen = _frozen(setup)
        with torch.device("meta"):
            check_memory(self.made_hypernetwork(), params.tile)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(setup.settings.seed)
            self.hypernetwork = self.made_hypernetwork()
        self.step = HypernetworkStep(self.hypernetwork, params.eta)
        self.uploads = Uploads(self.family, self.settings, self.candidates, setup.initial, self.hypernetwork.decoders)
        self.class_counts: dict[int, list[int]] = {}
        self.awaited: list[Owner] = []  # of the round that runs, who is asked
        self.generated: dict[Owner, Weights] = {}  # for some of them
        self.scorers: list[tuple[int, Architecture, Selection]] = []  # the devices of the newest round

    def made_hypernetwork(self) -> Hypernetwork:
        """Return a new hypernetwork for the candidates' graphs."""
        return Hypernetwork(self.graphs.values(), self.params, classes=self.family.classes)

    def start(self) -> None:
        """Log how large the hypernetwork is, and what it does not generate."""
        super().start()
        kept = dict.fromkeys(
            name for architecture in self.candidates for name in self.uploads.never_generated(architecture)
        )
        log.info("%s parameters in the hypernetwork", sum(p.numel() for p in self.hypernetwork.parameters()))
        log.info("Not generated, but kept from each device's last upload: %s", ", ".join(kept) or "nothing")

    # What devices get ------------------------------------------------------------------------------------------------

    def after(self, device: int, place: int) -> int | None:
        """The larger model teaches the smaller."""
        return 0 if place and self.params.transfer == "teacher" else None

    def selection(self, device: int, architecture: Architecture) -> Selection:
        """The whole model, and a group of its own."""
        return Selection(of_one_device, device)

    def client_step(self, order: Order) -> ClientStep:
        """Plain training; of an order that reads a trained larger model, Eq. 9."""
        return TaughtTraining(taught=order.after is not None)

    def introduce(self, device: int, facts: Mapping[str, Sequence[float]]) -> None:
        """The device's class counts."""
        self.class_counts[device] = counts_of(facts)

    def left(self, device: int) -> None:
        """Drop the device's class counts and what its last upload says of it."""
        self.class_counts.pop(device, None)
        self.uploads.drop(device)

    def begin_round(self, orders: Sequence[Order]) -> None:
        """Devices of a round are generated many at a time; those of evaluations, which may be all, one by one."""
        self.awaited = [(order.device, order.architecture) for order in orders]
        self.generated = {}

    def payload(self, group: Group) -> TensorSets:
        """Return what the hypernetwork writes for a device."""
        owner = (group.selection.number, group.architecture)
        if owner not in self.generated:
            together = [owner]
            if owner in self.awaited:
                place = self.awaited.index(owner) // CLIENTS_PER_PASS * CLIENTS_PER_PASS
                together = self.awaited[place : place + CLIENTS_PER_PASS]
            self.generated |= self.generate(together)
        return {"weights": self.generated.pop(owner)}

    def generate(self, owners: Sequence[Owner]) -> dict[Owner, Weights]:
        """The weights that these devices are sent now, in one pass: all tensors of each model but the frozen ones."""
        with torch.no_grad():
            made = self.hypernetwork([self._request(owner) for owner in owners])
        return {owner: self._whole(owner, weights) for owner, weights in zip(owners, made, strict=True)}

    def _whole(self, owner: Owner, made: Weights) -> Weights:
        """All that travels: generated, kept, and statistics as they are at first (the device has its own)."""
        weights = made | self.uploads.of(owner).kept
        travelling = {name: spec for name, spec in self.family.tensors(owner[1]).items() if not spec.frozen}
        for name, spec in travelling.items():
            if name.endswith(STATISTICS):
                weights[name] = (torch.ones if name.endswith("var") else torch.zeros)(spec.shape)
        return {name: weights[name] for name in travelling}

    def _request(self, owner: Owner) -> Request:
        device, architecture = owner
        counts = torch.tensor(self.class_counts.get(device, [1] * self.family.classes), dtype=torch.float32)
        return Request(self.graphs[architecture], self.uploads.of(owner).digests, device, counts / counts.sum())

    def frozen_weights(self) -> Weights:
        """Return what the run freezes of all candidates."""
        return self.frozen

    # What comes back -------------------------------------------------------------------------------------------------

    def absorb(self, contribution: Contribution) -> None:
        """Add the device's share to the gradient: J^T (sent - returned), with J of what it was sent."""
        weights = contribution.own("weights")
        owner = (contribution.devices[0], contribution.group.architecture)
        [sent] = self.hypernetwork([self._request(owner)])
        self.step.add(owner[0], sent, weights, self.weight_of(contribution.examples))
        self.uploads.add(owner, weights)

    def weight_of(self, examples: int) -> float:
        """Return how often a device counts in the gradient, which is the sum over devices."""
        return 1.0

    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        """One step of Adam on the hypernetwork; the uploads become the devices' current parameters."""
        self.step.take(self.round)
        self.uploads.finish_round()
        first = {done.device: done.order for done in reversed(trained)}
        self.scorers = [(d, o.architecture, self.selection(d, o.architecture)) for d, o in sorted(first.items())]
        self.awaited, self.generated = [], {}
        return {}

    # Scores ----------------------------------------------------------------------------------------------------------

    def models(self, architectures: Collection[Architecture]) -> dict[Architecture, Model]:
        """None on the server: every device's model is its own, and its statistics stay with it."""
        return {}

    def scored_on_devices(self) -> list[tuple[int, Architecture, Selection]]:
        """The round's devices score what they would be sent now."""
        return self.scorers

    def personal(self, device: int, budget: Budget) -> tuple[Architecture, Selection] | None:
        """Return what the device would be given now, written for it."""
        architecture = self.assign(device, budget)
        return None if architecture is None else (architecture, self.selection(device, architecture))

    # State -----------------------------------------------------------------------------------------------------------

    def state(self) -> State:
        """The hypernetwork, Adam's moments, and what is kept of every device's uploads."""
        state = State(self.step.state(), {"clipped_rounds": self.step.clipped_rounds})
        self.uploads.add_to(state)
        state.values["class_counts"] = [[device, counts] for device, counts in sorted(self.class_counts.items())]
        return state

    def load(self, state: State) -> None:
        """Restore it all; ValueError where the hypernetwork is another."""
        self.step.load(state.tensors)
        self.step.clipped_rounds = state.values["clipped_rounds"]
        self.uploads.load(state)
        self.class_counts = {device: counts for device, counts in state.values["class_counts"]}


def _frozen(setup: Setup) -> Weights:
    """The first weights that the run freezes; nothing is drawn where there are none."""
    if not setup.family.freeze:
        return {}
    return {name: tensor for name, tensor in first_weights(setup).items() if setup.family.is_frozen(name)}


def counts_of(facts: Mapping[str, Sequence[float]]) -> list[int]:
    """Return a device's class counts, which its client step has checked."""
    return [int(count) for count in facts["class_counts"]]
