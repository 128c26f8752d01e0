"""DepthFL (Kim et al., ICLR 2023): devices of different depths, whose exits learn from each other.

A device gets the network up to the deepest exit that it can afford and trains all exits on the way. Each of them also
learns what the others say, with a weight w that grows over the rounds: w = exp(-5 (1 - t / T)^2) in round t, and 1 from
round T on. With alpha, devices and server correct for the devices' different data as FedDyn does (Acar et al., ICLR
2021), layer by layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from messages.layouts import STATISTICS
from messages.orders import Merge, Objective
from messages.sums import UNIT
from models.architecture import Architecture
from models.cost import Cost
from models.family import Family
from strategies.base import Setup, State
from strategies.submodel import SubModelStrategy, by_exit, require_exits
from strategies.work import RoundSettings

EXTRA_BYTES = 12  # per parameter: what was received, the correction, and a gradient before there is one


@dataclass(frozen=True)
class DepthFLParams:
    """ramp_rounds: T, the round from which on exits learn from each other with weight 1; 0: from the first.

    alpha: of FedDyn's regularizer; 0 leaves it out.
    """

    ramp_rounds: int = 300
    alpha: float = 0.0


class DepthFL(SubModelStrategy):
    """w_l <- mean over the devices that have layer l, unweighted; layers that nobody trained are kept.

    With alpha, h_l <- h_l - alpha n / N (mean - w_l), n being the devices of the round that trained layer l and N all
    there are, and w_l <- mean - h_l / alpha; batch norm's statistics stay the mean.

    Devices minimize L = sum_i (CE(f_i(x), y) + w / (K - 1) sum_{j != i} KL(p_j || p_i)) over their K exits, p_i being
    the softmax of exit i, constant where it is p_j; with one exit its CE (`client_app.objectives._mutual_learning`,
    "mutual learning of exits"). With alpha they minimize L - <c, w> + alpha / 2 ||w - w_received||^2 and then set
    c <- c - alpha (w - w_received) (`client_app.dynamic.DynamicRegularizer`).
    """

    merge = Merge(weighting="uniform")

    def __init__(self, setup: Setup, params: DepthFLParams) -> None:
        require_exits("depthfl", setup.family)
        super().__init__(setup, by_exit(setup.family))
        self.params = params
        self.h = {
            name: torch.zeros_like(value)
            for name, value in self.weights.items()
            if params.alpha and not name.endswith(STATISTICS)
        }

    def objective(self, device: int, architecture: Architecture) -> Objective:
        """Cross-entropy of all exits, which also learn from each other."""
        weight = ramp(self.round, self.params.ramp_rounds)
        return Objective(kind="mutual learning of exits", weight=weight, alpha=self.params.alpha)

    @classmethod
    def price(
        cls,
        family: Family,
        architecture: Architecture,
        settings: RoundSettings,
        widths: tuple[float, ...],
        params: DepthFLParams,
    ) -> Cost:
        """The cost of training all exits, and with alpha `EXTRA_BYTES` of memory per parameter."""
        plain = super().price(family, architecture, settings, widths, params)
        extra = EXTRA_BYTES * plain.parameters if params.alpha else 0
        return replace(plain, peak_training_memory_bytes=plain.peak_training_memory_bytes + extra)

    def finish_round(self) -> None:
        """Every layer becomes the mean over the devices that have it, with alpha less h / alpha."""
        before, owners = self.weights, self.mean.weight()
        super().finish_round()
        for name, h in self.h.items():
            mean, trained = self.weights[name], owners[name] > 0
            share = owners[name].float() / (UNIT * int(self.settings.task["devices"]))
            h -= self.params.alpha * share * (mean - before[name])
            self.weights[name] = torch.where(trained, mean - h / self.params.alpha, mean)

    def state_dict(self) -> State:
        """The global weights, and h."""
        state = super().state_dict()
        state.tensors |= {f"h/{name}": value for name, value in self.h.items()}
        return state

    def load_state_dict(self, state: State) -> None:
        """Restore the global weights and h; ValueError where the checkpoint is of a run without alpha."""
        super().load_state_dict(state)
        missing = [name for name in self.h if f"h/{name}" not in state.tensors]
        if missing:
            raise ValueError(f"the checkpoint holds no h of {missing[0]}: its run had depthfl.alpha = 0")
        self.h = {name: state.tensors[f"h/{name}"].clone() for name in self.h}


def ramp(round_number: int, ramp_rounds: int) -> float:
    """The weight of what exits learn from each other: exp(-5 (1 - t / T)^2), and 1 from round T on."""
    if round_number >= ramp_rounds:
        return 1.0
    return math.exp(-5.0 * (1.0 - round_number / ramp_rounds) ** 2)
