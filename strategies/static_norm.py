"""The base of methods that cut sub-models of one model and normalize by the batch (HeteroFL and its kin).

Static batch norm: devices normalize with their batch's statistics and keep none; before a model is scored, devices pass
their data through it once and the server averages what they saw. Masked cross-entropy: a device sets the logits of
classes it does not hold to 0, and its classifier rows of those classes do not count. Distillation: what a method may
let the server do after the mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor, nn
from typing_extensions import override

from wildflower.messages.orders import Merge
from wildflower.messages.tensor_sets import TensorSet
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.network import Network
from wildflower.plugins.flower_log import log
from wildflower.strategies.distillation import Distillation, distill_in_place
from wildflower.strategies.method import ClientContext, P, Setup, Trained, Training
from wildflower.strategies.params import Params
from wildflower.strategies.shared_losses import Loss, PureLoss
from wildflower.strategies.submodel import Cut, SubModelMethod


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


def masked(context: ClientContext, model: nn.Module) -> Masked:
    """Return a model whose logits of classes that the device of a context does not hold are 0."""
    return Masked(model, (context.class_counts > 0).to(context.device))


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
        return PureLoss(context.task, masked(context, model))

    def scored(self, context: ClientContext, model: Network) -> nn.Module:
        """On its own examples a device's model is masked as well."""
        return masked(context, model)


class StaticNormMethod(SubModelMethod[P]):
    """Sub-models with static batch norm, averaged coordinate by coordinate; then distillation, where it is asked for.

    A method that does not have distillation among its `shared_params` goes without.

    distillation_steps: how many steps the method's own paper takes.
    scaler: whether activations of cut layers are divided by their width, where `family-arguments` say nothing else.
    """

    distillation_steps: ClassVar[int] = 0
    scaler: ClassVar[bool] = False

    shared_params: ClassVar[Mapping[str, type[Params]]] = {"distillation": Distillation}
    family_options: ClassVar[Mapping[str, Any]] = {"norm": "static"}

    def __init__(self, setup: Setup, params: P, candidates: list[Architecture] | None = None) -> None:
        super().__init__(setup, params, candidates)
        found = setup.shared.get("distillation", Distillation())
        assert isinstance(found, Distillation)
        steps = self.distillation_steps if found.steps < 0 else found.steps
        self.distillation = found.model_copy(update={"steps": steps})
        self.scored_family = setup.family.with_statistics

    @override
    @classmethod
    def family_defaults(cls, params: P) -> dict[str, Any]:
        return {"scaler": True} if cls.scaler else {}

    @override
    def start(self) -> None:
        """Log what distillation will cost the server."""
        super().start()
        if not (steps := self.distillation.steps):
            return
        students, inputs = self.settings.devices_per_round, self.distillation.batch_size
        flops = self.cost(self.scored_architecture).training_flops * inputs * students * steps
        log.info(
            "The server distills after every round: %s sub-models, %s steps of %s inputs for each, at most %.2g FLOPs "
            "in all; distillation.steps = 0 leaves it out, fewer take less",
            *(students, steps, inputs, flops * 4 / 3),  # the teacher computes forward, a third of training
        )

    @property
    def needs_classes(self) -> bool:
        """Distillation needs them as well."""
        return self.distillation.steps > 0 or super().needs_classes

    @override
    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        empty = self.mean.empty
        metrics = super().finish_round(trained)
        if empty or not self.distillation.steps:
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
