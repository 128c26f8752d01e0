"""DepthFL (Kim et al., ICLR 2023): devices of different depths, whose exits learn from each other.

A device gets the network up to the deepest exit that it can afford and trains all exits on the way. Each of them also
learns what the others say, with a weight w that grows over the rounds: w = exp(-5 (1 - t / T)^2) in round t, and 1 from
round T on. With alpha, devices and server correct for the devices' different data as FedDyn does (Acar et al., ICLR
2021), layer by layer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from wildflower.messages.sums import UNIT
from wildflower.messages.tensor_sets import Weights
from wildflower.models.architecture import Architecture
from wildflower.models.cost import Cost
from wildflower.models.network import MeanOfExits, Network
from wildflower.models.weights import trained_parameters
from wildflower.strategies.exits import ExitsMethod
from wildflower.strategies.method import (
    Answer,
    ClientContext,
    ClientStep,
    Model,
    Order,
    Setup,
    Trained,
    Training,
    Traits,
)
from wildflower.strategies.params import CountOrZero, Params, Rate
from wildflower.strategies.pricing import with_parameter_copies
from wildflower.strategies.shared_losses import Loss, PureLoss, Regularizer, divergence, tags_of
from wildflower.strategies.submodel import learned, zeros
from wildflower.tasks.task import Task

COPIES = 3  # of all parameters: what was received, the correction, and a gradient before there is one

# The client step ------------------------------------------------------------------------------------------------------


class MutualLearningOfExits(Training):
    """L = sum_i (CE(f_i(x), y) + w / (K - 1) sum_{j != i} KL(p_j || p_i)) over the device's K exits.

    p_i is the softmax of exit i, constant where it is p_j; with one exit L is its CE. With alpha devices minimize
    L - <c, w> + alpha / 2 ||w - w_received||^2 in place of L, and then c <- c - alpha (w - w_received). c is the
    device's correction, 0 at first: FedDyn's gradient of L at the end of its last training. It has parameters only,
    each under its name, so that a device keeps those of layers that it did not get this time.
    """

    needs_classes: ClassVar[bool] = True  # exits learn distributions over them
    weight: Rate
    alpha: Rate
    ensemble: bool

    def loss(self, context: ClientContext, model: Network) -> Loss:
        """The sum over exits, which also learn from each other."""

        return PureLoss(context.task, model, self._of_exits)

    def _of_exits(self, task: Task, model: Network, inputs: Tensor, labels: Tensor) -> Tensor:
        answers = [task.answers(logits) for logits in model.exits(inputs)]
        exits = [F.log_softmax(logits, dim=1) for logits in answers]
        if task.label_kind == "classes" and task.sums_examples:  # the usual loss, whose softmax is there already
            own = torch.stack([F.nll_loss(exit, labels) for exit in exits]).sum()
        else:
            own = torch.stack([task.loss(logits, labels) for logits in answers]).sum()
        if len(exits) == 1:
            return own
        tags = tags_of(task, labels)
        pairs = [divergence(other.detach(), exit, tags) for other, exit in itertools.permutations(exits, 2)]
        return own + self.weight / (len(exits) - 1) * torch.stack(pairs).sum()

    def train(self, context: ClientContext) -> Answer:
        """Train; with alpha under FedDyn's regularizer, whose correction the device keeps."""
        if not self.alpha:
            return super().train(context)
        model = self.model(context)
        kept = context.kept("correction", per_architecture=False) or {}
        received = {name: p.detach().clone() for name, p in trained_parameters(model).items()}
        regularizer = Regularizer(strength=self.alpha, toward=received, correction=kept)
        loss = context.fit(model, self.loss(context, model), regularizer=regularizer)
        new: dict[str, Tensor] = {}
        for name, parameter in trained_parameters(model).items():
            moved = (parameter.detach() - received[name]).mul_(-self.alpha)
            new[name] = moved + kept[name].to(moved.device) if name in kept else moved
        context.keep("correction", kept | new, per_architecture=False)
        return Answer(model, {"weights": dict(model.state_dict())}, loss)

    def scored(self, context: ClientContext, model: Network) -> nn.Module:
        """Return what the device's exits say together, or its deepest."""
        return MeanOfExits(model) if self.ensemble else model


# The server half ------------------------------------------------------------------------------------------------------


class DepthFLParams(Params):
    """DepthFL's settings."""

    ramp_rounds: CountOrZero = Field(
        300, description="Round from which on exits learn from each other with full weight; 0: from the first"
    )
    alpha: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        0.1, description="Strength of FedDyn's regularizer, for which devices keep a correction; 0 leaves it out"
    )
    scored: Literal["ensemble", "deepest"] = Field(
        "ensemble",
        description="Which prediction is scored: the mean of the exits' logits (ensemble), or the deepest exit",
    )


class DepthFL(ExitsMethod[DepthFLParams]):
    """w_l <- mean over the devices that have layer l, unweighted; layers that nobody trained are kept.

    With alpha, h_l <- h_l - alpha n / N (mean - w_l), n being the devices of the round that trained layer l and N all
    there are, and w_l <- mean - h_l / alpha; batch norm's statistics stay the mean.
    """

    def __init__(self, setup: Setup, params: DepthFLParams) -> None:
        super().__init__(setup, params)
        self.h = zeros(learned(self.weights)) if params.alpha else {}

    @override
    @classmethod
    def traits(cls, params: DepthFLParams) -> Traits:
        if not params.alpha:
            return cls.fit_for
        why = (
            f"with depthfl.alpha = {params.alpha} a device corrects the training of one model, not of two: leave it "
            "false, or set depthfl.alpha = 0"
        )
        return replace(cls.fit_for, averages=False, one_model=why)  # h sums up how far the mean has moved

    def client_step(self, order: Order) -> ClientStep:
        """Cross-entropy of all exits, which also learn from each other."""
        p = self.params
        weight = ramp(self.round, p.ramp_rounds)
        return MutualLearningOfExits(weighting="uniform", weight=weight, alpha=p.alpha, ensemble=p.scored == "ensemble")

    def training_cost(self, architecture: Architecture) -> Cost:
        """The cost of training all exits, and with alpha the memory of further copies of the parameters."""
        return with_parameter_copies(super().training_cost(architecture), COPIES if self.params.alpha else 0)

    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        """Every layer becomes the mean over the devices that have it, with alpha less h / alpha."""
        before, owners = self.weights, self.mean.weight()
        metrics = super().finish_round(trained)
        for name, h in self.h.items():
            mean, has_owner = self.weights[name], owners[name] > 0
            share = owners[name].float() / (UNIT * self.settings.devices)
            self.h[name] = h - self.params.alpha * share * (mean - before[name])
            self.weights[name] = torch.where(has_owner, mean - self.h[name] / self.params.alpha, mean)
        return metrics

    def models(self, architectures: Collection[Architecture]) -> dict[Architecture, Model]:
        """The networks up to the exits, which say the mean of their exits by default."""
        exits: Literal["mean", "deepest"] = "mean" if self.params.scored == "ensemble" else "deepest"
        return {a: replace(model, exits=exits) for a, model in super().models(architectures).items()}

    @override
    def beside_weights(self) -> Mapping[str, Weights]:
        return {"h": self.h}


def ramp(round_number: int, ramp_rounds: int) -> float:
    """The weight of what exits learn from each other: exp(-5 (1 - t / T)^2), and 1 from round T on."""
    if round_number >= ramp_rounds:
        return 1.0
    return math.exp(-5.0 * (1.0 - round_number / ramp_rounds) ** 2)
