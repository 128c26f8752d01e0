"""The cost of a training step of any module, found by running it on fake tensors.

Fake tensors have shapes, types and storages without memory, so that a model of gigabytes is priced on a small server.
Every storage is followed from the operator that makes it to its release by PyTorch itself: results that autograd saves,
gradients as they pile up, and temporary tensors between operators. What operators take inside of themselves is not
seen; the copies of convolutions are added, as `wildflower.models.cost` counts them.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from wildflower.models.any_network import changed_input
from wildflower.models.cost import (
    CONVOLUTION_KERNEL_BYTES,
    FLOAT_BYTES,
    OPTIMIZERS,
    Convolution,
    Cost,
    backward_copies,
    blocked,
    forward_copies,
    unfolded_copies,
)
from wildflower.models.network import Network
from wildflower.models.skeleton import parameters_without_memory
from wildflower.plugins.draws import same_draws
from wildflower.plugins.flower_log import log
from wildflower.plugins.reference import PluginError

aten = torch.ops.aten
TRANSFORMS = (aten._fft_r2c.default, aten._fft_c2c.default, aten._fft_c2r.default)
BY_ONEDNN = (torch.float32, torch.bfloat16)  # types of convolutions that it computes


def _recurrent_flops(inputs: Sequence[int], of_inputs: Sequence[int], of_states: Sequence[int]) -> int:
    """Return the FLOPs of a recurrent layer: each weight is used for each step of each example."""
    return 2 * math.prod(inputs[:2]) * (math.prod(of_inputs) + math.prod(of_states))


# PyTorch's counter knows kernels on GPUs only.
KERNELS_ON_CPUS: Mapping[Any, Callable[..., int]] = {
    aten.mkldnn_rnn_layer: lambda *shapes, **__: _recurrent_flops(*shapes[:3]),
    aten.mkldnn_rnn_layer_backward: lambda *shapes, **__: 2 * _recurrent_flops(*shapes[:3]),
    aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value)
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda gradient, query, key, value, *_, **__: sdpa_backward_flop_count(gradient, query, key, value)
    ),
}


@dataclass
class Step:
    """One training step of a module.

    Attributes:
        peak_bytes: the most that was live beside the weights and buffers, the batch included.
        batch_bytes: of the batch alone.
        trained, largest: entries of all parameters that are trained, and of the largest of them.
        parameters: entries of all parameters, frozen ones too.
        state_bytes: of all that the state dict holds.
        held_bytes: of parameters and buffers, those that the state dict leaves out too.
        flops: of the whole batch.
        answer: the shape of what it returns for one example: (outputs,) or (outputs, positions).
        convolutions: distinct ones.
        accumulates: whether gradients of an earlier micro-batch were there; the optimizer of `cost` must say the same.
        entry_bytes: of one entry of the widest parameter that is trained.
    """

    peak_bytes: int
    batch_bytes: int
    trained: int
    largest: int
    parameters: int
    state_bytes: int
    held_bytes: int
    flops: int
    answer: tuple[int, ...]
    convolutions: set[Convolution] = field(default_factory=set)
    accumulates: bool = False
    entry_bytes: int = FLOAT_BYTES

    def cost(self, batch_size: int, optimizer: str) -> Cost:
        """Return the cost of the step, with the optimizer's state and step counted as `wildflower.models.cost` does."""
        if OPTIMIZERS[optimizer].accumulates != self.accumulates:
            raise ValueError(
                f"a step that was followed with accumulates = {self.accumulates} is not one of {optimizer!r}"
            )
        state, temporary = OPTIMIZERS[optimizer].state, OPTIMIZERS[optimizer].temporary
        update_bytes = self.batch_bytes + self.entry_bytes * (self.trained + temporary * self.largest)
        kernel_bytes = CONVOLUTION_KERNEL_BYTES * len(self.convolutions)
        return Cost(
            parameters=self.parameters,
            download_bytes=self.state_bytes,
            upload_bytes=self.state_bytes,
            peak_training_memory_bytes=self.held_bytes
            + self.entry_bytes * state * self.trained
            + kernel_bytes
            + max(self.peak_bytes, update_bytes),
            training_flops=self.flops // batch_size,
            entry_bytes=self.entry_bytes,
        )


