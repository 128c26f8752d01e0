"""Chance on a device: all of it follows from the order's seed."""

from __future__ import annotations

import random

import torch

from wildflower.client_app.board_gpu import Untraceable


class Chance(random.Random):
    """The chance that a loss may use. While a loss is traced as one graph for all batches, to ask it is an error."""

    traced = False

    def random(self) -> float:
        """Return a number in [0, 1)."""
        self._check()
        return super().random()

    def getrandbits(self, k: int, /) -> int:
        """Return a whole number of k random bits."""
        self._check()
        return super().getrandbits(k)

    def _check(self) -> None:
        if self.traced:
            raise Untraceable("the loss is another one for every batch")


def seed_draws(seed: int, device: torch.device) -> None:
    """Seed dropout, and the first weights of what a device holds itself."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` also goes round all kinds of GPUs: 2 ms
    else:
        torch.manual_seed(seed)


def draws(device: torch.device) -> torch.Tensor:
    """Return the state of what `seed_draws` seeds."""
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def set_draws(state: torch.Tensor, device: torch.device) -> None:
    """Let draws go on from a state of `draws`."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)
