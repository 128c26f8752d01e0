"""A user's module before round 1: the server makes it, traces it, and proves the graph to be the module."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from wildflower.models.held import check_held, check_ties
from wildflower.models.made import made_module
from wildflower.models.traced.graph import DTYPES, Cuts, Graph, read_graph, write_graph
from wildflower.models.traced.program import Program, drawn
from wildflower.models.traced.tracing import WHOLE
from wildflower.models.traced.writes import check_writes
from wildflower.models.traced.writing import Written
from wildflower.plugins.draws import inputs_like, same_draws
from wildflower.plugins.flower_log import log
from wildflower.plugins.raised_as import raised_as
from wildflower.plugins.reference import PluginError, one_sentence

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
        Cuts(**{key: arguments[key] for key in Cuts._fields if key in arguments}),
    )
    return write_graph(written.graph)


def reads_shorter(arguments: Mapping[str, Any]) -> bool:
    """Return whether a graph takes shorter texts than it was traced with: not if it has a table of positions."""
    graph, shorter = read_graph(arguments["graph"]), arguments["input_shape"][0] - 1
    with same_draws(), torch.no_grad():
        program = Program(graph, [1] * len(graph.groups)).eval()
        try:
            answers = program.exits(torch.zeros(TRIED[0], shorter, dtype=torch.int64))
        except (RuntimeError, IndexError):
            return False
    return all(answer.shape[2:] in ((), (shorter,)) for answer in answers)


@lru_cache(maxsize=16)
def written_module(
    function: str, arguments: str, input_shape: tuple[int, ...], classes: int, tokens: bool, cuts: Cuts
) -> Written:
    """Return a user's module as a graph, with what only a server knows of it; PluginError if that is impossible."""
    with same_draws():
        module = made_module(function, json.loads(arguments), input_shape, classes)
        _check_tensors(function, module)
        check_held(function, module, alone=True)
        check_ties(function, dict(module.named_parameters()) | dict(module.named_buffers()))
        dtype = torch.int64 if tokens else torch.float32
        written = Written(function, module, input_shape, dtype, cuts)
        _check_answer(function, written, classes)
        _check_cut(function, written)
        _tell_of_padding(function, written)
        with raised_as(PluginError, f"{function}: "):
            check_writes(written.graph)
        _check_same(function, module, written.graph, input_shape, dtype)
        try:
            _check_shortened(function, written.graph, input_shape, dtype)
        except PluginError as error:
            if written.graph.exits or cuts.depth != Cuts().depth:
                raise
            log.warning("All blocks of %s stay: %s", function, error)
            written.graph = written.graph.model_copy(update={"blocks": {}, "bypassed": {}, "stacks": {}})
    return written


def _check_tensors(where: str, module: nn.Module) -> None:
    """Raise PluginError for tensors that cannot travel."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        kind = str(tensor.dtype if tensor.layout == torch.strided else tensor.layout).removeprefix("torch.")
        if kind not in DTYPES:
            raise PluginError(
                f"{where}: {name} is a tensor of {kind}, which does not travel: hold sparse ones as "
                "to_dense(), and complex ones by torch.view_as_real, of which `forward` makes torch.view_as_complex"
            )
        if isinstance(tensor, nn.Parameter) and not tensor.isfinite().all():
            raise PluginError(f"{where}: {name} has first values that are no finite numbers: give it others")


def _check_answer(where: str, written: Written, classes: int) -> None:
    answer = written.answer_shape
    if answer[1] != classes:
        raise PluginError(
            f"{where} answers with {answer[1]} number{'s' * (answer[1] != 1)} per example, and the task has {classes} "
            "classes: let its constructor have a parameter `classes` or `num_classes`, which gets that number, or say "
            f'it by family-arguments, such as "arguments = {{outputs = {classes}}}"'
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


def _tell_of_padding(where: str, written: Written) -> None:
    """Warn of early exits whose mean counts padding, because their positions are not those of a text's tokens."""
    counted = [
        f"exit{number}"
        for number, place in enumerate(written.places, start=1)
        if not (place.tokens or place.positions) and place.rank > 2
    ]
    if written.pad_id is not None and counted:
        log.warning(
            "%s: the mean of %s counts the padding behind a text, because it has other positions than the tokens",
            *(where, ", ".join(counted)),
        )


