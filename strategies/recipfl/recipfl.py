"""RecipFL (Zhang et al., WWW 2024): a hypernetwork on the server writes the weights of every device's own model.

The hypernetwork reads a model's graph, the device's current parameters and how its labels are distributed. What devices
learn goes back into it, so that strong and weak devices teach each other although their models share no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Literal

import torch
from flwr.common import log
from flwr.serverapp import Grid
from torch import Tensor, nn

from devices.budget import Budget
from messages.layouts import STATISTICS
from messages.orders import Objective
from messages.packing import MessageError
from models.architecture import Architecture
from models.placement import Select, leading
from strategies.base import Model, Scorer, Setup, State
from strategies.recipfl.graph import graph_of
from strategies.recipfl.hypernetwork import Hypernetwork, Request, Shape, digests
from strategies.scores import Evaluation, mean_score
from strategies.submodel import CandidateStrategy
from strategies.work import Assignment, Contribution, Group, Selection, Weights, Work, by_device

CLIENTS_PER_PASS = 16
# Gradients are added up in whole multiples of 2^-30, so that the order of replies does not matter: sums of whole
# numbers below 2^53 are exact in float64, and what is lost below 1e-9 means nothing to Adam. Float32, exact below 2^24
# only, would not do. A round holds 8 bytes per parameter of the hypernetwork for the sum, beside 4 each for weights,
# one device's gradient and Adam's two moments.
STEPS_PER_UNIT = 2**30
MOST_GRADIENT = 2**10  # of one device in one coordinate: 2^13 such devices are still exact
EXAMPLES = 256  # in whose multiples devices are weighed, so that those weights are of the order of 1

Owner = tuple[int, Architecture]  # a device, and which of its models


@dataclass(frozen=True)
class RecipFLParams(Shape):
    """eta: learning rate of Adam on the hypernetwork (eta_s); clip_norm: the most that its gradient's norm may be.

    transfer: what a device trains that can afford more than the smallest model: "teacher", the smallest as well, which
        learns from its larger one (Eq. 9); "both", the smallest as well, from labels alone; "none", its largest only.
    divergence: of Eq. 9's last term, KL("student || teacher") as printed, or "teacher || student" as published code.
    weighting: devices' gradients are summed up ("sum"), or averaged by their "examples".
    The others are the hypernetwork's (`hypernetwork.Shape`).
    """

    eta: float = 1e-3
    clip_norm: float = 50.0
    transfer: Literal["teacher", "both", "none"] = "teacher"
    divergence: Literal["student || teacher", "teacher || student"] = "student || teacher"
    weighting: Literal["sum", "examples"] = "sum"


@dataclass
class Current:
    """What is kept of a device's last upload: what the hypernetwork reads of it, and what it does not generate."""

    digests: Tensor
    kept: Weights


