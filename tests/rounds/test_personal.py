"""Personal evaluation: every device trains and scores, on its own examples, the model that it would be given now."""

import math

import pytest
import torch

from tests.small_run import METHODS, by_method, connected_grid, same_bits, simulated_grid, small_config, started
from wildflower.client_app import evaluation
from wildflower.messages.orders import EvaluationBatch, EvaluationReply, LocalTraining
from wildflower.messages.packing import Layout, unpack
from wildflower.messages.wire import from_records, to_records
from wildflower.models.architecture import Architecture
from wildflower.server_app.config import ConfigError
from wildflower.strategies.method import client_step_of
from wildflower.strategies.static_norm import MaskedTraining
from wildflower.tasks.scoring import score
from wildflower.tasks.task import TaskSpec, load_task

PERSONAL = {"personal.every": 1, "test-fraction": 0.25, "evaluate-every": 4}
CPU = torch.device("cpu")


def a_round(folder, method="all-large", grid=None, number=1, **changes):
    """The engine, its grid and the last record after some rounds with personal evaluation."""
    folder.mkdir(exist_ok=True)
    engine, scorer = started(small_config(folder, **METHODS[method] | PERSONAL | changes))
    grid = grid or simulated_grid(2)
    results = [engine.run_round(grid, n, scorer) for n in range(1, number + 1)]
    return engine, grid, results[-1].record


def asked(grid):
    return [from_records(EvaluationBatch, m.content) for m in grid.sent if m.metadata.message_type == "evaluate"]


def layout_of(engine, architecture):
    """The layout of the weights that devices are sent."""
    return Layout.of(engine.method.family.tensors(architecture))


def changed(change):
    """A tamper that changes the scores of node 1."""

    def tamper(message):
        if message.metadata.message_type == "evaluate" and message.metadata.src_node_id == 1:
            reply, _ = from_records(EvaluationReply, message.content)
            message.content = to_records(change(reply))
        return message

    return tamper


# FedNAS has FedAvg's way, and its search network takes long.
@by_method(method for method in METHODS if method != "fednas")
def test_every_method_is_scored_on_all_devices_and_learns_the_same_as_without(method, tmp_path):
    engine, grid, record = a_round(tmp_path / "with", method, number=2)
    plain, _, without = a_round(tmp_path / "without", method, number=2, **{"personal.every": 0})
    assert same_bits(engine.state().tensors, plain.state().tensors)
    assert engine.state().values == plain.state().values
    assert without["personal_score"] is None
    assert engine.population.now_seconds == plain.population.now_seconds
    for key in ("training_bytes_down", "training_bytes_up", "devices_sampled", "score", "score_by_tier"):
        assert record[key] == without[key]
    assert record["scoring_bytes_down"] - without["scoring_bytes_down"] == sum(
        sum(len(arrays[place]) for place in order.payloads.values())
        for batch, arrays in asked(grid)
        if batch.round == 2 and batch.training is not None
        for order in batch.orders
    )
    devices = {order.device for batch, _ in asked(grid) if batch.training is not None for order in batch.orders}
    expected = {0, 1} if method == "exclusive" else set(range(6))
    assert devices == expected
    assert (record["personal_devices"], record["personal_failed"]) == (len(expected), 0)
    assert 0 <= record["personal_score"] <= 1
    by_tier = list(record["personal_score_by_tier"].values())  # of two devices each
    assert record["personal_score"] == pytest.approx(sum(by_tier) / len(by_tier))


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["heterofl", "local", "hypemefed"])
def test_neither_the_number_of_nodes_nor_the_order_of_replies_matters(method, tmp_path):
    found = []
    for nodes in (1, 3):
        grid = simulated_grid(nodes)
        grid.turn = lambda messages: messages[::-1]
        record = a_round(tmp_path / f"{nodes}", method, grid, number=2, workers=nodes)[2]
        found.append([record[key] for key in record if key.startswith("personal")])
    assert found[0] == found[1]


