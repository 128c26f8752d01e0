"""Scoring a model, or each of its exits: the sums of the task's metric, summed loss and examples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from wildflower.tasks.inputs import laid_out_for
from wildflower.tasks.task import Task

MAX_CLASSES = 100  # above these nobody could read figures of each class


class Scored(NamedTuple):
    """The result of scoring: sums of the task's metric, of the losses, and the number of examples.

    right: how many examples of each class are answered right; () where `counts_classes` says that nobody asks.
    """

    sums: list[float]
    loss_sum: float
    examples: int
    right: Sequence[int] = ()


@dataclass(frozen=True)
class Scoring:
    """A model and the examples to score it on: the arguments of `score`."""

    model: nn.Module
    task: Task
    inputs: Tensor
    labels: Tensor
    batch_size: int
    device: torch.device

    @property
    def examples(self) -> int:
        """Return how many examples there are."""
        return len(self.labels)

    @property
    def batches(self) -> int:
        """Return in how many batches they are scored."""
        return -(-self.examples // self.batch_size)

    def batch(self, start: int) -> tuple[Tensor, Tensor]:
        """Return inputs and labels of the batch that begins with an example."""
        picked = slice(start, start + self.batch_size)
        inputs, labels = self.inputs[picked].to(self.device), self.labels[picked].to(self.device)
        return self.task.batch(inputs, labels, augment=None)

    def alone(self) -> Scored:
        """Score this model and no other."""
        return score(self.model, self.task, self.inputs, self.labels, batch_size=self.batch_size, device=self.device)


def score(
    model: nn.Module, task: Task, inputs: Tensor, labels: Tensor, *, batch_size: int, device: torch.device
) -> Scored:
    """Score `model` in evaluation mode on inputs as stored, (n, *input shape), and labels (n, ...)."""
    found = score_batches(model, task, inputs, labels, batch_size=batch_size, device=device)
    return add_up(task, (batch for (batch,) in found))


TestPart = Literal["all", "held out", "rest"]
HELD_OUT = 5  # one of so many examples of the test set is held out, to choose by


def test_part(task: Task, part: TestPart) -> tuple[Tensor, Tensor]:
    """Return inputs as stored and labels of the test set, of the fifth by which models are chosen, or of the rest.

    The fifth is drawn once for all seeds and runs: from the number of examples alone.
    """
    inputs, labels = task.test.inputs, task.test.labels
    if part == "all":
        return inputs, labels
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    count = len(labels) // HELD_OUT
    picked = (order[:count] if part == "held out" else order[count:]).sort().values
    return inputs[picked], labels[picked]


@torch.no_grad()
def score_batches(
    model: Any,
    task: Task,
    inputs: Tensor,
    labels: Tensor,
    *,
    batch_size: int,
    device: torch.device,
    exits: bool = False,
) -> list[list[Scored]]:
    """Return the scores of each batch of `score`: whoever has parts of the batches adds up the same bits.

    A batch has one score, or with `exits` one of every exit, from the shallowest on, and last that of the mean of their
    outputs. `model` is then one that has `exits`, such as `wildflower.models.network.Network`.
    """
    model.to(device).eval()
    found = []
    for start in range(0, len(labels), batch_size):
        picked = slice(start, start + batch_size)
        x, y = task.batch(inputs[picked].to(device), labels[picked].to(device), augment=None)
        x = laid_out_for(model, x)
        outputs = model.exits(x) if exits else [model(x)]
        if exits:
            outputs = [*outputs, torch.stack(outputs).mean(dim=0)]
        found.append([score_outputs(task, each, y) for each in outputs])
    return found


def add_up(task: Task, batches: Iterable[Scored]) -> Scored:
    """Return the scores of several batches together, added in their order."""
    sums, loss_sum, examples = [0.0] * task.metric.size(task.classes), 0.0, 0
    right = [0] * (task.classes if counts_classes(task) else 0)
    for batch in batches:
        sums = [before + more for before, more in zip(sums, batch.sums, strict=True)]
        loss_sum += batch.loss_sum
        examples += batch.examples
        right = [before + more for before, more in zip(right, batch.right, strict=True)]
    return Scored(sums, loss_sum, examples, right)


def counts_classes(task: Task) -> bool:
    """Return whether right answers are counted class by class: examples have one class each, of few enough."""
    return task.label_kind == "classes" and task.classes <= MAX_CLASSES


def score_outputs(task: Task, outputs: Tensor, labels: Tensor) -> Scored:
    """Score a model's outputs (batch, ...) for some examples."""
    sums = [float(value) for value in task.metric.sums(task.answers(outputs), labels)]
    right: list[int] = []
    if counts_classes(task):
        right = labels[outputs.argmax(1) == labels].bincount(minlength=task.classes).tolist()
    return Scored(sums, float(task.summed_loss(outputs, labels)), len(labels), right)
