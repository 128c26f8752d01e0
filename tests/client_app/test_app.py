import subprocess
import sys

import pytest
import torch
from messages.layouts import sent_layout

from client_app import work as client_module
from client_app.app import app
from messages.orders import EvaluationBatch, EvaluationOrder, EvaluationReply, Merge, NodeReport, Objective
from messages.packing import int64_vector, unpack
from messages.sums import SCALE, split
from messages.wire import from_records
from models.lenet import LeNet5
from tasks.scoring import score
from tests.client_app.work_orders import (
    LENET,
    SPEC,
    answers,
    batch,
    context,
    cut,
    digits,
    message,
    payload,
    work_order,
)

HALF = LENET.width(0.5)
LAYOUT = sent_layout(LENET, HALF)


def own_weights(device, **changes):
    """What a device returns by itself."""
    content = batch(work_order(device), merge=None, **changes)
    reply, arrays = answers(content)
    assert reply.updates[0].outcome == "trained"
    return unpack(arrays[reply.updates[0].payload], LAYOUT), reply.updates[0]


def test_a_nodes_sum_is_the_weighted_sum_of_its_devices():
    parts = [own_weights(device) for device in (0, 2)]
    reply, arrays = answers(batch(work_order(0), work_order(2)))
    [header] = reply.sums
    assert (header.orders, header.digest, header.class_weight) == ([0, 2], LAYOUT.digest, None)
    assert header.weight == sum(update.examples for _, update in parts) == 72
    total = split(int64_vector(arrays[header.payload], LAYOUT.numel, "sum").double() / SCALE, LAYOUT)
    for name, value in total.items():
        mean = sum(weights[name].double() * update.examples for weights, update in parts) / header.weight
        assert torch.allclose(value / header.weight, mean, rtol=0, atol=1e-9)
    assert [(u.outcome, u.payload, u.report) for u in reply.updates] == [("trained", None, None)] * 2


def test_groups_are_summed_apart():
    other = work_order(1, width=1.0, group=1, payload=1)
    reply, arrays = answers(batch(work_order(0), other, work_order(2)), [payload(), payload(width=1.0)])
    assert [(header.group, header.orders) for header in reply.sums] == [(0, [0, 2]), (1, [1])]
    whole = sent_layout(LENET, LENET.full())
    assert [len(arrays[header.payload]) for header in reply.sums] == [8 * LAYOUT.numel, 8 * whole.numel]


def test_absent_classes_weigh_nothing_in_the_sum():
    static = LeNet5(input_shape=(1, 8, 8), norm="static", scaler=True)
    orders = [work_order(d, static, objective=Objective(kind="masked cross entropy")) for d in range(4)]
    merge = Merge(weighting="uniform", present_classes=True)
    content = batch(*orders, family=static, merge=merge)
    reply, _ = answers(content, [payload(static)])
    task = digits()
    held = [set(task.train.labels[task.shard(d).train].tolist()) for d in range(4)]
    [header] = reply.sums
    assert header.weight == 4 * 1024
    assert header.class_weight == [1024 * sum(label in classes for classes in held) for label in range(10)]
    assert min(header.class_weight) < 4096


def test_on_hardware_a_device_sends_its_weights_its_classes_and_its_report():
    static = LeNet5(input_shape=(1, 8, 8), norm="static", scaler=True)
    order = work_order(1, static, objective=Objective(kind="masked cross entropy"))
    content = batch(order, family=static, shared_process=False, merge=Merge(present_classes=True))
    reply, arrays = answers(content, [payload(static)], partition_id=1)
    [update] = reply.updates
    assert update.outcome == "trained"
    assert reply.sums == []
    assert unpack(arrays[update.payload], sent_layout(static, HALF)).keys() == static.tensors(HALF).keys()
    task = digits()
    assert update.present_classes == task.train.labels[task.shard(1).train].unique().tolist()
    assert update.report["memory_total_bytes"] > 0
    assert update.seconds > 0


def test_a_report_that_cannot_be_made_costs_no_work(monkeypatch):
    def no_space(config, traffic_bytes, left_bytes):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(client_module, "device_report", no_space)
    reply, arrays = answers(batch(work_order(1), shared_process=False), partition_id=1)
    assert (reply.updates[0].outcome, reply.updates[0].report, len(arrays)) == ("trained", None, 1)


def test_a_device_that_is_not_this_nodes_is_refused():
    content = batch(work_order(1), work_order(2), shared_process=False)
    reply, arrays = answers(content, partition_id=2)
    assert [u.outcome for u in reply.updates] == ["refused: this node carries device 2, not 1", "trained"]
    assert len(arrays) == 1


@pytest.mark.parametrize("number", [None, -1, "2", True, 2.0])
def test_a_node_of_hardware_must_know_its_device(number):
    node_config = {} if number is None else {"partition_id": number}
    with pytest.raises(ValueError, match=r"partition-id = .*: a whole number from 0"):
        answers(batch(work_order(1), shared_process=False), **node_config)


def test_on_hardware_what_the_machine_has_not_free_is_refused():
    order = work_order(1, predicted_memory_bytes=2**60)
    reply, arrays = answers(batch(order, shared_process=False), partition_id=1)
    assert reply.updates[0].outcome.startswith(f"refused: training needs about {2**60} bytes, this device has free")
    assert arrays == []
    assert answers(batch(order))[0].updates[0].outcome == "trained"  # in a simulation it is the fleet that says


