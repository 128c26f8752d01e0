"""A network as a graph: its operators in order of computation."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property

from wildflower.models.operators import INPUT


@dataclass(frozen=True)
class Node:
    """An operator: one of a layer's weights, or a step without weights, of which `tensor` is "" and `shape` ().

    A layer whose weights are frozen is a step without weights.

    positions: inputs that belong to one channel, where a linear layer stands behind a flatten; they follow each other.
    scale: how widely its values are spread as generated at first, in multiples of Kaiming's.
    """

    operator: str
    tensor: str = ""
    shape: tuple[int, ...] = ()
    positions: int = 1
    scale: float = 1.0


@dataclass(frozen=True)
class Graph:
    """Nodes in order of computation, and edges (from, to) between their positions, which always ascend."""

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]

    @cached_property
    def tensors(self) -> tuple[Node, ...]:
        """The nodes with a tensor."""
        return tuple(node for node in self.nodes if node.tensor)

    def levels(self, *, backward: bool) -> tuple[int, ...]:
        """Edges of the longest path that ends in each node, or backward: that begins in it."""
        levels = [0] * len(self.nodes)
        for edge in sorted(self.edges, reverse=backward):
            before, node = reversed(edge) if backward else edge
            levels[node] = max(levels[node], levels[before] + 1)
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


class Drawing:
    """A graph in the making, with its input."""

    def __init__(self) -> None:
        self.nodes: list[Node] = [Node(INPUT)]
        self.edges: list[tuple[int, int]] = []

    def add(self, node: Node, *before: int) -> int:
        """Add a node with edges from those before it, and return its position."""
        self.nodes.append(node)
        self.edges.extend((position, len(self.nodes) - 1) for position in before)
        return len(self.nodes) - 1

    @property
    def graph(self) -> Graph:
        """The graph as it is now."""
        return Graph(tuple(self.nodes), tuple(self.edges))
