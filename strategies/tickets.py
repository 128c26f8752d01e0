"""LotteryFL's tickets: what a mask keeps of the model, how it is pruned, and how a device trains it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from wildflower.messages.orders import NonNegative
from wildflower.messages.packing import MessageError
from wildflower.messages.tensor_sets import TensorSet, parameters_of
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.layers import TensorSpec
from wildflower.models.network import Network
from wildflower.strategies.method import (
    Answer,
    ClientContext,
    ClientStep,
)
from wildflower.strategies.params import Fraction
from wildflower.strategies.shared_losses import PureLoss
from wildflower.tasks.metrics import ACCURACY


class TicketTraining(ClientStep):
    """Devices minimize the task's loss, such as L = CE(f(x; m * w), y), over the weights that their mask m keeps.

    Beforehand, where m * w scores more than `threshold` on the device's training examples, and m keeps more than
    `target`, the device prunes: of what m keeps of every tensor it drops the `pruned` share of smallest magnitude, and
    begins from m * w_0, the first weights.

    prunings: how often the device has pruned. begins: it is sent w_0, which it keeps.
    """

    needs_classes: ClassVar[bool] = True  # what is scored are shares of right answers
    prunings: NonNegative
    begins: bool
    pruned: Annotated[float, Field(gt=0, lt=1)]
    threshold: Fraction
    target: Fraction

    @property
    def may_prune(self) -> bool:
        """Return whether the mask keeps more than the target."""
        return (1 - self.pruned) ** self.prunings > self.target

    def sent(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        """The weights that the mask keeps; the mask, once anything is pruned; at first w_0."""
        tensors = family.tensors(architecture)
        tensor_sets = {"weights": TensorSet.of(self._kept(tensors))}
        if self.prunings:
            tensor_sets["mask"] = TensorSet.of(
                bits({name: math.prod(tensors[name].shape) for name in prunable(tensors)})
            )
        if self.begins:
            tensor_sets["initial"] = TensorSet.of(parameters_of(tensors))
        return tensor_sets

    def returned(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        """The same weights as they are now, and which of them the mask still keeps, where the device may prune."""
        tensors = family.tensors(architecture)
        kept = self._kept(tensors)
        tensor_sets = {"weights": TensorSet.of(kept)}
        if self.may_prune:
            tensor_sets["still_kept"] = TensorSet.of(bits({name: kept[name].shape[0] for name in prunable(tensors)}))
        return tensor_sets

    def _kept(self, tensors: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        """All tensors; of those that are pruned, what is kept as a vector."""
        specs = dict(tensors)
        for name in prunable(tensors):
            count = kept_after(math.prod(tensors[name].shape), self.prunings, self.pruned)
            specs[name] = TensorSpec((count,), tensors[name].dtype, (None,))
        return specs

    def masks(self, context: ClientContext) -> dict[str, Tensor]:
        """The mask of every tensor that is pruned, of the tensor's shape."""
        tensors = context.family.tensors(context.architecture)
        masks = {}
        for name in prunable(tensors):
            shape = tensors[name].shape
            mask = torch.ones(math.prod(shape), dtype=torch.bool)
            if self.prunings:
                mask = unpack_bits(context.received["mask"][name], len(mask))
                wanted = kept_after(len(mask), self.prunings, self.pruned)
                if int(mask.sum()) != wanted:
                    raise MessageError(f"the mask of {name} keeps {int(mask.sum())} weights, not {wanted}")
            masks[name] = mask.view(shape).to(context.device)
        return masks

    def model(self, context: ClientContext) -> Network:
        """The weights at the places that the mask keeps, zeros elsewhere."""
        weights = dict(context.received["weights"])
        for name, mask in self.masks(context).items():
            whole = torch.zeros(mask.shape, dtype=weights[name].dtype)
            whole[mask.cpu()] = weights[name]
            weights[name] = whole
        return context.build(weights)

    def train(self, context: ClientContext) -> Answer:
        """Prune and rewind where it is time to; then train what the mask keeps."""
        before, model = self.masks(context), self.model(context)
        initial = context.received.get("initial") or context.kept("initial")
        if self.begins:
            context.keep("initial", context.received["initial"])
        masks = before
        # An evaluation scores the ticket that there is; a device that has lost the first weights waits for them.
        if self.may_prune and context.keeps and initial is not None and score(context, model) > self.threshold:
            tensors = model.state_dict()
            masks = {name: prune(tensors[name], mask, self.pruned) for name, mask in before.items()}
            with torch.no_grad():
                for name, value in initial.items():
                    tensors[name].copy_(value)
                    if name in masks:
                        tensors[name].mul_(masks[name])
        # Gradients of what is pruned are 0, so that it stays 0.
        loss = context.fit(model, PureLoss(context.task, model), factors=masks)
        state = dict(model.state_dict())
        values = state | {name: state[name][mask] for name, mask in before.items()}
        tensor_sets = {"weights": values}
        if self.may_prune:
            tensor_sets["still_kept"] = {name: pack_bits(masks[name][mask]) for name, mask in before.items()}
        return Answer(model, tensor_sets, loss)


def prunable(tensors: Mapping[str, TensorSpec]) -> list[str]:
    """The tensors that are pruned: those of two dimensions and more, which are the weights of layers."""
    return [name for name, spec in tensors.items() if len(spec.shape) > 1 and not spec.frozen]


def kept_after(count: int, prunings: int, pruned: float) -> int:
    """Return how many of `count` weights are kept after some prunings.

    One drops what lies below the percentile of the magnitudes, as published code does: ceil(p (n - 1)) of n weights.
    """
    for _ in range(prunings):
        count -= math.ceil(round(pruned * (count - 1), 9))
    return count


def prune(weight: Tensor, mask: Tensor, pruned: float) -> Tensor:
    """The mask of a tensor after one more pruning: without the kept weights of smallest magnitude."""
    places = mask.flatten().nonzero().flatten()
    dropped = len(places) - kept_after(len(places), 1, pruned)
    smallest = weight.flatten()[places].abs().argsort(stable=True)[:dropped]
    result = mask.flatten().clone()
    result[places[smallest]] = False
    return result.view(mask.shape)


def score(context: ClientContext, model: Network) -> float:
    """Return the accuracy of a model on the device's training examples, or of tags the task's metric."""
    task, seen = context.task, 0
    metric = ACCURACY if task.label_kind == "classes" else task.metric
    totals = [0.0] * metric.size(task.classes)
    model.eval()
    with torch.no_grad():
        for inputs, labels in context.one_pass(model):
            found = metric.sums(task.answers(model(inputs)), labels)
            totals = [total + value for total, value in zip(totals, found, strict=True)]
            seen += len(labels)
    return metric.scale.rank(metric.value(totals, seen)) if seen else 0.0


def bits(counts: Mapping[str, int]) -> dict[str, TensorSpec]:
    """Tensors of one bit each for some numbers of weights."""
    return {name: TensorSpec((-(-count // 8),), torch.uint8, (None,)) for name, count in counts.items()}


def pack_bits(mask: Tensor) -> Tensor:
    """A mask as a vector of bytes of eight bits each."""
    return torch.from_numpy(np.packbits(mask.flatten().cpu().numpy()))


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """The first `count` bits as a mask."""
    return torch.from_numpy(np.unpackbits(packed.numpy(), count=count).astype(bool))
