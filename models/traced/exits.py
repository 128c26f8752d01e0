"""Places behind which a traced module can end, with a head of its own there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node

from wildflower.models.traced.depth import (
    Block,
    ancestors,
    check_parts,
    of_input,
    of_tensors,
    one_more,
    paths_of,
    tensors_read,
)
from wildflower.models.traced.graph import Cuts, Exit, Graph, Operation
from wildflower.models.traced.groups import Group
from wildflower.models.traced.layouts import is_pinned, resolved, size_of
from wildflower.models.traced.propagation import CannotAlignError, Propagation
from wildflower.models.traced.tracing import Traced
from wildflower.plugins.reference import PluginError

MOST_EXITS = 4  # that are found by themselves, the last one among them: as many as ScaleFL's paper has widths for


@dataclass(frozen=True)
class Place:
    """A place for an exit.

    Attributes:
        nodes: of each mode of training the one whose result its head reads.
        channels: the dimension that its head reads.
        positions: whether it answers for each position, and the other dimensions are not averaged.
        tokens: the dimension of a text's tokens, of which those that pad it are left out of the mean; 0: there is none.
    """

    nodes: Mapping[bool, Node]
    channels: int
    positions: bool = False
    tokens: int = 0

    @property
    def rank(self) -> int:
        """The number of dimensions of that result."""
        return len(self.nodes[True].meta["val"].shape)


def wanted_places(
    where: str,
    cuts: Cuts,
    traced: Traced,
    found: Propagation,
    blocks: Sequence[Block],
    stacks: Mapping[str, Sequence[str]],
) -> list[Place]:
    """Return the places of early exits: those that are named, or else, if they are asked for, those that are found.

    Found are ends of stacks of blocks, or thirds of a single stack. A module without stacks can end wherever nothing
    else is alive. Of many places some are taken, evenly.
    """
    results = {block.name: block.result for block in blocks}
    if cuts.exits:
        return _named(where, cuts.exits, results, traced, found)
    if not cuts.early_exits:
        return []
    ends = [names[-1] for names in stacks.values()]
    if len(stacks) == 1:
        [names] = stacks.values()
        ends = [names[-(-len(names) * third // 3) - 1] for third in (1, 2)]
        ends = [end for end in ends if end != names[-1]]
    nodes = [results[name] for name in dict.fromkeys(ends) if name in results] or _alone(traced)
    places = _with_weights_between(traced, [place for at in nodes if (place := _place(at, traced, found)) is not None])
    if len(places) >= MOST_EXITS:
        places = [places[-(-len(places) * part // (MOST_EXITS - 1)) - 1] for part in range(1, MOST_EXITS)]
    return places


def _named(
    where: str, names: Sequence[str], results: Mapping[str, Mapping[bool, Node]], traced: Traced, found: Propagation
) -> list[Place]:
    """Return the places behind parts of a module; PluginError if there is none."""
    places: list[Place] = []
    for name in names:
        nodes = results.get(name) or _nodes_behind(name, traced)
        if nodes is None:
            check_parts(where, "exits", [name], list(traced.tensors))
        place = None if nodes is None else _place(nodes, traced, found)
        if place is None:
            raise PluginError(
                f"{where}: exits has {name!r}, and a head can be behind a part alone whose result has channels of a "
                "batch, and all positions if the module answers for each"
            )
        if places and places[-1].nodes[True] not in ancestors(place.nodes[True]):
            raise PluginError(f"{where}: exits must be in the order of computing, and {name!r} does not depend on all")
        places.append(place)
    return places


def head_behind(number: int, place: Place, node: int, pad_id: int | None) -> list[Operation]:
    """Return the operators of an exit's head right behind the node of its place."""
    others = [dimension for dimension in range(1, place.rank) if dimension != place.channels]
    if place.positions:  # channels may be in the middle, where classes are in the answer
        pooled = [Operation(op="transpose.int", args=[{"n": node}, 1, 2])] if place.channels == 1 else []
    elif place.tokens and pad_id is not None:
        pooled = _mean_of_tokens(place, node, pad_id)
    else:
        pooled = [Operation(op="mean.dim", args=[{"n": node}, others])] if others else []
    tensors = [{"t": f"exit{number}.{name}"} for name in ("weight", "bias")]
    head = [*pooled, Operation(op="linear.default", args=[{"n": node + len(pooled)}, *tensors])]
    return [*head, Operation(op="transpose.int", args=[{"n": node + len(head)}, 1, 2])] if place.positions else head


def _mean_of_tokens(place: Place, node: int, pad_id: int) -> list[Operation]:
    """Return the operators of a mean over the tokens of each text that are no padding, as `Added.read` has it."""
    is_real, weights, weighted, total, count, at_least_one = ({"n": node + number} for number in range(1, 7))
    return [
        Operation(op="ne.Scalar", args=[{"x": 0}, pad_id]),
        Operation(op="unsqueeze.default", args=[is_real, place.channels]),
        Operation(op="mul.Tensor", args=[{"n": node}, weights]),
        Operation(op="sum.dim_IntList", args=[weighted, [place.tokens]]),
        Operation(op="sum.dim_IntList", args=[weights, [place.tokens]]),
        Operation(op="clamp_min.default", args=[count, 1]),
        Operation(op="div.Tensor", args=[total, at_least_one]),
    ]