def test_a_device_is_scored_after_its_own_epochs_on_its_own_test_shard(tmp_path):
    """Done again here by hand: plain SGD from the weights that were sent, over the device's training examples."""
    keys = {"personal.epochs": 2, "momentum": 0.0, "weight-decay": 0.0, "batch-size": 1000}
    keys |= {"local-epochs": 7, "local-steps": 3, "learning-rate": 0.1}
    engine, grid, record = a_round(tmp_path, **keys)
    task = load_task(TaskSpec.from_json(asked(grid)[0][0].task))
    architecture = engine.method.family.full()
    accuracies = {}
    for batch, arrays in asked(grid):
        assert (batch.training.epochs, batch.training.steps, batch.training.learning_rate) == (2, 0, 0.1)
        for order in batch.orders:
            weights = unpack(arrays[order.payloads["weights"]], layout_of(engine, architecture))
            assert same_bits(weights, engine.method.weights)  # the new ones
            model = engine.method.family.build(architecture)
            model.load_state_dict(weights)
            shard = task.shard(order.device)
            model.train()
            for _ in range(2):
                loss = torch.nn.functional.cross_entropy(
                    model(task.prepare(task.train.inputs[shard.train], augment=None)), task.train.labels[shard.train]
                )
                model.zero_grad()
                loss.backward()
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.1 * p.grad
            inputs, labels = task.train.inputs[shard.test], task.train.labels[shard.test]
            [correct], _, n, _ = score(model, task, inputs, labels, batch_size=100, device=CPU)
            accuracies[order.device] = correct / n
            assert n == 6
    assert len(accuracies) == 6
    assert record["personal_score"] == pytest.approx(sum(accuracies.values()) / 6)
    tiers = {"whole": (0, 1), "half": (2, 3), "quarter": (4, 5)}
    assert record["personal_score_by_tier"] == pytest.approx(
        {tier: (accuracies[a] + accuracies[b]) / 2 for tier, (a, b) in tiers.items()}
    )


def test_without_epochs_the_model_is_scored_as_it_is_given(tmp_path, monkeypatch):
    def no_training(*arguments, **more):
        raise AssertionError("nothing is trained")

    engine, grid, _ = a_round(tmp_path, **{"personal.epochs": 0, "personal.every": 4})
    monkeypatch.setattr(evaluation, "do_order", no_training)
    found = engine.evaluation.evaluate_personally(grid)
    task = load_task(TaskSpec.from_json(asked(grid)[0][0].task))
    model = engine.method.family.build(engine.method.family.full())
    model.load_state_dict(engine.method.weights)
    accuracies = []
    for device in range(6):
        shard = task.shard(device).test
        inputs, labels = task.train.inputs[shard], task.train.labels[shard]
        [correct], _, n, _ = score(model, task, inputs, labels, batch_size=100, device=CPU)
        accuracies.append(correct / n)
    assert (found.devices, found.failed) == (6, 0)
    assert found.score == pytest.approx(sum(accuracies) / 6)


def test_weights_travel_once_per_architecture(tmp_path):
    engine, grid, _ = a_round(tmp_path, "heterofl", simulated_grid(1), workers=1)
    [(batch, arrays)] = asked(grid)
    assert len(batch.orders) == 6
    assert len(arrays) == 3
    assert {order.payloads["weights"] for order in batch.orders} == {0, 1, 2}
    for order in batch.orders:
        architecture = Architecture.from_json(order.architecture)
        sent = unpack(arrays[order.payloads["weights"]], layout_of(engine, architecture))
        [model] = engine.method.models([architecture]).values()
        assert same_bits(sent, model.weights)
        assert isinstance(client_step_of(order.client_step), MaskedTraining)


def test_static_norms_are_scored_with_the_devices_own_statistics(tmp_path):
    """So that a score does not depend on which test examples come together."""
    _, grid, _ = a_round(tmp_path, "heterofl")
    [(one, arrays), *_] = asked(grid)
    found = []
    for batch_size in (256, 1):
        again = one.model_copy(update={"batch_size": batch_size})
        message = grid.sent[-1]
        message.content = to_records(again, arrays)
        reply, _ = from_records(EvaluationReply, grid.app(message, grid.contexts[1]).content)
        found.append([(s.device, s.sums, s.error) for s in reply.scores])
    assert found[0] == found[1]
    assert all(error is None for _, _, error in found[0])


