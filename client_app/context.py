"""One work order on one device: check the budget, give the client step what it works with, say what it took."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from wildflower.client_app import board_gpu
from wildflower.client_app.kept_state import DeviceState
from wildflower.client_app.memory import MemoryMeter, is_out_of_memory, memory_limit, touched_bytes
from wildflower.client_app.sgd import Sgd
from wildflower.messages.encoding import (
    Wire,
    decode,
    decode_entry,
    encode,
    encode_entry,
    may_be_a_change,
    parts_of,
    restored,
)
from wildflower.messages.frozen_parts import read_part
from wildflower.messages.orders import EvaluationOrder, LocalTraining, WorkOrder
from wildflower.messages.packing import Entry, Layout, MessageError, pick, unpack
from wildflower.messages.sums import not_finite
from wildflower.messages.tensor_sets import TensorSet, TensorSets, Weights, digest, frozen_layout
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.layers import mean_statistics
from wildflower.models.network import Network
from wildflower.models.weights import trained_parameters, with_weights
from wildflower.strategies.method import Answer, ClientStep
from wildflower.strategies.shared_losses import Loss, Regularizer
from wildflower.tasks.device_data import UnfitError
from wildflower.tasks.inputs import in_layout
from wildflower.tasks.task import Task

log = logging.getLogger("flwr")  # what Flower's own log is called
T = TypeVar("T")
LOST_ON_THE_WIRE = "lost-on-the-wire"  # under which name, and a tensor set's, a device keeps what rounding has lost


class Refusal(Exception):
    """The device does not do this work; the text says why.

    `overrun`: less memory was there than the device had promised: work of its budget outgrew it, or was not begun since
    what is free now is less than predicted.
    """

    def __init__(self, why: str, *, overrun: bool = False) -> None:
        super().__init__(why)
        self.overrun = overrun


def _fitting(task: Task, device: int, family: Family) -> Task:
    """The task as a device has it; UnfitError where its data fit neither what is agreed nor the family."""
    found = task.for_device(device)
    # Only here do a device's own texts and the family meet; the server has checked all others.
    if task.spec.partition == "own" and found.vocabulary is not None:
        try:
            found.vocabulary.check_pairs(family.pair_separator)
        except ValueError as error:
            raise UnfitError(str(error)) from error
    return found


class Chance(random.Random):
    """The chance that a loss may use. While a loss is traced as one graph for all batches, to ask it is an error."""

    traced = False

    def random(self) -> float:
        """A number in [0, 1)."""
        self._check()
        return super().random()

    def getrandbits(self, k: int, /) -> int:
        """A whole number of k random bits."""
        self._check()
        return super().getrandbits(k)

    def _check(self) -> None:
        if self.traced:
            raise board_gpu.Untraceable("the loss is another one for every batch")


@dataclass
class Done:
    """The result of a work order: what the client step answers, and the figures of the update.

    encoded: the answer's tensor sets as they travel, where the wire rounds.
    """

    answer: Answer
    encoded: dict[str, bytes]
    examples: int
    seconds: float
    measured_memory_bytes: int | None  # None in a simulation
    state_lost: bool
    state_kept: bool


@dataclass(frozen=True)
class Workplace:
    """Where an order's work is done, and what bounds it.

    Attributes:
        device: where to compute.
        available_bytes: memory that this machine has free now, which may be less than it reported; the work may not
            outgrow it or its budget. None in a simulation, where many devices share the machine.
        board: socket of the trainer that has the board's GPU (`wildflower.client_app.board_gpu`), where the node has
        one. Losses
            that it cannot compute are trained on `device`, and the log says so.
    """

    device: torch.device
    available_bytes: int | None = None
    board: Path | None = None


class DeviceContext:
    """`wildflower.strategies.method.ClientContext` on this machine.

    Args:
        before_round: what the device kept in this round or later is not used.
        received: the packed arrays of the message.
        evaluated_round: in an evaluation, its round; the device then keeps nothing. None where it trains.
        checkpoint: the round of the oldest checkpoint that the run may go on from; None: only the round before can be.
        wire: as what tensor sets travel. In a simulation they come in full, and are rounded here as they would have
        been.

    Raises:
        MessageError: the arrays are not those that the client step expects.
        Refusal: the device's own data do not fit what was agreed.
    """

    def __init__(
        self,
        order: WorkOrder | EvaluationOrder,
        local: ClientStep,
        before_round: int,
        training: LocalTraining,
        family: Family,
        task: Task,
        arrays: list[bytes],
        state: DeviceState,
        place: Workplace,
        *,
        earlier: Network | None = None,
        evaluated_round: int | None = None,
        checkpoint: int | None = None,
        wire: Wire = "float32",
    ) -> None:
        self.order, self.client_step, self.family, self.training = order, local, family, training
        try:
            self.task = _fitting(task, order.device, family)
        except UnfitError as error:
            raise Refusal(f"device {order.device}: its data do not fit: {error}") from error
        self.place, self.device, self.wire = place, place.device, wire
        self.architecture = Architecture.from_json(order.architecture)
        family.validate(self.architecture)
        self.sent = local.sent(family, self.architecture)
        self.returned = local.returned(family, self.architecture)
        if order.digest != digest(self.sent, self.returned):
            raise MessageError(
                f"device {order.device}: server and device disagree about the tensor sets of "
                f"{order.client_step.name} over {self.architecture}"
            )
        if order.payloads.keys() != self.sent.keys():
            raise MessageError(
                f"device {order.device}: tensor sets {sorted(order.payloads)} came, not {sorted(self.sent)}"
            )
        self.keeps = evaluated_round is None
        self._state, self._before, self._evaluated = state, before_round, evaluated_round or 0
        self._checkpoint = before_round - 1 if checkpoint is None else checkpoint
        self._to_keep: dict[str, dict[str, Tensor]] = {}
        self._lost: dict[str, dict[str, Tensor]] = {}  # what rounding has lost, by the key of its file
        self._stack = ExitStack()
        self._limited = False
        # In a simulation there are none: what one of many devices in one process holds cannot be told from outside.
        self.limits = {} if place.available_bytes is None else _limits(order, place.available_bytes)
        self._shard = self.task.shard(order.device).train
        self.meter = MemoryMeter(self.device) if self.limits else None
        who = f"device {order.device}"
        self._packed = {name: pick(arrays, index, who) for name, index in order.payloads.items()}
        self._frozen = self._frozen_tensors(arrays)
        if wire != "float32" and place.available_bytes is None:
            self._encoded = {name: self._rounded(name) for name in self._packed}
        else:
            self._encoded = self._packed
        self.received: TensorSets = {
            name: decode(data, self.sent[name].layout, wire) for name, data in self._encoded.items()
        }
        self.earlier = earlier
        if earlier is not None:
            earlier.to(self.device).eval().requires_grad_(False)
        self.chance: random.Random = Chance(order.seed)
        self.steps_taken = 0
        self._generator = torch.Generator().manual_seed(order.seed)
        self._board_bytes: int | None = None
        self._server_knows = getattr(order, "kept", False)  # that the device keeps something
        self.state_lost = self._server_knows and state.is_empty(before_round)

    @property
    def examples(self) -> int:
        """How many training examples the device holds."""
        return len(self._shard)

    @cached_property
    def class_counts(self) -> Tensor:
        """See `wildflower.strategies.method.ClientContext`."""
        try:
            return self.task.class_counts(self._shard)
        except ValueError as error:
            raise MessageError(str(error)) from None

    def build(self, weights: Weights | None = None) -> Network:
        """See `wildflower.strategies.method.ClientContext`."""
        if weights is None:
            weights = self.family.build(self.architecture).state_dict()
        return with_weights(self.family, self.architecture, {**weights, **self._frozen}).to(self.device)

    def _frozen_tensors(self, arrays: list[bytes]) -> Weights:
        """What is frozen of the sub-model: out of the message, which the device then keeps, or what it has kept."""
        layout, name = frozen_layout(self.family, self.architecture), self.order.frozen
        who = f"device {self.order.device}"
        if bool(layout.entries) != bool(name):
            raise MessageError(f"{who}: server and device disagree about what is frozen of {self.architecture}")
        if not name:
            return {}
        if self.order.frozen_payload is not None:
            part, contents = read_part(pick(arrays, self.order.frozen_payload, who), name, layout)
            self._state.keep_frozen(part, contents)
        found = self._state.frozen(name, layout)
        if found is None:
            raise MessageError(f"{who} has lost what is frozen of its model; the next message brings it again")
        return found

    def sent_again(self, tensor_set: str) -> Weights:
        """A fresh copy of a tensor set as the server has it: training changes `received`; {} where none was sent.

        Only a simulated device knows it where the wire rounds.
        """
        return unpack(self._packed[tensor_set], self.sent[tensor_set].layout) if tensor_set in self._packed else {}

    def _rounded(self, tensor_set: str) -> bytes:
        layout = self.sent[tensor_set].layout
        return encode(unpack(self._packed[tensor_set], layout), layout, self.wire)

    def encoded(self, tensor_sets: TensorSets) -> dict[str, bytes]:
        """What the device returns, as it travels under a wire that rounds: tensor by tensor, to hold little at once.

        Tensors that the device was sent travel as their changes. What rounding loses is kept, and added the next time.
        Batch norm's statistics travel as values, and nothing is kept of them.
        MessageError where a value is not finite.
        """
        return {
            name: self._encoded_tensor_set(name, tensor_set, tensor_sets[name])
            for name, tensor_set in self.returned.items()
        }

    def _encoded_tensor_set(self, name: str, tensor_set: TensorSet, contents: Weights) -> bytes:
        feedback = isinstance(self.order, WorkOrder) and self.order.feedback and tensor_set.steady
        lost = self._lost_before(name) if feedback else {}
        begun: dict[str, tuple[Entry, memoryview]] = {}
        if name in self._encoded:
            sent = parts_of(self._encoded[name], self.sent[name].layout, self.wire)
            begun = {entry.name: (entry, data) for entry, data in sent}
        found = []
        for entry in tensor_set.layout.entries:
            value = contents[entry.name].detach().cpu()
            change = may_be_a_change(entry)
            if change:
                if entry.name in begun and begun[entry.name][0].shape == entry.shape:
                    value = value - decode_entry(begun[entry.name][1], entry, self.wire)
                if entry.name in lost and lost[entry.name].shape == value.shape:  # of a pruned tensor it is another
                    value = value + lost[entry.name]
            found.append(encode_entry(value, entry, self.wire))
            if change:
                lost[entry.name] = value - decode_entry(found[-1], entry, self.wire)
        if feedback:
            self._lost[self._key(f"{LOST_ON_THE_WIRE}-{name}", per_architecture=True)] = lost
        return b"".join(found)

    def _lost_before(self, tensor_set: str) -> dict[str, Tensor]:
        """What rounding has lost of a tensor set until now; {} where that cannot be read.

        What is older than the last two rounds in which this device returned anything is not used.
        """
        key = self._key(f"{LOST_ON_THE_WIRE}-{tensor_set}", per_architecture=True)
        since = self._state.second_last_round(f"{LOST_ON_THE_WIRE}-", self._before)
        try:
            return self._state.load(key, self._before, since) or {}
        except ValueError as error:
            log.warning("Device %s: what rounding has lost of its changes cannot be read: %s", self.order.device, error)
            return {}

    def restored(self, tensor_set: str, data: bytes) -> Weights:
        """A tensor set as the server makes it of what has travelled. Only a simulated device can."""
        layout = self.returned[tensor_set].layout
        return restored(decode(data, layout, self.wire), self.sent_again(tensor_set), layout)

    # What stays on the device

    @property
    def state_folder(self) -> Path:
        """Where the device keeps what it keeps of this run."""
        return self._state.folder

    def kept(self, name: str, *, per_architecture: bool = True, recent: bool = False) -> Weights | None:
        """See `wildflower.strategies.method.ClientContext`. What cannot be read counts as lost."""
        since = self._evaluated if recent else 0
        try:
            return self._state.load(self._key(name, per_architecture), self._before, since)
        except ValueError as error:
            log.warning("Device %s begins anew: %s", self.order.device, error)
            # A damaged file may lie there longer than one round, and the server was told of it in the first one.
            self.state_lost = self._server_knows
            return None

    def keep(self, name: str, tensors: Mapping[str, Tensor], *, per_architecture: bool = True) -> None:
        """See `wildflower.strategies.method.ClientContext`. It is written by `save`."""
        self._to_keep[self._key(name, per_architecture)] = {key: value.detach() for key, value in tensors.items()}

    def save(self) -> bool:
        """Write what the client step wants to keep, and say whether there is anything; nothing in an evaluation.

        What rounding has lost is written too. It is not counted: a device that loses it goes on as well without it.
        """
        if not self.keeps:
            return False
        try:
            for key, tensors in self._to_keep.items():
                self._state.save(key, self._before, tensors)
        except Exception:
            self.take_back()  # what is kept under several names is of one round
            raise
        if self._to_keep:
            self._state.forget(self._checkpoint, other_than=LOST_ON_THE_WIRE)
        try:
            for key, tensors in self._lost.items():
                self._state.save(key, self._before, tensors)
            if self._lost:
                since = self._state.second_last_round(f"{LOST_ON_THE_WIRE}-", self._checkpoint + 1)
                self._state.forget_before(f"{LOST_ON_THE_WIRE}-", since)
        except (OSError, SafetensorError) as error:  # the update is finished, and worth more
            device = self.order.device
            log.warning("Device %s: what rounding has lost of its change cannot be written: %s", device, error)
        return bool(self._to_keep)

    def take_back(self) -> None:
        """Delete what `save` has written, because the update that it goes with is refused."""
        for key in (*self._to_keep, *self._lost):
            self._state.take_back(key, self._before)

    def check_kept(self, tensor_sets: TensorSets) -> None:
        """MessageError where the device would keep something of a training that diverged."""
        if not self._to_keep:
            return
        found = {f"tensor set {name!r}": weights for name, weights in tensor_sets.items()}
        found |= {f"what stays on the device ({key})": weights for key, weights in self._to_keep.items()}
        for what, weights in found.items():
            if name := not_finite(weights):
                raise MessageError(
                    f"training has diverged: {name!r} of {what} is not finite, so what the device kept before stays; a "
                    "smaller learning-rate or clip-norm helps"
                )

    def _key(self, name: str, per_architecture: bool) -> str:
        if not per_architecture:
            return name
        return f"{name}-{Layout.of(self.family.tensors(self.architecture)).digest}"

    # Training

    def steps(
        self, *models: nn.Module, share: tuple[float, float] = (0.0, 1.0)
    ) -> Iterator[Iterator[tuple[Tensor, Tensor, float]]]:
        """See `wildflower.strategies.method.ClientContext`."""
        shard = self._shard
        if share != (0.0, 1.0):
            order = torch.randperm(len(shard), generator=torch.Generator().manual_seed(self.order.device))
            shard = shard[order[int(share[0] * len(shard)) : int(share[1] * len(shard))]]
            if not len(shard):
                raise Refusal(f"{self.examples} training examples are too few to be divided: at least 2")
        for picked in self._within_limits(picks_of(shard, self.training, self._generator), *models):
            yield self._parts(picked)

    def _parts(self, picked: Tensor) -> Iterator[tuple[Tensor, Tensor, float]]:
        parts = micro_batches(picked, self.training.examples_at_once)
        examples = sum(map(len, parts))
        for part in parts:
            inputs, labels = batch_of(self.task, part, self.training, self.device, self._generator)
            yield inputs, labels, len(part) / examples

    def one_pass(self, *models: nn.Module, most: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """See `wildflower.strategies.method.ClientContext`."""
        batches = batches_of(self.task, self._shard, self.training, self._generator, self.device, once=True)
        yield from self._within_limits(batches, *models, counted=False, most=most)

    def _within_limits(
        self, batches: Iterator[T], *models: nn.Module, counted: bool = True, most: int = 0
    ) -> Iterator[T]:
        """One batch after another; after each, the memory of its step is checked.

        counted: whether each is an optimizer step.
        """
        self._hold_to_limits(*models)
        beside_bytes = sum(touched_bytes(model) for model in models) if self.limits else 0
        for number, batch in enumerate(batches, 1):
            yield batch
            self.steps_taken += counted
            # Not what is held now: the activations, most of it, are gone by the end of a step.
            peak = self.meter.peak_bytes() if self.meter else 0
            for what, limit_bytes in self.limits.items():
                if peak > limit_bytes + beside_bytes:
                    raise Refusal(f"training grew to {peak} bytes, {what} {limit_bytes} bytes", overrun=True)
            if number == most:
                return

    def optimizer(self, model: nn.Module, rate: float = 1.0) -> torch.optim.Optimizer:
        """See `wildflower.strategies.method.ClientContext`."""
        training = self.training
        rate, decay = rate * training.learning_rate, training.weight_decay
        groups: dict[float, list[nn.Parameter]] = {}
        for name, parameter in trained_parameters(model).items():
            groups.setdefault(training.rate_of(name), []).append(parameter)
        parts = [{"params": parameters, "lr": rate * multiple} for multiple, parameters in groups.items()]
        if training.optimizer == "sgd" and self.device.type == "cpu":
            return Sgd(parts, momentum=training.momentum, weight_decay=decay)
        if training.optimizer == "sgd":
            return torch.optim.SGD(parts, lr=rate, momentum=training.momentum, weight_decay=decay)
        kind = torch.optim.Adam if training.optimizer == "adam" else torch.optim.AdamW
        # Where it is not fused, PyTorch chooses by the device.
        return kind(parts, lr=rate, betas=training.betas, weight_decay=decay, fused=True if training.fused else None)

    def fit(
        self,
        model: Network,
        loss: Loss,
        *,
        regularizer: Regularizer | None = None,
        new_statistics: bool = False,
        rate: float = 1.0,
    ) -> float | None:
        """See `wildflower.strategies.method.ClientContext`."""
        training = self.training
        if self.place.board is not None:
            try:
                self._check_for_board()
                return self._fit_on_board(self.place.board, model, loss, regularizer, new_statistics, rate)
            except board_gpu.Untraceable as error:
                name = self.order.client_step.name
                log.warning("Device %s: the board's GPU cannot train %s (%s)", self.order.device, name, error)
                log.warning("Device %s: %s is trained on the CPU", self.order.device, name)
        regularize = None if regularizer is None else regularizing(model, regularizer)
        optimizer = self.optimizer(model, rate)
        model.train()
        # Running statistics begin as the mean over the first batches, and not with 0 and 1, from which a few batches
        # would not lead away.
        seen, total = 0, torch.zeros((), dtype=torch.float64)
        with mean_statistics(model, least=0.1) if new_statistics else nullcontext():
            for picked in self._within_limits(picks_of(self._shard, training, self._generator), model):
                optimizer.zero_grad(set_to_none=True)
                beside = None if regularize is None else regularize()
                parts = micro_batches(picked, training.examples_at_once)
                value = self._add_mean_gradient(model, loss, parts)
                if beside is not None:
                    value = value + beside
                if training.clip_norm:
                    nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm)
                optimizer.step()
                examples = sum(map(len, parts))
                seen += examples
                total += value.to("cpu", torch.float64) * examples
        model.zero_grad(set_to_none=True)  # they would be held for nothing where the model is scored or teaches
        return float(total) / max(1, seen)

    def _add_mean_gradient(self, model: nn.Module, loss: Loss, parts: Sequence[Tensor]) -> Tensor:
        """Add the gradient of the mean loss of a batch to `.grad`, and return that loss.

        What `.grad` holds is scaled so that the gradient of each micro-batch, which is of a mean over fewer examples,
        can be added to it as it is.
        """
        if len(parts) == 1:
            value = loss(*batch_of(self.task, parts[0], self.training, self.device, self._generator))
            value.backward()
            return value.detach()
        examples = before = sum(map(len, parts))
        total = torch.zeros((), device=self.device)
        for part in parts:
            scale_gradients(model, before / len(part))
            value = loss(*batch_of(self.task, part, self.training, self.device, self._generator))
            value.backward()
            total += value.detach() * len(part)
            before = len(part)
        scale_gradients(model, before / examples)
        return total / examples

    def _check_for_board(self) -> None:
        """Raise board_gpu.Untraceable where the board's trainer does not have what the order asks for."""
        asked = {
            "micro-batch-size": self.training.accumulates,
            "learning-rates": bool(self.training.learning_rates),
            "freeze": bool(self.family.freeze),
        }
        if missing := [key for key, is_asked in asked.items() if is_asked]:
            raise board_gpu.Untraceable(f"its trainer has no {missing[0]}")

    def _fit_on_board(
        self,
        board: Path,
        model: Network,
        loss: Loss,
        regularizer: Regularizer | None,
        new_statistics: bool,
        rate: float,
    ) -> float:
        self._hold_to_limits(model)
        training = self.training.model_copy(update={"learning_rate": rate * self.training.learning_rate})
        Chance.traced = True
        try:
            graph = board_gpu.trace(model, loss)
        finally:
            Chance.traced = False
        batches = batches_of(self.task, self._shard, self.training, self._generator, self.device, once=False)
        try:
            mean_loss, self._board_bytes, steps = board_gpu.fit(
                board,
                model,
                graph,
                batches,
                training,
                seed=self.order.seed,
                limit_bytes=min(self.limits.values(), default=None),
                new_statistics=new_statistics,
                regularizer=regularizer or Regularizer(),
            )
        except MemoryError as error:
            words = "".join(f", {what} {limit_bytes} bytes" for what, limit_bytes in self.limits.items())
            raise Refusal(f"out of memory on the board's GPU{words}: {error}", overrun=True) from error
        self.steps_taken += steps
        return mean_loss

    # Limits

    def _hold_to_limits(self, *models: nn.Module) -> None:
        """From here to the end of the order, refuse memory beyond its limits."""
        if not self.limits or self._limited:
            return
        self._limited = True
        computing = models if self.earlier is None else (*models, self.earlier)
        self._stack.enter_context(memory_limit(min(self.limits.values()), self.device, *computing))

    def close(self) -> None:
        """Let go of the limits."""
        self._stack.close()

    def measured_bytes(self) -> int | None:
        """The most memory that the work held; None in a simulation."""
        if self._board_bytes is not None:
            return self._board_bytes
        return self.meter.peak_bytes() if self.meter else None


