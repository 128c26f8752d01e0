"""The graph of a traced module as JSON: all that a device gets of it, and is checked before it is run.

Values in arguments: numbers, texts and lists stand for themselves; an object is one of

- {"n": 3}: the result of the third node of the list, counted from 0; {"x": 0}: the input;
- {"t": "conv1.weight"}: a tensor of the state, or a constant;
- {"s": [[64, 2], [3]]}: a size, 64 times the kept channels of group 2, and 3 more; -1 stands for the batch;
- {"d": "float32"}: a type; {"f": "inf"}: a number that JSON has not; {"on": 0}: the device that computes.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from wildflower.models.traced.operators import (
    CONSTANT,
    CREATION,
    ELEMENTWISE,
    FOURIER,
    GETITEM,
    POOLING,
    SAME,
    operator_named,
)
from wildflower.plugins.raised_as import raised_as

MOST_NODES = 50_000
MOST_BYTES = 2**26  # of the JSON of a graph
MOST_ENTRIES = 2**31  # of one tensor
MOST_CONSTANT_BYTES = 2**24  # of all constants together
MOST_DEPTH = 6  # of lists in lists
MOST_SIDE = 2**24  # a number among the arguments of an operator
BATCH = -1
# Operators whose results have the sizes of a list among their arguments, and those that also read a value to fill with.
GROWING = CREATION | CONSTANT | POOLING | FOURIER
GROWING |= {"broadcast_to", "col2im", "constant_pad_nd", "expand", "max_unpool1d", "max_unpool2d", "normal", "pad"}
GROWING |= {"repeat", "replication_pad1d", "replication_pad2d", "replication_pad3d", "tile"}
FILLING = ELEMENTWISE | SAME | CREATION | {"masked_fill", "constant_pad_nd", "pad"}
# The least entries of a result, for operators whose result grows with a single number and not with a list of sizes.
ENTRIES: Mapping[str, Callable[..., float]] = {
    "arange": lambda end, start=0, step=1: abs((end - start) / (step or 1)),
    "eye": lambda n, m=None: n * (n if m is None else m),
    **dict.fromkeys(("tril_indices", "triu_indices"), lambda row, col, offset=0: row * col),
    "diag": lambda diagonal=0: diagonal**2,
    "diag_embed": lambda offset=0, dim1=0, dim2=1: offset**2,
}
DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}
Count = Annotated[int, Field(ge=1, le=2**24)]
Name = Annotated[str, Field(min_length=1, max_length=500, pattern=r"^[A-Za-z0-9_.#:\-\[\]]+$")]

Size = int | list[list[int]]
"""A number, or a sum of products: each a factor, and the numbers of groups (`BATCH` of the batch)."""


class _Read(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Stretch(_Read):
    """A part of a dimension: `before` times the group, each time with `after` entries per channel."""

    before: Count = 1
    group: Annotated[int, Field(ge=-1)] = -1
    after: Count = 1


class StateTensor(_Read):
    """A tensor that travels.

    Attributes:
        dimensions: each as stretches, one behind another.
        kind: whether it is trained, has no gradient, or is a buffer.
        mean, deviation: of its first values, by which a device draws first weights of its own.
        classes: the dimension of the classes; -1: none.
    """

    dimensions: list[list[Stretch]] = Field(max_length=8)
    kind: Annotated[str, Field(pattern="^(parameter|frozen|buffer)$")]
    dtype: str = "float32"
    mean: float = 0.0
    deviation: Annotated[float, Field(ge=0)] = 0.0
    classes: Annotated[int, Field(ge=-1, le=7)] = -1


class Constant(_Read):
    """A tensor that every device has from the graph: its entries, compressed and in base64."""

    shape: list[Annotated[int, Field(ge=0, le=2**24)]] = Field(max_length=8)
    dtype: str
    data: str

    def tensor(self) -> Tensor:
        """Return the tensor; ValueError if the entries are not as many as the shape says."""
        dtype = _dtype(self.dtype)
        size = math.prod(self.shape) * dtype.itemsize
        if size > MOST_CONSTANT_BYTES:
            raise ValueError(f"a constant has {size:,} bytes, at most {MOST_CONSTANT_BYTES:,} are allowed")
        data = _unpacked(self.data, size)
        if len(data) != size:
            raise ValueError(f"a constant of the shape {self.shape} has {len(data)} bytes, not {size}")
        if not size:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(bytearray(data), dtype=dtype).reshape(self.shape)

    @classmethod
    def of(cls, tensor: Tensor) -> Constant:
        """Return the constant of a tensor's values."""
        value = tensor.detach().contiguous().cpu()
        data = value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return cls(shape=list(value.shape), dtype=str(value.dtype).removeprefix("torch."), data=_packed(data))


