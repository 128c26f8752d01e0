"""DARTS: networks of searched cells (Liu, Simonyan and Yang, ICLR 2019, "DARTS: Differentiable Architecture Search").

A cell has two inputs, the outputs of the two cells before it, and some nodes. A node is the sum of operations on both
inputs and on all nodes before it; the cell's output is its nodes beside one another. While a search runs, each of these
edges computes all eight operations and mixes them by the softmax of numbers that are learned, `alphas`. A genotype then
says which two edges each node keeps, and which operation each of them is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from wildflower.models.any_network import AnyNetwork
from wildflower.models.architecture import Architecture
from wildflower.models.base import check_cut
from wildflower.models.module import ModuleFamily
from wildflower.models.network import Network
from wildflower.plugins.raised_as import raised_as

ALPHAS = "alphas."
"""What the names of the numbers that mix operations begin with."""

KINDS = ("normal", "reduce")  # cells that keep the size of their inputs, and those that halve it

Genotype = dict[str, list[list[list[Any]]]]
"""Of each kind of cell, of each node: the edges that it keeps, each as [operation, number of its input]."""


def _norm(channels: int, *, learned: bool) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, affine=learned)


def _pool(pool: nn.Module, channels: int, learned: bool) -> nn.Module:
    # Behind a pool the search network has a norm; the network that is found has none.
    return pool if learned else nn.Sequential(pool, _norm(channels, learned=False))


def _depthwise(channels: int, side: int, stride: int, dilation: int, learned: bool) -> list[nn.Module]:
    padding = dilation * (side - 1) // 2
    return [
        nn.ReLU(),
        nn.Conv2d(channels, channels, side, stride, padding, dilation, groups=channels, bias=False),
        nn.Conv2d(channels, channels, 1, bias=False),
        _norm(channels, learned=learned),
    ]


def _separable(channels: int, side: int, stride: int, learned: bool) -> nn.Module:
    first = _depthwise(channels, side, stride, 1, learned)
    return nn.Sequential(*first, *_depthwise(channels, side, 1, 1, learned))


def _dilated(channels: int, side: int, stride: int, learned: bool) -> nn.Module:
    return nn.Sequential(*_depthwise(channels, side, stride, 2, learned))


class Nothing(nn.Module):
    """The operation `none`: zeros of the edge's size."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) -> zeros, halved by a stride of 2."""
        return x[:, :, :: self.stride, :: self.stride].mul(0.0)


class HalvedIdentity(nn.Module):
    """1x1 convolutions with a stride of 2 over the pixels and over those one to the right and below, as channels."""

    def __init__(self, inputs: int, outputs: int, *, learned: bool) -> None:
        super().__init__()
        self.even = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs - outputs // 2, 1, stride=2, bias=False)
        self.norm = _norm(outputs, learned=learned)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, height, width) -> (batch, outputs, height / 2, width / 2), rounded up."""
        x = torch.relu(x)
        shifted = nn.functional.pad(x, (0, 1, 0, 1))[:, :, 1:, 1:]
        result: Tensor = self.norm(torch.cat([self.even(x), self.odd(shifted)], dim=1))
        return result


OPERATIONS: dict[str, Callable[[int, int, bool], nn.Module]] = {
    "none": lambda channels, stride, learned: Nothing(stride),
    "max_pool_3x3": lambda c, s, learned: _pool(nn.MaxPool2d(3, s, 1), c, learned),
    "avg_pool_3x3": lambda c, s, learned: _pool(nn.AvgPool2d(3, s, 1, count_include_pad=False), c, learned),
    "skip_connect": lambda c, s, learned: nn.Identity() if s == 1 else HalvedIdentity(c, c, learned=learned),
    "sep_conv_3x3": lambda channels, stride, learned: _separable(channels, 3, stride, learned),
    "sep_conv_5x5": lambda channels, stride, learned: _separable(channels, 5, stride, learned),
    "dil_conv_3x3": lambda channels, stride, learned: _dilated(channels, 3, stride, learned),
    "dil_conv_5x5": lambda channels, stride, learned: _dilated(channels, 5, stride, learned),
}
"""The operations of an edge: (channels, stride, whether norms learn a scale and a shift) -> module."""


def edges_of(nodes: int) -> list[tuple[int, int]]:
    """Return the edges of a search cell, in the order of its alphas: (node, number of its input)."""
    return [(node, source) for node in range(nodes) for source in range(2 + node)]


def genotype_of(weights: Mapping[str, Tensor]) -> Genotype:
    """Return what a search has found: each node's two strongest edges, by their strongest operation but `none`.

    Raises:
        ValueError: there are no alphas among the weights, or they are those of no number of nodes.
    """
    found: Genotype = {}
    names = list(OPERATIONS)
    for kind in KINDS:
        if f"{ALPHAS}{kind}" not in weights:
            raise ValueError(f"there is no {ALPHAS}{kind} among the weights: are they those of a search, family darts?")
        shares = weights[f"{ALPHAS}{kind}"].double().softmax(dim=1)
        nodes = next((n for n in range(1, 16) if shares.shape == (len(edges_of(n)), len(names))), None)
        if nodes is None:
            raise ValueError(f"{ALPHAS}{kind} has the shape {tuple(shares.shape)}, which no cell has")
        shares[:, names.index("none")] = -1.0
        best, which = shares.max(dim=1)
        cell: list[list[list[Any]]] = [[] for _ in range(nodes)]
        for number, (node, source) in enumerate(edges_of(nodes)):
            cell[node].append([float(best[number]), names[int(which[number])], source])
        found[kind] = [
            sorted(([name, source] for _, name, source in sorted(edges, key=lambda e: -e[0])[:2]), key=lambda e: e[1])
            for edges in cell
        ]
    return found


class Mixed(nn.Module):
    """All operations of an edge, mixed."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.operations = nn.ModuleList([make(channels, stride, False) for make in OPERATIONS.values()])

    def forward(self, x: Tensor, shares: Tensor) -> Tensor:
        """(batch, channels, height, width) and a share per operation -> their sum."""
        parts = [share * run(x) for share, run in zip(shares, self.operations, strict=True)]
        return torch.stack(parts).sum(dim=0)


