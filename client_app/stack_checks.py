"""Checks that devices are alike beside their tensors, as they must be where the modules of one compute for a stack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized

from wildflower.client_app.stack_operators import InTurn
from wildflower.models.network import Network
from wildflower.models.weights import trained_parameters
from wildflower.tasks.task import Task

PLAIN = (int, float, complex, str, type(None))
COMPARED = (*PLAIN, Tensor, nn.Module, FunctionType, MethodType, partial)
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
# Of a module's own attributes, those that hold its tensors and parts, and what PyTorch keeps of it.
OF_MODULES = vars(nn.Module()).keys() - {"training", *HOOKS}


def check_shapes(tables: Sequence[Mapping[str, Tensor]], what: str) -> None:
    """Raise InTurn where tensors of one name differ in shape or type."""
    shapes = [{name: (tensor.shape, tensor.dtype) for name, tensor in table.items()} for table in tables]
    if any(other != shapes[0] for other in shapes):
        raise InTurn(f"{what} have tensors of different shapes")


def check_modules(modules: Sequence[nn.Module], described: Sequence[nn.Module], what: str) -> None:
    """Raise InTurn where modules differ in more than their parameters and buffers.

    Args:
        modules: of each device.
        described: of each device a part that follows from the architecture, if it is a `Network` of described layers.
        what: what a message calls them.
    """
    sides = []
    for module, network in zip(modules, described, strict=True):
        inside = set(network.modules()) if type(network) is Network else set()
        parts = list(module.modules())
        for part in parts:
            if part._backward_hooks or part._backward_pre_hooks:
                raise InTurn(f"a {type(part).__name__} of its model has hooks")
            if part in inside and (part._forward_hooks or part._forward_pre_hooks):
                raise InTurn(f"a {type(part).__name__} of its model has hooks")
        sides.append(_Side(module, [part for part in parts if part not in inside]))
    for side in sides[1:]:
        if not _Pair(sides[0], side).are_alike:
            raise InTurn(f"{what} differ in more than their parameters and buffers")


def plain_attributes(module: nn.Module) -> list[list[tuple[str, Any]]]:
    """Return the numbers and texts among the attributes of a module's parts, which a pure function does not change."""
    return [
        [(name, value) for name, value in vars(part).items() if name not in OF_MODULES and isinstance(value, PLAIN)]
        for part in module.modules()
    ]


def check_trainings(losses: Sequence[nn.Module], models: Sequence[nn.Module], layout: str) -> None:
    """Raise InTurn where one device's loss cannot stand for those of all.

    Its modules must be alike, all must train the same parameters, and none may have a hook, which would not see the
    stack's gradients.

    Args:
        losses: of the models, one for each device.
        layout: of the images that they are trained on.
    """
    check_modules(losses, models, "the losses")
    # It draws in the order of memory, which a stack's convolutions do not keep.
    if layout != "contiguous" and any(isinstance(part, nn.Dropout) for part in losses[0].modules()):
        raise InTurn(f"dropout draws in the order of {layout} images")
    tables = [trained_parameters(model) for model in models]
    if any(each.keys() != tables[0].keys() for each in tables):
        raise InTurn("devices train different parts of their models")
    for name, parameter in chain.from_iterable(each.items() for each in tables):
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise InTurn(f"the parameter {name} has a hook")


def takes_padding(module: nn.Module) -> bool:
    """Say whether examples of a scored module come to the same with others behind them.

    Of other networks than those of described layers nobody knows, and norms without statistics read the whole batch.
    """
    parts = list(module.modules())
    by_batch = any(isinstance(part, _BatchNorm) and part.running_mean is None for part in parts)
    return not by_batch and any(type(part) is Network for part in parts)


def aliases(module: nn.Module) -> dict[str, str]:
    """Return each further name of tied tensors, of modules that stand once, with their first names."""
    first: dict[int, str] = {}
    found = {}
    for path, part in module.named_modules():
        for name, tensor in chain(part._parameters.items(), part._buffers.items()):
            full = f"{path}.{name}" if path else name
            if tensor is not None and (known := first.setdefault(id(tensor), full)) != full:
                found[full] = known
    return found


