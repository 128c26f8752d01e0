"""The round: over-selection, waves, weights on the wire, budgets, and the figures of the journal."""

import re
from dataclasses import replace

import pytest
from flwr.common.serde import message_to_proto

from tests.small_run import METHODS, FakeTime, connected_grid, same_bits, simulated_grid, small_config, started
from tests.strategies.by_hand import Devices, OneHidden, engine_of, no_scores, setup
from wildflower.messages.orders import Batch, Reply
from wildflower.messages.wire import from_records
from wildflower.rounds import requests
from wildflower.rounds.round_records import PARTS
from wildflower.strategies import contract_values
from wildflower.strategies.heterofl import HeteroFL, HeteroFLParams
from wildflower.strategies.method import Stopwatch


@pytest.mark.parametrize(("family", "width"), [("lenet5", 1.0), ("cnn3", 1.0), ("pfl-cnn", 0.5), ("resnet18", 0.25)])
def test_a_message_is_its_weights_and_at_most_one_percent_more(family, width, tmp_path):
    """Both ways, on hardware, as the bytes that Flower sends; what is around the weights does not grow with them."""
    config = small_config(
        tmp_path,
        **METHODS["all-small"],
        widths=width,
        family=family,
        fleet="",
        devices=1,
        devices_per_round=1,
        batch_size=2,
        examples_per_device=2,
    )
    engine, scorer = started(config)
    grid = connected_grid(1, tmp_path)
    sizes = []
    push = grid.push_messages

    def note(message):  # now: once worked on, a message's arrays are let go, and once absorbed, a reply's
        if message.metadata.message_type == "train":
            sizes.append(message_to_proto(message).ByteSize())
        return message

    grid.tamper = note
    grid.push_messages = lambda messages: push([note(message) for message in messages])
    result = engine.run_round(grid, 1, scorer)
    assert result.record["devices_replied"] == 1
    model = engine.method.family.build(engine.method.family.width(width))
    weights = 4 * sum(value.numel() for value in [*model.parameters(), *model.buffers()])
    assert len(sizes) == 2
    for nbytes in sizes:
        assert weights < nbytes <= weights + 3000
        if family == "resnet18":
            assert weights > 2**20
            assert nbytes <= 1.01 * weights
    assert result.record["training_bytes_down"] == result.record["training_bytes_up"] == weights


def test_on_hardware_a_device_answers_with_its_own_weights_and_report(tmp_path):
    engine, scorer = started(small_config(tmp_path, fleet="", devices=3, devices_per_round=3))
    grid = connected_grid(3, tmp_path)
    replies = []

    def note(reply):  # now: once absorbed, a reply's arrays are let go
        if reply.metadata.message_type == "train":
            replies.append(from_records(Reply, reply.content))
        return reply

    grid.tamper = note
    engine.run_round(grid, 1, scorer)
    orders = [from_records(Batch, m.content)[0] for m in grid.sent if m.metadata.message_type == "train"]
    assert [batch.shared_process for batch in orders] == [False] * 3
    assert all(m.metadata.ttl < 1e6 for m in grid.sent)
    assert len(replies) == 3
    for reply, arrays in replies:
        assert reply.sums == []
        [update] = reply.updates
        assert update.payloads == {"weights": 0}
        assert len(arrays) == 1
        assert update.report is not None
        assert update.measured_memory_bytes >= 0


def test_simulated_devices_are_added_up_on_their_node_and_shared_weights_travel_once(tmp_path):
    engine, scorer = started(small_config(tmp_path, strategy="fedavg", devices_per_round=6, workers=1))
    grid = simulated_grid(1)
    replies = []

    def note(reply):  # now: once absorbed, a reply's arrays are let go
        if reply.metadata.message_type == "train":
            replies.append(from_records(Reply, reply.content))
        return reply

    grid.tamper = note
    engine.run_round(grid, 1, scorer)
    [message] = grid.sent
    batch, arrays = from_records(Batch, message.content)
    assert [len(batch.orders), len(arrays)] == [6, 1]
    [(reply, sums)] = replies
    assert [len(reply.updates), len(reply.sums), len(sums)] == [6, 1, 1]


