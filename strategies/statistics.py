"""Batch norm's running statistics of a finished model, taken by devices (HeteroFL's "static batch norm").

The engine asks devices for them wherever a method gives a model to score that has none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from wildflower.messages.orders import Merge
from wildflower.messages.tensor_sets import STATISTICS, TensorSet
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.layers import mean_statistics
from wildflower.models.network import MeanOfExits, Network
from wildflower.strategies.method import Answer, ClientContext, ClientStep
from wildflower.strategies.params import CountOrZero
from wildflower.tasks.inputs import laid_out_for

# How many take statistics by default where a round has fewer devices. With fewer a score depends on which devices they
# are, more than on how many examples each passes (benchmarks/methods_that_win).
LEAST_DEVICES = 30


class TakeStatistics(ClientStep):
    """One pass over the device's examples in training mode, without gradients; the statistics are averaged.

    examples: the most that a device passes, drawn anew each time and rounded up to whole batches or micro-batches; 0:
        all. How much the device counts in the average does not depend on it.
    """

    trains: ClassVar[bool] = False
    examples: CountOrZero = 0

    def returned(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        """The running means and variances as "statistics", averaged by examples."""
        tensors = {name: spec for name, spec in family.tensors(architecture).items() if name.endswith(STATISTICS)}
        return {"statistics": TensorSet.of(tensors, Merge(), steady=False)}

    def train(self, context: ClientContext) -> Answer:
        """Take them."""
        most = math.ceil(self.examples / context.training.examples_at_once)
        return Answer(None, {"statistics": context.statistics(most)})


class ScoreModel(ClientStep):
    """A model that is scored exactly as the server has it, its batch norm statistics among the weights.

    exits: what a model with several exits says: its "deepest", or the "mean" of their logits.
    """

    trains: ClassVar[bool] = False
    exits: Literal["deepest", "mean"] = "deepest"

    def returned(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        """Nothing but scores."""
        return {}

    def train(self, context: ClientContext) -> Answer:
        """Nothing is trained."""
        return Answer(self.model(context))

    def scored(self, context: ClientContext, model: Network) -> nn.Module:
        """The model, or the mean of its exits."""
        return MeanOfExits(model) if self.exits == "mean" else model


def take_statistics(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
    """One pass in training mode without gradients; batch norm's statistics become the mean over the batches."""
    model.train()
    with torch.no_grad(), mean_statistics(model):
        for inputs, _ in batches:
            model(laid_out_for(model, inputs))
