"""A sub-model of a traced module: its graph, interpreted with the sizes of an architecture."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from typing_extensions import override

from wildflower.models.layers import BatchNorm
from wildflower.models.network import Network
from wildflower.models.traced.graph import (
    DTYPES,
    Graph,
    Operation,
    Size,
    StateTensor,
)
from wildflower.models.traced.guarded import function_named
from wildflower.models.traced.operators import GETITEM

STATISTICS = ("running_mean", "running_var")
INPUT = -1  # the register of the input


@dataclass(frozen=True)
class _Register:
    """An argument that is the value of a register."""

    number: int


@dataclass(frozen=True)
class _OfBatch:
    """A size that grows with the batch."""

    fixed: int
    per_example: int


@dataclass(frozen=True)
class _Device:
    """The device of the input."""


@dataclass
class _Step:
    """One node: what it calls, and which values go where.

    Attributes:
        function: an operator, or a norm of the program.
        arguments, options: constants, with None wherever a value comes in.
        registers: positions of arguments that are values of registers.
        late: positions, or names of options, of other arguments that are made anew each time.
        result: where the result goes.
        dropped: registers that nobody reads any more.
    """

    function: Callable[..., Any]
    result: int
    arguments: list[Any] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    registers: list[tuple[int, int]] = field(default_factory=list)
    late: list[tuple[int | str, Any]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)

    def call(self, values: list[Any], batch: int) -> Any:
        """Return its result, of the values of all registers."""
        arguments = self.arguments.copy()
        for place, register in self.registers:
            arguments[place] = values[register]
        if not self.late:
            return self.function(*arguments, **self.options)
        options = self.options.copy()
        for key, value in self.late:
            if isinstance(key, int):
                arguments[key] = _made(value, values, batch)
            else:
                options[key] = _made(value, values, batch)
        return self.function(*arguments, **options)

    def reads(self) -> Iterator[int]:
        """Yield the registers that it reads."""
        yield from (register for _, register in self.registers)
        for _, value in self.late:
            yield from _registers_in(value)


@dataclass
class _Steps:
    """The steps of a mode: which tensors are put into which registers first, and where the answers are at the end."""

    steps: list[_Step]
    tensors: list[tuple[int, Mapping[str, Any], str]]
    registers: int
    answers: list[int]


@dataclass(frozen=True)
class _BatchNormOf:
    """A batch norm that is trained: its path among the module's names, and its settings."""

    path: str
    momentum: float
    epsilon: float


class Part(nn.Module):
    """A place in the tree of a module's names, which holds tensors."""


