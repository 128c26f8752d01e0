"""RecipFL (Zhang et al., WWW 2024): a hypernetwork on the server writes the weights of every device's own model.

The hypernetwork reads a model's graph, the device's current parameters and how its labels are distributed. What devices
learn goes back into it, so that strong and weak devices teach each other although their models share no tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import psutil
import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from wildflower.devices.budget import Budget
from wildflower.messages.packing import MessageError
from wildflower.messages.tensor_sets import STATISTICS, TensorSets, Weights, parameters_of
from wildflower.models.architecture import Architecture
from wildflower.plugins.extras import check_installed
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
from wildflower.strategies.params import Params, PositiveRate, Rate
from wildflower.strategies.recipfl.device import TaughtTraining
from wildflower.strategies.recipfl.graph import graph_of
from wildflower.strategies.recipfl.graph_hypernetwork import Hypernetwork, Request, ShapeParams, digests
from wildflower.strategies.submodel import CandidateMethod, first_weights
from wildflower.strategies.training_steps import ClassCounts

log = logging.getLogger("flwr")  # what Flower's own log is called

CLIENTS_PER_PASS = 16
# Gradients are added up in whole multiples of 2^-30, so that the order of replies does not matter: sums of whole
# numbers below 2^53 are exact in float64, and what is lost below 1e-9 means nothing to Adam. Float32, exact below 2^24
# only, would not do. A round holds 8 bytes per parameter of the hypernetwork for the sum, beside 4 each for weights,
# one device's gradient and Adam's two moments.
STEPS_PER_UNIT = 2**30
BYTES_PER_PARAMETER = 24
MAX_GRADIENT = 2**10  # of one device in one coordinate: 2^13 such devices are still exact
EXAMPLES = 256  # in whose multiples devices are weighed, so that those weights are of the order of 1

Owner = tuple[int, Architecture]  # a device, and which of its models


class RecipFLParams(ShapeParams):
    """RecipFL's settings; those of the hypernetwork are in `hypernetwork.ShapeParams`."""

    eta: PositiveRate = Field(1e-3, description="Learning rate of Adam on the hypernetwork (eta_s)")
    clip_norm: PositiveRate = Field(50.0, description="Largest norm of the hypernetwork's gradient")
    transfer: Literal["teacher", "both", "none"] = Field(
        "teacher",
        description="Whether strong devices train the smallest model too: from their larger one (teacher), from "
        "labels (both), or not (none)",
    )
    divergence: Literal["student || teacher", "teacher || student"] = Field(
        "student || teacher",
        description="Divergence of what both classifiers read, as printed; or as published code: teacher || student",
    )
    feature_weight: Rate = Field(
        1.0, description="Weight of the divergence of what both classifiers read, the last term of Eq. 9"
    )
    weighting: Literal["sum", "examples"] = Field(
        "sum", description="How devices' gradients are put together: their sum, or their mean by examples"
    )
    class_counts: Literal["registration", "first-upload"] = Field(
        "registration",
        description="When the server learns how a device's labels are distributed: before its first training "
        "(registration), or with its first upload",
    )