def are_equal(one: Tensor, other: Tensor) -> bool:
    """Say whether two tensors of one shape are one, or have the same values."""
    return one.data_ptr() == other.data_ptr() or torch.equal(one, other)


def are_constant(tensors: Sequence[Tensor]) -> bool:
    """Say whether a buffer is a table of whole numbers that all devices have alike: an index cannot be stacked."""
    first = tensors[0]
    return not first.is_floating_point() and first.dim() > 0 and all(torch.equal(first, each) for each in tensors)


def _class_of(module: nn.Module) -> type:
    """Return a module's class; PyTorch makes one more for each module that is parametrized."""
    kind = type(module)
    return kind.__base__ or kind if is_parametrized(module) else kind


class _Side:
    """One device's module, and the parts of it whose attributes are read."""

    def __init__(self, module: nn.Module, parts: Sequence[nn.Module]) -> None:
        self.module, self.parts = module, parts

    @cached_property
    def places(self) -> dict[int, str]:
        """The names of its modules and tensors, which take its tensors' places in a stack."""
        named: Iterator[tuple[str, Any]] = chain(
            self.module.named_modules(), self.module.named_parameters(), self.module.named_buffers()
        )
        return {id(each): name for name, each in named}


class _Pair:
    """Two devices' modules, whose parts are compared."""

    def __init__(self, one: _Side, other: _Side) -> None:
        self.one, self.other = one, other
        self.seen: set[tuple[int, int]] = set()

    @property
    def are_alike(self) -> bool:
        parts = self.one.parts, self.other.parts
        return len(parts[0]) == len(parts[1]) and all(map(self._attributes_alike, *parts))

    def _attributes_alike(self, one: nn.Module, other: nn.Module) -> bool:
        if _class_of(one) is not _class_of(other):
            return False
        mine, its = ({k: v for k, v in vars(part).items() if k not in OF_MODULES} for part in (one, other))
        return mine.keys() == its.keys() and all(
            self._same_attribute(value, its[name]) if name not in HOOKS else self.same(value, its[name])
            for name, value in mine.items()
        )

    def _same_attribute(self, one: Any, other: Any) -> bool:
        """As `same`, but of an object of another kind nobody knows what it is for: it says nothing."""
        if isinstance(one, list | tuple) and isinstance(other, list | tuple):
            return len(one) == len(other) and all(map(self._same_attribute, one, other))
        return not isinstance(one, COMPARED) or self.same(one, other)

    def same(self, one: Any, other: Any) -> bool:
        """Say whether two values can take each other's places."""
        if one is other:
            return True
        if type(one) is not type(other) and not isinstance(one, nn.Module):
            return False
        if isinstance(one, PLAIN):
            return bool(one == other)
        if (id(one), id(other)) in self.seen:  # which refers to itself
            return True
        self.seen.add((id(one), id(other)))
        if isinstance(one, Tensor | nn.Module):
            place = self.one.places.get(id(one))
            if place is not None and place == self.other.places.get(id(other)):
                return True
        match one:
            case Tensor():
                if one.shape != other.shape or one.dtype != other.dtype or one.is_meta != other.is_meta:
                    return False
                return one.is_meta or torch.equal(one, other)
            case nn.Module() if isinstance(other, nn.Module):
                mine, its = (chain(each.named_parameters(), each.named_buffers()) for each in (one, other))
                return all(
                    self._attributes_alike(*pair) for pair in zip(one.modules(), other.modules(), strict=False)
                ) and self.same(list(mine), list(its))
            case partial():
                return all(self.same(getattr(one, k), getattr(other, k)) for k in ("func", "args", "keywords"))
            case MethodType():
                return one.__func__ is other.__func__ and self.same(one.__self__, other.__self__)
            case FunctionType():
                parts = ("__defaults__", "__kwdefaults__", "__closure__")
                return one.__code__ == other.__code__ and all(
                    self.same(getattr(one, k), getattr(other, k)) for k in parts
                )
            case list() | tuple():
                return len(one) == len(other) and all(map(self.same, one, other))
            case dict():
                return one.keys() == other.keys() and all(self.same(value, other[key]) for key, value in one.items())
            case Task():
                return one.asks_the_same(other)
        if hasattr(one, "cell_contents"):
            return self.same(one.cell_contents, other.cell_contents)
        return bool(one == other)
