"""The family of a user's module that is cut by itself: what a server traced, and what devices get of it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from wildflower.models.added_parts import ADDED
from wildflower.models.architecture import Architecture
from wildflower.models.base import followed, lies_in
from wildflower.models.composition import Frame, total
from wildflower.models.cost import Cost
from wildflower.models.frozen import marked, without_gradients
from wildflower.models.group_family import GroupFamily, check_depths, depth_at
from wildflower.models.layers import TensorSpec
from wildflower.models.made import made_module
from wildflower.models.network import Network
from wildflower.models.of_transformers import CONFIG, OF_TEXTS, SIZES, with_settings
from wildflower.models.placement import CLASSES, AnyAxis, Axis, Joined
from wildflower.models.traced.graph import DTYPES, Cuts, Graph, Stretch, read_graph
from wildflower.models.traced.program import Program, drawn
from wildflower.models.traced.writes import check_writes
from wildflower.plugins.flower_log import log

if TYPE_CHECKING:
    from wildflower.models.trace import Step
    from wildflower.models.traced.price import Recorded

PRECISION = 0.01
NAME = "your module"


@dataclass(frozen=True)
class Traced(GroupFamily):
    """A module's graph, of which an architecture keeps channels of every group.

    `function` is a class of modules, or a function that returns one. On the server it is called with `arguments`, and
    with the task's `classes` (or `num_classes`) and `input_shape` where it has parameters of these names. Devices get
    the `graph` alone, a JSON text (`wildflower.models.traced.graph`).

    tokens: inputs are int64.
    keep: parts whose channels are never cut, or patterns of them.
    together: patterns of names of groups that become one, such as "layer1.*", where they have one size.
    depth: patterns of names of blocks that may be left out, by default of all but the first of a stack.
    exits: parts of the module behind which there are early exits.
    early_exits: whether there are where it seems right, if none are named.
    depths: numbers of blocks of the one stack that devices may get, ascending; () where widths say what they get.
    model, vocabulary, labels: of a class of `transformers`, the settings of its configuration, how many tokens the task
        has, and whether it labels each (`of_transformers.with_settings`); they are among the `arguments` of a family
        that was made.
    pad_id: the token with which texts are padded. Such a model leaves it out, and so do early exits of any module.
    one_length: the module takes no shorter texts than it was traced with, so that those of a batch are padded again.
    separator: the token behind each text of a pair, where such a model tells its texts apart; -1: it does not.
    """

    name: ClassVar[str] = NAME

    function: str = ""
    arguments: str = "{}"
    tokens: bool = False
    keep: tuple[str, ...] = ()
    together: tuple[str, ...] = ()
    depth: tuple[str, ...] = ("*",)
    exits: tuple[str, ...] = ()
    early_exits: bool = False
    depths: tuple[int, ...] = ()
    graph: str = ""
    model: str = ""
    vocabulary: int | None = None
    labels: str = ""
    pad_id: int | None = None
    one_length: bool = False
    separator: int = -1

    @override
    @classmethod
    def resolved(cls, arguments: Mapping[str, Any]) -> dict[str, Any]:
        found = with_settings(arguments)
        if isinstance(found.get("arguments"), Mapping):
            found["arguments"] = json.dumps(found["arguments"], sort_keys=True)
        if not isinstance(found.get("arguments", "{}"), str):
            raise ValueError(f"arguments must be like {{hidden = 32}}, not {found['arguments']!r}")
        if "graph" not in found:
            from wildflower.models.traced.making import graph_of, reads_shorter  # only a server traces

            found["graph"] = graph_of(found)
            if "pad_id" in found:
                configured = CONFIG in json.loads(found.get("arguments", "{}"))
                found["one_length"] = configured or not reads_shorter(found)
        return found

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.read  # what a graph may not hold is found here, not in the middle of a round
        if self.depths:
            check_depths(self.name, self.depths, [len(blocks) for blocks in self.stacks.values()])

    @cached_property
    def read(self) -> Graph:
        """The graph."""
        graph = read_graph(self.graph)
        check_writes(graph)
        return graph

    @override
    def spec(self) -> dict[str, Any]:
        spec = super().spec() | {"arguments": json.loads(self.arguments)}
        of_text = ("model", *SIZES, *OF_TEXTS)
        return {key: value for key, value in spec.items() if key not in of_text or value not in ("", None, -1)}

    @property
    def input_dtype(self) -> torch.dtype:  # type: ignore[override]
        """Whole numbers where inputs are tokens."""
        return torch.int64 if self.tokens else torch.float32

    @override
    def further_names(self) -> Mapping[str, str]:
        return self.read.ties

    @cached_property
    def embeddings(self) -> Mapping[str, int]:
        """The tables of embeddings that are read by the inputs, and how many rows each has."""
        nodes = [node for node in self.read.evaluation if node.op == "embedding.default"]
        nodes = [node for node in nodes if node.args[1:2] == [{"x": 0}]] or nodes  # of positions there are tables too
        names = [node.args[0]["t"] for node in nodes if isinstance(node.args[0], dict) and "t" in node.args[0]]
        return {name: self.tensors(self.full())[name].shape[0] for name in names if name in self.read.state}

    # Architectures

    @property
    def cuts(self) -> Cuts:
        """The user's own words on how the module is cut."""
        return Cuts(self.keep, self.together, self.depth, self.exits, self.early_exits, self.pad_id)

    @property
    @override
    def groups(self) -> Mapping[str, int]:
        return self.read.groups

    @cached_property
    @override
    def removable(self) -> Mapping[str, tuple[str, ...]]:
        return super().removable or {block: tuple(groups) for block, groups in self.read.blocks.items()}

    @cached_property
    def segments(self) -> Mapping[str, tuple[str, ...]]:
        """The groups from one exit to the next."""
        exits = {name: tuple(exit.groups) for name, exit in self.read.exits.items()}
        return exits or {"head": tuple(self.groups)}

    @property
    @override
    def stacks(self) -> Mapping[str, tuple[str, ...]]:
        return {stack: tuple(blocks) for stack, blocks in self.read.stacks.items()}

    @override
    def candidates(self, widths: Any) -> list[Architecture]:
        # A module without groups has one alone.
        return [self.first_layers(depth) for depth in reversed(self.depths)] or list(
            dict.fromkeys(super().candidates(widths))
        )

    @override
    def smallest(self) -> Architecture:
        return self.first_layers(self.depths[0]) if self.depths else super().smallest()

    @override
    def up_to(self, exit: int, rate: float = 1.0) -> Architecture:
        return self.first_layers(depth_at(self.depths, rate)) if self.depths else super().up_to(exit, rate)

    @cached_property
    def _is_configured(self) -> bool:
        """Whether it is a model of `transformers` that is made from a configuration."""
        return CONFIG in json.loads(self.arguments)

    @override
    def is_frozen(self, name: str) -> bool:
        # What an adapter or LoRA lies in does not freeze it, if it was added here: other modules' names may be alike.
        mark = next((mark for mark in ADDED if mark in name), None) if self._is_configured else None
        return super().is_frozen(name) and (
            mark is None or any(mark in f"{part}." and lies_in(name, part) for part in self.freeze)
        )

    # Sub-models

    @override
    def build(self, arch: Architecture) -> Network:
        self.validate(arch)
        return without_gradients(self, self.program(arch.widths))

    @override
    def without_memory(self, arch: Architecture) -> Network:
        self.validate(arch)
        return without_gradients(self, self.program(arch.widths, without_memory=True))

    def program(self, widths: Sequence[int], *, without_memory: bool = False) -> Program:
        """Return the program of any widths, also larger ones than the full model's."""
        static = self.norm == "static"
        padding = (self.input_shape[0], self.pad_id) if self.one_length and self.pad_id is not None else None
        return Program(
            self.read, widths, static=static, scaler=self.scaler, without_memory=without_memory, padding=padding
        )

    @override
    def initial(self) -> dict[str, Tensor]:
        own = self.own().state_dict(keep_vars=True)
        found = {}
        for name, spec in self.tensors(self.full()).items():
            head = name not in own  # of an early exit, which the module has not
            value = drawn(self.read.state[name], spec.shape, torch.get_default_device()) if head else own[name]
            found[name] = value.detach().clone()
        return found

    def own(self) -> nn.Module:
        """Return the user's module, whose weights its constructor draws by torch's generator; a server has it."""
        return made_module(self.function, json.loads(self.arguments), self.input_shape, self.classes)

    @override
    def tensors(self, arch: Architecture) -> Mapping[str, TensorSpec]:
        return _tensors(self, arch)

    @override
    def price(self, arch: Architecture, batch_size: int, optimizer: str) -> Cost:
        if 0 in arch.widths and not self.read.exits and _is_chain(self):
            # A step would be followed for each choice of blocks that are left out.
            from wildflower.models.traced.links import pieces_of

            frame = Frame.of(self, batch_size, optimizer)
            return total([piece.profile(batch_size, piling=frame.piling) for piece in pieces_of(self, arch)], frame)
        return super().price(arch, batch_size, optimizer)

    def ones(self, widths: Sequence[int]) -> tuple[int, ...]:
        """Return the groups of one channel for which PyTorch makes views where it copies several channels.

        Whether it does is tried for the first of those with one name but for numbers, such as of a stack's layers.
        """
        kinds = [re.sub(r"\d+", "", name) for name in self.groups] if 1 in widths else []
        alone = (number for number, width in enumerate(widths) if width == 1)
        return tuple(number for number in alone if _holds_otherwise(self, kinds.index(kinds[number])))

    @override
    def step(self, arch: Architecture, batch_size: int, *, accumulates: bool) -> Step:
        self.validate(arch)
        left_out = tuple(number for number, width in enumerate(arch.widths) if not width)
        recorded = _recorded(self, left_out, self.ones(arch.widths), batch_size, accumulates=accumulates)
        if recorded is None:
            return followed(self, arch, batch_size, accumulates=accumulates)
        tensors = self.tensors(arch)
        learned = [n for n in tensors if self.read.state[n].kind == "parameter" and not tensors[n].frozen]
        parameters = sum(math.prod(tensors[n].shape) for n in tensors if self.read.state[n].kind != "buffer")
        return replace(recorded.at(arch.widths, tensors, learned), parameters=parameters)


