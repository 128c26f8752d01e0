"""Budgets of real devices: what a message takes of them, and what an overrun does to the next round."""

import logging

import pytest

from tests.small_run import METHODS, connected_grid, small_config, started
from wildflower.client_app import prepared, training_message, work
from wildflower.client_app.limits import Refusal
from wildflower.devices.budget import Budget
from wildflower.devices.resource_report import DeviceReport
from wildflower.messages.orders import Batch, EvaluationBatch
from wildflower.messages.wire import from_records
from wildflower.rounds.asking import MESSAGE_COPIES
from wildflower.rounds.population import OVERRUN_FACTOR, RECOVERY
from wildflower.strategies.level_options import sizes_between

HARDWARE = {"fleet": "", "devices": 1, "devices-per-round": 1, "budget.memory-fraction": 1.0}


def device_with(monkeypatch, free_bytes, **fields):
    report = DeviceReport("board", memory_total_bytes=10 * free_bytes, memory_available_bytes=free_bytes, **fields)
    for module in (work, training_message):
        monkeypatch.setattr(module, "device_report", lambda config, traffic_bytes=0, left_bytes=0: report)
    monkeypatch.setattr(prepared, "probe_machine", lambda: report)


def work_orders(message):
    return from_records(Batch, message.content)[0].orders


def evaluation_orders(message):
    return from_records(EvaluationBatch, message.content)[0].orders


def costs(engine):
    return {w: engine.method.cost(engine.method.family.width(w)) for w in (1.0, 0.5, 0.25)}


def with_message(cost):
    return cost.peak_training_memory_bytes + MESSAGE_COPIES * cost.payload_bytes


def test_a_device_that_gets_nothing_takes_no_others_place(tmp_path, monkeypatch, caplog):
    keys = HARDWARE | {"devices": 3, "devices-per-round": 2, "strategy": "heterofl"}
    engine, scorer = started(small_config(tmp_path, **keys))
    poor, rich = (
        DeviceReport("board", memory_total_bytes=10**12, memory_available_bytes=nbytes) for nbytes in (10, 10**11)
    )

    def report(config, traffic_bytes=0, left_bytes=0):
        return poor if config["partition-id"] == 1 else rich

    for module in (work, training_message):
        monkeypatch.setattr(module, "device_report", report)
    monkeypatch.setattr(prepared, "probe_machine", lambda: rich)
    grid = connected_grid(3, tmp_path)
    with caplog.at_level(logging.WARNING):
        devices = [d for number in (1, 2, 3) for d in engine.run_round(grid, number, scorer).devices]
    assert [d["outcome"] for d in devices if d["device"] != 1] == ["trained"] * 6
    skipped = [d for d in devices if d["device"] == 1]
    assert skipped
    assert {d["outcome"].split(":")[0] for d in skipped} == {"skipped"}
    assert "`wildflower plan --run RUN_FOLDER` says what binds" in caplog.text


