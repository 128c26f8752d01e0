"""RaFL's two networks: the knowledge network, which travels, and what a device with a personal model beside it pays.

The knowledge network is small, the same on all devices, and the only one that travels in every round.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import fields, replace
from fractions import Fraction

from torch import Tensor

from wildflower.devices.budget import Budget
from wildflower.messages.packing import Layout
from wildflower.messages.sums import WeightedSum, flatten, mean_of
from wildflower.messages.tensor_sets import Weights
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.cost import Cost, cost
from wildflower.models.elastic import ElasticSpace
from wildflower.models.family import family_class, make_family
from wildflower.models.space import Space
from wildflower.models.weights import with_weights
from wildflower.plugins.raised_as import raised_as
from wildflower.strategies.ensemble import Ensemble, Teachers, require_public, teach
from wildflower.strategies.method import Contribution, Setup
from wildflower.strategies.pricing import in_floats, tensor_set_bytes
from wildflower.strategies.rafl.mutual_learning import MutualLearning
from wildflower.strategies.rafl.rafl_params import RaFLParams
from wildflower.strategies.run_settings import RoundSettings
from wildflower.strategies.submodel import initial_weights


class KnowledgeNetwork:
    """The knowledge network k, and how it is fused from those that devices return (Eqs. 7 to 9).

    Attributes:
        own_family: its own family; None where it is cut out of the supernet.
        family, architecture: what it is.
        weights: theta^k.
        cut: it lies in trained weights and has their batch norm statistics, until devices have calibrated it.
        teachers: what devices' networks say of the public data; None without ensemble distillation.
    """

    def __init__(
        self, setup: Setup, params: RaFLParams, space: Space | ElasticSpace, supernet: Weights, *, given: bool
    ) -> None:
        self.own_family = own_family(setup.family, params)
        self.family = self.own_family or setup.family
        width = params.knowledge_width
        if self.own_family is not None:
            self.architecture = self.own_family.width(width or 1.0)
        else:
            self.architecture = setup.family.width(width) if width else space.smallest()
        first = supernet if self.own_family is None else initial_weights(self.own_family, setup.settings.seed)
        self.weights: Weights = self.family.place(self.architecture).gather(first)
        self.cut = given and self.own_family is None
        self.layout = Layout.of(self.family.tensors(self.architecture))
        self.total = WeightedSum.zeros(self.layout)
        found = setup.shared["ensemble"]
        assert isinstance(found, Ensemble)
        self.ensemble = found
        self.teachers: Teachers | None = None
        if params.fusion == "ensemble":
            public = require_public("rafl.fusion = 'ensemble'", setup.public)
            self.teachers = Teachers(public, setup.family.classes)

    def add(self, contribution: Contribution) -> None:
        """Add devices' networks, weighted by examples; under ensemble distillation also what they say."""
        if self.teachers is None:
            self.total.include(contribution.sum_of("weights"))
            return
        weights = contribution.own("weights")
        flat = flatten(weights, self.layout)
        self.total.check(flat, contribution.examples)
        self.teachers.add(with_weights(self.family, self.architecture, weights))
        self.total.add(flat, contribution.examples)

    def average(self) -> None:
        """theta^k <- the mean of what devices returned (Eq. 7); as it was where nobody did."""
        if self.total.weight:
            self.weights = mean_of(self.total, self.layout, self.weights)
            self.total = WeightedSum.zeros(self.layout)
            self.cut = False  # its statistics are now the mean of those that devices took

    def distill(self, teachers: Teachers, seed: int, layout: str) -> dict[str, float | None]:
        """Go on from the mean to what the devices' networks say together (Eqs. 8 and 9); return figures."""
        said = teachers.take_mean()
        self.weights, figures = teach(
            self.family, self.architecture, self.weights, said, teachers.public, self.ensemble, seed, layout
        )
        return figures

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the weights; ValueError where they are of another knowledge network."""
        if {n: v.shape for n, v in tensors.items()} != {n: v.shape for n, v in self.weights.items()}:
            raise ValueError("the checkpoint's knowledge network is another than the configuration's")
        self.weights = {name: tensors[name] for name in self.weights}


def own_family(supernet: Family, params: RaFLParams) -> Family | None:
    """Return the knowledge network's own family, which reads what the supernet reads.

    None where it is cut out of the supernet. ValueError where it cannot be made.
    """
    with raised_as(ValueError, f"rafl.knowledge-family = {params.knowledge_family!r}: "):
        return _family_of(params.knowledge_family, supernet) if params.knowledge_family else None


def _family_of(text: str, supernet: Family) -> Family:
    name, _, inside = map(str.strip, text.partition(","))
    with raised_as(ValueError, 'must be like "resnet18, first_channels = 16": ', tomllib.TOMLDecodeError):
        arguments = tomllib.loads(f"arguments = {{{inside}}}")["arguments"]
    known = {field.name for field in fields(family_class(name))}
    norm = {"norm": "batch"} if "norm" in known else {}  # not every family has a kind of norm to choose
    fixed = {"input_shape": list(supernet.input_shape), "classes": supernet.classes, **norm}
    if given := sorted(arguments.keys() & {*fixed, "name", "freeze"}):
        raise ValueError(
            f"{', '.join(given)} cannot be chosen, because the knowledge network reads and predicts what personal "
            "models do, has batch norm, and is trained whole, and its family's name comes first: leave out what is "
            "named here"
        )
    family = make_family({"name": name, **arguments, **fixed})
    if family.input_dtype != supernet.input_dtype:
        raise ValueError(f"it reads other inputs than {supernet.name}")
    answered, wanted = (len(each.answer(each.full(), 2)) for each in (family, supernet))
    if answered != wanted:
        raise ValueError(
            f"it answers for an input as a whole, and {supernet.name} for every token: leave rafl.knowledge-family "
            "out, so that the knowledge network is cut out of the supernet"
        )
    return family


class TwoNetworks:
    """The work and the prices of a device with both networks.

    given: personal models lie in trained weights, and need batch norm statistics of their own at first.
    """

    def __init__(
        self,
        family: Family,
        space: Space | ElasticSpace,
        knowledge: KnowledgeNetwork,
        params: RaFLParams,
        settings: RoundSettings,
        *,
        given: bool,
    ) -> None:
        self.family, self.space, self.knowledge = family, space, knowledge
        self.params, self.settings, self.given = params, settings, given

    def client_step(self, *, first: bool) -> MutualLearning:
        """Mutual learning; first: the device has no such personal model yet."""
        own = self.knowledge.own_family
        return MutualLearning(
            knowledge_family="" if own is None else json.dumps(own.spec(), sort_keys=True),
            knowledge=json.dumps(self.knowledge.architecture.to_json()),
            first=first,
            drawn=self.params.first == "drawn",
            calibrates=first and self.given,
            calibrates_knowledge=self.knowledge.cut,
            merged=self.params.fusion == "average",
        )

    def personal_cost(self, architecture: Architecture) -> Cost:
        """Return what training a personal model by itself costs."""
        return self._plain(self.family, architecture)

    @property
    def knowledge_cost(self) -> Cost:
        """Return what training the knowledge network by itself costs."""
        return self._plain(self.knowledge.family, self.knowledge.architecture)

    def _plain(self, family: Family, architecture: Architecture) -> Cost:
        training = self.settings.training
        return cost(family, architecture, batch_size=training.examples_at_once, optimizer=self.settings.optimizer)

    def training_cost(self, architecture: Architecture) -> Cost:
        """Both networks in one step: the sum of what training each by itself takes."""
        personal, knowledge = self.personal_cost(architecture), self.knowledge_cost
        return replace(
            personal,
            peak_training_memory_bytes=personal.peak_training_memory_bytes + knowledge.peak_training_memory_bytes,
            training_flops=personal.training_flops + knowledge.training_flops,
        )

    def price(self, architecture: Architecture, *, first: bool) -> Cost:
        """Return what an order costs; at a first contact the personal model travels too, unless the device draws it."""
        step = self.client_step(first=first)
        down, up = tensor_set_bytes(step, self.family, architecture, self.settings.wire)
        personal, knowledge = self._passes(first=first)
        flops = int(self.personal_cost(architecture).training_flops * personal)
        flops += int(self.knowledge_cost.training_flops * knowledge)
        return replace(self.training_cost(architecture), download_bytes=down, upload_bytes=up, training_flops=flops)

    def _passes(self, *, first: bool) -> tuple[Fraction, Fraction]:
        """What the personal model and the knowledge network compute in a round, by what training them takes.

        A pass that calibrates is a forward one, a third of training. It sees every example of the device once. Under
        local steps, where nobody says here how many a device has, it counts as if the steps saw as many.
        """
        training = self.settings.training
        calibration = Fraction(1, 3 * (1 if training.steps else training.epochs))
        return 1 + (first and self.given) * calibration, 1 + self.knowledge.cut * calibration

    def left_for_personal(self, budget: Budget) -> Budget | None:
        """Return what the knowledge network leaves of a budget, with payloads as 32-bit floats; None: nothing."""
        step, passes = self.client_step(first=True), self._passes(first=True)
        ends = (self.space.smallest(), self.space.largest())
        budget = in_floats(budget, step, self.family, ends, self.settings)
        knowledge = self.knowledge_cost
        memory_bytes = budget.memory_bytes - knowledge.peak_training_memory_bytes
        if memory_bytes <= 0 or not budget.can_travel(knowledge.download_bytes, knowledge.upload_bytes):
            return None
        seconds = budget.round_seconds
        if seconds is not None:
            flops = float(knowledge.training_flops * passes[1])
            seconds -= budget.seconds(knowledge.download_bytes, knowledge.upload_bytes, flops)
            if seconds <= 0:
                return None
        # A personal model travels to its device and never back, and one that the device draws does not travel at all.
        left = replace(budget, memory_bytes=memory_bytes, upload_bytes=None, round_seconds=seconds)
        left = replace(left, seconds_per_byte_up=0.0, seconds_per_flop=float(left.seconds_per_flop * passes[0]))
        if self.params.first == "drawn":
            left = replace(left, download_bytes=None, seconds_per_byte_down=0.0)
        elif left.download_bytes is not None:
            left = replace(left, download_bytes=left.download_bytes - knowledge.download_bytes)
        return left
