"""SPATL (Yu et al., SC 2022): a shared encoder of which devices return salient channels, and predictors that stay.

"SPATL: Salient Parameter Aggregation and Transfer Learning for Heterogeneous Federated Learning".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from typing_extensions import override

from wildflower.messages.error import MessageError
from wildflower.messages.orders import Merge
from wildflower.messages.packing import Layout
from wildflower.messages.sums import UNIT, WeightedSum, device_weight, flatten
from wildflower.messages.tensor_sets import TensorSet, TensorSets, Weights, parameters_of
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.layers import TensorSpec
from wildflower.models.network import Network
from wildflower.models.placement import Coordinates, Placement, Select
from wildflower.strategies.aggregation import CoordinateMean
from wildflower.strategies.channels import channel_norms, encoder_groups, encoder_of, numbers, strongest
from wildflower.strategies.method import (
    LEADING,
    Answer,
    ClientContext,
    Contribution,
    Group,
    Model,
    Order,
    Selection,
    Setup,
    Trained,
    Training,
    Traits,
)
from wildflower.strategies.one_architecture import OneArchitecture
from wildflower.strategies.params import Params
from wildflower.strategies.scaffold import mean_gradients
from wildflower.strategies.shared_losses import Regularizer
from wildflower.strategies.submodel import learned, zeros

# The client step ------------------------------------------------------------------------------------------------------


class SalientTraining(Training):
    """Devices minimize L = CE(p(e(x)), y) over the shared encoder e and a predictor p of their own.

    Steps in the encoder are corrected by control variates, as SCAFFOLD's. Of what was learned a device returns the
    channels whose filters have the largest L2 norms, the same share of every group. How many a squeeze of a gated
    block has follows from that block's inside.

    kept: that share of the channels.
    """

    kept: Annotated[float, Field(gt=0, le=1)]

    def salient(self, family: Family) -> Architecture:
        """The architecture of what is returned."""
        return family.width(self.kept)

    def sent(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        """The encoder, and the server's control variate."""
        encoder = encoder_of(family, architecture)
        return {"weights": TensorSet.of(encoder), "control": TensorSet.of(parameters_of(encoder))}

    def returned(self, family: Family, architecture: Architecture) -> dict[str, TensorSet]:
        """The salient channels of the encoder and of the change of the device's control variate, and which they are."""
        salient = self.salient(family)
        encoder = encoder_of(family, salient)
        channels = {
            group: TensorSpec((channels.kept,), torch.int32, (None,))
            for group, channels in encoder_groups(family, salient).items()
        }
        return {
            "weights": TensorSet.of(encoder, steady=False),
            "control_change": TensorSet.of(parameters_of(encoder), steady=False),
            "channels": TensorSet.of(channels),
        }

    def model(self, context: ClientContext) -> Network:
        """The encoder that was sent, and the device's predictor, a new one in its first round."""
        encoder = context.received["weights"]
        kept = context.kept("predictor")
        predictor = context.build().state_dict() if kept is None else kept
        names = context.family.tensors(context.architecture)
        return context.build({name: encoder[name] if name in encoder else predictor[name] for name in names})

    def train(self, context: ClientContext) -> Answer:
        """Train under the correction, renew the control variate where it is salient, and return what is salient."""
        model = self.model(context)
        c = {name: value.to(context.device) for name, value in context.received["control"].items()}
        x = {name: p.detach().clone() for name, p in model.named_parameters() if name in c}
        kept = context.kept("control") or {name: torch.zeros_like(value) for name, value in c.items()}
        c_i = {name: value.to(context.device) for name, value in kept.items()}
        drift = Regularizer(correction={name: c_i[name] - c[name] for name in c})
        loss = context.fit(model, self.loss(context, model), regularizer=drift)
        y = {name: value.detach().cpu() for name, value in model.state_dict().items()}
        gradients = mean_gradients(context, {name: value.cpu() for name, value in x.items()}, y)
        # A part whose learning rate is 0 says nothing of its gradient.
        moved = {n: gradients[n] - c[n].cpu() if n in gradients else torch.zeros_like(y[n]) for n in c}

        family = context.family
        select = strongest(channel_norms(family, y))
        placement = family.place(self.salient(family), select)
        parts = self.returned(family, context.architecture)
        layouts = {name: [entry.name for entry in part.layout.entries] for name, part in parts.items()}
        salient = placement.of(layouts["control_change"])
        change = salient.gather(moved)
        new = {name: value.cpu().clone() for name, value in c_i.items()}
        salient.add_to(new, change)
        context.keep("control", new)
        context.keep("predictor", {name: value for name, value in y.items() if name not in context.received["weights"]})
        channels = {
            group: numbers(select(group, found.full, found.kept), found.kept)
            for group, found in encoder_groups(family, self.salient(family)).items()
        }
        weights = placement.of(layouts["weights"]).gather(y)
        return Answer(model, {"weights": weights, "control_change": change, "channels": channels}, loss)


