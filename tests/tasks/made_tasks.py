"""Made tasks whose labels are not classes, for tests: numbers, and classes of tokens."""

from __future__ import annotations

import pytest
import torch

from wildflower.tasks import task as tasks
from wildflower.tasks.data import Data, DataSet, make_data_set
from wildflower.tasks.labels import NO_LABEL
from wildflower.tasks.losses import squared_error, token_cross_entropy
from wildflower.tasks.metrics import MeanAbsoluteError, Metric, Pearson, TokenAccuracy
from wildflower.tasks.task import Kind, Task, TaskSpec

SEQUENCE = 6


def brightness(data_dir: str) -> DataSet:
    """8x8 images of noise whose label is how much brighter the left half is than the right; twelve photographers."""
    generator = torch.Generator().manual_seed(0)

    def draw(examples: int) -> Data:
        halves = torch.randint(40, 200, (examples, 1, 1, 2), generator=generator).repeat_interleave(4, dim=3)
        images = halves + torch.randint(0, 40, (examples, 1, 8, 8), generator=generator)
        return Data(images.to(torch.uint8), (halves[:, 0, 0, 0] - halves[:, 0, 0, -1]).float() / 100)

    return make_data_set(draw(480), draw(96), natural_ids=torch.arange(480) % 12)


def parities(data_dir: str) -> DataSet:
    """Sequences of bytes, each labeled with whether it is odd, but for some."""
    generator = torch.Generator().manual_seed(0)

    def draw(examples: int) -> Data:
        tokens = torch.randint(0, 256, (examples, SEQUENCE), generator=generator, dtype=torch.uint8)
        labels = tokens.long() % 2
        labels[torch.rand(labels.shape, generator=generator) < 0.25] = NO_LABEL
        return Data(tokens, labels)

    train, test = draw(60), draw(30)
    return DataSet(train, test, classes=2)


def regression(patch: pytest.MonkeyPatch, metric: Metric | None = None) -> None:
    """For one test, add the task "brightness"."""
    kind = Kind(brightness, "lenet5", loss=squared_error, metric=metric or Pearson())
    patch.setitem(tasks.TASKS, "brightness", kind)
    tasks.load_task.cache_clear()


def absolute_regression(patch: pytest.MonkeyPatch) -> None:
    """The same, scored by an error."""
    regression(patch, MeanAbsoluteError())


def of_tokens(patch: pytest.MonkeyPatch) -> Task:
    """For one test, add the task "parities", and load it for three devices."""
    kind = Kind(parities, "bert-tiny", loss=token_cross_entropy, metric=TokenAccuracy())
    patch.setitem(tasks.TASKS, "parities", kind)
    tasks.load_task.cache_clear()
    return tasks.load_task(TaskSpec(name="parities", devices=3))
