import math

import pytest
from flwr.app import ConfigRecord

from tests.small_run import METHODS, connected_grid, simulated_grid, small_config, started
from tests.strategies.by_hand import OneHidden, setup
from wildflower.devices.budget import Budget
from wildflower.messages.error import MessageError
from wildflower.messages.orders import EvaluationReply, Score
from wildflower.messages.wire import from_records, to_records
from wildflower.server_app.config import ConfigError
from wildflower.strategies.local import LocalOnly, TrainingAlone
from wildflower.strategies.method import LEADING, Contribution, Group, Order, Trained
from wildflower.strategies.params import Params

LOCAL = METHODS["local"]


def local_only(folder):
    return LocalOnly(setup(folder, OneHidden()), Params())


def test_what_a_link_can_carry_does_not_bind_a_device_of_which_nothing_travels(tmp_path):
    method = local_only(tmp_path)
    whole, half, quarter = method.candidates
    assert {method.cost(architecture).payload_bytes for architecture in method.candidates} == {0}
    for architecture in method.candidates:
        memory_bytes = method.cost(architecture).peak_training_memory_bytes
        assert method.assign(0, Budget(memory_bytes, 0, 0)) == architecture
    below = Budget(method.cost(quarter).peak_training_memory_bytes - 1)
    assert method.assign(0, below) is None
    local = method.client_step(Order(0, whole))
    assert local == TrainingAlone()
    assert local.sent(method.family, whole) == local.returned(method.family, half) == {}


def test_who_has_trained_scores_its_own_model_also_after_a_restart(tmp_path):
    method, again = local_only(tmp_path), local_only(tmp_path)
    whole, half, _ = method.candidates
    assert method.scored_on_devices() == []
    method.finish_round(
        [Trained(Order(2, whole), "a tier", 4, 1.0, {}), Trained(Order(0, whole), "a tier", 4, 1.0, {})]
    )
    method.finish_round([Trained(Order(2, half), "a tier", 4, 1.0, {})])
    assert method.scored_on_devices() == [(0, whole, LEADING), (2, half, LEADING)]
    assert method.models(method.candidates) == {}
    again.load(method.state())
    assert again.scored_on_devices() == method.scored_on_devices()


def test_weights_that_a_device_sends_all_the_same_are_refused(tmp_path):
    method = local_only(tmp_path)
    whole = method.scored_architecture
    group = Group(whole, LEADING, {}, {}, method.family.place(whole))
    with pytest.raises(MessageError, match="a device that trains alone sent weights"):
        method.absorb(Contribution(group, [0], [0], 4, {}, {"weights": {}}))


def test_nobody_trains_two_models_of_which_none_travels(tmp_path):
    with pytest.raises(ConfigError, match="both-models = True: with strategy = 'local' no model travels"):
        small_config(tmp_path, **LOCAL | {"both-models": True})


def test_nothing_travels_and_every_device_goes_on_with_its_own_model(tmp_path):
    engine, scorer = started(small_config(tmp_path, **LOCAL | {"evaluate-every": 1, "devices-per-round": 6}))
    grid = simulated_grid(2)
    losses = []
    for number in (1, 2, 3):
        result = engine.run_round(grid, number, scorer)
        assert result.record["training_bytes_down"] == result.record["training_bytes_up"] == 0
        assert [d["outcome"] for d in result.devices] == ["trained"] * 6
        losses.append(sum(d["loss"] for d in result.devices))
    assert all(not message.content.array_records for message in grid.sent)
    assert losses[2] < losses[1] < losses[0]
    kept = sorted((tmp_path / "runs" / "small" / "device-state" / "small").glob("device-*/*.safetensors"))
    assert len({path.parent for path in kept}) == 6
    assert len({path.read_bytes() for path in kept if ".3." in path.name}) == 6