class Program(Network):
    """A traced module with the kept channels of an architecture: (batch, *input shape) -> (batch, classes).

    Tensors have the names that they have in the module itself. Batch norms are modules, so that whatever looks for them
    finds them.
    """

    def __init__(
        self,
        graph: Graph,
        kept: Sequence[int],
        *,
        static: bool = False,
        scaler: bool = False,
        without_memory: bool = False,
        padding: tuple[int, int] | None = None,
    ) -> None:
        """Make the program, with first weights as far as a graph tells them.

        Args:
            graph: of the full model.
            kept: channels of every group; 0 of the groups in a block that is left out.
            static: whether batch norms keep no running statistics.
            scaler: whether results of cut layers are divided by the kept share of their channels.
            without_memory: whether parameters and buffers are to be given weights. Constants have values.
            padding: of texts their length in the graph, and the token that shorter ones are padded with.
        """
        super().__init__([])
        self._padding = padding
        self._graph, self._kept = graph, tuple(kept)
        self._static, self._scaler = static, scaler
        self._norms = _norms(graph)
        self._tables = _tables(graph)
        numbers = {group: number for number, group in enumerate(graph.groups)}
        self._left_out = [block for block, groups in graph.blocks.items() if not kept[numbers[groups[0]]]]
        last = [len(graph.training) - 1, len(graph.evaluation) - 1]
        heads = [exit.answers for exit in graph.exits.values() if kept[numbers[exit.groups[0]]]] or [last]
        # Of each mode the nodes of all answers, the deepest last.
        self._answers = {True: [head[0] for head in heads], False: [head[1] for head in heads]}
        self._make_tensors(torch.device("meta") if without_memory else torch.get_default_device())
        self._programs = {training: self._compile(training, self._answers[training][-1:]) for training in (True, False)}
        self._all = self._programs
        if len(heads) > 1:
            self._all = {training: self._compile(training, self._answers[training]) for training in (True, False)}

    def _make_tensors(self, device: torch.device) -> None:
        used = self._used()
        norms = {norm.path: norm for norm in self._norms.values()}
        left_out = {f"{path}.{name}" for path in norms for name in STATISTICS} if self._static else set()
        for name, spec in self._graph.state.items():
            if name not in used or name in left_out:
                continue
            if (path := name.rpartition(".")[0]) in norms:
                self._make_norm(norms[path])
            elif name in self._tables:
                self._make_table(name)
            owner, own = self._owner(name)
            value = drawn(spec, self._graph.shape(spec, self._kept), device)
            if spec.kind == "buffer":
                owner._buffers[own] = value
            else:
                owner._parameters[own] = nn.Parameter(value, requires_grad=spec.kind == "parameter")
        for name, constant in self._graph.constants.items():
            owner, own = self._owner(name)
            value = constant.tensor()
            owner._buffers[own] = value if device.type == "meta" else value.to(device)
            owner._non_persistent_buffers_set.add(own)

    def _make_norm(self, norm: _BatchNormOf) -> None:
        owner, own = self._owner(norm.path)
        if own in owner._modules:
            return
        with torch.device("meta"):  # its tensors are those of the state
            made = BatchNorm(1, running_statistics=not self._static, epsilon=norm.epsilon)
        made.momentum = norm.momentum
        made.register_parameter("weight", None)
        made.register_parameter("bias", None)
        [made.num_features] = self._graph.shape(self._graph.state[f"{norm.path}.running_mean"], self._kept)
        owner._modules[own] = made

    def _make_table(self, name: str) -> None:
        owner, own = self._owner(name.rpartition(".")[0])
        if own not in owner._modules:
            rows, channels = self._graph.shape(self._graph.state[name], self._kept)
            with torch.device("meta"):  # its table is that of the state
                owner._modules[own] = nn.Embedding(rows, channels, self._tables[name])

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        """Return the part that a tensor or a norm belongs to, made if it is missing, and its name there.

        Names are entered in the tables of modules: a user's may be those of a program's own attributes, as `scale`.
        """
        owner: nn.Module = self
        *path, own = name.split(".")
        for part in path:
            if part not in owner._modules:
                owner._modules[part] = Part()
            owner = owner._modules[part]  # type: ignore[assignment]  # no part is None
        return owner, own

    def _module(self, path: str) -> nn.Module:
        owner, own = self._owner(path)
        return owner._modules[own]  # type: ignore[return-value]  # no part is None

    def _used(self) -> set[str]:
        """Return the names of tensors that some node reads which is computed."""
        found: set[str] = set()
        for training in (True, False):
            nodes, (alive, standing) = self._nodes(training), self._alive(training, self._answers[training])
            for number in alive - standing.keys():
                found |= reads(nodes[number])[1]
        return found

    def _nodes(self, training: bool) -> list[Operation]:
        return self._graph.training if training else self._graph.evaluation

    def _alive(self, training: bool, answers: list[int]) -> tuple[set[int], dict[int, int]]:
        """Return the nodes on which answers depend, and in whose place others stand, as blocks are left out."""
        nodes = self._nodes(training)
        pairs = [self._graph.bypassed[block][0 if training else 1] for block in self._left_out]
        standing = {result: before for result, before in pairs}
        if not standing and not self._graph.exits:
            return set(range(len(nodes))), {}
        alive: set[int] = set()
        wanted = [*answers]
        while wanted:
            number = wanted.pop()
            if number >= 0 and number not in alive:
                alive.add(number)
                inside = [standing[number]] if number in standing else reads(nodes[number])[0]
                wanted += inside
        return alive, standing

    # Steps

    def _compile(self, training: bool, answers: list[int]) -> _Steps:
        nodes, (alive, standing) = self._nodes(training), self._alive(training, answers)
        names = [v["t"] for n in sorted(alive - standing.keys()) for v in self._read(nodes[n]) if "t" in v]
        # Of a node, or of a tensor by its name, the register.
        places: dict[str | int, int] = {name: len(nodes) + i for i, name in enumerate(dict.fromkeys(names))}
        steps: list[_Step] = []
        for number, node in enumerate(nodes):
            if number in standing and number in alive:
                places[number] = INPUT if standing[number] < 0 else places[standing[number]]
            elif number in alive:
                places[number] = number
                steps.append(self._step(number, node, places, training))
                if (share := self.scale(node)) != 1:
                    steps.append(_Step(torch.ops.aten.div.Scalar, number, [None, share], registers=[(0, number)]))
        registers = [places[number] for number in answers]
        _drop_unread(steps, registers, len(nodes))
        tensors: list[tuple[int, Mapping[str, Any], str]] = []
        for name, register in places.items():
            if isinstance(name, str):
                owner, own = self._owner(name)
                tensors.append((register, owner._parameters if own in owner._parameters else owner._buffers, own))
        return _Steps(steps, tensors, len(nodes) + len(tensors) + 1, registers)

    def _step(self, number: int, node: Operation, places: Mapping[str | int, int], training: bool) -> _Step:
        if node.op == "batch_norm.default" and (norm := self._norms.get(_statistic(node))) is not None:
            module = self._module(norm.path)
            return _Step(module, number, [None], registers=[(0, self._value(node.args[0], places).number)])
        if (
            node.op == "embedding.default"
            and isinstance(table := node.args[0], dict)
            and table.get("t") in self._tables
        ):
            module, inputs = self._module(table["t"].rpartition(".")[0]), self._value(node.args[1], places)
            return _Step(module, number, [None], registers=[(0, inputs.number)])
        if training and node.op == "dropout.default" and node.args[2] is True:
            # A module, so that devices that are trained at once find it and draw from their own generators. No tensor's
            # name has spaces. In evaluation, where modules draw nothing, it stays an operator.
            module = self._modules.setdefault(f"dropout of node {number}", nn.Dropout(float(node.args[1])))  # type: ignore[assignment]
            return _Step(module, number, [None], registers=[(0, self._value(node.args[0], places).number)])
        step = _Step(operator.getitem if node.op == GETITEM else function_named(node.op), number)
        keys: list[int | str] = [*range(len(node.args)), *node.kwargs]
        for key, given in zip(keys, (*node.args, *node.kwargs.values()), strict=True):
            value = self._value(given, places)
            constant = not _is_late(value)
            if isinstance(key, int):
                step.arguments.append(value if constant else None)
                if isinstance(value, _Register):
                    step.registers.append((key, value.number))
                    continue
            elif constant:
                step.options[key] = value
            if not constant:
                step.late.append((key, value))
        return step

    def _read(self, node: Operation) -> Iterator[dict[str, Any]]:
        """Yield what a node reads; of a norm that is a module, its input."""
        if node.op == "batch_norm.default" and _statistic(node) in self._norms:
            yield from Operation(op=node.op, args=node.args[:1]).objects()
        else:
            yield from node.objects()

    def _value(self, given: Any, places: Mapping[str | int, int]) -> Any:
        """Return an argument as it is passed on, or what stands for one that is made anew each time."""
        if isinstance(given, list):
            return [self._value(inner, places) for inner in given]
        if not isinstance(given, dict):
            return given
        [(kind, of)] = given.items()
        if kind == "x":
            return _Register(INPUT)
        if kind in ("n", "t"):
            return _Register(places[of])
        if kind == "s":
            return self._size(of)
        if kind == "d":
            return DTYPES[of]
        return float(of) if kind == "f" else _Device()

    def _size(self, size: Size) -> int | _OfBatch:
        one, two = (self._graph.size(size, self._kept, batch) for batch in (1, 2))
        return one if one == two else _OfBatch(2 * one - two, two - one)

    def scale(self, node: Operation) -> float:
        """Return what HeteroFL's scaler divides a node's result by; 1 where it does not."""
        if not self._scaler or node.scaled is None:
            return 1.0
        kept, full = (self._graph.size(node.scaled, w) for w in (self._kept, list(self._graph.groups.values())))
        return kept / full

    # Computing

    @property
    def steps(self) -> list[_Step]:
        """The steps of a pass in training, in order."""
        return self._programs[True].steps

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self._run(self._programs[self.training], x)[0]

    @override
    def exits(self, x: Tensor) -> list[Tensor]:
        return self._run(self._all[self.training], x)

    def _run(self, program: _Steps, x: Tensor) -> list[Tensor]:
        """Return the answers of a program."""
        batch, given = x.shape[0], x.shape[-1]
        shorter = self._padding is not None and given < self._padding[0]
        if self._padding is not None and shorter:  # a batch is cut to its longest text, and a graph has one length
            x = pad(x, (0, self._padding[0] - given), value=self._padding[1])
        values: list[Any] = [None] * program.registers
        for register, table, name in program.tensors:
            values[register] = table[name]
        values[INPUT] = x
        for step in program.steps:
            values[step.result] = step.call(values, batch)
            for register in step.dropped:
                values[register] = None
        answers = [values[register] for register in program.answers]
        return [answer[:, :, :given] if shorter and answer.dim() == 3 else answer for answer in answers]


