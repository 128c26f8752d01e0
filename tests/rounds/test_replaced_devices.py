"""Devices that leave, and new ones that come: a line of a fleet file."""

import numpy as np
import pytest

from tests.small_run import METHODS, same_bits, simulated_grid, small_config, started
from wildflower.devices.fleet import Fleet, replaced_devices
from wildflower.rounds.population import Holdings
from wildflower.rounds.simulated_devices import SimulatedDevices
from wildflower.server_app.config import ConfigError

FLEET = """
replaced_per_round = {share}

[[group]]
name = "large"
share = 0.25
memory = "4 GB"

[[group]]
name = "small"
share = 0.75
memory = {{ uniform = ["1 GB", "2 GB"] }}
"""


def fleet_file(tmp_path, share=0.1):
    file = tmp_path / "sporadic.toml"
    file.write_text(FLEET.format(share=share))
    return file


def population(file, devices=20, seed=1):
    fleet = Fleet(file, devices=devices, seed=seed)
    return SimulatedDevices(fleet, 1, Holdings(lambda device: 1, lambda device: 0, 1))


def test_after_every_round_a_tenth_leaves_and_as_many_new_ones_come(tmp_path):
    devices = population(fleet_file(tmp_path))
    before = set(devices.everyone(None))
    assert before == set(range(20))
    seen = set(before)
    for number in range(30):
        devices.advance(1.0, 1.0)
        now = set(devices.everyone(None))
        assert len(now) == 20
        assert now - before == {20 + 2 * number, 21 + 2 * number}
        assert len(before - now) == 2
        before = now
        seen |= now
    assert seen == set(range(80))  # the numbers of the first ones, and 2 in each of 30 rounds


def test_only_those_are_asked_who_are_there(tmp_path):
    devices = population(fleet_file(tmp_path))
    for _ in range(5):
        devices.advance(1.0, 1.0)
    there = set(devices.everyone(None))
    rng = np.random.default_rng(3)
    sampled = [d for _ in range(50) for d in devices.sample(None, rng, 10)]
    assert set(sampled) == there
    assert devices.connected(None, list(range(40))) == sorted(there)


def test_newcomers_are_of_the_groups_in_their_proportions_and_draw_their_own(tmp_path):
    fleet = Fleet(fleet_file(tmp_path), devices=20, seed=1)
    assert [fleet.tier(device) for device in range(20)] == ["large"] * 5 + ["small"] * 15
    # Whichever come together: a quarter of any many.
    for first in (20, 1020, 5020):
        large = sum(fleet.tier(device) == "large" for device in range(first, first + 400))
        assert 75 <= large <= 125  # 100, and three times its deviation of 8.7
    newest = [fleet.tier(device) for device in range(20, 40)]
    assert newest != ["large"] * 5 + ["small"] * 15
    new, newer = [device for device in range(20, 60) if fleet.tier(device) == "small"][:2]
    memory = {fleet.report(device).memory_total_bytes for device in (5, new)}
    drawn = {fleet.report(device).memory_available_bytes for device in (5, new, newer)}
    assert (len(memory), len(drawn)) == (1, 3)


def test_who_is_there_follows_from_seed_and_round(tmp_path):
    first, again, other = (population(fleet_file(tmp_path), seed=seed) for seed in (1, 1, 2))
    for devices in (first, again, other):
        for _ in range(4):
            devices.advance(1.0, 1.0)
    resumed = population(fleet_file(tmp_path))
    resumed.load_state_dict(first.state_dict())
    assert first.everyone(None) == again.everyone(None) == resumed.everyone(None) != other.everyone(None)
    for devices in (first, resumed):
        devices.advance(1.0, 1.0)
    assert first.everyone(None) == resumed.everyone(None)


def test_a_share_that_replaces_nobody_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"replaced_per_round = 0.01: of 20 devices that is none"):
        population(fleet_file(tmp_path, 0.01))
    with pytest.raises(ValueError, match=r"replaced_per_round = 1.5"):
        replaced_devices(fleet_file(tmp_path, 1.5), 20)
    assert replaced_devices(fleet_file(tmp_path, 0), 20) == 0


def sporadic(folder, file, **changes):
    keys = {"fleet": str(file), "devices": 20, "devices-per-round": 10, "rounds": 6, "evaluate-every": 2}
    return small_config(folder, **METHODS["rafl"] | keys | changes)


def test_all_examples_cannot_be_dealt_out_to_devices_that_are_still_to_come(tmp_path):
    file = fleet_file(tmp_path)
    with pytest.raises(ConfigError, match=r"replaces 2 devices after every round.*set examples-per-device"):
        started(sporadic(tmp_path, file, examples_per_device=0))


@pytest.mark.thorough
def test_newcomers_train_and_a_resumed_run_goes_on_with_the_same_devices(tmp_path):
    file = fleet_file(tmp_path, 0.4)
    whole, scorer = started(sporadic(tmp_path / "", file))
    grid = simulated_grid()
    records = [whole.run_round(grid, number, scorer) for number in (1, 2, 3)]
    trained = {d["device"] for r in records for d in r.devices if d["outcome"] == "trained"}
    assert max(trained) >= 20
    assert records[1].record["score_by_tier"]
    halfway, scorer = started(sporadic(tmp_path / "", file))
    for number in (1, 2):
        halfway.run_round(grid, number, scorer)
    state = halfway.state()
    resumed, scorer = started(sporadic(tmp_path / "", file))
    resumed.load(state)
    resumed.population.now_seconds = halfway.population.now_seconds
    again = resumed.run_round(grid, 3, scorer)
    assert [d["device"] for d in again.devices] == [d["device"] for d in records[2].devices]
    assert same_bits(whole.state().tensors, resumed.state().tensors)


@pytest.mark.thorough
def test_who_trained_in_a_round_and_leaves_at_its_end_is_scored(tmp_path):
    engine, scorer = started(sporadic(tmp_path, fleet_file(tmp_path, 0.4), evaluate_every=1))
    grid = simulated_grid()
    for number in (1, 2):
        result = engine.run_round(grid, number, scorer)
        trained = {line["device"] for line in result.devices if line["outcome"] == "trained"}
        assert trained - set(engine.population.everyone(grid))
        assert set(result.record["score_by_device"]) == trained


HELD = {
    "flexifed": lambda method: method.begun,
    "local": lambda method: method.trained,
    "lotteryfl": lambda method: {*method.begun, *method.masks, *method.prunings},
    "rafl": lambda method: method.kept,
    "recipfl": lambda method: (
        {device for device, _ in (*method.uploads.current, *method.uploads.initial)} | {*method.class_counts}
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("method", HELD)
def test_nothing_is_held_of_devices_that_have_left(method, tmp_path):
    keys = {"flexifed.sharing": "basic"} if method == "flexifed" else {}
    engine, scorer = started(sporadic(tmp_path, fleet_file(tmp_path, 0.4), **METHODS[method] | keys))
    grid, trained = simulated_grid(), set()
    for number in (1, 2, 3):
        lines = engine.run_round(grid, number, scorer).devices
        trained |= {line["device"] for line in lines if line["outcome"] == "trained"}
    there = set(engine.population.everyone(grid))
    assert trained - there
    assert set(HELD[method](engine.method)) == trained & there
    state = engine.state().values
    assert set(state["keepers"]) | set(state["introduced"]) <= there
