"""HypeMeFed's controls and our variants of it, as plug-ins: `strategy = "hypemefed_controls:Owners"`.

Experiments of this folder find the file beside them. All have HypeMeFed's settings, as `hypemefed-controls.KEY`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from typing_extensions import override

from wildflower.messages.tensor_sets import TensorSet, Weights
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.strategies.hypemefed.guesses import HypeMeFedParams, Upload, reaching
from wildflower.strategies.hypemefed.hypemefed import HypeMeFed
from wildflower.strategies.hypemefed.layer_hypernetwork import (
    Factors,
    LowRankHypernetwork,
    Reading,
    as_matrix,
    generate,
)
from wildflower.strategies.hypemefed.pairs_of_layers import Source
from wildflower.strategies.method import ClientStep, Contribution, Order, Setup, State, Trained, Training, Traits
from wildflower.strategies.params import Params


class Owners(HypeMeFed):
    """Nothing stands for layers that a device lacks: they are the mean over their owners."""

    fit_for: ClassVar[Traits] = replace(HypeMeFed.fit_for, one_model="")

    @override
    def guessed_from(self) -> dict[int, dict[str, Source]]:
        return {}


class Stale(HypeMeFed):
    """The global weights of the round before stand for all tensors that a device has not, as in the published code."""

    @override
    def guessed_from(self) -> dict[int, dict[str, Source]]:
        return {}

    @override
    def fill(self, upload: Upload) -> Weights:
        theirs = self.family.tensors(self.family.up_to(upload.exit))
        return {n: value for n, value in self.weights.items() if n not in theirs and not self.family.is_frozen(n)}


class MovingAverageParams(HypeMeFedParams):
    """HypeMeFed's settings, and how long the memory is."""

    ema_decay: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.9, description="Weight of the rounds before in the moving average"
    )


class MovingAverage(HypeMeFed):
    """A moving average of the owners' means stands for all that hypernetworks would guess.

    A <- decay A + (1 - decay) times the owners' mean of the round, by examples; kept where nobody owns a layer. A
    hypernetwork that has learned its owners' weights by heart is a memory of past ones. This is such a memory, and
    knows nothing of the device that it stands in for.
    """

    params_type: ClassVar[type[Params]] = MovingAverageParams
    params: MovingAverageParams

    def __init__(self, setup: Setup, params: MovingAverageParams) -> None:
        super().__init__(setup, params)
        self.averaged = {exit: list(pairs) for exit, pairs in super().guessed_from().items()}
        self.averages_of_owners = {name: self.weights[name] for names in self.averaged.values() for name in names}

    @override
    def guessed_from(self) -> dict[int, dict[str, Source]]:
        return {}

    @override
    def read(self, exit: int) -> set[str]:
        return {name for number, names in self.averaged.items() if number <= exit for name in names}

    @override
    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        self.uploads.sort(key=lambda upload: upload.device)
        decay = self.params.ema_decay
        for exit, names in self.averaged.items():
            deep = reaching(exit, self.uploads)
            total = sum(upload.weight for upload in deep)
            for name in names if total else ():
                mean = sum((upload.tensors[name] * (upload.weight / total) for upload in deep), torch.zeros(()))
                self.averages_of_owners[name] = decay * self.averages_of_owners[name] + (1 - decay) * mean
        return super().finish_round(trained)

    @override
    def fill(self, upload: Upload) -> Weights:
        behind = (names for exit, names in self.averaged.items() if exit > upload.exit)
        return {name: self.averages_of_owners[name] for names in behind for name in names}

    @override
    def state(self) -> State:
        state = super().state()
        state.tensors |= {f"owners/{name}": value for name, value in self.averages_of_owners.items()}
        return state

    @override
    def load(self, state: State) -> None:
        super().load(state)
        self.averages_of_owners = {name: state.tensors[f"owners/{name}"] for name in self.averages_of_owners}


class MeasuredGuesses(HypeMeFed):
    """HypeMeFed, and how far guesses of weights are from those of the layer's owners in every round."""

    @override
    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        sent, uploads = {name: value.clone() for name, value in self.weights.items()}, self.uploads
        found = dict(super().finish_round(trained))
        for exit, pairs in self.guesses.sources.items():
            for target, source in pairs.items() if (owners := reaching(exit, uploads)) else ():
                network = self.guesses.networks[target]
                real = [upload.tensors[target] for upload in owners]
                guessed = [generate(network, upload.inputs[source]) for upload in owners]
                # An outer product has rank 1, so that a sum of them lacks what is behind the largest singular values.
                values = [torch.linalg.svdvals(as_matrix(value)) for value in real]
                found |= {
                    f"{target} guess_error": lacking(guessed, real),
                    f"{target} rank_floor": float(
                        sum(float(s[network.rank * network.times :].square().sum()) for s in values)
                        / sum(float(s.square().sum()) for s in values)
                    ),
                    f"{target} stale_error": lacking([sent[target]] * len(real), real),
                }
        return found


def lacking(values: Sequence[torch.Tensor], real: Sequence[torch.Tensor]) -> float:
    """The mean square of what values lack of the real ones, relative to that of zeros."""
    lacks = sum(float((value - wanted).square().sum()) for value, wanted in zip(values, real, strict=True))
    return lacks / sum(float(wanted.square().sum()) for wanted in real)


class UnmergedTraining(Training):
    """Plain training of the deepest exit; nobody adds up what devices return."""

    @override
    def returned(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        return {"weights": TensorSet.of(family.tensors(architecture))}


class DeepestExit(HypeMeFed):
    """Devices train their deepest exit only, and early heads are those of the devices that stop there."""

    def __init__(self, setup: Setup, params: HypeMeFedParams) -> None:
        if params.generate == "all":
            raise ValueError("generate = 'all' guesses a head from the one before it, which nobody trains here")
        super().__init__(setup, params)

    @override
    def client_step(self, order: Order) -> ClientStep:
        return UnmergedTraining()

    @override
    def absorb(self, contribution: Contribution) -> None:
        exit = self.family.exit_of(contribution.group.architecture)
        untrained = tuple(f"{head}." for head in list(self.family.segments)[: exit - 1])
        weights = {n: value for n, value in contribution.own("weights").items() if not n.startswith(untrained)}
        super().absorb(replace(contribution, each={"weights": weights}))


class DeepestExitOwners(DeepestExit, Owners):
    """Neither exits nor hypernetworks."""


class ReadingInSentBases(Reading):
    """Reads a device's weight in the singular bases of the weight that it was sent, as changes are read."""

    @override
    def inputs(self, network: LowRankHypernetwork, source: str, value: torch.Tensor) -> Factors:
        return self.in_bases_of_sent(network, source, value)


class SentBases(HypeMeFed):
    """Guesses of weights read a device's weight in the bases of the weight that it was sent, and not in its own."""

    reading_type: ClassVar[type[Reading]] = ReadingInSentBases


class Shifted(SentBases):
    """The same, and all guesses are shifted by what those for the layer's owners lack in the mean."""

    def __init__(self, setup: Setup, params: HypeMeFedParams) -> None:
        super().__init__(setup, params)
        self.guesses.shifts = True
