import subprocess
import sys

import pytest
import torch

from tests.client_app.work_orders import (
    LENET,
    SPEC,
    Apart,
    answers,
    batch,
    context,
    cut,
    digits,
    message,
    payload,
    report_query,
    weights_of,
    work_order,
)
from tests.programs import run_python
from wildflower.client_app import training_message
from wildflower.client_app import work as client_module
from wildflower.client_app.app import app
from wildflower.messages.orders import (
    EvaluationBatch,
    EvaluationOrder,
    EvaluationReply,
    Merge,
    NodeReport,
    StepReference,
)
from wildflower.messages.packing import int64_vector, unpack
from wildflower.messages.sums import SCALE, UNIT, split
from wildflower.messages.tensor_sets import TensorSet, digest
from wildflower.messages.wire import from_records
from wildflower.models.lenet import LeNet5
from wildflower.strategies.local import TrainingAlone
from wildflower.strategies.method import Answer, Training
from wildflower.strategies.static_norm import MaskedTraining
from wildflower.tasks.scoring import score

HALF = LENET.width(0.5)
TENSORS = weights_of(LENET, HALF)
LAYOUT = TENSORS.layout


def own_weights(device, **changes):
    """What a device returns by itself."""
    reply, arrays = answers(batch(work_order(device, local=Apart()), **changes))
    assert reply.updates[0].outcome == "trained"
    return unpack(arrays[reply.updates[0].payloads["weights"]], LAYOUT), reply.updates[0]


def test_a_nodes_sum_is_the_weighted_sum_of_its_devices():
    parts = [own_weights(device) for device in (0, 2)]
    reply, arrays = answers(batch(work_order(0), work_order(2)))
    [header] = reply.sums
    assert (header.orders, header.tensor_set, header.class_weight) == ([0, 2], "weights", None)
    assert header.weight == sum(update.examples for _, update in parts) == 72
    total = split(int64_vector(arrays[header.payload], LAYOUT.numel, "sum").double() / SCALE, LAYOUT)
    for name, value in total.items():
        mean = sum(weights[name].double() * update.examples for weights, update in parts) / header.weight
        assert torch.allclose(value / header.weight, mean, rtol=0, atol=1e-9)
    assert [(u.outcome, u.payloads, u.report) for u in reply.updates] == [("trained", {}, None)] * 2


def test_groups_are_summed_apart():
    other = work_order(1, width=1.0, group=1, payloads={"weights": 1})
    reply, arrays = answers(batch(work_order(0), other, work_order(2)), [payload(), payload(width=1.0)])
    assert [(header.group, header.orders) for header in reply.sums] == [(0, [0, 2]), (1, [1])]
    whole = weights_of(LENET, LENET.full()).layout
    assert [len(arrays[header.payload]) for header in reply.sums] == [8 * LAYOUT.numel, 8 * whole.numel]


class Halves(Training):
    """Two tensor sets that are added up, by examples and uniformly, and a third one that is not."""

    def returned(self, family, architecture):
        tensors = family.tensors(architecture)
        return {
            "blocks": TensorSet.of({n: t for n, t in tensors.items() if n.startswith("block")}, Merge()),
            "head": TensorSet.of({n: t for n, t in tensors.items() if "fc1" in n}, Merge(weighting="uniform")),
            "biases": TensorSet.of({n: t for n, t in tensors.items() if n.endswith("bias")}),
        }

    def facts(self, family):
        return {"steps": 1}

    def train(self, context):
        answer = super().train(context)
        weights = answer.tensor_sets["weights"]
        return Answer(answer.model, dict.fromkeys(self.returned(LENET, HALF), weights), answer.loss, {"steps": [4.0]})


