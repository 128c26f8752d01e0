"""HeteroFL (Diao, Ding and Tarokh, ICLR 2021): every device trains the leading channels that fit.

Each coordinate of the global model is the mean over the devices that trained it.

Static batch norm: devices normalize with their batch's statistics and keep none; before a model is scored, devices pass
their data through it once and the server averages what they saw. Masked cross-entropy: a device sets the logits of
classes it does not hold to 0, and its classifier rows of those classes do not count. Scaler: activations are divided by
the width, which changes nothing in the whole model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from logging import WARNING
from typing import Any

import torch
from flwr.common import log
from flwr.serverapp import Grid

from devices.budget import Budget
from messages.layouts import returned_layout
from messages.orders import Merge, Objective
from messages.sums import SCALE, WeightedSum, split
from models.architecture import Architecture
from models.family import Family
from strategies.base import Model, Setup
from strategies.submodel import SubModelStrategy
from strategies.work import LEADING, Contribution, Weights, Work, fits


@dataclass(frozen=True)
class HeteroFLParams:
    """dynamic: every device draws its width anew each round among those it can afford (the paper's "dynamic").

    statistics_devices: devices that pass their data for the batch norm statistics; 0 stands for as many as a round has.
    """

    dynamic: bool = False
    statistics_devices: int = 0


class HeteroFL(SubModelStrategy):
    """W_l <- mean over the devices whose width is at least l (Eq. 4 to 6), unweighted, untouched coordinates kept.

    Devices minimize L = CE(m(f(x)), y), where m sets the logits of classes that the device does not hold to 0, and not
    to minus infinity (`client_app.objectives.Masked`, "masked cross entropy").
    """

    family_options = {"norm": "static"}  # noqa: RUF012
    merge = Merge(weighting="uniform", present_classes=True)

    def __init__(self, setup: Setup, params: HeteroFLParams, candidates: list[Architecture] | None = None) -> None:
        super().__init__(setup, candidates)
        self.hetero = params
        self.scored: Family = replace(setup.family, norm="batch")

    @classmethod
    def family_defaults(cls, params: Any) -> dict[str, Any]:
        """With the scaler, which `family-arguments` may take away."""
        return {"scaler": True}

    def assign(self, device: int, budget: Budget) -> Architecture | None:
        """The widest candidate that fits, or in dynamic mode any of those that fit."""
        widest = super().assign(device, budget)
        if widest is None or not self.hetero.dynamic:
            return widest
        affordable = self.candidates[self.candidates.index(widest) :]
        return affordable[int(self.rng(2, device).integers(len(affordable)))]

    def objective(self, device: int, architecture: Architecture) -> Objective:
        """Cross-entropy with the logits of absent classes set to 0."""
        return Objective(kind="masked cross entropy")

    def models(self, grid: Grid) -> dict[Architecture, Model]:
        """The global model and every tier's sub-model, with statistics that devices took for them."""
        models: dict[Architecture, Model] = {}
        devices = self.population.sample(grid, self.rng(3), 8 * self.statistics_devices)
        for architecture in dict.fromkeys([self.scored_architecture, *self.scored_tiers.values()]):
            weights = self.scored_cut(architecture)[1].gather(self.weights)
            statistics = self._statistics(grid, devices, architecture, weights)
            if statistics is not None:
                models[architecture] = Model(self.scored, architecture, weights | statistics)
        return models

    @property
    def statistics_devices(self) -> int:
        """How many devices take the statistics of one model."""
        return self.hetero.statistics_devices or self.settings.devices_per_round

    def _statistics(
        self, grid: Grid, devices: list[int], architecture: Architecture, weights: Weights
    ) -> Weights | None:
        """The batch norm statistics of one model: the mean over devices of what one pass over their data shows.

        The first `statistics_devices` of `devices` that can afford to train the model take part. Each device's variance
        is that within its own batches: what differs between devices is not in it, unlike in one pass over pooled data.
        None where no device returned any.
        """
        layout = returned_layout(self.scored, architecture, "batch norm statistics")
        if not layout.entries:
            return {}
        devices = self.population.connected(grid, devices)  # some may have been left working a moment ago
        asked = [self.ask(d, architecture, LEADING, self.budget(d, lambda _: [architecture])) for d in devices]
        able = [a for a in asked if fits(a.task.cost, a.budget)]
        if not able:
            text = "Round %s: no device affords %s, so any device takes its batch norm statistics"
            log(WARNING, text, self.round, self.told(architecture))
        assignments = (able or asked)[: self.statistics_devices]
        total = WeightedSum.zeros(layout)

        def add(contribution: Contribution) -> None:
            assert contribution.total is not None
            total.include(contribution.total)

        work = Work(
            round=self.round,
            assignments=assignments,
            objective=lambda a: Objective(kind="batch norm statistics"),
            merge=Merge(weighting="examples"),
            family=self.scored,
            payload=lambda group: {
                name: weights[name] if name in weights else torch.zeros(spec.shape)
                for name, spec in self.scored.tensors(architecture).items()
            },
            absorb=add,
            enough=len(assignments),
        )
        self.exchange_work(grid, work)
        if not total.weight:
            log(
                WARNING,
                "Round %s: no device returned batch norm statistics, %s is not scored",
                self.round,
                self.told(architecture),
            )
            return None
        mean = total.total.double() / (total.weight * SCALE)
        return {name: value.float() for name, value in split(mean, layout).items()}
