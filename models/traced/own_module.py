"""A sub-model as the user's own class: the module is made anew, with smaller tensors and attributes that fit them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from wildflower.models.architecture import Architecture
from wildflower.models.traced.family import Traced
from wildflower.models.traced.graph import Operation
from wildflower.models.traced.layouts import Layout
from wildflower.models.traced.making import TOLERANCE, TRIED, answer_of, written_module
from wildflower.models.traced.operators import CONVOLUTIONS, short_name
from wildflower.models.traced.program import INPUT, Program, reads
from wildflower.models.traced.writing import Written
from wildflower.plugins.draws import inputs_like
from wildflower.plugins.flower_log import log
from wildflower.plugins.reference import PluginError


def own_module(family: Traced, arch: Architecture, network: Program) -> nn.Module | None:
    """Return a trained sub-model as the user's own class, in evaluation mode.

    Sizes among the attributes of modules are found by what their forward passes compute. The module is taken only if it
    answers as `network` does; None if it does not, if a layer is left out, or if the class cannot be imported.
    """
    try:
        written = written_module(
            family.function, family.arguments, family.input_shape, family.classes, family.tokens, family.cuts
        )
        made = family.own()
    except PluginError as error:
        log.info("%s comes as its graph: %s", family.function, error)
        return None
    own = dict(made.named_parameters()) | dict(made.named_buffers())
    weights = _weights(network, written.graph.evaluation) | {
        name: own[name] for name in written.traced.constants & own.keys()
    }
    counters = {name for name, buffer in made.named_buffers() if not buffer.is_floating_point()}
    if own.keys() - counters != weights.keys() - counters:
        return None
    _put(made, weights)
    _Sizes(written, arch.widths).fit(made)
    return made.eval() if _answers_alike(family, made, network) else None


def _weights(network: Program, nodes: list[Operation]) -> dict[str, Tensor]:
    """Return the tensors of a sub-model, with HeteroFL's scaler multiplied into the layers behind which it stands."""
    found = {name: value.detach().clone() for name, value in network.state_dict().items()}
    for node in nodes:
        share = network.scale(node)
        for name in found.keys() & _of_layer(nodes, node) if share != 1 else ():
            found[name] /= share
    return found


def _of_layer(nodes: list[Operation], node: Operation) -> set[str]:
    """Return the tensors of a layer behind which the scaler stands: behind a bias those of the product too."""
    read, names = reads(node)
    if node.op.startswith(("add.", "add_.")):
        names = names.union(*(reads(nodes[number])[1] for number in read if number != INPUT))
    return names


def _put(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Replace tensors; those that are tied stay tied."""
    tied: dict[int, nn.Parameter] = {}
    for path, part in module.named_modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and id(parameter) not in tied:
                value = weights[f"{path}.{name}".lstrip(".")]
                tied[id(parameter)] = nn.Parameter(value, parameter.requires_grad)
            if parameter is not None:
                part._parameters[name] = tied[id(parameter)]
        for name in part._buffers:
            if (buffer := weights.get(f"{path}.{name}".lstrip("."))) is not None:
                part._buffers[name] = buffer


class _Sizes:
    """The sizes that a module's forward pass meets: of the whole model, and of an architecture."""

    def __init__(self, written: Written, widths: tuple[int, ...]) -> None:
        self.written, self.widths = written, widths
        self.nodes: dict[str, list[Node]] = defaultdict(list)  # path of a module -> nodes of its own forward pass
        for graph in written.traced.graphs.values():
            for node in graph.nodes:
                stack = list(node.meta.get("nn_module_stack", {}).values()) if node.op == "call_function" else []
                if stack:
                    self.nodes[stack[-1][0].partition("of")[2].lstrip(".")].append(node)

    def of(self, layout: Layout) -> int:
        """Return the size of a dimension in the architecture."""
        return self.written.graph.size(self.written.size(layout), self.widths)

    def fit(self, module: nn.Module) -> None:
        """Set the sizes among the attributes of a module's parts."""
        for path, part in module.named_modules():
            nodes = self.nodes[path]
            groups = [
                self.of(self.written.found.details[n]) for n in nodes if n in self.written.found.details and _groups(n)
            ]
            if not _fit_layer(part, groups[0] if groups else 0):
                self._fit_attributes(part, nodes)

    def _fit_attributes(self, part: nn.Module, nodes: list[Node]) -> None:
        """Set whole numbers that are the size of one dimension only, of those that the forward pass meets."""
        met: dict[int, set[int]] = defaultdict(set)
        whole = list(self.written.graph.groups.values())
        for node in nodes:
            for layout in (found for n in (node, *node.all_input_nodes) for found in self._layouts(n)):
                size = self.written.size(layout)
                met[self.written.graph.size(size, whole)].add(self.of(layout))
        for name, value in vars(part).items():
            if type(value) is int and value > 1 and len(met.get(value, ())) == 1 and not name.startswith("_"):
                setattr(part, name, *met[value])

    def _layouts(self, node: Node) -> Iterator[Layout]:
        for entry in self.written.found.layouts.get(node) or []:
            if isinstance(entry, list):
                yield from entry
            elif entry is not None:
                yield entry


def _groups(node: Node) -> bool:
    return short_name(node.target) in CONVOLUTIONS | {"group_norm"}


def _fit_layer(part: nn.Module, groups: int) -> bool:
    """Set the sizes of a layer of PyTorch's by its tensors; False if it is none of those that have any."""
    weight: Any = getattr(part, "weight", None)
    match part:
        case nn.modules.conv._ConvNd():
            part.groups = groups or part.groups
            sides = (weight.shape[0], weight.shape[1] * part.groups)
            part.in_channels, part.out_channels = sides if part.transposed else sides[::-1]
        case nn.Linear():
            part.out_features, part.in_features = weight.shape
        case nn.Embedding():
            part.num_embeddings, part.embedding_dim = weight.shape
        case nn.modules.batchnorm._NormBase() if part.running_mean is not None:
            part.num_features = len(part.running_mean)
        case nn.LayerNorm() | nn.RMSNorm() if weight is not None:
            part.normalized_shape = tuple(weight.shape)
        case nn.GroupNorm():
            part.num_channels, part.num_groups = len(weight), groups or part.num_groups
        case nn.RNNBase():
            part.hidden_size, part.input_size = (part.get_parameter(f"weight_{of}_l0").shape[1] for of in ("hh", "ih"))
            part._flat_weights = [part.get_parameter(name) for name in part._flat_weights_names]
        case nn.MultiheadAttention() if part.in_proj_weight is not None:
            part.embed_dim = part.kdim = part.vdim = part.in_proj_weight.shape[1]
            part.num_heads = part.in_proj_weight.shape[0] // 3 // part.head_dim
        case _:
            return False
    return True


def _answers_alike(family: Traced, made: nn.Module, network: Program) -> bool:
    generator = torch.Generator().manual_seed(0)
    for size in TRIED:
        inputs = inputs_like((size, *family.input_shape), family.input_dtype, generator)
        try:
            with torch.no_grad():
                mine, its = answer_of(made.eval(), inputs), answer_of(network.eval(), inputs)
        except Exception as error:  # of any kind: it is the user's code, with sizes that may not fit
            log.info("%s comes as its graph: %s", family.function, error)
            return False
        if mine.shape != its.shape or not torch.allclose(mine, its, TOLERANCE, TOLERANCE, equal_nan=True):
            return False
    return True
