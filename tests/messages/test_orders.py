import json
import math

import pytest

from wildflower.messages.orders import (
    MAX_CLASSES,
    MAX_KEYS,
    Batch,
    EvaluationBatch,
    EvaluationOrder,
    EvaluationReply,
    LocalTraining,
    NodeReport,
    Reply,
    Score,
    StepReference,
    SumHeader,
    Update,
    WorkOrder,
    parse,
)
from wildflower.messages.packing import MessageError

ORDER = WorkOrder(
    order=1,
    device=3,
    tier="half",
    architecture={"widths": [3, 8, 60, 42]},
    payloads={"weights": 0, "control": 1},
    group=1,
    digest="0123456789abcdef",
    client_step=StepReference(
        name="wildflower.strategies.fedprox:ProximalTraining", settings={"mu": 0.5, "weighting": "examples"}
    ),
    seed=2**62,
    memory_bytes=10**6,
    predicted_memory_bytes=10**5,
    after=0,
    kept=True,
)
BATCH = Batch(
    run="a run",
    round=2,
    task={"name": "digits", "devices": 6},
    family={"name": "lenet5"},
    training=LocalTraining(learning_rate=0.05),
    shared_process=True,
    orders=[ORDER],
)
REPLY = Reply(
    run="a run",
    round=2,
    updates=[
        Update(
            order=1,
            device=3,
            outcome="trained",
            payloads={"control": 1},
            examples=240,
            loss=1.5,
            seconds=0.25,
            present_classes=[0, 4],
            facts={"steps": [12.0], "class_counts": [3.0, 0.0]},
            state_kept=True,
            state_lost=True,
        )
    ],
    sums=[SumHeader(group=1, tensor_set="weights", orders=[1], weight=240, class_weight=[240, 0], payload=0)],
)
EVALUATION = EvaluationBatch(
    run="a run",
    round=2,
    task={"name": "digits", "devices": 6},
    family={"name": "lenet5"},
    batch_size=10,
    shared_process=False,
    orders=[
        EvaluationOrder(
            device=3,
            architecture={"widths": [3, 8, 60, 42]},
            payloads={},
            digest="0123456789abcdef",
            data="shard",
            client_step=StepReference(name="wildflower.strategies.local:TrainingAlone"),
        )
    ],
)


@pytest.mark.parametrize("model", [BATCH, REPLY, EVALUATION], ids=["batch", "reply", "evaluation"])
def test_a_message_comes_back(model):
    assert parse(type(model), model.model_dump_json()) == model


def test_training_has_an_end():
    assert LocalTraining(epochs=0, steps=1).steps == 1
    with pytest.raises(MessageError, match=r"training: .*epochs = 0 and steps = 0: one of them must be at least 1"):
        parse(Batch, changed(BATCH, "training.epochs", 0))


def test_a_loss_that_is_no_number_comes_back():
    score = EvaluationReply(run="r", round=1, scores=[Score(device=0, loss_sum=math.nan, examples=2)])
    assert math.isnan(parse(EvaluationReply, score.model_dump_json()).scores[0].loss_sum)
    update = Update(order=0, device=0, outcome="trained", loss=math.inf)
    assert parse(Update, update.model_dump_json()).loss == math.inf


def changed(model, path: str, value) -> str:
    content = json.loads(model.model_dump_json())
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place = content
    for part in parents:
        place = place[part]
    if value is KeyError:
        del place[last]
    else:
        place[last] = value
    return json.dumps(content)


