"""The work of a device on a message: it trains, scores models, reports. JSON text and packed arrays in, and out again.

On hardware a node carries one device and answers with its weights; in a simulation it carries many, and adds up what
may be added up before it answers. Nothing of Flower in here: on hardware this runs in a process of its own.
"""

from __future__ import annotations

import json
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from wildflower.client_app.context import DeviceContext, Workplace
from wildflower.client_app.delivered import FOLDER as MODEL_FOLDER
from wildflower.client_app.delivered import own_program, take
from wildflower.client_app.device_report import device_report, gpu_trainer, resting
from wildflower.client_app.evaluation import evaluation_context, score_order
from wildflower.client_app.kept_state import DeviceState
from wildflower.client_app.limits import Refusal
from wildflower.client_app.memory import own_bytes
from wildflower.client_app.order import Done, do_order
from wildflower.client_app.policy import policy_of
from wildflower.client_app.secure_member import SecureDevice
from wildflower.client_app.side_by_side import Asked, number_at_once, side_by_side
from wildflower.client_app.stack_price import price_at_once
from wildflower.client_app.updates import Sums, check_maskable, sum_headers, update_of
from wildflower.devices.node_config import own_device
from wildflower.devices.probe import probe_machine
from wildflower.devices.state_folder import node_state_dir
from wildflower.devices.validation import one_line
from wildflower.messages.delivery import Delivery
from wildflower.messages.error import MessageError
from wildflower.messages.masks import digests_of
from wildflower.messages.orders import (
    Batch,
    DataAnswer,
    DataQuestion,
    EvaluationBatch,
    EvaluationOrder,
    EvaluationReply,
    KeyAnswer,
    KeyBatch,
    KeyReply,
    LocalTraining,
    ModelOrder,
    NodeReport,
    Reply,
    Score,
    Update,
    WorkOrder,
    parse,
)
from wildflower.models.allocator import HEAP_FACTOR, keep_freed_memory, return_freed_memory
from wildflower.models.architecture import Architecture
from wildflower.models.family import Family, make_family
from wildflower.models.network import Network
from wildflower.plugins.flower_log import log
from wildflower.plugins.raised_as import raised_as
from wildflower.strategies.method import client_step_of
from wildflower.tasks.device_data import MAX_PROBLEM_LETTERS, Summary, UnfitError
from wildflower.tasks.inspection import describe
from wildflower.tasks.task import Task, TaskSpec, load_task

NodeConfig = Mapping[str, object]
RESTING = "the device takes no part now"
AnyOrder = TypeVar("AnyOrder", bound=ModelOrder)
# An order's work, and what masks its update.
_Begun = tuple[WorkOrder, DeviceContext, Done, Callable[[Tensor], bytes] | None]


def do(kind: str, text: str, arrays: list[bytes], config: NodeConfig) -> tuple[str, list[bytes]]:
    """Answer a message.

    Args:
        kind: "train", "evaluate", "data", "delivery" or "query".
        text: the message's JSON; empty for a query of the device's report.
        arrays: its packed arrays.
        config: the node config.

    Raises:
        MessageError: the message is not one of ours.
        ValueError: the node config does not say what it must.
    """
    match kind:
        case "train":
            return _train(parse(Batch, text), arrays, config)
        case "evaluate":
            return _evaluate(parse(EvaluationBatch, text), arrays, config)
        case "data":
            return _describe(parse(DataQuestion, text), config)
        case "delivery":
            return _deliver(parse(Delivery, text), arrays, config)
        case "query":
            return _keys(parse(KeyBatch, text), config) if text else _report(config)
    raise ValueError(f"no message is called {kind!r}")