def _axis(parts: list[Stretch], names: list[str], full: list[int]) -> Axis | Joined | None:
    if all(part.group < 0 for part in parts):
        return None
    if len(parts) == 1 and parts[0].before == 1:
        return Axis(names[parts[0].group], parts[0].after)
    stretches = []
    for part in parts:
        group, size = ("", 1) if part.group < 0 else (names[part.group], full[part.group])
        stretches.append((group, part.before, size, part.after))
    return Joined(tuple(stretches))


@lru_cache(maxsize=256)
def _tensors(family: Traced, arch: Architecture) -> dict[str, TensorSpec]:
    graph = family.read
    names, full = list(graph.groups), list(graph.groups.values())
    found = {}
    for name in family.without_memory(arch).state_dict():
        spec = graph.state[name]
        axes: list[AnyAxis] = [_axis(parts, names, full) for parts in spec.dimensions]
        if spec.classes >= 0:
            axes[spec.classes] = Axis(CLASSES)
        found[name] = TensorSpec(graph.shape(spec, arch.widths), DTYPES[spec.dtype], tuple(axes))
    return marked(family, found)


@lru_cache(maxsize=64)
def _is_chain(family: Traced) -> bool:
    from wildflower.models.traced.links import pieces_of

    try:
        pieces_of(family, family.full())
    except ValueError:
        return False
    return True


