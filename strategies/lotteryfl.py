"""LotteryFL (Li et al., 2020): every device prunes the model to a ticket of its own, and only that travels.

The client step and the masks are in `wildflower.strategies.tickets`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from wildflower.devices.budget import Budget
from wildflower.messages.packing import Layout, MessageError
from wildflower.messages.sums import UNIT, WeightedSum, flatten
from wildflower.messages.tensor_sets import TensorSets, Weights, parameters_of
from wildflower.models.architecture import Architecture
from wildflower.models.placement import Placement
from wildflower.strategies.aggregation import CoordinateMean
from wildflower.strategies.method import (
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
from wildflower.strategies.tickets import TicketTraining, bits, kept_after, pack_bits, prunable, unpack_bits


class LotteryFLParams(Params):
    """LotteryFL's settings."""

    pruned: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.1, description="Share of a tensor's kept weights that one pruning drops"
    )
    threshold: Fraction = Field(
        0.2,
        description="Accuracy of the device's ticket on its own examples above which it prunes; of tags the task's "
        "metric",
    )
    target: Fraction = Field(0.5, description="Share of the weights that is kept at the end: below it nobody prunes")


class LotteryFL(OneArchitecture[LotteryFLParams]):
    """w_c <- mean over the round's devices whose masks keep coordinate c, unweighted; what no mask keeps stays.

    Every device has a mask, and is sent and returns what it keeps. The server holds the masks, one bit per weight and
    device. Biases and norms are never pruned, and are the mean over all devices of the round.
    """

    # Every device has coordinates of its own.
    fit_for: ClassVar[Traits] = replace(OneArchitecture.fit_for, averages=False, personal=True, takes_tokens=True)
    returns_changes: ClassVar[bool] = True
    parameter_copies: ClassVar[int] = 2  # the first weights, and the masks

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

    def selection(self, device: int, architecture: Architecture) -> Selection:
        """The whole model, and a group of its own: no two devices have the same mask."""
        return Selection(of_one_device, device)

    def client_step(self, order: Order) -> ClientStep:
        """Training of the device's ticket, which may prune it."""
        return self._half(self.prunings.get(order.device, 0), begins=order.device not in self.begun)

    def _half(self, prunings: int, *, begins: bool) -> TicketTraining:
        p = self.params
        return TicketTraining(prunings=prunings, begins=begins, pruned=p.pruned, threshold=p.threshold, target=p.target)

    @override
    def priced_step(self, architecture: Architecture) -> ClientStep:
        return self._half(0, begins=True)  # as in a device's first round: the first weights travel too

    def begin_round(self, orders: Sequence[Order]) -> None:
        """Note who is sent the first weights."""
        self._beginning = {order.device for order in orders} - self.begun

    def payload(self, group: Group) -> TensorSets:
        """Return what the device's mask keeps of the global model, the mask, and the first weights, as far as they
        travel."""
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