def _train(batch: Batch, arrays: list[bytes], config: NodeConfig) -> tuple[str, list[bytes]]:
    """Do the work orders of a batch; one device's failure is told in its update and leaves the others alone."""
    task, family, device = _prepare(batch, config)
    updates: list[Update] = []
    out: list[bytes] = []
    sums: Sums = {}
    if not batch.shared_process:
        own_device(config)  # ValueError, before anything is trained, if the node config does not say it
    before_bytes = 0 if batch.shared_process else own_bytes()
    models: dict[int, tuple[int, Network]] = {}  # order -> its device and what it trained, of orders read later
    rest = None if batch.shared_process else resting(config)

    def begin(order: WorkOrder, ask: Callable[[Asked], Any]) -> _Begun:
        if rest is not None:
            raise Refusal(f"{RESTING}: {rest.why}")
        state = _state_of(order.device, batch, config)
        training, order, masks = _masks(batch, order, arrays, state.folder, config)
        context = DeviceContext(
            order,
            client_step_of(order.client_step),
            batch.round,
            training,
            family,
            task,
            arrays,
            state,
            Workplace(device, _make_room(order, batch.shared_process), _board(batch, config), ask),
            earlier=_earlier(order, models),
            checkpoint=batch.oldest_checkpoint,
            wire=batch.wire,
        )
        if masks is not None:
            check_maskable(context)
        return order, context, do_order(context), masks

    def answer(begun: _Begun | Exception) -> Update:
        if isinstance(begun, Exception):
            raise begun
        order, context, done, masks = begun
        try:
            update = update_of(batch, order, context, done, out, sums, masks)
        except Exception:
            context.take_back()
            raise
        if done.answer.model is not None:
            models[order.order] = (order.device, done.answer.model)
        return update

    left = deque(_at_once(batch.orders, batch, device))
    while left:
        orders = left.popleft()
        started = time.perf_counter()
        name, kind = orders[0].client_step.name, _kind(orders, batch, batch.training.batch_size)
        begun, at_once = side_by_side([partial(begin, order) for order in orders], name, kind)
        share = (time.perf_counter() - started) / len(orders)  # of the time that all took together
        for order, number in zip(orders, at_once, strict=True):
            try:
                update = answer(begun.pop(0))
                if len(orders) > 1:
                    update = update.model_copy(update={"at_once": number, "seconds": share})
                updates.append(update)
            except Refusal as refusal:
                updates.append(_no(order, f"refused: {refusal}", started, overrun=refusal.overrun))
            except MessageError as error:
                updates.append(_no(order, f"refused: {error}", started))
            except Exception as error:  # one device's trouble must not take the others' work with it
                log.error("Device %s failed:\n%s", order.device, traceback.format_exc())
                updates.append(_no(order, f"failed: {type(error).__name__}: {error}", started))
        still_read = {later.after for orders in left for later in orders}
        models = {number: model for number, model in models.items() if number in still_read}
    headers = sum_headers(sums, out)
    if not batch.shared_process:
        # After the work, so that the report is of the device as the next round finds it: without what the work has left
        # in this process, which is about to end.
        traffic_bytes = sum(map(len, arrays)) + sum(map(len, out))
        left_bytes = max(0, own_bytes() - before_bytes) if device.type == "cpu" else 0
        try:
            report = device_report(config, traffic_bytes, left_bytes=left_bytes).to_json()
            updates = [update.model_copy(update={"report": report}) for update in updates]
        except Exception as error:  # the work is done: the server goes on with the report it has
            log.error("This device's report could not be made: %s", error)
    return Reply(run=batch.run, round=batch.round, updates=updates, sums=headers).model_dump_json(), out


def _kind(orders: Sequence[ModelOrder], batch: Batch | EvaluationBatch, size: int) -> tuple[str, str, int] | None:
    """Return what orders have in common whose batches take equally long; None where nobody asks what is faster."""
    if isinstance(batch.side_by_side, int) or len(orders) == 1:
        return None
    return orders[0].client_step.model_dump_json(), json.dumps(orders[0].architecture), size