def test_a_round_of_many_weights_goes_out_in_waves(tmp_path, monkeypatch):
    expected, scorer = started(small_config(tmp_path))
    expected.run_round(simulated_grid(2), 1, scorer)
    monkeypatch.setattr(requests, "MESSAGE_BYTES", 1000)
    engine, _ = started(small_config(tmp_path))
    grid = simulated_grid(2)
    held = []
    grid.seen = lambda messages: held.append([m.metadata.dst_node_id for m in grid.waiting.values()]) or messages
    engine.run_round(grid, 1, scorer)
    assert len(grid.sent) > 2
    assert all(len(nodes) == len(set(nodes)) for nodes in held)  # never two batches of a node at once
    assert same_bits(expected.state().tensors, engine.state().tensors)


def test_over_selection_takes_the_first_and_does_not_wait_for_the_rest(tmp_path, monkeypatch):
    clock = FakeTime()
    monkeypatch.setattr("wildflower.rounds.exchange.time", clock)
    keys = {
        "fleet": "",
        "devices": 4,
        "devices-per-round": 2,
        "aggregation.over-selection": 1.0,
        "deadline-seconds": 60.0,
    }
    engine, scorer = started(small_config(tmp_path, **METHODS["all-large"] | keys))
    grid = connected_grid(4, tmp_path)
    grid.seen = lambda messages: [
        m for m in messages if m.metadata.message_type == "query" or m.metadata.dst_node_id in (2, 3)
    ]
    result = engine.run_round(grid, 1, scorer)
    assert {d["device"]: d["outcome"] for d in result.devices} == {0: "late", 1: "trained", 2: "trained", 3: "late"}
    assert clock.slept == []
    assert engine.population.busy == {1, 4}


def test_under_a_fleet_the_clock_says_who_comes_first(tmp_path):
    keys = {"devices-per-round": 3, "aggregation.over-selection": 1.0}
    engine, scorer = started(small_config(tmp_path, **METHODS["all-large"] | keys))
    result = engine.run_round(simulated_grid(2), 1, scorer)
    seconds = {d["device"]: d["simulated_seconds"] for d in result.devices}
    trained = {d["device"] for d in result.devices if d["outcome"] == "trained"}
    assert len(result.devices) == 6
    assert trained == set(sorted(seconds, key=lambda device: (seconds[device], device))[:3])
    assert result.record["simulated_seconds"] == max(seconds[device] for device in trained)
    assert result.record["devices_failed"] == 3


def test_under_a_fleet_who_misses_the_deadline_is_not_even_asked(tmp_path):
    free, scorer = started(small_config(tmp_path, **METHODS["all-large"] | {"devices-per-round": 6}))
    lines = free.run_round(simulated_grid(2), 1, scorer).devices
    deadline = sorted(d["simulated_seconds"] for d in lines)[3] * 1.0001  # two devices of a tier take equally long
    keys = {"devices-per-round": 6, "deadline-seconds": deadline}
    engine, _ = started(small_config(tmp_path, **METHODS["all-large"] | keys))
    grid = simulated_grid(2)
    result = engine.run_round(grid, 1, scorer)
    assert sorted(d["outcome"] for d in result.devices) == ["late"] * 2 + ["trained"] * 4
    assert sum(len(from_records(Batch, m.content)[0].orders) for m in grid.sent) == 4
    assert result.record["simulated_seconds"] == deadline  # the server waited until then


