"""From a module to its graph: traced, followed, and written with sizes that change with the kept channels."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import Graph as FxGraph
from torch.fx import Node

from wildflower.models.traced.depth import ancestors, blocks_of, check_parts, stacks_of, with_blocks
from wildflower.models.traced.exits import head_behind, wanted_places, with_exits
from wildflower.models.traced.graph import (
    BATCH,
    DTYPES,
    MOST_CONSTANT_BYTES,
    Constant,
    Cuts,
    Graph,
    Operation,
    Size,
    StateTensor,
    Stretch,
)
from wildflower.models.traced.groups import Group, groups_of, pinned_of
from wildflower.models.traced.layer_rules import LAYER_RULES
from wildflower.models.traced.layouts import Atom, Layout, product, resolved, size_of
from wildflower.models.traced.operators import CONSTANT, CONVOLUTIONS, CREATION, GETITEM, OPAQUE, full_name, short_name
from wildflower.models.traced.program import reads
from wildflower.models.traced.propagation import Propagation, arguments, place_in_code
from wildflower.models.traced.shape_rules import SHAPE_RULES
from wildflower.models.traced.tracing import Traced, trace
from wildflower.plugins.reference import PluginError

DROPPED = ("pin_memory", "layout", "memory_format")  # arguments that change no value
RESIZED = {"_reshape_alias", "_unsafe_view", "broadcast_to", "expand", "reshape", "view"} | CREATION
SCALED = CONVOLUTIONS | {"linear"}
PRODUCTS = {"addmm", "baddbmm", "bmm", "einsum", "matmul", "mm", "mv"}  # linear layers, if one factor is of weights


class Written:
    """A module's graph, and what is known of it on the server alone.

    Attributes:
        graph: as devices get it.
        traced, found: of which nodes and layouts it was made.
        groups: the tensors that each ties.
    """

    def __init__(
        self,
        where: str,
        module: nn.Module,
        input_shape: tuple[int, ...],
        dtype: torch.dtype,
        cuts: Cuts,
    ) -> None:
        self.pad_id = cuts.pad_id
        self.traced = trace(where, module, input_shape, dtype)
        self.found = followed(where, self.traced)
        tensors = self.traced.tensors
        self.live = {t: _live(graph, self.traced.names[t], self.traced) for t, graph in self.traced.graphs.items()}
        read = {self.traced.names[t].get(node.name) for t, live in self.live.items() for node in live}
        order = [name for name in module.state_dict(keep_vars=True) if name in tensors and name in read]
        self.parameters = [name for name in order if isinstance(tensors[name], nn.Parameter)]
        check_parts(where, "keep", cuts.keep, self.parameters)
        self.groups: list[Group] = groups_of(self.found, self.parameters, cuts.keep, cuts.together)
        self.numbers: dict[Atom, int] = {group.atom: number for number, group in enumerate(self.groups)}
        self.positions: dict[Node, int] = {}
        self._written: dict[bool, list[Operation]] = {}
        travelling = [name for name in order if name not in self.traced.constants]
        if not any(name in travelling for name in self.parameters):
            raise PluginError(f"{where} has no parameters that its answer depends on")
        writes_more = any(  # which a part might do that is left out
            node.op == "call_function" for t, live in self.live.items() for node in live - ancestors(self._answer(t))
        )
        if writes_more and (cuts.exits or cuts.early_exits):
            raise PluginError(
                f"{where} writes into buffers or parts of tensors, and where such a module could have exits is not "
                "found: write x[...] = y by torch.cat or torch.where, or take a method without exits, such as heterofl"
            )
        blocks = [] if writes_more else blocks_of(self.traced, self.found)
        stacks = stacks_of(blocks, self.found, module)
        self.places = wanted_places(where, cuts, self.traced, self.found, blocks, stacks)
        answers: list[list[int]] = [[] for _ in self.places]  # of each place, in both modes
        graph = Graph(
            groups={group.name: group.size for group in self.groups},
            state={name: self._state_tensor(name) for name in travelling} | self._heads(),
            training=self._nodes(True, answers),
            evaluation=self._nodes(False, answers),
            constants=self._constants(where),
            ties={name: of for name, of in self.traced.ties.items() if of in travelling},
        )
        if self.places:
            self.graph = with_exits(graph, self.places, answers, self.groups, self.traced)
        else:
            self.graph = with_blocks(where, graph, stacks, blocks, self.groups, self.positions, cuts.depth)

    def size(self, layout: Layout) -> Size:
        """Return the size of a dimension as the graph has it."""
        terms: dict[tuple[int, ...], int] = {}
        for segment in resolved(layout):
            found = [(atom.size, self._number(atom)) for atom in segment]
            numbers = tuple(sorted(number for _, number in found if number is not None))
            factor = math.prod(size for size, number in found if number is None)
            terms[numbers] = terms.get(numbers, 0) + factor
        if not any(terms):
            return sum(terms.values())
        return [[factor, *numbers] for numbers, factor in terms.items()]

    @property
    def answer_shape(self) -> tuple[int, ...]:
        """The shape of the answer to the batch that was traced."""
        return tuple(self._answer(True).meta["val"].shape)

    def why_pinned(self, name: str) -> str:
        """Return why nothing of a tensor is cut; "" if something is."""
        layouts = self.found.state[name]
        atoms = [atom for layout in layouts for segment in resolved(layout) for atom in segment]
        return "" if any(atom in self.numbers for atom in atoms) else "; ".join(dict.fromkeys(a.pinned for a in atoms))

    @property
    def pinned(self) -> dict[str, str]:
        """The dimensions of parameters of which nothing is cut, such as "conv1.weight[1]", and why."""
        return pinned_of(self.found, self.parameters)

    def _number(self, atom: Atom) -> int | None:
        return BATCH if atom.is_batch else self.numbers.get(atom)

    def _argument(self, layout: Layout) -> Any:
        size = self.size(layout)
        return size if isinstance(size, int) else {"s": size}

    def _state_tensor(self, name: str) -> StateTensor:
        tensor = self.traced.tensors[name].detach()
        parameter = isinstance(self.traced.tensors[name], nn.Parameter)
        trained = parameter and self.traced.tensors[name].requires_grad
        many = tensor.numel() > 1
        return StateTensor(
            dimensions=[self._stretches(layout) for layout in self.found.state[name]],
            kind="parameter" if trained else "frozen" if parameter else "buffer",
            dtype=str(tensor.dtype).removeprefix("torch."),
            mean=float(tensor.double().mean()) if tensor.numel() else 0.0,
            deviation=float(tensor.double().std()) if many else 0.0,
            classes=self._classes(name),
        )

    def _stretches(self, layout: Layout) -> list[Stretch]:
        stretches = []
        for segment in resolved(layout):
            place = next((place for place, atom in enumerate(segment) if atom in self.numbers), None)
            if place is None:
                stretches.append(Stretch(after=math.prod(atom.size for atom in segment)))
            else:
                before, after = (math.prod(a.size for a in part) for part in (segment[:place], segment[place + 1 :]))
                stretches.append(Stretch(before=before, group=self.numbers[segment[place]], after=after))
        if all(stretch.group < 0 for stretch in stretches):
            return [Stretch(after=size_of(layout))]
        return stretches

    def _classes(self, name: str) -> int:
        """Return the dimension of a tensor that counts the classes."""
        answer = self.found.of(self._answer(True))[1]
        for dimension, layout in enumerate(self.found.state[name]):
            segments = resolved(layout)
            if (
                segments == resolved(answer)
                and size_of(answer) > 1
                and not any(atom.pinned == "it counts the rows of a table" for segment in segments for atom in segment)
            ):
                return dimension
        return -1

    def _answer(self, training: bool) -> Node:
        [answer] = self.traced.graphs[training].output_node().all_input_nodes
        return answer

    def _constants(self, where: str) -> dict[str, Constant]:
        read = {name for nodes in self._written.values() for node in nodes for name in reads(node)[1]}
        constants = {name: self.traced.tensors[name] for name in sorted(read & self.traced.constants)}
        if sum(tensor.nbytes for tensor in constants.values()) > MOST_CONSTANT_BYTES:
            largest = max(constants, key=lambda name: constants[name].nbytes)
            raise PluginError(
                f"{where}: its constants, such as {largest}, have more than {MOST_CONSTANT_BYTES / 1e6:.0f} MB, which "
                "would go to every device in every round: make them parameters without gradients, or compute them in "
                "`forward`"
            )
        return {name: Constant.of(tensor) for name, tensor in constants.items()}

    def _heads(self) -> dict[str, StateTensor]:
        """Return the tensors of the heads of early exits, with first values as `nn.Linear` draws them."""
        found = {}
        classes = [Stretch(after=size_of(self.found.of(self._answer(True))[1]))]
        for number, place in enumerate(self.places, start=1):
            channels = self.found.of(place.nodes[True])[place.channels]
            deviation = (3 * size_of(channels)) ** -0.5
            for name, dimensions in (("weight", [classes, self._stretches(channels)]), ("bias", [classes])):
                tensor = StateTensor(dimensions=dimensions, kind="parameter", deviation=deviation, classes=0)
                found[f"exit{number}.{name}"] = tensor
        return found

    # Nodes

    def _nodes(self, training: bool, answers: list[list[int]]) -> list[Operation]:
        """Return the operators of a mode, and note the nodes of the answers of early exits."""
        graph, names = self.traced.graphs[training], self.traced.names[training]
        live = self.live[training]
        heads = {place.nodes[training]: (number, place) for number, place in enumerate(self.places)}
        numbers: dict[Node, dict[str, Any]] = {}
        written: list[Operation] = []
        scaled = self._scaled(graph, names)
        for node in graph.nodes:
            if node.op == "placeholder":
                name = names.get(node.name)
                numbers[node] = {"x": 0} if name is None else {"t": name}
            elif node in live:
                written.append(self._operation(node, numbers).model_copy(update={"scaled": scaled.get(node)}))
                numbers[node] = {"n": len(written) - 1}
                self.positions[node] = len(written) - 1
                if node in heads:
                    number, place = heads[node]
                    written += head_behind(number + 1, place, len(written) - 1, self.pad_id)
                    answers[number].append(len(written) - 1)
        if numbers[self._answer(training)] != {"n": len(written) - 1}:
            written.append(Operation(op="alias.default", args=[numbers[self._answer(training)]]))
        self._written[training] = written
        return written

    def _operation(self, node: Node, numbers: dict[Node, dict[str, Any]]) -> Operation:
        if node.target is operator.getitem:
            return Operation(op=GETITEM, args=[numbers[node.args[0]], node.args[1]])  # type: ignore[index]
        target, given = self._resized(node)
        known = {argument.name: argument for argument in target._schema.arguments}
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        positional, needed = True, 0
        for name, value in given.items():
            if name in DROPPED:
                positional = False
                continue
            encoded = {"on": 0} if name == "device" and value is not None else _encoded(value, numbers)
            is_default = known[name].has_default_value() and not _has_node(value) and value == known[name].default_value
            if known[name].kwarg_only or not positional:
                if not is_default:
                    kwargs[name] = encoded
            else:
                args.append(encoded)
                needed = needed if is_default else len(args)
        return Operation(op=full_name(target), args=args[:needed], kwargs=kwargs)

    def _scaled(self, graph: FxGraph, names: Mapping[str, str]) -> dict[Node, list[list[int]]]:
        """Return the nodes behind which HeteroFL's scaler stands, and the size of the channels that it divides by.

        They are linear layers and convolutions, and products with weights such as x @ W, behind a bias that is added.
        """
        found: dict[Node, list[list[int]]] = {}
        of_weights: set[Node] = set()
        for node in graph.nodes:
            if node.op == "placeholder":
                if node.name in names:
                    of_weights.add(node)
                continue
            if node.op != "call_function" or not node.all_input_nodes:
                continue
            if of_weights.issuperset(node.all_input_nodes):
                of_weights.add(node)
            elif short_name(node.target) in SCALED:
                self._scale(found, node, [self.found.of(node)[1 if short_name(node.target) != "linear" else -1]])
            elif short_name(node.target) in PRODUCTS:
                columns = [
                    resolved(column) for w in of_weights & {*node.all_input_nodes} for column in self.found.of(w)
                ]
                behind = _bias_behind(node, of_weights)
                self._scale(found, behind, [row for row in self.found.of(node) if resolved(row) in columns])
        return found

    def _scale(self, found: dict[Node, list[list[int]]], node: Node, channels: list[Layout]) -> None:
        size = self.size(product(channels))
        if not isinstance(size, int):
            found[node] = size

    def _resized(self, node: Node) -> tuple[torch._ops.OpOverload, dict[str, Any]]:
        """Return an operator and its arguments, with sizes in place of the numbers that change."""
        target, given = node.target, arguments(node)
        assert isinstance(target, torch._ops.OpOverload)
        name, layouts = short_name(target), self.found.layouts[node]
        if name in RESIZED:
            key = "shape" if "shape" in given else "size"
            given[key] = [self._argument(layout) for layout in self.found.of(node)]
        elif name == "arange" and self.found.is_batch(self.found.of(node)[0]):
            return torch.ops.aten.arange.start_step, _examples_counted(node, given)
        elif name in ("repeat", "tile"):
            key = "repeats" if name == "repeat" else "dims"
            before, times = self.found.of(given["self"]), list(given[key])
            sizes = [1] * (len(times) - len(before)) + [size_of(layout) for layout in before]
            given[key] = [
                {"s": [[1, BATCH]]} if self.found.is_batch(layout) and size == 1 else count
                for layout, size, count in zip(
                    self.found.of(node), sizes, [1] * (len(sizes) - len(times)) + times, strict=True
                )
            ]
        elif name == "unflatten":
            first = given["dim"] % len(self.found.of(given["self"]))
            given["sizes"] = [
                self._argument(layout) for layout in self.found.of(node)[first : first + len(given["sizes"])]
            ]
        elif name in ("split", "split_with_sizes", "chunk", "unsafe_chunk", "tensor_split") and isinstance(
            layouts, list
        ):
            dimension = given["dim"] % len(self.found.of(given["self"]))
            sizes = [self._argument(part[dimension]) for part in layouts]  # type: ignore[index]
            return torch.ops.aten.split_with_sizes.default, {
                "self": node.args[0],
                "split_sizes": sizes,
                "dim": given["dim"],
            }
        elif name in ("slice", "narrow") and node in self.found.details:
            front, middle = self.found.details[node]
            begin, end = self.size(front), self.size((*front, *middle))
            ends = {"start": _as_argument(begin), "end": _as_argument(end), "step": 1}
            return torch.ops.aten.slice.Tensor, {"self": node.args[0], "dim": given["dim"], **ends}
        elif name in CONVOLUTIONS and node in self.found.details:
            given["groups"] = self._argument(self.found.details[node])
        elif name == "group_norm":
            given["num_groups"] = self._argument(self.found.details[node])
        elif name in ("layer_norm", "rms_norm"):
            last = self.found.of(node)[-len(given["normalized_shape"]) :]
            given["normalized_shape"] = [self._argument(layout) for layout in last]
        elif name in OPAQUE | CONSTANT | {"normal"}:  # no other dimension has the size of the batch
            examples, batch = self.traced.batch_size, {"s": [[1, BATCH]]}
            for key, sizes in given.items():
                if isinstance(sizes, list):
                    given[key] = [batch if size == examples else size for size in sizes]
                elif name in CONSTANT and type(sizes) is int and sizes == examples:
                    given[key] = batch
        return target, given


def followed(where: str, traced: Traced) -> Propagation:
    """Return the layouts of a traced module; PluginError if its answer is not one row per example."""
    found = Propagation(traced.batch_size, {**LAYER_RULES, **SHAPE_RULES})
    for training in (True, False):
        found.run(traced.graphs[training], traced.names[training], traced.tensors, traced.constants)
        [answer] = traced.graphs[training].output_node().all_input_nodes
        layouts = found.of(answer)
        if len(layouts) not in (2, 3) or not found.is_batch(layouts[0]):
            shape = tuple(answer.meta["val"].shape)
            raise PluginError(
                f"{where} answers a batch of {traced.batch_size} with a tensor of {shape}: it must return one tensor "
                "of (batch, classes), or (batch, classes, positions) if tokens have labels"
                f"{'. Two classes are two numbers per example' * (shape == (traced.batch_size,))}"
            )
    return found


def _as_argument(size: Size) -> Any:
    return size if isinstance(size, int) else {"s": size}


def _has_node(value: Any) -> bool:
    return isinstance(value, Node | dict) or (isinstance(value, list | tuple) and any(map(_has_node, value)))


def _examples_counted(node: Node, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by which `arange` counts as many examples as a batch has."""
    start, step = given.get("start", 0), given.get("step", 1)
    if start != int(start) or step != int(step) or start < 0 or step < 0:
        raise PluginError(
            f"torch.arange at {place_in_code(node)} counts examples in fractions, backwards or from below 0: take "
            "torch.arange(x.shape[0]) and compute with it, as in 0.5 * torch.arange(x.shape[0])"
        )
    start, step = int(start), int(step)
    stop, dtype = {"s": [[step, BATCH], [start]]}, node.meta["val"].dtype
    return {"start": start, "end": stop, "step": step, "dtype": dtype, "device": given["device"]}