class Cell(nn.Module):
    """A cell of the search network, or of the one that a genotype says."""

    def __init__(
        self, family: Darts, before: tuple[int, int], channels: int, *, halves: bool, halved_before: bool
    ) -> None:
        super().__init__()
        self.kind = KINDS[halves]
        found: Genotype | None = json.loads(family.genotype) if family.genotype else None
        learned = found is not None
        first, second = before
        self.first: nn.Module = (
            HalvedIdentity(first, channels, learned=learned) if halved_before else _to(first, channels, learned)
        )
        self.second = _to(second, channels, learned)
        self.nodes = family.nodes
        self.inputs = (
            edges_of(family.nodes)
            if found is None
            else [(node, source) for node, edges in enumerate(found[self.kind]) for _, source in edges]
        )
        strides = [2 if halves and source < 2 else 1 for _, source in self.inputs]
        if found is None:
            self.edges = nn.ModuleList([Mixed(channels, stride) for stride in strides])
        else:
            names = [name for edges in found[self.kind] for name, _ in edges]
            kept = zip(names, strides, strict=True)
            self.edges = nn.ModuleList([OPERATIONS[name](channels, stride, True) for name, stride in kept])

    def forward(self, first: Tensor, second: Tensor, shares: Tensor | None) -> Tensor:
        """The outputs of the two cells before -> this cell's, of `nodes` times its channels."""
        states = [self.first(first), self.second(second)]
        for node in range(self.nodes):
            mine = [number for number, (to, _) in enumerate(self.inputs) if to == node]
            values = [self.edges[n](states[self.inputs[n][1]], *(() if shares is None else (shares[n],))) for n in mine]
            states.append(torch.stack(values).sum(dim=0))
        return torch.cat(states[2:], dim=1)


def _to(inputs: int, outputs: int, learned: bool) -> nn.Module:
    return nn.Sequential(nn.ReLU(), nn.Conv2d(inputs, outputs, 1, bias=False), _norm(outputs, learned=learned))


class Alphas(nn.Module):
    """The numbers that mix operations, (edges, operations) for each kind of cell, drawn near 0."""

    def __init__(self, nodes: int) -> None:
        super().__init__()
        shape = len(edges_of(nodes)), len(OPERATIONS)
        self.normal = nn.Parameter(1e-3 * torch.randn(shape))
        self.reduce = nn.Parameter(1e-3 * torch.randn(shape))


