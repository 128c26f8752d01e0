"""Modules whose parameters take no memory, to be given weights, and all of whose other tensors have values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from wildflower.models.spectral import not_iterated


@contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Let parameters lose their memory as they are registered, before a module fills them.

    Everything else that a constructor makes has values: buffers, and tensors in attributes, lists or functions. A
    parameter stays the object that it is, wherever else it is held, and those that share memory still do.
    """
    register = nn.Module.register_parameter
    memory: dict[int, tuple[StorageWeakRef, torch.UntypedStorage]] = {}  # of parameters that had some

    def without(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in memory:  # a weak reference keeps the number from being another storage's
            empty = torch.UntypedStorage(storage.nbytes(), device="meta")
            memory[storage._cdata] = StorageWeakRef(storage), empty
        found = torch.empty(0, dtype=tensor.dtype, device="meta")
        return found.set_(memory[storage._cdata][1], tensor.storage_offset(), tensor.size(), tensor.stride())

    def registered(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if isinstance(param, nn.Parameter) and not param.is_meta and not is_lazy(param) and param.is_leaf:
            _empty(param, nn.Parameter(without(param.detach()), param.requires_grad))
        register(self, name, param)

    _replace(registered)
    try:
        with not_iterated():
            yield
    finally:
        _replace(register)


def _empty(parameter: nn.Parameter, empty: nn.Parameter) -> None:
    """Take a parameter's memory; attributes that it has been given, such as marks of a library, stay."""
    attributes = dict(vars(parameter))
    torch.utils.swap_tensors(parameter, empty)
    vars(parameter).update(attributes)


def _replace(function: Any) -> None:
    nn.Module.register_parameter = function  # type: ignore[method-assign]
