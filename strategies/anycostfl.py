"""AnycostFL (Li et al., INFOCOM 2023): every device trains the channels that are strongest in the current global model.

Their "elastic model shrinking" sorts a layer's channels by the L2 norm of their filters and keeps the first. Channels
that must stay together, such as those of a residual stream, are sorted together here: see `channel_norms`.

Their "flexible gradient compression" returns an update in a share of its bytes
(`wildflower.strategies.update_compression`), and their "all-in-one aggregation" averages every element over the devices
that returned it. The paper's text was not at hand when these were written, so that they follow what is known of it.
Where that leaves something open, "Reading:" says what is built.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from wildflower.messages.packing import Layout
from wildflower.messages.sums import WeightedSum, flatten, new_bound, split
from wildflower.messages.tensor_sets import STATISTICS, TensorSet
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.cost import Cost
from wildflower.models.layers import TensorSpec
from wildflower.models.placement import Placement
from wildflower.strategies.aggregation import CoordinateMean
from wildflower.strategies.channels import channel_norms, strongest
from wildflower.strategies.method import (
    Answer,
    ClientContext,
    ClientStep,
    Contribution,
    Order,
    Selection,
    Setup,
    State,
    Trained,
    Training,
    Traits,
)
from wildflower.strategies.params import Params
from wildflower.strategies.pricing import with_parameter_copies
from wildflower.strategies.static_norm import StaticNormMethod
from wildflower.strategies.update_compression import code_of

# The client step ------------------------------------------------------------------------------------------------------


class CompressedTraining(Training):
    """Devices minimize the task's loss, such as L = CE(f(x), y), and return their update u = w received - w trained.

    It is compressed to the share `beta` of its bytes (`Code`).
    """

    beta: Annotated[float, Field(gt=0, lt=1)]

    def returned(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        """The bytes of the compressed update, which no wire rounds, and no node adds up."""
        size = code_of(family, architecture, self.beta).nbytes
        return {"update": TensorSet.of({"code": TensorSpec((size,), torch.uint8, (None,))}, steady=False)}

    def train(self, context: ClientContext) -> Answer:
        """Train, and compress what that has changed, by chance that the order seeds."""
        code = code_of(context.family, context.architecture, self.beta)
        names = [entry.name for entry in code.layout.entries]
        update = {name: context.received["weights"][name].clone() for name in names}  # training changes `received`
        model = self.model(context)
        loss = context.fit(model, self.loss(context, model))
        trained = model.state_dict()
        for name, value in update.items():
            value.sub_(trained[name].cpu())
        generator = torch.Generator().manual_seed(context.chance.getrandbits(63))
        return Answer(model, {"update": {"code": code.write(update, generator)}}, loss)


# The server half ------------------------------------------------------------------------------------------------------

# Into how many parts the weight of an example is divided, because weights of sums are whole numbers. A round's examples
# times the largest weight of the model may then come to 2^26, beyond which sums are refused.
PARTS = 256
COPIES = 2  # of the parameters: the update, and its elements that are kept


class AnycostFLParams(Params):
    """AnycostFL's settings."""

    beta: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="Share of the bytes of its update that a device returns; 1: it returns its weights in full"
    )


class ElementMean(CoordinateMean):
    """The mean of every coordinate over devices that each returned some elements of what they trained."""

    def add_some(self, placement: Placement, layout: Layout, added: WeightedSum, kept: Mapping[str, Tensor]) -> None:
        """Add what one device says of its elements that are `kept`; of the others it says nothing.

        Raises MessageError, and changes nothing, where the total could overflow.
        """
        self._bound = new_bound(self._bound, added.largest)
        placement = placement.of(entry.name for entry in layout.entries)
        for sums in (self._totals, self._counts):
            self._begin(sums, placement.coordinates)
        totals = split(added.total, layout)
        placement.add_to(self._totals, {name: totals[name] * mask for name, mask in kept.items()})
        placement.add_to(self._counts, {name: mask * added.weight for name, mask in kept.items()})


