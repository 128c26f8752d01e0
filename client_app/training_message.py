"""Training messages: their work orders are done, those of several runs' messages together where they are alike."""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from wildflower.client_app.alike import groups, kind_of
from wildflower.client_app.context import DeviceContext
from wildflower.client_app.device_report import device_report, resting
from wildflower.client_app.limits import Refusal
from wildflower.client_app.memory import own_bytes
from wildflower.client_app.order import Done, do_order
from wildflower.client_app.policy import policy_of
from wildflower.client_app.prepared import RESTING, NodeConfig, prepare, state_of, task_of, workplace
from wildflower.client_app.secure_member import SecureDevice
from wildflower.client_app.side_by_side import Asked, side_by_side
from wildflower.client_app.updates import Sums, check_maskable, sum_headers, update_of
from wildflower.devices.node_config import own_device
from wildflower.devices.validation import one_line
from wildflower.messages.error import MessageError
from wildflower.messages.masks import digests_of
from wildflower.messages.orders import Batch, LocalTraining, Reply, Update, WorkOrder, parse
from wildflower.models.network import Network
from wildflower.plugins.flower_log import log
from wildflower.strategies.method import client_step_of

# An order's work, and what masks its update.
_Begun = tuple[WorkOrder, DeviceContext, Done, Callable[[Tensor], bytes] | None]
Answer = tuple[str, list[bytes]]  # a reply's text and arrays


def train_together(messages: Sequence[tuple[str, list[bytes]]], config: NodeConfig) -> list[Answer | Exception]:
    """Answer training messages, each of a run of its own; one device's failure leaves all others alone.

    Args:
        messages: the text and the arrays of each.

    Returns:
        What each comes to, or why it cannot be answered.
    """
    made = [_made(text, arrays, config) for text, arrays in messages]
    going = [each for each in made if isinstance(each, TrainingMessage)]
    batches = [each.batch for each in going]
    left = deque(groups([batch.orders for batch in batches], batches, going[0].device) if going else ())
    while left:
        together = left.popleft()
        started = time.perf_counter()
        kind = kind_of(together, going[together[0].message].batch)
        begin = [partial(going[message].begin, order) for message, order in together]
        begun, at_once = side_by_side(begin, together[0].order.client_step.name, kind)
        share = (time.perf_counter() - started) / len(together)  # of the time that all took together
        for (message, order), number in zip(together, at_once, strict=True):
            going[message].end(order, begun.pop(0), started, (number, share) if len(together) > 1 else None)
        for number, message_left in enumerate(going):
            message_left.forget({each.order.after for group in left for each in group if each.message == number})
    return [each.reply() if isinstance(each, TrainingMessage) else each for each in made]


