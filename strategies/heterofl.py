"""HeteroFL (Diao, Ding and Tarokh, ICLR 2021): every device trains the leading channels that fit.

Each coordinate of the global model is the mean over the devices that trained it.

Static batch norm: devices normalize with their batch's statistics and keep none; before a model is scored, devices pass
their data through it once and the server averages what they saw. Masked cross-entropy: a device sets the logits of
classes it does not hold to 0, and its classifier rows of those classes do not count. Scaler: activations are divided by
the width, which changes nothing in the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field
from torch import Tensor, nn

from wildflower.devices.budget import Budget
from wildflower.messages.orders import Merge
from wildflower.messages.tensor_sets import TensorSet
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.layers import Network
from wildflower.strategies.distillation import Distillation, distill_in_place
from wildflower.strategies.method import ClientContext, ClientStep, Order, Setup, Trained, Training
from wildflower.strategies.params import Params
from wildflower.strategies.shared_losses import Loss
from wildflower.strategies.submodel import Cut, SubModelMethod

# The client step ------------------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """A model whose logits of classes that a device does not hold are 0, as HeteroFL trains and tests on devices.

    They are 0, as in the original, and not minus infinity: absent classes still take part in the softmax.
    """

    absent: Tensor

    def __init__(self, model: nn.Module, present: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("absent", ~present)

    def forward(self, inputs: Tensor) -> Tensor:
        """(batch, *input shape) -> (batch, classes)."""
        logits: Tensor = self.model(inputs)
        return logits.masked_fill(self.absent, 0.0)


class MaskedTraining(Training):
    """Devices minimize L = CE(m(f(x)), y), where m sets the logits of classes that the device does not hold to 0.

    Rows of the classifier count only for devices that hold the class.
    """

    @property
    def needs_classes(self) -> bool:
        """It does: it masks those that a device does not hold."""
        return True

    def returned(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        """All tensors of the sub-model; rows of absent classes do not count."""
        merge = Merge(weighting=self.weighting, present_classes=True)
        return {"weights": TensorSet.of(family.tensors(architecture), merge)}

    def loss(self, context: ClientContext, model: Network) -> Loss:
        """The masked cross-entropy."""
        masked = Masked(model, (context.class_counts > 0).to(context.device))
        return lambda inputs, labels: context.task.loss(masked(inputs), labels)

    def scored(self, context: ClientContext, model: Network) -> nn.Module:
        """On its own examples a device's model is masked as well."""
        return Masked(model, context.class_counts > 0)


# The server half ------------------------------------------------------------------------------------------------------


class HeteroFLParams(Params):
    """HeteroFL's settings."""

    dynamic: bool = Field(
        False, description="Whether every device draws its width anew each round among those it can afford"
    )
    masked_loss: bool = Field(
        True,
        description="Whether devices minimize the masked cross-entropy; false: the task's own loss, also where labels "
        "are not one class per example",
    )


class HeteroFL(SubModelMethod):
    """W_l <- mean over the devices whose width is at least l (Eq. 4 to 6), unweighted, untouched coordinates kept."""

    params_type: ClassVar[type[Params]] = HeteroFLParams
    shared_params: ClassVar[Mapping[str, type[Params]]] = {"distillation": Distillation}
    family_options: ClassVar[Mapping[str, Any]] = {"norm": "static"}

    def __init__(self, setup: Setup, params: Any, candidates: list[Architecture] | None = None) -> None:
        super().__init__(setup, params, candidates)
        self.params = params
        # A method that is built on this one has settings of its own, and does otherwise as HeteroFL does by default.
        self.own = params if isinstance(params, HeteroFLParams) else HeteroFLParams()
        self.distillation = setup.shared.get("distillation")  # a method that is built on this one may do without
        self.scored_family = setup.family.with_statistics

    @classmethod
    def family_defaults(cls, params: Any) -> dict[str, Any]:
        """With the scaler, which `family-arguments` may take away."""
        return {"scaler": True}

    @property
    def needs_classes(self) -> bool:
        """Distillation needs them as well."""
        distills = isinstance(self.distillation, Distillation) and self.distillation.steps > 0
        return distills or super().needs_classes

    def assign(self, device: int, budget: Budget) -> Architecture | None:
        """The widest candidate that fits, or in dynamic mode any of those that fit."""
        widest = super().assign(device, budget)
        if widest is None or not self.own.dynamic:
            return widest
        affordable = self.candidates[self.candidates.index(widest) :]
        return affordable[int(self.rng(2, device).integers(len(affordable)))]

    def client_step(self, order: Order) -> ClientStep:
        """Masked cross-entropy, or the task's own loss."""
        return (MaskedTraining if self.own.masked_loss else Training)(weighting="uniform")

    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        """Every coordinate becomes the mean over its owners; then distillation, where it is asked for."""
        empty = self.mean.empty
        metrics = super().finish_round(trained)
        if not isinstance(self.distillation, Distillation) or not self.distillation.steps or empty:
            return metrics
        with self.stopwatch.timed("distill"):
            rng = self.rng(5)
            students = self.students(rng, self.distillation.students)
            return distill_in_place(self, self.distillation, students, rng)

    def students(self, rng: np.random.Generator, kind: Literal["random", "with-smallest", "with-whole"]) -> list[Cut]:
        """The sub-models of one distillation: perhaps the smallest, perhaps the one that teaches, and random ones.

        They are as many as a round has devices, and at least those that are not random.
        """
        fixed: list[Architecture] = {
            "random": [],
            "with-smallest": [self.smallest_architecture],
            "with-whole": [self.smallest_architecture, self.scored_architecture],
        }[kind]
        random = (self.subnet(rng) for _ in range(self.settings.devices_per_round - len(fixed)))
        return [self.scored_cut(architecture) for architecture in (*fixed, *random)]

    def subnet(self, rng: np.random.Generator) -> Architecture:
        """A random candidate, for distillation."""
        return self.candidates[int(rng.integers(len(self.candidates)))]