def test_devices_keep_nothing_of_it(tmp_path):
    """A device that trains alone goes on with the model of its last round."""
    engine, grid, _ = a_round(tmp_path, "local", **{"devices-per-round": 3, "personal.every": 4})
    folder = tmp_path / "runs" / "small" / "device-state"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    found = engine.evaluation.evaluate_personally(grid)
    assert found.devices == 6  # also those that have no model yet: they begin with one of their own
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert len(before) == 3
    assert all(not m.content.array_records for m in grid.sent)


@pytest.mark.thorough
@pytest.mark.parametrize("batches", [{"batch-size": 5}, {"batch-size": 16, "micro-batch-size": 5}], ids=str)
@pytest.mark.parametrize("method", ["heterofl", "local", "recipfl"])
def test_devices_score_as_many_examples_at_a_time_as_they_train(method, batches, tmp_path):
    """So that the memory which training needs is enough."""
    _, grid, _ = a_round(tmp_path, method, **batches, **{"evaluate-every": 1})
    assert {batch.batch_size for batch, _ in asked(grid)} == {5}
    assert all(order.predicted_memory_bytes > 0 for batch, _ in asked(grid) for order in batch.orders)


def test_on_hardware_every_connected_device_takes_part(tmp_path):
    keys = {"fleet": "", "devices": 4, "devices-per-round": 2, "aggregation.over-selection": 0.0}
    engine, grid, record = a_round(tmp_path, "heterofl", connected_grid(4, tmp_path), **keys)
    assert record["personal_devices"] == 4
    batches = [batch for batch, _ in asked(grid) if batch.training is not None]
    assert [len(batch.orders) for batch in batches] == [1] * 4
    assert sum(order.memory_bytes > 0 for batch in batches for order in batch.orders) == 4
    del grid.contexts[2]
    grid.broken = {3: 5}
    found = engine.evaluation.evaluate_personally(grid)
    assert (found.devices, found.failed) == (2, 1)


@pytest.mark.parametrize(
    ("every", "first", "rounds", "done"),
    [(0, 1, 10, []), (1, 9, 10, [9, 10]), (3, 1, 10, [3, 6, 9, 10]), (4, 6, 10, [8, 10]), (20, 1, 10, [10])],
)
def test_which_rounds(every, first, rounds, done, tmp_path):
    keys = {"personal.every": every, "personal.first-round": first, "rounds": rounds}
    engine, _ = started(small_config(tmp_path, **PERSONAL | keys))
    assert [n for n in range(1, rounds + 1) if engine.settings.personal_in(n)] == done


