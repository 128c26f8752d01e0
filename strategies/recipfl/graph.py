"""The graph of a network: its operators in order of computation, from the family's own description of its blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from models.architecture import Architecture
from models.base import Family, described
from models.layers import Block, Conv, Dropout, Flatten, GlobalPool, Layer, Linear, Norm, Pool, Relu, Relu6, Scale
from models.placement import CLASSES, Axis


class GraphError(ValueError):
    """A network of which no graph can be made; the text names the operator."""


@dataclass(frozen=True)
class Node:
    """An operator: one of a layer's weights, or a step without weights, of which `tensor` is "" and `shape` ().

    positions: inputs that belong to one channel, where a linear layer stands behind a flatten; they follow each other.
    """

    operator: str
    tensor: str = ""
    shape: tuple[int, ...] = ()
    positions: int = 1


@dataclass(frozen=True)
class Graph:
    """Nodes in order of computation, and edges (from, to) between their positions, which always ascend."""

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]

    @cached_property
    def tensors(self) -> tuple[Node, ...]:
        """The nodes with a tensor."""
        return tuple(node for node in self.nodes if node.tensor)

    @cached_property
    def forward_levels(self) -> tuple[int, ...]:
        """Edges of the longest path that ends in each node."""
        levels = [0] * len(self.nodes)
        for start, end in sorted(self.edges):
            levels[end] = max(levels[end], levels[start] + 1)
        return tuple(levels)

    @cached_property
    def backward_levels(self) -> tuple[int, ...]:
        """Edges of the longest path that begins in each node."""
        levels = [0] * len(self.nodes)
        for start, end in sorted(self.edges, reverse=True):
            levels[start] = max(levels[start], levels[end] + 1)
        return tuple(levels)

    def distances(self, maximum: int) -> dict[tuple[int, int], int]:
        """Edges of the shortest path between any two nodes that are at most `most` apart along the edges."""
        following: list[list[int]] = [[] for _ in self.nodes]
        for start, end in self.edges:
            following[start].append(end)
        found: dict[tuple[int, int], int] = {}
        for start in range(len(self.nodes)):
            queue = deque([(start, 0)])
            seen = {start}
            while queue:
                node, steps = queue.popleft()
                if steps:
                    found[start, node] = steps
                if steps < maximum:
                    fresh = [end for end in following[node] if end not in seen]
                    seen.update(fresh)
                    queue.extend((end, steps + 1) for end in fresh)
        return found


# What an operator is called, and those of its weights that are nodes. All others, such as a norm's bias, are not.
OPERATORS: dict[type[Layer], tuple[Callable[[Any], str], tuple[str, ...]]] = {
    Conv: (lambda layer: "conv" if layer.dimensions == 2 else "conv1d", ("weight", "bias")),
    Linear: (lambda layer: "classifier" if layer.outputs.group == CLASSES else "linear", ("weight", "bias")),
    Norm: (lambda layer: "norm", ("weight",)),
    Relu: (lambda layer: "relu", ()),
    Relu6: (lambda layer: "relu6", ()),
    Scale: (lambda layer: "scale", ()),
    Pool: (lambda layer: f"{layer.kind} pool", ()),
    GlobalPool: (lambda layer: "global pool", ()),
    Flatten: (lambda layer: "flatten", ()),
    Dropout: (lambda layer: "dropout", ()),
}


@lru_cache(maxsize=256)
def graph_of(family: Family, architecture: Architecture) -> Graph:
    """The graph of an architecture's network, from its input to its logits (of every exit).

    A layer with a weight and a bias is two nodes, one behind the other. GraphError names an operator that is not in
    `OPERATORS`.
    """
    nodes: list[Node] = [Node("input")]
    edges: list[tuple[int, int]] = []

    def add(node: Node, *before: int) -> int:
        nodes.append(node)
        edges.extend((position, len(nodes) - 1) for position in before)
        return len(nodes) - 1

    def chain(block: Block, path: str, layers: tuple[Layer, ...], position: int) -> int:
        for layer in layers:
            if type(layer) not in OPERATORS:
                known = ", ".join(sorted(kind.__name__ for kind in OPERATORS))
                raise GraphError(
                    f"no graph can be made of {family.name}: its block {block.name!r} has the operator "
                    f"{type(layer).__name__}; those that are known are {known}"
                )
            name_of, parts = OPERATORS[type(layer)]
            specs = layer.tensors()
            own = [part for part in parts if part in specs]
            for part in own:
                name = f"{block.name}.{path}{layer.name}.{part}"
                positions = max((axis.repeat for axis in specs[part].axes if isinstance(axis, Axis)), default=1)
                position = add(Node(f"{name_of(layer)} {part}", name, specs[part].shape, positions), position)
            if not own:
                position = add(Node(name_of(layer)), position)
        return position

    position = 0
    for block in described(family, "recipfl").blocks(architecture):
        end = chain(block, "", block.layers, position)
        if block.concat:
            end = add(Node("concat"), end, position)
        if block.shortcut is not None:
            end = add(Node("sum"), end, chain(block, "shortcut.", block.shortcut, position))
        end = chain(block, "after.", block.after, end)
        if block.exit:
            add(Node("output"), end)
        else:
            position = end
    add(Node("output"), position)
    return Graph(tuple(nodes), tuple(edges))