def do_order(context: DeviceContext) -> Done:
    """Let the client step train, within the order's limits.

    Raises:
        Refusal: the work cannot fit the budget, or grew beyond it.
        MessageError: the client step does not go with what came.
        board_gpu.BoardError: the board's trainer does not answer, or failed.
    """
    started = time.perf_counter()
    order, local = context.order, context.client_step
    for what, limit_bytes in _limits(order, context.place.available_bytes).items():
        if local.trains and order.predicted_memory_bytes > limit_bytes:
            raise Refusal(
                f"training needs about {order.predicted_memory_bytes} bytes, {what} {limit_bytes} bytes",
                # Within its budget, so the memory shrank after the report. Work without one may never have fitted.
                overrun=0 < order.predicted_memory_bytes <= order.memory_bytes,
            )
    if not context.examples:
        raise Refusal("the device holds no training examples")
    seed_draws(order.seed, context.device)
    try:
        with out_of_memory_refused(order, context.place.available_bytes, context.meter):
            answer = local.train(context)
            _check(answer, context)
            context.check_kept(answer.tensor_sets)
            encoded = {} if context.wire == "float32" else context.encoded(answer.tensor_sets)
    finally:
        context.close()
    return Done(
        answer,
        encoded,
        context.examples,
        time.perf_counter() - started,
        context.measured_bytes(),
        state_lost=context.state_lost,
        state_kept=context.save(),
    )


