"""Networks over given weights: nothing is initialized or copied."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.network import Network


def with_weights(family: Family, architecture: Architecture, weights: Mapping[str, Tensor]) -> Network:
    """Return the sub-model over these very tensors: nothing is initialized or copied; training changes them in place.

    Raises ValueError where names or shapes are not those of the sub-model.
    """
    model = family.without_memory(architecture)
    _assign(model, weights)
    fill_buffers(model, family, architecture)
    model.settle()
    return model


def _assign(model: torch.nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Do what `load_state_dict(weights, assign=True)` does, in a third of the time, which counts once per device."""
    left = dict(weights)
    held = {id(tensor) for tensor in getattr(model, "held", ())}
    made: dict[int, Tensor] = {}  # what a tensor of the model has become: tied weights are one under several names

    def taken(name: str, before: Tensor) -> Tensor:
        found = left.pop(name, None)
        if found is None or found.shape != before.shape:
            given = "there is none" if found is None else f"it has the shape {tuple(found.shape)}"
            raise ValueError(f"{name} of {type(model).__name__} must have the shape {tuple(before.shape)}: {given}")
        return found

    for path, module in model.named_modules(remove_duplicate=False):
        before = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if (new := made.get(id(parameter))) is None:
                    # The same memory with a version of its own: the tensors of a message are views of one, and what a
                    # module writes in place would seem to autograd to change all that lies beside it.
                    value = taken(before + name, parameter).data
                    new = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
                    vars(new).update(vars(parameter))  # marks that the module has given it
                    if id(parameter) in held:  # what a list holds too stays the object that it is
                        torch.utils.swap_tensors(parameter, new)
                        new = parameter
                    made[id(parameter)] = made[id(new)] = new  # a module that stands at two places is met twice
                module._parameters[name] = new
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                if (new := made.get(id(buffer))) is None:
                    new = taken(before + name, buffer).data
                    if id(buffer) in held:
                        torch.utils.swap_tensors(buffer, new)
                        new = buffer
                    made[id(buffer)] = made[id(new)] = new
                module._buffers[name] = new
    if left:
        raise ValueError(f"{type(model).__name__} has no tensor {', '.join(sorted(left)[:3])}")


def fill_buffers(model: Network, family: Family, architecture: Architecture) -> None:
    """Give a model without memory the buffers that it still lacks, as a fresh one has them.

    Those that are drawn at random, such as a fixed permutation, are the same for an architecture on every device and in
    every score.
    """
    if not any(buffer.is_meta for buffer in model.buffers()):
        return
    # A GPU's generator is left alone: the device's own draws go on from it.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(0)
        fresh = dict(family.build(architecture).named_buffers(remove_duplicate=False))
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        if buffer.is_meta:
            path, _, own = name.rpartition(".")
            model.get_submodule(path)._buffers[own] = fresh[name]


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that are not frozen, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
