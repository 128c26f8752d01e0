"""HypeMeFed: one network with several exits; devices that cannot train its deep layers have them guessed."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from wildflower.messages.packing import Layout, MessageError
from wildflower.messages.sums import WeightedSum, flatten
from wildflower.messages.tensor_sets import TensorSet, Weights
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.network import Network
from wildflower.models.placement import Placement
from wildflower.strategies.hypemefed.layer_hypernetwork import (
    Factors,
    LowRankHypernetwork,
    Reading,
    fit,
    generate,
    shortfall,
    unit_of_changes,
)
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
from wildflower.strategies.params import Count, Params, PositiveRate
from wildflower.strategies.shared_losses import Loss, PureLoss
from wildflower.strategies.submodel import EARLY_EXITS, SubModelMethod, by_exit, require_exits
from wildflower.tasks.task import Task

log = logging.getLogger("flwr")  # what Flower's own log is called

MAX_ERROR = 2.0  # of a hypernetwork that is asked, relative to a guess of zeros; before it knows much it errs about 1

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


class HypeMeFedParams(Params):
    """HypeMeFed's settings."""

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


class HypeMeFed(SubModelMethod[HypeMeFedParams]):
    """W <- mean over devices, weighted by examples, of what they trained and, of some layers, of what is guessed.

    A device gets the network up to the deepest exit that it can afford. Layers behind its exit are guessed, one exit
    after the other, from its own and from guessed ones; the hypernetworks learn in every round from the devices that
    have both sides. All else is the mean over its owners. What hypernetworks read is held until the end of a round.

    A layer's change is taken in units of the root mean square change of the round's devices, so that hypernetworks see
    the same sizes whatever the learning rate, and go on from round to round. Hypernetworks are on the accelerator where
    there is one.
    """

    params_type: ClassVar[type[Params]] = HypeMeFedParams

    def __init__(self, setup: Setup, params: HypeMeFedParams) -> None:
        require_exits("hypemefed", setup.family)
        super().__init__(setup, params, by_exit(setup.family))
        self.sources = self.guessed_from()
        self.uploads: list[Upload] = []
        self.trained: set[str] = set()  # targets whose hypernetworks have learned from some round
        # The root mean square change of a tensor in the last round where devices had it. Nobody changes what is frozen.
        read = {source for pairs in self.sources.values() for source in pairs.values()}
        self.units: dict[str, float] = dict.fromkeys(filter(setup.family.is_frozen, read), 0.0)
        self._reading = self.read_round()
        # All guesses of the kind are shifted by what those for a layer's owners lack in the mean.
        self.shifts = params.guess == "change"
        self._shortfalls: dict[str, Tensor] = {}  # by target, in units, in this round
        where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.hypernetworks: dict[str, LowRankHypernetwork] = {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(setup.settings.seed)
            for target, source in ((t, s) for exit in self.sources.values() for t, s in exit.items()):
                shapes = self.weights[source].shape, self.weights[target].shape
                network = LowRankHypernetwork(*shapes, params.rank, params.hidden, from_zero=params.guess == "change")
                self.hypernetworks[target] = network.to(where)

    def guessed_from(self) -> dict[int, dict[str, Source]]:
        """Return what is guessed from what, by exit; what is frozen is the same on all devices, and need not be."""
        return {
            exit: {target: source for target, source in pairs.items() if not self.family.is_frozen(target)}
            for exit, pairs in follow(self.family, self.params.generate).items()
        }

    @classmethod
    def check(cls, params: HypeMeFedParams, *, both_models: bool) -> None:
        """A device that trains two models would count twice in the layers that are guessed."""
        if both_models:
            raise ValueError(
                "both-models = True: hypemefed would count a device that trains two models twice in the deep layers, "
                "with its own and with what it guesses for its smaller one: leave it false"
            )

    def client_step(self, order: Order) -> ClientStep:
        """The sum of the losses of all exits that the device has."""
        return SumOfExits()

    @override
    @classmethod
    def family_defaults(cls, params: HypeMeFedParams) -> dict[str, Any]:
        return EARLY_EXITS

    @override
    @classmethod
    def traits(cls, params: HypeMeFedParams) -> Traits:
        # Hypernetworks learn from every device's own tensors as well.
        return replace(super().traits(params), averages=False)

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
            self._measure()
            self._train()
        for upload in self.uploads:
            added = self.fill(upload)
            if added:
                try:
                    self._add(self.family.place(self.family.full()), added, upload.weight)
                except MessageError as error:  # a guess too large to be added up
                    text = "Round %s: what stands for the layers that device %s lacks is left out: %s"
                    log.warning(text, self.round, upload.device, error)
        self.uploads, self._shortfalls = [], {}
        metrics = super().finish_round(trained)
        self._reading = self.read_round()  # lets go of what devices were sent
        return metrics

    def _train(self) -> None:
        p = self.params
        for exit, pairs in self.sources.items():
            deep = self.deep(exit)
            if not deep:
                continue  # nobody has both sides in this round: the hypernetworks stay as they are
            for target, source in pairs.items():
                network = self.hypernetworks[target]
                wanted = [self._reading.wanted(target, upload.tensors[target]) for upload in deep]
                samples = [(self._inputs(u, network, source), value) for u, value in zip(deep, wanted, strict=True)]
                before = {name: value.clone() for name, value in network.state_dict().items()}
                error = fit(network, samples, epochs=p.epochs, learning_rate=p.learning_rate)
                of_zeros = float(torch.stack([value.square().mean() for value in wanted]).mean())
                if not all(bool(torch.isfinite(value).all()) for value in network.state_dict().values()):
                    network.load_state_dict(before)
                    log.warning("Round %s: the hypernetwork of %s diverged and is as before", self.round, target)
                elif error > MAX_ERROR * of_zeros:
                    self.trained.discard(target)
                    text = "Round %s: the hypernetwork of %s errs %.1f times as much as zeros would, and is not asked"
                    log.warning(text, self.round, target, error / of_zeros if of_zeros else float("inf"))
                else:
                    self.trained.add(target)
                if self.shifts and target in self.trained:
                    self._shortfalls[target] = shortfall(network, samples, [upload.weight for upload in deep])

    def deep(self, exit: int) -> list[Upload]:
        """Return the uploads of the round that reach an exit."""
        return [upload for upload in self.uploads if upload.exit >= exit]

    def _is_trained(self, exit: int) -> bool:
        return exit in self.sources and self.trained.issuperset(self.sources[exit])

    def fill(self, upload: Upload) -> Weights:
        """Return what stands for the tensors behind a device's exit.

        That is what hypernetworks guess of them, as far as exits are ready.
        """
        guessed: Weights = {}
        with self.stopwatch.timed("hypernetworks"):
            for exit in range(upload.exit + 1, len(self.family.segments) + 1):
                if not self._is_trained(exit):
                    break
                for target, source in self.sources[exit].items():
                    network = self.hypernetworks[target]
                    output = generate(network, self._inputs(upload, network, source))
                    output = output + self._shortfalls.get(target, 0.0)
                    upload.tensors[target] = guessed[target] = self._reading.guessed(target, output)
        return guessed

    def _measure(self) -> None:
        """Take the units of changes from this round's devices; tensors that nobody changed keep theirs."""
        values: dict[str, list[Tensor]] = defaultdict(list)
        for upload in self.uploads:
            for name, value in upload.tensors.items():
                values[name].append(value)
        for name, found in values.items():
            unit = unit_of_changes(self.weights[name], found)
            if unit or name not in self.units:
                self.units[name] = unit
        self._reading = self.read_round()

    def read_round(self) -> Reading:
        """Return how this round's tensors are read and guessed."""
        return Reading(self.params.guess, self.weights, self.units)

    def _inputs(self, upload: Upload, network: LowRankHypernetwork, source: Source) -> Factors:
        """What a hypernetwork reads of a device's tensor; made once for all that read it."""
        if source not in upload.inputs:
            value = self.weights[source] if self.family.is_frozen(source) else upload.tensors[source]
            upload.inputs[source] = self._reading.inputs(network, source, value)
        return upload.inputs[source]

    def _add(self, placement: Placement, weights: Mapping[str, Tensor], weight: int) -> None:
        """Add some tensors of one device to the running means."""
        layout = Layout.of(weights)
        total = WeightedSum.zeros(layout)
        total.add(flatten(weights, layout), weight, None, ())
        self.mean.add(placement, layout, total)

    def read(self, exit: int) -> set[str]:
        """Return the tensors up to an exit that hypernetworks read or guess."""
        if not self.sources:
            return set()
        first = {source for source in self.sources[2].values() if not self.family.is_frozen(source)}
        return first.union(*(self.sources[number] for number in range(2, exit + 1)))

    def state(self) -> State:
        """The global weights and the hypernetworks."""
        state = super().state()
        state.values |= {"trained": sorted(self.trained), "units": self.units}
        for target, network in self.hypernetworks.items():
            found = network.state_dict().items()
            state.tensors |= {f"hypernetwork/{target}/{name}": value.cpu() for name, value in found}
        return state

    def load(self, state: State) -> None:
        """Restore the global weights and the hypernetworks; ValueError where they are of another rank or family."""
        super().load(state)
        self.trained, self.units = set(state.values["trained"]), dict(state.values["units"])
        for target, network in self.hypernetworks.items():
            prefix = f"hypernetwork/{target}/"
            found = {n.removeprefix(prefix): v for n, v in state.tensors.items() if n.startswith(prefix)}
            try:
                network.load_state_dict(found)
            except RuntimeError as error:
                raise ValueError(f"the checkpoint's hypernetwork of {target} is another one: {error}") from None