class AnycostFL(StaticNormMethod[AnycostFLParams]):
    """The k channels of largest norm of every group; w <- mean over the owners of a coordinate, weighted by examples.

    The selection follows from the global weights alone: all devices of a round share it, and so does a resumed run.
    Devices minimize the task's loss (`wildflower.strategies.method.Training`).

    With beta below 1 devices return compressed updates (`CompressedTraining`), and the mean is the paper's "all-in-one
    aggregation", element by element: w[j] <- w[j] - sum_i p_i u_i[j] / sum_i p_i over the devices i that returned
    element j; what nobody returned keeps its value. Reading: a kernel that a device dropped is no vote of 0 of that
    device, but none. Reading: the paper's p_i is larger where the compressed update is nearer to the full one, by a
    coefficient that is not known to us; here p_i = examples_i / (1 + e_i), e_i being the squared error of device i's
    compression in parts of its update's squared norm. A device that compresses without loss counts in full, and one
    that loses as much as it has counts half.
    """

    params_type: ClassVar[type[Params]] = AnycostFLParams

    def __init__(self, setup: Setup, params: AnycostFLParams) -> None:
        super().__init__(setup, params)
        self._strongest: Selection | None = None  # of the current weights
        self._errors: list[float] = []  # of the round's compressed updates
        self._shares: list[float] = []
        if params.beta < 1:
            self._check_compression(params.beta, setup.settings.norm_bound)
            self.mean = ElementMean(self.weights)

    def _check_compression(self, beta: float, norm_bound: float) -> None:
        """ValueError where updates cannot be compressed that far, or with these settings."""
        key = f"anycostfl.beta = {beta:g}"
        if norm_bound:
            raise ValueError(
                f"aggregation.norm-bound = {norm_bound:g}: it bounds how far weights move, and with {key} devices "
                "return compressed updates: set aggregation.norm-bound = 0, or anycostfl.beta = 1"
            )
        if any(name.endswith(STATISTICS) for name in self.weights):
            raise ValueError(
                f"{key}: batch norm's running statistics cannot be compressed, because a variance could fall below 0: "
                "set anycostfl.beta = 1"
            )
        codes = [(code_of(self.family, architecture, beta), architecture) for architecture in self.candidates]
        short = [(code, architecture) for code, architecture in codes if code.allowed_bytes < code.least_bytes]
        if short:
            code, architecture = max(short, key=lambda one: one[0].least_bytes / one[0].layout.nbytes)
            least = math.ceil(1000 * code.least_bytes / code.layout.nbytes) / 1000
            raise ValueError(
                f"{key} leaves {code.allowed_bytes} of the {code.layout.nbytes} bytes of an update of "
                f"{self.describe(architecture)}, and it takes {code.least_bytes} to say which kernels are kept and to "
                f"hold the largest one: set anycostfl.beta to {least:g} or more, or to 1"
            )

    @override
    @classmethod
    def traits(cls, params: AnycostFLParams) -> Traits:
        # Of compressed updates every device has elements of its own, which nothing can add up.
        return replace(super().traits(params), averages=params.beta == 1)

    def client_step(self, order: Order) -> ClientStep:
        """Plain training; the weights come back, averaged by examples, or the update, compressed."""
        beta = self.params.beta
        return CompressedTraining(beta=beta) if beta < 1 else Training()

    def training_cost(self, architecture: Architecture) -> Cost:
        """Plain training, with compression beside the update."""
        price = super().training_cost(architecture)
        return with_parameter_copies(price, COPIES) if self.params.beta < 1 else price

    def selection(self, device: int, architecture: Architecture) -> Selection:
        """The strongest channels of the global model as the round found it."""
        if self._strongest is None:
            select = strongest(channel_norms(self.family, self.weights))
            self._strongest = Selection(lambda _: select)
        return self._strongest

    def scored_selection(self, architecture: Architecture) -> Selection:
        """A tier's sub-model has the strongest channels of the global model as it is now."""
        return self.selection(0, architecture)

    def absorb(self, contribution: Contribution) -> None:
        """Add weights to the running sums, or what a compressed update says of the weights that it keeps."""
        if self.params.beta == 1:
            super().absorb(contribution)
            return
        group, code = contribution.group, code_of(self.family, contribution.group.architecture, self.params.beta)
        found = code.read(contribution.own("update")["code"])
        start = group.placement.gather(self.weights)
        values = {name: start[name] - update for name, update in found.values.items()}
        total = WeightedSum.zeros(code.layout)
        total.add(flatten(values, code.layout), self.coefficient(contribution.examples, found.error))
        assert isinstance(self.mean, ElementMean)
        self.mean.add_some(group.placement, code.layout, total, found.kept)
        self._errors.append(found.error)
        self._shares.append(found.share)

    def coefficient(self, examples: int, error: float) -> int:
        """Return the weight of a device's compressed update, in parts of an example; never 0, which no sum takes."""
        return max(1, round(PARTS * examples / (1 + error)))

    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        """As in HeteroFL; then other channels may be the strongest."""
        self._strongest = None
        metrics = dict(super().finish_round(trained))
        self._strongest = None
        if self._errors:  # `fsum` gives the same bits in any order
            metrics["compression_error"] = math.fsum(self._errors) / len(self._errors)
            metrics["kept_share"] = math.fsum(self._shares) / len(self._shares)
        self._errors, self._shares = [], []
        return metrics

    def load(self, state: State) -> None:
        """Restore the global weights, and with them the selection."""
        super().load(state)
        self._strongest = None
