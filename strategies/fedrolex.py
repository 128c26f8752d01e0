"""FedRolex (Alam et al., NeurIPS 2022): HeteroFL whose window of channels moves on by one channel every round."""

from __future__ import annotations

from typing import ClassVar

from wildflower.models.architecture import Architecture
from wildflower.models.placement import rolling
from wildflower.strategies.heterofl import HeteroFL
from wildflower.strategies.method import Selection
from wildflower.strategies.params import Params


class FedRolex(HeteroFL):
    """Channels {t, ..., t + k - 1} modulo the group's size in round t (Eq. 4), for every group; else as HeteroFL.

    The client step is HeteroFL's `MaskedTraining`.
    """

    params_type: ClassVar[type[Params]] = Params  # none of HeteroFL's own

    def selection(self, device: int, architecture: Architecture) -> Selection:
        """The window of this round."""
        return Selection(rolling, self.round)

    def scored_selection(self, architecture: Architecture) -> Selection:
        """A tier's sub-model is this round's window."""
        return Selection(rolling, self.round)
