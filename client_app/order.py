"""One work order on one device: check the budget, let the client step train, say what it took."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from wildflower.client_app.chance import seed_draws
from wildflower.client_app.context import DeviceContext
from wildflower.client_app.limits import Refusal, limits_of, out_of_memory_refused
from wildflower.messages.packing import Layout, MessageError
from wildflower.strategies.method import Answer


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


def do_order(context: DeviceContext) -> Done:
    """Let the client step train, within the order's limits.

    Raises:
        Refusal: the work cannot fit the budget, or grew beyond it.
        MessageError: the client step does not go with what came.
        board_gpu.BoardError: the board's trainer does not answer, or failed.
    """
    started = time.perf_counter()
    order, local = context.order, context.client_step
    for what, limit_bytes in limits_of(order, context.place.available_bytes).items():
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
