"""Losses of tasks, from a model's outputs and the labels.

A loss is the mean over the examples of a batch, or with `reduction="sum"` their sum, as PyTorch's own losses are.
"""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from wildflower.tasks.labels import NO_LABEL, LabelKind


class TaskLoss(Protocol):
    """A loss of a task; `torch.nn.functional.cross_entropy` is one."""

    def __call__(self, outputs: Tensor, labels: Tensor, /, *, reduction: str = "mean") -> Tensor:
        """Outputs (batch, classes, ...) and labels (batch, ...) -> mean or sum over the batch."""


def squared_error(outputs: Tensor, labels: Tensor, /, *, reduction: str = "mean") -> Tensor:
    """Return the loss of labels that are numbers: the squared distance of the one output (batch, 1)."""
    return F.mse_loss(outputs.squeeze(1), labels, reduction=reduction)


def token_cross_entropy(outputs: Tensor, labels: Tensor, /, *, reduction: str = "mean") -> Tensor:
    """Return the loss of labels of tokens: an example's loss is the mean cross-entropy of its labeled tokens.

    Outputs are (batch, classes, sequence). An example without a labeled token has a loss of 0.
    """
    of_examples = mean_of_labeled(F.cross_entropy(outputs, labels, reduction="none", ignore_index=NO_LABEL), labels)
    if reduction == "none":
        return of_examples
    return of_examples.sum() if reduction == "sum" else of_examples.mean()


def mean_of_labeled(of_tokens: Tensor, labels: Tensor) -> Tensor:
    """Return the mean (batch,) over an example's tokens that have a label, of (batch, sequence); 0 where none has."""
    labeled = labels != NO_LABEL
    return of_tokens.where(labeled, 0.0).sum(dim=1) / labeled.sum(dim=1).clamp(min=1)


def usual_loss(labels: LabelKind) -> TaskLoss:
    """Return the loss of a task that names none."""
    if labels == "numbers":
        return squared_error
    return F.cross_entropy if labels == "classes" else token_cross_entropy
