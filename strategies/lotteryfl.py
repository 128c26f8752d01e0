"""LotteryFL (Li et al., 2020): every device prunes the model to a ticket of its own, and only that travels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from wildflower.devices.budget import Budget
from wildflower.messages.frozen_parts import frozen_nbytes
from wildflower.messages.orders import NonNegative
from wildflower.messages.packing import Layout, MessageError
from wildflower.messages.sums import UNIT, WeightedSum, flatten
from wildflower.messages.tensor_sets import TensorSet, TensorSets, Weights, parameters_of
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.cost import Cost
from wildflower.models.layers import TensorSpec
from wildflower.models.network import Network
from wildflower.models.placement import Placement
from wildflower.strategies.aggregation import CoordinateMean
from wildflower.strategies.method import (
    Answer,
    ClientContext,
    ClientStep,
    Contribution,
    Group,
    Order,
    Selection,
    Setup,
    State,
    Trained,
    Traits,
    of_one_device,
)
from wildflower.strategies.one_architecture import OneArchitecture
from wildflower.strategies.params import Fraction, Params
from wildflower.strategies.pricing import tensor_set_bytes, with_parameter_copies

COPIES = 2  # of all parameters: the first weights, and the masks

# The client step ------------------------------------------------------------------------------------------------------


class TicketTraining(ClientStep):
    """Devices minimize the task's loss, such as L = CE(f(x; m * w), y), over the weights that their mask m keeps.

    Beforehand, where m * w answers more than `threshold` of the device's training examples right, and m keeps more than
    `target`, the device prunes: of what m keeps of every tensor it drops the `pruned` share of smallest magnitude, and
    begins from m * w_0, the first weights.

    prunings: how often the device has pruned. begins: it is sent w_0, which it keeps.
    """

    prunings: NonNegative
    begins: bool
    pruned: Annotated[float, Field(gt=0, lt=1)]
    threshold: Fraction
    target: Fraction

    @property
    def needs_classes(self) -> bool:
        """It does, to count right answers."""
        return True

    @property
    def may_prune(self) -> bool:
        """Whether the mask keeps more than the target."""
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
        if self.may_prune and context.keeps and initial is not None and accuracy(context, model) > self.threshold:
            parameters = dict(model.named_parameters())
            masks = {name: prune(parameters[name].detach(), mask, self.pruned) for name, mask in before.items()}
            with torch.no_grad():
                for name, value in initial.items():
                    parameters[name].copy_(value)
                    if name in masks:
                        parameters[name].mul_(masks[name])
        loss = self._fit(context, model, masks)
        state = dict(model.state_dict())
        values = state | {name: state[name][mask] for name, mask in before.items()}
        tensor_sets = {"weights": values}
        if self.may_prune:
            tensor_sets["still_kept"] = {name: pack_bits(masks[name][mask]) for name, mask in before.items()}
        return Answer(model, tensor_sets, loss)

    @staticmethod
    def _fit(context: ClientContext, model: Network, masks: Mapping[str, Tensor]) -> float:
        """The usual loop, in which gradients of what is pruned are 0. -> the mean loss."""
        optimizer = context.optimizer(model)
        model.train()
        seen, total = 0, 0.0
        for batch in context.steps(model):
            optimizer.zero_grad(set_to_none=True)
            for inputs, labels, weight in batch:
                loss = context.task.loss(model(inputs), labels)
                (weight * loss).backward()
                seen += len(labels)
                total += float(loss.detach()) * len(labels)
            for name, parameter in model.named_parameters():
                if name in masks and parameter.grad is not None:
                    parameter.grad.mul_(masks[name])
            if context.training.clip_norm:
                nn.utils.clip_grad_norm_(model.parameters(), context.training.clip_norm)
            optimizer.step()
        return total / max(1, seen)


def prunable(tensors: Mapping[str, TensorSpec]) -> list[str]:
    """The tensors that are pruned: those of two dimensions and more, which are the weights of layers."""
    return [name for name, spec in tensors.items() if len(spec.shape) > 1 and not spec.frozen]


def kept_after(count: int, prunings: int, pruned: float) -> int:
    """How many of `count` weights are kept after some prunings.

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


def accuracy(context: ClientContext, model: Network) -> float:
    """The share of the device's training examples that the model answers right."""
    model.eval()
    right = seen = 0
    with torch.no_grad():
        for inputs, labels in context.one_pass(model):
            right += int((context.task.answers(model(inputs)).argmax(dim=1) == labels).sum())
            seen += len(labels)
    return right / max(1, seen)