@pytest.mark.parametrize(("below", "outcomes"), [("skip", {0: 4, 1: 2}), ("smallest", {0: 4, 1: 2, 2: 2})])
def test_a_device_below_the_smallest_is_skipped_or_gets_the_smallest(below, outcomes, tmp_path):
    family = OneHidden()
    method = HeteroFL(replace(setup(tmp_path, family), widths=(1.0, 0.5), below_smallest=below), HeteroFLParams())
    devices = Devices(family, lambda order, w: w)
    result = engine_of(method, tmp_path).run_round(devices.grid, 1, no_scores)
    assert {device: order.architecture["widths"][0] for device, order in devices.orders.items()} == outcomes
    [last] = [d for d in result.devices if d["device"] == 2]
    assert last["outcome"] == (
        "trained" if below == "smallest" else "skipped: no architecture of this strategy fits the budget"
    )
    assert (last["architecture"] is None) == (below == "skip")


def test_a_skipped_device_is_named_once_with_what_it_lacks(tmp_path, caplog):
    family = OneHidden()
    method = HeteroFL(replace(setup(tmp_path, family), widths=(1.0, 0.5), below_smallest="skip"), HeteroFLParams())
    devices = Devices(family, lambda order, w: w)
    engine = engine_of(method, tmp_path)
    for number in (1, 2):
        engine.run_round(devices.grid, number, no_scores)
    told = [record.getMessage() for record in caplog.records if "is skipped" in record.getMessage()]
    assert len(told) == 1
    pattern = r"Round 1: device 2 is skipped, as no model of .* fits its budget: the smallest needs (.*) of memory.*, "
    match = re.match(pattern + r"it has (.*) of memory", told[0])
    assert match is not None
    needs, has = match.groups()
    assert needs != has, "both are below 10 kB"
    assert needs.endswith(" kB")


def test_a_device_without_a_link_is_skipped(tmp_path):
    (tmp_path / "deaf.toml").write_text(
        '[[group]]\nname = "deaf"\ncount = 3\nmemory = "1 GB"\nlink = "0 Mbit/s"\n'
        '[[group]]\nname = "linked"\ncount = 3\nmemory = "1 GB"\nlink = "8 Mbit/s"\n'
    )
    keys = {"fleet": str(tmp_path / "deaf.toml"), "devices-per-round": 6}
    for more, word in (({}, "late"), ({"budget.transfer-seconds": 60.0}, "skipped")):
        engine, scorer = started(small_config(tmp_path, **METHODS["heterofl"] | keys | more))
        result = engine.run_round(simulated_grid(2), 1, scorer)
        found = {d["device"]: d["outcome"].split(":")[0] for d in result.devices}
        assert found == {0: word, 1: word, 2: word, 3: "trained", 4: "trained", 5: "trained"}


def test_the_learning_rate_decays_after_each_decay_round(tmp_path):
    settings = setup(tmp_path, OneHidden(), decay_rounds=(2, 3), decay_factor=0.5).settings
    assert [settings.training_in(n).learning_rate for n in (1, 2, 3, 4, 5)] == pytest.approx(
        [0.1, 0.1, 0.05, 0.025, 0.025]
    )


def test_the_figures_of_a_round_are_those_of_its_devices(tmp_path):
    engine, scorer = started(small_config(tmp_path, evaluate_every=1))
    result = engine.run_round(simulated_grid(2), 1, scorer)
    record, devices = result.record, result.devices
    assert record["devices_sampled"] == record["devices_replied"] == len(devices) == 4
    assert record["training_bytes_down"] >= sum(d["download_bytes"] for d in devices)
    assert record["memory_utilisation"] == pytest.approx(1.0)  # every width fits its tier exactly
    assert record["distinct_architectures"] == len({str(d["architecture"]) for d in devices})
    assert set(record["score_by_tier"]) == {d["tier"] for d in devices}
    assert record["simulated_seconds"] == max(d["simulated_seconds"] for d in devices)
    assert all(d["loss"] > 0 and d["examples"] == 24 and d["seconds"] > 0 for d in devices)
    assert set(PARTS) <= record["server_seconds"].keys()
    assert all(record["server_seconds"][part] > 0 for part in PARTS)
    assert record["strategy"] == "heterofl"


