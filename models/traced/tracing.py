"""A module as graphs of operators, one for training and one for evaluation. Only a server traces."""

from __future__ import annotations

import io
import logging
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from wildflower.models.traced.operators import ALLOWED, short_name
from wildflower.models.traced.propagation import place_in_code
from wildflower.plugins.reference import PluginError, one_sentence

WHOLE = 'or give every device the whole module: family-arguments = "levels = [{}]"'
# Sizes of the batch that is traced: one that no other dimension has.
BATCHES = (37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113)


class _Logits(nn.Module):
    """A module whose answer is one tensor: of an answer of Hugging Face's, its logits."""

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        self.of = of

    def forward(self, inputs: Tensor) -> Any:
        """(batch, *input shape) -> (batch, classes)."""
        answer = self.of(inputs)
        return getattr(answer, "logits", answer)


@dataclass
class Traced:
    """A module's graphs and the tensors that they read.

    Attributes:
        graphs: mode of training -> graph.
        names: likewise, placeholder -> name of a tensor; the one that is missing is the input.
        tensors: name -> tensor; tied ones have one name.
        ties: further name of a tied tensor -> its name.
        constants: names of tensors that do not travel.
    """

    graphs: dict[bool, Graph] = field(default_factory=dict)
    names: dict[bool, dict[str, str]] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    constants: set[str] = field(default_factory=set)
    batch_size: int = BATCHES[0]


def trace(where: str, module: nn.Module, input_shape: tuple[int, ...], dtype: torch.dtype) -> Traced:
    """Return a module's graphs.

    Args:
        where: what a message begins with.
        module: with memory; its mode of training is changed.

    Raises:
        PluginError: it cannot be traced, with its line or operator and what to do.
    """
    found = Traced(batch_size=_batch_size(module, input_shape))
    inputs = torch.zeros(found.batch_size, *input_shape, dtype=dtype)
    for training in (True, False):
        program = _exported(where, module.train(training), inputs)
        _remove_checks(program.graph)
        found.graphs[training] = program.graph
        _read_tensors(found, program, module, training)
        _check(where, program)
    return found


def _batch_size(module: nn.Module, input_shape: tuple[int, ...]) -> int:
    taken = set(input_shape)
    for tensor in (*module.parameters(), *module.buffers()):
        taken |= set(tensor.shape)
    return next((size for size in BATCHES if all(other % size for other in taken)), BATCHES[0])


def _exported(where: str, module: nn.Module, inputs: Tensor) -> Any:
    try:
        with _quiet(), _without_autograd_functions(where), torch.no_grad(), _Detached(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.export(_Logits(module), (inputs,))
    except PluginError:
        raise
    except Exception as error:  # of any kind: a model is any Python
        raise PluginError(f"{where} {_why(error, module, inputs)}") from error


def _why(error: Exception, module: nn.Module, inputs: Tensor) -> str:
    """Return in words why a module cannot be traced with inputs."""
    line = _line_of(error)
    kind, text = type(error).__name__, str(error)
    if "DataDependent" in kind or "data-dependent" in text:
        norms = {name: part for name, part in module.named_modules() if isinstance(part, _BatchNorm)}
        if counting := [name for name, norm in norms.items() if norm.momentum is None]:
            return (
                f"has a batch norm, {counting[0]}, with momentum = None, which divides by a count of batches: give it "
                f"a momentum, such as 0.1, {WHOLE}"
            )
        return (
            f"decides by the values of a tensor{line}, and a model that is cut by itself may decide by shapes alone: "
            f"compute both and choose by torch.where, {WHOLE}"
        )
    if "required argument" in text or ("missing" in text and "positional" in text):
        return (
            f"takes several inputs ({one_sentence(error)}), and a task has one per example: give further ones a "
            "default, or write a module around it whose forward takes one"
        )
    try:
        with torch.no_grad():
            module(inputs)
    except Exception as own:  # of any kind: then it is not the tracer that fails
        return (
            f"fails on inputs of the task's shape, (batch, {', '.join(map(str, inputs.shape[1:]))}){_line_of(own)}: "
            f"{one_sentence(own)}. Have it take these: its constructor gets `input_shape` where it has a parameter of "
            'this name, and others are said by family-arguments, such as "arguments = {channels = 1}"'
        )
    return f"cannot be traced{line}: {one_sentence(error)}. Change that line, {WHOLE}"


def _line_of(error: Exception) -> str:
    """Return the innermost line of the user's code, such as " (network.py:12: if x.mean() > 0:)"."""
    found = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if not any(
            part in frame.filename for part in ("/torch/", "/wildflower/", "/models/traced/", "<frozen", "<eval")
        ):
            found = f" ({frame.filename.rpartition('/')[2]}:{frame.lineno}: {frame.line})"
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """PyTorch logs and prints a graph that it cannot finish and raises an error as well, which is enough."""
    loggers = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.startswith("torch")]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