def _encoded(value: Any, numbers: dict[Node, dict[str, Any]]) -> Any:
    if isinstance(value, Node):
        return numbers[value]
    if isinstance(value, list | tuple):
        return [_encoded(inner, numbers) for inner in value]
    if isinstance(value, torch.dtype):
        name = str(value).removeprefix("torch.")
        if name not in DTYPES:
            raise PluginError(f"a model computes with {value}, which a graph may not hold")
        return {"d": name}
    if isinstance(value, float) and not math.isfinite(value):
        return {"f": "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}
    if isinstance(value, complex):
        raise PluginError(
            f"a model computes with the number {value}, and a graph holds no complex ones: make a tensor of two real "
            "parts by torch.complex(a, b)"
        )
    if isinstance(value, torch.device):
        return {"on": 0}
    if isinstance(value, torch.memory_format | torch.layout):
        return None
    return value


def _live(graph: FxGraph, names: dict[str, str], traced: Traced) -> set[Node]:
    """Return the nodes on which the answer depends, and those that change a tensor which travels."""
    travelling = {
        node for node in graph.nodes if node.op == "placeholder" and names.get(node.name, "") not in traced.constants
    }
    live: set[Node] = set()
    wanted = list(graph.output_node().all_input_nodes)
    for node in graph.nodes:
        if node.op == "call_function" and _writes(node) and not _is_copied_back(node):
            wanted.append(node)
    while wanted:
        node = wanted.pop()
        if node not in live:
            live.add(node)
            wanted += node.all_input_nodes
    # What only counts, such as the batches that a norm has met, is not computed.
    dead = [
        node
        for node in reversed(graph.nodes)
        if node.op == "call_function" and node in live and not _is_read(node, live) and _writes(node)
    ]
    for node in dead:
        if all(root.op == "placeholder" and root not in travelling for root in _roots(node)):
            live.discard(node)
    return live


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_copied_back(node: Node) -> bool:
    """Whether export wrote what an operator in place has written already."""
    if short_name(node.target) != "copy_" or node.users or not isinstance(node.args[0], Node):
        return False
    source = node.args[1]
    while isinstance(source, Node) and source.op == "call_function" and _writes(source):
        source = source.args[0]
    return node.args[0].op == "placeholder" and source is node.args[0]


def _is_read(node: Node, live: set[Node]) -> bool:
    return any(user in live or user.op == "output" for user in node.users)


def _roots(node: Node) -> set[Node]:
    """Return the placeholders whose memory a node's first argument may be a view of."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
    return {node}


def _bias_behind(node: Node, of_weights: set[Node]) -> Node:
    """Return the addition of weights to a product where nothing else reads the product; else the product."""
    if len(node.users) != 1:
        return node
    [reader] = node.users
    adds = reader.op == "call_function" and short_name(reader.target) in ("add", "add_")
    return reader if adds and of_weights & {*reader.all_input_nodes} else node