def seed_draws(seed: int, device: torch.device) -> None:
    """Seed dropout, and the first weights of what a device holds itself."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` also goes round all kinds of GPUs: 2 ms
    else:
        torch.manual_seed(seed)


def _check(answer: Answer, context: DeviceContext) -> None:
    """Raise MessageError where a client step does not return what it lists."""
    name = context.order.client_step.name
    if not isinstance(answer, Answer):
        raise MessageError(
            f"`train` of {name} must return a wildflower.strategies.method.Answer, not a {type(answer).__name__}"
        )
    if answer.tensor_sets.keys() != context.returned.keys():
        raise MessageError(
            f"{name} returns tensor sets {sorted(answer.tensor_sets)}, but lists {sorted(context.returned)}"
        )
    for tensor_set, wanted in context.returned.items():
        contents = answer.tensor_sets[tensor_set]
        found = Layout.of(
            {entry.name: contents[entry.name] for entry in wanted.layout.entries if entry.name in contents}
        )
        if difference := wanted.layout.difference(found):
            raise MessageError(f"{name} returns another tensor set {tensor_set!r} than it lists: {difference}")
    facts = {fact: len(values) for fact, values in answer.facts.items()}
    if facts != context.client_step.facts(context.family):
        raise MessageError(f"{name} returns facts {facts}, but lists {context.client_step.facts(context.family)}")
    if wrong := [fact for fact, values in answer.facts.items() if not all(map(math.isfinite, values))]:
        raise MessageError(f"{name} returns the fact {wrong[0]!r} with numbers that are not finite")


def _limits(order: WorkOrder | EvaluationOrder, available_bytes: int | None) -> dict[str, int]:
    """What bounds the memory of an order's work, by the words that say so in a refusal."""
    limits = {"the budget is": order.memory_bytes or None, "this device has free": available_bytes}
    return {what: limit_bytes for what, limit_bytes in limits.items() if limit_bytes is not None}