def _made(value: Any, values: Sequence[Any], batch: int) -> Any:
    if isinstance(value, _Register):
        return values[value.number]
    if isinstance(value, _OfBatch):
        return value.fixed + value.per_example * batch
    if isinstance(value, _Device):
        return values[INPUT].device
    return [_made(inner, values, batch) for inner in value] if isinstance(value, list) else value


def _is_late(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_is_late, value))
    return isinstance(value, _Register | _OfBatch | _Device)


def _registers_in(value: Any) -> Iterator[int]:
    if isinstance(value, _Register):
        yield value.number
    elif isinstance(value, list):
        for inner in value:
            yield from _registers_in(inner)


def _drop_unread(steps: Sequence[_Step], answers: Collection[int], nodes: int) -> None:
    """Let every step drop the results of nodes that no later one reads."""
    last: dict[int, _Step] = {}
    for step in steps:
        for register in (*step.reads(), step.result):
            if 0 <= register < nodes:
                last[register] = step
    for register, step in last.items():
        if register not in answers:
            step.dropped.append(register)


def reads(node: Operation) -> tuple[list[int], set[str]]:
    """Return the nodes that a node reads, `INPUT` for the input, and the names of tensors."""
    objects = list(node.objects())
    nodes = [INPUT if "x" in value else value["n"] for value in objects if "x" in value or "n" in value]
    return nodes, {value["t"] for value in objects if "t" in value}


