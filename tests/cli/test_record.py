import time

import pytest

from tests.cli.test_command import invoke
from tests.small_run import small_config
from wildflower.cli.fleet_history import EVERY_SECONDS, history_at, remember
from wildflower.cli.record import VALUES, fleet_text, usual_hours
from wildflower.devices.fleet import Fleet
from wildflower.devices.resource_report import DeviceReport
from wildflower.server_app.node_records import LastReport

MIDNIGHT = time.mktime((2026, 11, 2, 0, 0, 0, 0, 0, -1))
DAY = 86400


def keep(history, device, at, memory_bytes, **reported):
    report = DeviceReport("pi", 4 * 10**9, memory_bytes, **reported)
    remember(history, "run", [LastReport(device, device, report, at, 1.0, None)], {}, [], at)


def test_a_recorded_fleet_has_what_its_devices_had(tmp_path):
    memories = [10**8 * (1 + step % 7) for step in range(100)]
    with history_at(tmp_path / "fleet.sqlite") as history:
        for step, memory in enumerate(memories):
            keep(history, 3, MIDNIGHT + step * EVERY_SECONDS, memory, down_mbit_per_s=8.0, flop_per_s=2e9 + step)
        keep(history, 5, MIDNIGHT, 10**9, memory_limit_bytes=3 * 10**8, up_mbit_per_s=2.5)
    shown = invoke("record", tmp_path / "fleet.sqlite", tmp_path / "mine.toml")
    assert shown.exit_code == 0, shown.output
    assert "2 devices" in shown.stdout
    fleet = Fleet(tmp_path / "mine.toml", devices=2, seed=1)
    assert fleet.tiers == ["device-3", "device-5"]
    drawn = [fleet.report(0, simulated_seconds=float(second)) for second in range(200)]
    assert {report.memory_available_bytes for report in drawn} == set(memories)
    assert {report.down_mbit_per_s for report in drawn} == {8.0}
    assert {report.up_mbit_per_s for report in drawn} == {None}
    assert drawn[0].flop_per_s == pytest.approx(2e9, rel=1e-6)
    other = fleet.report(1)
    assert (other.memory_limit_bytes, other.up_mbit_per_s) == (3 * 10**8, 2.5)


def test_many_values_become_quantiles(tmp_path):
    with history_at(tmp_path / "fleet.sqlite") as history:
        for step in range(200):
            keep(history, 0, MIDNIGHT + step * EVERY_SECONDS, 10**6 * (step + 1))
        text, devices = fleet_text(history)
    [line] = [line for line in text.splitlines() if line.startswith("memory")]
    assert devices == 1
    assert line.count(" B") == VALUES
    assert '"1000000 B"' in line
    assert '"200000000 B"' in line


def heard(days, hours):
    return [MIDNIGHT + day * DAY + hour * 3600 for day in range(days) for hour in hours]


def test_hours_are_those_of_at_least_half_of_the_days():
    assert usual_hours(heard(4, range(24))) == ""
    assert usual_hours(heard(4, [22, 23, 0, 1, 2]) + heard(1, [12])) == "22:00-03:00"
    assert usual_hours(heard(4, [9]) + heard(4, [14, 15, 16])) == "14:00-17:00"  # the longest stretch
    assert usual_hours([]) == ""


def test_a_run_goes_over_a_recorded_fleet(tmp_path):
    with history_at(tmp_path / "fleet.sqlite") as history:
        for day in range(4):
            for hour in (1, 2, 3):
                keep(history, 0, MIDNIGHT + day * DAY + hour * 3600, 10**9, down_mbit_per_s=8.0, up_mbit_per_s=8.0)
    assert "Warning" not in invoke("record", tmp_path / "fleet.sqlite", tmp_path / "mine.toml").stderr
    config = small_config(tmp_path, fleet=str(tmp_path / "mine.toml"), devices=1, devices_per_round=1)
    fleet = Fleet(config.fleet, devices=1, seed=1)
    assert (fleet.is_there(0, 2.5 * 3600), fleet.is_there(0, 12 * 3600)) == (True, False)
    settings = [f"fleet={tmp_path / 'mine.toml'}", "devices=1", "devices-per-round=1"]
    shown = invoke("plan", *(word for setting in settings for word in ("--set", setting)))
    assert shown.exit_code == 0, shown.output
    assert "1 device-0" in shown.stdout


def test_a_short_history_has_no_hours_and_that_is_said(tmp_path):
    with history_at(tmp_path / "fleet.sqlite") as history:
        for hour in (1, 2, 3):
            keep(history, 0, MIDNIGHT + hour * 3600, 10**9)
    shown = invoke("record", tmp_path / "fleet.sqlite", tmp_path / "mine.toml")
    assert shown.exit_code == 0, shown.output
    assert "the history covers 2 h. With less than 3 days, hours are left out" in shown.stderr
    assert Fleet(tmp_path / "mine.toml", devices=1, seed=1).is_there(0, 12 * 3600)


def test_what_is_wrong_is_said(tmp_path):
    missing, there = tmp_path / "no.sqlite", tmp_path / "there.toml"
    assert "does not exist" in invoke("record", missing, tmp_path / "new.toml").stderr
    assert not missing.exists()
    with history_at(tmp_path / "fleet.sqlite"):
        pass
    assert "no device has reported" in invoke("record", tmp_path / "fleet.sqlite", tmp_path / "new.toml").stderr
    there.write_text("")
    assert "exists already" in invoke("record", tmp_path / "fleet.sqlite", there).stderr
