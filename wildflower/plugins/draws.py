"""Numbers drawn at random that are the same in every process: by PyTorch, NumPy and Python."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@contextmanager
def same_draws(seed: int = 0) -> Iterator[None]:
    """Let a `with` block draw the same numbers each time, on the CPU, and no others be drawn after it for that.

    A GPU's generator is left alone: the device's own draws go on from it.
    """
    import numpy as np
    import torch

    with same_chance(), torch.device("cpu"):
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def same_chance() -> Iterator[None]:
    """Leave all sources of chance of this process after a `with` block as they were before, but for a GPU's."""
    import numpy as np
    import torch

    own, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(own)
        np.random.set_state(numpy)


def inputs_like(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Draw inputs: numbers, or the first two tokens of any vocabulary."""
    import torch

    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator)
    return torch.randint(0, 2, shape, generator=generator, dtype=dtype)
