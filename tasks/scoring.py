"""Scoring a model, or each of its exits: the sums of the task's metric, summed loss and examples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from tasks.task import Task


class Scored(NamedTuple):
    """What scoring comes to: sums of the task's metric, of the losses, and the number of examples."""

    sums: list[float]
    loss_sum: float
    examples: int


@torch.no_grad()
def score(
    model: nn.Module, task: Task, inputs: Tensor, labels: Tensor, *, batch_size: int, device: torch.device
) -> Scored:
    """Score `model` in evaluation mode on inputs as stored, (n, *input shape), and labels (n, ...)."""
    model.to(device).eval()
    total = _Total(task)
    for x, y in _batches(task, inputs, labels, batch_size, device):
        total.add(model(x), y)
    return total.scored(len(labels))


class WithExits(Protocol):
    """A network that gives the outputs of all its exits; `models.layers.Network` is one."""

    def exits(self, x: Tensor, /) -> list[Tensor]:
        """(batch, *input shape) -> the outputs of every exit."""

    def to(self, device: torch.device, /) -> Any:
        """As of `nn.Module`."""

    def eval(self) -> Any:
        """As of `nn.Module`."""


@torch.no_grad()
def score_exits(
    model: WithExits, task: Task, inputs: Tensor, labels: Tensor, *, batch_size: int, device: torch.device
) -> list[Scored]:
    """Score all exits of `model` in one pass, from the shallowest on.

    Last comes what the exits say together: the mean of their outputs. Everything else is as in `score`; without
    examples there is nothing to learn the number of exits from, hence [].
    """
    model.to(device)
    model.eval()
    totals: list[_Total] = []
    for x, y in _batches(task, inputs, labels, batch_size, device):
        exits = model.exits(x)
        exits = [*exits, torch.stack(exits).mean(dim=0)]
        totals = totals or [_Total(task) for _ in exits]
        for total, outputs in zip(totals, exits, strict=True):
            total.add(outputs, y)
    return [total.scored(len(labels)) for total in totals]


class _Total:
    """Sums over the batches that were scored so far."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.sums = [0.0] * task.metric.size(task.classes)
        self.loss = 0.0

    def add(self, outputs: Tensor, labels: Tensor) -> None:
        """Add a batch."""
        new = self.task.metric.sums(self.task.answers(outputs), labels)
        self.sums = [before + more for before, more in zip(self.sums, new, strict=True)]
        self.loss += float(self.task.summed_loss(outputs, labels))

    def scored(self, examples: int) -> Scored:
        """What it comes to."""
        return Scored(self.sums, self.loss, examples)


def _batches(
    task: Task, inputs: Tensor, labels: Tensor, batch_size: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, len(labels), batch_size):
        picked = slice(start, start + batch_size)
        yield task.batch(inputs[picked].to(device), labels[picked].to(device), augment=None)
