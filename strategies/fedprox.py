"""FedProx (Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020) over one architecture."""

from __future__ import annotations

from dataclasses import dataclass

from messages.orders import Objective
from models.architecture import Architecture
from strategies.base import Setup
from strategies.fedavg import FedAvg, FedAvgParams


@dataclass(frozen=True)
class FedProxParams:
    """mu: weight of the proximal term."""

    mu: float = 0.01


class FedProx(FedAvg):
    """FedAvg whose devices minimize h_k(w; w_t) = F_k(w) + mu/2 ||w - w_t||^2 (Eq. 2), all on the whole model.

    F_k is CE(f(x), y), the norm that of all parameters, w_t what was received (`client_app.objectives.local_loss`,
    "proximal"). Batch norm's running statistics are not in it.
    """

    def __init__(self, setup: Setup, params: FedProxParams) -> None:
        super().__init__(setup, FedAvgParams(use="all-large"))
        self.prox = params

    def objective(self, device: int, architecture: Architecture) -> Objective:
        """The proximal objective."""
        return Objective(kind="proximal", mu=self.prox.mu)
