"""ScaleFL (Ilhan, Su and Liu, CVPR 2023): levels that scale width and depth together.

Level k is the network up to exit k with a share of the leading channels of every group. A device trains the deepest
level that it can afford, deeper exits counting for more; its early exits may also learn from its own last one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import Tensor
from typing_extensions import override

from wildflower.models.architecture import Architecture
from wildflower.models.family import Family
from wildflower.models.network import Network
from wildflower.strategies.exits import ExitsMethod
from wildflower.strategies.method import ClientContext, ClientStep, Order, Training, Traits
from wildflower.strategies.params import Numbers, Params, PositiveRate, Rate
from wildflower.strategies.shared_losses import Loss, PureLoss, divergence, tags_of
from wildflower.tasks.task import Task

PAPER_WIDTHS = (0.7, 0.7, 0.75, 1.0)  # of exits 1 to 4
QUIET_SHARE = 0.25  # of the rounds, in which exits do not learn from the last one yet

# The client step ------------------------------------------------------------------------------------------------------


class WeightedExits(Training):
    """L = sum_j j L_j / (K (K + 1) / 2) over the device's exits j = 1..K, with L_K = CE(f_K(x), y).

    For j < K, L_j = CE(f_j(x), y) + gamma T^2 KL(p_K || p_j), p being softmaxes of logits / T; p_K is not constant.
    """

    gamma: Rate
    temperature: PositiveRate

    @property
    def needs_classes(self) -> bool:
        """It does where early exits learn from the last one."""
        return self.gamma > 0

    def loss(self, context: ClientContext, model: Network) -> Loss:
        """The weighted sum over exits."""

        return PureLoss(context.task, model, self._of_exits)

    def _of_exits(self, task: Task, model: Network, inputs: Tensor, labels: Tensor) -> Tensor:
        exits = model.exits(inputs)
        terms = [task.loss(logits, labels) for logits in exits]
        if self.gamma:
            *early, last = [F.log_softmax(task.answers(logits / self.temperature), dim=1) for logits in exits]
            tags = tags_of(task, labels)
            for number, exit in enumerate(early):
                terms[number] = terms[number] + self.gamma * self.temperature**2 * divergence(last, exit, tags)
        total = torch.stack([number * term for number, term in enumerate(terms, start=1)]).sum()
        return total / (len(exits) * (len(exits) + 1) / 2)


# The server half ------------------------------------------------------------------------------------------------------


class ScaleFLParams(Params):
    """ScaleFL's settings."""

    widths: Numbers = Field(
        (),
        description='Widths of the levels, one per exit from the shallowest on; "" takes the last of 0.7, 0.7, 0.75, 1',
    )
    gamma: Rate = Field(0.05, description="Weight of what early exits learn from the device's last; 0 leaves it out")
    temperature: PositiveRate = Field(3.0, description="Temperature of the softmaxes that exits learn from")

    @field_validator("widths")
    @classmethod
    def _in_bounds(cls, widths: tuple[float, ...]) -> tuple[float, ...]:
        if not all(0 < width <= 1 for width in widths):
            raise ValueError("every width is above 0 and at most 1")
        return widths


class ScaleFL(ExitsMethod[ScaleFLParams]):
    """w <- mean over the devices that have a coordinate, weighted by examples; untouched coordinates are kept."""

    @override
    @classmethod
    def cuts(cls, family: Family, params: ScaleFLParams) -> list[Architecture]:
        return levels(family, params.widths)[::-1]

    @override
    @classmethod
    def traits(cls, params: ScaleFLParams) -> Traits:
        # The quarter in which early exits do not learn from the last one is a share of all rounds.
        return replace(super().traits(params), depends_on_rounds=params.gamma > 0)

    @property
    def needs_classes(self) -> bool:
        """They are needed as soon as early exits learn from the last one."""
        return self.params.gamma > 0

    def client_step(self, order: Order) -> ClientStep:
        """Weighted cross-entropies; after the first quarter of the rounds early exits learn from the last one too."""
        active = self.round - 1 > QUIET_SHARE * self.settings.rounds
        gamma = self.params.gamma if active else 0.0
        return WeightedExits(gamma=gamma, temperature=self.params.temperature)


def levels(family: Family, widths: tuple[float, ...] = ()) -> list[Architecture]:
    """The levels of a family, shallowest first.

    Args:
        family: one with several exits.
        widths: share of every channel group that a level keeps, one per exit, not falling; () takes the last of
            `PAPER_WIDTHS`.

    Raises:
        ValueError: there are not as many widths as exits, or a deeper level is narrower.
    """
    exits = len(family.segments)
    if not widths and exits > len(PAPER_WIDTHS):
        raise ValueError(
            f"{family.name} has {exits} exits, but the paper's widths are of {len(PAPER_WIDTHS)}: set scalefl.widths "
            f"to {exits} widths, one per exit from the shallowest on"
        )
    widths = widths or PAPER_WIDTHS[-exits:]
    text = ", ".join(f"{width:g}" for width in widths)
    if len(widths) != exits:
        raise ValueError(
            f"scalefl.widths = {text!r} are {len(widths)}, but {family.name} has {exits} exits "
            f"({', '.join(family.segments)}): one per exit from the shallowest on"
        )
    if list(widths) != sorted(widths):
        raise ValueError(f"scalefl.widths = {text!r}: a deeper level must not be narrower than the one before")
    return [family.up_to(exit, width) for exit, width in enumerate(widths, start=1)]