def _norms(graph: Graph) -> dict[str, _BatchNormOf]:
    """Return the batch norms that learn statistics in training and use them in evaluation, by their running mean."""
    found = {}
    used = {_statistic(node) for node in graph.evaluation if node.op == "batch_norm.default" and not node.args[5]}
    for node in graph.training:
        mean = _statistic(node) if node.op == "batch_norm.default" and node.args[5] else ""
        path = mean.removesuffix(".running_mean")
        tensors = [value.get("t") if isinstance(value, dict) else None for value in node.args[1:5]]
        named = [f"{path}.{name}" for name in ("weight", "bias", *STATISTICS)]
        is_module = (
            all(have in (None, name) for have, name in zip(tensors, named, strict=False)) and None not in tensors[2:]
        )
        if mean in used and path != mean and is_module and mean in graph.state:
            found[mean] = _BatchNormOf(path, float(node.args[6]), float(node.args[7]))
    return found


def _tables(graph: Graph) -> dict[str, int | None]:
    """Return the tables that modules of embeddings look up, by their names, and the row of each that is not trained."""
    found: dict[str, int | None] = {}
    for node in (*graph.training, *graph.evaluation):
        name = node.args[0].get("t", "") if node.op == "embedding.default" and isinstance(node.args[0], dict) else ""
        rest = node.args[2:]
        if name.endswith(".weight") and name in graph.state and not node.kwargs and len(rest) <= 1:
            others = [n for n in graph.state if n.rpartition(".")[0] == name.rpartition(".")[0]]
            if len(graph.state[name].dimensions) == 2 and others == [name]:
                found[name] = rest[0] if rest and rest[0] >= 0 else None
    return found


def _statistic(node: Operation) -> str:
    """Return the name of a norm's running mean; "" if it has none."""
    found = node.args[3] if len(node.args) > 3 else None
    return str(found.get("t", "")) if isinstance(found, dict) else ""


def drawn(spec: StateTensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return first values of the mean and the deviation that those of the module had."""
    value = torch.empty(shape, dtype=DTYPES[spec.dtype], device=device)
    if device.type != "meta" and value.is_floating_point():
        value.uniform_(-math.sqrt(3), math.sqrt(3)).mul_(spec.deviation).add_(spec.mean)
    return value