def _at_once(
    orders: Sequence[AnyOrder], batch: Batch | EvaluationBatch, device: torch.device
) -> Iterator[list[AnyOrder]]:
    """Yield the orders of one architecture and client step, as many at once as the machine has memory for.

    Those that read an earlier order's model, or are masked, are by themselves.
    """
    asked = batch.side_by_side
    turns = not batch.shared_process or asked == 1 or (asked == "auto" and device.type == "cpu")
    found: dict[object, list[AnyOrder]] = {}
    for place, order in enumerate(orders):
        by_itself = isinstance(order, WorkOrder) and (order.after is not None or order.masked_with)
        step = order.client_step.model_dump_json()
        kind = place if turns or by_itself else (json.dumps(order.architecture), order.frozen, step)
        found.setdefault(kind, []).append(order)
    for alike in found.values():
        number = 1
        if len(alike) > 1:
            number = asked if isinstance(asked, int) else _number_at_once(alike, batch, device)
        count = -(-len(alike) // number)
        yield from (alike[first::count] for first in range(count))


def _number_at_once(alike: Sequence[ModelOrder], batch: Batch | EvaluationBatch, device: torch.device) -> int:
    """Return how many of some orders of one architecture fit into the memory that the machine has free."""
    order_bytes = max(order.predicted_memory_bytes for order in alike)
    if batch.training is None:  # the models are scored alone
        return number_at_once(device, order_bytes, 0)
    family, architecture = family_of(json.dumps(batch.family)), Architecture.from_json(alike[0].architecture)
    return number_at_once(device, *price_at_once(family, architecture, batch.training, order_bytes))


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
        here = batch.model_copy(update={"task": _task(batch, config).to_json()})  # a node may hold its data elsewhere
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


def _evaluate(batch: EvaluationBatch, arrays: list[bytes], config: NodeConfig) -> tuple[str, list[bytes]]:
    """Score the models of a batch, each on its device's shard or on the task's test set."""
    task, family, device = _prepare(batch, config)

    def score(order: EvaluationOrder, ask: Callable[[Asked], Any]) -> Score:
        state = _state_of(order.device, batch, config)
        policy = policy_of(config, order.device, simulated=batch.shared_process)
        if not batch.shared_process:
            _check_takes_part(config)
        if batch.training is not None:
            policy.check_unmasked("training whose score the server would see by itself")
        place = Workplace(device, _make_room(order, batch.shared_process), _board(batch, config), ask)
        return score_order(evaluation_context(order, batch, family, task, arrays, state, place), batch, task)

    scores: dict[int, Score] = {}
    for orders in _at_once(batch.orders, batch, device):
        name, kind = orders[0].client_step.name, _kind(orders, batch, batch.batch_size)
        found, _ = side_by_side([partial(score, order) for order in orders], name, kind)
        for order, each in zip(orders, found, strict=True):
            if isinstance(each, Exception):  # as in training: told, and the others go on
                each = Score(device=order.device, error=one_line(f"{type(each).__name__}: {each}"))
            scores[order.device] = each
    told = [scores[order.device] for order in batch.orders]
    return EvaluationReply(run=batch.run, round=batch.round, scores=told).model_dump_json(), []


def _make_room(order: ModelOrder, shared_process: bool) -> int | None:
    """Return the memory that this machine has free, None in a simulation; if it is tight, give freed memory back."""
    if shared_process:
        return None
    available_bytes = probe_machine().memory_available_bytes
    if HEAP_FACTOR * order.predicted_memory_bytes > min(order.memory_bytes or available_bytes, available_bytes):
        return_freed_memory()  # slower, but the work then holds no more than was predicted
    return available_bytes


def _describe(question: DataQuestion, config: NodeConfig) -> tuple[str, list[bytes]]:
    """Return what this node's device says of its data: counts, labels and sums."""
    try:
        if (rest := resting(config)) is not None:
            why = one_line(f"{RESTING}: {rest.why}", MAX_PROBLEM_LETTERS)
            said = Summary(device=own_device(config), problem=why, resting_seconds=rest.seconds)
            return DataAnswer(run=question.run, said=said).model_dump_json(), []
        policy = policy_of(config, own_device(config), simulated=False)
        if question.moments:
            policy.check_unmasked("a question for sums over its own inputs: declare mean and std in task-arguments")
        said = describe(_task(question, config), own_device(config), moments=question.moments)
    except (UnfitError, MessageError) as error:
        said = Summary(device=own_device(config), problem=one_line(str(error), MAX_PROBLEM_LETTERS))
    return DataAnswer(run=question.run, said=said).model_dump_json(), []


def _deliver(delivery: Delivery, arrays: list[bytes], config: NodeConfig) -> tuple[str, list[bytes]]:
    """Return whether this node's device uses a model from now on. MessageError where the message is for another."""
    if delivery.device != own_device(config):
        raise MessageError(f"a model for device {delivery.device}, and this node carries device {own_device(config)}")
    _check_takes_part(config)
    if delivery.own is not None:
        task, family, device = _prepare(delivery.own, config)
        task, [order] = task.for_device(delivery.device), delivery.own.orders
        state, place = _state_of(delivery.device, delivery.own, config), Workplace(device, None)
        with closing(evaluation_context(order, delivery.own, family, task, arrays, state, place)) as context:
            program, facts = own_program(delivery.file_format, delivery.own.round, task, context)
    else:
        task = load_task(_task(delivery, config)).for_device(delivery.device)
        program, facts = arrays[0] if arrays else b"", delivery.facts
    answer = take(delivery, program, facts, task, node_state_dir(config) / MODEL_FOLDER)
    if policy_of(config, delivery.device, simulated=False).minimum:  # scores would show something of this device alone
        answer = answer.model_copy(update={"score": None, "before": None})
    return answer.model_dump_json(), []


def _check_takes_part(config: NodeConfig) -> None:
    """Raise Refusal where the owner of this node lets its device take no part now."""
    if (rest := resting(config)) is not None:
        raise Refusal(f"{RESTING}: {rest.why}")


def _report(config: NodeConfig) -> tuple[str, list[bytes]]:
    """Return which device this node carries, and what it can spend now."""
    return NodeReport(device=own_device(config), report=device_report(config).to_json()).model_dump_json(), []


def _keys(batch: KeyBatch, config: NodeConfig) -> tuple[str, list[bytes]]:
    """Do the steps of secure aggregation of a batch; one device's trouble leaves the others alone."""
    answers = []
    for order in batch.orders:
        try:
            folder = _state_of(order.device, batch, config).folder
            policy = policy_of(config, order.device, simulated=batch.shared_process)
            answers.append(SecureDevice(order.device, batch.run, batch.round, folder, policy).do_step(order))
        except (MessageError, OSError) as error:
            answers.append(KeyAnswer(device=order.device, error=one_line(str(error))))
    return KeyReply(run=batch.run, round=batch.round, answers=answers).model_dump_json(), []


def preload(kind: str, text: str, config: NodeConfig) -> None:
    """Load the data and family of a message, so that processes forked from this one have them."""
    if kind in ("train", "evaluate"):
        batch = parse(Batch, text) if kind == "train" else parse(EvaluationBatch, text)
        load_task(_task(batch, config))
        family_of(json.dumps(batch.family))
        for order in batch.orders:
            client_step_of(order.client_step)


def _prepare(batch: Batch | EvaluationBatch, config: NodeConfig) -> tuple[Task, Family, torch.device]:
    """Return the task and family of a batch, kept from one message to the next, and where to compute."""
    if batch.shared_process:
        use_one_core()
    return load_task(_task(batch, config)), family_of(json.dumps(batch.family)), compute_device()


def use_one_core() -> None:
    """In a simulation, whose workers share the machine: one thread, and freed memory is kept for the next batch."""
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)  # two workers with two threads each on two cores were 4 to 8 times slower
    keep_freed_memory()


