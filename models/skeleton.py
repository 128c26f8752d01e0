"""Modules whose parameters take no memory, to be given weights, and all of whose other tensors have values."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from models.spectral import not_iterated


@contextmanager
def same_draws(seed: int = 0) -> Iterator[None]:
    """Let a `with` block draw the same numbers each time, on the CPU, and no others be drawn after it for that.

    A GPU's generator is left alone: the device's own draws go on from it.
    """
    own, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            random.seed(seed)
            np.random.seed(seed)
            torch.default_generator.manual_seed(seed)
            yield
    finally:
        random.setstate(own)
        np.random.set_state(numpy)


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
