"""Tensors that a module holds outside of its parameters and buffers: where they are, and whether that goes well.

`nn.Module` knows the tensors of its tables alone. What lies in a plain attribute, a list, a `functools.partial` or a
closure is neither moved to another device nor averaged.
"""

from __future__ import annotations

import functools
import gc
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _Orthogonal

from wildflower.plugins.reference import PluginError

MAX_OBJECTS = 1_000_000  # looked at in one module: a data set that it holds may be large
ORTHOGONAL = (
    ": torch.nn.utils.parametrizations.orthogonal reads the values of weights as it is made, which have none then: "
    "compute torch.linalg.matrix_exp(weight - weight.T) in `forward`"
)
_TABLES = ("_parameters", "_buffers", "_modules")
_LEAVES = (
    *(str, bytes, int, float, complex, type(None), torch.dtype, torch.device, torch.Size, torch.Generator),
    *(type, types.ModuleType, types.BuiltinFunctionType, types.CodeType, types.FrameType),
)


def held_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that can be reached from a module and are in none of its tables, by their dotted names.

    A tensor of a table that is also in a list, or the like, is among them. Modules that are no children count with
    all that they have. Each tensor comes once.
    """
    return {name: tensor for name, tensor in _found(module) if isinstance(tensor, Tensor)}


def unregistered_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules that can be reached from a module and are no children of it, by dotted names."""
    inside = {id(part) for part in module.modules()}
    return {
        name: part
        for name, part in _found(module, into_modules=False)
        if isinstance(part, nn.Module) and id(part) not in inside
    }


def _found(module: nn.Module, *, into_modules: bool = True) -> Iterator[tuple[str, Any]]:
    """Tensors and modules outside of tables, breadth first, so that each goes by its shortest name."""
    parts = list(module.named_modules())
    seen = {id(part) for _, part in parts}
    kept: list[Any] = []  # what is made on the way must live on, or another object could have its id
    waiting = deque(
        # Hooks are numbered through the whole process.
        (f"{path}.{name}" if path else name, list(value.values()) if name.endswith("_hooks") and value else value)
        for path, part in parts
        for name, value in vars(part).items()
        if name not in _TABLES and not (isinstance(part, nn.RNNBase) and name.startswith("_flat_weight"))
    )
    while waiting and len(seen) < MAX_OBJECTS:
        name, value = waiting.popleft()
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        kept.append(value)
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, nn.Module):
            yield name, value
            if into_modules:
                tables = (table for key in _TABLES for table in [vars(value)[key]])
                waiting.extend((f"{name}.{key}", inner) for table in tables for key, inner in table.items())
                waiting.extend((f"{name}.{key}", v) for key, v in vars(value).items() if key not in _TABLES)
        else:
            waiting.extend(_inside(name, value))


