"""Scoring a model, or each of its exits: correct answers, summed loss and examples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tasks.task import Task


@torch.no_grad()
def score(
    model: nn.Module, task: Task, inputs: Tensor, labels: Tensor, *, batch_size: int, device: torch.device
) -> tuple[int, float, int]:
    """Score `model` in evaluation mode on inputs as stored, (n, *input shape), and labels (n,)."""
    model.to(device).eval()
    correct, loss = 0, 0.0
    for x, y in _batches(task, inputs, labels, batch_size, device):
        logits = model(x)
        correct += int((logits.argmax(1) == y).sum())
        loss += float(F.cross_entropy(logits, y, reduction="sum"))
    return correct, loss, len(labels)


class WithExits(Protocol):
    """A network that gives the logits of all its exits; `models.layers.Network` is one."""

    def exits(self, x: Tensor, /) -> list[Tensor]:
        """(batch, *input shape) -> the logits of every exit."""

    def to(self, device: torch.device, /) -> Any:
        """As of `nn.Module`."""

    def eval(self) -> Any:
        """As of `nn.Module`."""


@torch.no_grad()
def score_exits(
    model: WithExits, task: Task, inputs: Tensor, labels: Tensor, *, batch_size: int, device: torch.device
) -> list[tuple[int, float]]:
    """Score all exits of `model` in one pass: (correct answers, summed loss) of each, from the shallowest on.

    Last comes what the exits say together: the mean of their logits. Everything else is as in `score`; without examples
    there is nothing to learn the number of exits from, hence [].
    """
    model.to(device)
    model.eval()
    found: list[tuple[int, float]] = []
    for x, y in _batches(task, inputs, labels, batch_size, device):
        exits = model.exits(x)
        exits = [*exits, torch.stack(exits).mean(dim=0)]
        found = found or [(0, 0.0)] * len(exits)
        found = [
            (correct + int((logits.argmax(1) == y).sum()), loss + float(F.cross_entropy(logits, y, reduction="sum")))
            for (correct, loss), logits in zip(found, exits, strict=True)
        ]
    return found


def _batches(
    task: Task, inputs: Tensor, labels: Tensor, batch_size: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, len(labels), batch_size):
        x = task.prepare(inputs[start : start + batch_size].to(device), augment=None)
        yield x, labels[start : start + batch_size].to(device)