class Cells(nn.Module):
    """A stem, cells of which two halve the size and double the channels, and a classifier."""

    def __init__(self, family: Darts) -> None:
        super().__init__()
        channels, stem = family.channels, 3 * family.channels
        if not family.genotype:
            self.alphas = Alphas(family.nodes)
        self.stem = nn.Sequential(
            nn.Conv2d(family.input_shape[0], stem, 3, padding=1, bias=False), _norm(stem, learned=True)
        )
        cells, before, halved = [], (stem, stem), False
        for number in range(family.cells):
            halves = number in (family.cells // 3, 2 * family.cells // 3)
            channels *= 2 if halves else 1
            cells.append(Cell(family, before, channels, halves=halves, halved_before=halved))
            before, halved = (before[1], family.nodes * channels), halves
        self.cells = nn.ModuleList(cells)
        self.classifier = nn.Linear(before[1], family.classes)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) -> (batch, classes)."""
        first = second = self.stem(x)
        mixed = {kind: getattr(self.alphas, kind).softmax(dim=1) for kind in KINDS} if hasattr(self, "alphas") else {}
        for cell in self.cells:
            assert isinstance(cell, Cell)
            first, second = second, cell(first, second, mixed.get(cell.kind))
        result: Tensor = self.classifier(second.mean(dim=(2, 3)))
        return result


@dataclass(frozen=True)
class Darts(ModuleFamily):
    """The search network of DARTS, or the network of a genotype: (batch, channels, height, width) -> (batch, classes).

    It has one architecture, because sums of all operations are no leading channels of one another.

    Attributes:
        channels: of the cells before the first that halves the size.
        cells: those at a third and at two thirds halve the size and double the channels.
        nodes: of a cell.
        genotype: JSON of what a search found, as `genotype_of` returns it; "" for the search network.
        searched: a safetensors file of a search's weights, from which the genotype is read.
    """

    name: ClassVar[str] = "darts"

    input_shape: tuple[int, ...] = (3, 32, 32)
    channels: int = 16
    cells: int = 8
    nodes: int = 4
    genotype: str = ""
    searched: str = ""

    @classmethod
    def resolved(cls, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the genotype in place of the file that it is read from."""
        found = dict(arguments)
        file = found.pop("searched", "")
        if not file:
            return found
        if "genotype" in found:
            raise ValueError("darts: give genotype or searched, not both")
        from safetensors.torch import load_file

        if not Path(file).is_file():
            raise ValueError(f"darts: searched: there is no file {file}")
        with raised_as(ValueError, f"darts: searched: {file} is no safetensors file: ", Exception):  # the library's own
            weights = load_file(file)
        with raised_as(ValueError, f"darts: searched: {file}: "):
            genotype = genotype_of(weights)
        nodes = len(genotype["normal"])
        if found.get("nodes", nodes) != nodes:
            raise ValueError(f"darts: nodes = {found['nodes']}, but the cells of {file} have {nodes}: leave it out")
        return found | {"genotype": json.dumps(genotype), "nodes": nodes}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.searched:
            raise ValueError("darts: make_family reads `searched`; give the genotype here")
        self._check_counts("channels", "cells", "nodes")
        if self.cells < 3 or self.channels % 2:
            raise ValueError(
                f"darts: there must be at least 3 cells and an even number of channels, not {self.cells} and "
                f"{self.channels}"
            )
        if len(self.input_shape) != 3 or min(self.input_shape[1:]) < 4:
            raise ValueError(f"darts: input_shape must be (channels, height, width) from 4x4, not {self.input_shape!r}")
        if self.genotype:
            self._check_genotype()

    def _check_genotype(self) -> None:
        wanted = "must be JSON such as genotype_of returns"
        try:
            found = json.loads(self.genotype)
        except ValueError:
            raise ValueError(f"darts: genotype {wanted}, not {self.genotype[:60]!r}") from None
        if not isinstance(found, dict) or found.keys() != set(KINDS):
            raise ValueError(f"darts: genotype {wanted}: of {' and '.join(KINDS)} cells")
        for kind, cell in found.items():
            if not isinstance(cell, list) or len(cell) != self.nodes:
                raise ValueError(f"darts: genotype {wanted}: {kind} must have {self.nodes} nodes")
            for node, edges in enumerate(cell):
                for edge in edges if isinstance(edges, list) and edges else [None]:
                    if not (isinstance(edge, list) and len(edge) == 2 and edge[0] in [*OPERATIONS][1:]):
                        raise ValueError(
                            f"darts: genotype {wanted}: an edge of {kind} node {node} is [operation, number of its "
                            f"input], not {edge!r}; operations are {', '.join([*OPERATIONS][1:])}"
                        )
                    if type(edge[1]) is not int or not 0 <= edge[1] < node + 2:
                        raise ValueError(f"darts: genotype {wanted}: {kind} node {node} has no input {edge[1]!r}")

    @property
    def groups(self) -> dict[str, int]:
        """Return the one network."""
        return {"network": 1}

    def smallest(self) -> Architecture:
        """Return the one architecture."""
        return self.full()

    def up_to(self, exit: int, rate: float = 1.0) -> Architecture:
        """Return the one architecture, at any rate."""
        check_cut(self.name, 1, exit, rate)
        return self.full()

    def validate(self, arch: Architecture) -> None:
        """Raise ValueError unless this is the one architecture."""
        if arch != self.full():
            raise ValueError(f"darts: there is one architecture, {self.full()}, not {arch}")

    def network(self, arch: Architecture) -> Network:
        """Return the search network, or the genotype's."""
        return AnyNetwork(Cells(self))
