"""The context of a client step: one order on one device, its data, its limits and what the device keeps."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from wildflower.client_app import board_gpu
from wildflower.client_app.batches import batch_of, batches_of, micro_batches, picks_of
from wildflower.client_app.chance import Chance
from wildflower.client_app.fitting import Fit, optimizer_of
from wildflower.client_app.kept_state import DeviceState
from wildflower.client_app.limits import Refusal, limits_of
from wildflower.client_app.memory import MemoryMeter, memory_limit, touched_bytes
from wildflower.client_app.rounding import LOST_ON_THE_WIRE, Lost, encoded_changes
from wildflower.client_app.side_by_side import Asked, alone
from wildflower.client_app.statistics_pass import Pass
from wildflower.messages.encoding import Wire, decode, encode, restored
from wildflower.messages.frozen_parts import read_part
from wildflower.messages.orders import LocalTraining, ModelOrder, WorkOrder
from wildflower.messages.packing import Layout, MessageError, pick, unpack
from wildflower.messages.sums import not_finite
from wildflower.messages.tensor_sets import TensorSets, Weights, digest, frozen_layout
from wildflower.models.architecture import Architecture
from wildflower.models.base import Family
from wildflower.models.network import Network, pool_by_slices
from wildflower.models.weights import trained_parameters, with_weights
from wildflower.plugins.flower_log import log, tell
from wildflower.plugins.raised_as import raised_as
from wildflower.strategies.client_step import tensor_sets_of
from wildflower.strategies.method import ClientStep
from wildflower.strategies.shared_losses import Loss, Regularizer
from wildflower.tasks.device_data import UnfitError
from wildflower.tasks.task import Task

T = TypeVar("T")


def _fitting(task: Task, device: int, family: Family) -> Task:
    """Return the task as a device has it; UnfitError if its data fit neither what is agreed nor the family."""
    found = task.for_device(device)
    # Only here do a device's own texts and the family meet; the server has checked all others.
    if task.spec.partition == "own" and found.vocabulary is not None:
        try:
            found.vocabulary.check_pairs(family.pair_separator)
        except ValueError as error:
            raise UnfitError(str(error)) from error
    return found


@dataclass(frozen=True)
class Workplace:
    """Where an order's work is done, and what bounds it.

    Attributes:
        device: where to compute.
        available_bytes: memory that this machine has free now, which may be less than it reported; the work may not
            outgrow it or its budget. None in a simulation, where many devices share the machine.
        board: socket of the trainer that has the board's GPU (`wildflower.client_app.board_gpu`), where the node has
            one. Losses that it cannot compute are trained on `device`, and the log says so.
        ask: trains a model on `device`, in place, and returns its mean loss, scores it, or takes its statistics.
        captures: on a GPU, steps may be captured once for many devices (`wildflower.client_app.captured_step`).
    """

    device: torch.device
    available_bytes: int | None = None
    board: Path | None = None
    ask: Callable[[Asked], Any] = alone
    captures: bool = False


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
        order: ModelOrder,
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
        with raised_as(Refusal, f"device {order.device}: its data do not fit: ", UnfitError):
            self.task = _fitting(task, order.device, family)
        self._has_own_task = self.task is not task  # and so a loss of its own
        self.place, self.device, self.wire = place, place.device, wire
        self.architecture = Architecture.from_json(order.architecture)
        family.validate(self.architecture)
        self.sent, self.returned = tensor_sets_of(local, family, self.architecture)
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
        self._lost = Lost(state, order.device, before_round)
        self._stack = ExitStack()
        self._limited = False
        # In a simulation there are none: what one of many devices in one process holds cannot be told from outside.
        self.limits = {} if place.available_bytes is None else limits_of(order, place.available_bytes)
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
        """Return how many training examples the device holds."""
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
        model = with_weights(self.family, self.architecture, {**weights, **self._frozen})
        return model if self.device.type == "cpu" else model.to(self.device)  # to go through all layers takes time

    def _frozen_tensors(self, arrays: list[bytes]) -> Weights:
        """Return what is frozen of the sub-model: out of the message, and kept from then on, or as it was kept."""
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
        """Return a fresh copy of a tensor set as the server has it: training changes `received`; {} if none was sent.

        Only a simulated device knows it where the wire rounds.
        """
        return unpack(self._packed[tensor_set], self.sent[tensor_set].layout) if tensor_set in self._packed else {}

    def _rounded(self, tensor_set: str) -> bytes:
        layout = self.sent[tensor_set].layout
        return encode(unpack(self._packed[tensor_set], layout), layout, self.wire)

    def encoded(self, tensor_sets: TensorSets) -> dict[str, bytes]:
        """Return what the device returns, as it travels under a wire that rounds; what is lost is added the next time.

        MessageError if a value is not finite.
        """
        found = {}
        for name, tensor_set in self.returned.items():
            sent = (self._encoded[name], self.sent[name].layout) if name in self._encoded else None
            feedback = isinstance(self.order, WorkOrder) and self.order.feedback and tensor_set.steady
            key = self._key(f"{LOST_ON_THE_WIRE}-{name}", per_architecture=True)
            lost = self._lost.until_now(key) if feedback else {}
            found[name] = encoded_changes(tensor_sets[name], tensor_set.layout, sent, self.wire, lost)
            if feedback:
                self._lost.now[key] = lost
        return found

    def restored(self, tensor_set: str, data: bytes) -> Weights:
        """Return a tensor set as the server makes it of what has travelled. Only a simulated device can."""
        layout = self.returned[tensor_set].layout
        return restored(decode(data, layout, self.wire), self.sent_again(tensor_set), layout)

    # What stays on the device

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
        self._lost.save(self._checkpoint)
        return bool(self._to_keep)

    def take_back(self) -> None:
        """Delete what `save` has written, because the update that it goes with is refused."""
        for key in (*self._to_keep, *self._lost.now):
            self._state.take_back(key, self._before)

    def check_kept(self, tensor_sets: TensorSets) -> None:
        """Raise MessageError if the device would keep something of a training that diverged."""
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
        if self.place.board is not None:
            self._say_cpu("it has a loop of its own, and not one model and one loss")
        if self.place.ask is not alone:
            tell(f"{self.order.client_step.name} is trained in turn: it has a loop of its own")
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
            inputs, labels = self._examples_of(part)
            yield inputs, labels, len(part) / examples

    def _examples_of(self, picked: Tensor) -> tuple[Tensor, Tensor]:
        return batch_of(self.task, picked, self.training, self.device, self._generator)

    def one_pass(self, *models: nn.Module, most: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """See `wildflower.strategies.method.ClientContext`."""
        batches = batches_of(self.task, self._shard, self.training, self._generator, self.device, once=True)
        yield from self._within_limits(batches, *models, counted=False, most=most)

    def statistics(self, most: int = 0) -> Weights:
        """See `wildflower.strategies.method.ClientContext`."""
        drawn = self._generator.get_state()

        def start(model: Network) -> Iterator[tuple[Tensor, Tensor]]:
            self._generator.set_state(drawn)
            return self.one_pass(model, most=most)

        def build() -> Network:
            model = self.build(self.received["weights"])
            pool_by_slices(model)
            return model

        batches = -(-self.examples // self.training.examples_at_once)
        found: Weights = self.place.ask(
            Pass(self._packed, build, start, self.examples, min(batches, most or batches), self.device)
        )
        return found

    def _within_limits(
        self, batches: Iterator[T], *models: nn.Module, counted: bool = True, most: int = 0
    ) -> Iterator[T]:
        """Yield one batch after another; after each, the memory of its step is checked.

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
        return optimizer_of(trained_parameters(model), self.training, self.device, rate)

    def fit(
        self,
        model: Network,
        loss: Loss,
        *,
        regularizer: Regularizer | None = None,
        new_statistics: bool = False,
        rate: float = 1.0,
        factors: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> float | None:
        """See `wildflower.strategies.method.ClientContext`."""
        if self.place.board is not None:
            try:
                self._check_for_board(factors)
                return self._fit_on_board(self.place.board, model, loss, regularizer, new_statistics, rate)
            except board_gpu.Untraceable as error:
                self._say_cpu(str(error))
        taken, drawn = self.steps_taken, self._generator.get_state()

        def start() -> Iterator[Tensor]:
            self.steps_taken = taken
            self._generator.set_state(drawn)
            return self._within_limits(picks_of(self._shard, self.training, self._generator), model)

        mean_loss: float = self.place.ask(
            Fit(
                model,
                loss,
                start,
                self._examples_of,
                self.examples,
                self.training,
                self.device,
                regularizer,
                new_statistics=new_statistics,
                rate=rate,
                factors={name: factor.to(self.device) for name, factor in factors.items()},
                # Texts are cut to the longest of a batch, and augmentation draws from the device's own generator.
                data=None if self.training.augment or self.task.vocabulary else id(self.task),
                **self._captured_as(),
            )
        )
        return mean_loss

    def _captured_as(self) -> dict[str, Any]:
        """Return what `Fit` has of a training whose steps may be captured; nothing of another."""
        if not self.place.captures or self._has_own_task:
            return {}
        order = self.order
        kind = (order.client_step.name, self.client_step, self.family, self.architecture, order.frozen)
        return {"kind": kind, "memory_bytes": order.predicted_memory_bytes}

    def _say_cpu(self, why: str) -> None:
        name = self.order.client_step.name
        log.warning("Device %s: the board's GPU cannot train %s (%s)", self.order.device, name, why)
        log.warning("Device %s: %s is trained on the CPU", self.order.device, name)

    def _check_for_board(self, factors: Mapping[str, Tensor]) -> None:
        """Raise board_gpu.Untraceable where the board's trainer does not have what the order asks for."""
        asked = {
            "micro-batch-size": self.training.accumulates,
            "learning-rates": bool(self.training.learning_rates),
            "freeze": bool(self.family.freeze),
            "factors of gradients": factors,
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
        """Return the most memory that the work held; None in a simulation."""
        if self._board_bytes is not None:
            return self._board_bytes
        return self.meter.peak_bytes() if self.meter else None
