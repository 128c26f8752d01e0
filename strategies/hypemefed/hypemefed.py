"""HypeMeFed: one network with several exits; devices that cannot train its deep layers have them guessed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from wildflower.messages.packing import Layout, MessageError
from wildflower.messages.sums import WeightedSum, flatten
from wildflower.messages.tensor_sets import TensorSet, Weights
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.network import Network
from wildflower.models.placement import Placement
from wildflower.plugins.flower_log import log
from wildflower.strategies.exits import ExitsMethod
from wildflower.strategies.hypemefed.guesses import Guesses, HypeMeFedParams, Upload
from wildflower.strategies.hypemefed.layer_hypernetwork import Reading
from wildflower.strategies.hypemefed.pairs_of_layers import Source, follow
from wildflower.strategies.method import (
    ClientContext,
    ClientStep,
    Contribution,
    Order,
    Setup,
    State,
    Trained,
    Training,
    Traits,
)
from wildflower.strategies.shared_losses import Loss, PureLoss
from wildflower.tasks.task import Task

# The client step ------------------------------------------------------------------------------------------------------


class SumOfExits(Training):
    """L = sum_i CE(f_i(x), y) over all exits i of the device, without weights.

    Hypernetworks need every device's weights by themselves, so that nobody adds them up.
    """

    @override
    def returned(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        return {"weights": TensorSet.of(family.tensors(architecture))}

    @override
    def loss(self, context: ClientContext, model: Network) -> Loss:
        return PureLoss(context.task, model, _sum_of_exits)


def _sum_of_exits(task: Task, model: Network, inputs: Tensor, labels: Tensor) -> Tensor:
    return torch.stack([task.loss(logits, labels) for logits in model.exits(inputs)]).sum()


# The server half ------------------------------------------------------------------------------------------------------


class HypeMeFed(ExitsMethod[HypeMeFedParams]):
    """W <- mean over devices, weighted by examples, of what they trained and, of some layers, of what is guessed.

    A device gets the network up to the deepest exit that it can afford. Layers behind its exit are guessed, one exit
    after the other, from its own and from guessed ones; the hypernetworks learn in every round from the devices that
    have both sides. All else is the mean over its owners. What hypernetworks read is held until the end of a round.

    A layer's change is taken in units of the root mean square change of the round's devices, so that hypernetworks see
    the same sizes whatever the learning rate, and go on from round to round. Hypernetworks are on the accelerator where
    there is one.
    """

    # Hypernetworks learn from every device's own tensors as well.
    fit_for: ClassVar[Traits] = replace(
        ExitsMethod.fit_for,
        averages=False,
        one_model="hypemefed would count a device that trains two models twice in the deep layers, with its own and "
        "with what it guesses for its smaller one: leave it false",
    )
    reading_type: ClassVar[type[Reading]] = Reading

    def __init__(self, setup: Setup, params: HypeMeFedParams) -> None:
        super().__init__(setup, params)
        self.guesses = Guesses(
            self.family, params, self.weights, self.guessed_from(), self.reading_type, setup.settings.seed
        )
        self.uploads: list[Upload] = []

    def guessed_from(self) -> dict[int, dict[str, Source]]:
        """Return what is guessed from what, by exit; what is frozen is the same on all devices, and need not be."""
        return {
            exit: {target: source for target, source in pairs.items() if not self.family.is_frozen(target)}
            for exit, pairs in follow(self.family, self.params.generate).items()
        }

    def client_step(self, order: Order) -> ClientStep:
        """The sum of the losses of all exits that the device has."""
        return SumOfExits()

    def absorb(self, contribution: Contribution) -> None:
        """Add what the device trained to the running means, and keep what hypernetworks read."""
        weights = contribution.own("weights")
        architecture = contribution.group.architecture
        exit = self.family.exit_of(architecture)
        self._add(contribution.group.placement, weights, contribution.examples)
        # Copies: the tensors of an update are views of the whole of it.
        tensors = {name: weights[name].clone() for name in self.read(exit)}
        self.uploads.append(Upload(contribution.devices[0], exit, contribution.examples, tensors))

    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        """Train the hypernetworks, guess what is missing, and average."""
        self.uploads.sort(key=lambda upload: upload.device)  # training depends on the order, and replies come in any
        with self.stopwatch.timed("hypernetworks"):
            self.guesses.learn(self.weights, self.uploads, self.round)
        for upload in self.uploads:
            added = self.fill(upload)
            if added:
                try:
                    self._add(self.family.place(self.family.full()), added, upload.weight)
                except MessageError as error:  # a guess too large to be added up
                    text = "Round %s: what stands for the layers that device %s lacks is left out: %s"
                    log.warning(text, self.round, upload.device, error)
        self.uploads = []
        metrics = super().finish_round(trained)
        self.guesses.begin(self.weights)
        return metrics

    def fill(self, upload: Upload) -> Weights:
        """Return what stands for the tensors behind a device's exit."""
        with self.stopwatch.timed("hypernetworks"):
            return self.guesses.behind(upload)

    def _add(self, placement: Placement, weights: Mapping[str, Tensor], weight: int) -> None:
        """Add some tensors of one device to the running means."""
        layout = Layout.of(weights)
        total = WeightedSum.zeros(layout)
        total.add(flatten(weights, layout), weight, None, ())
        self.mean.add(placement, layout, total)

    def read(self, exit: int) -> set[str]:
        """Return the tensors up to an exit that are kept of an upload."""
        return self.guesses.read(exit)

    def state(self) -> State:
        """The global weights and the hypernetworks."""
        state = super().state()
        self.guesses.add_to(state)
        return state

    def load(self, state: State) -> None:
        """Restore the global weights and the hypernetworks; ValueError where they are of another rank or family."""
        super().load(state)
        self.guesses.load(state, self.weights)
