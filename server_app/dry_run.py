"""Before round 1: one step of one device with a method from outside, from its payload to the state it would keep.

What a method of the project does is held by tests. One from outside meets them here: what its client step returns, and
what its server half makes of that, on a copy that is dropped.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from wildflower.client_app.context import DeviceContext, Workplace
from wildflower.client_app.kept_state import DeviceState
from wildflower.client_app.limits import Refusal
from wildflower.client_app.order import Done, do_order
from wildflower.devices.budget import Budget
from wildflower.devices.validation import shown
from wildflower.messages.error import MessageError
from wildflower.messages.orders import Update
from wildflower.messages.packing import Layout, pack
from wildflower.messages.tensor_sets import STATISTICS, parameters_of
from wildflower.plugins.flower_log import log
from wildflower.plugins.raised_as import raised_as
from wildflower.rounds.engine import Engine
from wildflower.rounds.frozen import Frozen
from wildflower.rounds.layout_check import DryRunError, same_chance, without_unlisted_frozen
from wildflower.rounds.replies import own_contribution
from wildflower.rounds.requests import Assignment, Given, Work
from wildflower.strategies.method import ClientStep, Contribution, Method, Order, State, Trained, client_step_of
from wildflower.tasks.task import Task

MAX_LOOKED_AT = 100  # devices, of which the one with the most examples takes part
BATCH_SIZE = 8


def dry_run_step(engine: Engine, task: Task) -> None:
    """Raise an exception where a method's halves do not do what they say: DryRunError, or one of the halves' own."""
    try:
        method = copy.deepcopy(engine.method)
    except Exception as error:  # a method may hold what cannot be copied, such as a lock
        log.debug("The method is not tried in a dry run: it cannot be copied (%s)", error)
        return
    if method.settings.privacy is not None:
        method.settings.privacy.account.begin_in_memory()  # what is tried in a dry run is not released
    with same_chance(), tempfile.TemporaryDirectory() as folder:
        _step(method, task, folder)


def _step(method: Method, task: Task, folder: str) -> None:
    device = max(range(min(MAX_LOOKED_AT, task.spec.devices)), key=task.training_examples)
    order = Order(device, method.smallest_architecture)
    if method.first_question is not None:
        work, done = _do(method, order, method.first_question, task, folder)
        method.introduce(device, done.answer.facts)
    method.begin_round([order])
    work, done = _do(method, order, method.client_step(order), task, folder)
    group = work.groups[0]
    if group.returned:
        packed = {
            name: pack(
                without_unlisted_frozen(done.answer.tensor_sets[name], tensor_set.layout, method.family),
                tensor_set.layout,
            )
            for name, tensor_set in group.returned.items()
        }
        update = Update(
            order=0,
            device=device,
            outcome="trained",
            payloads={name: index for index, name in enumerate(packed)},
            examples=done.examples,
            present_classes=_present_classes(task, device),
        )
        contribution, _ = own_contribution(work, work.assignments[0], update, list(packed.values()))
        if contribution.sums and contribution.each:
            _absorb_in_parts(copy.deepcopy(method), contribution)
        method.absorb(contribution)
    metrics = method.finish_round([Trained(order, "", done.examples, done.answer.loss, done.answer.facts)])
    if not isinstance(metrics, Mapping):
        raise DryRunError(f"`finish_round` must return numbers by name, not a {type(metrics).__name__}")
    for key, value in metrics.items():
        if value is not None and not _is_number(value):
            raise DryRunError(
                f"`finish_round` must return numbers by name: {shown(key)} is no number but a {type(value).__name__}"
            )
    _check_models(method)
    state = method.state()
    if not isinstance(state, State) or not all(isinstance(value, torch.Tensor) for value in state.tensors.values()):
        raise DryRunError(
            f"`state` must return a wildflower.strategies.method.State with tensors by name, not {type(state)}"
        )
    with raised_as(DryRunError, "`state` holds values that are no JSON: ", (TypeError, ValueError)):
        values = json.loads(json.dumps(state.values))
    method.load(State(state.tensors, values))
    if method.settings.privacy is not None:
        _check_empty_round(method)


def _check_empty_round(method: Method) -> None:
    """Raise DryRunError where the model of a private run tells that nobody came to a round: it has no noise then."""
    wanted = [method.scored_architecture]
    before = {
        name: tensor.clone()
        for model in method.models(wanted).values()
        for name, tensor in model.weights.items()
        if not method.family.is_frozen(name)
    }
    method.begin_round([])
    method.finish_round([])
    after = [model.weights for model in method.models(wanted).values()]
    if before and all(torch.equal(weights[name], before[name]) for weights in after for name in before):
        raise DryRunError(
            "`finish_round` leaves the model as it was in a round to which no device came, which tells just that. "
            "Differential privacy needs its noise in such a round too: let `self.mean.mean` make the model whether "
            "somebody trained or not, and ask `self.mean.empty` in place of `trained` whether there is nothing to do"
        )


def _absorb_in_parts(method: Method, contribution: Contribution) -> None:
    """Let a method absorb what a node that adds up sends: the sums over devices, and what each sends beside them."""
    try:
        for part in (replace(contribution, each={}), replace(contribution, sums={})):
            method.absorb(part)
    except (MessageError, KeyError) as error:
        raise DryRunError(
            "`absorb` must take the sums and one device's own tensor sets as two contributions too, as simulations "
            f"send them: ask `if contribution.sums` and `if contribution.each` first ({error})"
        ) from None


def _check_models(method: Method) -> None:
    """Raise DryRunError where the weights after a round are not those of the family's models."""
    wanted = dict.fromkeys([method.scored_architecture, method.smallest_architecture])
    for architecture, model in method.models(wanted).items():
        tensors = parameters_of(model.family.tensors(architecture))
        learned = {
            name: tensor
            for name, tensor in model.weights.items()
            if not model.family.is_frozen(name) and not name.endswith(STATISTICS)
        }
        if difference := Layout.of(tensors).difference(Layout.of(learned)):
            raise DryRunError(
                f"the weights that `finish_round` leaves are not those of the model {architecture}: {difference}"
            )


