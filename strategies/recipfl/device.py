"""RecipFL's client step: plain training, and a small model that learns from a larger one (Eq. 9)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wildflower.messages.packing import MessageError
from wildflower.messages.tensor_sets import STATISTICS, TensorSet, Weights
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.network import Network
from wildflower.strategies.method import Answer, ClientContext, Training
from wildflower.strategies.params import Rate
from wildflower.strategies.shared_losses import Loss, divergence
from wildflower.strategies.training_steps import check_class_counts


class TaughtTraining(Training):
    """Devices minimize the task's loss; a small model S with a trained larger one T minimizes Eq. 9, T being constant.

    L = CE(S(x), y) + CE(S(x), softmax T(x)) + KL(p_S || p_T), all temperatures 1, p being softmaxes of what the
    classifiers read; the last term counts `feature_weight` times (the paper: once), is left out where that has not the
    same size in both models, and `divergence` may turn it round.

    Batch norm's running statistics are the device's own, from one training to the next; those that it is sent do not
    count. The hypernetwork needs every device's weights by themselves. The device says how many examples of each class
    it holds.
    """

    taught: bool
    divergence: Literal["student || teacher", "teacher || student"]
    feature_weight: Rate

    @property
    def needs_classes(self) -> bool:
        """It does: it counts them."""
        return True

    def returned(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        """All tensors of the model, not merged."""
        return {"weights": TensorSet.of(family.tensors(architecture))}

    def facts(self, family: Family) -> dict[str, int]:
        """`class_counts`, one number per class."""
        return {"class_counts": family.classes}

    def check_facts(self, facts: Mapping[str, Sequence[float]], examples: int) -> None:
        """Class counts are whole numbers, and not all of them 0."""
        check_class_counts(facts["class_counts"])

    def model(self, context: ClientContext) -> Network:
        """What was sent, with the device's own statistics."""
        return context.build(context.received["weights"] | (context.kept("statistics") or {}))

    def train(self, context: ClientContext) -> Answer:
        """Train; statistics that are missing begin as the mean over the first batches."""
        own: Weights | None = context.kept("statistics", recent=True)
        model = context.build(context.received["weights"] | (own or {}))
        loss = context.fit(model, self.loss(context, model), new_statistics=own is None)
        weights = dict(model.state_dict())
        statistics = {name: value for name, value in weights.items() if name.endswith(STATISTICS)}
        if statistics:
            context.keep("statistics", statistics)
        return Answer(model, {"weights": weights}, loss, {"class_counts": context.class_counts.tolist()})

    def loss(self, context: ClientContext, model: Network) -> Loss:
        """The task's loss, or Eq. 9."""
        if not self.taught:
            return super().loss(context, model)
        teacher = context.earlier
        if teacher is None:
            raise MessageError("a taught order needs a teacher, and the work order names none")
        student_reads, teacher_reads = _read_by_the_classifier(model), _read_by_the_classifier(teacher)

        def loss(inputs: Tensor, labels: Tensor) -> Tensor:
            with torch.no_grad():
                target = teacher(inputs).softmax(dim=1)
            logits = model(inputs)
            total = context.task.loss(logits, labels) + F.cross_entropy(logits, target)
            if not (student_reads and teacher_reads):  # a network without a linear layer
                return total
            read, known = student_reads.pop(), teacher_reads.pop()
            if read.shape != known.shape:
                return total
            student, known = F.log_softmax(read, dim=1), F.log_softmax(known, dim=1)
            pair = (student, known) if self.divergence == "student || teacher" else (known, student)
            return total + self.feature_weight * divergence(*pair)

        return loss


def _read_by_the_classifier(model: Network) -> list[Tensor]:
    """A list that holds, after every forward pass, what the last linear layer, if any, read in it."""
    reads: list[Tensor] = []
    for classifier in [module for module in model.modules() if isinstance(module, nn.Linear)][-1:]:
        classifier.register_forward_pre_hook(lambda _, read: reads.__setitem__(slice(None), [read[0]]))
    return reads
