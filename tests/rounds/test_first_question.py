"""What a method asks a device before the device trains for the first time."""

import pytest

from tests.small_run import METHODS, FakeTime, connected_grid, simulated_grid, small_config, started
from wildflower.messages.orders import Batch
from wildflower.messages.wire import from_records
from wildflower.server_app.checkpoint import Checkpoint, load, save
from wildflower.strategies.method import client_step_of
from wildflower.strategies.training_steps import ClassCounts
from wildflower.tasks.task import TaskSpec, load_task


def recipfl(folder, **changes):
    folder.mkdir(exist_ok=True)
    return started(small_config(folder, **METHODS["recipfl"] | changes))


def asked(grid):
    """Of every message, the devices and whether they are asked how many examples of each class they hold."""
    batches = [from_records(Batch, m.content)[0] for m in grid.sent if m.metadata.message_type == "train"]
    return [
        (batch.round, order.device, isinstance(client_step_of(order.client_step), ClassCounts))
        for batch in batches
        for order in batch.orders
    ]


def check_once_and_first(found):
    """Every device is asked once, before it trains."""
    devices = {device for _, device, _ in found}
    for device in devices:
        of_it = [question for _, other, question in found if other == device]
        assert of_it[0]
        assert not any(of_it[1:])
        assert len(of_it) > 1


@pytest.mark.thorough
@pytest.mark.parametrize("hardware", [False, True], ids=["workers", "hardware"])
def test_a_device_says_its_class_counts_once_and_before_its_first_training(hardware, tmp_path):
    keys = {"fleet": "", "devices": 4, "devices-per-round": 2} if hardware else {"devices-per-round": 3}
    engine, scorer = recipfl(tmp_path, **keys)
    grid = connected_grid(4, tmp_path) if hardware else simulated_grid(2)
    known = set()
    for number in (1, 2, 3, 4):
        result = engine.run_round(grid, number, scorer)
        assert {d["outcome"] for d in result.devices} <= {"trained", "late"}
        known |= {d["device"] for d in result.devices}
    found = asked(grid)
    check_once_and_first(found)
    assert {device for _, device, question in found if question} == known == engine.method.class_counts.keys()
    assert len({number for number, _, question in found if question}) > 1
    task = load_task(TaskSpec.from_json(engine.settings.task))
    for device, counts in engine.method.class_counts.items():
        assert counts == task.train.labels[task.shard(device).train].bincount(minlength=10).tolist()


@pytest.mark.thorough
def test_a_resumed_run_asks_nobody_again(tmp_path):
    engine, scorer = recipfl(tmp_path, **{"devices-per-round": 3})
    first, second = simulated_grid(2), simulated_grid(2)
    for number in (1, 2):
        engine.run_round(first, number, scorer)
    save(tmp_path, Checkpoint(2, 0.0, engine.state()))
    resumed, scorer = recipfl(tmp_path, **{"devices-per-round": 3})
    resumed.load(load(tmp_path).state)
    assert resumed.method.class_counts == engine.method.class_counts
    for number in (3, 4):
        resumed.run_round(second, number, scorer)
    questions = [device for _, device, question in asked(first) + asked(second) if question]
    assert len(set(questions)) == len(questions)
    again = {device for _, device, _ in asked(first)} & {device for _, device, question in asked(second)}
    assert again  # or nothing was tried


@pytest.mark.thorough
@pytest.mark.parametrize(("code", "outcome"), [(8, "failed: the client process died"), (3, "late")])
def test_who_gives_no_answer_does_not_train_and_is_asked_again(code, outcome, tmp_path):
    engine, scorer = recipfl(tmp_path, **{"fleet": "", "devices": 3, "devices-per-round": 3})
    grid = connected_grid(3, tmp_path)

    def in_questions(messages):
        questions = [m for m in messages if m.metadata.message_type == "train" and asks(m)]
        grid.broken = {1: code} if questions else {}
        return messages

    def asks(message):
        return isinstance(client_step_of(from_records(Batch, message.content)[0].orders[0].client_step), ClassCounts)

    grid.seen = in_questions
    result = engine.run_round(grid, 1, scorer)
    found = {d["device"]: d["outcome"] for d in result.devices}
    assert found[0].startswith(outcome)
    assert {found[1], found[2]} == {"trained"}
    assert (result.record["devices_replied"], result.record["devices_failed"]) == (2, 1)
    assert {device for _, device, question in asked(grid) if not question} == {1, 2}
    lines = [d for d in result.devices if d["outcome"] == "trained"]
    assert result.record["training_bytes_down"] == sum(
        d["download_bytes"] for d in lines
    )  # nothing was sent to the other
    assert engine.method.class_counts.keys() == {1, 2}
    grid.seen = lambda messages: messages
    grid.broken, sent = {}, len(asked(grid))
    engine.run_round(grid, 2, scorer)
    assert [entry for entry in asked(grid)[sent:] if entry[2]] == [(2, 0, True)]
    assert engine.method.class_counts.keys() == {0, 1, 2}


def test_a_round_waits_for_a_silent_device_once(tmp_path, monkeypatch):
    clock = FakeTime()
    monkeypatch.setattr("wildflower.rounds.exchange.time", clock)
    for module in ("population", "connected_devices"):
        monkeypatch.setattr(f"wildflower.rounds.{module}.time", clock)
    keys = {"fleet": "", "devices": 3, "devices-per-round": 3, "deadline-seconds": 30.0}
    engine, scorer = recipfl(tmp_path, **keys)
    grid = connected_grid(3, tmp_path)
    grid.seen = lambda messages: [
        m for m in messages if m.metadata.dst_node_id != 1 or m.metadata.message_type == "query"
    ]
    result = engine.run_round(grid, 1, scorer)
    assert {d["device"]: d["outcome"] for d in result.devices} == {0: "late", 1: "trained", 2: "trained"}
    assert sum(clock.slept) == pytest.approx(30.0, abs=0.3)


def test_a_first_upload_says_it_where_nobody_is_asked(tmp_path):
    keys = {name.replace("recipfl.", "recipfl-controls."): value for name, value in METHODS["recipfl"].items()}
    keys |= {"strategy": "benchmarks.recipfl.recipfl_controls:FirstUpload", "devices-per-round": 6}
    engine, scorer = started(small_config(tmp_path, **keys))
    grid = simulated_grid(2)
    engine.run_round(grid, 1, scorer)
    assert not any(question for _, _, question in asked(grid))
    assert engine.method.class_counts.keys() == set(range(6))
