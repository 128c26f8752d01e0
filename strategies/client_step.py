"""The client step of a method: what a device does with an order.

It lists the named tensor sets that travel (`wildflower.messages.tensor_sets`), in `ClientStep.sent` and
`ClientStep.returned`, so that server and device derive the same layouts; bytes, budgets and lateness follow from them.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from wildflower.messages.error import MessageError
from wildflower.messages.orders import Merge, StepReference
from wildflower.messages.tensor_sets import TensorSet, TensorSets
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.network import Network
from wildflower.plugins.reference import PluginError, class_of
from wildflower.strategies.client_context import ClientContext


@dataclass
class Answer:
    """The result of a client step.

    Attributes:
        model: the trained model, which a later order of the device may read, and which personal evaluations score.
        tensor sets: contents of all tensor sets of `ClientStep.returned`.
        loss: mean training loss; None where nothing was trained.
        facts: numbers beside the tensor sets, such as steps taken: those that `ClientStep.facts` lists.
    """

    model: Network | None = None
    tensor_sets: TensorSets = field(default_factory=dict)
    loss: float | None = None
    facts: dict[str, list[float]] = field(default_factory=dict)


class ClientStep(BaseModel, ABC):
    """The client step of a method. Its fields are its settings, which travel with the work order.

    What a device reads is validated by the fields' types and bounds. Values must be hashable: tuples in place of lists.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    trains: ClassVar[bool] = True  # False: the order costs no training memory, and is not refused for lack of it

    @property
    def needs_classes(self) -> bool:
        """Return whether it goes only with tasks that have one class per example, such as where it softens what models
        say."""
        return False

    def sent(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        """List the tensor sets that the server sends: by default the sub-model's tensors as "weights"."""
        return {"weights": TensorSet.of(family.tensors(architecture))}

    def returned(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        """List the tensor sets that the device returns: by default "weights", averaged by examples."""
        return {"weights": TensorSet.of(family.tensors(architecture), Merge())}

    def facts(self, family: Family) -> dict[str, int]:
        """List the facts that the device returns: name -> how many numbers it has. None by default."""
        return {}

    def check_facts(self, facts: Mapping[str, Sequence[float]], examples: int) -> None:
        """Raise ValueError where a device's facts cannot be right: the server then refuses its whole update.

        Args:
            facts: as `facts` lists them, finite numbers.
            examples: how many training examples the device says it has trained on.
        """

    def model(self, context: ClientContext) -> Network:
        """Return the model as training begins, and as it is scored if nothing is trained."""
        return context.build(context.received["weights"])

    @abstractmethod
    def train(self, context: ClientContext) -> Answer:
        """Do the work on the device."""

    def scored(self, context: ClientContext, model: Network) -> torch.nn.Module:
        """Return the module that is scored on the device's own examples; by default the model itself.

        What differs between devices of one architecture is in its parameters and buffers, so that they can be scored at
        once.
        """
        return model

    @property
    def scored_beside(self) -> tuple[str, ...]:
        """Return names of further networks that are scored on the device's own examples; by default none."""
        return ()

    def beside(self, context: ClientContext, answer: Answer | None) -> list[torch.nn.Module]:
        """Return the networks that `scored_beside` names, in its order.

        answer: what the training before came to; None where nothing is trained before devices are scored.
        """
        return []

    def reference(self) -> StepReference:
        """Return this client step as it travels."""
        kind = type(self)
        return StepReference(name=f"{kind.__module__}:{kind.__qualname__}", settings=self.model_dump(mode="json"))


@lru_cache(maxsize=1024)
def tensor_sets_of(
    local: ClientStep, family: Family, architecture: Architecture
) -> tuple[dict[str, TensorSet], dict[str, TensorSet]]:
    """The tensor sets that a client step is sent, and those that it returns. Do not change the result."""
    return local.sent(family, architecture), local.returned(family, architecture)


def client_step_of(reference: StepReference) -> ClientStep:
    """Return the client step that a work order names, with its settings. MessageError if there is none such."""
    return _client_step(reference.name, json.dumps(reference.settings))


@lru_cache(maxsize=64)
def _client_step(name: str, settings: str) -> ClientStep:
    try:
        kind = class_of(name, ClientStep, "the client step of a method")
    except PluginError as error:
        raise MessageError(f"this device cannot train as it is asked to: {error}. Is its app the server's?") from None
    try:
        return kind.model_validate_json(settings)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise MessageError(f"{name}: setting {where}: {first['msg']}") from None
