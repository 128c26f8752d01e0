"""Every device by itself: it trains the widest model that it can afford, and nothing travels. FedAvg's lower bound."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from wildflower.messages.packing import MessageError
from wildflower.messages.tensor_sets import TensorSet, TensorSets
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.network import Network
from wildflower.strategies.method import (
    LEADING,
    Answer,
    ClientContext,
    ClientStep,
    Contribution,
    Group,
    Model,
    Order,
    Selection,
    Setup,
    State,
    Trained,
    Training,
    Traits,
)
from wildflower.strategies.params import Params
from wildflower.strategies.submodel import CandidateMethod


class TrainingAlone(Training):
    """A device goes on from its own model w_k and minimizes the task's loss, such as L = CE(f(x), y)."""

    def sent(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        """Nothing."""
        return {}

    def returned(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        """Nothing."""
        return {}

    def model(self, context: ClientContext) -> Network:
        """The model that the device keeps."""
        kept = context.kept("model")
        if kept is None:
            raise MessageError(f"this device keeps no model of {context.architecture}")
        return context.build(kept)

    def train(self, context: ClientContext) -> Answer:
        """Train the model that the device keeps, a new one in its first round, and keep it."""
        model = context.build(context.kept("model"))
        loss = context.fit(model, self.loss(context, model))
        context.keep("model", model.state_dict())
        return Answer(model, loss=loss)


class LocalOnly(CandidateMethod[Params]):
    """Nothing is aggregated. A score is the mean over all devices that have trained, each on the task's test set."""

    fit_for: ClassVar[Traits] = Traits(
        personal=True, one_model="with strategy = 'local' no model travels: leave it false"
    )

    def __init__(self, setup: Setup, params: Params) -> None:
        super().__init__(setup, params)
        self.trained: dict[int, Architecture] = {}

    def client_step(self, order: Order) -> ClientStep:
        """Training alone."""
        return TrainingAlone()

    def payload(self, group: Group) -> TensorSets:
        """Nothing."""
        return {}

    def absorb(self, contribution: Contribution) -> None:
        """Refuse weights: a model that trains alone stays on its device."""
        raise MessageError("a device that trains alone sent weights")

    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        """Note who has a model."""
        self.trained |= {done.device: done.order.architecture for done in trained}
        return {}

    def left(self, device: int) -> None:
        """Its model is gone with the device."""
        self.trained.pop(device, None)

    def models(self, architectures: Collection[Architecture]) -> dict[Architecture, Model]:
        """None on the server."""
        return {}

    def scored_on_devices(self) -> list[tuple[int, Architecture, Selection]]:
        """All that have trained score their own models."""
        return [(device, architecture, LEADING) for device, architecture in sorted(self.trained.items())]

    def has_model(self, device: int) -> bool:
        """Return whether the device has trained."""
        return device in self.trained

    def state(self) -> State:
        """Return who has trained which architecture."""
        return State({}, {"trained": [[device, a.to_json()] for device, a in sorted(self.trained.items())]})

    def load(self, state: State) -> None:
        """Restore who has trained what; the models themselves are with the devices."""
        self.trained = {device: Architecture.from_json(a) for device, a in state.values["trained"]}