class Operation(_Read):
    """One node: an operator by its name, and its arguments.

    scaled: the size of its result's channels that HeteroFL's scaler divides by, kept and full.
    """

    op: Annotated[str, Field(max_length=80)]
    args: list[Any] = []
    kwargs: dict[Annotated[str, Field(pattern="^[a-z_0-9]{1,40}$")], Any] = {}
    scaled: list[list[int]] | None = None

    def objects(self) -> Iterator[dict[str, Any]]:
        """Yield what stands for values in the arguments: results, tensors, sizes and the like."""
        for given in (*self.args, *self.kwargs.values()):
            yield from (value for value in leaves(given) if isinstance(value, dict))


class Exit(_Read):
    """A head of a graph with several.

    Attributes:
        groups: of what it is behind, and no head in front of it; they are 0 where a sub-model ends in front of it.
        answers: the nodes of its answer in training and in evaluation.
    """

    groups: list[Name] = Field(min_length=1)
    answers: list[Annotated[int, Field(ge=0)]] = Field(min_length=2, max_length=2)


class Graph(_Read):
    """A module's computation, and how it is cut.

    Attributes:
        groups: name -> channels of the full model.
        state: in the order of the module's own state.
        ties: further names of tied tensors -> the names that they go by.
        training, evaluation: the nodes of both modes; the last one's result is the answer.
        blocks: what may be left out: name -> the groups inside, which are then 0.
        bypassed: of each block its result and what stands for that if it is left out, as nodes of both modes.
        stacks: blocks alike, in order, those that always stay too: name -> names.
        exits: heads from the shallowest to the last, whose answers are the graph's; empty where there is one alone.
    """

    groups: dict[Name, Count]
    state: dict[Name, StateTensor]
    constants: dict[Name, Constant] = {}
    ties: dict[Name, Name] = {}
    training: list[Operation] = Field(min_length=1, max_length=MOST_NODES)
    evaluation: list[Operation] = Field(min_length=1, max_length=MOST_NODES)
    blocks: dict[Name, list[Name]] = {}
    bypassed: dict[Name, list[list[int]]] = {}
    stacks: dict[Name, list[Name]] = {}
    exits: dict[Name, Exit] = {}

    def size(self, size: Size, kept: Sequence[int], batch: int = 1) -> int:
        """Return a size where `kept` has the channels of every group."""
        if isinstance(size, int):
            return size
        return sum(math.prod(batch if n == BATCH else kept[n] for n in term[1:]) * term[0] for term in size)

    def shape(self, tensor: StateTensor, kept: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a tensor where `kept` has the channels of every group."""
        return tuple(
            sum(part.before * part.after * (1 if part.group < 0 else kept[part.group]) for part in parts)
            for parts in tensor.dimensions
        )


class Cuts(NamedTuple):
    """Choices of a user on how a module is cut.

    Attributes:
        keep: parts whose channels are not cut.
        together: patterns of groups that become one.
        depth: patterns of blocks that may be left out.
        exits: parts behind which there are exits.
        early_exits: whether exits are found where none are named.
        pad_id: of texts the token that pads them, which an exit's mean over positions leaves out.
    """

    keep: tuple[str, ...] = ()
    together: tuple[str, ...] = ()
    depth: tuple[str, ...] = ("*",)
    exits: tuple[str, ...] = ()
    early_exits: bool = False
    pad_id: int | None = None


@lru_cache(maxsize=16)
def read_graph(text: str) -> Graph:
    """Return the graph that `write_graph` wrote; ValueError that names what a graph may not hold."""
    try:
        graph = Graph.model_validate_json(_unpacked(text, MOST_BYTES))
    except UnicodeDecodeError as error:
        raise ValueError(f"the graph of a model is no text: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"the graph of a model is not well-formed: {where}: {first['msg']}") from None
    _check_state(graph)
    for mode in ("training", "evaluation"):
        for number, node in enumerate(getattr(graph, mode)):
            try:
                _check_node(graph, number, node)
            except ValueError as error:
                raise ValueError(f"the graph of a model, {mode}, node {number} ({node.op}): {error}") from None
    _check_blocks(graph)
    return graph


def write_graph(graph: Graph) -> str:
    """Return a graph as JSON, compressed and in base64: the order of groups and tensors stays, wherever it travels."""
    return _packed(json.dumps(graph.model_dump(exclude_defaults=True), separators=(",", ":")).encode())


def _packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode()


def _unpacked(text: str, most: int) -> bytes:
    """Return what `_packed` packed; ValueError if it is none, or has more bytes."""
    with raised_as(ValueError, "it is not what was packed: ", (zlib.error, ValueError)):
        data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), most + 1)
    if len(data) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return data


def _check_state(graph: Graph) -> None:
    full = list(graph.groups.values())
    for name, tensor in graph.state.items():
        _dtype(tensor.dtype)
        if any(part.group >= len(full) for parts in tensor.dimensions for part in parts):
            raise ValueError(f"the graph of a model: {name} is cut by a group that it does not have")
        if math.prod(graph.shape(tensor, full)) > MOST_ENTRIES:
            raise ValueError(f"the graph of a model: {name} has more than {MOST_ENTRIES:,} entries")
        if tensor.classes >= len(tensor.dimensions):
            raise ValueError(f"the graph of a model: {name} has no dimension {tensor.classes} of classes")
    for name, constant in graph.constants.items():
        with raised_as(ValueError, f"the graph of a model: {name}: "):
            constant.tensor()
    if both := graph.state.keys() & graph.constants.keys():
        raise ValueError(f"the graph of a model: {min(both)} travels and is a constant as well")
    if unknown := set(graph.ties.values()) - graph.state.keys():
        raise ValueError(f"the graph of a model: {min(unknown)}, to which another is tied, is missing")
    if sum(len(constant.data) for constant in graph.constants.values()) > MOST_CONSTANT_BYTES:
        raise ValueError(f"the graph of a model has more than {MOST_CONSTANT_BYTES:,} bytes of constants")


def _check_node(graph: Graph, number: int, node: Operation) -> None:
    if node.op != GETITEM:
        operator_named(node.op)
    for value in (*node.args, *node.kwargs.values()):
        for found in leaves(value):
            _check_leaf(graph, number, found)
    _check_growth(graph, node)
    if node.scaled is not None:
        _check_size(graph, node.scaled)


def _check_growth(graph: Graph, node: Operation) -> None:
    """Raise ValueError if an operator could make a result out of all proportion to what it reads."""
    name = node.op.partition(".")[0]
    if name in ("slice", "narrow"):  # whose end may be "behind the last one"
        return
    full = list(graph.groups.values())
    for value in (*node.args, *node.kwargs.values()):
        several = isinstance(value, list)
        entries = [graph.size(v["s"], full) if isinstance(v, dict) and "s" in v else v for v in leaves(value)]
        numbers = [abs(entry) for entry in entries if type(entry) is int]
        if any(number > MOST_SIDE for number in numbers) and (several or name not in FILLING):
            raise ValueError(f"the number {max(numbers):,} is larger than {MOST_SIDE:,}")
        if several and name in GROWING and math.prod(max(1, number) for number in numbers) > MOST_ENTRIES:
            raise ValueError(f"its result has more than {MOST_ENTRIES:,} entries")
    if name in ENTRIES:
        names = [argument.name for argument in operator_named(node.op)._schema.arguments]
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        sizes = {n: graph.size(v["s"], full) if isinstance(v, dict) and "s" in v else v for n, v in given.items()}
        numbers_alone = {n: size for n, size in sizes.items() if type(size) in (int, float)}
        try:
            made = ENTRIES[name](**numbers_alone)
        except TypeError as error:
            raise ValueError(f"its arguments are none that it takes: {error}") from None
        if made > MOST_ENTRIES:
            raise ValueError(f"its result has more than {MOST_ENTRIES:,} entries")


def leaves(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield what stands in lists; ValueError for lists in too many others."""
    if not isinstance(value, list):
        yield value
        return
    if depth == MOST_DEPTH:
        raise ValueError(f"lists lie in one another more than {MOST_DEPTH} times")
    for inner in value:
        yield from leaves(inner, depth + 1)


def _check_leaf(graph: Graph, number: int, value: Any) -> None:
    if value is None or isinstance(value, bool | float | int):
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError(f"the number {value} is too large")
        return
    if isinstance(value, str):
        if len(value) > 200:
            raise ValueError("a text has more than 200 letters")
        return
    if not isinstance(value, Mapping) or len(value) != 1:
        raise ValueError(f"{value!r:.60} is no argument")
    [(kind, of)] = value.items()
    if kind == "n":
        if not isinstance(of, int) or isinstance(of, bool) or not 0 <= of < number:
            raise ValueError(f"it reads the result of node {of!r}, which is not in front of it")
    elif kind == "t":
        if of not in graph.state and of not in graph.constants:
            raise ValueError(f"it reads the tensor {of!r:.60}, which is missing")
    elif kind == "s":
        _check_size(graph, of)
    elif kind == "d":
        _dtype(of)
    elif kind == "f":
        if of not in ("inf", "-inf", "nan"):
            raise ValueError(f"{of!r:.60} is no number")
    elif (kind, of) not in (("x", 0), ("on", 0)):
        raise ValueError(f"{value!r:.60} is no argument")


def _check_size(graph: Graph, size: Any) -> None:
    terms = size if isinstance(size, list) else []
    whole = all(isinstance(term, list) and term and all(type(n) is int for n in term) for term in terms)
    if not terms or not whole or any(not BATCH <= n < len(graph.groups) for term in terms for n in term[1:]):
        raise ValueError(f"{size!r:.60} is no size")
    if not all(0 <= term[0] <= MOST_ENTRIES for term in terms):
        raise ValueError(f"{size!r:.60} is no size that is allowed")


def _check_blocks(graph: Graph) -> None:
    for block, groups in graph.blocks.items():
        if not groups or any(group not in graph.groups for group in groups) or block not in graph.bypassed:
            raise ValueError(f"the graph of a model: the block {block} has groups that are missing")
    for block, modes in graph.bypassed.items():
        counts = (len(graph.training), len(graph.evaluation))
        if len(modes) != 2 or not all(
            len(pair) == 2 and -1 <= pair[1] < pair[0] < count for pair, count in zip(modes, counts, strict=True)
        ):
            raise ValueError(f"the graph of a model: {block} is bypassed by nodes that are not in front of it")
    for name, exit in graph.exits.items():
        if any(group not in graph.groups for group in exit.groups):
            raise ValueError(f"the graph of a model: the exit {name} has groups that are missing")
        if exit.answers[0] >= len(graph.training) or exit.answers[1] >= len(graph.evaluation):
            raise ValueError(f"the graph of a model: the exit {name} answers by nodes that are missing")


def _dtype(name: object) -> torch.dtype:
    if name not in DTYPES:
        raise ValueError(f"{name!r:.60} is no type that a graph may hold")
    return DTYPES[str(name)]