def _inside(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    """Yield what an object holds, by names that a reader of the module's code knows."""
    if isinstance(value, Mapping):
        try:
            items = list(value.items())
        except Exception:  # of a class of the user's
            return
        yield from ((f"{name}[{key!r}]" if isinstance(key, str | int) else f"{name}[...]", v) for key, v in items)
        yield from ((f"{name}[...]", key) for key, _ in items if not isinstance(key, _LEAVES))
    if isinstance(value, list | tuple | deque):
        yield from ((f"{name}[{number}]", inner) for number, inner in enumerate(value))
    elif isinstance(value, set | frozenset):
        yield from ((f"{name}{{...}}", inner) for inner in value)
    elif isinstance(value, functools.partial):
        yield name, value.func
        yield from ((f"{name}.args[{number}]", inner) for number, inner in enumerate(value.args))
        yield from ((f"{name}.keywords[{key!r}]", inner) for key, inner in value.keywords.items())
    elif isinstance(value, types.MethodType):
        yield from ((name, value.__self__), (name, value.__func__))
    elif isinstance(value, types.FunctionType):  # not its globals, which are those of a whole file
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
        for variable, cell in cells:
            try:
                yield f"{name}.{variable}", cell.cell_contents
            except ValueError:  # an empty cell
                continue
        yield f"{name} (its defaults)", (value.__defaults__, value.__kwdefaults__)
        yield name, vars(value)
    elif not isinstance(value, Mapping) or hasattr(value, "__dict__"):
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            yield from ((f"{name}.{key}", inner) for key, inner in attributes.items())
        for kind in type(value).__mro__:
            slots = vars(kind).get("__slots__", ())
            for key in (slots,) if isinstance(slots, str) else tuple(slots):
                if isinstance(vars(kind).get(key), types.MemberDescriptorType) and hasattr(value, key):
                    yield f"{name}.{key}", getattr(value, key)
        if type(value).__module__ != "builtins" or not isinstance(attributes, dict):
            # Iterators, `operator.itemgetter` and the like, which only the garbage collector can look into.
            yield from ((name, inner) for inner in gc.get_referents(value) if inner is not attributes)


def _registered(module: nn.Module) -> dict[int, str]:
    """Return the tensors of a module's tables: id -> name."""
    tables = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {id(tensor): name for name, tensor in reversed(tables)}


def check_parts(where: str, module: nn.Module) -> None:
    """Raise PluginError where a module has parts that cannot be sent, trained or exported."""
    for name, part in module.named_modules():
        called = f"{name} ({type(part).__name__})" if name else type(part).__name__
        if isinstance(part, torch.jit.ScriptModule):
            raise PluginError(
                f"{where}: {called} is compiled by torch.jit, and could not be exported: leave torch.jit.script and "
                "torch.jit.trace out"
            )
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            raise PluginError(
                f"{where}: {called} has extra state (get_extra_state), which is no tensor and cannot be averaged: make "
                "it a buffer (register_buffer), or leave get_extra_state and set_extra_state out"
            )
        if type(part) is _Orthogonal:
            raise PluginError(f"{where}: {name}{ORTHOGONAL}")
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise PluginError(
                f"{where}: {called} has sparse gradients, which optimizers with momentum or weight decay do not take: "
                "leave sparse = True out"
            )


def check_held(where: str, module: nn.Module, *, alone: bool) -> None:
    """Raise ValueError where a module holds something outside of its tables that would be neither sent nor learned.

    Args:
        where: what a message begins with.
        module: whose parameters have no memory (`wildflower.models.skeleton`), all else as its constructor makes it.
        alone: whether it is the only level. Several may be trained in one step, by slices of parameters, which what is
            held a second time would not be.
    """
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"{where}: {name} has a hook of its gradient, which is lost where weights come anew in every round: "
                "compute it in `forward`, such as (weight * mask), or use a hook of the module"
            )
    for name, part in unregistered_modules(module).items():
        if any(True for _ in (*part.parameters(), *part.buffers())):
            raise ValueError(
                f"{where}: {name} is a module ({type(part).__name__}) that is held in a plain list, dict or the like, "
                "so that its weights would be neither trained nor sent: put it into an nn.ModuleList or nn.ModuleDict"
            )
    if (shared := next(_learned_in_classes(module), None)) is not None:
        raise ValueError(
            f"{where}: {shared} has weights and is an attribute of a class, so that they would be neither trained nor "
            "sent: make it in __init__, as self.NAME = ..."
        )
    tables = _registered(module)
    for name, tensor in held_tensors(module).items():
        if id(tensor) in tables:
            if not alone:
                of = tables[id(tensor)]
                raise ValueError(
                    f"{where}: {name} holds {of} a second time, which does not go with several levels: use {of} itself "
                    "in `forward`"
                )
            continue
        if isinstance(tensor, nn.Parameter) and not is_lazy(tensor):
            raise ValueError(
                f"{where}: {name} is a parameter of shape {tuple(tensor.shape)} that is held in a plain list, dict, "
                "function or the like, so that it would be neither trained nor sent: put it into an nn.ParameterList "
                "or nn.ParameterDict, or make it an attribute of its own; with register_buffer where it is constant"
            )
        if tensor.requires_grad and tensor.is_leaf:
            raise ValueError(
                f"{where}: {name} has requires_grad = True and is no parameter, so that it would be neither trained "
                "nor sent: make it an nn.Parameter; with register_buffer where it is constant"
            )


def check_ties(where: str, state: Mapping[str, Tensor]) -> None:
    """Raise ValueError where tensors that travel share memory and are not one, such as a tensor and a view of it."""
    seen: dict[int, str] = {}  # storage -> the name of its tensor
    for name, tensor in state.items():
        first = seen.setdefault(tensor.untyped_storage()._cdata, name)
        if first != name:
            raise ValueError(
                f"{where}: {first} and {name} share memory, and are not one tensor: tie weights by giving a module "
                "another one's parameter as it is"
            )


