"""Checks that operators in place write into buffers, constants and results alone, not into the batch or parameters."""

from __future__ import annotations

from typing import Any

from wildflower.models.traced.graph import Graph, Operation
from wildflower.models.traced.operators import FRESH, GETITEM, operator_named

INPUT = "its input"
# Running statistics, which a schema does not call written, and the argument without which they are only read.
STATISTICS = {"batch_norm": "training", "instance_norm": "use_input_stats"}


def check_writes(graph: Graph) -> None:
    """Raise ValueError if a graph may change the batch that it is given, or a parameter."""
    for number, mode in enumerate(("training", "evaluation")):
        # Where a block is left out, its input stands for its result; several blocks may have one result.
        standing: dict[int, list[dict[str, int]]] = {}
        for result, before in (pairs[number] for pairs in graph.bypassed.values()):
            standing.setdefault(result, []).append({"x": 0} if before < 0 else {"n": before})
        _check(graph, getattr(graph, mode), mode, standing)


def _check(graph: Graph, nodes: list[Operation], mode: str, standing: dict[int, list[dict[str, int]]]) -> None:
    # Per result: the batch or parameter whose memory it may share, in words; "" where it may be changed.
    shared: list[str] = []

    def found(value: Any) -> str:
        """Return the first of those of what an argument reads."""
        if isinstance(value, list):
            return next(filter(None, map(found, value)), "")
        match value:
            case {"n": int(number)}:
                return shared[number]
            case {"t": str(name)} if name in graph.state and graph.state[name].kind != "buffer":
                return name
            case {"x": _}:
                return INPUT
        return ""

    for number, node in enumerate(nodes):
        given = _arguments(node)
        written = _written(node, given)
        for name in written:
            if changed := found(given.get(name)):
                raise ValueError(
                    f"the graph of a model, {mode}, node {number} ({node.op}): it changes {changed} in place, or "
                    "may; a model changes nothing but its buffers: write x = x.relu() and not x.relu_()"
                )
        memory = "" if written or _is_fresh(node, given) else found([*given.values()])
        # The input of a block that is left out is in the place of the block's result.
        shared.append(memory or found(standing.get(number, [])))


def _arguments(node: Operation) -> dict[str, Any]:
    if node.op == GETITEM:
        return {"self": node.args}
    names = [argument.name for argument in operator_named(node.op)._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _written(node: Operation, given: dict[str, Any]) -> list[str]:
    """Return the arguments that a node writes into, of which one is its result."""
    if node.op == GETITEM:
        return []
    if (flag := STATISTICS.get(node.op.partition(".")[0])) is not None:
        return [] if given.get(flag) is False else ["running_mean", "running_var"]
    schema = operator_named(node.op)._schema
    return [found.name for found in schema.arguments if found.alias_info is not None and found.alias_info.is_write]


def _is_fresh(node: Operation, given: dict[str, Any]) -> bool:
    if node.op == "einsum.default":  # products are new memory
        return isinstance(given.get("tensors"), list) and len(given["tensors"]) > 1
    layers = given.get("num_layers", 1)  # of a recurrent operator; without any its result is its input
    return node.op.partition(".")[0] in FRESH and type(layers) is int and layers > 0