@lru_cache(maxsize=4096)
def _holds_otherwise(family: Traced, number: int) -> bool:
    """Return whether a step with one channel of a group holds more or less than one of any width tells."""
    many, one = (_recorded(family, (), ones, 2, accumulates=False) for ones in ((), (number,)))
    if many is None or one is None:
        return False
    widths = [1 if other == number else 2 for other in range(len(family.groups))]
    peaks = [recorded.at(widths, {}, []).peak_bytes for recorded in (many, one)]
    return abs(peaks[1] - peaks[0]) > PRECISION * peaks[0]


@lru_cache(maxsize=256)
def _recorded(
    family: Traced, left_out: tuple[int, ...], ones: tuple[int, ...], batch_size: int, *, accumulates: bool
) -> Recorded | None:
    """Return a step to play back in other widths; None if it is not that of the full width to a hundredth.

    Without some groups, or with one channel, a step is tried no more: it is played back where that of the whole is.
    """
    from wildflower.models.traced.price import record

    if (left_out or ones) and _recorded(family, (), (), batch_size, accumulates=accumulates) is None:
        return None
    found = record(
        family.read,
        lambda widths: without_gradients(family, family.program(widths)),
        left_out,
        ones,
        batch_size,
        family.input_shape,
        family.classes,
        tokens=family.tokens,
        accumulates=accumulates,
    )
    if left_out or ones:
        return found
    full = family.full()
    true = followed(family, full, batch_size, accumulates=accumulates)
    mine = found.at(full.widths, {}, [])
    close = all(abs(a - b) <= PRECISION * b for a, b in ((mine.peak_bytes, true.peak_bytes), (mine.flops, true.flops)))
    if not close:
        log.debug("%s and %s", (mine.peak_bytes, mine.flops), (true.peak_bytes, true.flops))
        log.info("Prices of %s are found by following a step of each architecture, which takes longer", family.function)
    return found if close else None