def _learned_in_classes(module: nn.Module) -> Iterator[str]:
    """Return the dotted names of parameters, and modules with some, that are attributes of the classes of a module."""
    for path, part in module.named_modules():
        for kind in type(part).__mro__:
            for name, value in vars(kind).items():
                learned = next(value.parameters(), None) if isinstance(value, nn.Module) else value
                if isinstance(learned, Tensor) and learned.requires_grad and getattr(part, name, None) is value:
                    yield f"{path}.{name}" if path else name


def sharing(module: nn.Module) -> dict[str, str]:
    """Return the constants that share memory with a tensor that travels: name -> that tensor's.

    Args:
        module: with memory, as its constructor makes it.
    """
    state = module.state_dict(keep_vars=True)
    of_storage = {tensor.untyped_storage()._cdata: name for name, tensor in reversed(state.items())}
    stored = {name: tensor for name, tensor in _constants(module).items() if tensor.layout is torch.strided}
    found = {name: of_storage.get(tensor.untyped_storage()._cdata) for name, tensor in stored.items()}
    return {name: of for name, of in found.items() if of is not None}


def fill_held(module: nn.Module, fresh: Callable[[], nn.Module]) -> None:
    """Give values to what a module holds without memory: to tensors outside of tables, and buffers that do not travel.

    They were made like a parameter, such as by `torch.ones_like(self.weight)`, or computed from some.

    Args:
        fresh: makes the same module with memory; called if anything lacks values.
    """
    lacking = {name: tensor for name, tensor in _constants(module).items() if tensor.is_meta}
    if not lacking:
        return
    whole = fresh()
    values = held_tensors(whole)
    buffers = {name for name, _ in staying_buffers(module)}
    for name, tensor in lacking.items():
        if name not in buffers:
            torch.utils.swap_tensors(tensor, values[name].detach())
    for name in buffers & lacking.keys():
        path, _, own = name.rpartition(".")
        module.get_submodule(path)._buffers[own] = whole.get_buffer(name)


def staying_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that are no part of a module's state, by name."""
    for path, part in module.named_modules(remove_duplicate=False):
        for name, buffer in part._buffers.items():
            if buffer is not None and name in part._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


@contextmanager
def move_held(module: nn.Module, held: Iterable[Tensor], function: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let tensors that are held outside of tables go where a `with` block moves those of the tables."""
    tables = _registered(module)
    yield
    for tensor in held:
        name = tables.get(id(tensor))
        if name is None:
            tensor.data = function(tensor.data)
        elif not isinstance(tensor, nn.Parameter):  # a buffer is another object now, and a parameter the same
            tensor.data = module.get_buffer(name).data


def lacks_values(module: nn.Module) -> bool:
    """Say whether a constant of a module has no memory."""
    return any(value.is_meta for value in _constants(module).values())


def unsteady(build: Callable[[], nn.Module]) -> list[str]:
    """Return the names of constants that have other values when a module is built again."""
    first, second = (_constants(build()) for _ in range(2))
    return [name for name, value in first.items() if name not in second or not _equal(value, second[name])]


def from_first_weights(skeleton: nn.Module, *whole: nn.Module) -> list[str]:
    """Return the names of constants that a module computes from its first weights, or draws like one.

    Args:
        skeleton: the module without memory for its parameters, as it was made.
        whole: the module with memory, twice, with other first weights.
    """
    first, second = (_constants(module) for module in whole)
    empty = [name for name, value in _constants(skeleton).items() if value.is_meta]
    return [name for name in empty if not _equal(first[name], second[name])]


def _constants(module: nn.Module) -> dict[str, Tensor]:
    """Held tensors that are in no table, and buffers that are no part of the state."""
    tables = _registered(module)
    held = {name: tensor for name, tensor in held_tensors(module).items() if id(tensor) not in tables}
    return held | dict(staying_buffers(module))


def _equal(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if first.is_meta:
        return True
    return torch.equal(*(value.detach().to_dense().nan_to_num() for value in (first, second)))
