"""Noise in place of data where there are none: normal inputs of a family."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from wildflower.messages.tensor_sets import Weights
from wildflower.models.base import Family
from wildflower.models.placement import Placement


class Noise:
    """Normal inputs of a family: images of N(0, 1), or what stands in place of token embeddings.

    Channels of the latter have the mean and the spread that the global model's embeddings have over all tokens: learned
    embeddings are small beside N(0, 1), and so are those of positions, which are added to them.
    """

    def __init__(self, family: Family, weights: Weights) -> None:
        self._token = int(getattr(family, "pad_id", None) == 0)  # any but that of padding, which nothing attends to
        modules = family.without_memory(family.full()).named_modules()
        found = (name for name, module in modules if isinstance(module, nn.Embedding))
        # Of images an embedding is one of positions, and stays.
        self._embedding = next(found, None) if family.input_dtype == torch.int64 else None
        self._shape, self._mean, self._spread = family.input_shape, torch.zeros(()), torch.ones(())
        if self._embedding is not None:
            table = weights[f"{self._embedding}.weight"]
            self._shape = (*self._shape, table.shape[1])
            self._mean, self._spread = table.mean(dim=0), table.std(dim=0)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Return noise of (count, *an image's shape), or (count, positions, channels of the whole embedding)."""
        return self._mean + self._spread * torch.randn(count, *self._shape, generator=generator)

    def reader(self, model: nn.Module, placement: Placement) -> Callable[[Tensor], Tensor]:
        """Return how a (sub-)model computes on it; of embeddings it reads the channels that it has."""
        if self._embedding is None:
            return model
        embedding = model.get_submodule(self._embedding)
        channels = placement.coordinates[f"{self._embedding}.weight"][1]

        def compute(noise: Tensor) -> Tensor:
            hook = embedding.register_forward_hook(lambda *_: noise[..., channels])
            try:
                return model(torch.full(noise.shape[:2], self._token, device=noise.device))
            finally:
                hook.remove()

        return compute
