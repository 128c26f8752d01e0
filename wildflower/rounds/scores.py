"""Scores that devices take of models: how they are asked, and what of their answers may be used."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from wildflower.devices.validation import one_line, shown
from wildflower.messages.orders import EvaluationBatch, EvaluationOrder, EvaluationReply, LocalTraining, Score
from wildflower.messages.packing import MessageError
from wildflower.messages.tensor_sets import digest
from wildflower.messages.wire import evaluation_limits, from_records, to_records
from wildflower.plugins.flower_log import log
from wildflower.plugins.raised_as import raised_as
from wildflower.rounds.delivery import MAX_TOLD, Delivered
from wildflower.rounds.exchange import Failure, each_by_itself, exchange
from wildflower.rounds.population import Population
from wildflower.rounds.requests import Assignment, Orders
from wildflower.strategies.run_settings import RoundSettings
from wildflower.tasks.metrics import Metric

MAX_REASONS = 3  # that are told of what went wrong with the scores of a round
Examples = Literal["shard", "test set"]  # a device's own test shard, or the task's test set


@dataclass(frozen=True)
class Evaluation:
    """The scores of a round: of the global model on the task's test set, of every tier's sub-model, of every exit.

    Scores are values of the task's metric; score and loss are None where the global model could not be scored.
    delivered: of what devices would be given now. Where devices score, `worst_device` is the one with the worst value,
    and `scored_devices` how many have one. accuracy_by_class: of the global model, where labels are few classes.
    score_by_device: of what each device is given; None with more than `MAX_TOLD` devices.
    """

    score: float | None
    loss: float | None
    score_by_tier: dict[str, float]
    score_by_exit: list[float] | None = None
    delivered: Delivered | None = None
    worst_device: int | None = None
    worst_score: float | None = None
    scored_devices: int | None = None
    accuracy_by_class: dict[str, float] | None = None
    score_by_device: dict[int, float] | None = None


@dataclass(frozen=True)
class Personal:
    """Scores of devices on their own test shards: means over devices, each of which counts alike.

    devices: how many were scored. failed: how many were asked and have no score that may be used. score_by_device: of
    each, where there are few, or where devices have label sets of their own, so that a mean over them says little.
    score_by_network: of the networks that devices scored beside their models, by name; None where there are none.
    """

    score: float | None
    score_by_tier: dict[str, float]
    devices: int
    failed: int
    score_by_device: dict[int, float] | None = None
    score_by_network: dict[str, float] | None = None


def mean_score(scores: Mapping[int, Score], metric: Metric, population: Population) -> Evaluation | None:
    """The means over devices, and over those of every tier, each of which counts alike; None where there are none."""
    if not scores:
        return None
    ordered = sorted(scores.items())  # a mean of floats depends on their order, and replies come in any
    values = {device: metric.value(score.sums, score.examples) for device, score in ordered}
    tiers: dict[str, list[float]] = defaultdict(list)
    for device, value in values.items():
        tiers[population.tier(device)].append(value)
    return Evaluation(
        float(np.mean(list(values.values()))),
        float(np.mean([score.loss_sum / score.examples for _, score in ordered])),
        {tier: float(np.mean(of_tier)) for tier, of_tier in tiers.items()},
        score_by_device=told(values),
    )


def told(values: dict[int, float]) -> dict[int, float] | None:
    """The scores of devices, where there are some, and few enough that the journal has each."""
    return values if 0 < len(values) <= MAX_TOLD else None


def federated_score(
    scores: Mapping[int, Score], holding: Collection[int], by_tier: Mapping[str, Mapping[int, Score]], metric: Metric
) -> Evaluation | None:
    """Return what devices' scores on their own test examples come to: every example counts alike.

    Sums of the metric are added up, so that it is as if all examples had been scored in one place. A device's own value
    is that of its tier's model where its memory does not hold the global one, and where that has a score.

    Args:
        scores: of the global model. holding: devices whose memory holds it. by_tier: of every tier's sub-model.

    Returns:
        None where no model has a score.
    """
    if not scores and not by_tier:
        return None
    of_tiers = {device: score for of_tier in by_tier.values() for device, score in of_tier.items()}
    own = dict(scores) | {device: score for device, score in of_tiers.items() if device not in holding}
    values = {device: metric.value(score.sums, score.examples) for device, score in sorted(own.items())}
    worst = min(values, key=lambda device: (metric.scale.rank(values[device]), device))
    value, loss = pooled(scores, metric) if scores else (None, None)
    tiers = {tier: pooled(of_tier, metric)[0] for tier, of_tier in by_tier.items()}
    return Evaluation(
        value,
        loss,
        tiers,
        worst_device=worst,
        worst_score=values[worst],
        scored_devices=len(own),
        score_by_device=told(values),
    )


def pooled(scores: Mapping[int, Score], metric: Metric) -> tuple[float, float]:
    """The metric's value and the mean loss over the examples of all devices, whatever order they come in."""
    examples = sum(score.examples for score in scores.values())
    sums = [math.fsum(column) for column in zip(*(score.sums for score in scores.values()), strict=True)]
    return metric.value(sums, examples), math.fsum(score.loss_sum for score in scores.values()) / examples


