"""Parts of losses that several methods share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wildflower.tasks.losses import mean_of_labeled
from wildflower.tasks.task import Task

# (inputs, labels) -> mean loss of the batch, still to be differentiated; what it differentiated itself is in `.grad`.
# It is called once per step, or once for each micro-batch of it, between the zeroing of the gradients and their use.
Loss = Callable[[Tensor, Tensor], Tensor]
N = TypeVar("N", bound=nn.Module)


class PureLoss(nn.Module, Generic[N]):
    """A loss as a function of its own tensors and the batch alone: the task's of a model's outputs, or another one.

    Such losses of several devices can be computed at once (`wildflower.client_app.stack`). What differs between devices
    of one architecture and client step is in its parameters and buffers, those of `outputs` among them.

    Args:
        task: the device's.
        outputs: the model, or a module around it.
        criterion: of task, `outputs`, inputs and labels, in place of the task's loss; it reads nothing else that
            differs between devices, and keeps nothing.
        more: without a criterion, modules beside `outputs`; the loss is the mean of the task's over all of them. Each
            is differentiated before the next is computed, so that the activations of one are held at a time.
    """

    def __init__(
        self,
        task: Task,
        outputs: N,
        criterion: Callable[[Task, N, Tensor, Tensor], Tensor] | None = None,
        more: Sequence[nn.Module] = (),
    ) -> None:
        super().__init__()
        self.task, self.outputs, self.criterion, self.more = task, outputs, criterion, nn.ModuleList(more)

    @property
    def sums_examples(self) -> bool:
        """Say whether it is the mean of its examples' losses, so that it can be given weights."""
        return self.criterion is None and self.task.sums_examples

    @property
    def terms(self) -> int:
        """Return how many terms it has that are differentiated one after the other."""
        return 1 + len(self.more)

    def forward(self, inputs: Tensor, labels: Tensor, weights: Tensor | None = None, term: int | None = None) -> Tensor:
        """Return the mean loss of a batch, or with weights (batch,) the weighted sum of its examples' losses.

        term: returns this term alone; None: all, of which those before the last are differentiated already.
        """
        if self.criterion is not None:
            return self.criterion(self.task, self.outputs, inputs, labels)
        if term is None and self.more:
            done = torch.zeros((), device=inputs.device)
            for number in range(len(self.more)):
                value = self(inputs, labels, weights, number)
                value.backward()
                done = done + value.detach()
            return done + self(inputs, labels, weights, len(self.more))
        outputs = self.more[term - 1](inputs) if term else self.outputs(inputs)
        loss = (
            self.task.loss(outputs, labels) if weights is None else (self.task.losses(outputs, labels) * weights).sum()
        )
        return loss / self.terms if self.more else loss


def divergence(target: Tensor, prediction: Tensor, tags: Tensor | None = None) -> Tensor:
    """KL(target || prediction) of two tensors of log-probabilities (batch, classes), as the mean over the batch.

    Of (batch, classes, positions) an example's is the mean over its positions that have a label, as its loss is; `tags`
    (batch, positions) says which.
    """
    if tags is None:
        return F.kl_div(prediction, target, reduction="batchmean", log_target=True)
    of_tokens = F.kl_div(prediction, target, reduction="none", log_target=True).sum(dim=1)
    return mean_of_labeled(of_tokens, tags).mean()


def soft_cross_entropy(logits: Tensor, target: Tensor, tags: Tensor | None = None) -> Tensor:
    """Cross-entropy of logits to probabilities, both (batch, classes), as the mean over the batch.

    Of (batch, classes, positions) an example's is the mean over its positions that have a label, as in `divergence`.
    """
    if tags is None:
        return F.cross_entropy(logits, target)
    return mean_of_labeled(F.cross_entropy(logits, target, reduction="none"), tags).mean()


def tags_of(task: Task, labels: Tensor) -> Tensor | None:
    """Return the labels where each token has one, as `divergence` takes them; None where each example has one."""
    return labels if task.label_kind == "classes of tokens" else None


@dataclass(frozen=True)
class Regularizer:
    """strength / 2 ||w - w_received||^2 - <correction, w>, which is added to a loss over all parameters w.

    FedProx has the first term, SCAFFOLD the second, FedDyn both. Every backend of `ClientContext.fit` knows them, a
    board's GPU included, because they need no data.

    Attributes:
        strength: of the pull toward the weights that the device received.
        toward: those weights, where the client step has a copy of them already; None: the model's as training begins.
        correction: per parameter's name; parameters that are not named have none.
        reported: whether the first term is part of the loss that the device reports.
    """

    strength: float = 0.0
    toward: Mapping[str, Tensor] | None = None
    correction: Mapping[str, Tensor] = field(default_factory=dict)
    reported: bool = False