def test_every_tensor_set_has_a_sum_of_its_own_or_travels_by_itself():
    parts = [own_weights(device) for device in (0, 2)]
    reply, arrays = answers(batch(work_order(0, local=Halves()), work_order(2, local=Halves())))
    sums = {header.tensor_set: header for header in reply.sums}
    assert sums.keys() == {"blocks", "head"}
    assert [u.payloads.keys() for u in reply.updates] == [{"biases"}] * 2
    assert [u.facts for u in reply.updates] == [{"steps": [4.0]}] * 2
    assert (sums["blocks"].weight, sums["head"].weight) == (72, 2 * UNIT)
    returned = Halves().returned(LENET, HALF)
    for name, header in sums.items():
        layout = returned[name].layout
        total = split(int64_vector(arrays[header.payload], layout.numel, "sum").double() / SCALE, layout)
        for tensor, value in total.items():
            mean = sum(weights[tensor].double() for weights, _ in parts) / 2  # 36 examples each
            assert torch.allclose(value / header.weight, mean, rtol=0, atol=1e-9)
    for update, (weights, _) in zip(reply.updates, parts, strict=True):
        biases = unpack(arrays[update.payloads["biases"]], returned["biases"].layout)
        assert all(torch.equal(weights[tensor], value) for tensor, value in biases.items())


def test_a_device_whose_second_tensor_set_cannot_be_added_is_in_no_sum(monkeypatch):
    """All tensor sets of a device go into sums, or none."""
    expected, sums = answers(batch(work_order(0, local=Halves())))
    good = Halves.train

    def train(local, context):
        answer = good(local, context)
        if context.order.device == 2:
            bad = {n: v.clone().fill_(float("nan")) if "fc1" in n else v for n, v in answer.tensor_sets["head"].items()}
            answer.tensor_sets["head"] = bad
        return answer

    monkeypatch.setattr(Halves, "train", train)
    reply, arrays = answers(batch(work_order(0, local=Halves()), work_order(2, local=Halves())))
    assert reply.updates[1].outcome.startswith("refused: weights must be finite")
    assert reply.sums == expected.sums
    assert arrays == sums


def test_absent_classes_weigh_nothing_in_the_sum():
    static = LeNet5(input_shape=(1, 8, 8), norm="static", scaler=True)
    orders = [work_order(d, static, local=MaskedTraining(weighting="uniform")) for d in range(4)]
    reply, _ = answers(batch(*orders, family=static), [payload(static)])
    task = digits()
    held = [set(task.train.labels[task.shard(d).train].tolist()) for d in range(4)]
    [header] = reply.sums
    assert header.weight == 4 * 1024
    assert header.class_weight == [1024 * sum(label in classes for classes in held) for label in range(10)]
    assert min(header.class_weight) < 4096


def test_on_hardware_a_device_sends_its_weights_its_classes_and_its_report():
    static = LeNet5(input_shape=(1, 8, 8), norm="static", scaler=True)
    content = batch(work_order(1, static, local=MaskedTraining()), family=static, shared_process=False)
    reply, arrays = answers(content, [payload(static)], partition_id=1)
    [update] = reply.updates
    assert update.outcome == "trained"
    assert reply.sums == []
    assert (
        unpack(arrays[update.payloads["weights"]], weights_of(static, HALF).layout).keys()
        == static.tensors(HALF).keys()
    )
    task = digits()
    assert update.present_classes == task.train.labels[task.shard(1).train].unique().tolist()
    assert update.report["memory_total_bytes"] > 0
    assert update.seconds > 0


