"""Steps of trainings in turn on a GPU: captured once per kind as a CUDA graph, then replayed, with the same bits.

Captured are the forward and the backward pass of a micro-batch: hundreds of launches, which a graph makes one. All else
stays with `wildflower.client_app.fitting`: batches of another size, the regularizer, clipping, the optimizer. A graph
reads and writes fixed memory, in which a device's tensors lie while it trains. What cannot be captured, or comes to
other bits, is trained without, and the log says why.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import lru_cache, partial
from weakref import WeakSet

import torch
from torch import Tensor, nn

from wildflower.client_app.batches import micro_batches
from wildflower.client_app.chance import draws, set_draws
from wildflower.client_app.fitting import Fit
from wildflower.client_app.memory import is_out_of_memory
from wildflower.models.weights import trained_parameters
from wildflower.plugins.flower_log import tell
from wildflower.strategies.shared_losses import Loss, PureLoss

MOST_KINDS = 32  # kinds of steps that a process tries to capture
CHECKED = (0, 2)  # trainings of a kind whose first step is taken both ways; `side_by_side` may time the one between
WARM_UP = 3  # steps before a capture: PyTorch's documentation asks for a few


class Spoiled(Exception):
    """A capture failed midway, after which this process tries no other."""


class CapturedStep:
    """The step of one kind of trainings, and the memory that it reads and writes.

    Args:
        fit: the training that it is captured from.
        batch: inputs and labels of its first micro-batch.
        gradients: for each parameter of the loss, a gradient or None where it gets none.
    """

    def __init__(self, fit: Fit, loss: PureLoss, batch: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        self.memory = [torch.empty_like(each) for each in _tensors(loss)]
        self.batch = [each.clone() for each in batch]
        self.gradients = [None if each is None else torch.empty_like(each) for each in gradients]
        self.factors = {place: factor.clone() for place, factor in _factors(fit, loss).items()}
        self.trainings = 0
        with self._loaded(fit, loss):
            self._value, self._replay = CAPTURES[fit.device.type](partial(self._step, loss), fit.device)
        self._captured_from = loss  # a graph also reads its constants

    def train(self, fit: Fit, loss: PureLoss) -> float:
        """Train a model as `fit.alone()` does. Where that fails the model is as it was before."""
        with self._loaded(fit, loss) as home:
            mean_loss = replace(fit, loss=self._loss(loss), factors={}).alone()
            torch._foreach_copy_(home, self.memory)
        self.trainings += 1
        return mean_loss

    def first_step(self, fit: Fit, loss: PureLoss, batch: Sequence[Tensor]) -> list[Tensor | None]:
        """Return loss, gradients and buffers of a device's first step, as `_first_step` does."""
        with self._loaded(fit, loss):
            value = self._loss(loss)(batch[0], batch[1]).detach()
            return [value, *(each.grad for each in loss.parameters()), *(each.data for each in loss.buffers())]

    @contextmanager
    def _loaded(self, fit: Fit, loss: PureLoss) -> Iterator[list[Tensor]]:
        """Bring a device's tensors into this memory for the time of a `with` block; yields where they lie else."""
        for place, factor in _factors(fit, loss).items():
            self.factors[place].copy_(factor)
        try:
            with self._holding(loss) as home:
                torch._foreach_copy_(self.memory, home)
                yield home
        finally:
            loss.zero_grad()

    @contextmanager
    def _holding(self, loss: PureLoss) -> Iterator[list[Tensor]]:
        tensors = _tensors(loss)
        home = [each.data for each in tensors]
        try:
            for tensor, memory in zip(tensors, self.memory, strict=True):
                tensor.data = memory
            yield home
        finally:
            for tensor, data in zip(tensors, home, strict=True):
                tensor.data = data

    def _step(self, loss: PureLoss) -> Tensor:
        """Take the step in this memory; the loss and its gradients stay as they are."""
        parameters = list(loss.parameters())
        before = [each.grad for each in parameters]
        with self._holding(loss):
            try:
                _set_gradients(parameters, self.gradients)
                return _take(loss, self.factors, self.batch)
            finally:
                _set_gradients(parameters, before)

    def _loss(self, loss: PureLoss) -> Loss:
        """Return a loss that has differentiated itself: what it returns has no other gradients."""
        parameters = list(loss.parameters())

        def computed(inputs: Tensor, labels: Tensor) -> Tensor:
            given = (inputs, labels)
            if list(map(_form, given)) != list(map(_form, self.batch)):
                return _take(loss, self.factors, given).requires_grad_()
            torch._foreach_copy_(self.batch, given)
            self._take_over(parameters)
            self._replay()
            return self._value.detach().requires_grad_()

        return computed

    def _take_over(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let `.grad` be the memory that the step adds gradients to, with what `.grad` holds."""
        pairs = [(p, g) for p, g in zip(parameters, self.gradients, strict=True) if g is not None and p.grad is not g]
        if fresh := [gradient for parameter, gradient in pairs if parameter.grad is None]:
            torch._foreach_zero_(fresh)
            torch._foreach_neg_(fresh)  # -0 + g is g to the bit, and 0 + -0 is not -0
        for parameter, gradient in pairs:
            if parameter.grad is not None:
                gradient.copy_(parameter.grad)
            parameter.grad = gradient


_kinds: dict[Hashable, CapturedStep | str] = {}  # or why it is none


def fit_in_turn(fit: Fit) -> float:
    """Train one model, in place, and return the mean loss over the examples seen: with the bits of `fit.alone()`."""
    if fit.kind is None or fit.device.type not in CAPTURES:
        return fit.alone()
    picked = next(fit.start(), None)
    if picked is None or len(picked) < fit.training.batch_size:  # nearly each such device would be a kind of its own
        return fit.alone()
    found = _hindrance(fit)
    if not found and isinstance(fit.loss, PureLoss):
        part = micro_batches(picked, fit.training.examples_at_once)[0]
        key = _key(fit, fit.loss, len(part))
        found = _step_of(key, fit, fit.loss, part)
        if not isinstance(found, str):
            try:
                return found.train(fit, fit.loss)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                found = _give_up(key, error)
    tell(f"{fit.kind[0]} is trained without CUDA graphs: {found}")
    return fit.alone()


def _hindrance(fit: Fit) -> CapturedStep | str:
    """Return why a loss cannot be captured, as far as its form tells."""
    if not isinstance(fit.loss, PureLoss):
        return "its loss is no PureLoss (wildflower.strategies.shared_losses)"
    if fit.new_statistics:
        return "batch norm's statistics begin as a mean over the first batches"
    criterion = fit.loss.criterion
    remembers = criterion is not None and getattr(criterion, "__closure__", criterion) is not None
    return "its criterion is no plain function or method, and may remember something" if remembers else ""


def _step_of(key: Hashable, fit: Fit, loss: PureLoss, part: Tensor) -> CapturedStep | str:
    """Return the step of a kind, which is captured now if there is none, or why it is trained without."""
    found = _kinds.get(key)
    if isinstance(found, str) or (found is not None and found.trainings not in CHECKED):
        return found
    if found is None and len(_kinds) >= MOST_KINDS:
        return f"there are more than {MOST_KINDS} kinds of steps"
    if found is None and not has_room(fit.device, fit.memory_bytes):
        return "less than half of the GPU's memory would be left"
    batch = fit.examples_of(part)
    fit.model.train()
    try:
        wanted = _first_step(fit, loss, batch)
        if found is None:
            found = _kinds[key] = CapturedStep(fit, loss, batch, wanted[1 : 1 + len(list(loss.parameters()))])
        if not all(map(_are_same, found.first_step(fit, loss, batch), wanted)):
            raise ValueError("a replayed step has other bits")
    except Exception as error:  # of any kind: a loss is any Python
        return _give_up(key, error)
    return found


def _give_up(key: Hashable, error: Exception) -> str:
    """Train a kind without a captured step from now on, and return why."""
    if isinstance(error, Spoiled):
        CAPTURES.clear()
    if isinstance(error, Spoiled) or is_out_of_memory(error):
        _kinds.clear()
    why = _kinds[key] = (str(error) or type(error).__name__).splitlines()[0]
    return why


def _first_step(fit: Fit, loss: PureLoss, batch: Sequence[Tensor]) -> list[Tensor | None]:
    """Return loss, gradients and buffers of a step without a graph, and leave all as it was.

    ValueError where it draws at random.
    """
    drawn, before = (torch.get_rng_state(), draws(fit.device)), [each.clone() for each in loss.buffers()]
    try:
        value = _take(loss, _factors(fit, loss), batch)
        if not all(map(torch.equal, drawn, (torch.get_rng_state(), draws(fit.device)))):
            raise ValueError("it draws at random")
        return [value, *(each.grad for each in loss.parameters()), *(each.clone() for each in loss.buffers())]
    finally:
        for buffer, data in zip(loss.buffers(), before, strict=True):
            buffer.copy_(data)
        loss.zero_grad()
        torch.set_rng_state(drawn[0])
        set_draws(drawn[1], fit.device)


def _take(loss: PureLoss, factors: Mapping[int, Tensor], batch: Sequence[Tensor]) -> Tensor:
    """Add the gradients of a batch's mean loss, multiplied by factors, and return that loss."""
    parameters = list(loss.parameters())
    with ExitStack() as during:
        for place, factor in factors.items():
            during.enter_context(parameters[place].register_hook(partial(torch.mul, factor)))
        value: Tensor = loss(batch[0], batch[1])
        value.backward()
    return value.detach()


def _tensors(loss: PureLoss) -> list[Tensor]:
    return [*loss.parameters(), *loss.buffers()]


def _set_gradients(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _factors(fit: Fit, loss: PureLoss) -> dict[int, Tensor]:
    """Return the factors of gradients by their parameters' places in the loss."""
    places = {id(parameter): place for place, parameter in enumerate(loss.parameters())}
    named = trained_parameters(fit.model)
    return {places[id(named[n])]: fit.factors[n].to(named[n].dtype) for n in named.keys() & fit.factors}


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _key(fit: Fit, loss: PureLoss, size: int) -> Hashable:
    """Return what trainings have in common whose step is one graph."""
    tensors = [*loss.named_parameters(), *loss.named_buffers()]
    forms = tuple((name, _form(tensor), tensor.requires_grad) for name, tensor in tensors)
    modes = tuple(module.training for module in loss.modules())
    code = getattr(loss.criterion, "__code__", None)
    return fit.kind, size, id(loss.task), code, forms, modes, frozenset(fit.factors)


def _are_same(one: Tensor | None, other: Tensor | None) -> bool:
    """Say whether tensors have the same values, in the same order of memory: what sums them up then has, too."""
    if one is None or other is None:
        return one is other
    return _form(one) == _form(other) and torch.equal(one, other)


def has_room(device: torch.device, needed_bytes: int) -> bool:
    """Say whether half of a GPU's memory would still be free, for what trains beside a captured step."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return free_bytes - 2 * needed_bytes > total_bytes / 2


_graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
_side_stream = lru_cache(torch.cuda.Stream)


def capture_graph(step: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, Callable[[], None]]:
    """Capture a step as a CUDA graph; return the loss's memory, and what replays the step.

    Raises:
        Spoiled: the capture failed midway.
        Exception: the step does what cannot be captured, which is found before.
    """
    here, side, mode = torch.cuda.current_stream(device), _side_stream(device), torch.cuda.get_sync_debug_mode()
    side.wait_stream(here)
    torch.cuda.set_sync_debug_mode("error")  # what waits for the GPU cannot be captured
    try:
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                step()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
        here.wait_stream(side)
    graph, index = torch.cuda.CUDAGraph(), torch.cuda.current_device()
    # All share one pool: they run in turn, and leave nothing in it but their losses, which are held.
    pool = next((other.pool() for other in _graphs), None) or torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=side):
            value = step()
    except Exception as error:
        # Where a capture's end fails, too, PyTorch leaves all as during a capture: stream, generator, and allocator.
        torch.cuda.set_stream(here)
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(generator.clone_state())
        with suppress(Exception):  # it says so where the capture has ended
            torch._C._cuda_endAllocateToPool(index, pool)
            torch._C._cuda_releasePool(index, pool)
        raise Spoiled(f"the capture failed: {error.__context__ or error}") from error
    _graphs.add(graph)
    return value, graph.replay


# By the type of device: what captures a step, given it and the device.
CAPTURES: dict[str, Callable[[Callable[[], Tensor], torch.device], tuple[Tensor, Callable[[], None]]]] = {
    "cuda": capture_graph
}