class _SameAtEach(TorchDispatchMode):
    """Has each operator draw from one seed: a graph lacks what the module draws for nothing, as in auxiliary heads."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    @override
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in function.tags:
            torch.default_generator.manual_seed(self.seed)
        return function(*args, **kwargs or {})


def _check_same(where: str, module: nn.Module, graph: Graph, input_shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise PluginError unless the graph answers as the module does, in both modes, with the same gradients."""
    program = Program(graph, list(graph.groups.values()), without_memory=True)
    own = module.state_dict()
    for name, tensor in program.state_dict().items():
        if name not in own:  # of an early exit's head
            own[name] = drawn(graph.state[name], tensor.shape, torch.device("cpu"))
        elif graph.state[name].kind == "buffer":  # which both move in training
            own[name] = own[name].clone()
    program.load_state_dict({name: own[name] for name in program.state_dict()}, assign=True)
    generator = torch.Generator().manual_seed(0)
    for training in (False, True):
        for size in TRIED:
            inputs = inputs_like((size, *input_shape), dtype, generator)
            answers = []
            for network in (module.train(training), program.train(training)):
                try:
                    with same_draws(size), _SameAtEach(size):
                        answers.append(answer_of(network, inputs))
                except (RuntimeError, ValueError, IndexError) as error:
                    hint = "Take sizes from the input, as in x.shape[0]"
                    if "dtype" in str(error):
                        hint = f"Inputs are {dtype}: make them what its weights are, as in x.to(self.head.weight.dtype)"
                    raise PluginError(
                        f"{where}: {'the module' if network is module else 'its graph'} does not take a batch of "
                        f"{size}: {one_sentence(error)}. {hint}, {WHOLE}"
                    ) from error
            _compare(where, "answers", *answers, training=training)
    for name, buffer in program.named_buffers():
        if name in graph.state:
            _compare(where, f"values of the buffer {name}", module.get_buffer(name), buffer, training=True)
    for network, answer in zip((module, program), answers, strict=True):
        network.zero_grad(set_to_none=True)
        if answer.requires_grad:
            answer.float().square().mean().backward()
    theirs = {name: parameter.grad for name, parameter in module.named_parameters(remove_duplicate=False)}
    for name, parameter in program.named_parameters():
        mine, other = parameter.grad, theirs.get(name)
        if (mine is None) != (other is None):
            raise PluginError(
                f"{where}: {name} {'has no' if other is None else 'has a'} gradient in the module, and its graph is "
                f"otherwise: use torch.no_grad() or detach(), {WHOLE}"
            )
        if mine is not None and other is not None:
            _compare(where, f"gradients of {name}", other, mine, training=True)


def _check_shortened(where: str, graph: Graph, input_shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise PluginError unless networks answer and have gradients that lack blocks, or all behind an exit.

    Tried are one channel in every group without one block of each stack, and without all; or with each exit as the end.
    """
    parts = {name: exit.groups for name, exit in list(graph.exits.items())[1:]} or graph.blocks
    names = list(parts)
    first = [[next(name for name in stack if name in parts)] for stack in graph.stacks.values()]
    tried = [names[number:] for number in range(len(names))] if graph.exits else [*first, names]
    lacking = _without_gradients(where, graph, (), input_shape, dtype) if names else set()
    for without in filter(None, tried):
        groups = [group for name in without for group in parts[name]]
        if missing := _without_gradients(where, graph, groups, input_shape, dtype) - lacking:
            raise PluginError(
                f"{where}: without {', '.join(without)} there is no gradient of {min(missing)}: let them stay by "
                "depth = [], or name other exits"
            )


def _without_gradients(
    where: str, graph: Graph, left_out: Collection[str], input_shape: tuple[int, ...], dtype: torch.dtype
) -> set[str]:
    """Return the parameters without gradients where some groups are 0 and the others 1; PluginError if it fails."""
    network = Program(graph, [int(group not in left_out) for group in graph.groups])
    inputs = inputs_like((TRIED[0], *input_shape), dtype, torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            network.eval()(inputs)
        answers = network.train().exits(inputs)
        torch.stack([answer.float().square().mean() for answer in answers]).sum().backward()
    except (RuntimeError, ValueError) as error:
        raise PluginError(
            f"{where}: without {', '.join(left_out)} it cannot be computed: {one_sentence(error)}. Let these blocks "
            "stay by depth = [], or name other exits"
        ) from error
    return {name for name, tensor in network.named_parameters() if tensor.requires_grad and tensor.grad is None}


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
        f"something that a graph does not hold, such as the size of the batch, an attribute that it changes (write "
        f"buffers by self.mean.copy_(...)) or chance that is not PyTorch's: compute it from the input, {WHOLE}"
    )
