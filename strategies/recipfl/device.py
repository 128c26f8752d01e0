"""RecipFL's client step: plain training, and a small model that learns from a larger one (Eq. 9)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from wildflower.messages.packing import MessageError
from wildflower.messages.tensor_sets import STATISTICS, TensorSet, Weights
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.network import Network
from wildflower.strategies.method import Answer, ClientContext, Training
from wildflower.strategies.shared_losses import Loss, divergence, soft_cross_entropy, tags_of


class TaughtTraining(Training):
    """Devices minimize the task's loss; a small model S with a trained larger one T minimizes Eq. 9, T being constant.

    L = CE(S(x), y) + CE(S(x), softmax T(x)) + KL(p_S || p_T), all temperatures 1, p being softmaxes of what the
    classifiers read; the last term is left out if that has not the same size in both models. Of tags all terms are
    means over the tokens that have one.

    Batch norm's running statistics are the device's own, from one training to the next; those that it is sent do not
    count. The hypernetwork needs every device's weights by themselves.
    """

    needs_classes: ClassVar[bool] = True  # students learn a distribution over them
    taught: bool

    def returned(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        """All tensors of the model, not merged."""
        return {"weights": TensorSet.of(family.tensors(architecture))}

    def model(self, context: ClientContext) -> Network:
        """Return what was sent, with the device's own statistics."""
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
        return Answer(model, {"weights": weights}, loss)

    def loss(self, context: ClientContext, model: Network) -> Loss:
        """The task's loss, or Eq. 9."""
        if not self.taught:
            return super().loss(context, model)
        teacher = context.earlier
        if teacher is None:
            raise MessageError("a taught order needs a teacher, and the work order names none")

        def loss(inputs: Tensor, labels: Tensor) -> Tensor:
            with torch.no_grad(), _Reading() as of_teacher:
                target = teacher(inputs).softmax(dim=1)
            with _Reading() as of_student:
                logits = model(inputs)
            tags = tags_of(context.task, labels)
            total = context.task.loss(logits, labels) + soft_cross_entropy(logits, target, tags)
            read, known = of_student.read, of_teacher.read
            if read is None or known is None:  # a network without a linear layer
                return total
            if read.shape != known.shape or (tags is not None and read.shape[:-1] != tags.shape):
                return total
            channels = 1 if tags is None else -1  # a linear layer reads them behind positions
            said, known = (each.log_softmax(dim=channels).movedim(channels, 1) for each in (read, known))
            return total + self.feature_loss(said, known, tags)

        return loss

    def feature_loss(self, student: Tensor, teacher: Tensor, tags: Tensor | None) -> Tensor:
        """Return the last term of Eq. 9, of the logarithms of p_S and p_T."""
        return divergence(student, teacher, tags)


class _Reading(TorchFunctionMode):
    """Keeps what the last linear layer of a forward pass read, whether it is a module or an operator of a graph."""

    read: Tensor | None = None

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.linear, torch.ops.aten.linear.default):
            self.read = args[0] if args else kwargs["input"]
        return func(*args, **(kwargs or {}))
