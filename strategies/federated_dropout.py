"""Federated Dropout (Caldas et al., 2018): HeteroFL with a random subset of channels for every device and round."""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from wildflower.models.architecture import Architecture
from wildflower.models.placement import chosen
from wildflower.strategies.method import ClientStep, Order, Selection
from wildflower.strategies.params import Params
from wildflower.strategies.static_norm import MaskedTraining, StaticNormMethod


class FederatedDropout(StaticNormMethod[Params]):
    """Every device gets its own random channels of every group; else as HeteroFL.

    The client step is HeteroFL's `MaskedTraining`.
    """

    scaler: ClassVar[bool] = True

    @override
    def client_step(self, order: Order) -> ClientStep:
        return MaskedTraining(weighting="uniform")

    def selection(self, device: int, architecture: Architecture) -> Selection:
        """Random channels, drawn from (seed, round, device)."""
        return Selection(chosen, int(self.rng(4, device).integers(2**31)))

    def scored_selection(self, architecture: Architecture) -> Selection:
        """A tier's sub-model is a random one of this round."""
        return Selection(chosen, int(self.rng(5).integers(2**31)))
