"""FedProx (Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020) over one architecture."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from wildflower.strategies.method import Answer, ClientContext, ClientStep, Order, Training
from wildflower.strategies.one_architecture import OneArchitecture
from wildflower.strategies.params import Params, Rate
from wildflower.strategies.shared_losses import Regularizer


class ProximalTraining(Training):
    """Devices minimize h_k(w; w_t) = F_k(w) + mu / 2 ||w - w_t||^2 (Eq. 2).

    F_k is the task's loss, the norm that of all parameters, w_t what was received. Batch norm's running statistics are
    not in it.
    """

    mu: Rate

    def train(self, context: ClientContext) -> Answer:
        """Train with the proximal term, which the reported loss contains."""
        model = self.model(context)
        pull = Regularizer(strength=self.mu, reported=True)
        loss = context.fit(model, self.loss(context, model), regularizer=pull)
        return Answer(model, {"weights": dict(model.state_dict())}, loss)


class FedProxParams(Params):
    """FedProx's settings."""

    mu: Rate = Field(0.01, description="Weight of the distance to the global model in a device's loss")


class FedProx(OneArchitecture[FedProxParams]):
    """FedAvg whose devices minimize the proximal objective, all on the whole model."""

    parameter_copies: ClassVar[int] = 2  # what was received, and a gradient before there is one

    def client_step(self, order: Order) -> ClientStep:
        """The proximal objective."""
        return ProximalTraining(mu=self.params.mu)