@pytest.mark.parametrize("width", [1.0, 0.5])
def test_a_model_and_its_message_must_fit_together(width, tmp_path, monkeypatch):
    engine, scorer = started(small_config(tmp_path, **HARDWARE))
    needed = costs(engine)
    narrower = {1.0: 0.5, 0.5: 0.25}[width]
    for free_bytes, expected in (
        (with_message(needed[width]) * 101 // 100, width),
        (with_message(needed[width]) - 1, narrower),
    ):
        device_with(monkeypatch, free_bytes)
        engine, scorer = started(small_config(tmp_path, **HARDWARE))
        [device] = engine.run_round(connected_grid(1, tmp_path), 1, scorer).devices
        assert device["parameters"] == needed[expected].parameters
        assert device["budget"]["memory_bytes"] + MESSAGE_COPIES * device["download_bytes"] <= free_bytes
        assert device["predicted_memory_bytes"] <= device["budget"]["memory_bytes"]


def test_personal_evaluation_leaves_room_for_the_message_too(tmp_path, monkeypatch):
    keys = HARDWARE | {"personal.every": 1, "test-fraction": 0.25}
    engine, _ = started(small_config(tmp_path, **keys))
    needed = costs(engine)
    device_with(monkeypatch, with_message(needed[1.0]) - 1)
    grid = connected_grid(1, tmp_path)
    engine.evaluation.evaluate_personally(grid)
    [order] = [o for m in grid.sent if m.metadata.message_type == "evaluate" for o in evaluation_orders(m)]
    assert order.predicted_memory_bytes == needed[0.5].peak_training_memory_bytes <= order.memory_bytes
    assert order.memory_bytes + MESSAGE_COPIES * needed[0.5].payload_bytes <= with_message(needed[1.0]) - 1


@pytest.mark.parametrize("missing_bytes", [0, 1])
def test_statistics_are_taken_where_the_message_fits_beside(missing_bytes, tmp_path, monkeypatch):
    # Of the global model alone: a tier's model has statistics of its own.
    keys = HARDWARE | {"strategy": "heterofl", "family": "cnn3", "evaluate-every": 1, "evaluate-tiers": False}
    engine, scorer = started(small_config(tmp_path, **keys))
    free_bytes = with_message(costs(engine)[1.0]) - missing_bytes
    device_with(monkeypatch, free_bytes)
    grid = connected_grid(1, tmp_path)
    engine.population.everyone(grid)
    engine.evaluation.evaluate(grid, scorer)
    [order] = [order for m in grid.sent if m.metadata.message_type == "train" for order in work_orders(m)]
    expected = costs(engine)[1.0].peak_training_memory_bytes
    assert order.memory_bytes == (0 if missing_bytes else expected)  # 0: no limit, since it is beyond the budget


def test_the_messages_of_both_models_need_room(tmp_path, monkeypatch):
    keys = HARDWARE | {"strategy": "heterofl", "both-models": True}
    engine, _ = started(small_config(tmp_path, **keys))
    large, small = costs(engine)[1.0], costs(engine)[0.25]
    free_bytes = with_message(large) + MESSAGE_COPIES * small.payload_bytes
    for given_bytes, expected in ((free_bytes, large), (free_bytes - 1, costs(engine)[0.5])):
        device_with(monkeypatch, given_bytes)
        engine, scorer = started(small_config(tmp_path, **keys))
        devices = engine.run_round(connected_grid(1, tmp_path), 1, scorer).devices
        assert [d["parameters"] for d in devices] == [expected.parameters, small.parameters]
        messages = MESSAGE_COPIES * sum(d["download_bytes"] for d in devices)
        assert all(d["budget"]["memory_bytes"] + messages <= given_bytes for d in devices)


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["heterofl dynamic", "model-search pool", "model-search"])
def test_a_budget_is_looked_for_without_a_trace(method, tmp_path, monkeypatch):
    """However often a method is asked for it: it answers the same again, and its state is as after one question."""
    keys = METHODS[method] | HARDWARE | {"model-search.epsilon": 1e-9}
    engine, _ = started(small_config(tmp_path, **keys))
    needed = costs(engine)[1.0]
    device_with(monkeypatch, with_message(needed) * 9 // 10)
    for number in range(1, 6):
        engine, scorer = started(small_config(tmp_path, **keys))
        once, _ = started(small_config(tmp_path, **keys))
        once.method.round = number
        result = engine.run_round(connected_grid(1, tmp_path), number, scorer)
        [device] = result.devices
        assert device["predicted_memory_bytes"] <= device["budget"]["memory_bytes"]
        held_bytes = device["budget"]["memory_bytes"] + MESSAGE_COPIES * device["download_bytes"]
        assert held_bytes <= with_message(needed) * 9 // 10
        once.method.assign(0, Budget(device["budget"]["memory_bytes"]))
        assert engine.state().values.get("search") == once.state().values.get("search")


def test_who_gets_what_it_cannot_afford_is_told_once_a_round(tmp_path, monkeypatch, caplog):
    keys = HARDWARE | {"strategy": "heterofl", "below-smallest": "smallest", "personal.every": 1, "test-fraction": 0.25}
    engine, scorer = started(small_config(tmp_path, **keys))
    device_with(monkeypatch, with_message(costs(engine)[0.25]) - 1)
    with caplog.at_level(logging.WARNING, "flwr"):
        engine.run_round(connected_grid(1, tmp_path), 1, scorer)
    told = [record.getMessage() for record in caplog.records if "cannot afford" in record.getMessage()]
    assert told == ["Round 1: devices [0] get an architecture that they cannot afford"]


def test_a_killed_child_lowers_its_devices_budget_once(tmp_path, monkeypatch):
    keys = HARDWARE | {"strategy": "heterofl", "both-models": True}
    engine, scorer = started(small_config(tmp_path, **keys))
    device_with(monkeypatch, 10 * with_message(costs(engine)[1.0]))

    def killed(*arguments, **options):
        raise Refusal("the kernel killed the work", overrun=True)

    monkeypatch.setattr(training_message, "do_order", killed)
    devices = engine.run_round(connected_grid(1, tmp_path), 1, scorer).devices
    assert [d["outcome"] for d in devices] == ["refused: the kernel killed the work"] * 2
    share = devices[0]["predicted_memory_bytes"] / devices[0]["budget"]["memory_bytes"]  # of the larger
    assert engine.population.memory_factor(0) == pytest.approx(RECOVERY * min(OVERRUN_FACTOR, 0.9 * share))


def test_a_card_with_memory_of_its_own_holds_no_messages(tmp_path, monkeypatch):
    engine, scorer = started(small_config(tmp_path, **HARDWARE))
    needed = costs(engine)[1.0]
    device_with(monkeypatch, needed.peak_training_memory_bytes + 1, memory_is_ram=False)
    [device] = engine.run_round(connected_grid(1, tmp_path), 1, scorer).devices
    assert device["parameters"] == needed.parameters


def test_after_an_overrun_the_device_gets_a_smaller_model_and_slowly_the_old_one(tmp_path, monkeypatch):
    engine, scorer = started(small_config(tmp_path, **HARDWARE, rounds=40, evaluate_every=40))
    needed = costs(engine)
    device_with(monkeypatch, with_message(needed[1.0]) * 11 // 10)
    good = training_message.do_order

    def do_order(context):
        if context.order.predicted_memory_bytes == needed[1.0].peak_training_memory_bytes and rounds < 3:
            raise Refusal("out of memory after 5 bytes", overrun=True)
        return good(context)

    monkeypatch.setattr(training_message, "do_order", do_order)
    grid = connected_grid(1, tmp_path)
    seen = []
    for rounds in range(1, 16):
        [device] = engine.run_round(grid, rounds, scorer).devices
        seen.append((device["outcome"], device["parameters"]))
    assert seen[0] == ("refused: out of memory after 5 bytes", needed[1.0].parameters)
    assert seen[1] == ("trained", needed[0.5].parameters)
    assert seen[-1] == ("trained", needed[1.0].parameters)
    assert [parameters for _, parameters in seen[1:]] == sorted(parameters for _, parameters in seen[1:])


def test_a_resumed_run_remembers_who_overran(tmp_path, monkeypatch):
    engine, _ = started(small_config(tmp_path, **HARDWARE))
    engine.population.overran(0, predicted=0.5)
    resumed, _ = started(small_config(tmp_path, **HARDWARE))
    resumed.load(engine.state())
    assert resumed.population.memory_factor(0) == engine.population.memory_factor(0) < 0.5


def test_a_device_that_could_afford_nothing_is_asked_again_in_the_next_round(tmp_path, monkeypatch):
    engine, scorer = started(small_config(tmp_path, **HARDWARE))
    needed = costs(engine)[0.25]
    device_with(monkeypatch, with_message(needed) - 1)
    grid = connected_grid(1, tmp_path)
    [device] = engine.run_round(grid, 1, scorer).devices
    assert device["outcome"].startswith("skipped: no architecture")
    device_with(monkeypatch, with_message(needed))
    [device] = engine.run_round(grid, 2, scorer).devices
    assert device["outcome"] == "trained"
    assert [m.metadata.message_type for m in grid.sent].count("query") == 2
    [device] = engine.run_round(grid, 3, scorer).devices
    assert [m.metadata.message_type for m in grid.sent].count("query") == 2  # it trained, and said so itself


def test_a_report_after_work_counts_what_the_work_has_left_as_free(tmp_path, monkeypatch):
    held, told = iter([1000, 1700]), []
    monkeypatch.setattr(training_message, "own_bytes", lambda: next(held))
    report = DeviceReport("board", memory_total_bytes=10**10, memory_available_bytes=10**9)

    def device_report(config, traffic_bytes=0, left_bytes=0):
        told.append(left_bytes)
        return report

    for module in (work, training_message):
        monkeypatch.setattr(module, "device_report", device_report)
    monkeypatch.setattr(prepared, "probe_machine", lambda: report)
    engine, scorer = started(small_config(tmp_path, **HARDWARE))
    engine.run_round(connected_grid(1, tmp_path), 1, scorer)
    assert told == [0, 700]


def test_work_is_not_lost_with_the_report_behind_it(tmp_path, monkeypatch, caplog):
    engine, scorer = started(small_config(tmp_path, **HARDWARE))
    honest, calls = work.device_report, []

    def device_report(config, traffic_bytes=0, left_bytes=0):
        calls.append(traffic_bytes)
        if traffic_bytes:
            raise RuntimeError("no memory for this")
        return honest(config)

    for module in (work, training_message):
        monkeypatch.setattr(module, "device_report", device_report)
    [device] = engine.run_round(connected_grid(1, tmp_path), 1, scorer).devices
    assert device["outcome"] == "trained"
    assert calls[-1] > 0
    assert "This device's report could not be made: no memory for this" in caplog.text


def test_levels_are_chosen_for_what_the_message_leaves(tmp_path, monkeypatch):
    """One board, one level: the largest that fits beside the message with it, of all that a level may be."""
    keys = HARDWARE | {"strategy": "wildflower", "wildflower.levels": 1, "widths": "1, 0.25"}
    engine, _ = started(small_config(tmp_path, **keys))
    method = engine.method
    prices = [method.price(option, ()) for option in sizes_between(method.family, method.widths)]
    middle = sorted(map(with_message, prices))[len(prices) // 2]
    expected = max(price.parameters for price in prices if with_message(price) <= middle)
    device_with(monkeypatch, middle)
    engine, scorer = started(small_config(tmp_path, **keys))
    [device] = engine.run_round(connected_grid(1, tmp_path), 1, scorer).devices
    assert (device["outcome"], device["parameters"]) == ("trained", expected)
    assert device["predicted_memory_bytes"] <= device["budget"]["memory_bytes"]