@dataclass
class Current:
    """What is kept of a device's last upload: what the hypernetwork reads of it, and what it does not generate."""

    digests: Tensor
    kept: Weights


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

    params_type: ClassVar[type[Params]] = RecipFLParams

    def __init__(self, setup: Setup, params: RecipFLParams) -> None:
        check_installed("torch_geometric", "the hypernetwork of strategy = 'recipfl'")
        super().__init__(setup, params)
        self.first_question = ClassCounts() if params.class_counts == "registration" else None
        self.both_models = params.transfer != "none"
        self.graphs = {a: graph_of(setup.family, a) for a in self.candidates}
        if params.descriptor == "client" and setup.settings.replaced_devices:
            raise ValueError(
                "recipfl.descriptor = 'client' learns a vector for each device, and the fleet replaces devices: take "
                "'classes'"
            )
        if setup.initial and not setup.family.freeze:
            raise ValueError(
                "initial.weights: recipfl writes all weights itself, and takes of given ones only what `freeze` names: "
                "freeze the parts that must stay as they are, or leave initial.weights out"
            )
        self.given = setup.initial
        self.frozen = _frozen(setup)
        with torch.device("meta"):
            _check_memory(self._hypernetwork(), params.tile)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(setup.settings.seed)
            self.hypernetwork = self._hypernetwork()
        self.parameters = dict(self.hypernetwork.named_parameters())
        self.adam = torch.optim.Adam(self.parameters.values(), lr=params.eta)
        self.current: dict[Owner, Current] = {}
        self.initial: dict[Owner, Current] = {}  # of devices that were written for before their first upload
        self.class_counts: dict[int, list[int]] = {}
        self.clipped_rounds = 0
        self.awaited: list[Owner] = []  # of the round that runs, who is asked
        self.generated: dict[Owner, Weights] = {}  # for some of them
        # Of the round that runs: the gradient so far, the devices' weight in it, and what they uploaded.
        self.gradient: dict[str, Tensor] = {}
        self.weight = 0.0
        self.uploaded: dict[Owner, Current] = {}
        self.scorers: list[tuple[int, Architecture, Selection]] = []  # the devices of the newest round

    def _hypernetwork(self) -> Hypernetwork:
        return Hypernetwork(
            self.graphs.values(),
            self.params,
            classes=self.family.classes,
            clients=self.settings.devices if self.params.descriptor == "client" else 0,
        )

    @override
    @classmethod
    def traits(cls, params: RecipFLParams) -> Traits:
        return Traits(takes_initial_weights=True)

    @classmethod
    def check(cls, params: RecipFLParams, *, both_models: bool) -> None:
        """What strong devices train follows from `transfer`."""
        if both_models:
            raise ValueError(
                "both-models = True: recipfl says itself what strong devices train: leave it false, and see "
                "recipfl.transfer"
            )
        if params.hidden % 8:
            raise ValueError(
                f"recipfl.hidden = {params.hidden}: a multiple of 8: what a node is and its weight have a half each, "
                "and four heads of attention share that"
            )

    def start(self) -> None:
        """Log how large the hypernetwork is, and what it does not generate."""
        super().start()
        kept = dict.fromkeys(name for architecture in self.candidates for name in self._never_generated(architecture))
        log.info("%s parameters in the hypernetwork", sum(p.numel() for p in self.parameters.values()))
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
        p = self.params
        return TaughtTraining(taught=order.after is not None, divergence=p.divergence, feature_weight=p.feature_weight)

    def introduce(self, device: int, facts: Mapping[str, Sequence[float]]) -> None:
        """The device's class counts."""
        self.class_counts[device] = _counts(facts)

    def left(self, device: int) -> None:
        """Drop the device's class counts and what its last upload says of it."""
        self.class_counts.pop(device, None)
        for known in (self.current, self.initial):
            for owner in [owner for owner in known if owner[0] == device]:
                del known[owner]

    def begin_round(self, orders: Sequence[Order]) -> None:
        """Devices of a round are generated many at a time; those of evaluations, which may be all, one by one."""
        self.awaited = [(order.device, order.architecture) for order in orders]
        self.generated = {}

    def payload(self, group: Group) -> TensorSets:
        """What the hypernetwork writes for a device."""
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
        weights = made | self._current(owner).kept
        travelling = {name: spec for name, spec in self.family.tensors(owner[1]).items() if not spec.frozen}
        for name, spec in travelling.items():
            if name.endswith(STATISTICS):
                weights[name] = (torch.ones if name.endswith("var") else torch.zeros)(spec.shape)
        return {name: weights[name] for name in travelling}

    def _request(self, owner: Owner) -> Request:
        device, architecture = owner
        counts = torch.tensor(self.class_counts.get(device, [1] * self.family.classes), dtype=torch.float32)
        return Request(self.graphs[architecture], self._current(owner).digests, device, counts / counts.sum())

    def _current(self, owner: Owner) -> Current:
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
        kept = {name: weights[name].detach().clone() for name in self._never_generated(architecture)}
        return Current(digests(self.graphs[architecture], weights), kept)

    def _never_generated(self, architecture: Architecture) -> list[str]:
        """Tensors that travel and that no decoder makes, statistics apart: norms' biases, those that no node has."""
        nodes = self.graphs[architecture].tensors
        made = {node.tensor for node in nodes if node.operator in self.hypernetwork.decoders}
        return [name for name in parameters_of(self.family.tensors(architecture)) if name not in made]

    def frozen_weights(self) -> Weights:
        """What the run freezes of all candidates."""
        return self.frozen

    # What comes back -------------------------------------------------------------------------------------------------

    def absorb(self, contribution: Contribution) -> None:
        """Add the device's share to the gradient: J^T (sent - returned), with J of what it was sent."""
        weights = contribution.own("weights")
        owner = (contribution.devices[0], contribution.group.architecture)
        [sent] = self.hypernetwork([self._request(owner)])
        product = torch.stack([((value.detach() - weights[name]) * value).sum() for name, value in sent.items()]).sum()
        found = torch.autograd.grad(product, list(self.parameters.values()), allow_unused=True)
        weight = contribution.examples / EXAMPLES if self.params.weighting == "examples" else 1.0
        gradients = {n: gradient for n, gradient in zip(self.parameters, found, strict=True) if gradient is not None}
        largest = torch.stack([gradient.abs().max() for gradient in gradients.values()])  # whose maximum keeps a NaN
        maximum = weight * float(largest.max())
        if not maximum <= MAX_GRADIENT:
            raise MessageError(
                f"device {owner[0]}: its weights went too far from what it was sent (gradient {maximum:g})"
            )
        for name, gradient in gradients.items():
            steps = (gradient * (weight * STEPS_PER_UNIT)).round_()
            if name in self.gradient:
                self.gradient[name] += steps
            else:
                self.gradient[name] = steps.double()
        self.weight += weight
        self.uploaded[owner] = self._read(owner[1], weights)

    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        """One step of Adam on the hypernetwork; the uploads become the devices' current parameters."""
        if self.gradient:
            self._step()
        self.current |= self.uploaded
        self.initial = {owner: current for owner, current in self.initial.items() if owner not in self.current}
        for done in trained:
            if self.params.class_counts == "first-upload":
                self.class_counts[done.device] = _counts(done.facts)
        first = {done.device: done.order for done in reversed(trained)}
        self.scorers = [(d, o.architecture, self.selection(d, o.architecture)) for d, o in sorted(first.items())]
        self.gradient, self.weight, self.uploaded = {}, 0.0, {}
        self.awaited, self.generated = [], {}
        return {}

    def _step(self) -> None:
        share = self.weight if self.params.weighting == "examples" else 1.0
        self.adam.zero_grad(set_to_none=True)
        for name, steps in self.gradient.items():
            self.parameters[name].grad = (steps / (STEPS_PER_UNIT * share)).float()
        norm = float(nn.utils.clip_grad_norm_(self.parameters.values(), self.params.clip_norm))
        if norm > self.params.clip_norm:
            self.clipped_rounds += 1
            text = "Round %s: the hypernetwork's gradient had norm %.1f and is clipped to %g (%s rounds so far)"
            log.warning(text, self.round, norm, self.params.clip_norm, self.clipped_rounds)
        self.adam.step()

    # Scores ----------------------------------------------------------------------------------------------------------

    def models(self, architectures: Collection[Architecture]) -> dict[Architecture, Model]:
        """None on the server: every device's model is its own, and its statistics stay with it."""
        return {}

    def scored_on_devices(self) -> list[tuple[int, Architecture, Selection]]:
        """The round's devices score what they would be sent now."""
        return self.scorers

    def personal(self, device: int, budget: Budget) -> tuple[Architecture, Selection] | None:
        """What the device would be given now, written for it."""
        architecture = self.assign(device, budget)
        return None if architecture is None else (architecture, self.selection(device, architecture))

    # State -----------------------------------------------------------------------------------------------------------

    def state(self) -> State:
        """The hypernetwork, Adam's moments, and what is kept of every device's uploads."""
        state = State({}, {})
        state.tensors |= {f"hypernetwork/{name}": value.detach() for name, value in self.parameters.items()}
        for name, parameter in self.parameters.items():
            for moment, value in self.adam.state.get(parameter, {}).items():
                state.tensors[f"adam/{name}/{moment}"] = value
        for (device, architecture), current in self.current.items():
            place = f"current/{device}/{self.candidates.index(architecture)}"
            state.tensors[f"{place}/digests"] = current.digests
            state.tensors |= {f"{place}/kept/{name}": value for name, value in current.kept.items()}
        state.values["class_counts"] = [[device, counts] for device, counts in sorted(self.class_counts.items())]
        state.values["clipped_rounds"] = self.clipped_rounds
        return state

    def load(self, state: State) -> None:
        """Restore it all; ValueError where the hypernetwork is another."""
        found = {name.partition("/")[2]: v for name, v in state.tensors.items() if name.startswith("hypernetwork/")}
        if {n: v.shape for n, v in found.items()} != {n: p.shape for n, p in self.parameters.items()}:
            raise ValueError("the checkpoint's hypernetwork is another than the configuration's")
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(found[name])
        self.adam.state.clear()
        self.current = {}
        for name, value in state.tensors.items():
            kind, _, rest = name.partition("/")
            if kind == "adam":
                of, _, moment = rest.rpartition("/")
                self.adam.state[self.parameters[of]][moment] = value.clone()
            elif kind == "current":
                device, candidate, what, *tensor = rest.split("/", 3)
                owner = (int(device), self.candidates[int(candidate)])
                current = self.current.setdefault(owner, Current(torch.empty(0), {}))
                if what == "digests":
                    current.digests = value
                else:
                    current.kept[tensor[0]] = value
        self.class_counts = {device: counts for device, counts in state.values["class_counts"]}
        self.clipped_rounds = state.values["clipped_rounds"]


