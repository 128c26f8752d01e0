"""Put a module together from its parts, as a file says that `wf.run` wrote of an instance.

Its class is not called, because nobody knows with which arguments it was: the attributes that it had set are given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def part(
    kind: type[M],
    attributes: Mapping[str, Any],
    *,
    parameters: Mapping[str, nn.Parameter | None] | None = None,
    buffers: Mapping[str, Tensor | None] | None = None,
    not_saved: Sequence[str] = (),
    children: Mapping[str, nn.Module | None] | None = None,
) -> M:
    """Return a module of a class with these attributes, parameters, buffers and children.

    Args:
        not_saved: the buffers that are not in the module's state dict.
    """
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    vars(module).update(attributes)
    for name, parameter in (parameters or {}).items():
        module.register_parameter(name, parameter)
    for name, buffer in (buffers or {}).items():
        module.register_buffer(name, buffer, persistent=name not in not_saved)
    for name, child in (children or {}).items():
        module._modules[name] = child  # a container's own `add_module` would count it once more
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()
    return module


def parameter(*shape: int, dtype: torch.dtype = torch.float32, trained: bool = True) -> nn.Parameter:
    """Return a parameter of zeros; its values come from the run's first weights."""
    return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=trained)
