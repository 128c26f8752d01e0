"""What a server does with a user's module before round 1: make it, trace it, and prove the graph to be the module."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from wildflower.models.any_network import changed_input
from wildflower.models.held import check_held, check_ties
from wildflower.models.made import made_module
from wildflower.models.traced.graph import Graph, write_graph
from wildflower.models.traced.program import Program
from wildflower.models.traced.tracing import WHOLE
from wildflower.models.traced.writing import Written
from wildflower.plugins.draws import same_draws
from wildflower.plugins.reference import PluginError

MOST_PINNED = 0.5  # of the parameters, where a module is called one that can be cut
SHOWN = 3
TRIED = (3, 2)  # examples of the batches on which graph and module must agree
TOLERANCE = 1e-4


def graph_of(arguments: Mapping[str, Any]) -> str:
    """Return the graph of what a family's arguments name, as JSON."""
    written = written_module(
        str(arguments.get("function", "")),
        str(arguments.get("arguments", "{}")),
        tuple(arguments["input_shape"]),
        int(arguments.get("classes", 10)),
        bool(arguments.get("tokens", False)),
        tuple(arguments.get("keep", ())),
    )
    return write_graph(written.graph)


@lru_cache(maxsize=16)
def written_module(
    function: str, arguments: str, input_shape: tuple[int, ...], classes: int, tokens: bool, keep: tuple[str, ...]
) -> Written:
    """Return a user's module as a graph, with what only a server knows of it; PluginError if that is impossible."""
    with same_draws():
        module = made_module(function, json.loads(arguments), input_shape, classes)
        check_held(function, module, alone=True)
        check_ties(function, dict(module.named_parameters()) | dict(module.named_buffers()))
        dtype = torch.int64 if tokens else torch.float32
        written = Written(function, module, input_shape, dtype, keep)
        _check_answer(function, written, classes)
        _check_cut(function, written)
        _check_same(function, module, written.graph, input_shape, dtype)
    return written


def _check_answer(where: str, written: Written, classes: int) -> None:
    answer = written.answer_shape
    if answer[1] != classes:
        raise PluginError(
            f"{where} answers with {answer[1]} numbers per example, and the task has {classes} classes: let its "
            "constructor have a parameter `classes` or `num_classes`, which gets that number"
            f"{'. Labels that are fractions are numbers to be learned: classes are whole numbers' * (classes == 1)}"
        )


def _check_cut(where: str, written: Written) -> None:
    """Raise PluginError for a module of which most is never cut."""
    tensors = written.traced.tensors
    cut = {name for group in written.groups for name, _ in group.tensors}
    total = sum(tensors[name].numel() for name in written.parameters)
    pinned = [name for name in written.parameters if name not in cut]
    if sum(tensors[name].numel() for name in pinned) <= MOST_PINNED * total:
        return
    largest = sorted(pinned, key=lambda name: -tensors[name].numel())[:SHOWN]
    why = "; ".join(f"{name}: {written.why_pinned(name)}" for name in largest)
    raise PluginError(f"{where}: most of its parameters cannot be cut ({why}). Change that, {WHOLE}")


def _check_same(where: str, module: nn.Module, graph: Graph, input_shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise PluginError unless the graph answers as the module does, in both modes, with the same gradients."""
    program = Program(graph, list(graph.groups.values()), without_memory=True)
    names = program.state_dict()
    own = module.state_dict()
    program.load_state_dict({name: own[name].clone() for name in names}, assign=True)
    generator = torch.Generator().manual_seed(0)
    for training in (False, True):
        for size in TRIED:
            inputs = inputs_like((size, *input_shape), dtype, generator)
            answers = []
            for network in (module.train(training), program.train(training)):
                given = inputs.clone()
                with same_draws(size):
                    answers.append(answer_of(network, given))
                if not torch.equal(given, inputs):
                    raise PluginError(changed_input(module))
            _compare(where, "answers", *answers, training=training)
    for network, answer in zip((module, program), answers, strict=True):
        network.zero_grad(set_to_none=True)
        if answer.requires_grad:
            answer.float().square().mean().backward()
    theirs = {name: parameter.grad for name, parameter in module.named_parameters(remove_duplicate=False)}
    for name, parameter in program.named_parameters():
        mine, other = parameter.grad, theirs[name]
        if (mine is None) != (other is None):
            raise PluginError(
                f"{where}: {name} {'has no' if other is None else 'has a'} gradient in the module, and its graph is "
                f"otherwise: use detach() in place of torch.no_grad(), {WHOLE}"
            )
        if mine is not None and other is not None:
            _compare(where, f"gradients of {name}", other, mine, training=True)


def answer_of(network: nn.Module, inputs: Tensor) -> Tensor:
    """Return a network's answer; of Hugging Face's, its logits."""
    found = network(inputs)
    found = getattr(found, "logits", found)
    [answer] = tree_leaves(found)
    assert isinstance(answer, Tensor)
    return answer


def _compare(where: str, what: str, module: Tensor, graph: Tensor, *, training: bool) -> None:
    if module.shape == graph.shape and torch.allclose(module, graph, TOLERANCE, TOLERANCE, equal_nan=True):
        return
    mode = "training" if training else "evaluation"
    raise PluginError(
        f"{where}: in {mode} mode the {what} of the module and of its graph differ. Its forward pass depends on "
        f"something that a graph does not hold, such as the size of the batch, an attribute that it changes or chance "
        f"that is not PyTorch's: compute it from the input, {WHOLE}"
    )


def inputs_like(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Draw inputs: numbers, or the first two tokens of any vocabulary."""
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator)
    return torch.randint(0, 2, shape, generator=generator, dtype=dtype)
