"""Training on a GPU that only a board's own PyTorch can use, for a node in a container (deploy/jetson/gpu_trainer.py).

What is sent is the graph of the loss, traced from the model and its loss, the weights, and one batch after the other;
what comes back are the trained weights. So the other end knows no models and no methods: whatever can be traced trains
there.
"""

from __future__ import annotations

import operator
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from wildflower.client_app.board_link import BoardError, as_board_error, connection, take
from wildflower.client_app.frames import send
from wildflower.messages.orders import LocalTraining
from wildflower.models.layers import BatchNorm
from wildflower.models.max_pool import HalvingMaxPool
from wildflower.models.network import Network
from wildflower.strategies.shared_losses import Loss, Regularizer

PROTOCOL = 1
TYPES = {torch.float32: "float32", torch.int64: "int64", torch.bool: "bool"}
FUNCTIONS: dict[Any, str] = {
    operator.add: "add",
    operator.mul: "mul",
    operator.truediv: "truediv",
    operator.floordiv: "floordiv",
    operator.getitem: "getitem",
    torch.cat: "cat",
    torch.stack: "stack",
    F.scaled_dot_product_attention: "attention",
    F.log_softmax: "log_softmax",
    F.cross_entropy: "cross_entropy",
    F.nll_loss: "nll_loss",
    F.kl_div: "kl_div",
}
METHODS = {
    "detach", "flatten", "masked_fill", "mean", "permute", "reshape", "sum", "transpose", "unflatten",
}  # fmt: skip
# The operator of a module, and its arguments behind the input; `tensor` refers to one of the module's own.
WEIGHTS = ("weight", "bias")
Arguments = Callable[[Any, Callable[[str], Any]], list[Any]]
MAX_POOL_2D: tuple[str, Arguments] = (
    "max_pool2d",
    lambda m, tensor: [m.kernel_size, m.stride, m.padding, m.dilation, m.ceil_mode],
)
MODULES: dict[type[nn.Module], tuple[str, Arguments]] = {
    nn.Conv1d: ("conv1d", lambda m, tensor: [*map(tensor, WEIGHTS), m.stride, m.padding, m.dilation, m.groups]),
    nn.Conv2d: ("conv2d", lambda m, tensor: [*map(tensor, WEIGHTS), m.stride, m.padding, m.dilation, m.groups]),
    nn.Linear: ("linear", lambda m, tensor: [*map(tensor, WEIGHTS)]),
    BatchNorm: (
        "batch_norm",
        lambda m, tensor: [*map(tensor, ("running_mean", "running_var", *WEIGHTS)), m.momentum, m.eps],
    ),
    nn.LayerNorm: ("layer_norm", lambda m, tensor: [m.normalized_shape, *map(tensor, WEIGHTS), m.eps]),
    nn.Embedding: ("embedding", lambda m, tensor: [tensor("weight"), m.padding_idx]),
    nn.ReLU: ("relu", lambda m, tensor: [m.inplace]),
    nn.ReLU6: ("relu6", lambda m, tensor: [m.inplace]),
    nn.GELU: ("gelu", lambda m, tensor: []),
    nn.Dropout: ("dropout", lambda m, tensor: [m.p]),
    nn.MaxPool1d: ("max_pool1d", lambda m, tensor: [m.kernel_size, m.stride, m.padding, m.dilation, m.ceil_mode]),
    nn.MaxPool2d: MAX_POOL_2D,
    HalvingMaxPool: MAX_POOL_2D,
    nn.AvgPool1d: ("avg_pool1d", lambda m, tensor: [m.kernel_size, m.stride, m.padding, m.ceil_mode]),
    nn.AvgPool2d: ("avg_pool2d", lambda m, tensor: [m.kernel_size, m.stride, m.padding, m.ceil_mode]),
    nn.AdaptiveAvgPool2d: ("adaptive_avg_pool2d", lambda m, tensor: [m.output_size]),
    nn.Flatten: ("flatten", lambda m, tensor: [m.start_dim, m.end_dim]),
}


class Untraceable(BoardError):
    """A loss that cannot be sent as one graph for all batches; the text says why. It can be trained here instead."""


# What is computed ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LossGraph:
    """A loss as the trainer reads it: steps behind the inputs (0) and the labels (1), the last of which is the loss.

    constants: tensors that it reads beside those of the model.
    """

    steps: list[dict[str, Any]]
    constants: dict[str, Tensor]


class _Whole(nn.Module):
    """A model and its loss as one module, for the tracer."""

    def __init__(self, model: Network, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return self.loss(inputs, labels)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in MODULES

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            self.path_of_module(m)
        except NameError:  # a module around the model that the loss made for itself
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)


