"""RecipFL's controls and variants, as plug-ins: `strategy = "recipfl_controls:FirstUpload"`.

Experiments of this folder find the file beside them. All have RecipFL's settings, as `recipfl-controls.KEY`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from wildflower.strategies.method import Setup, Trained
from wildflower.strategies.recipfl.graph_hypernetwork import Hypernetwork, Request
from wildflower.strategies.recipfl.recipfl import RecipFL, RecipFLParams, counts_of

EXAMPLES = 256  # in whose multiples devices are weighed, so that those weights are of the order of 1


class FirstUpload(RecipFL):
    """The server learns how a device's labels are distributed with its first upload, and not before its training."""

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


class ByExamples(RecipFL):
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
