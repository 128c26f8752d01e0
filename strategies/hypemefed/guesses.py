"""HypeMeFed's hypernetworks in a run: what they learn in a round, and what they guess of layers that devices lack."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from wildflower.messages.tensor_sets import Weights
from wildflower.models.base import Family
from wildflower.plugins.flower_log import log
from wildflower.plugins.raised_as import raised_as
from wildflower.strategies.contract_values import State
from wildflower.strategies.hypemefed.layer_hypernetwork import (
    Factors,
    LowRankHypernetwork,
    Reading,
    fit,
    generate,
    shortfall,
    unit_of_changes,
)
from wildflower.strategies.hypemefed.pairs_of_layers import Source
from wildflower.strategies.params import Count, Params, PositiveRate

MAX_ERROR = 2.0  # of a hypernetwork that is asked, relative to a guess of zeros; before it knows much it errs about 1


class HypeMeFedParams(Params):
    """HypeMeFed's settings: all are of its hypernetworks."""

    rank: Count = Field(
        100, description="Singular vectors of a weight that its hypernetwork sees, or as many as it has"
    )
    hidden: Count = Field(512, description="Width of the hypernetworks' two MLPs")
    epochs: Count = Field(25, description="Epochs that the hypernetworks train in every round")
    learning_rate: PositiveRate = Field(
        5e-4, description="Learning rate of the hypernetworks' Adam, anew in every round"
    )
    guess: Literal["weight", "change"] = Field(
        "weight",
        description="What is guessed of a deeper layer from a shallower one: its weight (the paper), or what a "
        "device's training changed (ours)",
    )
    generate: Literal["layers", "all"] = Field(
        "layers",
        description="What is guessed: weights of convolutions and linear layers between the exits, or all: biases, "
        "norms and heads too",
    )


@dataclass
class Upload:
    """Parts of a device's update that are kept until the end of the round: all that hypernetworks read or guess."""

    device: int
    exit: int
    weight: int
    tensors: Weights
    inputs: dict[Source, Factors] = field(default_factory=dict)  # what hypernetworks read of its tensors


