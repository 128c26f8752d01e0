"""RecipFL's controls and variants, as plug-ins: `strategy = "recipfl_controls:FirstUpload"`.

Experiments of this folder find the file beside them. All have RecipFL's settings, as `recipfl-controls.KEY`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from wildflower.models.base import Family
from wildflower.strategies.method import Answer, ClientContext, ClientStep, Order, Setup, Trained
from wildflower.strategies.params import Params, Rate
from wildflower.strategies.recipfl.device import TaughtTraining
from wildflower.strategies.recipfl.graph_hypernetwork import Hypernetwork, Request
from wildflower.strategies.recipfl.recipfl import RecipFL, RecipFLParams, counts_of
from wildflower.strategies.shared_losses import divergence
from wildflower.strategies.training_steps import check_class_counts

EXAMPLES = 256  # in whose multiples devices are weighed, so that those weights are of the order of 1


class AblatedParams(RecipFLParams):
    """RecipFL's settings, and of what strong devices learn from their larger model."""

    divergence: Literal["student || teacher", "teacher || student"] = Field(
        "student || teacher",
        description="Divergence of what both classifiers read, as printed; or as published code: teacher || student",
    )
    feature_weight: Rate = Field(
        1.0, description="Weight of the divergence of what both classifiers read, the last term of Eq. 9"
    )


class AblatedTraining(TaughtTraining):
    """Training of which the last term of Eq. 9 has a weight, and may be turned round."""

    divergence: Literal["student || teacher", "teacher || student"]
    feature_weight: Rate

    @override
    def feature_loss(self, student: Tensor, teacher: Tensor, tags: Tensor | None) -> Tensor:
        pair = (student, teacher) if self.divergence == "student || teacher" else (teacher, student)
        return self.feature_weight * divergence(*pair, tags)


class Ablated(RecipFL):
    """Strong devices learn less, or in another way, from their larger model."""

    params_type: ClassVar[type[Params]] = AblatedParams
    params: AblatedParams
    training: ClassVar[type[AblatedTraining]] = AblatedTraining

    @override
    def client_step(self, order: Order) -> ClientStep:
        p = self.params
        taught = order.after is not None
        return self.training(taught=taught, divergence=p.divergence, feature_weight=p.feature_weight)


class CountingTraining(AblatedTraining):
    """The device says how many examples of each class it holds."""

    @override
    def facts(self, family: Family) -> dict[str, int]:
        return {"class_counts": family.classes}

    @override
    def check_facts(self, facts: Mapping[str, Sequence[float]], examples: int) -> None:
        check_class_counts(facts["class_counts"])

    @override
    def train(self, context: ClientContext) -> Answer:
        return replace(super().train(context), facts={"class_counts": context.class_counts.tolist()})


class FirstUpload(Ablated):
    """The server learns how a device's labels are distributed with its first upload, and not before its training."""

    training: ClassVar[type[AblatedTraining]] = CountingTraining

    def __init__(self, setup: Setup, params: RecipFLParams) -> None:
        super().__init__(setup, params)
        self.first_question = None

    @override
    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        figures = super().finish_round(trained)
        for done in trained:
            self.class_counts[done.device] = counts_of(done.facts)
        return figures


class LargeOnly(FirstUpload):
    """The same, and strong devices train their large model only."""

    def __init__(self, setup: Setup, params: RecipFLParams) -> None:
        super().__init__(setup, params)
        self.both_models = False


class ByExamples(Ablated):
    """The gradient is the mean over devices by their examples, in place of the sum."""

    def __init__(self, setup: Setup, params: RecipFLParams) -> None:
        super().__init__(setup, params)
        self.step.by_weight = True

    @override
    def weight_of(self, examples: int) -> float:
        return examples / EXAMPLES


class ByExamplesFirstUpload(ByExamples, FirstUpload):
    """Both."""


class ClassifierConditioned(Hypernetwork):
    """Only decoders of classifiers read the descriptor, as in the published code."""

    @override
    def conditioned(self, operator: str) -> bool:
        return operator.startswith("classifier")


class Classifier(FirstUpload):
    """Only decoders of classifiers read what tells devices apart."""

    @override
    def made_hypernetwork(self) -> Hypernetwork:
        return ClassifierConditioned(self.graphs.values(), self.params, classes=self.family.classes)


class OfClients(Hypernetwork):
    """A learned vector per device is what tells it apart, which is the paper's alternative."""

    clients = 0

    @override
    def made_descriptor(self, classes: int) -> tuple[nn.Module, int]:
        return nn.Embedding(self.clients, self.shape.hidden), self.shape.hidden

    @override
    def descriptors(self, requests: Sequence[Request]) -> Tensor:
        described: Tensor = self.descriptor(torch.tensor([request.client for request in requests]))
        return described


class Clients(FirstUpload):
    """A learned vector per device tells it apart; not for fleets that replace devices."""

    def __init__(self, setup: Setup, params: RecipFLParams) -> None:
        if setup.settings.replaced_devices:
            raise ValueError("a vector is learned for each device, and the fleet replaces devices")
        super().__init__(setup, params)

    @override
    def made_hypernetwork(self) -> Hypernetwork:
        kind = type("OfTheseClients", (OfClients,), {"clients": self.settings.devices})
        made: Hypernetwork = kind(self.graphs.values(), self.params, classes=self.family.classes)
        return made