def personal_score(
    scores: Mapping[int, Score],
    asked: int,
    metric: Metric,
    population: Population,
    *,
    by_device: bool = False,
    beside: Mapping[int, Sequence[str]] | None = None,
) -> Personal:
    """`mean_score` of devices' scores on their own test shards, of so many that were asked.

    beside: by device, names of the networks that it scored beside its model.
    """
    mean = mean_score(scores, metric, population)
    failed = asked - len(scores)
    each = {device: metric.value(score.sums, score.examples) for device, score in sorted(scores.items())}
    if mean is None:
        return Personal(None, {}, 0, failed, {} if by_device else None)
    networks: dict[str, list[float]] = defaultdict(list)
    for device, score in sorted(scores.items()):
        for name, sums in zip((beside or {}).get(device, ()), score.beside, strict=True):
            networks[name].append(metric.value(sums, score.examples))
    by_network = {name: float(np.mean(values)) for name, values in networks.items()} or None
    return Personal(mean.score, mean.score_by_tier, len(scores), failed, each if by_device else None, by_network)


def evaluation_batch(
    orders: Orders,
    batch: list[Assignment],
    settings: RoundSettings,
    data: Examples,
    training: LocalTraining | None = None,
    *,
    simulated: bool,
) -> tuple[EvaluationBatch, list[bytes]]:
    """Return what the message that carries a batch to its node says, and its packed arrays."""
    arrays, position = orders.arrays(batch)
    frozen = orders.add_frozen(batch, arrays)
    content = EvaluationBatch(
        run=settings.run,
        round=orders.round,
        task=settings.task,
        family=orders.family.spec(),
        batch_size=settings.training.examples_at_once,  # for which the device's memory is known to be enough
        training=training,
        shared_process=simulated,
        state_dir=settings.state_dir,
        side_by_side=settings.side_by_side,
        orders=[
            EvaluationOrder(
                device=a.device,
                architecture=a.task.architecture.to_json(),
                payloads=position[a.group],
                digest=digest(orders.groups[a.group].sent, orders.groups[a.group].returned),
                data=data,
                client_step=a.task.client_step.reference(),
                seed=int(settings.rng(orders.round, 6, a.device).integers(2**63)),
                memory_bytes=a.limit_bytes,
                predicted_memory_bytes=a.task.cost.peak_training_memory_bytes,
                frozen=a.frozen.name,
                frozen_payload=frozen.get(a.number),
            )
            for a in batch
        ],
    )
    return content, arrays