@contextmanager
def out_of_memory_refused(
    order: WorkOrder | EvaluationOrder, available_bytes: int | None, meter: MemoryMeter | None
) -> Iterator[None]:
    """Turn an allocation that was refused in a `with` block into a Refusal."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        limits = {} if available_bytes is None else _limits(order, available_bytes)
        words = "".join(f", {what} {limit_bytes} bytes" for what, limit_bytes in limits.items())
        said = str(error).split("\n")[0] or type(error).__name__
        held = f" after {meter.peak_bytes()} bytes" if meter else ""
        raise Refusal(f"out of memory{held}{words}: {said}", overrun=True) from error


def regularizing(model: Network, regularizer: Regularizer) -> Callable[[], Tensor | None]:
    """A function that sets `.grad` to the regularizer's gradient, and returns its value where that is reported."""
    received: Mapping[str, Tensor] = {}
    if regularizer.strength:
        received = regularizer.toward or {name: p.detach().clone() for name, p in trained_parameters(model).items()}
    correction = {
        name: regularizer.correction[name].to(p.device)
        for name, p in trained_parameters(model).items()
        if name in regularizer.correction
    }

    def regularize() -> Tensor | None:
        # In `.grad`, and not as terms of the loss: those would hold a copy of all parameters more.
        distances = []
        for name, parameter in trained_parameters(model).items():
            if received:
                moved = parameter.detach() - received[name]
                if regularizer.reported:
                    distances.append(moved.square().sum())
                parameter.grad = moved.mul_(regularizer.strength)
                if name in correction:
                    parameter.grad -= correction[name]
            elif name in correction:
                parameter.grad = correction[name].neg()
        return regularizer.strength / 2 * torch.stack(distances).sum() if distances else None

    return regularize


