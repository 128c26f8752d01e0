"""RaFL's client step: a personal model and the knowledge network learn from each other (Eqs. 3 to 6)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor, nn

from wildflower.messages.error import MessageError
from wildflower.messages.orders import Merge
from wildflower.messages.tensor_sets import TensorSet, Weights
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.family import make_family
from wildflower.models.network import Network
from wildflower.models.weights import with_weights
from wildflower.strategies.method import Answer, ClientContext, ClientStep
from wildflower.strategies.shared_losses import divergence, tags_of
from wildflower.strategies.supernet_training import calibrated


class MutualLearning(ClientStep):
    """A device's personal model l and the knowledge network k learn from the labels and from each other.

    They minimize L_l = CE(l(x), y) + KL(k || l) and L_k = CE(k(x), y) + KL(l || k) (Eqs. 3 to 6). The personal model
    stays on the device.

    Attributes:
        knowledge_family: JSON of the knowledge network's family; "" is the personal models' own.
        knowledge: JSON of its architecture.
        first: the device has no such personal model yet.
        drawn: it draws the first weights of its personal model itself, and is not sent them.
        calibrates: the personal model that it is sent was cut out of trained weights, and so has batch norm statistics
            of another network: it takes its own by a pass over the device's training examples.
        calibrates_knowledge: likewise the knowledge network.
        merged: knowledge networks may be added up on the way.
    """

    needs_classes: ClassVar[bool] = True  # divergences are between distributions over them
    knowledge_family: str
    knowledge: str
    first: bool
    drawn: bool
    calibrates: bool
    calibrates_knowledge: bool
    merged: bool

    def network(self, family: Family) -> tuple[Family, Architecture]:
        """The knowledge network's family and architecture."""
        own, architecture = _network(self.knowledge_family, self.knowledge)
        return own or family, architecture

    def _weights(self, family: Family, merge: Merge | None) -> dict[str, TensorSet]:
        own, architecture = self.network(family)
        return {"weights": TensorSet.of(own.tensors(architecture), merge)}

    def sent(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        """The knowledge network, and at first the personal model, where the device does not draw that."""
        personal = {"personal": TensorSet.of(family.tensors(architecture))} if self.first and not self.drawn else {}
        return self._weights(family, None) | personal

    def returned(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        """The knowledge network alone."""
        return self._weights(family, Merge() if self.merged else None)

    def facts(self, family: Family) -> dict[str, int]:
        """`personal`: 1 where the device has a personal model now, 0 where it had lost it."""
        return {"personal": 1}

    def check_facts(self, facts: Mapping[str, Sequence[float]], examples: int) -> None:
        """It is 0 or 1."""
        if facts["personal"][0] not in (0, 1):
            raise ValueError(f"the fact 'personal' is 0 or 1, not {facts['personal'][0]!r}")

    def _personal(self, context: ClientContext) -> tuple[Weights | None, bool]:
        """What the device keeps, which is newer than what may have been sent once more; None where it has lost it.

        Also whether it was sent with the statistics of another network.
        """
        kept = context.kept("personal")
        if kept is None and self.first and self.drawn:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(context.chance.getrandbits(63))
                return dict(context.build().state_dict()), False
        return (context.received.get("personal"), self.calibrates) if kept is None else (kept, False)

    def _knowledge(self, context: ClientContext, weights: Weights) -> Network:
        own, architecture = self.network(context.family)
        return with_weights(own, architecture, weights).to(context.device)

    def model(self, context: ClientContext) -> Network:
        """The personal model."""
        weights, cut = self._personal(context)
        if weights is None:
            raise MessageError(f"this device keeps no personal model of {context.architecture}")
        personal = context.build(weights)
        return calibrated(personal, context.one_pass(personal)) if cut else personal

    def train(self, context: ClientContext) -> Answer:
        """Train both networks in one loop; where the personal model is lost, the knowledge network alone."""
        knowledge = self._knowledge(context, context.received["weights"])
        weights, cut = self._personal(context)
        if weights is None:
            if self.calibrates_knowledge:
                calibrated(knowledge, context.one_pass(knowledge))
            loss = context.fit(knowledge, lambda inputs, labels: context.task.loss(knowledge(inputs), labels))
            return Answer(None, {"weights": dict(knowledge.state_dict())}, loss, {"personal": [0.0]})
        personal = context.build(weights)
        if cut:
            calibrated(personal, context.one_pass(personal, knowledge))
        if self.calibrates_knowledge:
            calibrated(knowledge, context.one_pass(personal, knowledge))
        loss = learn_mutually(context, personal, knowledge)
        context.keep("personal", personal.state_dict())
        return Answer(personal, {"weights": dict(knowledge.state_dict())}, loss, {"personal": [1.0]})

    @property
    def scored_beside(self) -> tuple[str, ...]:
        """The knowledge network is scored on the device's own examples, too."""
        return ("knowledge network",)

    def beside(self, context: ClientContext, answer: Answer | None) -> list[nn.Module]:
        """The knowledge network as the device has trained it, or as it was sent."""
        knowledge = self._knowledge(context, (context.received if answer is None else answer.tensor_sets)["weights"])
        if answer is None and self.calibrates_knowledge:
            calibrated(knowledge, context.one_pass(knowledge))
        return [knowledge]


def mutual_losses(
    personal: Tensor, knowledge: Tensor, task_loss: tuple[Tensor, Tensor], tags: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """L_l and L_k of one batch (Eqs. 5 and 6): each network's loss, and its divergence from the other, held fixed.

    Args:
        personal, knowledge: logits, (batch, classes), or (batch, classes, positions) where each token has a label.
        task_loss: the networks' own losses, which are means over the batch.
        tags: the labels of tokens; divergences are means over those that have one.
    """
    said_l, said_k = personal.log_softmax(dim=1), knowledge.log_softmax(dim=1)
    return (
        task_loss[0] + divergence(said_k.detach(), said_l, tags),
        task_loss[1] + divergence(said_l.detach(), said_k, tags),
    )


def learn_mutually(context: ClientContext, personal: nn.Module, knowledge: nn.Module) -> float:
    """Train two networks on the same batches, each by an optimizer of its own; both predict before either steps.

    Returns:
        The mean of L_k over the examples seen.
    """
    networks = (personal, knowledge)
    optimizers = [context.optimizer(network) for network in networks]
    seen, total = 0, torch.zeros((), dtype=torch.float64)
    for network in networks:
        network.train()
    for batch in context.steps(*networks):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        for inputs, labels, weight in batch:
            logits = [network(inputs) for network in networks]
            own = (context.task.loss(logits[0], labels), context.task.loss(logits[1], labels))
            losses = mutual_losses(logits[0], logits[1], own, tags_of(context.task, labels))
            for loss in losses:
                (weight * loss).backward()
            seen += len(labels)
            total += losses[1].detach().to("cpu", torch.float64) * len(labels)
        if context.training.clip_norm:
            for network in networks:
                nn.utils.clip_grad_norm_(network.parameters(), context.training.clip_norm)
        for optimizer in optimizers:
            optimizer.step()
    for network in networks:
        network.zero_grad(set_to_none=True)
    return float(total) / max(1, seen)


@lru_cache(maxsize=16)
def _network(family: str, architecture: str) -> tuple[Family | None, Architecture]:
    """The knowledge network as a work order names it."""
    own = make_family(json.loads(family)) if family else None
    return own, Architecture.from_json(json.loads(architecture))
