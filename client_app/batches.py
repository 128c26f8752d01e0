"""The batches that a device trains on: which examples, in which order, in which parts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from wildflower.messages.orders import LocalTraining
from wildflower.tasks.inputs import in_layout
from wildflower.tasks.task import Task


def batches_of(
    task: Task, shard: Tensor, training: LocalTraining, generator: torch.Generator, device: torch.device, once: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of `picks_of`, augmented if `training` says so; not in a single pass."""
    augment = None if once else generator
    for picked in picks_of(shard, training, generator, once):
        yield batch_of(task, picked, training, device, augment)


def batch_of(
    task: Task, picked: Tensor, training: LocalTraining, device: torch.device, augment: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Return inputs and labels of some training examples, as a model takes them."""
    inputs, labels = task.batch(
        task.train.inputs[picked].to(device),
        task.train.labels[picked].to(device),
        augment=augment if training.augment else None,
    )
    return in_layout(inputs, training.layout), labels


def micro_batches(picked: Tensor, most: int) -> list[Tensor]:
    """Split a batch's examples into parts of about equal size, as few as there can be with `most` examples each."""
    parts = list(torch.tensor_split(picked, -(-len(picked) // most)))
    # Batch norm cannot normalize a single example over a 1x1 map.
    return parts if most == 1 or len(picked) == 1 else [part for part in parts if len(part) > 1]


def picks_of(
    shard: Tensor, training: LocalTraining, generator: torch.Generator, once: bool = False
) -> Iterator[Tensor]:
    """Yield the examples of shuffled batches: whole epochs (the last batch may be short), or exactly `steps` batches.

    once: a single pass, in parts of as many examples as the device computes with at once.
    """
    size, done = training.examples_at_once if once else training.batch_size, 0
    epochs = 1 if once else training.epochs
    epoch = 0
    while True:
        order = shard[torch.randperm(len(shard), generator=generator)]
        for start in range(0, len(order), size):
            picked = order[start : start + size]
            if len(picked) == 1 < min(size, len(order)):
                continue  # batch norm cannot normalize a single example over a 1x1 map
            yield picked
            done += 1
            if training.steps and not once and done == training.steps:
                return
        epoch += 1
        if (once or not training.steps) and epoch == epochs:
            return
