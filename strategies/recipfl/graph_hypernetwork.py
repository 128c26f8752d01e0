"""The graph hypernetwork: from a network's graph, a client's current parameters and its descriptor to new parameters.

RecipFL (Zhang et al., WWW 2024), section 3.2, on the graph hypernetworks of Zhang et al. (ICLR 2019) and
Knyazev et al. (NeurIPS 2021). torch-geometric is imported when graphs are first batched, so that only a server which
runs this method needs it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from wildflower.strategies.params import Count, CountOrZero, Params
from wildflower.strategies.recipfl.graph import Graph, Node
from wildflower.strategies.recipfl.tensor_coders import DIGEST, Decoder, ParameterEncoder, normalized, tiled, tiles_of

SIZES = 48  # buckets of a dimension's size
FARTHEST = 50  # the most edges that a virtual edge stands for


class ShapeParams(Params):
    """Sizes of the hypernetwork, and what it looks at."""

    hypernetwork: Literal["printed", "published"] = Field(
        "printed",
        description="The hypernetwork of section 3.2; or that of the published code, which also reads sizes of "
        "tensors, sends messages between operators further apart, and has a norm before its decoders",
    )
    hidden: Annotated[int, Field(ge=8, lt=2**16)] = Field(
        128, description="Width of the hypernetwork's node states; a multiple of 8"
    )
    decoder_hidden: Annotated[int, Field(ge=1, lt=2**16)] = Field(
        256, description="Width of the decoders' hidden layer"
    )
    propagation_steps: Count = Field(
        1, description="Sweeps of messages through a network's graph, forward and then backward (tau)"
    )
    tile: CountOrZero = Field(
        0,
        description="Maximum output and input channels of a decoder; larger tensors repeat them. 0: all channels",
    )

    @field_validator("hidden")
    @classmethod
    def _in_eighths(cls, hidden: int) -> int:
        if hidden % 8:
            raise ValueError("a multiple of 8: a node and its weight have a half each, which four heads share")
        return hidden


@dataclass(frozen=True)
class Request:
    """One client's network to generate.

    digests: (tensors of the graph, DIGEST), what `digest` makes of its current parameters, zeros behind their end.
    client: its number; distribution: (classes,), how its labels are distributed, which the hypernetwork reads.
    """

    graph: Graph
    digests: Tensor
    client: int
    distribution: Tensor


class Hypernetwork(nn.Module):
    """Generates the tensors of any of `graphs`, for many clients in one pass.

    As printed, the state of a node begins with what it is beside what is read of its current weight (section 3.2),
    messages come from incoming nodes (Eq. 6), and a decoder reads the state beside the descriptor a_m itself (Eq. 8).

    As published, the state begins with the sum of the two and of an encoding of the tensor's sizes. Messages also pass
    along virtual edges (Knyazev et al.), divided by their length. A layer norm comes before the decoders, and a_m goes
    through a small network first.

    Operators that are in none of `graphs` have no decoder: their tensors are left out of what is generated.
    """

    def __init__(self, graphs: Collection[Graph], shape: ShapeParams, *, classes: int) -> None:
        super().__init__()
        self.shape = shape
        self.made: dict[Graph, Any] = {}
        hidden, self.published = shape.hidden, shape.hypernetwork == "published"
        part = hidden if self.published else hidden // 2
        self.operators = sorted({node.operator for graph in graphs for node in graph.nodes})
        # One more for operators that are in none of the graphs.
        self.operator = nn.Embedding(len(self.operators) + 1, part)
        self.sizes = nn.ModuleList(nn.Embedding(SIZES, hidden // 4) for _ in range(4 if self.published else 0))
        self.parameter = ParameterEncoder(part)
        self.message, self.far_message = _message(hidden), _message(hidden) if self.published else None
        self.gate = nn.GRUCell(hidden, hidden)
        self.norm = nn.LayerNorm(hidden) if self.published else nn.Identity()
        self.descriptor, described = self.made_descriptor(classes)
        self.decoders = nn.ModuleDict()
        for operator in self.operators:
            nodes = [node for graph in graphs for node in graph.tensors if node.operator == operator]
            if nodes:
                reads = hidden + described if self.conditioned(operator) else hidden
                parts = tiles_of(operator, nodes, shape.tile)
                # Without a norm, states are about a quarter after one step: at first a gated unit keeps half, in each
                # of two sweeps. After two they are an eighth, from three steps on a twelfth (measured on LeNet-5).
                wanted = 1 if self.published else 4 * min(shape.propagation_steps, 3)
                self.decoders[operator] = Decoder(reads, shape.decoder_hidden, parts, hidden, wanted)

    def forward(self, requests: Sequence[Request]) -> list[dict[str, Tensor]]:
        """The generated tensors of every request, by name."""
        states = self._nodes(requests)
        descriptors = self.descriptors(requests)
        found: list[dict[str, Tensor]] = [{} for _ in requests]
        wanted: dict[str, list[tuple[int, Node, int]]] = defaultdict(list)  # operator -> (request, node, row of states)
        row = 0
        for number, request in enumerate(requests):
            for node in request.graph.nodes:
                if node.tensor and node.operator in self.decoders:
                    wanted[node.operator].append((number, node, row))
                row += 1
        for operator, places in wanted.items():
            inputs = states[[row for _, _, row in places]]
            if self.conditioned(operator):
                inputs = torch.cat([inputs, descriptors[[number for number, _, _ in places]]], dim=1)
            for (number, node, _), tile in zip(places, self.decoders[operator](inputs), strict=True):
                values = tiled(tile, node.shape, node.positions)
                found[number][node.tensor] = normalized(values, node.operator, node.scale)
        return found

    def made_descriptor(self, classes: int) -> tuple[nn.Module, int]:
        """Return what a_m goes through before decoders read it, and how many values come out."""
        hidden = self.shape.hidden
        if self.published:
            layers = nn.Linear(classes, hidden), nn.ReLU(), nn.Linear(hidden, hidden)
            return nn.Sequential(*layers), hidden
        return nn.Identity(), classes

    def conditioned(self, operator: str) -> bool:
        """Return whether the operator's decoder reads the descriptor: all do (Eq. 8)."""
        return True

    def descriptors(self, requests: Sequence[Request]) -> Tensor:
        """Return (requests, hidden); as printed the distributions themselves, (requests, classes)."""
        described: Tensor = self.descriptor(torch.stack([request.distribution for request in requests]))
        return described

    def _nodes(self, requests: Sequence[Request]) -> Tensor:
        """The states of all nodes of all graphs, one behind the other: (nodes, hidden)."""
        from torch_geometric.data import Batch

        batch: Any = Batch.from_data_list([self._data(request.graph) for request in requests])
        states = self.operator(batch.operator)
        rows = (batch.counts > 0).nonzero().flatten()
        read = self.parameter(torch.cat([request.digests for request in requests]), batch.counts[rows])
        if self.published:
            states = states + torch.cat([table(batch.sizes[:, i]) for i, table in enumerate(self.sizes)], dim=1)
            states = states.index_add(0, rows, read)
        else:
            states = torch.cat([states, torch.zeros_like(states).index_add(0, rows, read)], dim=1)
        edges, far = batch.edge_index, batch.far_index
        for _ in range(self.shape.propagation_steps):
            states = self._sweep(states, edges, far, batch.distance, batch.forward_level)
            states = self._sweep(states, edges.flip(0), far.flip(0), batch.distance, batch.backward_level)
        return self.norm(states)

    def _data(self, graph: Graph) -> Any:
        """The graph as torch-geometric batches it, made once."""
        from torch_geometric.data import Data

        if graph in self.made:
            return self.made[graph]
        known = {operator: position for position, operator in enumerate(self.operators)}
        far = graph.distances(FARTHEST) if self.published else {}
        self.made[graph] = Data(
            num_nodes=len(graph.nodes),
            operator=torch.tensor([known.get(node.operator, len(known)) for node in graph.nodes]),
            sizes=torch.tensor([_buckets(node.shape) for node in graph.nodes]),
            counts=torch.tensor([min(math.prod(node.shape), DIGEST) if node.tensor else 0 for node in graph.nodes]),
            forward_level=torch.tensor(graph.levels(backward=False)),
            backward_level=torch.tensor(graph.levels(backward=True)),
            edge_index=torch.tensor(graph.edges).T,
            far_index=torch.tensor(list(far)).reshape(-1, 2).T,
            distance=torch.tensor(list(far.values()), dtype=torch.float32),
        )
        return self.made[graph]

    def _sweep(self, states: Tensor, edges: Tensor, far: Tensor, distance: Tensor, level: Tensor) -> Tensor:
        """One sweep of the gated graph network along the edges: a node's state changes after those of all before it.

        Nodes of one level, of all graphs, change at once: h_v <- GRU(sum over u before v of MLP(h_u), h_v) (Eqs. 6 and
        7). What nodes with none before them receive is 0.
        """
        order = level.argsort(stable=True)
        sizes = level.bincount()
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        row = place - (sizes.cumsum(0) - sizes)[level]  # of a node in its level
        parts = list(states[order].split(sizes.tolist()))
        kinds = [(self.message, _by_level(edges, torch.ones(edges.shape[1]), level, place, row))]
        if self.far_message is not None:
            kinds.append((self.far_message, _by_level(far, 1 / distance, level, place, row)))
        said: list[list[Tensor]] = [[] for _ in kinds]  # messages of the nodes of each level so far
        for number, part in enumerate(parts):
            total = torch.zeros_like(part)
            if number:
                for before, (_, incoming) in zip(said, kinds, strict=True):
                    starts, rows, shares = incoming[number]
                    total = total.index_add(0, rows, torch.cat(before)[starts] * shares[:, None])
            parts[number] = self.gate(total, part)
            for before, (message, _) in zip(said, kinds, strict=True):
                before.append(message(parts[number]))
        return torch.cat(parts)[place]


def _message(hidden: int) -> nn.Sequential:
    """The MLP of Eq. 6. The paper does not print its layers: the last ReLU is of the published code."""
    return nn.Sequential(nn.Linear(hidden, hidden // 2), nn.ReLU(), nn.Linear(hidden // 2, hidden), nn.ReLU())


def _buckets(shape: tuple[int, ...]) -> list[int]:
    """Of the four dimensions of a tensor (out, in, height, width): 0 where there is none, else by its logarithm."""
    sizes = [1 + min(SIZES - 2, round(3 * math.log2(size))) for size in shape]
    return (sizes + [0] * 4)[:4]


def _by_level(
    edges: Tensor, shares: Tensor, level: Tensor, place: Tensor, row: Tensor
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of the edges that end in each level: where their starts lie in the order of levels, their ends' rows, shares."""
    starts, ends = edges
    sorted_edges = level[ends].argsort(stable=True)
    counts = level[ends].bincount(minlength=int(level.max()) + 1).tolist()
    columns = (place[starts][sorted_edges], row[ends][sorted_edges], shares[sorted_edges])
    return list(zip(*(column.split(counts) for column in columns), strict=True))
