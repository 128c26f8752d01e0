"""Public data: inputs without labels that the server holds beside the devices' data, for methods that learn from them.

They are the training inputs of a task, which may be another one than the run's. Labels are never read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.task import load_data_set, normalized


@dataclass(frozen=True)
class PublicData:
    """Inputs of the server's own.

    Attributes:
        inputs: as stored, (examples, *shape of one example).
        normalization: mean and deviation per channel, of the public data themselves; None where inputs are tokens.
    """

    inputs: Tensor
    normalization: tuple[Tensor, Tensor] | None

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, picked: Tensor) -> Tensor:
        """The inputs of these numbers as a model reads them, not augmented."""
        return normalized(self.inputs[picked], self.normalization)


def load_public(
    name: str, data_dir: str, *, input_shape: tuple[int, ...], dtype: torch.dtype, examples: int, seed: int
) -> PublicData:
    """The training inputs of a task as public data.

    Args:
        name: of the task.
        data_dir: where its data lie; "" for the usual places.
        input_shape: of one example, as the run's models read it.
        dtype: of what the run's models read; int64 stands for tokens.
        examples: how many are drawn at random; 0 takes all.
        seed: what that draw follows from.

    Raises:
        ValueError: the inputs are of another shape or kind, or there are fewer; FileNotFoundError: there are no data.
    """
    data = load_data_set(name, data_dir)
    found = tuple(data.train.inputs.shape[1:])
    if found != input_shape:
        shapes = ("x".join(map(str, shape)) for shape in (found, input_shape))
        raise ValueError("its inputs are {}, and the run's models read {}: take a task of that shape".format(*shapes))
    normalization = None if data.mean is None or data.std is None else (data.mean, data.std)
    if (normalization is None) != (dtype == torch.int64):
        kinds = ("tokens", "images or signals")
        mine, theirs = kinds if normalization is None else kinds[::-1]
        raise ValueError(f"its inputs are {mine}, and the run's models read {theirs}")
    inputs = data.train.inputs
    if examples > len(inputs):
        raise ValueError(f"it has {len(inputs)} training inputs, and public-examples asks for {examples}")
    if examples:
        generator = torch.Generator().manual_seed(seed)
        inputs = inputs[torch.randperm(len(inputs), generator=generator)[:examples]]
    return PublicData(inputs, normalization)