def test_the_learning_rate_follows_a_cosine(tmp_path):
    settings = setup(tmp_path, OneHidden(), schedule="cosine", rounds=4).settings
    # (1 + cos(pi * 0/4)) / 2 = 1, (1 + cos(pi / 4)) / 2 = 0.853553, 1/2, 0.146447
    assert [settings.training_in(n).learning_rate for n in (1, 2, 3, 4)] == pytest.approx(
        [0.1, 0.0853553, 0.05, 0.0146447], abs=1e-6
    )


def test_no_second_is_noted_twice(monkeypatch):
    clock = FakeTime()
    monkeypatch.setattr(contract_values, "time", clock)
    stopwatch = Stopwatch()
    with stopwatch.timed("finish"):
        clock.sleep(1)
        with stopwatch.timed("distill"):
            clock.sleep(10)
        clock.sleep(2)
    assert stopwatch.seconds == {"finish": 3.0, "distill": 10.0}


@pytest.mark.parametrize("steps", [0, 1])
def test_the_time_and_the_figures_of_distillation_are_its_own(steps, tmp_path):
    keys = {"distillation.steps": steps, "distillation.batch-size": 2, "distillation.students": "with-smallest"}
    engine, scorer = started(small_config(tmp_path, **METHODS["heterofl"] | keys))
    record = engine.run_round(simulated_grid(), 1, scorer).record
    assert (record["server_seconds"].get("distill", 0.0) > 0) == (steps > 0)
    measured = {"distillation_steps_per_second", "distillation_mutual_information_nats"} if steps else set()
    assert record["metrics"].keys() == measured
    assert None not in record["metrics"].values()


@pytest.mark.parametrize(("per_round", "key", "asked"), [(2, 0, 30), (32, 0, 32), (32, 3, 3)])
def test_batch_norm_statistics_are_of_thirty_devices_or_of_as_many_as_a_round_has(
    per_round, key, asked, tmp_path, monkeypatch
):
    config = small_config(
        tmp_path,
        strategy="heterofl",
        fleet="five-memories",
        devices=40,
        devices_per_round=per_round,
        statistics__devices=key,
        statistics__examples=7,
        evaluate_every=1,
        evaluate_tiers=False,
        rounds=1,
        widths="0.0625",
        examples_per_device=2,
        family="cnn3",
    )
    engine, scorer = started(config)
    found = []

    def seen(*arguments, of=engine.evaluation._statistics):
        work, statistics = of(*arguments)
        found.append(len({a.device for a in work.assignments}))
        return work, statistics

    monkeypatch.setattr(engine.evaluation, "_statistics", seen)
    engine.run_round(simulated_grid(), 1, scorer)
    assert found == [asked]
    assert engine.settings.statistics_examples == config.statistics.examples == 7


def test_a_reply_lets_go_of_its_arrays_before_it_is_merged(tmp_path, monkeypatch):
    """So that a server does not hold what came and what was read of it while it adds that up."""
    engine, scorer = started(small_config(tmp_path, strategy="heterofl"))
    grid, replies, held = simulated_grid(), [], []
    grid.tamper = lambda message: replies.append(message) or message

    def merged(contribution, absorb=engine.method.absorb):
        held.append([reply.metadata.message_type for reply in replies if reply.content.array_records])
        absorb(contribution)

    monkeypatch.setattr(engine.method, "absorb", merged)
    engine.run_round(grid, 1, scorer)
    assert [reply for reply in replies if reply.metadata.message_type == "train"]
    assert held
    assert not any(held)


def test_orders_for_statistics_are_told_as_orders_for_scoring(tmp_path, caplog):
    engine, _ = started(small_config(tmp_path, **METHODS["heterofl"]))
    model = engine.evaluation._models(simulated_grid(2))[engine.method.scored_architecture]
    asked, _ = engine.evaluation._statistics([0, 1], 2, model)
    caplog.clear()
    asked.assignments[0].outcome = "refused: cat.png is broken"
    engine.sending.settle(asked)
    assert "1 of 2 work orders for scoring (statistics of batch norm) refused: cat.png is broken" in caplog.text
