"""A family from a function: the model of each level is what the function returns for the level's arguments."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from wildflower.models.any_network import AnyNetwork
from wildflower.models.architecture import Architecture
from wildflower.models.base import check_cut, check_flag, check_norm
from wildflower.models.cost import Cost
from wildflower.models.held import check_held, check_ties
from wildflower.models.layers import make_static
from wildflower.models.made import made_module
from wildflower.models.module import ModuleFamily, meta_state
from wildflower.models.network import Network
from wildflower.models.placement import kept_channels

MAX_LEVELS = 1000


@dataclass(frozen=True)
class Levels(ModuleFamily):
    """A function, or a class of modules, that makes the model of each level.

    `function` is called with `arguments` and those of a level, and with the task's `classes` (or `num_classes`) and
    `input_shape` where it has parameters of these names. Levels go from the smallest to the largest; without any there
    is one model, which every device gets whole. An architecture is the number of a level, from 1.

    `arguments` and the entries of `levels` are JSON texts, so that a family is a value. `tokens`: inputs are int64.
    `norm`: batch norms are those of the module ("batch"), or keep no running statistics ("static").
    """

    name: ClassVar[str] = "levels"

    function: str = ""
    levels: tuple[str, ...] = ("{}",)
    arguments: str = "{}"
    tokens: bool = False
    norm: str = "batch"

    @classmethod
    def resolved(cls, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Levels and arguments as texts."""
        found = dict(arguments)
        like = "[{layers = 2}, {layers = 4}]"
        if "levels" in found:
            levels = found["levels"]
            if not isinstance(levels, list | tuple) or not all(isinstance(level, Mapping) for level in levels):
                raise ValueError(f"levels must be like {like}, from the smallest to the largest, not {levels!r}")
            found["levels"] = tuple(json.dumps(level, sort_keys=True) for level in levels)
        if "arguments" in found:
            if not isinstance(found["arguments"], Mapping):
                raise ValueError(f"arguments must be like {{hidden = 32}}, not {found['arguments']!r}")
            found["arguments"] = json.dumps(found["arguments"], sort_keys=True)
        return found

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag(self.function, "tokens", self.tokens)
        if not 1 <= len(self.levels) <= MAX_LEVELS:
            raise ValueError(f"{self.function}: there must be 1 to {MAX_LEVELS} levels, not {len(self.levels)}")
        check_norm(self.function, self.norm)
        self._check_slices()

    def spec(self) -> dict[str, Any]:
        """Return the JSON from which `make_family` makes this family again."""
        levels, arguments = [json.loads(level) for level in self.levels], json.loads(self.arguments)
        spec = super().spec() | {"name": self.function, "levels": levels, "arguments": arguments}
        del spec["function"]
        return spec

    @property
    def input_dtype(self) -> torch.dtype:  # type: ignore[override]
        """Whole numbers where inputs are tokens."""
        return torch.int64 if self.tokens else torch.float32

    @property
    def groups(self) -> dict[str, int]:
        """Return the level."""
        return {"level": len(self.levels)}

    @cached_property
    def stacks(self) -> Mapping[str, tuple[str, ...]]:
        """Lists of blocks of which levels have more or fewer, such as an `nn.ModuleList` of layers."""
        small, large = (_lists(meta_state(self, arch)) for arch in (self.smallest(), self.full()))
        return {
            prefix: tuple(f"{prefix}.{number}" for number in sorted(numbers))
            for prefix, numbers in large.items()
            if numbers != small.get(prefix)
        }

    def smallest(self) -> Architecture:
        """Return the first level."""
        return Architecture((1,))

    def up_to(self, exit: int, rate: float = 1.0) -> Architecture:
        """Return the level at a share of all levels: of three, 0.5 is the second."""
        check_cut(self.function, 1, exit, rate)
        return Architecture((kept_channels(len(self.levels), rate),))

    def candidates(self, widths: Iterable[float]) -> list[Architecture]:
        """Return all levels, largest first; widths play no part."""
        return [Architecture((level,)) for level in range(len(self.levels), 0, -1)]

    def validate(self, arch: Architecture) -> None:
        """Raise ValueError unless this is the number of a level."""
        if len(arch.widths) != 1 or arch.kernels or not 1 <= arch.widths[0] <= len(self.levels):
            raise ValueError(f"{self.function}: an architecture is a level, 1 to {len(self.levels)}, not {arch}")

    def network(self, arch: Architecture) -> Network:
        """Return what the function makes."""
        text = self._text(arch)
        where = self.function if text == "{}" else f"{self.function} at level {text}"
        values = {**json.loads(self.arguments), **json.loads(text)}
        module = made_module(self.function, values, self.input_shape, self.classes, where)
        if self.norm == "static":
            make_static(module)
        return module if isinstance(module, Network) else AnyNetwork(module)

    def price(self, arch: Architecture, batch_size: int, optimizer: str) -> Cost:
        """Follow one training step on fake tensors; ValueError also if running statistics would never move."""
        where = self._where(arch.widths[0])
        _check_norms(where, self.without_memory(arch).train())
        try:
            return super().price(arch, batch_size, optimizer)
        except ValueError as error:
            if "NoneType" not in str(error) or self.with_statistics is self:
                raise
            raise ValueError(
                f"{error} (norm = 'static', by the strategy or by family-arguments: running_mean and running_var of "
                "its batch norms are None in training)"
            ) from error

    def _where(self, number: int) -> str:
        """Return what a message on a level begins with: its number and arguments, unless there is one level alone."""
        return (
            self.function if self.levels == ("{}",) else f"{self.function}: level {number} ({self.levels[number - 1]})"
        )

    def _text(self, arch: Architecture) -> str:
        return self.levels[arch.widths[0] - 1]

    def _check_slices(self) -> None:
        """Raise ValueError where a level's tensors are no leading slices of those of the level above."""
        above: dict[str, Tensor] = {}
        for number in range(len(self.levels), 0, -1):
            network = self.without_memory(Architecture((number,))).train()
            state = network.state_dict()
            where = self._where(number)
            if not state:
                raise ValueError(f"{where} has no tensors to train")
            if whole := [name for name, tensor in state.items() if not tensor.is_floating_point()]:
                raise ValueError(f"{where}: {whole[0]} is {state[whole[0]].dtype}, and only floating point is learned")
            check_ties(where, state)
            check_held(
                where, network.module if isinstance(network, AnyNetwork) else network, alone=len(self.levels) == 1
            )
            for name, tensor in state.items() if above else ():
                if name not in above:
                    raise ValueError(
                        f"{where} has a tensor {name!r}, which the level above has not: every level's tensors are "
                        "leading slices of those of the same name in the level above"
                    )
                mine, theirs = tuple(tensor.shape), tuple(above[name].shape)
                if len(mine) != len(theirs) or any(m > t for m, t in zip(mine, theirs, strict=True)):
                    raise ValueError(
                        f"{where}: {name} has shape {mine}, the level above {theirs}: levels go from the smallest to "
                        "the largest, and every tensor is a leading slice of the one above"
                    )
            above = state


def _check_norms(where: str, network: Network) -> None:
    """Raise ValueError where running statistics would never move, because batch norm's counters do not travel."""
    for name, part in network.named_modules():
        if isinstance(part, _BatchNorm) and part.training and part.track_running_stats and part.momentum is None:
            raise ValueError(
                f"{where}: {name} has momentum = None, which is a mean over all batches, and the number of batches "
                "does not travel: give it a momentum, such as 0.1, or set family-arguments = \"norm = 'static'\""
            )


def _lists(names: Iterable[str]) -> dict[str, set[int]]:
    """Return the numbers that stand behind each prefix in names such as encoder.layer.0.weight."""
    found: dict[str, set[int]] = {}
    for name in names:
        parts = name.split(".")
        for position, part in enumerate(parts[1:], start=1):
            if part.isdecimal():
                found.setdefault(".".join(parts[:position]), set()).add(int(part))
                break
    return found