def compute_device() -> torch.device:
    """Return the CUDA device of this process, or else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())  # with its number, which memory limits want


def _task(batch: Batch | EvaluationBatch | DataQuestion | Delivery, config: NodeConfig) -> TaskSpec:
    """Return the task of a message. A node may hold its data elsewhere than the server: `data-dir` in its node config.

    UnfitError where every device has data of its own, and this node does not say where.
    """
    own = config.get("data-dir")
    spec = TaskSpec.from_json({**batch.task, "data_dir": str(Path(str(own)).expanduser())} if own else batch.task)
    if spec.partition == "own" and not spec.device_folders and not own:
        raise UnfitError(
            "its node config has no data-dir, the folder of its own data "
            "(wildflower-node --node-config 'data-dir=\"/home/me/photos\"')"
        )
    return spec


def _state_of(device: int, batch: Batch | EvaluationBatch | KeyBatch, config: NodeConfig) -> DeviceState:
    """Return what a device has kept of the run; MessageError if this node carries another device.

    On hardware the node decides where its devices' state lies: `state-dir` in its node config.
    """
    if not batch.shared_process and device != own_device(config):
        raise MessageError(f"this node carries device {own_device(config)}, not {device}")
    if batch.shared_process and batch.state_dir and not config.get("state-dir"):
        return DeviceState(batch.state_dir, batch.run, device)
    return DeviceState(str(node_state_dir(config)), batch.run, device)


def _board(batch: Batch | EvaluationBatch, config: NodeConfig) -> Path | None:
    return None if batch.shared_process else gpu_trainer(config)


@lru_cache(maxsize=8)
def family_of(spec_json: str) -> Family:
    """Return the family of a message, kept for the next ones. Raises MessageError if it is none of this app's."""
    with raised_as(MessageError, "the server's "):
        return make_family(json.loads(spec_json))
