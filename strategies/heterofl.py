"""HeteroFL (Diao, Ding and Tarokh, ICLR 2021): every device trains the leading channels that fit.

Each coordinate of the global model is the mean over the devices that trained it. Batch norm is static, and the
cross-entropy is masked (`wildflower.strategies.static_norm`). Scaler: activations are divided by the width, which
changes nothing in the whole model.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from wildflower.devices.budget import Budget
from wildflower.models.architecture import Architecture
from wildflower.strategies.method import ClientStep, Order, Training
from wildflower.strategies.params import Params
from wildflower.strategies.static_norm import MaskedTraining, StaticNormMethod


class HeteroFLParams(Params):
    """HeteroFL's settings."""

    dynamic: bool = Field(
        False, description="Whether every device draws its width anew each round among those it can afford"
    )
    masked_loss: bool = Field(
        True,
        description="Whether devices minimize the masked cross-entropy; false: the task's own loss, also where labels "
        "are not one class per example",
    )


class HeteroFL(StaticNormMethod[HeteroFLParams]):
    """W_l <- mean over the devices whose width is at least l (Eq. 4 to 6), unweighted, untouched coordinates kept."""

    scaler: ClassVar[bool] = True

    def assign(self, device: int, budget: Budget) -> Architecture | None:
        """The widest candidate that fits, or in dynamic mode any of those that fit."""
        widest = super().assign(device, budget)
        if widest is None or not self.params.dynamic:
            return widest
        affordable = self.candidates[self.candidates.index(widest) :]
        return affordable[int(self.rng(2, device).integers(len(affordable)))]

    def client_step(self, order: Order) -> ClientStep:
        """Masked cross-entropy, or the task's own loss; devices count alike."""
        return (MaskedTraining if self.params.masked_loss else Training)(weighting="uniform")