class TrainingMessage:
    """The work orders of one message, and what has come of them."""

    def __init__(self, batch: Batch, arrays: list[bytes], config: NodeConfig) -> None:
        self.batch, self._arrays, self._config = batch, arrays, config
        self._task, self._family, self.device = prepare(batch, config)
        self._updates: list[Update] = []
        self._out: list[bytes] = []
        self._sums: Sums = {}
        if not batch.shared_process:
            own_device(config)  # ValueError, before anything is trained, if the node config does not say it
        self._before_bytes = 0 if batch.shared_process else own_bytes()
        self._models: dict[int, tuple[int, Network]] = {}  # order -> its device and model, of those read later
        self._rest = None if batch.shared_process else resting(config)

    def begin(self, order: WorkOrder, ask: Callable[[Asked], Any]) -> _Begun:
        """Let an order's device train. Raises what keeps it from that."""
        batch = self.batch
        if self._rest is not None:
            raise Refusal(f"{RESTING}: {self._rest.why}")
        state = state_of(order.device, batch, self._config)
        training, order, masks = _masks(batch, order, self._arrays, state.folder, self._config)
        context = DeviceContext(
            order,
            client_step_of(order.client_step),
            batch.round,
            training,
            self._family,
            self._task,
            self._arrays,
            state,
            workplace(order, batch, self._config, self.device, ask),
            earlier=_earlier(order, self._models),
            checkpoint=batch.oldest_checkpoint,
            wire=batch.wire,
        )
        if masks is not None:
            check_maskable(context)
        return order, context, do_order(context), masks

    def end(
        self, order: WorkOrder, begun: _Begun | Exception, started: float, shared: tuple[int, float] | None
    ) -> None:
        """Take what has come of an order.

        shared: with how many devices it was trained at once, and its seconds; None where it was by itself.
        """
        try:
            update = self._answer(begun)
            if shared is not None:
                update = update.model_copy(update={"at_once": shared[0], "seconds": shared[1]})
        except Refusal as refusal:
            update = _no(order, f"refused: {refusal}", started, overrun=refusal.overrun)
        except MessageError as error:
            update = _no(order, f"refused: {error}", started)
        except Exception as error:  # one device's trouble must not take the others' work with it
            log.error("Device %s failed:\n%s", order.device, traceback.format_exc())
            update = _no(order, f"failed: {type(error).__name__}: {error}", started)
        self._updates.append(update)

    def _answer(self, begun: _Begun | Exception) -> Update:
        if isinstance(begun, Exception):
            raise begun
        order, context, done, masks = begun
        try:
            update = update_of(self.batch, order, context, done, self._out, self._sums, masks)
        except Exception:
            context.take_back()
            raise
        if done.answer.model is not None:
            self._models[order.order] = (order.device, done.answer.model)
        return update

    def forget(self, still_read: Collection[int | None]) -> None:
        """Let go the models of all orders but these."""
        self._models = {number: model for number, model in self._models.items() if number in still_read}

    def reply(self) -> Answer:
        """Return the message's reply, once all of its orders have ended."""
        headers = sum_headers(self._sums, self._out)
        if not self.batch.shared_process:
            # After the work, so that the report is of the device as the next round finds it: without what the work has
            # left in this process, which is about to end.
            traffic_bytes = sum(map(len, self._arrays)) + sum(map(len, self._out))
            left_bytes = max(0, own_bytes() - self._before_bytes) if self.device.type == "cpu" else 0
            try:
                report = device_report(self._config, traffic_bytes, left_bytes=left_bytes).to_json()
                self._updates = [update.model_copy(update={"report": report}) for update in self._updates]
            except Exception as error:  # the work is done: the server goes on with the report it has
                log.error("This device's report could not be made: %s", error)
        told = Reply(run=self.batch.run, round=self.batch.round, updates=self._updates, sums=headers)
        return told.model_dump_json(), self._out


def _made(text: str, arrays: list[bytes], config: NodeConfig) -> TrainingMessage | Exception:
    try:
        return TrainingMessage(parse(Batch, text), arrays, config)
    except Exception as error:
        return error


def _earlier(order: WorkOrder, models: Mapping[int, tuple[int, Network]]) -> Network | None:
    """Return the trained model that an order reads; MessageError if it names none that its device has just trained."""
    if order.after is None:
        return None
    device, model = models.get(order.after, (None, None))
    if device != order.device:
        raise MessageError(
            f"device {order.device}: order {order.order} reads the model of order {order.after}, which is none that "
            "this device has done before in this message"
        )
    return model


def _masks(
    batch: Batch, order: WorkOrder, arrays: list[bytes], folder: Path, config: NodeConfig
) -> tuple[LocalTraining, WorkOrder, Callable[[Tensor], bytes] | None]:
    """Return how a device trains for an order, the order as it does it, and what masks its update; None: nothing does.

    Raises MessageError, before anything is trained, where the device may not mask it, or may not do without.
    """
    policy = policy_of(config, order.device, simulated=batch.shared_process)
    if not order.masked_with:
        policy.check_unmasked(
            "an order whose result the server would see by itself: the run needs secure-aggregation.minimum = 5"
        )
        return batch.training, order, None
    device = SecureDevice(order.device, batch.run, batch.round, folder, policy)
    weights, work = digests_of(batch, order, arrays)
    device.check_work(order.masked_with, weights)
    training = batch.training
    if policy.ledger is not None:
        here = batch.model_copy(update={"task": task_of(batch, config).to_json()})  # a node may hold its data elsewhere
        training, order = policy.ledger.as_first(here, order, arrays, weights)
    return training, order, lambda values: device.masked(values, order.masked_with, weights, work)


def _no(order: WorkOrder, outcome: str, started: float, *, overrun: bool = False) -> Update:
    return Update(
        order=order.order,
        device=order.device,
        outcome=one_line(outcome),
        seconds=time.perf_counter() - started,
        overrun=overrun,
    )
