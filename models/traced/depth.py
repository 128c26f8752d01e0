"""Blocks that a traced module may lack, whose input can stand for their result, and stacks of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

from torch import Tensor, nn
from torch.fx import Graph as FxGraph
from torch.fx import Node

from wildflower.models.frozen import parts_of
from wildflower.models.traced.graph import Graph
from wildflower.models.traced.groups import Group
from wildflower.models.traced.layouts import Layout, resolved
from wildflower.models.traced.operators import short_name
from wildflower.models.traced.propagation import Layouts, Propagation, shape_of
from wildflower.models.traced.tracing import Traced
from wildflower.plugins.nearest import nearest_part
from wildflower.plugins.reference import PluginError

INPUT = -1  # in place of the number of a node
NUMBERED = re.compile(r"^(.*?[._]?)(\d+)$")  # of a block: its container, and its number there


@dataclass(frozen=True)
class Block:
    """A part of a module of which the input has the layout of the result.

    Attributes:
        result, before: of each mode of training the node of its result, and the one that stands for it.
        tensors: names of those that nothing else reads.
    """

    name: str
    result: Mapping[bool, Node]
    before: Mapping[bool, Node]
    tensors: frozenset[str]


def blocks_of(traced: Traced, found: Propagation) -> list[Block]:
    """Return the blocks of a module that its answer does without, in the order in which it computes them.

    These are numbered parts with a residual addition in them, or what is added to a residual stream.
    """
    both = [_Mode(traced, found, training) for training in (True, False)]
    training, evaluation = (mode.blocks() for mode in both)
    blocks = []
    for name, (before, result) in training.items():
        if name not in evaluation:
            continue
        pairs = {True: (before, result), False: evaluation[name]}
        tensors = frozenset.intersection(*(mode.only_read_in(*pairs[mode.training]) for mode in both))
        if tensors or any(name.startswith(f"{part}.") for part in traced.tensors):
            results = {key: pair[1] for key, pair in pairs.items()}
            blocks.append(Block(name, results, {key: pair[0] for key, pair in pairs.items()}, tensors))
    return blocks


def stacks_of(blocks: Sequence[Block], found: Propagation, module: nn.Module) -> dict[str, list[str]]:
    """Return stacks of blocks alike: those of one container through which the same channels pass.

    In front is the block of the same class that makes these channels. Where there is none the first one always stays,
    and is in front of the others.
    """

    def of(block: Block) -> tuple[str, list[Layout]]:
        return _container(block.name), _resolved(found.of(block.result[True]))

    stacks: dict[str, list[str]] = {}
    for (container, _), alike in groupby(blocks, of):
        names = [block.name for block in alike]
        if (maker := _in_front(names[0], module)) is not None:
            names.insert(0, maker)
        if len(names) > 1:
            stacks[container if container and container not in stacks else names[0]] = names
    return stacks


def with_blocks(
    where: str,
    graph: Graph,
    stacks: Mapping[str, Sequence[str]],
    blocks: Sequence[Block],
    groups: Sequence[Group],
    positions: Mapping[Node, int],
    patterns: Sequence[str],
) -> Graph:
    """Return a graph with the blocks that may be left out: all of a stack but its first one, if a pattern fits it.

    The groups of a block are those that no other tensors have; a block without any gets one of one channel.
    """
    known = [name for names in stacks.values() for name in names[1:]]
    if unknown := [p for p in patterns if p != "*" and not any(fnmatchcase(name, p) for name in known)]:
        hint = nearest_part(unknown[0], known)
        raise PluginError(f"{where}: depth has {unknown[0]!r}, and no such block may be left out; {hint}")
    all_groups, inside, bypassed = dict(graph.groups), {}, {}
    for block in blocks:
        if block.name in known and any(fnmatchcase(block.name, pattern) for pattern in patterns):
            own = [group.name for group in groups if {name for name, _ in group.tensors} <= block.tensors]
            inside[block.name] = own or [one_more(block.name, all_groups)]
            bypassed[block.name] = [
                [positions.get(nodes[training], INPUT) for nodes in (block.result, block.before)]
                for training in (True, False)
            ]
    kept = {name: list(names) for name, names in stacks.items() if not bypassed.keys().isdisjoint(names)}
    return graph.model_copy(update={"groups": all_groups, "blocks": inside, "bypassed": bypassed, "stacks": kept})


def check_parts(where: str, key: str, given: Sequence[str], parameters: Sequence[str]) -> None:
    """Raise PluginError, with the nearest one, for a name that no part of a module has."""
    parts = parts_of(parameters)
    for part in given:
        if not any(fnmatchcase(known, part) for known in parts):
            hint = nearest_part(part, parts)
            raise PluginError(f"{where}: {key} has {part!r}, and the module has no such part; {hint}")


def one_more(name: str, groups: dict[str, int]) -> str:
    """Add a group of one channel that no tensor has, by which something is there or not; return its name."""
    while name in groups:
        name += "#"
    groups[name] = 1
    return name


def ancestors(node: Node, standing: Mapping[Node, Node] | None = None) -> set[Node]:
    """Return a node and all on which it depends, where others stand for some."""
    alive: set[Node] = set()
    wanted = [node]
    while wanted:
        at = wanted.pop()
        if at not in alive:
            alive.add(at)
            wanted += [standing[at]] if standing and at in standing else at.all_input_nodes
    return alive


def tensors_read(nodes: Iterable[Node], names: Mapping[str, str]) -> set[str]:
    """Return the names of tensors that are among some nodes."""
    return {names[node.name] for node in nodes if node.op == "placeholder" and node.name in names}


class _Mode:
    """A graph, its residual additions, and what is computed of the input."""

    def __init__(self, traced: Traced, found: Propagation, training: bool) -> None:
        self.training, self.found = training, found
        self.graph: FxGraph = traced.graphs[training]
        self.names = traced.names[training]
        self.order = {node: number for number, node in enumerate(self.graph.nodes)}
        self.of_input = of_input(self.graph, self.names)
        [self.answer] = self.graph.output_node().all_input_nodes
        self.all = ancestors(self.answer)

    def _calls(self) -> Iterator[Node]:
        return (node for node in self.graph.nodes if node.op == "call_function")

    def only_read_in(self, before: Node, result: Node) -> frozenset[str]:
        """Return the tensors that nobody reads where one node stands for another."""
        alive = ancestors(self.answer, {result: before})
        return frozenset(tensors_read(self.all, self.names) - tensors_read(alive, self.names))

    def blocks(self) -> dict[str, tuple[Node, Node]]:
        """Return what can be left out, by name: the node that stands for its result, and its result."""
        additions = self._additions()
        paths = {add: next((p for p in reversed(paths_of(add)) if NUMBERED.match(p)), "") for add in additions}
        outer = {path for path in paths.values() if path and not any(_lies_in(path, other) for other in paths.values())}
        blocks = {path: pair for path in outer if (pair := self._part(path)) is not None}
        parts = set(blocks)
        for add, (stream, name) in additions.items():
            if not name or any(f"{paths[add]}.".startswith(f"{part}.") for part in parts):
                continue
            if name not in blocks:
                blocks[name] = stream, add
            elif blocks[name][1] in ancestors(stream):
                blocks[name] = blocks[name][0], add
        outermost = {n: p for n, p in blocks.items() if not any(_lies_in(n, other) for other in blocks)}
        fitting = {name: pair for name, pair in outermost.items() if self._fits(*pair)}
        return dict(sorted(fitting.items(), key=lambda item: self.order[item[1][1]]))

    def _additions(self) -> dict[Node, tuple[Node, str]]:
        """Return residual additions, in order: the stream to which is added, and what the added part is called."""
        found: dict[Node, tuple[Node, str]] = {}
        for add in self._calls():
            if add not in self.all or short_name(add.target) not in ("add", "add_") or add.kwargs.get("alpha", 1) != 1:
                continue
            both = [value for value in add.args[:2] if isinstance(value, Node) and value in self.of_input]
            for stream, added in (both, both[::-1]) if len(both) == 2 else ():
                inside = self._between(stream, added)
                if inside and self._alike(stream, add):
                    found[add] = stream, _called(self._tensors_in(inside))
                    break
        return found

    def _between(self, start: Node, end: Node) -> set[Node]:
        """Return the nodes on ways from one node to another, with the last; none where there is no way."""
        before = [node for node in ancestors(end) if self.order[node] > self.order[start]]
        inside: set[Node] = set()
        for node in sorted(before, key=self.order.__getitem__):
            if start in node.all_input_nodes or not inside.isdisjoint(node.all_input_nodes):
                inside.add(node)
        return inside if end in inside else set()

    def _tensors_in(self, inside: set[Node]) -> list[str]:
        own = {read for node in inside for read in node.all_input_nodes if read not in self.of_input}
        return sorted(tensors_read({node for read in own for node in ancestors(read)}, self.names))

    def _part(self, path: str) -> tuple[Node, Node] | None:
        """Return what goes into a part of the module and what comes out of it, if these are one node each."""
        inside = {node for node in self._calls() if path in paths_of(node) and node in self.all}
        results = [node for node in inside & self.of_input if any(user not in inside for user in node.users)]
        read = {value for node in inside for value in node.all_input_nodes if value not in inside}
        if len(results) != 1:
            return None
        streams = [node for node in read & self.of_input if self._alike(node, results[0])]
        return (streams[0], results[0]) if len(streams) == 1 else None

    def _alike(self, first: Node, second: Node) -> bool:
        """Say whether two nodes have tensors of one layout and type."""
        one, two = first.meta.get("val"), second.meta.get("val")
        if not isinstance(one, Tensor) or not isinstance(two, Tensor) or one.dtype != two.dtype:
            return False
        same = shape_of(first) == shape_of(second)
        return same and _resolved(self.found.of(first)) == _resolved(self.found.of(second))

    def _fits(self, before: Node, result: Node) -> bool:
        """Say whether one node can stand for another: nobody who reads it in its place changes it for others."""
        shared = any(user not in ancestors(result) for user in before.users)
        in_place = any(short_name(user.target).endswith("_") for user in result.users if user.op == "call_function")
        return not (shared and in_place) and self._alike(before, result)


def of_input(graph: FxGraph, names: Collection[str]) -> set[Node]:
    """Return the nodes that depend on the input; `names` are those of placeholders that are tensors of the module."""
    return _behind(graph, [node for node in graph.nodes if node.op == "placeholder" and node.name not in names])


def of_tensors(graph: FxGraph, names: Collection[str]) -> set[Node]:
    """Return the nodes that depend on tensors of the module; `names` as in `of_input`."""
    return _behind(graph, [node for node in graph.nodes if node.op == "placeholder" and node.name in names])


def _behind(graph: FxGraph, starts: Iterable[Node]) -> set[Node]:
    """Return some nodes and all that depend on them."""
    found = set(starts)
    for node in graph.nodes:
        if node.op == "call_function" and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def paths_of(node: Node) -> list[str]:
    """Return the parts of the user's module in which a node is computed, outermost first."""
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    return [path.removeprefix("of.") for path, _ in stack.values() if path.startswith("of.") and "@" not in path]


def _lies_in(name: str, other: str) -> bool:
    return name.startswith(f"{other}.")


def _called(tensors: Sequence[str]) -> str:
    """Return the part in which some tensors lie: up to a number, if there is one in its name; "" if in none."""
    paths = [name.split(".")[:-1] for name in tensors]
    common = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    ends = [end for end, part in enumerate(common, start=1) if NUMBERED.match(part)]
    return ".".join(common[: ends[-1]] if ends else common)


def _container(name: str) -> str:
    found = NUMBERED.match(name)
    return found[1].rstrip("._") if found else name


def _in_front(name: str, module: nn.Module) -> str | None:
    """Return the numbered part of the same class in front of another; None if there is none."""
    found = NUMBERED.match(name)
    parts = dict(module.named_modules())
    before = f"{found[1]}{int(found[2]) - 1}" if found else ""
    return before if name in parts and before in parts and type(parts[before]) is type(parts[name]) else None


def _resolved(layouts: Layouts) -> list[Layout]:
    return [resolved(layout) for layout in layouts]
