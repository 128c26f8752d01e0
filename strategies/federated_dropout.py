"""Federated Dropout (Caldas et al., 2018): HeteroFL with a random subset of channels for every device and round."""

from __future__ import annotations

from dataclasses import dataclass

from models.architecture import Architecture
from models.placement import chosen
from strategies.base import Setup
from strategies.heterofl import HeteroFL, HeteroFLParams
from strategies.work import Selection


@dataclass(frozen=True)
class FederatedDropoutParams:
    """statistics_devices: as in HeteroFL."""

    statistics_devices: int = 0


class FederatedDropout(HeteroFL):
    """Every device gets its own random channels of every group; else as HeteroFL.

    Devices minimize HeteroFL's L = CE(m(f(x)), y) (`client_app.objectives.Masked`, "masked cross entropy").
    """

    def __init__(self, setup: Setup, params: FederatedDropoutParams) -> None:
        super().__init__(setup, HeteroFLParams(statistics_devices=params.statistics_devices))

    def selection(self, device: int, architecture: Architecture) -> Selection:
        """Random channels, drawn from (seed, round, device)."""
        return Selection(chosen, int(self.rng(4, device).integers(2**31)))

    def scored_selection(self, architecture: Architecture) -> Selection:
        """A tier's sub-model is a random one of this round."""
        return Selection(chosen, int(self.rng(5).integers(2**31)))
