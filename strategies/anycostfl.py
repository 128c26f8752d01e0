"""AnycostFL (Li et al., INFOCOM 2023): every device trains the channels that are strongest in the current global model.

Their "elastic model shrinking" sorts a layer's channels by the L2 norm of their filters and keeps the first. Channels
that must stay together, such as those of a residual stream, are sorted together here: see `channel_norms`. Their
"flexible gradient compression" is not built: the paper's text was not at hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from wildflower.models.architecture import Architecture
from wildflower.strategies.channels import channel_norms, strongest
from wildflower.strategies.method import ClientStep, Order, Selection, Setup, State, Trained, Training
from wildflower.strategies.params import Params
from wildflower.strategies.static_norm import StaticNormMethod


class AnycostFL(StaticNormMethod[Params]):
    """The k channels of largest norm of every group; w <- mean over the owners of a coordinate, weighted by examples.

    The selection follows from the global weights alone: all devices of a round share it, and so does a resumed run.
    Devices minimize the task's loss (`wildflower.strategies.method.Training`).
    """

    def __init__(self, setup: Setup, params: Params) -> None:
        super().__init__(setup, params)
        self._strongest: Selection | None = None  # of the current weights

    def client_step(self, order: Order) -> ClientStep:
        """Plain training; the weights come back, averaged by examples."""
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
