"""Write an instance of nn.Module down: a function that puts it together, and its weights as safetensors."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from wildflower.launch.experiment_file import SettingsError
from wildflower.launch.source import MAX_NUMBERS, Source

GIVE_A_CLASS = "give the class, or a function that makes the module"
_TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_USUAL = vars(nn.Module()).keys()
_MADE_AGAIN = ("_flat_weights", "_flat_weight_refs")  # of recurrent layers, from their parameters


def add_instance(source: Source, name: str, module: nn.Module) -> None:
    """Add a function to a file that makes a module as this one is, but for its weights."""
    lines: list[str] = []
    made = _Made(source, lines)
    top = made.module(module, name)
    body = "\n".join(f"    {line}" for line in lines)
    source.need("from wildflower.models.put_together import parameter, part")
    source.append(
        f'def {name}():\n    """Return the module; its first weights are in a file."""\n{body}\n    return {top}'
    )


def save_weights(module: nn.Module, file: Path) -> None:
    """Write a module's numbers that are learned, each tensor once."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor.detach().cpu().clone().contiguous()
    save_file(found, file)


class _Made:
    """Lines that make modules and parameters, each once, whoever shares them."""

    def __init__(self, source: Source, lines: list[str]) -> None:
        self.source, self.lines = source, lines
        self.names: dict[int, str] = {}

    def module(self, module: nn.Module, where: str) -> str:
        """Add the lines of a module, and return the variable that holds it."""
        if id(module) in self.names:
            return self.names[id(module)]
        what, own = self.source.what, vars(module)
        if any(value for key, value in own.items() if "_hooks" in key):
            raise SettingsError(f"{what}: {where} has hooks, which cannot be written down: {GIVE_A_CLASS}")
        kind = self.source.expression(type(module), where)
        plain = {
            key: value for key, value in own.items() if key not in (*_TABLES, *_MADE_AGAIN) and "_hooks" not in key
        }
        given = {key: value for key, value in plain.items() if key not in _USUAL or value != vars(nn.Module())[key]}
        attributes = ", ".join(f"{key!r}: {self._value(value, f'{where}.{key}')}" for key, value in given.items())
        text = [f"{kind}, {{{attributes}}}"]
        if module._parameters:
            text.append(self._table("parameters", module._parameters, self._parameter, where))
        if module._buffers:
            persistent = module._buffers.keys() - module._non_persistent_buffers_set
            saved = {id(module._buffers[name]) for name in persistent}
            text.append(self._table("buffers", module._buffers, partial(self._buffer, saved), where))
        if module._non_persistent_buffers_set:
            text.append(f"not_saved={sorted(module._non_persistent_buffers_set)!r}")
        if module._modules:
            text.append(self._table("children", module._modules, self.module, where))
        return self._line(module, f"part({', '.join(text)})")

    def _line(self, value: object, text: str) -> str:
        name = self.names[id(value)] = f"p{len(self.names)}"
        self.lines.append(f"{name} = {text}")
        return name

    def _table(self, name: str, table: Any, write: Any, where: str) -> str:
        parts = ", ".join(
            f"{key!r}: {None if value is None else write(value, f'{where}.{key}')}" for key, value in table.items()
        )
        return f"{name}={{{parts}}}"

    def _parameter(self, value: nn.Parameter, where: str) -> str:
        if id(value) in self.names:
            return self.names[id(value)]
        parts = [*map(str, value.shape)]
        if value.dtype != torch.float32:
            self.source.need("import torch")
            parts.append(f"dtype={value.dtype}")
        if not value.requires_grad:
            parts.append("trained=False")
        return self._line(value, f"parameter({', '.join(parts)})")

    def _buffer(self, saved: set[int], value: Tensor, where: str) -> str:
        if id(value) in saved and value.is_floating_point():  # its values are among the weights
            self.source.need("import torch")
            return f"torch.zeros({tuple(value.shape)}, dtype={value.dtype})"
        if value.numel() > MAX_NUMBERS:
            raise SettingsError(
                f"{self.source.what}: {where} is a buffer of {value.numel()} numbers, and at most {MAX_NUMBERS} are "
                f"written down: {GIVE_A_CLASS}"
            )
        return self._value(value.detach().cpu(), where)

    def _value(self, value: object, where: str) -> str:
        if isinstance(value, nn.Module):
            return self.module(value, where)
        try:
            return self.source.expression(value, where)
        except SettingsError as error:
            raise SettingsError(f"{error}. Or {GIVE_A_CLASS}") from None
