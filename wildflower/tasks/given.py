"""A task whose data were objects in Python: what `wf.run` wrote of them, read from the run's own folder."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from wildflower.tasks.data import DataSet, read_data_set
from wildflower.tasks.losses import TaskLoss
from wildflower.tasks.metrics import METRICS, Metric, Scale
from wildflower.tasks.spec import Kind

FILE = "data.safetensors"


def given_task(
    family: str = "cnn3",
    *,
    loss: Callable[..., Tensor] | None = None,
    metric: Callable[..., Any] | Metric | str | None = None,
) -> Kind:
    """Return the task of a data folder with `data.safetensors`.

    Args:
        family: the model of a run that names none.
        loss: of outputs and labels, the mean over a batch; None takes the usual one of such labels.
        metric: of outputs and labels, a number for each example or their mean, the higher the better; or a metric of
            `wildflower.tasks.metrics`, or the name of one.
    """
    return Kind(
        _load,
        family,
        loss=None if loss is None else _loss(loss),
        metric=None if metric is None else _metric(metric),
    )


def _load(data_dir: str) -> DataSet:
    if not data_dir:
        raise ValueError(f"this task needs data-dir: the folder of its {FILE}")
    file = Path(data_dir).expanduser() / FILE
    if not file.is_file():
        raise FileNotFoundError(f"{file.parent}: there is no {FILE}, which wf.run wrote: was the folder moved?")
    return read_data_set(file)


def _loss(function: Callable[..., Tensor]) -> TaskLoss:
    """Return a loss that also adds up, of a function that may give a mean only."""
    sums = "reduction" in inspect.signature(function).parameters

    def loss(outputs: Tensor, labels: Tensor, /, *, reduction: str = "mean") -> Tensor:
        of_one = outputs.squeeze(1) if labels.is_floating_point() and outputs.dim() == 2 else outputs
        if sums:
            return function(of_one, labels, reduction=reduction)
        mean = function(of_one, labels)
        if not isinstance(mean, Tensor) or mean.dim():
            what = f"shape {tuple(mean.shape)}" if isinstance(mean, Tensor) else type(mean).__name__
            raise ValueError(f"loss: must return the mean over the batch, a tensor of no dimension, not {what}")
        return mean * len(labels) if reduction == "sum" else mean

    return loss


def _metric(metric: Callable[..., Any] | Metric | str) -> Metric:
    if isinstance(metric, str):
        return METRICS[metric]()
    if isinstance(metric, Metric):
        return metric
    if isinstance(metric, type) and issubclass(metric, Metric):
        return metric()
    return _of_function(metric)


def _of_function(function: Callable[..., Any]) -> Metric:
    """Return the mean over examples of what a function gives."""

    @dataclass(frozen=True)
    class Given(Metric):
        name: ClassVar[str] = f"own_{function.__name__}" if function.__name__ in METRICS else function.__name__
        scale: ClassVar[Scale] = Scale(function.__name__.replace("_", " "))

        @override
        def sums(self, outputs: Tensor, labels: Tensor) -> list[float]:
            of_one = outputs.squeeze(1) if labels.is_floating_point() and outputs.dim() == 2 else outputs
            found = torch.as_tensor(function(of_one, labels), dtype=torch.float64)
            if found.shape not in ((), (len(labels),)):
                raise ValueError(
                    f"metric: {function.__name__} must return a number for each of the {len(labels)} examples, or "
                    f"their mean, not a tensor of shape {tuple(found.shape)}"
                )
            return [float(found.sum() if found.dim() else found * len(labels))]

    return Given()
