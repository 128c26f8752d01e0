"""RaFL's knowledge network: small, the same on all devices, and the only network that travels in every round."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from functools import cached_property

from torch import Tensor

from wildflower.messages.packing import Layout
from wildflower.messages.sums import WeightedSum, flatten, mean_of
from wildflower.messages.tensor_sets import STATISTICS, Weights
from wildflower.models.base import Family
from wildflower.models.elastic import ElasticSpace
from wildflower.models.family import family_class, make_family
from wildflower.models.space import Space
from wildflower.models.weights import with_weights
from wildflower.strategies.ensemble import Ensemble, Teachers, require_public, teach
from wildflower.strategies.method import Contribution, Setup
from wildflower.strategies.rafl.rafl_params import RaFLParams
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
            public = require_public("rafl.fusion = 'ensemble'", setup.public, self.ensemble)
            self.teachers = Teachers(public, setup.family.classes)

    @cached_property
    def own_family_json(self) -> str:
        """Its own family as it travels; "" where it is the supernet's."""
        return "" if self.own_family is None else json.dumps(self.own_family.spec(), sort_keys=True)

    @cached_property
    def architecture_json(self) -> str:
        """Its architecture as it travels."""
        return json.dumps(self.architecture.to_json())

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


def has_statistics(family: Family) -> bool:
    """Return whether networks of a family have running statistics, which a cut of trained weights needs anew."""
    return any(name.endswith(STATISTICS) for name in family.tensors(family.full()))


def own_family(supernet: Family, params: RaFLParams) -> Family | None:
    """Return the knowledge network's own family, which reads what the supernet reads.

    None where it is cut out of the supernet. ValueError where it cannot be made.
    """
    if not params.knowledge_family:
        return None
    where = f"rafl.knowledge-family = {params.knowledge_family!r}, rafl.knowledge-arguments = "
    where += repr(params.knowledge_arguments)
    try:
        arguments = tomllib.loads(f"arguments = {{{params.knowledge_arguments}}}")["arguments"]
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f'{where}: arguments must be like "first_channels = 16": {error}') from None
    try:
        known = {field.name for field in fields(family_class(params.knowledge_family))}
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    norm = {"norm": "batch"} if "norm" in known else {}  # not every family has a kind of norm to choose
    fixed = {"input_shape": list(supernet.input_shape), "classes": supernet.classes, **norm}
    if given := sorted(arguments.keys() & {*fixed, "name", "freeze"}):
        raise ValueError(
            f"{where}: {', '.join(given)} cannot be chosen, because the knowledge network reads and predicts what "
            "personal models do, has batch norm, and is trained whole, and its family is that of "
            "rafl.knowledge-family: leave out what is named here"
        )
    try:
        family = make_family({"name": params.knowledge_family, **arguments, **fixed})
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if family.input_dtype != supernet.input_dtype:
        raise ValueError(f"{where}: it reads other inputs than {supernet.name}")
    return family
