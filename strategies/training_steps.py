"""Ready-made client steps: plain training, and counting examples of each class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from typing_extensions import override

from wildflower.devices.validation import shown
from wildflower.messages.orders import Merge
from wildflower.messages.tensor_sets import STATISTICS, TensorSet, Weights, parameters_of
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.network import Network
from wildflower.strategies.client_context import ClientContext
from wildflower.strategies.client_step import Answer, ClientStep
from wildflower.strategies.shared_losses import Loss, PureLoss


class Training(ClientStep):
    """Devices minimize one model's loss, by default the task's, such as L = CE(f(x), y).

    A method that changes only the loss overrides `loss`.

    weighting: of the device's weights in the server's mean.
    """

    weighting: Literal["examples", "uniform"] = "examples"

    def returned(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        """All tensors of the sub-model, averaged."""
        return {"weights": TensorSet.of(family.tensors(architecture), Merge(weighting=self.weighting))}

    def loss(self, context: ClientContext, model: Network) -> Loss:
        """The loss that the device minimizes; by default the task's.

        A `PureLoss` can be minimized for several devices at once; with any other they are trained in turn.
        """
        return PureLoss(context.task, model)

    def train(self, context: ClientContext) -> Answer:
        """Train and return the weights."""
        model = self.model(context)
        loss = context.fit(model, self.loss(context, model))
        return Answer(model, {"weights": dict(model.state_dict())}, loss)


class ChangesTraining(Training):
    """Training whose changes of the parameters come back, and batch norm's running statistics as they are."""

    @override
    def returned(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        tensors, merge = family.tensors(architecture), Merge(weighting=self.weighting)
        statistics = {name: spec for name, spec in tensors.items() if name.endswith(STATISTICS)}
        changes = {"changes": TensorSet.of(parameters_of(tensors), merge)}
        return changes | ({"statistics": TensorSet.of(statistics, merge)} if statistics else {})

    @staticmethod
    def answer(model: Network, changes: Weights, loss: float | None, facts: dict[str, list[float]]) -> Answer:
        """Return what a device answers with these changes; tensors that no gradient moves have changed by 0."""
        still = {
            name: torch.zeros_like(value)
            for name, value in model.state_dict().items()
            if name not in changes and not name.endswith(STATISTICS)
        }
        tensor_sets = {"changes": {**still, **changes}}
        if statistics := {name: value for name, value in model.named_buffers() if name.endswith(STATISTICS)}:
            tensor_sets["statistics"] = statistics
        return Answer(model, tensor_sets, loss, facts)


class ClassCounts(ClientStep):
    """No training: the device says how many training examples of each class it holds, or of tags how many tokens."""

    trains: ClassVar[bool] = False
    needs_classes: ClassVar[bool] = True

    def sent(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        """Nothing."""
        return {}

    def returned(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        """Nothing."""
        return {}

    def facts(self, family: Family) -> dict[str, int]:
        """`class_counts`, one number per class."""
        return {"class_counts": family.classes}

    def check_facts(self, facts: Mapping[str, Sequence[float]], examples: int) -> None:
        """Class counts are whole numbers, and not all of them 0."""
        check_class_counts(facts["class_counts"])

    def train(self, context: ClientContext) -> Answer:
        """Count."""
        return Answer(facts={"class_counts": context.class_counts.tolist()})


def check_class_counts(counts: Sequence[float]) -> None:
    """Raise ValueError where these cannot be a device's numbers of examples per class."""
    if not any(counts) or not all(0 <= count < 2**31 and float(count).is_integer() for count in counts):
        raise ValueError(f"class_counts must be whole numbers from 0, not all of them 0, and not be {shown(counts)}")
