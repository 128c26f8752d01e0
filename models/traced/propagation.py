"""Layouts of all tensors of traced graphs, found by following each dimension through every operator."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from wildflower.models.traced.layouts import (
    ONE,
    Atom,
    CannotAlignError,
    Layout,
    fresh,
    pin,
    resolved,
    size_of,
    unify,
)
from wildflower.models.traced.operators import CONSTANT, CREATION, ELEMENTWISE, SAME, short_name

Layouts = list[Layout]
"""Of a tensor: one layout per dimension."""
Found = Layouts | list[Layouts | None] | list[Layouts] | None
"""Of a node: those of its tensor, or of several."""


def shape_of(node: Node) -> tuple[int, ...]:
    """Return the shape of a node's tensor in the full model."""
    return tuple(int(size) for size in node.meta["val"].shape)


def arguments(node: Node) -> dict[str, Any]:
    """Return all arguments of a node by their names, defaults too."""
    found = {}
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]  # of an operator
        given = node.args[position] if position < len(node.args) else argument.default_value
        found[argument.name] = node.kwargs.get(argument.name, given)
    return found


def place_in_code(node: Node) -> str:
    """Return where the user's code calls a node's operator, such as "network.py:12"; "" where that is not known."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    files = [line for line in lines if line.startswith("File ") and "/torch/" not in line]
    if not files:
        return ""
    name, _, rest = files[-1].removeprefix('File "').partition('", line ')
    return f"{name.rpartition('/')[2]}:{rest.partition(',')[0]}"


class Propagation:
    """The layouts of every node of some graphs that share the tensors of one module.

    Attributes:
        batch: the atom of examples.
        layouts: of every node.
        state: of every tensor that the graphs read, by its name in the module.
        details: what else is known of nodes whose numbers change with the sizes: the layout of groups, and so on.
        unknown: how often dimensions were lost at which operator.
    """

    def __init__(self, batch_size: int, rules: Mapping[str, Callable[[Propagation, Node], Found]]) -> None:
        self.rules = rules
        self.batch = Atom(batch_size, "the batch", is_batch=True)
        self.layouts: dict[Node, Found] = {}
        self.state: dict[str, Layouts] = {}
        self.details: dict[Node, Any] = {}
        self.unknown: Counter[str] = Counter()
        self._tables: set[Atom] = set()

    def run(self, graph: Graph, names: Mapping[str, str], tensors: Mapping[str, Tensor], fixed: Iterable[str]) -> None:
        """Follow a graph.

        Args:
            names: placeholder -> name of the tensor in the module; one that is missing is the input.
            tensors: by name; tied ones are one object.
            fixed: names of tensors that are never cut: constants.
        """
        constants = set(fixed)
        for node in graph.nodes:
            if node.op == "placeholder":
                name = names.get(node.name)
                self.layouts[node] = self._input(node) if name is None else self._tensor(name, tensors, constants)
            elif node.op == "call_function":
                self.layouts[node] = self._call(node)
            elif node.op == "output":
                for result in node.all_input_nodes:
                    for layout in self.of(result)[1:]:
                        pin(layout, "it is an output")

    def of(self, node: Node) -> Layouts:
        """Return the layouts of a node's tensor."""
        found = self.layouts[node]
        if found is None or (found and not isinstance(found[0], tuple)):
            raise CannotAlignError("it returns no tensor")
        return found  # type: ignore[return-value]  # just looked at

    def tensors_of(self, node: Node) -> list[Node]:
        """Return the nodes that a node reads and that are one tensor each."""
        return [read for read in node.all_input_nodes if isinstance(read.meta.get("val"), Tensor)]

    def is_batch(self, layout: Layout) -> bool:
        """Say whether a dimension counts the examples and nothing else."""
        return resolved(layout) == ((self.batch,),)

    def sized(self, size: int, why: str) -> Layout:
        """Return the layout of a new dimension: the batch if it has its size, and else one that is never cut."""
        return ((self.batch,),) if size == self.batch.size else fresh(size, why)

    def elementwise(self, node: Node) -> Layouts:
        """Return the layouts of a result of tensors that are broadcast."""
        value = node.meta["val"]
        found: list[Layout | None] = [None] * (value if isinstance(value, Tensor) else value[0]).dim()
        for read in self.tensors_of(node):
            for place, layout in enumerate(reversed(self.of(read)), start=1):
                if size_of(layout) == 1 and not self.is_batch(layout):
                    continue
                if (there := found[-place]) is None:
                    found[-place] = layout
                else:
                    unify(there, layout)
        return [ONE if layout is None else resolved(layout) for layout in found]

    def _input(self, node: Node) -> Layouts:
        return [((self.batch,),), *(fresh(size, "it is an input") for size in shape_of(node)[1:])]

    def _tensor(self, name: str, tensors: Mapping[str, Tensor], constants: set[str]) -> Layouts:
        if name not in self.state:
            tensor = tensors[name]
            tied = next((other for other in self.state if tensors[other] is tensor), None)
            why = "it is a constant" if name in constants else ""
            self.state[name] = self.state[tied] if tied else [fresh(size, why) for size in tensor.shape]
        return self.state[name]

    def _call(self, node: Node) -> Found:
        if node.target is operator.getitem:
            several = self.layouts[node.args[0]]  # type: ignore[index]  # a node
            return several[node.args[1]] if isinstance(several, list) else None  # type: ignore[index,return-value]
        try:
            found = self._followed(node)
        except CannotAlignError as error:
            found = self._opaque(node, str(error))
        value = node.meta.get("val")
        if isinstance(value, Tensor) and tuple(map(size_of, found or [])) != shape_of(node):  # type: ignore[arg-type]
            raise AssertionError(f"{node.format_node()}: {found} is not {shape_of(node)}")
        return found

    def _followed(self, node: Node) -> Found:
        name = short_name(node.target)
        if name in self.rules:
            return self.rules[name](self, node)
        if not isinstance(node.meta.get("val"), Tensor | list | tuple):
            return None
        if name in SAME:
            return list(self.of(node.args[0]))  # type: ignore[arg-type]  # a node
        if name in ELEMENTWISE:
            return self.elementwise(node)
        if name in CREATION:
            return [((self.batch,),) if size == self.batch.size else fresh(size) for size in shape_of(node)]
        if name in CONSTANT:
            return [self.sized(size, "it counts positions") for size in shape_of(node)]
        return self._opaque(node, "")

    def _opaque(self, node: Node, why: str) -> Found:
        """Pin whatever an operator reads that is not followed."""
        name = short_name(node.target)
        self.unknown[name] += 1
        place = place_in_code(node)
        reason = f"{name}{f' at {place}' if place else ''} is not followed{f': {why}' if why else ''}"
        of_batch = False
        for read in node.all_input_nodes:
            several = self.layouts.get(read)
            for layouts in [several] if isinstance(read.meta.get("val"), Tensor) else several or []:
                for layout in layouts or []:
                    of_batch = of_batch or self.is_batch(layout)  # type: ignore[arg-type]
                    pin(layout, reason)  # type: ignore[arg-type]

        def result(value: object) -> Layouts | None:
            if not isinstance(value, Tensor):
                return None
            return [
                ((self.batch,),) if place == 0 and of_batch and size == self.batch.size else fresh(size, reason)
                for place, size in enumerate(value.shape)
            ]

        value = node.meta.get("val")
        return [result(entry) for entry in value] if isinstance(value, list | tuple) else result(value)
