"""What devices keep between rounds, and rounds after which it is gone."""

import shutil

import pytest

from tests.rounds.methods import Counted, started_with
from tests.small_run import METHODS, connected_grid, simulated_grid, small_config, started

ALL = {"devices_per_round": 6}
HARDWARE = {"fleet": "", "devices": 3, "devices_per_round": 3}


def folder_of(tmp_path, device):
    """Where a simulated device keeps its state."""
    return tmp_path / "runs" / "small" / "device-state" / "small" / f"device-{device}"


def newest(folder):
    return max(folder.glob("*.safetensors"), key=lambda path: int(path.name.split(".")[1]))


def tear(folder):
    """Leave half of the newest file, as a power cut does."""
    path = newest(folder)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def run(engine, scorer, grid, number):
    record, devices = (result := engine.run_round(grid, number, scorer)).record, result.devices
    assert {d["outcome"] for d in devices} == {"trained"}
    return record


def test_devices_keep_what_they_want_from_round_to_round(tmp_path):
    engine, scorer = started_with(Counted, tmp_path, **ALL)
    for number in (1, 2, 3):
        assert run(engine, scorer, simulated_grid(2), number)["devices_state_lost"] == 0
        assert engine.method.rounds == dict.fromkeys(range(6), float(number))
    assert engine.method.gone == []


@pytest.mark.parametrize("lose", [shutil.rmtree, tear], ids=["deleted", "torn"])
def test_a_device_that_lost_what_it_kept_begins_anew_and_the_run_goes_on(lose, tmp_path, caplog):
    engine, scorer = started_with(Counted, tmp_path, **ALL)
    run(engine, scorer, simulated_grid(2), 1)
    lose(folder_of(tmp_path, 2))
    assert run(engine, scorer, simulated_grid(2), 2)["devices_state_lost"] == 1
    assert engine.method.gone == [2]
    assert engine.method.rounds == dict.fromkeys(range(6), 2.0) | {2: 1.0}
    assert "Round 2: device 2 has lost what it kept, and began anew" in caplog.text
    assert run(engine, scorer, simulated_grid(2), 3)["devices_state_lost"] == 0
    assert engine.method.rounds == dict.fromkeys(range(6), 3.0) | {2: 2.0}


def test_after_a_torn_file_a_device_goes_on_with_that_of_the_round_before(tmp_path):
    engine, scorer = started_with(Counted, tmp_path, **ALL)
    for number in (1, 2):
        run(engine, scorer, simulated_grid(2), number)
    tear(folder_of(tmp_path, 2))
    assert run(engine, scorer, simulated_grid(2), 3)["devices_state_lost"] == 0
    assert engine.method.rounds == dict.fromkeys(range(6), 3.0) | {2: 2.0}


def test_a_resumed_run_knows_who_kept_something(tmp_path):
    engine, scorer = started_with(Counted, tmp_path, **ALL)
    run(engine, scorer, simulated_grid(2), 1)
    resumed, scorer = started_with(Counted, tmp_path, **ALL)
    resumed.load(engine.state())
    shutil.rmtree(folder_of(tmp_path, 4))
    assert run(resumed, scorer, simulated_grid(2), 2)["devices_state_lost"] == 1
    assert resumed.method.gone == [4]


def test_who_never_kept_anything_has_lost_nothing(tmp_path):
    engine, scorer = started_with(Counted, tmp_path, devices_per_round=2)
    first = engine.run_round(simulated_grid(2), 1, scorer)
    trained = {d["device"] for d in first.devices}
    assert trained == engine.method.rounds.keys() < set(range(6))
    for number in (2, 3, 4):
        assert run(engine, scorer, simulated_grid(2), number)["devices_state_lost"] == 0
    assert engine.method.rounds.keys() > trained


def test_on_hardware_the_state_is_lost_with_its_node(tmp_path):
    engine, scorer = started_with(Counted, tmp_path, **HARDWARE)
    grid = connected_grid(3, tmp_path)
    run(engine, scorer, grid, 1)
    shutil.rmtree(tmp_path / "node-2")
    assert run(engine, scorer, grid, 2)["devices_state_lost"] == 1
    assert engine.method.gone == [1]
    assert engine.method.rounds == {0: 2.0, 1: 1.0, 2: 2.0}


# Methods whose devices keep something, for whatever reason.


@pytest.mark.thorough
@pytest.mark.parametrize("lose", [shutil.rmtree, tear], ids=["deleted", "torn"])
@pytest.mark.parametrize("method", ["local", "depthfl", "recipfl", "scaffold", "rafl"])
def test_methods_go_on_without_what_a_device_kept(method, lose, tmp_path):
    engine, scorer = started(small_config(tmp_path, **METHODS[method] | {"devices-per-round": 6, "evaluate-every": 2}))
    lost = []
    honest = engine.method.lost
    engine.method.lost = lambda device: (lost.append(device), honest(device))[1]
    assert run(engine, scorer, simulated_grid(2), 1)["devices_state_lost"] == 0
    lose(folder_of(tmp_path, 3))
    record = run(engine, scorer, simulated_grid(2), 2)
    assert record["devices_state_lost"] == 1
    assert lost == [3]
    assert record["score"] is not None