def scale_gradients(model: nn.Module, factor: float) -> None:
    """Multiply all gradients of a model, in place."""
    if factor != 1:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def batches_of(
    task: Task, shard: Tensor, training: LocalTraining, generator: torch.Generator, device: torch.device, once: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of `picks_of`, augmented where `training` says so; not in a single pass."""
    augment = None if once else generator
    for picked in picks_of(shard, training, generator, once):
        yield batch_of(task, picked, training, device, augment)


def batch_of(
    task: Task, picked: Tensor, training: LocalTraining, device: torch.device, augment: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Inputs and labels of some training examples, as a model takes them."""
    inputs, labels = task.batch(
        task.train.inputs[picked].to(device),
        task.train.labels[picked].to(device),
        augment=augment if training.augment else None,
    )
    return in_layout(inputs, training.layout), labels


def micro_batches(picked: Tensor, most: int) -> list[Tensor]:
    """Split a batch's examples into parts of about equal size, as few as there can be with `most` examples each."""
    parts = list(torch.tensor_split(picked, -(-len(picked) // most)))
    # Batch norm cannot normalize a single example over a 1x1 map.
    return parts if most == 1 or len(picked) == 1 else [part for part in parts if len(part) > 1]


def picks_of(
    shard: Tensor, training: LocalTraining, generator: torch.Generator, once: bool = False
) -> Iterator[Tensor]:
    """The examples of shuffled batches: whole epochs (the last batch may be short), or exactly `steps` batches.

    once: a single pass, in parts of as many examples as the device computes with at once.
    """
    size, done = training.examples_at_once if once else training.batch_size, 0
    epochs = 1 if once else training.epochs
    epoch = 0
    while True:
        order = shard[torch.randperm(len(shard), generator=generator)]
        for start in range(0, len(order), size):
            picked = order[start : start + size]
            if len(picked) == 1 < min(size, len(order)):
                continue  # batch norm cannot normalize a single example over a 1x1 map
            yield picked
            done += 1
            if training.steps and not once and done == training.steps:
                return
        epoch += 1
        if (once or not training.steps) and epoch == epochs:
            return
