"""Asynchronous rounds: who is absorbed when, with which weight, what a checkpoint holds, and real nodes."""

import pytest
import torch

from tests.small_run import (
    METHODS,
    FakeTime,
    by_method,
    connected_grid,
    same_bits,
    simulated_grid,
    small_config,
    started,
)
from tests.strategies.by_hand import CLASSIFIER_BIAS, FC_BIAS, Devices, OneHidden, engine_of, filled, no_scores, setup
from wildflower.devices.clock import Timing
from wildflower.rounds.buffered import FRESH, BufferedEngine, weight_of
from wildflower.rounds.flower_strategy import FlowerStrategy
from wildflower.server_app import checkpoint
from wildflower.server_app.checkpoint import Checkpoint
from wildflower.server_app.config import ConfigError, RunConfig
from wildflower.strategies.heterofl import HeteroFL, HeteroFLParams


def averages(name):
    config = RunConfig.from_run_config(METHODS[name])
    return config.method.traits(config.params).averages


# By hand: three devices that are as wide as 1, 1/2 and 1/4, and take 1, 2.5 and 4 seconds.

SECONDS = {0: 1.0, 1: 2.5, 2: 4.0}


def takes(engine, seconds):
    engine.population.timing = lambda device, **load: Timing(0.0, seconds[device], 0.0)


def by_hand(folder, buffer, change):
    """An engine whose devices return what they got plus `change` of the device; all weights begin as 0."""
    family = OneHidden()
    method = HeteroFL(setup(folder, family, buffer=buffer), HeteroFLParams())
    method.weights = filled(method.weights, 0.0)
    before = engine_of(method, folder)
    engine = BufferedEngine(method, before.population, before.hooks)
    takes(engine, SECONDS)

    def answer(order, received):
        return {name: tensor + change[order.device] for name, tensor in received.items()}

    engine.start()
    return engine, Devices(family, answer).grid


def absorbed(result):
    return [line["device"] for line in result.devices if line["outcome"] == "trained"]


def test_the_next_that_is_done_makes_the_next_model(tmp_path):
    """Device 0 is done at 1, 2, 3, 4, 5; device 1 at 2.5 and 5; device 2 at 4. Of two at once device 0 is first."""
    engine, grid = by_hand(tmp_path, 1, dict.fromkeys(range(3), 1.0))
    results = [engine.run_round(grid, number, no_scores) for number in range(1, 7)]
    assert [absorbed(result) for result in results] == [[0], [0], [1], [0], [0], [2]]
    assert [result.record["simulated_seconds"] for result in results] == [1.0, 2.0, 2.5, 3.0, 4.0, 4.0]
    assert [result.record["metrics"]["staleness_max"] for result in results] == [0, 0, 2, 1, 0, 5]
    assert [result.record["round"] for result in results] == [1, 2, 3, 4, 5, 6]
    assert len(engine.at_work) == 2


def test_a_stale_change_is_applied_to_the_model_of_now_with_less_weight(tmp_path):
    """Round 1 takes devices 0 and 1 at 2.5 s. Round 2 takes device 0, which began then, and at 4 s device 2 of round 1.

    Device 0 alone has channels 2 and 3, devices 0 and 1 channel 1, and all have channel 0 and the classifier's biases.
    """
    engine, grid = by_hand(tmp_path, 2, {0: 1.0, 1: 4.0, 2: 10.0})
    engine.run_round(grid, 1, no_scores)
    assert engine.method.weights[FC_BIAS].tolist() == pytest.approx([2.5, 2.5, 1.0, 1.0])
    result = engine.run_round(grid, 2, no_scores)
    assert absorbed(result) == [0, 2]
    assert result.record["metrics"] == {"staleness_mean": 0.5, "staleness_max": 1.0}
    shared = 2.5 + (1 + 10 / 2**0.5) / (1 + 1 / 2**0.5)
    assert engine.method.weights[FC_BIAS].tolist() == pytest.approx([shared, 3.5, 2.0, 2.0], rel=0.005)
    assert engine.method.weights[CLASSIFIER_BIAS].tolist() == pytest.approx([shared] * 3, rel=0.005)


def test_weights_fall_with_the_root_of_staleness_and_never_to_0():
    assert [weight_of(staleness) / FRESH for staleness in (0, 3, 15)] == [1, 0.5, 0.25]
    assert weight_of(1) / FRESH == pytest.approx(2**-0.5, rel=0.01)
    assert weight_of(10**9) == 1


# With the real client


def buffered(folder, **changes):
    return small_config(folder, **{"buffer": 2, **changes})