class Guesses:
    """The hypernetworks of a run, one for each tensor that is guessed.

    Attributes:
        sources: what is guessed from what, by exit.
        networks: by what they guess.
        trained: those that have learned from some round, by what they guess.
        units: the root mean square change of a tensor in the last round where devices had it.
        shifts: all guesses of the kind are shifted by what those for a layer's owners lack in the mean.
    """

    def __init__(
        self,
        family: Family,
        params: HypeMeFedParams,
        weights: Weights,
        sources: Mapping[int, Mapping[str, Source]],
        reading_type: type[Reading],
        seed: int,
    ) -> None:
        self.family, self.params, self.sources, self._reading_type = family, params, sources, reading_type
        self.trained: set[str] = set()
        # Nobody changes what is frozen.
        read = {source for pairs in sources.values() for source in pairs.values()}
        self.units: dict[str, float] = dict.fromkeys(filter(family.is_frozen, read), 0.0)
        self.shifts = params.guess == "change"
        self.begin(weights)
        where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.networks: dict[str, LowRankHypernetwork] = {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for target, source in ((t, s) for exit in sources.values() for t, s in exit.items()):
                shapes = weights[source].shape, weights[target].shape
                network = LowRankHypernetwork(*shapes, params.rank, params.hidden, from_zero=params.guess == "change")
                self.networks[target] = network.to(where)

    def begin(self, weights: Weights) -> None:
        """Take these as the weights that devices are sent, and drop what was kept of the last round."""
        self._reading = self._reading_type(self.params.guess, weights, self.units)
        self._shortfalls: dict[str, Tensor] = {}  # by target, in units, in this round

    def learn(self, weights: Weights, uploads: Sequence[Upload], round_number: int) -> None:
        """Train the hypernetworks on what devices that have both sides made of the weights that they were sent."""
        self.begin(weights)
        self._measure(uploads)
        p = self.params
        for exit, pairs in self.sources.items():
            deep = reaching(exit, uploads)
            if not deep:
                continue  # nobody has both sides in this round: the hypernetworks stay as they are
            for target, source in pairs.items():
                network = self.networks[target]
                wanted = [self._reading.wanted(target, upload.tensors[target]) for upload in deep]
                samples = [(self._inputs(u, network, source), value) for u, value in zip(deep, wanted, strict=True)]
                before = {name: value.clone() for name, value in network.state_dict().items()}
                error = fit(network, samples, epochs=p.epochs, learning_rate=p.learning_rate)
                of_zeros = float(torch.stack([value.square().mean() for value in wanted]).mean())
                if not all(bool(torch.isfinite(value).all()) for value in network.state_dict().values()):
                    network.load_state_dict(before)
                    log.warning("Round %s: the hypernetwork of %s diverged and is as before", round_number, target)
                elif error > MAX_ERROR * of_zeros:
                    self.trained.discard(target)
                    text = "Round %s: the hypernetwork of %s errs %.1f times as much as zeros would, and is not asked"
                    log.warning(text, round_number, target, error / of_zeros if of_zeros else float("inf"))
                else:
                    self.trained.add(target)
                if self.shifts and target in self.trained:
                    self._shortfalls[target] = shortfall(network, samples, [upload.weight for upload in deep])

    def behind(self, upload: Upload) -> Weights:
        """Return what hypernetworks guess of the tensors behind a device's exit, as far as exits are ready."""
        guessed: Weights = {}
        for exit in range(upload.exit + 1, len(self.family.segments) + 1):
            if exit not in self.sources or not self.trained.issuperset(self.sources[exit]):
                break
            for target, source in self.sources[exit].items():
                network = self.networks[target]
                output = generate(network, self._inputs(upload, network, source)) + self._shortfalls.get(target, 0.0)
                upload.tensors[target] = guessed[target] = self._reading.guessed(target, output)
        return guessed

    def read(self, exit: int) -> set[str]:
        """Return the tensors up to an exit that hypernetworks read or guess."""
        if not self.sources:
            return set()
        first = {source for source in self.sources[2].values() if not self.family.is_frozen(source)}
        return first.union(*(self.sources[number] for number in range(2, exit + 1)))

    def _measure(self, uploads: Sequence[Upload]) -> None:
        """Take the units of changes from this round's devices; tensors that nobody changed keep theirs."""
        sent, values = self._reading.sent, defaultdict[str, list[Tensor]](list)
        for upload in uploads:
            for name, value in upload.tensors.items():
                values[name].append(value)
        for name, found in values.items():
            unit = unit_of_changes(sent[name], found)
            if unit or name not in self.units:
                self.units[name] = unit

    def _inputs(self, upload: Upload, network: LowRankHypernetwork, source: Source) -> Factors:
        """What a hypernetwork reads of a device's tensor; made once for all that read it."""
        if source not in upload.inputs:
            value = self._reading.sent[source] if self.family.is_frozen(source) else upload.tensors[source]
            upload.inputs[source] = self._reading.inputs(network, source, value)
        return upload.inputs[source]

    def add_to(self, state: State) -> None:
        """Add all that a resumed run needs to a state."""
        state.values |= {"trained": sorted(self.trained), "units": self.units}
        for target, network in self.networks.items():
            found = network.state_dict().items()
            state.tensors |= {f"hypernetwork/{target}/{name}": value.cpu() for name, value in found}

    def load(self, state: State, weights: Weights) -> None:
        """Restore what `add_to` added; ValueError where the hypernetworks are of another rank or family."""
        self.trained, self.units = set(state.values["trained"]), dict(state.values["units"])
        self.begin(weights)
        for target, network in self.networks.items():
            prefix = f"hypernetwork/{target}/"
            found = {n.removeprefix(prefix): v for n, v in state.tensors.items() if n.startswith(prefix)}
            with raised_as(ValueError, f"the checkpoint's hypernetwork of {target} is another one: ", RuntimeError):
                network.load_state_dict(found)


def reaching(exit: int, uploads: Sequence[Upload]) -> list[Upload]:
    """Return the uploads that reach an exit."""
    return [upload for upload in uploads if upload.exit >= exit]