def score_on_devices(
    grid: Grid,
    orders: Orders,
    settings: RoundSettings,
    population: Population,
    data: Examples,
    training: LocalTraining | None = None,
) -> dict[int, Score]:
    """The scores, by device, of models on the devices' own test shards or on the task's test set.

    The orders must know their nodes; a device has one at most. With `training` devices train the model before they
    score it. Only scores that may be used are returned; what is wrong with the others is logged.
    """

    def question(node: int, batch: list[Assignment]) -> Message:
        content, arrays = evaluation_batch(orders, batch, settings, data, training, simulated=population.simulated)
        ttl = population.answer_seconds(settings.deadline_seconds)
        return Message(to_records(content, arrays), node, MessageType.EVALUATE, ttl=ttl, group_id=str(orders.round))

    metric, classes = settings.metric, orders.family.classes
    beside = {a.device: len(a.task.client_step.scored_beside) if data == "shard" else 0 for a in orders.assignments}
    found: dict[int, Score] = {}
    troubles: Counter[str] = Counter()
    replies = exchange(
        grid,
        orders.batches(),
        question,
        deadline_seconds=population.answer_seconds(settings.deadline_seconds),
        busy=population.busy,
        poll_seconds=population.poll_seconds,
        parts=each_by_itself if population.simulated else None,
    )
    for batch, reply in replies:
        devices = [a.device for a in batch]
        if isinstance(reply, Failure):
            troubles[reply.why] += len(devices)
            continue
        try:
            sums = metric.size(classes) * (1 + max(beside[device] for device in devices))
            scores = _read(settings.run, orders.round, devices, sums, reply)
        except MessageError as error:
            troubles[one_line(f"the reply is refused: {error}")] += len(devices)
            if batch[0].node is not None:
                population.refused(batch[0].node, str(error))
            continue
        for device in devices:
            maximum = population.holdings.testing(device) if data == "shard" else population.holdings.test_set
            try:
                found[device] = _checked(scores.get(device), metric, classes, maximum, beside[device])
            except ValueError as error:
                troubles[one_line(str(error))] += 1
    for why, times in troubles.most_common(MAX_REASONS):
        log.warning("Round %s: %s devices have no score: %s", orders.round, times, why)
    return found


def _read(run: str, round_number: int, devices: list[int], sums: int, reply: Message) -> dict[int, Score]:
    """A node's scores by device. Raises MessageError where the reply as a whole cannot be used."""
    answer, _ = from_records(EvaluationReply, reply.content, evaluation_limits(len(devices), sums))
    if (answer.run, answer.round) != (run, round_number):
        raise MessageError(f"it is of round {answer.round} of run {shown(answer.run)}")
    answered = [score.device for score in answer.scores]
    if len(set(answered)) != len(answered) or not set(answered) <= set(devices):
        raise MessageError(f"it is of devices {shown(answered)}, asked were {devices}")
    return {score.device: score for score in answer.scores}


def _checked(score: Score | None, metric: Metric, classes: int, maximum: int, beside: int) -> Score:
    """A score that may be used; ValueError says why another may not.

    Args:
        score: a device's own; None where it sent none.
        metric: of the task.
        classes: a model's outputs.
        maximum: examples that the device has to be scored on.
        beside: networks that it had to score beside its model.
    """
    if score is None:
        raise ValueError("the node's reply says nothing of this device")
    if score.error is not None:
        raise ValueError(score.error)
    if not 0 < score.examples <= maximum:
        raise ValueError(f"refused: a score of {score.examples} examples cannot be right, the device has {maximum}")
    if len(score.beside) != beside:
        raise ValueError(f"refused: scores of {len(score.beside)} networks beside the model, asked were {beside}")
    with raised_as(ValueError, "refused: "):
        for sums in (score.sums, *score.beside):
            metric.check(sums, score.examples, classes)
    if not math.isfinite(score.loss_sum):
        # A model whose loss is not a number answers nothing: its one class out of many is right by chance.
        raise ValueError("refused: the loss is not finite")
    return score
