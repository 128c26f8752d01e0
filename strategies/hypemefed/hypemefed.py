"""HypeMeFed: one network with several exits; devices that cannot train its deep layers have them guessed."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from wildflower.messages.packing import Layout, MessageError
from wildflower.messages.sums import WeightedSum, flatten
from wildflower.messages.tensor_sets import TensorSet, Weights
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.layers import Network
from wildflower.models.placement import Axis, Placement
from wildflower.strategies.hypemefed.layer_hypernetwork import (
    Inputs,
    LowRankHypernetwork,
    Reading,
    fit,
    generate,
    shortfall,
    unit_of_changes,
)
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
from wildflower.strategies.shared_losses import Loss
from wildflower.strategies.submodel import SubModelMethod, by_exit, require_exits

log = logging.getLogger("flwr")  # what Flower's own log is called

Source = str  # the tensor that a deeper one is guessed from
MAX_ERROR = 2.0  # of a hypernetwork that is asked, relative to a guess of zeros; before it knows much it errs about 1

# The client step ------------------------------------------------------------------------------------------------------


class SumOfExits(Training):
    """L = sum_i CE(f_i(x), y) over all exits i of the device, without weights; or its deepest exit's CE alone.

    Hypernetworks need every device's weights by themselves, so that nobody adds them up.
    """

    all_exits: bool

    def returned(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        """All tensors of the sub-model, not merged."""
        return {"weights": TensorSet.of(family.tensors(architecture))}

    def loss(self, context: ClientContext, model: Network) -> Loss:
        """The sum over exits, or the deepest."""
        if not self.all_exits:
            return super().loss(context, model)

        def loss(inputs: Tensor, labels: Tensor) -> Tensor:
            return torch.stack([context.task.loss(logits, labels) for logits in model.exits(inputs)]).sum()

        return loss


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
    sent_bases: bool = Field(
        False,
        description="Whether guesses of weights read a device's weight in the singular bases of the weight that it was "
        "sent, and not in its own (the paper); guesses of changes always do",
    )
    shift: bool = Field(
        False,
        description="Whether all guesses of weights are shifted by what those for the layer's owners lack in the mean; "
        "guesses of changes always are",
    )
    fill: Literal["hypernetwork", "owners", "stale", "ema"] = Field(
        "hypernetwork",
        description="What stands for layers behind a device's exit: hypernetwork, owners (nothing), stale (the global "
        "weights of the round before), or ema (a moving average of the owners' means)",
    )
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.9, description="Weight of the rounds before in the moving average of fill = 'ema'"
    )
    generate: Literal["layers", "all"] = Field(
        "layers",
        description="What is guessed: weights of convolutions and linear layers between the exits, or all: biases, "
        "norms and heads too",
    )
    exits: bool = Field(True, description="Whether devices train all of their exits; false: their deepest one")


@dataclass
class Upload:
    """What is kept of a device's update until the end of the round: all that hypernetworks read or guess."""

    device: int
    exit: int
    weight: int
    tensors: Weights
    inputs: dict[Source, Inputs] = field(default_factory=dict)  # what hypernetworks read of its tensors


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
        if params.fill in ("hypernetwork", "ema") and params.generate == "all" and not params.exits:
            raise ValueError(
                "hypemefed.generate = 'all' guesses a head from the one before it, which only devices that train all "
                "of their exits have: set hypemefed.exits = true, or hypemefed.generate = 'layers'"
            )
        super().__init__(setup, params, by_exit(setup.family))
        found = follow(setup.family, params.generate) if params.fill in ("hypernetwork", "ema") else {}
        # Frozen tensors are the same on all devices, so that they need not be guessed.
        guessed = {
            exit: {target: source for target, source in pairs.items() if not setup.family.is_frozen(target)}
            for exit, pairs in found.items()
        }
        self.sources = guessed if params.fill == "hypernetwork" else {}
        # Of every exit the tensors of which averages are kept: those that hypernetworks would guess.
        self.averaged = {exit: list(pairs) for exit, pairs in guessed.items()} if params.fill == "ema" else {}
        self.averages_of_owners = {name: self.weights[name] for names in self.averaged.values() for name in names}
        self.uploads: list[Upload] = []
        self.trained: set[str] = set()  # targets whose hypernetworks have learned from some round
        # The root mean square change of a tensor in the last round where devices had it. Nobody changes what is frozen.
        read = {source for pairs in self.sources.values() for source in pairs.values()}
        self.units: dict[str, float] = dict.fromkeys(filter(setup.family.is_frozen, read), 0.0)
        self._reading = self._read_round()
        self._shortfalls: dict[str, Tensor] = {}  # by target, in units, in this round
        where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.hypernetworks: dict[str, LowRankHypernetwork] = {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(setup.settings.seed)
            for target, source in ((t, s) for exit in self.sources.values() for t, s in exit.items()):
                shapes = self.weights[source].shape, self.weights[target].shape
                network = LowRankHypernetwork(*shapes, params.rank, params.hidden, from_zero=params.guess == "change")
                self.hypernetworks[target] = network.to(where)

    @classmethod
    def check(cls, params: HypeMeFedParams, *, both_models: bool) -> None:
        """A device that trains two models would count twice in the layers that are guessed."""
        if both_models and params.fill != "owners":
            raise ValueError(
                "both-models = True: hypemefed would count a device that trains two models twice in the deep layers, "
                f"with its own and with what hypemefed.fill = {params.fill!r} adds for its smaller one: false, or set "
                "that to 'owners'"
            )

    def client_step(self, order: Order) -> ClientStep:
        """The sum of the losses of all exits that the device has."""
        return SumOfExits(all_exits=self.params.exits)

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
        untrained = () if self.params.exits else tuple(f"{head}." for head in list(self.family.segments)[: exit - 1])
        trained = {name: value for name, value in weights.items() if not name.startswith(untrained)}
        self._add(contribution.group.placement, trained, contribution.examples)
        # Copies: the tensors of an update are views of the whole of it.
        tensors = {name: trained[name].clone() for name in self._read(exit)}
        self.uploads.append(Upload(contribution.devices[0], exit, contribution.examples, tensors))

    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        """Train the hypernetworks, guess what is missing, and average."""
        self.uploads.sort(key=lambda upload: upload.device)  # training depends on the order, and replies come in any
        with self.stopwatch.timed("hypernetworks"):
            self._measure()
            self._train()
        self._average_owners()
        fill = {"stale": self._stale, "ema": self._past_owners}.get(self.params.fill, self._guess)
        for upload in self.uploads:
            added = fill(upload)
            if added:
                try:
                    self._add(self.family.place(self.family.full()), added, upload.weight)
                except MessageError as error:  # a guess too large to be added up
                    text = "Round %s: what stands for the layers that device %s lacks is left out: %s"
                    log.warning(text, self.round, upload.device, error)
        self.uploads, self._shortfalls = [], {}
        metrics = super().finish_round(trained)
        self._reading = self._read_round()  # lets go of what devices were sent
        return metrics

    def _train(self) -> None:
        p = self.params
        for exit, pairs in self.sources.items():
            deep = self._deep(exit)
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
                if (p.shift or p.guess == "change") and target in self.trained:
                    self._shortfalls[target] = shortfall(network, samples, [upload.weight for upload in deep])

    def _deep(self, exit: int) -> list[Upload]:
        """The uploads of the round that reach an exit."""
        return [upload for upload in self.uploads if upload.exit >= exit]

    def _is_trained(self, exit: int) -> bool:
        return exit in self.sources and self.trained.issuperset(self.sources[exit])

    def _stale(self, upload: Upload) -> Weights:
        """The global weights of all tensors that a device has not."""
        theirs = self.family.tensors(self.family.up_to(upload.exit))
        return {n: value for n, value in self.weights.items() if n not in theirs and not self.family.is_frozen(n)}

    def _average_owners(self) -> None:
        """A <- decay A + (1 - decay) times the owners' mean of the round, by examples; kept where nobody owns a layer.

        A hypernetwork that has learned its owners' weights by heart is a memory of past ones. This is such a memory,
        and knows nothing of the device that it stands in for.
        """
        decay = self.params.ema_decay
        for exit, names in self.averaged.items():
            deep = self._deep(exit)
            total = sum(upload.weight for upload in deep)
            for name in names if total else ():
                mean = sum((upload.tensors[name] * (upload.weight / total) for upload in deep), torch.zeros(()))
                self.averages_of_owners[name] = decay * self.averages_of_owners[name] + (1 - decay) * mean

    def _past_owners(self, upload: Upload) -> Weights:
        """The moving averages of all that hypernetworks would guess for a device."""
        behind = (names for exit, names in self.averaged.items() if exit > upload.exit)
        return {name: self.averages_of_owners[name] for names in behind for name in names}

    def _guess(self, upload: Upload) -> Weights:
        """What the hypernetworks guess of the tensors behind a device's exit, as far as exits are ready."""
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
        self._reading = self._read_round()

    def _read_round(self) -> Reading:
        return Reading(self.params.guess, self.weights, self.units, self.params.sent_bases)

    def _inputs(self, upload: Upload, network: LowRankHypernetwork, source: Source) -> Inputs:
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

    def _read(self, exit: int) -> set[str]:
        """The tensors up to an exit that hypernetworks read or guess, or of which averages are kept."""
        if not self.sources:
            return {name for number, names in self.averaged.items() if number <= exit for name in names}
        first = {source for source in self.sources[2].values() if not self.family.is_frozen(source)}
        return first.union(*(self.sources[number] for number in range(2, exit + 1)))

    def state(self) -> State:
        """The global weights, the hypernetworks and the averages of owners."""
        state = super().state()
        state.tensors |= {f"owners/{name}": value for name, value in self.averages_of_owners.items()}
        state.values |= {"trained": sorted(self.trained), "units": self.units}
        for target, network in self.hypernetworks.items():
            found = network.state_dict().items()
            state.tensors |= {f"hypernetwork/{target}/{name}": value.cpu() for name, value in found}
        return state

    def load(self, state: State) -> None:
        """Restore the global weights and the hypernetworks; ValueError where they are of another rank or family."""
        super().load(state)
        self.trained, self.units = set(state.values["trained"]), dict(state.values["units"])
        averages = {name: state.tensors.get(f"owners/{name}") for name in self.averages_of_owners}
        for name, value in averages.items():
            if value is None or value.shape != self.weights[name].shape:
                raise ValueError(f"the checkpoint has no average of {name}")
            self.averages_of_owners[name] = value
        for target, network in self.hypernetworks.items():
            prefix = f"hypernetwork/{target}/"
            found = {n.removeprefix(prefix): v for n, v in state.tensors.items() if n.startswith(prefix)}
            try:
                network.load_state_dict(found)
            except RuntimeError as error:
                raise ValueError(f"the checkpoint's hypernetwork of {target} is another one: {error}") from None


def follow(family: Family, generate: Literal["layers", "all"] = "layers") -> dict[int, dict[str, Source]]:
    """Which tensor each one behind the first exit is guessed from: exit -> {target: source}, of all that is guessed.

    Layers are the weights of convolutions and linear layers whose outputs are one of a segment's groups, but for those
    inside heads; "all" are also their biases, the norms' scales and shifts, and the segment's head. Running statistics
    are measured and never guessed. A target's source is the one of the same name in the segment before (conv1 of block
    2 from conv1 of block 1). Of several those nearest to the exit go together, and so on towards the front: where the
    first exit comes behind blocks 0 and 1, block 2 follows block 1. Where there is none of that name, a target's source
    is the segment's last of the same kind, else its last layer.

    Raises:
        ValueError: a segment has no layer.
    """
    specs = family.tensors(family.full())
    parameters = [name for name, _ in family.without_memory(family.full()).named_parameters()]

    def of_head(name: str) -> bool:
        return name.startswith(tuple(f"{head}." for head in family.segments))

    def kind_of(name: str) -> tuple[bool, int, str]:
        """Whether it is a head's, of how many dimensions, and a weight or a bias: a norm's scale is no shift."""
        return of_head(name), len(specs[name].shape), name.rpartition(".")[2]

    segments: list[tuple[list[str], list[str]]] = []  # layers, and all that is generated
    for head, groups in family.segments.items():
        axes = {name: specs[name].axes[0] for name in parameters if not of_head(name)}
        inside = [name for name, axis in axes.items() if isinstance(axis, Axis) and axis.group in groups]
        layers = [name for name in inside if len(specs[name].shape) >= 2]
        if not layers:
            raise ValueError(
                f"hypemefed has nothing to guess in front of {head}: {family.name} has no convolution and no linear "
                "layer between this exit and the one before (or the input); choose other exits in family-arguments"
            )
        own = [name for name in parameters if name.startswith(f"{head}.")]
        segments.append((layers, [*inside, *own] if generate == "all" else layers))
    found: dict[int, dict[str, Source]] = {}
    for exit, ((layers, before), (_, here)) in enumerate(pairwise(segments), start=2):
        found[exit] = {}
        by_name: dict[str, list[str]] = defaultdict(list)
        for name in before:
            by_name[name.partition(".")[2]].append(name)
        for target in reversed(here):
            path, kind = target.partition(".")[2], kind_of(target)
            if path in by_name:
                same = by_name[path]
                found[exit][target] = same.pop() if len(same) > 1 else same[0]
            else:
                alike = [name for name in before if kind_of(name) == kind]
                found[exit][target] = (alike or layers)[-1]
        found[exit] = {target: found[exit][target] for target in here}
    return found
