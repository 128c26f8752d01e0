"""Graphs of networks, made of the description of a family or of a trace.

Its operators are those of the family's own description of its blocks. A network that is not described so, or not in
layers that are known here, is run once on fake tensors (`wildflower.models.operators`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.block_family import BlockFamily
from wildflower.models.convolutions import Conv
from wildflower.models.layers import (
    Block,
    Dropout,
    Flatten,
    GlobalPool,
    Layer,
    Linear,
    Norm,
    Pool,
    Relu,
    Relu6,
    Scale,
    TensorSpec,
)
from wildflower.models.operators import OUTPUT, Operator, operators
from wildflower.models.placement import CLASSES, Axis
from wildflower.strategies.recipfl.graph import Drawing, Graph, Node


class GraphError(ValueError):
    """A network of which no graph can be made; the text says why."""


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


# Functions by the names that their layers have in descriptions, and the dimensions of their weights. Where a tensor has
# another number of them, or belongs to another function, that number is part of its operator's name: a decoder makes
# tensors of one number of dimensions.
FUNCTIONS: Mapping[str, tuple[str, int]] = {
    "linear": ("linear", 2),
    "embedding": ("embedding", 2),
    "conv1d": ("conv1d", 3),
    "conv2d": ("conv", 4),
    **dict.fromkeys(("batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm"), ("norm", 1)),
}


@lru_cache(maxsize=256)
def graph_of(family: Family, architecture: Architecture) -> Graph:
    """The graph of an architecture's network, from its input to its logits (of every exit).

    A layer with a weight and a bias is two nodes, one behind the other. What is frozen has no node of its own.
    GraphError where no graph can be made, or where there would be no tensor in it.
    """
    prefix, own, its = family.member_of(architecture)
    graph = _described(own, its) if _is_described(own, its) else _traced(own, its)
    if not graph.tensors:
        raise GraphError(
            f"no graph can be made of {family.name}: of {architecture} nothing is left that could be generated; "
            f"freeze = {', '.join(family.freeze)}"
        )
    nodes = tuple(replace(node, tensor=prefix + node.tensor) if node.tensor else node for node in graph.nodes)
    return replace(graph, nodes=nodes)


def _is_described(family: Family, architecture: Architecture) -> bool:
    """Whether the family describes all layers of an architecture, and they are known here."""
    return isinstance(family, BlockFamily) and all(
        type(layer) in OPERATORS
        for block in family.blocks(architecture)
        for layer in (*block.layers, *(block.shortcut or ()), *block.after)
    )


def _described(family: Family, architecture: Architecture) -> Graph:
    drawing = Drawing()
    add = drawing.add

    def chain(block: Block, path: str, layers: tuple[Layer, ...], position: int) -> int:
        for layer in layers:
            name_of, parts = OPERATORS[type(layer)]
            specs = layer.tensors()
            names = {part: f"{block.name}.{path}{layer.name}.{part}" for part in parts if part in specs}
            own = {part: name for part, name in names.items() if not family.is_frozen(name)}
            for part, name in own.items():
                positions = max((axis.repeat for axis in specs[part].axes if isinstance(axis, Axis)), default=1)
                position = add(Node(f"{name_of(layer)} {part}", name, specs[part].shape, positions), position)
            if not own:
                position = add(Node(name_of(layer)), position)
        return position

    assert isinstance(family, BlockFamily)
    position = 0
    for block in family.blocks(architecture):
        end = chain(block, "", block.layers, position)
        if block.concat:
            end = add(Node("concat"), end, position)
        if block.shortcut is not None:
            end = add(Node("sum"), end, chain(block, "shortcut.", block.shortcut, position))
        end = chain(block, "after.", block.after, end)
        if block.exit:
            add(Node(OUTPUT), end)
        else:
            position = end
    add(Node(OUTPUT), position)
    return drawing.graph


def _traced(family: Family, architecture: Architecture) -> Graph:
    """The graph of the functions that a network calls; what no generated tensor and no input flows into is left out.

    A tensor that several functions read is a node where it is read first.
    """
    try:
        found = operators(lambda: family.build(architecture), family.input_shape, family.input_dtype)
    except ValueError as error:
        raise GraphError(f"no graph can be made of {family.name}: {error}") from error
    specs = family.tensors(architecture)
    with torch.random.fork_rng(devices=[]):  # weights as the family itself draws them first, always the same
        torch.manual_seed(0)
        first = family.build(architecture).state_dict()
    drawing = Drawing()
    ends: dict[int, int] = {0: 0}  # position of an operator -> that of its last node
    seen: set[str] = set()
    for position, operator in enumerate(found[1:], 1):
        before = [ends[read] for read in operator.reads if read in ends]
        kind = _kind(operator, specs)
        own = [name for name in operator.tensors if name not in seen and _is_generated(name, kind, specs)]
        seen.update(own)
        for name in own:
            part, shape = name.rpartition(".")[2], specs[name].shape
            usual = FUNCTIONS.get(operator.name, ("", 0))[1]
            is_usual = len(shape) == (min(usual, 1) if part == "bias" else usual)
            called = f"{kind} {part}" if is_usual else f"{kind} {part} of {len(shape)}"
            before = [drawing.add(Node(called, name, shape, scale=_scale(operator, first)), *before)]
        if own:
            ends[position] = before[0]
        elif before:
            ends[position] = drawing.add(Node(kind), *before)
    return drawing.graph


def _kind(operator: Operator, specs: Mapping[str, TensorSpec]) -> str:
    """What an operator is called; a linear layer that ends in the classes is a classifier."""
    axes = [specs[name].axes[:1] for name in operator.tensors if name in specs]
    if operator.name == "linear" and any(isinstance(a, Axis) and a.group == CLASSES for first in axes for a in first):
        return "classifier"
    return FUNCTIONS.get(operator.name, (operator.name, 0))[0]


def _is_generated(name: str, kind: str, specs: Mapping[str, TensorSpec]) -> bool:
    """Whether a tensor is a node: it travels, and is no norm's bias."""
    if name not in specs or specs[name].frozen:
        return False
    return kind != "norm" or not name.endswith("bias")


def _scale(operator: Operator, first: Mapping[str, torch.Tensor]) -> float:
    """How widely a layer's first weights are spread, in multiples of sqrt(2 / fan in); 1 where they are all alike.

    Two digits of it, so that it is the same on every machine.
    """
    for name in operator.tensors:
        if name in first and first[name].dim() > 1 and first[name].numel() > 1:
            spread = float(first[name].std()) * math.sqrt(first[name][0].numel() / 2)
            return float(f"{spread:.2g}") or 1.0
    return 1.0