def follow(
    build: Callable[[], nn.Module],
    batch_size: int,
    input_shape: tuple[int, ...],
    dtype: torch.dtype,
    outputs: int,
    *,
    accumulates: bool = False,
    following: Callable[[list[Tensor]], Storages] | None = None,
) -> Step:
    """Follow one training step with cross-entropy of a module on a batch.

    Args:
        build: makes the module, in training mode; called while tensors are fake.
        outputs: size of the second dimension of what the module returns.
        accumulates: a second pass is followed, in which the gradients of the first are there, as with micro-batches.
        following: makes what follows the storages, of the tensors that are there before; `Storages` by default.

    Raises:
        ValueError: the module does not take such a batch, or returns something else.
    """
    # Batch norm refuses a single example over a 1x1 map; training never meets one either.
    examples = max(2, batch_size)
    with _errors_logged_once(), FakeTensorMode(allow_non_fake_inputs=True):  # constants of its file
        model = built(build).train()
        inputs = torch.zeros(examples, *input_shape, dtype=dtype)
        storages = (following or Storages)([*model.parameters(), *model.buffers()])
        with storages, FlopCounterMode(display=False, custom_mapping=dict(KERNELS_ON_CPUS)) as counter:
            storages.hold(inputs)
            try:
                results = outputs_of(model, inputs)
            except PluginError:  # says in words what is wrong
                raise
            except DataDependentOutputException as error:
                raise ValueError(
                    f"the forward pass of its network depends on the values of a tensor ({error.func}), such as 'if "
                    "x.mean() > 0': it is priced by tensors without values, so that it may depend on their shapes alone"
                ) from error
            except Exception as error:  # of any kind: a model is any Python
                shape = "x".join(map(str, input_shape))
                raise ValueError(
                    f"its network does not take a batch of {shape} inputs of {str(dtype).removeprefix('torch.')}: "
                    f"{type(error).__name__}: {error}"
                ) from error
            if inputs.untyped_storage()._cdata in storages.written:
                raise PluginError(changed_input(model))
            for result in results:
                if not isinstance(result, Tensor) or result.dim() < 2 or result.shape[1] != outputs:
                    found = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
                    raise ValueError(
                        f"its network returns {found} for a batch of {examples}: it must return one tensor of "
                        f"(batch, {outputs}), one row of outputs per example, or of (batch, {outputs}, tokens)"
                    )
            size = results[-1].shape  # (batch, classes), or (batch, classes, positions)
            labels = torch.zeros((size[0], *size[2:]), dtype=torch.int64)
            batch_bytes = inputs.nbytes + labels.nbytes
            loss_of(results, labels).backward()
            del results, result
            flops = counter.get_total_flops()
            if accumulates:
                results = outputs_of(model, inputs)
                loss_of(results, labels).backward()
        learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
        buffers = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        return Step(
            peak_bytes=storages.peak_bytes,
            batch_bytes=batch_bytes,
            trained=sum(parameter.numel() for parameter in learned),
            largest=max((parameter.numel() for parameter in learned), default=0),
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            state_bytes=sum(tensor.nbytes for tensor in model.state_dict().values()),
            held_bytes=sum(tensor.nbytes for tensor in buffers.values()),
            flops=flops * batch_size // examples,
            answer=tuple(size[1:]),
            convolutions=storages.convolutions,
            accumulates=accumulates,
            entry_bytes=max((parameter.itemsize for parameter in learned), default=FLOAT_BYTES),
        )


def outputs_of(model: nn.Module, inputs: Tensor) -> Sequence[Tensor]:
    """Return what a model returns, by exit where it has exits."""
    return model.exits(inputs) if isinstance(model, Network) else [model(inputs)]


def loss_of(results: Sequence[Tensor], labels: Tensor) -> Tensor:
    """Return the sum of cross-entropy over all exits."""
    return torch.stack([F.cross_entropy(logits, labels) for logits in results]).sum()