def trace(model: Network, loss: Loss) -> LossGraph:
    """Return the graph of a loss of a model, in training mode.

    Raises:
        Untraceable: the loss has an operator that the trainer does not know, or a term that is already computed, or is
            another one for every batch.
    """
    whole = _Whole(model, loss)
    try:
        graph = _Tracer().trace(whole)
    except Untraceable:
        raise
    except Exception as error:  # of many kinds: a loss is any Python
        raise Untraceable(f"it cannot be traced: {type(error).__name__}: {error}") from error
    steps: list[dict[str, Any]] = []
    constants: dict[str, Tensor] = {}
    values: dict[fx.Node, Any] = {}
    # The trainer is given every tensor once; tied weights have several names.
    names = {id(each): name for name, each in (*model.named_parameters(), *model.named_buffers())}

    def as_json(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return values[value]
        if isinstance(value, slice):
            return {"slice": [as_json(value.start), as_json(value.stop), as_json(value.step)]}
        if isinstance(value, list | tuple):
            return [as_json(item) for item in value]
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise Untraceable(f"an argument of the loss cannot be sent to the board's trainer: {value!r}")

    def tensor(module: nn.Module, name: str) -> dict[str, str] | None:
        found = getattr(module, name)
        return None if found is None else {"tensor": names[id(found)]}

    def step(name: str, arguments: list[Any], options: Mapping[str, Any] | None = None) -> dict[str, int]:
        steps.append({"operator": name, "arguments": arguments, "options": dict(options or {})})
        return {"step": len(steps) + 1}

    for number, node in enumerate(node for node in graph.nodes if node.op == "placeholder"):
        values[node] = {"step": number}
    for node in graph.nodes:
        arguments, options = as_json(node.args), {key: as_json(value) for key, value in node.kwargs.items()}
        if node.op == "get_attr":
            name = str(node.target)
            found = operator.attrgetter(name)(whole)
            if name.startswith("model."):
                name = names.get(id(found), name.removeprefix("model."))
            elif found.requires_grad:
                raise Untraceable("a term of the loss does not depend on the batch, so that it cannot be traced")
            else:
                constants[name] = found
            values[node] = {"tensor": name}
        elif node.op == "call_module":
            module = whole.get_submodule(str(node.target))
            if getattr(module, "padding_mode", "zeros") != "zeros" or getattr(module, "approximate", "none") != "none":
                raise Untraceable(f"the board's trainer has no operator {module}")
            operator_name, own = MODULES[type(module)]
            values[node] = step(operator_name, [*arguments, *own(module, partial(tensor, module))])
        elif node.op == "call_function" and node.target is getattr and arguments[1] == "shape":
            values[node] = step("shape", arguments[:1])
        elif node.op == "call_function" and node.target in FUNCTIONS:
            values[node] = step(FUNCTIONS[node.target], arguments, options)
        elif node.op == "call_method" and node.target in METHODS:
            values[node] = step(str(node.target), arguments, options)
        elif node.op == "output":
            if arguments[0] != {"step": len(steps) + 1}:
                raise Untraceable("the loss is not what is computed last")
        elif node.op != "placeholder":
            raise Untraceable(f"the board's trainer has no operator {node.target}")
    return LossGraph(steps, constants)


# The connection ------------------------------------------------------------------------------------------------------


def fit(
    path: Path,
    model: Network,
    graph: LossGraph,
    batches: Iterator[tuple[Tensor, Tensor]],
    training: LocalTraining,
    *,
    seed: int,
    limit_bytes: int | None,
    new_statistics: bool,
    regularizer: Regularizer,
) -> tuple[float, int | None, int]:
    """Train a model, in place, with the board's trainer.

    Args:
        path: the trainer's socket.
        graph: of the model's loss.
        limit_bytes: what the training's tensors may take on the GPU; None: all there is.
        new_statistics: as of `wildflower.strategies.method.ClientContext.fit`.
        regularizer: is added to the loss.

    Returns:
        The mean loss over the examples seen, the most memory that the trainer held, and the number of steps.

    Raises:
        BoardError: the trainer cannot be reached or failed.
        MemoryError: the memory was not enough.
    """
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    tensors: dict[str, Mapping[str, Tensor]] = {
        "parameter": parameters,
        "buffer": buffers,
        "constant": graph.constants,
        "correction": {name: value for name, value in regularizer.correction.items() if name in parameters},
    }
    begin = {
        "do": "begin",
        "protocol": PROTOCOL,
        "graph": graph.steps,
        "roles": [[name, role] for role, named in tensors.items() for name in named],
        "training": training.model_dump(mode="json"),
        "seed": seed,
        "pull": regularizer.strength,
        "pull_is_reported": regularizer.reported,
        "new_statistics": new_statistics,
        "memory_bytes": limit_bytes,
    }
    with connection(path) as link:
        _send(link, begin, [value for named in tensors.values() for value in named.values()])
        take(link)
        seen, total, waiting, steps = 0, 0.0, 0, 0
        for steps, (inputs, labels) in enumerate(batches, start=1):  # noqa: B007
            _send(link, {"do": "step"}, [inputs, labels])  # the trainer computes while the next batch is made
            if waiting:
                total += _loss(link, limit_bytes) * waiting
            seen, waiting = seen + len(labels), len(labels)
        if waiting:
            total += _loss(link, limit_bytes) * waiting
        _send(link, {"do": "finish"}, [])
        answer, arrays = take(link)
    state = parameters | buffers
    if answer["names"] != list(state) or [len(array) for array in arrays] != [v.nbytes for v in state.values()]:
        raise BoardError("the board's trainer sent other tensors back than it was sent")
    with torch.no_grad():
        for value, array in zip(state.values(), arrays, strict=True):
            value.copy_(torch.frombuffer(bytearray(array), dtype=value.dtype).reshape(value.shape))
    return total / max(1, seen), answer["peak_bytes"], steps


def _send(link: socket.socket, header: Mapping[str, Any], tensors: list[Tensor]) -> None:
    described = [{"shape": list(tensor.shape), "type": TYPES[tensor.dtype]} for tensor in tensors]
    arrays = [tensor.detach().cpu().contiguous().numpy().tobytes() for tensor in tensors]
    with as_board_error():
        try:
            send(link, {**header, "tensors": described}, arrays)
        except ConnectionError:
            take(link)  # it has said why before it hung up
            raise


def _loss(link: socket.socket, limit_bytes: int | None) -> float:
    """Return the loss of the next step that is answered; MemoryError where it held too much."""
    answer, _ = take(link)
    if limit_bytes is not None and (answer["peak_bytes"] or 0) > limit_bytes:
        raise MemoryError(f"training grew to {answer['peak_bytes']} bytes")
    return float(answer["loss"])
