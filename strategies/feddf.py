"""FedDF (Lin et al., NeurIPS 2020): the averaged model learns on public data what the devices' models say together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from wildflower.messages.sums import WeightedSum, flatten
from wildflower.messages.tensor_sets import TensorSet
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.weights import with_weights
from wildflower.strategies.ensemble import Ensemble, Teachers, require_public, teach
from wildflower.strategies.method import ClientStep, Contribution, Order, Setup, Trained, Training, Traits
from wildflower.strategies.one_architecture import OneArchitecture
from wildflower.strategies.params import Params

# The client step ------------------------------------------------------------------------------------------------------


class TeacherTraining(Training):
    """Devices minimize the task's loss, L = CE(f(x), y). Their weights are not added up on the way: each teaches."""

    needs_classes: ClassVar[bool] = True  # what models say of public data is a distribution over them

    def returned(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        """All tensors of the model, each device's by itself."""
        return {"weights": TensorSet.of(family.tensors(architecture))}


# The server half ------------------------------------------------------------------------------------------------------


class FedDF(OneArchitecture[Params]):
    """w <- sum_k (n_k / n) w_k, then Adam on KL(softmax(mean_k f(w_k, x)) || softmax(f(w, x))), x being public.

    Algorithm 1 with Eq. 1, over one architecture: every device trains the whole model.
    """

    shared_params: ClassVar[Mapping[str, type[Params]]] = {"ensemble": Ensemble}
    # What the devices' models say is averaged as well, and one of them can move that far.
    fit_for: ClassVar[Traits] = replace(
        OneArchitecture.fit_for,
        averages=False,
        takes_tokens=True,
        public_when={},
        one_model="feddf distills one model's networks into it: leave it false",
    )

    def __init__(self, setup: Setup, params: Params) -> None:
        super().__init__(setup, params)
        if self.architecture != self.family.full():
            raise ValueError("widths: feddf teaches the whole model, so 1 must be among them")
        found = setup.shared["ensemble"]
        assert isinstance(found, Ensemble)
        self.ensemble = found
        self.teachers = Teachers(require_public("feddf", setup.public), setup.family.classes)

    def client_step(self, order: Order) -> ClientStep:
        """Plain training."""
        return TeacherTraining()

    def absorb(self, contribution: Contribution) -> None:
        """Add a device's weights, and what its model says of the public data."""
        weights, layout = contribution.own("weights"), contribution.group.returned["weights"].layout
        total = WeightedSum.zeros(layout)
        total.add(flatten(weights, layout), contribution.examples)
        self.mean.check(total)
        self.teachers.add(with_weights(self.family, self.architecture, weights | dict(self.frozen_weights())))
        self.mean.add(contribution.group.placement, layout, total)

    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        """Average, then distill; a round in which nobody answered changes nothing."""
        super().finish_round(trained)
        if not self.teachers.count:
            return {}
        said, seed = self.teachers.take_mean(), int(self.rng(9).integers(2**63))
        student = {name: self.weights[name] for name in self.family.tensors(self.architecture)}
        with self.stopwatch.timed("distill"):
            taught, figures = teach(
                self.family,
                self.architecture,
                student,
                said,
                self.teachers.public,
                self.ensemble,
                seed,
                self.settings.training.layout,
            )
        self.weights |= taught
        return figures