@contextmanager
def _without_autograd_functions(where: str) -> Iterator[None]:
    """Refuse functions with a backward pass of their own, which a graph of the forward pass would lose."""
    before = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *arguments: Any, **options: Any) -> Any:
        if cls.__module__.partition(".")[0] == "torch":
            return before.__get__(None, cls)(*arguments, **options)
        raise PluginError(
            f"{where} uses {cls.__module__}.{cls.__qualname__}, an autograd.Function, whose backward pass a graph does "
            f"not have: write it by differentiable operators, {WHOLE}"
        )

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = before  # type: ignore[method-assign]


class _Detached(TorchFunctionMode):
    """Has what is computed in the user's own `torch.no_grad` read detached tensors, as a graph keeps these alone."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0

    @override
    def __enter__(self) -> Self:
        self._before = torch.no_grad.__enter__, torch.no_grad.__exit__
        enter, leave = self._before

        def entered(region: torch.no_grad) -> None:
            self._depth += 1
            enter(region)

        def left(region: torch.no_grad, *error: Any) -> None:
            self._depth -= 1
            leave(region, *error)

        torch.no_grad.__enter__, torch.no_grad.__exit__ = entered, left  # type: ignore[method-assign]
        super().__enter__()
        return self

    @override
    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.no_grad.__enter__, torch.no_grad.__exit__ = self._before  # type: ignore[method-assign]

    @override
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if not self._depth or name in ("__get__", "__set__", "detach"):
            return function(*args, **kwargs or {})
        first = 1 if name.startswith("__i") or name == "__setitem__" or (name.endswith("_") and name[0] != "_") else 0
        rest, options = tree_map_only(Tensor, Tensor.detach, (args[first:], kwargs or {}))
        return function(*args[:first], *rest, **options)


def _read_tensors(found: Traced, program: Any, module: nn.Module, training: bool) -> None:
    """Note which tensor each placeholder stands for."""
    first: dict[int, str] = {}  # tensor -> its first name
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        if (known := first.setdefault(id(tensor), name)) != name:
            found.ties[name] = known
    found.names[training] = {}
    for spec in program.graph_signature.input_specs:
        if spec.target is None:
            continue
        name = spec.target.removeprefix("of.")
        if spec.kind.name == "PARAMETER":
            name = found.ties.get(name, name)
            tensor = module.get_parameter(name)
        elif spec.kind.name == "BUFFER":
            name = found.ties.get(name, name)
            tensor = module.get_buffer(name)
            # No mean can be had of -inf, as in a mask.
            if spec.persistent is False or not tensor.is_floating_point() or not tensor.isfinite().all():
                found.constants.add(name)
        else:
            tensor = program.constants[spec.target]
            if name in found.tensors and not _equal(found.tensors[name], tensor):
                name = f"{name}_{'training' if training else 'evaluation'}"
            found.constants.add(name)
        found.tensors[name] = tensor
        found.names[training][spec.arg.name] = name


def _equal(first: Tensor, second: Tensor) -> bool:
    return first is second or (first.dtype == second.dtype and torch.equal(first, second))


def _check(where: str, program: Any) -> None:
    """Raise PluginError for what a graph may not hold."""
    for node in program.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            name, at = short_name(node.target), place_in_code(node)
            if name not in ALLOWED:
                reads = "it reads the value of a tensor" if name in ("item", "_local_scalar_dense", "nonzero") else ""
                raise PluginError(
                    f"{where} uses the operator {node.target}{f' ({at})' if at else ''}, which a graph may not hold"
                    f"{f', because {reads}' if reads else ''}: use others, {WHOLE}"
                )
        elif node.op == "get_attr" or (node.op == "call_function" and _is_higher_order(node)):
            raise PluginError(
                f"{where} has a part that is no plain operator: leave torch.autocast, torch.cond and the like out, "
                f"{WHOLE}"
            )
    results = [result for result in program.graph.output_node().all_input_nodes]
    if len(results) != 1 or not program.call_spec.out_spec.is_leaf():
        several = "one tensor" if len(results) == 1 else f"{len(results)} tensors"
        raise PluginError(
            f"{where} answers with {several} in a tuple, dict or the like: it must return one tensor of "
            "(batch, classes), or (batch, classes, positions) if tokens have labels"
        )


def _is_higher_order(node: Node) -> bool:
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def _remove_checks(graph: Graph) -> None:
    """Remove assertions and the like, and what is computed for them alone, so that no tensor counts as read by them."""
    for node in reversed(graph.nodes):
        checks = node.op == "call_function" and short_name(node.target).startswith(("_assert", "sym_", "_set_grad"))
        if checks and not node.users:
            graph.erase_node(node)
    graph.eliminate_dead_code()
