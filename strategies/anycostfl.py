"""AnycostFL (Li et al., INFOCOM 2023): every device trains the channels that are strongest in the current global model.

Their "elastic model shrinking" sorts a layer's channels by the L2 norm of their filters and keeps the first. Channels
that must stay together, such as those of a residual stream, are sorted together here: see `channel_norms`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from models.architecture import Architecture
from strategies.channels import channel_norms, strongest
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
