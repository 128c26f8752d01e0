"""What a device refuses whose owner wants sums only."""

import pytest
from flwr.app import Message

from tests.client_app.test_app import evaluation
from tests.client_app.work_orders import LENET, SPEC, answers, batch, context, message, payload, work_order
from wildflower.client_app import work
from wildflower.client_app.app import app
from wildflower.devices import node_config
from wildflower.messages.orders import (
    DataAnswer,
    DataQuestion,
    EvaluationBatch,
    KeyBatch,
    KeyOrder,
    LocalTraining,
)
from wildflower.messages.wire import from_records

OWNER = {"partition_id": 0, "secure-minimum": 5}
WANTS = "this device's owner wants sums of 5 devices at least (secure-minimum in its node config), and this is "


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch):
    monkeypatch.setattr("wildflower.client_app.worker.ask", work.do)


def test_an_order_without_masks_is_refused_before_it_is_trained(tmp_path):
    reply, arrays = answers(batch(work_order(), shared_process=False), **OWNER, **{"state-dir": str(tmp_path)})
    assert arrays == []
    assert reply.updates[0].outcome.startswith(f"refused: {WANTS}an order whose result the server would see by itself")
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_server_that_says_that_it_simulates_is_refused(tmp_path):
    """Its orders would add up what one device returns, and keep its state where the server says."""
    home = {"state-dir": str(tmp_path / "home")}
    for state_dir in ("", str(tmp_path / "elsewhere")):
        reply, arrays = answers(batch(work_order(), state_dir=state_dir), **OWNER, **home)
        assert arrays == []
        assert reply.updates[0].outcome == f"refused: {WANTS}work for a simulation"
    asked = KeyBatch(run="a run", round=1, shared_process=True, orders=[KeyOrder(device=0, weights="1" * 64)])
    found = app(message(asked, [], "query"), context(**OWNER, **home))
    assert "work for a simulation" in found.content["wildflower"]["json"]
    assert not (tmp_path / "elsewhere").exists()


def scores(training, tmp_path) -> Message:
    values = {"run": "a run", "round": 1, "task": SPEC.to_json(), "family": LENET.spec(), "batch_size": 64}
    content = EvaluationBatch(**values, shared_process=False, training=training, orders=[evaluation(0, "test set")])
    return app(message(content, [payload()], "evaluate"), context(**OWNER, **{"state-dir": str(tmp_path)}))


def test_training_before_a_score_is_refused_and_a_score_alone_is_given(tmp_path):
    refused, given = (
        scores(training, tmp_path).content["wildflower"]["json"] for training in (LocalTraining(steps=1), None)
    )
    assert "training whose score the server would see by itself" in refused
    assert '"error":null' in given


def test_sums_over_its_own_inputs_are_refused(tmp_path):
    question = DataQuestion(run="a run", task=SPEC.to_json(), moments=True)
    reply = app(message(question, [], "query.data"), context(**OWNER, **{"state-dir": str(tmp_path)}))
    answer, _ = from_records(DataAnswer, reply.content)
    assert "sums over its own inputs: declare mean and std" in (answer.said.problem or "")


@pytest.mark.parametrize("value", [2, -1, True, "5", 1.5])
def test_a_wrong_minimum_is_named(value):
    with pytest.raises(ValueError, match="node config: secure-minimum"):
        node_config.read({"partition-id": 0, "secure-minimum": value})