def test_one_devices_trouble_leaves_the_others_alone(monkeypatch):
    expected, sums = answers(batch(work_order(0), work_order(3)))
    good = client_module.train

    def train(order, *arguments, **options):
        if order.device == 1:
            raise ZeroDivisionError("no luck")
        return good(order, *arguments, **options)

    monkeypatch.setattr(client_module, "train", train)
    orders = [
        work_order(0),
        work_order(1),
        work_order(2, memory_bytes=5),
        work_order(2, architecture={"widths": [99, 8, 60, 42]}),
        work_order(2, digest="0" * 16),
        work_order(2, payload=4),
        work_order(77),
        work_order(3),
    ]
    reply, arrays = answers(batch(*orders))
    words = [update.outcome for update in reply.updates]
    assert words[0] == words[7] == "trained"
    assert words[1] == "failed: ZeroDivisionError: no luck"
    assert words[2] == "refused: training needs about 1000000 bytes, the budget is 5 bytes"
    assert "width of conv1 must be 1 to 6, not 99" in words[3]
    assert words[4].startswith("refused: device 2: server and device disagree about the tensors")
    assert words[5] == "refused: device 2: points to array 4, but the message carries 1"
    assert words[6] == "failed: IndexError: device 77 is not one of 0 to 3"
    assert reply.sums == expected.sums
    assert arrays == sums


def test_a_model_that_diverges_is_refused_and_left_out_of_the_sum(monkeypatch):
    good = client_module.train

    def train(order, *arguments, **options):
        trained = good(order, *arguments, **options)
        if order.device == 1:
            trained.returned["head.fc1.bias"] = torch.full_like(trained.returned["head.fc1.bias"], float("nan"))
        return trained

    monkeypatch.setattr(client_module, "train", train)
    reply, arrays = answers(batch(work_order(0), work_order(1)))
    assert reply.updates[1].outcome.startswith("refused: weights must be finite")
    assert [header.orders for header in reply.sums] == [[0]]
    assert arrays == answers(batch(work_order(0)))[1]
    alone, nothing = answers(batch(work_order(1)))
    assert (alone.sums, nothing) == ([], [])


def test_every_device_that_fails_still_answers():
    reply, arrays = answers(batch(work_order(0, memory_bytes=1), work_order(1, memory_bytes=1)))
    assert [update.device for update in reply.updates] == [0, 1]
    assert (reply.sums, arrays) == ([], [])


# Evaluation


def scores_of(orders, arrays, **changes):
    values = {"run": "a run", "round": 1, "task": SPEC.to_json(), "family": LENET.spec(), "batch_size": 64}
    content = EvaluationBatch(**values | {"shared_process": True, "orders": orders} | changes)
    reply = app(message(content, arrays, "evaluate"), context())
    return from_records(EvaluationReply, reply.content)[0].scores


def evaluation(device, data, **changes):
    values = {"architecture": HALF.to_json(), "payload": 0, "digest": LAYOUT.digest, "data": data}
    return EvaluationOrder(device=device, **values | changes)


def test_models_are_scored_on_the_shard_or_on_the_test_set():
    task = digits()
    model = LENET.build(HALF)
    model.load_state_dict(cut(LENET, HALF))
    shard = task.shard(2).test
    for data, inputs, labels in (
        ("test set", task.test.inputs, task.test.labels),
        ("shard", task.train.inputs[shard], task.train.labels[shard]),
    ):
        correct, loss, examples = score(model, task, inputs, labels, batch_size=64, device=torch.device("cpu"))
        [found] = scores_of([evaluation(2, data)], [payload()])
        assert (found.correct, found.examples, found.error) == (correct, examples, None)
        assert found.loss_sum == pytest.approx(loss)


def test_a_model_that_cannot_be_scored_is_told_and_the_others_are_scored(tmp_path):
    orders = [
        evaluation(0, "test set", payload=None),
        evaluation(1, "test set", digest="0" * 16),
        evaluation(2, "test set", payload=3),
        evaluation(3, "test set"),
    ]
    found = scores_of(orders, [payload()], state_dir=str(tmp_path))
    assert [s.error is None for s in found] == [False, False, False, True]
    assert "device 0 keeps no model" in found[0].error
    assert "disagree about the tensors" in found[1].error
    assert "points to array 3" in found[2].error


# Queries, and what a client loads


def test_a_query_is_answered_with_the_device_and_its_report():
    question = message(EvaluationReply(run="", round=0, scores=[]), [], "query")
    answer, _ = from_records(NodeReport, app(question, context(partition_id=5)).content)
    assert answer.device == 5
    assert 0 < answer.report["memory_available_bytes"] <= answer.report["memory_total_bytes"]


def test_a_client_does_not_load_what_only_servers_need():
    """Devices are small: what a client imports at its start is counted in its memory and in its seconds."""
    heavy = ["torchvision", "torch_geometric", "ray", "matplotlib", "plotly", "pandas", "datasets", "sklearn"]
    ours = ["strategies", "server_app", "flwr_datasets", "tensorboard", "hypothesis"]
    flower = ["flwr", "grpc"]  # a node's own process and its messenger have them; the worker need not
    code = f"import client_app.work, sys; print([m for m in {heavy + ours + flower} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("teacher", [9, 1, 2], ids=["not in the message", "of another device", "still to come"])
def test_only_an_order_that_the_device_has_done_can_teach(teacher):
    first, student, later = work_order(1), work_order(0, order=5, teacher=teacher), work_order(0, order=2)
    reply, _ = answers(batch(first, student, later))
    outcomes = [update.outcome for update in reply.updates]
    assert outcomes[::2] == ["trained", "trained"]
    assert outcomes[1].startswith(f"refused: device 0: order 5 is to be taught by order {teacher}")
    assert [update.order for update in reply.updates] == [1, 5, 2]


def test_a_messenger_does_not_load_what_only_the_worker_needs():
    ours = ["torch", "pydantic", "messages.orders", "client_app.work"]
    code = f"import client_app.app, sys; print([m for m in {ours} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