def test_accuracy_is_the_mean_over_devices_and_over_tiers(tmp_path):
    engine, scorer = started(small_config(tmp_path, **LOCAL | {"devices-per-round": 6, "evaluate-every": 1}))
    grid = simulated_grid(2)
    # Devices 0 to 5, of tiers whole, whole, half, half, quarter, quarter. Device 1 cannot be scored, and 3's score is
    # refused: its loss is NaN.
    correct = {0: 10, 2: 20, 3: 40, 4: 50, 5: 60}

    def scores(message):
        if message.metadata.message_type != "evaluate":
            return message
        batch = message.content.config_records["wildflower"]["json"]
        devices = [s.device for s in EvaluationReply.model_validate_json(str(batch)).scores]
        made = [
            Score(device=d, sums=[correct[d]], examples=100, loss_sum=math.nan if d == 3 else 100.0)
            if d in correct
            else Score(device=d, error="no such model")
            for d in devices
        ]
        message.content = to_records(EvaluationReply(run="small", round=1, scores=made))
        return message

    grid.tamper = scores
    grid.turn = lambda messages: messages[::-1]  # the mean of floats is taken in the order of devices all the same
    record = engine.run_round(grid, 1, scorer).record
    assert record["score"] == (0.1 + 0.2 + 0.5 + 0.6) / 4
    assert record["score_by_tier"] == {"whole": 0.1, "half": 0.2, "quarter": 0.55}
    assert record["loss"] == 1.0


def test_scores_that_cannot_be_read_are_left_out(tmp_path):
    engine, scorer = started(small_config(tmp_path, **LOCAL | {"devices-per-round": 6, "evaluate-every": 1}))
    grid = simulated_grid(2)

    def garble(message):
        if message.metadata.message_type == "evaluate" and message.metadata.src_node_id == 1:
            message.content["wildflower"] = ConfigRecord({"json": "?"})
        return message

    grid.tamper = garble
    record = engine.run_round(grid, 1, scorer).record
    assert 0 < record["score"] < 1


def test_devices_that_are_gone_are_not_scored(tmp_path):
    config = small_config(tmp_path, **LOCAL | {"fleet": "", "devices": 3, "devices-per-round": 3, "evaluate-every": 1})
    engine, scorer = started(config)
    grid = connected_grid(3, tmp_path)
    engine.run_round(grid, 1, scorer)
    del grid.contexts[2]
    assert engine.run_round(grid, 2, scorer).record["score"] is not None
    asked = [m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == "evaluate"]
    assert asked == [1, 2, 3, 1, 3]


@pytest.mark.parametrize(
    "change",
    [
        lambda reply: reply.model_copy(update={"run": "foreign"}),
        lambda reply: reply.model_copy(update={"round": 99}),
        lambda reply: reply.model_copy(update={"scores": reply.scores + reply.scores[:1]}),
        lambda reply: reply.model_copy(
            update={"scores": [score.model_copy(update={"sums": [10.0**6]}) for score in reply.scores]}
        ),
        lambda reply: reply.model_copy(
            update={"scores": [score.model_copy(update={"examples": 10**6}) for score in reply.scores]}
        ),
        lambda reply: reply.model_copy(
            update={"scores": [score.model_copy(update={"error": "no model"}) for score in reply.scores]}
        ),
    ],
    ids=["run", "round", "twice", "more than all correct", "more than the test set", "errors"],
)
def test_scores_that_cannot_be_true_are_left_out(tmp_path, change):
    engine, scorer = started(small_config(tmp_path, **LOCAL))
    grid = simulated_grid(2)
    engine.run_round(grid, 1, scorer)

    def tamper(message):
        if message.metadata.message_type != "evaluate":
            return message
        reply, _ = from_records(EvaluationReply, message.content)
        message.content = to_records(change(reply))
        return message

    assert engine.evaluation.evaluate(grid, scorer) is not None
    grid.tamper = tamper
    assert engine.evaluation.evaluate(grid, scorer) is None
