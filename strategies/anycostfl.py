"""AnycostFL (Li et al., INFOCOM 2023): every device trains the channels that are strongest in the current global model.

Their "elastic model shrinking" sorts a layer's channels by the L2 norm of their filters and keeps the first. Channels
that must stay together, such as those of a residual stream, are sorted together here: see `channel_norms`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from models.architecture import Architecture
from models.base import Family
from models.placement import Axis, Coordinates, Select
from strategies.heterofl import HeteroFL, StatisticsParams
from strategies.method import Local, Order, Selection, Setup, State, Trained, Training
from strategies.params import Params


class AnycostFLParams(StatisticsParams):
    """AnycostFL's settings."""


class AnycostFL(HeteroFL):
    """The k channels of largest norm of every group; w <- mean over the owners of a coordinate, weighted by examples.

    The selection follows from the global weights alone: all devices of a round share it, and so does a resumed run.
    Devices minimize the task's loss (`strategies.method.Training`).
    """

    params_type: ClassVar[type[Params]] = AnycostFLParams

    def __init__(self, setup: Setup, params: AnycostFLParams) -> None:
        super().__init__(setup, params)
        self._strongest: Selection | None = None  # of the current weights

    @classmethod
    def family_defaults(cls, params: Any) -> dict[str, Any]:
        """No scaler."""
        return {}

    def local(self, order: Order) -> Local:
        """Plain training, averaged by examples."""
        return Training()

    def selection(self, device: int, architecture: Architecture) -> Selection:
        """The strongest channels of the global model as the round found it."""
        if self._strongest is None:
            select = strongest(channel_norms(self.family, self.weights))
            self._strongest = Selection(lambda _: select)
        return self._strongest

    def scored_selection(self, architecture: Architecture) -> Selection:
        """A tier's sub-model has the strongest channels of the global model as it is now."""
        return self.selection(0, architecture)

    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        """As in HeteroFL; then other channels may be the strongest."""
        self._strongest = None
        metrics = super().finish_round(trained)
        self._strongest = None
        return metrics

    def load(self, state: State) -> None:
        """Restore the global weights, and with them the selection."""
        super().load(state)
        self._strongest = None


def channel_norms(family: Family, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The L2 norm of every channel of every group: group -> vector of the group's full size (float64).

    What counts are the filters that make a channel: its rows in all tensors of two or more dimensions whose first
    dimension is the group. For a residual stream these are the rows of every layer that adds to it, so that one order
    holds for all of them, for the norms behind them and for the layers that read them. Biases, norms, position
    embeddings, and the weights with which later layers read a channel do not count.

    Raises ValueError for a group that no filters make.
    """
    squares: dict[str, Tensor] = {}
    for name, spec in family.tensors(family.full()).items():
        axis = spec.axes[0] if len(spec.axes) > 1 else None
        if isinstance(axis, Axis) and axis.group in family.groups:
            rows = weights[name].to(torch.float64).square().reshape(family.groups[axis.group], -1).sum(dim=1)
            squares[axis.group] = squares[axis.group] + rows if axis.group in squares else rows
    missing = [group for group in family.groups if group not in squares]
    if missing:
        raise ValueError(f"{family.name}: no filters make the channels of {', '.join(missing)}, so they have no norm")
    return {group: square.sqrt() for group, square in squares.items()}


def strongest(norms: Mapping[str, Tensor]) -> Select:
    """Select the channels of largest norm, in ascending order; of equal ones, the first."""
    order = {group: torch.sort(norm, descending=True, stable=True).indices for group, norm in norms.items()}

    def select(group: str, full: int, kept: int) -> Coordinates:
        if kept == full:
            return slice(0, full)
        return order[group][:kept].sort().values

    return select
