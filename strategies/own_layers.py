"""A client step whose model is partly the device's own: what is shared travels, and the rest stays."""

from __future__ import annotations

from pydantic import Field
from typing_extensions import override

from wildflower.messages.orders import Merge
from wildflower.messages.tensor_sets import TensorSet
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.layers import TensorSpec
from wildflower.models.network import Network
from wildflower.strategies.client_context import ClientContext
from wildflower.strategies.client_step import Answer
from wildflower.strategies.training_steps import Training


class TrainingWithOwnLayers(Training):
    """Devices minimize the task's loss, such as L = CE(f(x), y), of all layers; those that are theirs do not travel.

    own: names of the tensors that stay on the device; () where all travel.
    begins: the device has no layers of its own yet, and is sent their first values.
    rate: how many times the run's learning rate it is trained with.
    """

    own: tuple[str, ...] = ()
    begins: bool = False
    rate: float = Field(1.0, gt=0, allow_inf_nan=False)

    def _split(self, family: Family, architecture: Architecture) -> tuple[dict[str, TensorSpec], dict[str, TensorSpec]]:
        """The tensors that travel, and the device's own."""
        tensors = family.tensors(architecture)
        own = {name: spec for name, spec in tensors.items() if name in self.own}
        return {name: spec for name, spec in tensors.items() if name not in own}, own

    def sent(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        """Return the tensors that travel, and at first the others."""
        shared, own = self._split(family, architecture)
        return {"weights": TensorSet.of(shared)} | ({"own": TensorSet.of(own)} if self.begins else {})

    @override
    def returned(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        shared, _ = self._split(family, architecture)
        return {"weights": TensorSet.of(shared, Merge(weighting=self.weighting))}

    def model(self, context: ClientContext) -> Network:
        """Return what was sent with the device's own: what it kept, or what it is sent, or fresh layers."""
        if not self.own:
            return super().model(context)
        own = context.kept("own") or context.received.get("own")
        if own is not None:
            return context.build(context.received["weights"] | own)
        model = context.build()  # the device has none yet, or what it kept is lost
        model.load_state_dict(context.received["weights"], strict=False)
        return model

    def train(self, context: ClientContext) -> Answer:
        """Train all layers, and keep the device's own."""
        model = self.model(context)
        loss = context.fit(model, self.loss(context, model), rate=self.rate)
        state = dict(model.state_dict())
        _, own = self._split(context.family, context.architecture)
        if own:
            context.keep("own", {name: state[name] for name, spec in own.items() if not spec.frozen})
        return Answer(model, {"weights": {name: v for name, v in state.items() if name not in own}}, loss)