def bits(counts: Mapping[str, int]) -> dict[str, TensorSpec]:
    """Tensors of one bit each for some numbers of weights."""
    return {name: TensorSpec((-(-count // 8),), torch.uint8, (None,)) for name, count in counts.items()}


def pack_bits(mask: Tensor) -> Tensor:
    """A mask as a vector of bytes of eight bits each."""
    return torch.from_numpy(np.packbits(mask.flatten().cpu().numpy()))


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """The first `count` bits as a mask."""
    return torch.from_numpy(np.unpackbits(packed.numpy(), count=count).astype(bool))


# The server half ------------------------------------------------------------------------------------------------------


class LotteryFLParams(Params):
    """LotteryFL's settings."""

    pruned: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.1, description="Share of a tensor's kept weights that one pruning drops"
    )
    threshold: Fraction = Field(
        0.2, description="Accuracy of the device's ticket on its own examples above which it prunes"
    )
    target: Fraction = Field(0.5, description="Share of the weights that is kept at the end: below it nobody prunes")


class LotteryFL(OneArchitecture[LotteryFLParams]):
    """w_c <- mean over the round's devices whose masks keep coordinate c, unweighted; what no mask keeps stays.

    Every device has a mask, and is sent and returns what it keeps. The server holds the masks, one bit per weight and
    device. Biases and norms are never pruned, and are the mean over all devices of the round.
    """

    params_type: ClassVar[type[Params]] = LotteryFLParams
    returns_changes: ClassVar[bool] = True

    def __init__(self, setup: Setup, params: LotteryFLParams) -> None:
        super().__init__(setup, params)
        self.tensors = self.family.tensors(self.architecture)
        self.counts = {name: math.prod(self.tensors[name].shape) for name in prunable(self.tensors)}
        self.initial = {name: self.weights[name] for name in parameters_of(self.tensors)}
        self.mean = CoordinateMean(self._flat())
        self.prunings: dict[int, int] = {}
        self.masks: dict[int, Weights] = {}  # of the devices that have pruned
        self.begun: set[int] = set()  # devices that keep the first weights
        self._beginning: set[int] = set()  # devices that are sent them in the round that runs
        self._new: dict[int, Weights] = {}  # masks of the devices that have pruned in the round that runs

    def _flat(self) -> Weights:
        return {name: value.flatten() for name, value in self.weights.items()}

    # What devices get

    @override
    @classmethod
    def traits(cls, params: LotteryFLParams) -> Traits:
        # Every device has coordinates of its own.
        return replace(super().traits(params), averages=False)

    def selection(self, device: int, architecture: Architecture) -> Selection:
        """The whole model, and a group of its own: no two devices have the same mask."""
        return Selection(of_one_device, device)

    def client_step(self, order: Order) -> ClientStep:
        """Training of the device's ticket, which may prune it."""
        return self._half(self.prunings.get(order.device, 0), begins=order.device not in self.begun)

    def _half(self, prunings: int, *, begins: bool) -> TicketTraining:
        p = self.params
        return TicketTraining(prunings=prunings, begins=begins, pruned=p.pruned, threshold=p.threshold, target=p.target)

    def training_cost(self, architecture: Architecture) -> Cost:
        """Plain training beside the first weights and the masks."""
        return with_parameter_copies(super().training_cost(architecture), COPIES)

    def cost(self, architecture: Architecture) -> Cost:
        """Priced as in a device's first round: nothing is pruned yet, and the first weights travel too."""
        down, up = tensor_set_bytes(self._half(0, begins=True), self.family, architecture, self.settings.wire)
        down += frozen_nbytes(self.family, architecture)
        return replace(self.training_cost(architecture), download_bytes=down, upload_bytes=up)

    def begin_round(self, orders: Sequence[Order]) -> None:
        """Note who is sent the first weights."""
        self._beginning = {order.device for order in orders} - self.begun

    def payload(self, group: Group) -> TensorSets:
        """What the device's mask keeps of the global model, the mask, and the first weights, as far as they travel."""
        masks = self.masks.get(group.selection.number, {})
        weights = dict(self.weights)
        for name, mask in masks.items():
            weights[name] = weights[name].flatten()[unpack_bits(mask, self.counts[name])]
        for name in self.counts.keys() - masks.keys():
            weights[name] = weights[name].flatten()
        contents: TensorSets = {"weights": weights, "mask": masks, "initial": self.initial}
        return {name: {e.name: contents[name][e.name] for e in p.layout.entries} for name, p in group.sent.items()}

    def personal(self, device: int, budget: Budget) -> tuple[Architecture, Selection] | None:
        """The device's ticket."""
        architecture = self.assign(device, budget)
        return None if architecture is None else (architecture, self.selection(device, architecture))

    # What comes back

    def absorb(self, contribution: Contribution) -> None:
        """Add what the device's mask keeps to the sums; MessageError where the mask cannot be one pruning further."""
        device, values = contribution.devices[0], contribution.own("weights")
        places = {}
        for name, count in self.counts.items():
            masks = self.masks.get(device, {})
            mask = unpack_bits(masks[name], count) if name in masks else torch.ones(count, dtype=torch.bool)
            places[name] = mask.nonzero().flatten()
        kept = {}
        if "still_kept" in contribution.group.returned:
            packed = contribution.own("still_kept")
            kept = {name: unpack_bits(packed[name], len(where)) for name, where in places.items()}
        has_pruned = not all(bool(mask.all()) for mask in kept.values())
        for name, mask in kept.items() if has_pruned else ():
            wanted = kept_after(self.counts[name], self.prunings.get(device, 0) + 1, self.params.pruned)
            if int(mask.sum()) != wanted:
                raise MessageError(
                    f"device {device}: its mask of {name} keeps {int(mask.sum())} weights, and one pruning further "
                    f"than before it keeps {wanted}"
                )
        added = {e.name: values[e.name].flatten() for e in contribution.group.returned["weights"].layout.entries}
        for name, mask in kept.items():
            added[name], places[name] = added[name][mask], places[name][mask]
        layout = Layout.of(added)
        total = WeightedSum.zeros(layout)
        total.add(flatten(added, layout), UNIT)
        placement = Placement(
            {name: (places.get(name, slice(0, len(value))),) for name, value in added.items()},
            {name: (None,) for name in added},
        )
        self.mean.add(placement, layout, total)
        if has_pruned:
            self._new[device] = {name: self._packed(name, places[name]) for name in kept}

    def _packed(self, name: str, places: Tensor) -> Tensor:
        mask = torch.zeros(self.counts[name], dtype=torch.bool)
        mask[places] = True
        return pack_bits(mask)

    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        """Every coordinate becomes the mean over the devices that keep it. -> the share that the round's masks keep."""
        flat = self.mean.mean(self._flat())
        self.weights = {name: flat[name].view(value.shape) for name, value in self.weights.items()}
        for device, masks in self._new.items():
            self.masks[device] = masks
            self.prunings[device] = self.prunings.get(device, 0) + 1
        self._new = {}
        self.begun |= {done.device for done in trained} & self._beginning
        if not trained:
            return {}
        whole = sum(self.counts.values())
        shares = [sum(self._kept(done.device).values()) / whole for done in trained]
        return {"kept_share": float(np.mean(shares))}

    def _kept(self, device: int) -> dict[str, int]:
        """How many weights of each tensor the device's mask keeps."""
        prunings = self.prunings.get(device, 0)
        return {name: kept_after(count, prunings, self.params.pruned) for name, count in self.counts.items()}

    def lost(self, device: int) -> None:
        """The device is sent the first weights again."""
        self.begun.discard(device)

    def left(self, device: int) -> None:
        """Drop the device's mask."""
        self.begun.discard(device)
        self.prunings.pop(device, None)
        self.masks.pop(device, None)

    # What is kept

    def state(self) -> State:
        """The global weights and all masks; who has pruned how often, and who keeps the first weights."""
        state = super().state()
        for device, masks in self.masks.items():
            state.tensors[f"mask/{device}"] = torch.cat([masks[name] for name in self.counts])
        state.values["prunings"] = [[device, times] for device, times in sorted(self.prunings.items())]
        state.values["begun"] = sorted(self.begun)
        return state

    def load(self, state: State) -> None:
        """Restore `state`; ValueError where the masks are not those of the prunings."""
        super().load(state)
        self.prunings = {int(device): int(times) for device, times in state.values["prunings"]}
        self.begun = {int(device) for device in state.values["begun"]}
        sizes = [spec.shape[0] for spec in bits(self.counts).values()]
        self.masks = {}
        for device in self.prunings:
            packed = state.tensors.get(f"mask/{device}")
            if packed is None or packed.dtype != torch.uint8 or packed.shape != (sum(sizes),):
                raise ValueError(f"the checkpoint's mask of device {device} is of another model, or missing")
            masks = dict(zip(self.counts, packed.split(sizes), strict=True))
            kept = {name: int(unpack_bits(mask, self.counts[name]).sum()) for name, mask in masks.items()}
            if kept != self._kept(device):
                raise ValueError(
                    f"the checkpoint's mask of device {device} does not keep what is left after "
                    f"{self.prunings[device]} prunings of lotteryfl.pruned = {self.params.pruned:g}"
                )
            self.masks[device] = masks