def built(build: Callable[[], nn.Module]) -> nn.Module:
    """Return what `build` makes, with fake parameters; called while tensors are fake.

    Where it reads values of its constants, as in `[x.item() for x in torch.linspace(0, 0.1, layers)]`, these have some.
    """
    try:
        with converted_and_copied():
            return build()
    except Exception as error:  # of any kind: a model is any Python, and its family may have put it into words
        log.debug("Fake tensors do not do to make a network: %s", error)
    with unset_fake_temporarily(), same_draws(), parameters_without_memory():
        model = build()
    fake: dict[nn.Parameter, nn.Parameter] = {}
    for part in model.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if parameter not in fake:
                    empty = torch.empty_strided(parameter.size(), parameter.stride(), dtype=parameter.dtype)
                    fake[parameter] = nn.Parameter(empty, parameter.requires_grad)
                part._parameters[name] = fake[parameter]
    return model


@contextmanager
def _errors_logged_once() -> Iterator[None]:
    """PyTorch logs the traceback of an operation that fails and raises an error as well, which is enough."""
    logger = logging.getLogger(torch._subclasses.fake_tensor.__name__)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def converted_and_copied() -> Iterator[None]:
    """Let modules convert and copy their own parameters as they are made, as `.to(torch.float32)` and `deepcopy` do.

    PyTorch swaps a fake parameter for its converted one, and cannot. Here the converted one takes its place, and is one
    where several modules share a parameter. A fake tensor has no memory that `copy.deepcopy` could read, which
    `nn.TransformerEncoder` calls for its layers. `nn.init.trunc_normal_` looks at the values that
    it has drawn, and a fake tensor has none.
    """

    converted: dict[nn.Parameter, nn.Parameter] = {}

    def convert(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(function)
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            with torch.no_grad():
                found = function(parameter)
            if found is not parameter:
                new = nn.Parameter(found, parameter.requires_grad)
                module._parameters[name] = converted.setdefault(parameter, new)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = function(buffer)
        return module

    def copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        if id(tensor) not in memo:
            copy: Tensor = tensor.detach().clone()
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = (
                nn.Parameter(copy, tensor.requires_grad) if is_parameter else copy.requires_grad_(tensor.requires_grad)
            )
        found: Tensor = memo[id(tensor)]
        return found

    def not_drawn(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        return tensor

    with (
        _replaced(nn.Module, "_apply", convert),
        _replaced(FakeTensor, "__deepcopy__", copied),
        _replaced(nn.init, "_no_grad_trunc_normal_", not_drawn),
    ):
        yield


@contextmanager
def _replaced(owner: type | ModuleType, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Let a class or a Python module have another function for the time of a `with` block."""
    before = vars(owner).get(name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        if before is None:  # it is inherited
            delattr(owner, name)
        else:
            setattr(owner, name, before)


class Storages(TorchDispatchMode):
    """Follows the bytes of all storages that operators make, from then until PyTorch lets go of them."""

    def __init__(self, fixed: list[Tensor]) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.convolutions: set[Convolution] = set()
        self.written: set[int] = set()  # storages that operators have changed in place, also by way of `.data`
        self._known = {tensor.untyped_storage()._cdata for tensor in fixed}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and to keep PyTorch's compiler away PyTorch would load it: 2 to 4 s."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            arguments = func._schema.arguments
            values = dict(zip((a.name for a in arguments), args, strict=False)) | (kwargs or {})
            leaves = tree_leaves([values.get(a.name) for a in arguments if a.is_write])
            self.written |= {tensor.untyped_storage()._cdata for tensor in leaves if isinstance(tensor, Tensor)}
        if func is aten.mkldnn_rnn_layer.default:  # the workspace of a fake tensor's is empty
            result = (*result[:-1], torch.empty(recurrent_workspace(result[0]), dtype=torch.uint8))
        before = self.live_bytes
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.hold(tensor)
        if (inside := memory_inside(func, args, result)) is not None:
            counted, tensors = inside
            self.peak_bytes = max(self.peak_bytes, before + counted(*[tensor.shape for tensor in tensors]))
        if func is aten.convolution.default and args[0].dtype in BY_ONEDNN:
            self.convolutions.add((tuple(args[0].shape[1:]), tuple(result.shape[1:]), args[1].shape[-1]))
        return result

    def hold(self, tensor: Tensor) -> None:
        """Count a tensor's storage from now on, if it is a new one, until it is let go of."""
        if tensor.layout is not torch.strided:  # a sparse one, which is a constant: no gradient of one is taken
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.live_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live_bytes -= size


def memory_inside(func: Any, args: Any, result: Any) -> tuple[Callable[..., int], Sequence[Tensor]] | None:
    """Return what counts the bytes that an operator holds while it runs by shapes, and of which tensors; None for most.

    Bfloat16 is counted as on processors that compute with it.
    """
    if func is aten.convolution.default:
        inputs, weight = args[:2]
        if inputs.dtype not in BY_ONEDNN:
            return partial(unfolded_copies, first=None, entry_bytes=inputs.itemsize), (inputs, weight, result)
        options = {"transposed": args[6], "copied": not _is_dense(inputs)}
        return partial(forward_copies, **options, entry_bytes=inputs.itemsize), (inputs, weight, result)
    if func is aten.convolution_backward.default:
        gradient, inputs, weight = args[:3]
        needs_input, _, bias = args[10]
        if inputs.dtype not in BY_ONEDNN:
            counted = partial(unfolded_copies, first=not needs_input, entry_bytes=inputs.itemsize)
            return counted, (inputs, weight, gradient)
        options = {"strided": max(args[4]) > 1, "first": not needs_input, "bias": bias, "transposed": args[7]}
        options["copied"] = (not _is_dense(gradient), not _is_dense(inputs))
        return partial(backward_copies, **options, entry_bytes=inputs.itemsize), args[:3]
    if func in TRANSFORMS:
        # Of several dimensions all but the last are transformed into a tensor of their own, which is copied again.
        copies = 2 if func is aten._fft_c2r.default and len(args[1]) > 1 else int(not _are_rows(args[0], args[1]))
        return partial(_with_copies, of=(copies * args[0].itemsize, result.itemsize)), (args[0], result)
    if func is aten.bmm.default and any(tensor.is_conj() for tensor in args):
        of = [tensor.itemsize * tensor.is_conj() for tensor in args]
        return partial(_with_copies, of=(*of, result.itemsize)), (*args, result)
    if func is aten.mkldnn_rnn_layer_backward.default:
        return partial(recurrent_copies, entry_bytes=args[0].itemsize), (args[0], args[7])
    return None


def _is_dense(tensor: Tensor) -> bool:
    """Say whether oneDNN reads a tensor as it lies."""
    return tensor.is_contiguous(memory_format=suggest_memory_format(tensor))


def _are_rows(tensor: Tensor, transformed: Sequence[int]) -> bool:
    """Say whether a Fourier transform of some dimensions reads a tensor as it lies: the others are like one."""
    others = [d for d in range(tensor.dim()) if d not in transformed and tensor.shape[d] > 1]
    others.sort(key=tensor.stride, reverse=True)
    return all(tensor.stride(a) == tensor.shape[b] * tensor.stride(b) for a, b in pairwise(others))


def _with_copies(*shapes: Sequence[int], of: Sequence[int]) -> int:
    """Return the bytes of copies of some tensors and of a result, of so many bytes for each entry."""
    return sum(each * math.prod(shape) for each, shape in zip(of, shapes, strict=True))


def recurrent_workspace(states: Tensor) -> int:
    """Return what oneDNN writes forward of the workspace of an LSTM's layer, for (steps, batch, hidden) states.

    Of every step these are the gates and both states, of which there are also the first ones.
    """
    steps = states.shape[0]
    return states.nbytes // steps * (4 * steps + 2 * (steps + 1))


def recurrent_copies(inputs: Sequence[int], states: Sequence[int], *, entry_bytes: int = FLOAT_BYTES) -> int:
    """Return what an LSTM's layer holds while it runs backward, the gradient of its inputs included.

    The rest of its workspace, in which rows are blocks, and gradients of gates; measured with oneDNN 3.12.
    """
    steps, examples, hidden = states
    rows = 3 * blocked(max(inputs[2], hidden)) + blocked(hidden)
    return entry_bytes * (math.prod(inputs) + examples * (steps * 4 * hidden + (steps + 1) * rows))