def _frozen(setup: Setup) -> Weights:
    """The first weights that the run freezes; nothing is drawn where there are none."""
    if not setup.family.freeze:
        return {}
    return {name: tensor for name, tensor in first_weights(setup).items() if setup.family.is_frozen(name)}


def _check_memory(hypernetwork: Hypernetwork, tile: int) -> None:
    """ValueError where this machine could never hold what a round takes of a hypernetwork; it is on the meta device."""
    parameters = sum(parameter.numel() for parameter in hypernetwork.parameters())
    needed_bytes, total_bytes = BYTES_PER_PARAMETER * parameters, psutil.virtual_memory().total
    if needed_bytes > total_bytes:
        sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in hypernetwork.decoders.items()}
        largest = max(sizes, key=lambda name: sizes[name])
        raise ValueError(
            f"recipfl.tile = {tile}: the hypernetwork would have {parameters:,} parameters, {sizes[largest]:,} of them "
            f"to make the tensor {largest!r}, and take {needed_bytes / 1e9:.0f} GB of this machine's "
            f"{total_bytes / 1e9:.0f}: freeze what need not be trained, or take smaller tiles, such as 64"
        )


def _counts(facts: Mapping[str, Sequence[float]]) -> list[int]:
    """A device's class counts, which its client step has checked."""
    return [int(count) for count in facts["class_counts"]]