def _do(method: Method, order: Order, local: ClientStep, task: Task, folder: str) -> tuple[Work, Done]:
    """Let a client step do one step of a small batch."""
    cost = method.cost(order.architecture)
    budget = Budget(cost.peak_training_memory_bytes)
    given = Given(order, method.selection(order.device, order.architecture), cost, local)
    frozen = Frozen(method.family, method.frozen_weights())
    owed = frozen.owed(order.device, order.architecture, given.selection)
    work = Work(
        round=method.round,
        assignments=[Assignment(order.device, "", budget, given, node=0, frozen=owed)],
        frozen=frozen,
        family=method.family,
        payload=method.payload,
        absorb=method.absorb,
        enough=1,
        simulated=False,
    )
    batch, arrays = work.content(method.settings, work.assignments)
    size = min(BATCH_SIZE, batch.training.batch_size)
    micro = min(batch.training.micro_batch_size, size - 1)
    training = batch.training.model_copy(update={"steps": 1, "batch_size": size, "micro_batch_size": micro})
    state = DeviceState(folder, batch.run, order.device)
    place = Workplace(torch.device("cpu"))
    half = client_step_of(local.reference())
    context = DeviceContext(batch.orders[0], half, batch.round, training, method.family, task, arrays, state, place)
    with raised_as(DryRunError, f"the client step {local.reference().name} refuses: ", Refusal):
        return work, do_order(context)


def _present_classes(task: Task, device: int) -> list[int] | None:
    if task.label_kind != "classes":
        return None
    present: list[int] = task.class_counts(task.shard(device).train).nonzero().flatten().tolist()
    return present


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
