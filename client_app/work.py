"""The work of a device on a message: it trains, scores models, reports. JSON text and packed arrays in, and out again.

On hardware a node carries one device and answers with its weights; in a simulation it carries many, and adds up what
may be added up before it answers. Nothing of Flower in here: on hardware this runs in a process of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

from wildflower.client_app.alike import groups, kind_of
from wildflower.client_app.context import Workplace
from wildflower.client_app.delivered import FOLDER as MODEL_FOLDER
from wildflower.client_app.delivered import own_program, take
from wildflower.client_app.device_report import device_report, resting
from wildflower.client_app.evaluation import evaluation_context, score_order
from wildflower.client_app.policy import policy_of
from wildflower.client_app.prepared import (
    RESTING,
    NodeConfig,
    check_takes_part,
    family_of,
    prepare,
    state_of,
    task_of,
    workplace,
)
from wildflower.client_app.secure_member import SecureDevice
from wildflower.client_app.side_by_side import Asked, side_by_side
from wildflower.client_app.training_message import train_together
from wildflower.devices.node_config import own_device
from wildflower.devices.state_folder import node_state_dir
from wildflower.devices.validation import one_line
from wildflower.messages.delivery import Delivery
from wildflower.messages.error import MessageError
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
    NodeReport,
    Score,
    parse,
)
from wildflower.strategies.method import client_step_of
from wildflower.tasks.device_data import MAX_PROBLEM_LETTERS, Summary, UnfitError
from wildflower.tasks.inspection import describe
from wildflower.tasks.task import load_task


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
            [reply] = train_together([(text, arrays)], config)
            if isinstance(reply, Exception):
                raise reply
            return reply
        case "evaluate":
            return _evaluate(parse(EvaluationBatch, text), arrays, config)
        case "data":
            return _describe(parse(DataQuestion, text), config)
        case "delivery":
            return _deliver(parse(Delivery, text), arrays, config)
        case "query":
            return _keys(parse(KeyBatch, text), config) if text else _report(config)
    raise ValueError(f"no message is called {kind!r}")


def _evaluate(batch: EvaluationBatch, arrays: list[bytes], config: NodeConfig) -> tuple[str, list[bytes]]:
    """Score the models of a batch, each on its device's shard or on the task's test set."""
    task, family, device = prepare(batch, config)

    def score(order: EvaluationOrder, ask: Callable[[Asked], Any]) -> Score:
        state = state_of(order.device, batch, config)
        policy = policy_of(config, order.device, simulated=batch.shared_process)
        if not batch.shared_process:
            check_takes_part(config)
        if batch.training is not None:
            policy.check_unmasked("training whose score the server would see by itself")
        place = workplace(order, batch, config, device, ask)
        return score_order(evaluation_context(order, batch, family, task, arrays, state, place), batch, task)

    scores: dict[int, Score] = {}
    for together in groups([batch.orders], [batch], device):
        name, kind = together[0].order.client_step.name, kind_of(together, batch)
        found, _ = side_by_side([partial(score, order) for _, order in together], name, kind)
        for (_, order), each in zip(together, found, strict=True):
            if isinstance(each, Exception):  # as in training: told, and the others go on
                each = Score(device=order.device, error=one_line(f"{type(each).__name__}: {each}"))
            scores[order.device] = each
    told = [scores[order.device] for order in batch.orders]
    return EvaluationReply(run=batch.run, round=batch.round, scores=told).model_dump_json(), []


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
        said = describe(task_of(question, config), own_device(config), moments=question.moments)
    except (UnfitError, MessageError) as error:
        said = Summary(device=own_device(config), problem=one_line(str(error), MAX_PROBLEM_LETTERS))
    return DataAnswer(run=question.run, said=said).model_dump_json(), []


def _deliver(delivery: Delivery, arrays: list[bytes], config: NodeConfig) -> tuple[str, list[bytes]]:
    """Return whether this node's device uses a model from now on. MessageError where the message is for another."""
    if delivery.device != own_device(config):
        raise MessageError(f"a model for device {delivery.device}, and this node carries device {own_device(config)}")
    check_takes_part(config)
    if delivery.own is not None:
        task, family, device = prepare(delivery.own, config)
        task, [order] = task.for_device(delivery.device), delivery.own.orders
        state, place = state_of(delivery.device, delivery.own, config), Workplace(device, None)
        with closing(evaluation_context(order, delivery.own, family, task, arrays, state, place)) as context:
            program, facts = own_program(delivery.file_format, delivery.own.round, task, context)
    else:
        task = load_task(task_of(delivery, config)).for_device(delivery.device)
        program, facts = arrays[0] if arrays else b"", delivery.facts
    answer = take(delivery, program, facts, task, node_state_dir(config) / MODEL_FOLDER)
    if policy_of(config, delivery.device, simulated=False).minimum:  # scores would show something of this device alone
        answer = answer.model_copy(update={"score": None, "before": None})
    return answer.model_dump_json(), []


def _report(config: NodeConfig) -> tuple[str, list[bytes]]:
    """Return which device this node carries, and what it can spend now."""
    return NodeReport(device=own_device(config), report=device_report(config).to_json()).model_dump_json(), []


def _keys(batch: KeyBatch, config: NodeConfig) -> tuple[str, list[bytes]]:
    """Do the steps of secure aggregation of a batch; one device's trouble leaves the others alone."""
    answers = []
    for order in batch.orders:
        try:
            folder = state_of(order.device, batch, config).folder
            policy = policy_of(config, order.device, simulated=batch.shared_process)
            answers.append(SecureDevice(order.device, batch.run, batch.round, folder, policy).do_step(order))
        except (MessageError, OSError) as error:
            answers.append(KeyAnswer(device=order.device, error=one_line(str(error))))
    return KeyReply(run=batch.run, round=batch.round, answers=answers).model_dump_json(), []


def preload(kind: str, text: str, config: NodeConfig) -> None:
    """Load the data and family of a message, so that processes forked from this one have them."""
    if kind in ("train", "evaluate"):
        batch = parse(Batch, text) if kind == "train" else parse(EvaluationBatch, text)
        load_task(task_of(batch, config))
        family_of(json.dumps(batch.family))
        for order in batch.orders:
            client_step_of(order.client_step)