def test_a_report_that_cannot_be_made_costs_no_work(monkeypatch):
    def no_space(config, traffic_bytes, left_bytes):
        raise OSError(28, "No space left on device")

    for module in (client_module, training_message):
        monkeypatch.setattr(module, "device_report", no_space)
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
    good = Training.train

    def train(local, context):
        if context.order.device == 1:
            raise ZeroDivisionError("no luck")
        return good(local, context)

    monkeypatch.setattr(Training, "train", train)
    orders = [
        work_order(0),
        work_order(1),
        work_order(2, memory_bytes=5),
        work_order(2, architecture={"widths": [99, 8, 60, 42]}),
        work_order(2, digest="0" * 16),
        work_order(2, payloads={"weights": 4}),
        work_order(77),
        work_order(2, payloads={"control": 0}),
        work_order(2).model_copy(update={"client_step": StepReference(name="wildflower.strategies.fedprox:NoSuch")}),
        work_order(3),
    ]
    reply, arrays = answers(batch(*orders))
    words = [update.outcome for update in reply.updates]
    assert words[0] == words[9] == "trained"
    assert words[1] == "failed: ZeroDivisionError: no luck"
    assert words[2] == "refused: training needs about 1000000 bytes, the budget is 5 bytes"
    assert "width of conv1 must be 1 to 6, not 99" in words[3]
    assert words[4].startswith(
        "refused: device 2: server and device disagree about the tensor sets of wildflower.strategies.training_steps:T"
    )
    assert words[5] == "refused: device 2: points to array 4, but the message carries 1"
    assert words[6] == "failed: IndexError: device 77 is not one of 0 to 3"
    assert words[7] == "refused: device 2: tensor sets ['control'] came, not ['weights']"
    assert words[8].startswith(
        "refused: this device cannot train as it is asked to: wildflower.strategies.fedprox has no NoSuch"
    )
    assert reply.sums == expected.sums
    assert arrays == sums


def test_a_model_that_diverges_is_refused_and_left_out_of_the_sum(monkeypatch):
    good = Training.train

    def train(local, context):
        answer = good(local, context)
        if context.order.device == 1:
            answer.tensor_sets["weights"]["head.fc1.bias"].fill_(float("nan"))
        return answer

    monkeypatch.setattr(Training, "train", train)
    reply, arrays = answers(batch(work_order(0), work_order(1)))
    assert reply.updates[1].outcome.startswith("refused: weights must be finite")
    assert [header.orders for header in reply.sums] == [[0]]
    assert arrays == answers(batch(work_order(0)))[1]
    alone, nothing = answers(batch(work_order(1)))
    assert (alone.sums, nothing) == ([], [])


class KeepsAndGrows(Training):
    """Keeps its weights, and returns finite ones that are too large for a sum."""

    def train(self, context):
        context.keep("own", context.received["weights"])
        return Answer(None, {"weights": {name: value + 1e30 for name, value in context.received["weights"].items()}})


@pytest.mark.parametrize("simulated", [True, False])
def test_of_an_update_that_no_sum_takes_nothing_is_kept(simulated, tmp_path):
    order = work_order(0, local=KeepsAndGrows())
    content = batch(order, state_dir=str(tmp_path) if simulated else "", shared_process=simulated)
    [update] = answers(content, partition_id=0, state_dir=str(tmp_path))[0].updates
    assert update.outcome.startswith("refused: weights must be finite and small enough to add exactly")
    assert list(tmp_path.rglob("*.safetensors")) == []


class Mixed(Training):
    """Its head is added up, and all else travels by itself."""

    def returned(self, family, architecture):
        tensors = family.tensors(architecture)
        return {
            "head": TensorSet.of({n: t for n, t in tensors.items() if n.startswith("head")}, Merge()),
            "blocks": TensorSet.of({n: t for n, t in tensors.items() if n.startswith("block")}),
        }

    def train(self, context):
        answer = super().train(context)
        weights = answer.tensor_sets["weights"]
        if context.order.device == 1:
            weights["block1.conv.bias"].fill_(float("inf"))
        return Answer(answer.model, {"head": weights, "blocks": weights}, answer.loss)


def test_a_device_with_a_tensor_set_that_the_server_would_refuse_is_in_no_sum():
    reply, arrays = answers(batch(work_order(0, local=Mixed()), work_order(1, local=Mixed())))
    outcome = "refused: device 1: tensor 'block1.conv.bias' of 'blocks' holds values that are not finite"
    assert [update.outcome for update in reply.updates] == ["trained", outcome]
    assert [header.orders for header in reply.sums] == [[0]]
    assert len(arrays) == 2


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