def rounds(engine, grid, scorer, numbers):
    return [engine.run_round(grid, number, scorer) for number in numbers]


def test_where_nothing_is_stale_the_bits_are_those_of_synchronous_rounds(tmp_path):
    states = []
    for buffer in (0, 4):
        engine, scorer = started(small_config(tmp_path, buffer=buffer, **METHODS["heterofl"]))
        takes(engine, dict.fromkeys(range(6), 2.0))
        rounds(engine, simulated_grid(2), scorer, (1, 2, 3))
        states.append(engine.state().tensors)
    assert same_bits(*states)


def test_the_number_of_workers_changes_no_bit(tmp_path):
    states, lines = [], []
    for workers in (1, 3):
        engine, scorer = started(buffered(tmp_path, workers=workers, strategy="wildflower"))
        lines.append([absorbed(result) for result in rounds(engine, simulated_grid(workers), scorer, range(1, 6))])
        states.append(engine.state().tensors)
    assert lines[0] == lines[1]
    assert same_bits(*states)


@pytest.mark.parametrize(
    "changes",
    [
        {"strategy": "heterofl"},
        {"strategy": "fedrolex", "schedule.kind": "cosine"},
        {"strategy": "one-model", "wire": "int8"},
        {"strategy": "anycostfl"},
        {"strategy": "fedavg", "fedavg.use": "affordable", "both-models": True, "freeze": "block1"},
    ],
    ids=lambda changes: changes["strategy"],
)
def test_a_resumed_run_goes_on_with_the_devices_at_work(tmp_path, changes):
    """Through the files of a checkpoint, after two of five rounds."""
    config = buffered(tmp_path, output_dir=str(tmp_path / "whole"), **changes)
    engine, scorer = started(config)
    whole = rounds(engine, simulated_grid(2), scorer, range(1, 6))

    config = buffered(tmp_path, output_dir=str(tmp_path / "parts"), **changes)
    first, scorer = started(config)
    rounds(first, simulated_grid(2), scorer, (1, 2))
    assert len(first.at_work) == 2
    checkpoint.save(tmp_path, Checkpoint(2, first.population.now_seconds, first.state()))
    second, scorer = started(config)
    saved = checkpoint.load(tmp_path)
    second.load(saved.state)
    second.population.now_seconds = saved.now_seconds
    assert second.state().values == first.state().values
    again = rounds(second, simulated_grid(2), scorer, (3, 4, 5))
    assert same_bits(engine.state().tensors, second.state().tensors)
    for one, other in zip(whole[2:], again, strict=True):
        assert absorbed(one) == absorbed(other)
        assert {one.record["simulated_seconds"], one.record["training_bytes_down"]} == {
            other.record["simulated_seconds"],
            other.record["training_bytes_down"],
        }


def test_channels_that_follow_from_the_model_stay_those_that_a_device_was_sent(tmp_path):
    changes = {"strategy": "anycostfl", "learning-rate": 1.0}
    states = []
    for resumed in (False, True):
        config = buffered(tmp_path, output_dir=str(tmp_path / str(resumed)), **changes)
        engine, scorer = started(config)
        rounds(engine, simulated_grid(2), scorer, (1,))
        if resumed:
            checkpoint.save(tmp_path, Checkpoint(1, engine.population.now_seconds, engine.state()))
            saved = checkpoint.load(tmp_path)
            engine, scorer = started(config)
            engine.load(saved.state)
            engine.population.now_seconds = saved.now_seconds
        rounds(engine, simulated_grid(2), scorer, range(2, 5))
        states.append(engine.state().tensors)
    assert same_bits(*states)


@by_method(name for name in METHODS if averages(name))
def test_every_method_that_averages_goes_on(method, tmp_path):
    engine, scorer = started(buffered(tmp_path, **METHODS[method]))
    before = {name: tensor.clone() for name, tensor in engine.method.state().tensors.items()}
    rounds(engine, simulated_grid(2), scorer, range(1, 6))
    assert not same_bits(before, engine.method.state().tensors)