class RecipFL(CandidateStrategy):
    """phi <- Adam(phi, sum over devices k of (d theta_k / d phi)^T (theta_k sent - theta_k returned)).

    That is Eq. 4 with the sign mended: as printed the step leads away from what devices returned.

    Every device is a group of its own, because no two are sent the same. What was sent is generated once more when a
    reply is absorbed: between the two the server holds nothing of a device but what it keeps of every device's last
    upload.

    Devices minimize L = CE(f(x), y) (`client_app.objectives.local_loss`, "cross entropy"). A small model S with a
    trained larger one T minimizes Eq. 9, all weights and temperatures 1, T being constant:
    L = CE(S(x), y) + CE(S(x), softmax T(x)) + KL(p_S || p_T), p being softmaxes of what the classifiers read, without
    the last term where that differs in size; `divergence` may turn it round (`client_app.objectives._taught`,
    "taught").
    """

    merge = None
    keeps_statistics = True
    asks_class_counts = True

    def __init__(self, setup: Setup, params: RecipFLParams) -> None:
        super().__init__(setup)
        self.params = params
        self.both_models = params.transfer != "none"
        self.graphs = {a: graph_of(setup.family, a) for a in self.candidates}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(setup.settings.seed)
            self.hypernetwork = Hypernetwork(
                self.graphs.values(),
                params,
                classes=setup.family.classes,
                clients=setup.settings.task["devices"] if params.descriptor == "client" else 0,
            )
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

    def summary(self) -> None:
        """Log what runs, how large the hypernetwork is, and what it does not generate."""
        super().summary()
        kept = dict.fromkeys(name for architecture in self.candidates for name in self._never_generated(architecture))
        log(INFO, "%s parameters in the hypernetwork", sum(p.numel() for p in self.parameters.values()))
        log(INFO, "Not generated, but kept from each device's last upload: %s", ", ".join(kept) or "nothing")

    # What devices get ------------------------------------------------------------------------------------------------

    def teacher(self, device: int, place: int) -> int | None:
        """The larger model teaches the smaller."""
        return 0 if place and self.params.transfer == "teacher" else None

    def selection(self, device: int, architecture: Architecture) -> Selection:
        """The whole model, and a group of its own."""
        return Selection(_of_one_device, device)

    def objective_of(self, a: Assignment) -> Objective:
        """Plain cross-entropy; of an order that has a teacher, Eq. 9."""
        return Objective() if a.teacher is None else Objective(kind="taught", divergence=self.params.divergence)

    def _plan(self, grid: Grid) -> Work:
        """Devices of a round are generated many at a time; those of evaluations, which may be all, one by one."""
        work = super()._plan(grid)
        self.awaited = [(a.device, a.task.architecture) for a in self.assignments if a.node is not None]
        self.generated = {}
        return work

    def payload(self, group: Group) -> Weights:
        """What the hypernetwork writes for a device."""
        owner = (group.selection.number, group.architecture)
        if owner not in self.generated:
            together = [owner]
            if owner in self.awaited:
                place = self.awaited.index(owner) // CLIENTS_PER_PASS * CLIENTS_PER_PASS
                together = self.awaited[place : place + CLIENTS_PER_PASS]
            self.generated |= self.generate(together)
        return self.generated.pop(owner)

    def generate(self, owners: Sequence[Owner]) -> dict[Owner, Weights]:
        """The weights that these devices are sent now, in one pass: all tensors of each model."""
        with torch.no_grad():
            made = self.hypernetwork([self._request(owner) for owner in owners])
        return {owner: self._whole(owner, weights) for owner, weights in zip(owners, made, strict=True)}

    def _whole(self, owner: Owner, made: Weights) -> Weights:
        """All tensors of a model: generated, kept, and statistics as they are at first (the device has its own)."""
        weights = made | self._current(owner).kept
        for name, spec in self.family.tensors(owner[1]).items():
            if name.endswith(STATISTICS):
                weights[name] = (torch.ones if name.endswith("var") else torch.zeros)(spec.shape)
        return {name: weights[name] for name in self.family.tensors(owner[1])}

    def _request(self, owner: Owner) -> Request:
        device, architecture = owner
        counts = torch.tensor(self.class_counts.get(device, [1] * self.family.classes), dtype=torch.float32)
        return Request(self.graphs[architecture], self._current(owner).digests, device, counts / counts.sum())

    def _current(self, owner: Owner) -> Current:
        """A device's last upload; before its first, a random initialization of its own."""
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
            return self._read(architecture, self.family.build(architecture).state_dict())

    def _read(self, architecture: Architecture, weights: Weights) -> Current:
        """What is kept of a model's weights."""
        kept = {name: weights[name].detach().clone() for name in self._never_generated(architecture)}
        return Current(digests(self.graphs[architecture], weights), kept)

    def _never_generated(self, architecture: Architecture) -> list[str]:
        """Tensors that no decoder makes, statistics apart: norms' biases, and those of operators never seen."""
        nodes = self.graphs[architecture].tensors
        made = {node.tensor for node in nodes if node.operator in self.hypernetwork.decoders}
        return [n for n in self.family.tensors(architecture) if n not in made and not n.endswith(STATISTICS)]

    # What comes back -------------------------------------------------------------------------------------------------

    def absorb(self, contribution: Contribution) -> None:
        """Add the device's share to the gradient: J^T (sent - returned), with J of what it was sent."""
        if contribution.weights is None:
            raise MessageError("the update holds a sum, and not one device's weights")
        owner = (contribution.devices[0], contribution.group.architecture)
        [sent] = self.hypernetwork([self._request(owner)])
        product = torch.stack(
            [((value.detach() - contribution.weights[name]) * value).sum() for name, value in sent.items()]
        ).sum()
        found = torch.autograd.grad(product, list(self.parameters.values()), allow_unused=True)
        weight = contribution.examples / EXAMPLES if self.params.weighting == "examples" else 1.0
        gradients = {n: gradient for n, gradient in zip(self.parameters, found, strict=True) if gradient is not None}
        most = weight * max(float(gradient.abs().max()) for gradient in gradients.values())
        if not most <= MOST_GRADIENT:
            raise MessageError(f"device {owner[0]}: its weights went too far from what it was sent (gradient {most:g})")
        for name, gradient in gradients.items():
            steps = (gradient * (weight * STEPS_PER_UNIT)).round_()
            if name in self.gradient:
                self.gradient[name] += steps
            else:
                self.gradient[name] = steps.double()
        self.weight += weight
        self.uploaded[owner] = self._read(owner[1], contribution.weights)

    def finish_round(self) -> None:
        """One step of Adam on the hypernetwork; the uploads become the devices' current parameters."""
        if self.gradient:
            self._step()
        self.current |= self.uploaded
        self.initial = {owner: current for owner, current in self.initial.items() if owner not in self.current}
        for a in self.assignments:
            if a.outcome == "trained" and a.update is not None and a.update.class_counts is not None:
                self.class_counts[a.device] = a.update.class_counts
        self.gradient, self.weight, self.uploaded = {}, 0.0, {}
        self.awaited, self.generated = [], {}

    def _step(self) -> None:
        share = self.weight if self.params.weighting == "examples" else 1.0
        self.adam.zero_grad(set_to_none=True)
        for name, steps in self.gradient.items():
            self.parameters[name].grad = (steps / (STEPS_PER_UNIT * share)).float()
        norm = float(nn.utils.clip_grad_norm_(self.parameters.values(), self.params.clip_norm))
        if norm > self.params.clip_norm:
            self.clipped_rounds += 1
            text = "Round %s: the hypernetwork's gradient had norm %.1f and is clipped to %g (%s rounds so far)"
            log(WARNING, text, self.round, norm, self.params.clip_norm, self.clipped_rounds)
        self.adam.step()

    # Scores ----------------------------------------------------------------------------------------------------------

    def models(self, grid: Grid) -> dict[Architecture, Model]:
        """None on the server: every device's model is its own, and its statistics stay with it."""
        return {}

    def evaluate(self, grid: Grid, scorer: Scorer) -> Evaluation | None:
        """Ask the round's devices to score what they would be sent now on the task's test set; means over devices."""
        assignments = [
            self.ask(device, orders[0].task.architecture, orders[0].task.selection, orders[0].budget)
            for device, orders in by_device(a for a in self.assignments if a.outcome == "trained").items()
        ]
        return mean_score(self.scores(grid, assignments, "test set"), self.population)

    def personal(self, device: int, budget: Budget) -> tuple[Architecture, Selection] | None:
        """What the device would be given now, written for it."""
        architecture = self.assign(device, budget)
        return None if architecture is None else (architecture, self.selection(device, architecture))

    # State -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """The hypernetwork, Adam's moments, and what is kept of every device's uploads."""
        state = super().state_dict()
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

    def load_state_dict(self, state: State) -> None:
        """Restore it all; ValueError where the hypernetwork is another."""
        super().load_state_dict(state)
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


def _of_one_device(device: int) -> Select:
    """The rule of a selection that is one device's own: the whole model."""
    return leading
