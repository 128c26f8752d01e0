"""FedAdam (Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2) over one architecture."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from strategies.base import Setup, State
from strategies.fedavg import FedAvg, FedAvgParams
from strategies.work import Weights


@dataclass(frozen=True)
class FedAdamParams:
    """eta: server learning rate; beta_1, beta_2: decay of the moments; tau: adaptivity, also the first sqrt(v)."""

    eta: float = 0.01
    beta_1: float = 0.9
    beta_2: float = 0.99
    tau: float = 1e-3


class FedAdam(FedAvg):
    """Adam on the server, with the devices' mean change, weighted by examples, as pseudo-gradient.

    Delta_t = sum_k (n_k / n) (w_k - w_t);  m_t = beta_1 m + (1 - beta_1) Delta_t;
    v_t = beta_2 v + (1 - beta_2) Delta_t^2;  w_{t+1} = w_t + eta m_t / (sqrt(v_t) + tau), without bias correction.
    Every device trains the whole model. Batch norm's running statistics are no parameters: they become the devices'
    mean. Devices minimize L = CE(f(x), y) (`client_app.objectives.local_loss`, "cross entropy").
    """

    def __init__(self, setup: Setup, params: FedAdamParams) -> None:
        super().__init__(setup, FedAvgParams(use="all-large"))
        self.adam = params
        statistics = ("running_mean", "running_var")
        self.learned = [name for name in self.weights if not name.endswith(statistics)]
        self.m: Weights = {name: torch.zeros_like(self.weights[name]) for name in self.learned}
        self.v: Weights = {name: torch.full_like(self.weights[name], params.tau**2) for name in self.learned}

    def finish_round(self) -> None:
        """One step of the server's Adam; a round in which nobody answered changes nothing."""
        if not any(a.outcome == "trained" for a in self.assignments):
            return
        p, old = self.adam, self.weights
        mean = self.mean.mean(old)
        for name in self.learned:
            delta = mean[name] - old[name]
            self.m[name] = p.beta_1 * self.m[name] + (1 - p.beta_1) * delta
            self.v[name] = p.beta_2 * self.v[name] + (1 - p.beta_2) * delta.square()
            mean[name] = old[name] + p.eta * self.m[name] / (self.v[name].sqrt() + p.tau)
        self.weights = mean

    def state_dict(self) -> State:
        """The global weights and both moments."""
        state = super().state_dict()
        state.tensors |= {f"m/{name}": value for name, value in self.m.items()}
        state.tensors |= {f"v/{name}": value for name, value in self.v.items()}
        return state

    def load_state_dict(self, state: State) -> None:
        """Restore the global weights and both moments."""
        super().load_state_dict(state)
        self.m = {name: state.tensors[f"m/{name}"] for name in self.learned}
        self.v = {name: state.tensors[f"v/{name}"] for name in self.learned}
