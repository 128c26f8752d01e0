"""The context that a client step works with on the device."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from wildflower.messages.orders import LocalTraining
from wildflower.messages.tensor_sets import TensorSets, Weights
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.network import Network
from wildflower.strategies.shared_losses import Loss, Regularizer
from wildflower.tasks.task import Task


class ClientContext(Protocol):
    """The tools of a client step: one order of one device.

    Attributes:
        family, architecture: the model of the order.
        received: the tensor sets that the server sent, by name.
        training: epochs or steps, batch size, optimizer and learning rate of this round.
        task: the task, with its loss.
        earlier: the model that this device trained in the order that `Method.after` named; None without one.
        chance: the only source of chance that a loss may use, seeded by the order. A backend that computes one graph
            for all batches cannot take a loss that draws from it.
        device: where to compute.
        keeps: whether the device keeps what the order comes to; False in an evaluation.
        steps_taken: optimizer steps so far.
    """

    family: Family
    architecture: Architecture
    received: TensorSets
    training: LocalTraining
    task: Task
    earlier: Network | None
    chance: random.Random
    device: torch.device
    keeps: bool
    steps_taken: int

    @property
    def examples(self) -> int:
        """Return how many training examples the device holds."""

    @property
    def class_counts(self) -> Tensor:
        """Return how many training examples of each class the device holds, or of tags how many tokens, (classes,).

        MessageError where labels are no classes; `ClientStep.needs_classes` says it beforehand.
        """

    def build(self, weights: Weights | None = None) -> Network:
        """Build the order's sub-model of these tensors, which training then changes; None: freshly initialized."""

    def kept(self, name: str, *, per_architecture: bool = True, recent: bool = False) -> Weights | None:
        """Return tensors that this device kept under a name in an earlier round; None if it has none.

        Args:
            name: as given to `keep`.
            per_architecture: whether each architecture has tensors of its own under this name.
            recent: in an evaluation, only what was kept in the round that is evaluated.
        """

    def keep(self, name: str, tensors: Mapping[str, Tensor], *, per_architecture: bool = True) -> None:
        """Keep tensors on the device, for later rounds and across restarts, once the order is done."""

    def steps(
        self, *models: torch.nn.Module, share: tuple[float, float] = (0.0, 1.0)
    ) -> Iterator[Iterator[tuple[Tensor, Tensor, float]]]:
        """Yield the batch of every optimizer step that `training` asks for, for a loop of one's own over some models.

        A batch comes as the parts that the device computes with at once. Without micro-batches it is a single part.
        Each part has inputs and labels on `device`, and its weight, which is its share of the batch's examples. The
        loop adds up the gradients of `weight * loss` over the parts and then takes its step. A part is made when it is
        asked for, so that one is held at a time, and all parts have to be used before the next batch. Where
        `training.micro_batch_size` is 2 or more, a part of one example is left out. The memory that the loop holds is
        bounded and metered.

        Args:
            models: what the loop trains or reads.
            share: of the device's examples, from one share to another of a fixed order that chance has made, so that
                (0, 0.5) and (0.5, 1) are the same two halves in every round.
        """

    def one_pass(self, *models: torch.nn.Module, most: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all training examples once, shuffled and without augmentation, for a look at them without training.

        Inputs and labels on `device` come in batches of as many examples as the device computes with at once. Memory is
        bounded and metered.

        Args:
            models: what the pass reads.
            most: how many batches the pass has at most; 0: no limit.
        """

    def statistics(self, most: int = 0) -> Weights:
        """Return the mean statistics of the received model's batch norms over the batches of `one_pass`, by name."""

    def optimizer(self, model: torch.nn.Module, rate: float = 1.0) -> torch.optim.Optimizer:
        """Return the run's optimizer of a model's parameters, with `rate` times its learning rate."""

    def fit(
        self,
        model: Network,
        loss: Loss,
        *,
        regularizer: Regularizer | None = None,
        new_statistics: bool = False,
        rate: float = 1.0,
        factors: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> float | None:
        """Train a model, on the board's GPU where the node has one that can compute the loss.

        Args:
            model: changed in place.
            loss: mean loss of a batch, from inputs and labels.
            regularizer: is added to the loss.
            new_statistics: batch norm's running statistics begin as the mean over the first batches.
            rate: how many times the run's learning rate it is trained with.
            factors: what the loss's gradients are multiplied by, by the parameter's name and coordinate.

        Returns:
            The mean loss over the examples seen.
        """