def of_scores(**values):
    return lambda reply: reply.model_copy(update={"scores": [s.model_copy(update=values) for s in reply.scores]})


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (of_scores(sums=[7.0]), "7 correct answers to 6 examples cannot be right"),
        (of_scores(examples=0, sums=[0.0]), "of 0 examples cannot be right"),
        (of_scores(examples=7), "of 7 examples cannot be right, the device has 6"),
        (of_scores(sums=[math.nan]), "a sum of accuracy is not finite"),
        (of_scores(sums=[3.5]), "a count is not a whole number"),
        (of_scores(sums=[-1.0]), "a count is not a whole number"),
        (of_scores(sums=[3.0, 3.0]), "2 sums are not the 1 of accuracy"),
        (of_scores(sums=[0.0] * 10**5), "the reply is refused"),
        (of_scores(beside=[[1.0]]), "scores of 1 networks beside the model, asked were 0"),
        (of_scores(loss_sum=math.nan), "the loss is not finite"),
        (of_scores(error="no luck"), "no luck"),
        (of_scores(error="two\nlines \x1b[2J\u202e of a device"), "two lines  [2J  of a device"),
        (lambda reply: reply.model_copy(update={"scores": []}), "says nothing of this device"),
        (lambda reply: reply.model_copy(update={"round": 9}), "it is of round 9"),
        (lambda reply: reply.model_copy(update={"scores": reply.scores * 2}), "it is of devices"),
        (
            lambda reply: reply.model_copy(
                update={"scores": [*reply.scores, reply.scores[0].model_copy(update={"device": 99})]}
            ),
            "it is of devices",
        ),
    ],
    ids=[
        "more than all",
        "no examples",
        "more than its shard",
        "not a number",
        "no count",
        "below none",
        "too many sums",
        "far too many sums",
        "a network too many",
        "nan",
        "error",
        "an error that cannot be printed",
        "silence",
        "round",
        "twice",
        "never asked",
    ],
)
def test_what_cannot_be_true_is_refused_and_counted(change, words, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr("wildflower.rounds.scores.log.warning", lambda text, *values: told.append(text % values))
    grid = simulated_grid(2)
    grid.tamper = changed(change)
    record = a_round(tmp_path, grid=grid)[2]
    node_1 = sum(len(b.orders) for b, _ in asked(grid)) - record["personal_devices"]
    assert 0 < node_1 < 6
    assert record["personal_failed"] == node_1
    assert any(words in line for line in told)
    assert all(line.isprintable() for line in told)
    honest = a_round(tmp_path / "honest")[2]
    assert honest["personal_devices"] == 6


@pytest.mark.parametrize(
    ("beside", "words"),
    [
        ([], "scores of 0 networks beside the model, asked were 1"),
        ([[7.0]], "7 correct answers to 6 examples cannot be right"),
    ],
)
def test_a_score_of_a_second_network_that_cannot_be_true_is_refused(beside, words, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr("wildflower.rounds.scores.log.warning", lambda text, *values: told.append(text % values))
    grid = simulated_grid(2)
    grid.tamper = changed(of_scores(beside=beside))
    record = a_round(tmp_path, "rafl", grid=grid)[2]
    assert (record["personal_devices"], record["personal_failed"]) == (3, 3)
    assert any(words in line for line in told)


def test_a_node_that_dies_costs_its_devices_only(tmp_path):
    grid = simulated_grid(2)

    def die(messages):
        grid.broken = {1: 8} if messages[0].metadata.message_type == "evaluate" else {}
        return messages

    grid.seen = die
    record = a_round(tmp_path, grid=grid)[2]
    assert record["personal_devices"] == record["personal_failed"] == 3


def test_nobody_to_score_is_no_accuracy(tmp_path):
    grid = simulated_grid(2)

    def die(messages):
        grid.broken = {1: 8, 2: 8} if messages[0].metadata.message_type == "evaluate" else {}
        return messages

    grid.seen = die
    record = a_round(tmp_path, grid=grid)[2]
    assert (record["personal_score"], record["personal_score_by_tier"]) == (None, {})
    assert (record["personal_devices"], record["personal_failed"]) == (0, 6)


@pytest.mark.thorough
def test_devices_may_test_on_parts_of_the_test_set(tmp_path):
    keys = {"partition": "strong-and-weak", "strong.devices": 2, "examples-per-device": 0, "test-fraction": 0.0}
    _, grid, record = a_round(tmp_path, **keys)
    assert record["personal_devices"] == 6
    task = load_task(TaskSpec.from_json(asked(grid)[0][0].task))
    replies = [from_records(EvaluationReply, grid.app(m, grid.contexts[1]).content)[0] for m in grid.sent[-2:]]
    found = {s.device: s.examples for reply in replies for s in reply.scores}
    assert found == {device: len(task.own_test(device)[1]) for device in range(6)}
    assert min(found.values()) > 0


def test_personal_evaluation_needs_test_shards(tmp_path):
    with pytest.raises(ConfigError, match="no device has examples to be tested on; set test-fraction"):
        started(small_config(tmp_path, **PERSONAL | {"test-fraction": 0.0}))
    with pytest.raises(ConfigError, match=r"personal.first-round = 9: with rounds = 4"):
        small_config(tmp_path, **PERSONAL | {"personal.first-round": 9})


def test_a_training_of_no_epochs_is_none(tmp_path):
    engine, _ = started(small_config(tmp_path, **PERSONAL | {"personal.epochs": 0}))
    assert engine.settings.personal_training_in(1) is None
    trained = started(small_config(tmp_path, **PERSONAL | {"local-steps": 0, "local-epochs": 5}))[0].settings
    assert trained.personal_training_in(1) == trained.training_in(1).model_copy(update={"epochs": 1})
    assert isinstance(trained.personal_training_in(1), LocalTraining)