def evaluation(device, data, local=Training(), **changes):
    sent, returned = local.sent(LENET, HALF), local.returned(LENET, HALF)
    values = {
        "architecture": HALF.to_json(),
        "payloads": dict.fromkeys(sent, 0),
        "digest": digest(sent, returned),
        "client_step": local.reference(),
        "data": data,
    }
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
        [correct], loss, examples, _ = score(model, task, inputs, labels, batch_size=64, device=torch.device("cpu"))
        [found] = scores_of([evaluation(2, data)], [payload()])
        assert (found.sums, found.examples, found.error) == ([correct], examples, None)
        assert found.loss_sum == pytest.approx(loss)


def test_a_model_that_cannot_be_scored_is_told_and_the_others_are_scored(tmp_path):
    orders = [
        evaluation(0, "test set", TrainingAlone()),
        evaluation(1, "test set", digest="0" * 16),
        evaluation(2, "test set", payloads={"weights": 3}),
        evaluation(3, "test set"),
    ]
    found = scores_of(orders, [payload()], state_dir=str(tmp_path))
    assert [s.error is None for s in found] == [False, False, False, True]
    assert "this device keeps no model of Architecture(" in found[0].error
    assert "disagree about the tensor sets" in found[1].error
    assert "points to array 3" in found[2].error


# Queries, and what a client loads


def test_a_query_is_answered_with_the_device_and_its_report():
    answer, _ = from_records(NodeReport, app(report_query(), context(partition_id=5)).content)
    assert answer.device == 5
    assert 0 < answer.report["memory_available_bytes"] <= answer.report["memory_total_bytes"]


@pytest.mark.thorough
def test_a_client_does_not_load_what_only_servers_need():
    """Devices are small: what a client imports at its start is counted in its memory and in its seconds."""
    heavy = [
        "torchvision",
        "torch_geometric",
        "transformers",
        "seqeval",
        "ray",
        "matplotlib",
        "plotly",
        "pandas",
        "datasets",
        "sklearn",
    ]
    ours = ["rounds", "server_app", "tensorboard", "hypothesis"]
    flower = ["flwr", "grpc"]  # a node's own process and its messenger have them; the worker need not
    code = f"import wildflower.client_app.work, sys; print([m for m in {heavy + ours + flower} if m in sys.modules])"
    done = run_python("-c", code)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("after", [9, 1, 2], ids=["not in the message", "of another device", "still to come"])
def test_only_an_order_that_the_device_has_done_can_be_read_by_another(after):
    first, student, later = work_order(1), work_order(0, order=5, after=after), work_order(0, order=2)
    reply, _ = answers(batch(first, student, later))
    outcomes = [update.outcome for update in reply.updates]
    assert outcomes[::2] == ["trained", "trained"]
    assert outcomes[1].startswith(f"refused: device 0: order 5 reads the model of order {after}, which is none that")
    assert [update.order for update in reply.updates] == [1, 5, 2]


class Reads(Training):
    """Says how large the model is that its device trained before."""

    def facts(self, family):
        return {"read": 1}

    def train(self, context):
        assert context.earlier is not None
        bias = context.earlier.get_parameter("head.fc1.bias")
        return Answer(tensor_sets={"weights": context.received["weights"]}, facts={"read": [float(len(bias))]})


def test_an_order_reads_the_model_that_it_names():
    first = work_order(0, width=1.0, group=1, payloads={"weights": 1})
    second, third = work_order(0, order=1), work_order(0, order=2, local=Reads(), after=0)
    reply, _ = answers(batch(first, second, third), [payload(), payload(width=1.0)])
    assert [update.outcome for update in reply.updates] == ["trained"] * 3
    assert reply.updates[2].facts == {"read": [120.0]}


@pytest.mark.thorough
def test_a_messenger_does_not_load_what_only_the_worker_needs():
    ours = ["torch", "pydantic", "wildflower.messages.orders", "wildflower.client_app.work"]
    code = f"import wildflower.client_app.app, sys; print([m for m in {ours} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