# The server half ------------------------------------------------------------------------------------------------------


class SpatlParams(Params):
    """SPATL's settings."""

    sparsity: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.3, description="Share of the encoder's channels that a device does not return"
    )


class Spatl(OneArchitecture[SpatlParams]):
    """x[j] <- x[j] + (mean over the devices that returned coordinate j of y_i[j] - x[j]); all others stay.

    c[j] <- c[j] + 1 / N sum over these devices of the change of c_i[j], N being all devices. Every device trains the
    whole network; predictors stay on devices.
    """

    # Control variates rely on its being the mean.
    fit_for: ClassVar[Traits] = replace(OneArchitecture.fit_for, averages=False, personal=True)
    returns_changes: ClassVar[bool] = True
    parameter_copies: ClassVar[int] = 5  # as in SCAFFOLD
    only_sgd: ClassVar[bool] = True

    def __init__(self, setup: Setup, params: SpatlParams) -> None:
        super().__init__(setup, params)
        names = encoder_of(self.family, self.architecture)
        self.weights = {name: self.weights[name] for name in names}
        predictor = setup.family.tensors(self.architecture).keys() - names.keys()
        if frozen := sorted(filter(setup.family.is_frozen, predictor)):
            raise ValueError(
                f"freeze: {frozen[0]} is of the predictor, which is the device's own: freeze the encoder only"
            )
        self.mean = CoordinateMean(self.weights)
        self.control = zeros(learned(self.weights))
        if not self.control:
            raise ValueError(f"spatl shares the layers before the last block, and {self.family.name} has none")
        channel_norms(
            self.family, {n: torch.zeros(s.shape) for n, s in self.family.tensors(self.family.full()).items()}
        )
        self.control_mean = CoordinateMean(self.control)
        self.scorers: list[tuple[int, Architecture, Selection]] = []  # the devices of the newest round

    def client_step(self, order: Order) -> SalientTraining:
        """Training under control variates; salient channels come back."""
        return SalientTraining(kept=1 - self.params.sparsity)

    def payload(self, group: Group) -> TensorSets:
        """The encoder and the control variate."""
        return {"weights": self.weights, "control": self.control}

    def absorb(self, contribution: Contribution) -> None:
        """Add what a device returned at the coordinates that it names; MessageError where they cannot be right."""
        salient = self.client_step(Order(0, self.architecture)).salient(self.family)
        placement = self._placement(salient, contribution.own("channels"))
        ready = []
        for name, mean, weighting in (
            ("weights", self.mean, "examples"),
            ("control_change", self.control_mean, "uniform"),
        ):
            layout: Layout = contribution.group.returned[name].layout
            total = WeightedSum.zeros(layout)
            weight = device_weight(Merge(weighting=weighting), contribution.examples)  # type: ignore[arg-type]
            total.add(flatten(contribution.own(name), layout), weight)
            mean.check(total)
            ready.append((mean, layout, total))
        for mean, layout, total in ready:
            mean.add(placement, layout, total)

    def _placement(self, salient: Architecture, channels: Weights) -> Placement:
        """Where a device's channels lie in the encoder."""
        groups = encoder_groups(self.family, salient)
        for group, found in channels.items():
            full = groups[group].full
            ascending = bool((found[1:] > found[:-1]).all())
            if not ascending or int(found[0]) < 0 or int(found[-1]) >= full:
                raise MessageError(f"channels of {group} must ascend within 0 to {full - 1}")

        def select(group: str, full: int, kept: int) -> Coordinates:
            return channels[group].to(torch.int64) if group in channels else slice(0, kept)

        chosen: Select = select
        return self.family.place(salient, chosen)

    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        """Index-aware averages; a round in which nobody answered changes nothing."""
        self.scorers = []
        if not trained:
            return {}
        old = self.weights
        mean = self.mean.mean(old)
        for name in self.control:
            mean[name] = old[name] + (mean[name] - old[name])
        self.weights = mean
        senders = {name: weight / UNIT for name, weight in self.control_mean.weight().items()}
        moved = self.control_mean.mean(zeros(self.control))
        devices = self.settings.devices
        self.control = {name: c + senders[name] / devices * moved[name] for name, c in self.control.items()}
        self.scorers = [(done.device, done.order.architecture, LEADING) for done in trained]
        untouched = sum(int((count == 0).sum()) for count in senders.values())
        return {"untouched_share": untouched / sum(count.numel() for count in senders.values())}

    def models(self, architectures: Collection[Architecture]) -> dict[Architecture, Model]:
        """None on the server, which has no predictor."""
        return {}

    def scored_on_devices(self) -> list[tuple[int, Architecture, Selection]]:
        """The round's devices score the new encoder with their own predictors."""
        return self.scorers

    @override
    def beside_weights(self) -> Mapping[str, Weights]:
        return {"control": self.control}
