"""Flower's own loop over our methods: `flwr.serverapp.strategy.Strategy.start` with `FlowerStrategy`."""

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message

from tests.small_run import (
    METHODS,
    connected_grid,
    same_bits,
    simulated_grid,
    small_config,
    started,
)
from wildflower.rounds.flower_strategy import FlowerStrategy

CLOCKED = {"wall_seconds", "server_seconds", "server_peak_rss_bytes"}
IGNORED = ArrayRecord({"ignored": torch.zeros(1)})
ROUNDS = 4


def config(folder, method, **changes):
    folder.mkdir(exist_ok=True)
    return small_config(folder, **METHODS[method] | {"rounds": ROUNDS, "evaluate-every": 2} | changes)


def by_the_engine(folder, method, **changes):
    """What the engine's own rounds come to."""
    engine, scorer = started(config(folder, method, **changes))
    engine.start()
    grid = simulated_grid(2)
    return engine, [engine.run_round(grid, number, scorer) for number in range(1, ROUNDS + 1)]


def told(results):
    """The lines of the journal, without what depends on the wall's clock."""
    rounds = [{key: value for key, value in r.record.items() if key not in CLOCKED} for r in results]
    devices = [{key: value for key, value in line.items() if key != "seconds"} for r in results for line in r.devices]
    return rounds, devices


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["heterofl", "all-large", "hypemefed", "recipfl"])
def test_flowers_own_loop_runs_the_engines_rounds(method, tmp_path):
    ours, results = by_the_engine(tmp_path / "ours", method)
    engine, scorer = started(config(tmp_path / "theirs", method))
    strategy = FlowerStrategy(engine, scorer)
    result = strategy.start(simulated_grid(2), IGNORED, num_rounds=ROUNDS)

    assert same_bits(ours.state().tensors, engine.state().tensors)
    assert ours.state().values == engine.state().values
    assert ours.population.now_seconds == engine.population.now_seconds > 0
    assert told(strategy.results) == told(results)

    assert same_bits(
        dict(result.arrays.to_torch_state_dict()), {n: v.detach() for n, v in ours.state().tensors.items()}
    )
    assert [m["devices-replied"] for m in result.train_metrics_clientapp.values()] == [
        r.record["devices_replied"] for r in results
    ]
    scored = {r.record["round"]: r.record for r in results if r.record["score"] is not None}
    assert set(scored) == {2, 4}
    assert {number: dict(metrics) for number, metrics in result.evaluate_metrics_clientapp.items()} == {
        number: {"accuracy": record["score"], "loss": record["loss"]} for number, record in scored.items()
    }


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["heterofl", "recipfl"])
def test_a_run_goes_on_in_flowers_loop_where_it_ended(method, tmp_path):
    ours, results = by_the_engine(tmp_path / "ours", method)
    first, scorer = started(config(tmp_path / "theirs", method))
    FlowerStrategy(first, scorer).start(simulated_grid(2), IGNORED, num_rounds=2)

    second, scorer = started(config(tmp_path / "theirs", method))
    second.load(first.state())
    second.population.now_seconds = first.population.now_seconds
    strategy = FlowerStrategy(second, scorer, rounds_done=2)
    result = strategy.start(simulated_grid(3), strategy.arrays, num_rounds=2)
    assert same_bits(ours.state().tensors, second.state().tensors)
    assert ours.state().values == second.state().values
    assert [r.record["round"] for r in strategy.results] == [3, 4]
    assert told(strategy.results)[0] == told(results)[0][2:]
    assert set(result.evaluate_metrics_clientapp) == {2}  # by Flower's count, which begins anew


def test_personal_accuracy_and_a_methods_own_figures_are_there(tmp_path):
    changes = {"personal.every": 2, "test-fraction": 0.2, "distillation.steps": 1, "distillation.batch-size": 2}
    changes |= {"distillation.students": "with-smallest"}
    engine, scorer = started(config(tmp_path, "heterofl", **changes))
    strategy = FlowerStrategy(engine, scorer)
    result = strategy.start(simulated_grid(), IGNORED, num_rounds=2)
    assert [r.record["personal_devices"] for r in strategy.results] == [None, 6]
    assert all(r.record["metrics"]["distillation_steps_per_second"] > 0 for r in strategy.results)
    assert result.train_metrics_clientapp[1]["distillation_steps_per_second"] > 0


def test_without_a_scorer_the_server_scores_nothing_and_evaluate_fn_can(tmp_path):
    engine, _ = started(config(tmp_path, "all-large"))
    strategy = FlowerStrategy(engine)
    seen = []
    result = strategy.start(
        simulated_grid(), strategy.arrays, num_rounds=2, evaluate_fn=lambda number, arrays: seen.append(set(arrays))
    )
    assert result.evaluate_metrics_clientapp == {}
    assert [r.record["score"] for r in strategy.results] == [None, None]
    assert seen == [set(engine.state().tensors)] * 3


