"""FedRolex (Alam et al., NeurIPS 2022): HeteroFL whose window of channels moves on by one channel every round."""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from wildflower.models.architecture import Architecture
from wildflower.models.placement import rolling
from wildflower.strategies.method import ClientStep, Order, Selection
from wildflower.strategies.params import Params
from wildflower.strategies.static_norm import MaskedTraining, StaticNormMethod


class FedRolex(StaticNormMethod[Params]):
    """Channels {t, ..., t + k - 1} modulo the group's size in round t (Eq. 4), for every group; else as HeteroFL.

    The client step is HeteroFL's `MaskedTraining`.
    """

    scaler: ClassVar[bool] = True

    @override
    def client_step(self, order: Order) -> ClientStep:
        return MaskedTraining(weighting="uniform")

    def selection(self, device: int, architecture: Architecture) -> Selection:
        """The window of this round."""
        return Selection(rolling, self.round)

    def scored_selection(self, architecture: Architecture) -> Selection:
        """A tier's sub-model is this round's window."""
        return Selection(rolling, self.round)
