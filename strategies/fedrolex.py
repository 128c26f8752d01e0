"""FedRolex (Alam et al., NeurIPS 2022): HeteroFL whose window of channels moves on by one channel every round."""

from __future__ import annotations

from dataclasses import dataclass

from models.architecture import Architecture
from models.placement import rolling
from strategies.base import Setup
from strategies.heterofl import HeteroFL, HeteroFLParams
from strategies.work import Selection


@dataclass(frozen=True)
class FedRolexParams:
    """statistics_devices: as in HeteroFL."""

    statistics_devices: int = 0


class FedRolex(HeteroFL):
    """Channels {t, ..., t + k - 1} modulo the group's size in round t (Eq. 4), for every group; else as HeteroFL.

    Devices minimize HeteroFL's L = CE(m(f(x)), y) (`client_app.objectives.Masked`, "masked cross entropy").
    """

    def __init__(self, setup: Setup, params: FedRolexParams) -> None:
        super().__init__(setup, HeteroFLParams(statistics_devices=params.statistics_devices))

    def selection(self, device: int, architecture: Architecture) -> Selection:
        """The window of this round."""
        return Selection(rolling, self.round)

    def scored_selection(self, architecture: Architecture) -> Selection:
        """A tier's sub-model is this round's window."""
        return Selection(rolling, self.round)