@by_method(name for name in METHODS if not averages(name))
def test_others_are_refused(method, tmp_path):
    with pytest.raises(ConfigError, match=r"buffer = 2: strategy = .* does more with these settings than average"):
        buffered(tmp_path, **METHODS[method])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"devices-per-round": 5, "buffer": 6}, "buffer = 6: devices-per-round = 5 are at work at any time"),
        ({"buffer": 2, "aggregation.over-selection": 0.3}, "aggregation.over-selection = 0.3: drops who comes late"),
        ({"buffer": 2, "deadline-seconds": 3.0}, "deadline-seconds = 3.0: ends a round"),
        ({"buffer": 2, "dp.noise-multiplier": 1.0, "dp.delta": 0.01}, "buffer = 2: does not go with differential"),
        ({"buffer": 3, "secure-aggregation.minimum": 3}, "buffer = 3: does not go with secure-aggregation"),
        ({"buffer": -1}, "buffer = -1: must be at least 0"),
    ],
    ids=str,
)
def test_what_does_not_go_with_it_is_told(values, words):
    with pytest.raises(ConfigError) as error:
        RunConfig.from_run_config({"strategy": "heterofl", **values})
    assert str(error.value).startswith(words)


def test_flowers_loop_is_refused(tmp_path):
    engine, scorer = started(buffered(tmp_path))
    with pytest.raises(ValueError, match="buffer = 2: a strategy of Flower's is called with all replies of a round"):
        FlowerStrategy(engine, scorer)


def test_who_leaves_takes_its_update_along(tmp_path):
    engine, grid = by_hand(tmp_path, 1, dict.fromkeys(range(3), 1.0))
    engine.run_round(grid, 1, no_scores)
    engine.population.connected = lambda grid, devices: [device for device in devices if device != 1]
    engine.population.sample = lambda *wanted: [0]
    results = [engine.run_round(grid, number, no_scores) for number in range(2, 6)]
    assert [absorbed(result) for result in results] == [[0], [0], [0], [2]]


# On real nodes


@pytest.fixture
def clock(monkeypatch):
    fake = FakeTime()
    for module in ("exchange", "buffered", "connected_devices", "population"):
        monkeypatch.setattr(f"wildflower.rounds.{module}.time", fake)
    return fake


def on_nodes(folder, nodes, **changes):
    keys = {"fleet": "", "devices": nodes, "devices-per-round": nodes, "strategy": "fedavg", "buffer": 1}
    engine, scorer = started(small_config(folder, **{**keys, **changes}))
    return engine, scorer, connected_grid(nodes, folder)


def test_a_slow_node_goes_on_and_its_update_counts_later(tmp_path, clock):
    engine, scorer, grid = on_nodes(tmp_path, 2)
    slow = (2, "train")
    grid.seen = lambda messages: [m for m in messages if (m.metadata.dst_node_id, m.metadata.message_type) != slow]
    results = rounds(engine, grid, scorer, (1, 2))
    assert [absorbed(result) for result in results] == [[0], [0]]
    assert list(engine.at_work) == [1]
    grid.seen = lambda messages: [m for m in messages if m.metadata.dst_node_id == 2]
    result = engine.run_round(grid, 3, scorer)
    assert absorbed(result) == [1]
    assert result.record["metrics"]["staleness_max"] == 2
    grid.seen = lambda messages: messages
    done = [device for result in rounds(engine, grid, scorer, (4, 5, 6)) for device in absorbed(result)]
    assert set(done) == {0, 1}
    trained = [m for m in grid.sent if m.metadata.message_type == "train"]
    assert len(trained) == 6 + len(engine.at_work)
    assert all(torch.isfinite(tensor).all() for tensor in engine.state().tensors.values())


def test_a_dead_node_holds_its_place_until_the_deadline(tmp_path, clock):
    engine, scorer, grid = on_nodes(tmp_path, 2, deadline_seconds=60.0, buffer=2)
    engine.run_round(grid, 1, scorer)
    grid.silent = {2}
    began = clock.now
    result = engine.run_round(grid, 2, scorer)
    assert absorbed(result) == [0]
    assert clock.now - began == pytest.approx(60.0, abs=2.0)
    assert [line["outcome"] for line in result.devices if line["device"] == 1] == ["late"]
    assert not engine.at_work
    grid.silent = set()
    engine.run_round(grid, 3, scorer)
    assert sorted(absorbed(engine.run_round(grid, 4, scorer))) == [0, 1]


def test_a_node_that_flower_says_is_offline_holds_no_place(tmp_path, clock):
    engine, scorer, grid = on_nodes(tmp_path, 3)
    rounds(engine, grid, scorer, (1,))
    grid.broken = {3: 5}
    results = rounds(engine, grid, scorer, range(2, 8))
    outcomes = {line["outcome"] for result in results for line in result.devices if line["device"] == 2}
    assert any(outcome.startswith("failed: the node is offline") for outcome in outcomes)
    assert {device for result in results for device in absorbed(result)} == {0, 1}
    assert 2 not in engine.at_work
