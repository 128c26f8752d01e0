"""The operators of any network and what flows between them, found by running it once on fake tensors.

Operators are PyTorch's functions as the network calls them, such as linear, layer_norm or add. What only looks at a
tensor otherwise (a view, a copy, another type) is no operator, and neither is what follows from shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves

from wildflower.models.network import Network
from wildflower.models.trace import built
from wildflower.models.traced.operators import short_name

INPUT, OUTPUT = "input", "output"
# Functions whose result holds what their first argument does, in another place, order or type.
_COPIES = {"clone", "contiguous", "cpu", "double", "flatten", "float", "half", "reshape", "to", "type", "type_as"}
# Functions whose result follows from the shapes of what they read, and not from its values.
_BY_SHAPE = ("_like", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "size", "dim", "numel")


@dataclass(frozen=True)
class Operator:
    """One call of a function.

    Attributes:
        name: the function's, without the underscores of one that writes in place; `INPUT` and `OUTPUT` are the ends.
        reads: positions of the operators whose results it reads, ascending.
        tensors: names of the parameters that it reads.
    """

    name: str
    reads: tuple[int, ...] = ()
    tensors: tuple[str, ...] = ()


def operators(build: Callable[[], nn.Module], input_shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Operator, ...]:
    """Return the operators of a module in order of computation, from `INPUT` to an `OUTPUT` for every exit.

    What leads to no output is left out.

    Args:
        build: makes the module; called while tensors are fake, so that it takes no memory.

    Raises:
        ValueError: it cannot be run so, or what it returns does not follow from its input as far as can be seen.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):  # a module's constants may have been made before
        try:
            model = built(build).train()
            inputs = torch.zeros(2, *input_shape, dtype=dtype)
            recorder = _Recorder(model, inputs)
            with torch.no_grad(), recorder:
                results = model.exits(inputs) if isinstance(model, Network) else [model(inputs)]
        except Exception as error:  # of any kind: a model is any Python
            raise ValueError(f"it cannot be run on tensors without memory: {type(error).__name__}: {error}") from error
        for number, result in enumerate(results):
            reads, _ = recorder.origin([result])
            if recorder.following.isdisjoint(reads):
                raise ValueError(
                    f"what it returns{f' at exit {number + 1}' if len(results) > 1 else ''} does not follow from its "
                    "input by functions of PyTorch, such as where a torch.autograd.Function lies between"
                )
            recorder.operators.append(Operator(OUTPUT, reads))
        return _leading_to_an_output(recorder.operators)


class _Recorder(TorchFunctionMode):
    """Notes the calls of functions, and of every storage what its values come from.

    following: positions of the operators that follow from the input.
    """

    def __init__(self, model: nn.Module, inputs: Tensor) -> None:
        super().__init__()
        self.operators = [Operator(INPUT)]
        self.following = {0}
        self._origins: dict[int, tuple[tuple[int, ...], tuple[str, ...]]] = {_storage(inputs): ((0,), ())}
        self._alive: list[Tensor] = [inputs]  # or a new storage could be taken for one that was
        for name, parameter in model.named_parameters():
            self._origins.setdefault(_storage(parameter), ((), (name,)))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(func, torch._ops.OpOverload):  # of a module that was cut by itself, such as mean.dim
            called = short_name(func)
        else:
            called = (resolve_name(func) or getattr(func, "__name__", "function")).rpartition(".")[2]
        read = _tensors((args, kwargs or {}))
        made = _tensors(result)
        in_place = called == "__setitem__" or (called.endswith("_") and not called.endswith("__"))
        in_place = in_place or (kwargs or {}).get("inplace") is True
        if in_place:
            made = read[:1]
        self._note(called.strip("_"), read, made, in_place=in_place)
        return result

    def _note(self, name: str, read: list[Tensor], made: list[Tensor], *, in_place: bool) -> None:
        if not made or name.endswith(_BY_SHAPE):
            return
        known = {_storage(tensor) for tensor in read}
        if not in_place and all(_storage(tensor) in known for tensor in made):
            return
        found = self.origin(read[:1] if name in _COPIES else read)
        if found == ((), ()):
            return
        if name not in _COPIES:
            position = len(self.operators)
            self.operators.append(Operator(name, *found))
            if not self.following.isdisjoint(found[0]):
                self.following.add(position)
            found = (position,), ()
        for tensor in made:
            self._origins[_storage(tensor)] = found
        self._alive += made

    def origin(self, tensors: list[Tensor]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Return which operators some tensors come from, and which parameters."""
        found = [self._origins.get(_storage(tensor), ((), ())) for tensor in tensors]
        reads = sorted({position for positions, _ in found for position in positions})
        return tuple(reads), tuple(dict.fromkeys(name for _, names in found for name in names))


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _leading_to_an_output(found: list[Operator]) -> tuple[Operator, ...]:
    """Without the operators whose results nobody reads, and with positions counted anew."""
    wanted = {0}
    for position in reversed(range(len(found))):
        if position in wanted or found[position].name == OUTPUT:
            wanted.update((position, *found[position].reads))
    place = {position: number for number, position in enumerate(sorted(wanted))}
    return tuple(
        Operator(found[position].name, tuple(place[read] for read in found[position].reads), found[position].tensors)
        for position in place
    )
