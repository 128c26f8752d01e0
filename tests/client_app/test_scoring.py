"""Scoring under the memory of the order, as training is."""

from dataclasses import replace

import pytest
import torch
from client_app.training import Refusal
from messages.layouts import sent_layout

from client_app import scoring
from client_app.memory import LIBRARY_BYTES
from client_app.scoring import score_order
from messages.orders import EvaluationBatch, EvaluationOrder, LocalTraining, Objective
from tasks.task import load_task
from tests.client_app.work_orders import LENET, SPEC, digits, payload

HALF = LENET.width(0.5)
CPU = torch.device("cpu")
LIMIT_BYTES = 16 * 2**20


def scored(training=None, available_bytes=10**12, memory_bytes=LIMIT_BYTES, task=SPEC, **of_order):
    order = EvaluationOrder(
        device=0,
        architecture=HALF.to_json(),
        payload=0,
        digest=sent_layout(LENET, HALF).digest,
        memory_bytes=memory_bytes,
        **{"data": "test set"} | of_order,
    )
    batch = EvaluationBatch(
        run="a run",
        round=1,
        task=task.to_json(),
        family=LENET.spec(),
        batch_size=10,
        training=training,
        shared_process=available_bytes is None,
        orders=[order],
    )
    return score_order(order, batch, LENET, load_task(task), payload(), None, CPU, available_bytes)


@pytest.fixture
def greedy(monkeypatch):
    """Scoring takes far more than the limit allows or than malloc has over, not a page of which is written."""
    beyond_bytes = LIMIT_BYTES + LIBRARY_BYTES + 4 * 2**30
    honest = scoring.score

    def score(*arguments, **more):
        torch.empty(beyond_bytes, dtype=torch.uint8)
        return honest(*arguments, **more)

    monkeypatch.setattr(scoring, "score", score)


@pytest.mark.parametrize(
    ("memory_bytes", "available_bytes", "words"),
    [(LIMIT_BYTES, 10**12, f"the budget is {LIMIT_BYTES} bytes"), (0, LIMIT_BYTES, f"has free {LIMIT_BYTES} bytes")],
)
def test_scoring_that_outgrows_its_memory_is_refused(memory_bytes, available_bytes, words, greedy):
    with pytest.raises(Refusal, match=rf"out of memory after \d+ bytes, .*{words}"):
        scored(memory_bytes=memory_bytes, available_bytes=available_bytes)


def test_in_a_simulation_nobody_can_tell_what_one_device_holds(greedy):
    assert scored(available_bytes=None).examples == len(digits().test)


class Constant(torch.nn.Module):
    """Is sure of a class, and less so of another."""

    def forward(self, inputs):
        return torch.tensor([0.0, 2.0, 1.0, -1.0]).expand(len(inputs), 4)


def test_masked_logits_of_absent_classes_are_zero():
    """The most likely class is absent, and so is the least likely: what is left is class 2, then both zeros."""
    model = scoring.Masked(Constant(), torch.tensor([True, False, True, False]))
    assert model(torch.zeros(2, 3)).tolist() == [[0.0, 0.0, 1.0, 0.0]] * 2


@pytest.mark.parametrize(
    ("data", "kind", "masked"),
    [
        ("shard", "masked cross entropy", True),
        ("shard", "cross entropy", False),
        ("test set", "masked cross entropy", False),
    ],
)
def test_a_device_is_scored_on_its_own_data_as_it_is_trained(data, kind, masked, monkeypatch):
    seen = []
    honest = scoring.score

    def score(model, *arguments, **more):
        seen.append(isinstance(model, scoring.Masked))
        return honest(model, *arguments, **more)

    monkeypatch.setattr(scoring, "score", score)
    scored(data=data, objective=Objective(kind=kind), task=replace(SPEC, test_fraction=0.5))
    assert seen == [masked]


def test_scoring_holds_no_gradients_of_the_training_before_it(monkeypatch):
    seen = []
    honest = scoring.score

    def score(model, *arguments, **more):
        seen.extend(p.grad for p in model.parameters())
        return honest(model, *arguments, **more)

    monkeypatch.setattr(scoring, "score", score)
    assert scored(LocalTraining(batch_size=10), memory_bytes=10**9).error is None
    assert seen
    assert all(gradient is None for gradient in seen)