@pytest.mark.parametrize(
    ("model", "path", "value"),
    [
        (BATCH, "priority", 1),
        (BATCH, "orders.0.width", 0.5),
        (BATCH, "orders.0.client_step.margin", 2.0),
        (BATCH, "merge", {"weighting": "examples"}),
        (EVALUATION, "orders.0.payload", 0),
        (BATCH, "training.schedule", "cosine"),
        (REPLY, "updates.0.accuracy", 0.9),
        (REPLY, "updates.0.payload", 0),
        (REPLY, "updates.0.class_counts", [1, 2]),
        (REPLY, "sums.0.count", 1),
        (REPLY, "sums.0.digest", "0123456789abcdef"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_unknown_field_is_named(model, path, value):
    with pytest.raises(MessageError, match=path.replace(".", r"\.") + ": Extra inputs are not permitted"):
        parse(type(model), changed(model, path, value))


@pytest.mark.parametrize(
    ("model", "path", "value"),
    [
        (BATCH, "round", "2"),
        (BATCH, "round", -1),
        (BATCH, "round", 2.5),
        (BATCH, "run", 7),
        (BATCH, "shared_process", "yes"),
        (BATCH, "orders", []),
        (BATCH, "orders", {}),
        (BATCH, "orders.0.memory_bytes", 2**63),
        (BATCH, "training.batch_size", 2**63),
        (REPLY, "round", 10**400),
        (REPLY, "sums.0.weight", 2**63),
        (BATCH, "orders.0.device", True),
        (BATCH, "orders.0.payloads", [0]),
        (BATCH, "orders.0.payloads.weights", "0"),
        (BATCH, "orders.0.payloads.weights", -1),
        (BATCH, "orders.0.after", -1),
        (BATCH, "orders.0.kept", 1),
        (BATCH, "orders.0.architecture", [3, 8]),
        (BATCH, "orders.0.client_step.name", 3),
        (BATCH, "orders.0.client_step.name", "wildflower.strategies.fedprox:" + 300 * "P"),
        (BATCH, "orders.0.client_step.settings", [0.5]),
        (BATCH, "training.batch_size", 0),
        (BATCH, "training.optimizer", "lion"),
        (BATCH, "training.momentum", 1.0),
        (EVALUATION, "orders.0.data", "train"),
        (EVALUATION, "orders.0.client_step", "wildflower.strategies.local:TrainingAlone"),
        (REPLY, "updates", None),
        (REPLY, "updates.0.device", None),
        (REPLY, "updates.0.examples", 1.5),
        (REPLY, "updates.0.examples", -3),
        (REPLY, "updates.0.examples", 2**31),
        (REPLY, "updates.0.measured_memory_bytes", -1),
        (REPLY, "updates.0.seconds", math.inf),
        (REPLY, "updates.0.seconds", math.nan),
        (REPLY, "updates.0.seconds", -1.0),
        (REPLY, "updates.0.present_classes.1", -1),
        (REPLY, "updates.0.payloads.control", -1),
        (REPLY, "updates.0.payloads", [1]),
        (REPLY, "updates.0.payloads", {f"p{n}": n for n in range(MAX_KEYS + 1)}),
        (REPLY, "updates.0.facts.steps", 12.0),
        (REPLY, "updates.0.facts.steps.0", "12"),
        (REPLY, "updates.0.facts.steps", None),
        (REPLY, "updates.0.facts.steps", [0.0] * (MAX_CLASSES + 1)),
        (REPLY, "updates.0.facts", {f"f{n}": [0.0] for n in range(MAX_KEYS + 1)}),
        (REPLY, "updates.0.facts", {101 * "f": [0.0]}),
        (REPLY, "updates.0.state_kept", "yes"),
        (REPLY, "updates.0.state_lost", 1),
        (REPLY, "updates.0.loss", "low"),
        (REPLY, "sums.0.devices", []),
        (REPLY, "sums.0.orders", []),
        (REPLY, "sums.0.tensor_set", 0),
        (REPLY, "sums.0.tensor_set", 101 * "w"),
        (REPLY, "sums.0.weight", 0),
        (REPLY, "sums.0.class_weight.0", -1),
    ],
    ids=lambda value: None if isinstance(value, str) else "",
)
def test_a_wrong_value_is_refused_with_its_field(model, path, value):
    with pytest.raises(MessageError, match=rf"{type(model).__name__}: {path}".replace(".", r"\.")):
        parse(type(model), changed(model, path, value))


@pytest.mark.parametrize(
    ("model", "path"),
    [
        (BATCH, "run"),
        (BATCH, "orders.0.client_step"),
        (BATCH, "orders.0.client_step.name"),
        (BATCH, "orders.0.payloads"),
        (EVALUATION, "orders.0.digest"),
        (EVALUATION, "orders.0.client_step"),
        (BATCH, "training"),
        (BATCH, "orders.0.digest"),
        (BATCH, "orders.0.memory_bytes"),
        (REPLY, "round"),
        (REPLY, "updates"),
        (REPLY, "updates.0.outcome"),
        (REPLY, "sums.0.payload"),
        (REPLY, "sums.0.tensor_set"),
    ],
)
def test_a_missing_field_is_named(model, path):
    with pytest.raises(MessageError, match=path.replace(".", r"\.") + ": Field required"):
        parse(type(model), changed(model, path, KeyError))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"run"', "\x00", None, 3, b"{}"], ids=repr)
def test_what_is_no_message_at_all_is_refused(text):
    with pytest.raises(MessageError, match="NodeReport"):
        parse(NodeReport, text)