def with_exits(
    graph: Graph,
    places: Sequence[Place],
    answers: Sequence[list[int]],
    groups: Sequence[Group],
    traced: Traced,
) -> Graph:
    """Return a graph with its exits: the groups between one and the next, and their answers.

    The last one has the name of the module's own head. Where there are no groups there is one of one channel.
    """
    all_groups, left = dict(graph.groups), list(groups)
    own: dict[str, list[str]] = {}
    for number, place in enumerate(places, start=1):
        read = set[str]().union(
            *(tensors_read(ancestors(node), traced.names[training]) for training, node in place.nodes.items())
        )
        own[f"exit{number}"] = [group.name for group in left if any(name in read for name, _ in group.tensors)]
        left = [group for group in left if group.name not in own[f"exit{number}"]]
    heads = (name.rpartition(".")[0] for name, spec in graph.state.items() if spec.classes >= 0)
    own[next((name for name in heads if name and name not in own), "head")] = [group.name for group in left]
    last = [len(graph.training) - 1, len(graph.evaluation) - 1]
    exits = {
        name: Exit(groups=inside or [one_more(name, all_groups)], answers=nodes)
        for (name, inside), nodes in zip(own.items(), [*answers, last], strict=True)
    }
    return graph.model_copy(update={"groups": all_groups, "exits": exits})


def _nodes_behind(name: str, traced: Traced) -> dict[bool, Node] | None:
    """Return the results of a part of a module; None if it has no such part, or one that computes nothing."""
    nodes = {}
    for training, graph in traced.graphs.items():
        inside = [node for node in graph.nodes if name in paths_of(node) and isinstance(node.meta.get("val"), Tensor)]
        if not inside:
            return None
        nodes[training] = inside[-1]
    return nodes


def _place(nodes: Mapping[bool, Node], traced: Traced, found: Propagation) -> Place | None:
    """Return the place at some nodes; None if they have no batch or the dimension of channels cannot be told.

    It is the one of which something can be cut, and else the second of an image and the last of a sequence. Where the
    module answers for each position, there must be as many positions.
    """
    [answer] = traced.graphs[True].output_node().all_input_nodes
    positions = [size_of(layout) for layout in found.of(answer)[2:]]
    dimensions = []
    for node in nodes.values():
        try:
            layouts = found.of(node)
        except CannotAlignError:
            return None
        if len(layouts) < 2 or not found.is_batch(layouts[0]):
            return None
        free = [d for d, layout in enumerate(layouts) if d and not is_pinned(layout)]
        dimensions.append(free or [2 if len(layouts) == 3 else 1])
        others = [size_of(layout) for d, layout in enumerate(layouts) if d and [d] != dimensions[-1]]
        if positions and others != positions:
            return None
    if dimensions[0] != dimensions[1] or len(dimensions[0]) > 1:
        return None
    [channels] = dimensions[0]
    tokens = {_tokens_at(node, channels, traced.names[training], found) for training, node in nodes.items()}
    return Place(nodes, channels, positions=bool(positions), tokens=max(tokens) if len(tokens) == 1 else 0)


def _tokens_at(node: Node, channels: int, names: Mapping[str, str], found: Propagation) -> int:
    """Return the dimension of a sequence of channels that is the inputs' own; 0 if there is none."""
    [inputs] = [at for at in node.graph.nodes if at.op == "placeholder" and at.name not in names]
    layouts, of_inputs = found.of(node), found.of(inputs)
    if len(layouts) != 3 or len(of_inputs) != 2:
        return 0
    other = 3 - channels
    return other if resolved(layouts[other]) == resolved(of_inputs[1]) else 0


def _alone(traced: Traced) -> list[dict[bool, Node]]:
    """Return the results of a module's parts behind which nothing else is alive, in order."""
    training, evaluation = (_cuts(traced, training=training) for training in (True, False))
    behind = [_nodes_behind(path, traced) for node in training for path in paths_of(node)[-1:]]
    return [nodes for nodes in behind if nodes and nodes[True] in training and nodes[False] in evaluation]


def _cuts(traced: Traced, *, training: bool) -> list[Node]:
    graph, names = traced.graphs[training], traced.names[training]
    # What is computed of the inputs alone, such as a mask of padding, is there for any exit.
    dependent = of_input(graph, names) & of_tensors(graph, names)
    order = {node: number for number, node in enumerate(graph.nodes)}
    live: set[Node] = set()
    cuts = []
    for node in graph.nodes:
        if node in dependent and node.op == "call_function":
            live.add(node)
            live = {at for at in live if at is node or any(order[user] > order[node] for user in at.users)}
            if live == {node} and isinstance(node.meta.get("val"), Tensor):
                cuts.append(node)
    return cuts


def _with_weights_between(traced: Traced, places: Sequence[Place]) -> list[Place]:
    """Leave out places behind which there is no weight but the head's; of those without one between take the last."""
    [answer] = traced.graphs[True].output_node().all_input_nodes
    kept: list[tuple[set[str], Place]] = []
    whole = _weights_read(answer, traced)
    for place in places:
        read = _weights_read(place.nodes[True], traced)
        if kept and kept[-1][0] == read and kept[-1][1].rank == place.rank:
            kept.pop()
        if (read if not kept else read - kept[-1][0]) and len(whole - read) > 1:
            kept.append((read, place))
    return [place for _, place in kept]


def _weights_read(node: Node, traced: Traced) -> set[str]:
    names = tensors_read(ancestors(node), traced.names[True])
    return {name for name in names if traced.tensors[name].dim() > 1}