def test_a_method_is_started_once(tmp_path, monkeypatch):
    engine, scorer = started(config(tmp_path, "all-large"))
    calls = []
    monkeypatch.setattr(engine.method, "start", lambda: calls.append(engine.method.round))
    FlowerStrategy(engine, scorer).start(simulated_grid(), IGNORED, num_rounds=2)
    assert calls == [1]


def on_hardware(tmp_path, devices=3, **changes):
    keys = {"fleet": "", "devices": devices, "devices-per-round": devices, "evaluate-every": ROUNDS} | changes
    engine, scorer = started(config(tmp_path, "all-large", **keys))
    return FlowerStrategy(engine, scorer), connected_grid(devices, tmp_path)


def outcomes(result):
    return {line["device"]: line["outcome"] for line in result.devices}


def test_a_node_that_is_late_is_left_out_until_it_answers(tmp_path):
    strategy, grid = on_hardware(tmp_path)

    def slow(messages):
        return [m for m in messages if m.metadata.message_type != "train" or m.metadata.dst_node_id != 2]

    grid.seen = slow
    strategy.start(grid, IGNORED, num_rounds=1)
    assert outcomes(strategy.results[0]) == {0: "trained", 1: "late", 2: "trained"}
    assert strategy.engine.population.busy == {2}

    # It answers a query, and takes part again; of the third Flower says now that its message's time is over.
    grid.seen = lambda messages: messages
    grid.broken = {3: 3}
    again = FlowerStrategy(strategy.engine, strategy.scorer, rounds_done=1)
    again.start(grid, IGNORED, num_rounds=1)
    assert outcomes(again.results[0]) == {0: "trained", 1: "trained", 2: "late"}
    assert strategy.engine.population.busy == {3}


def test_over_selection_takes_the_first(tmp_path):
    strategy, grid = on_hardware(
        tmp_path, devices=4, **{"devices-per-round": 2, "aggregation.over-selection": 1.0, "deadline-seconds": 60.0}
    )
    strategy.start(grid, IGNORED, num_rounds=1)
    found = list(outcomes(strategy.results[0]).values())
    assert sorted(found) == ["late", "late", "trained", "trained"]
    assert strategy.engine.population.busy == set()  # all have answered


def test_what_another_node_answers_is_not_taken(tmp_path):
    strategy, grid = on_hardware(tmp_path)

    def in_anothers_name(reply):
        if reply.metadata.message_type == "train" and reply.metadata.src_node_id == 1:
            reply.metadata.__dict__["_src_node_id"] = 2
        return reply

    grid.tamper = in_anothers_name
    strategy.start(grid, IGNORED, num_rounds=1)
    assert outcomes(strategy.results[0]) == {
        0: "failed: the reply is of node 2, node 1 was asked",
        1: "trained",
        2: "trained",
    }


def test_a_reply_that_comes_twice_counts_once(tmp_path):
    states = []
    for twice in (False, True):
        engine, scorer = started(config(tmp_path / f"{twice}", "heterofl"))
        grid = simulated_grid(2)
        grid.duplicate = twice
        FlowerStrategy(engine, scorer).start(grid, IGNORED, num_rounds=1)
        states.append(engine.state().tensors)
    assert same_bits(*states)


def test_messages_and_replies_are_not_held(tmp_path):
    """The round's weights are Flower's to free once they are sent, and replies' once they are taken."""
    engine, scorer = started(config(tmp_path, "heterofl"))
    strategy, grid = FlowerStrategy(engine, scorer), simulated_grid(2)
    replies = list(grid.send_and_receive(strategy.configure_train(1, IGNORED, ConfigRecord(), grid)))
    assert all("weights" in reply.content for reply in replies)
    strategy.aggregate_train(1, replies)
    assert not any("weights" in reply.content for reply in replies)
    assert not any(isinstance(held, Message) for entry in strategy._open.sent for held in entry)


def test_flowers_loop_cannot_skip_a_step(tmp_path):
    engine, scorer = started(config(tmp_path, "all-large"))
    strategy, grid = FlowerStrategy(engine, scorer), simulated_grid()
    with pytest.raises(RuntimeError, match="aggregate_train of round 1 without its configure_train"):
        strategy.aggregate_train(1, [])
    replies = grid.send_and_receive(strategy.configure_train(1, IGNORED, ConfigRecord(), grid))
    with pytest.raises(RuntimeError, match="configure_evaluate of round 1 without its aggregate_train"):
        strategy.configure_evaluate(1, IGNORED, ConfigRecord(), grid)
    with pytest.raises(RuntimeError, match="aggregate_train of round 2 without its configure_train"):
        strategy.aggregate_train(2, [])
    strategy.aggregate_train(1, replies)
    with pytest.raises(RuntimeError, match="aggregate_train of round 1 without its configure_train"):
        strategy.aggregate_train(1, replies)
    assert strategy.aggregate_evaluate(1, []) is None
    assert strategy.results == []
