from datetime import datetime
from types import SimpleNamespace

import pytest

from wildflower.devices import conditions, node_config
from wildflower.devices.conditions import note_use, rest_of
from wildflower.devices.hours import seconds_until
from wildflower.devices.resource_report import DeviceReport

NOON = datetime(2026, 11, 29, 12, 0)
HOUR = 3600.0


def resting(tmp_path, now=NOON, celsius=None, **owner):
    report = DeviceReport("pi", memory_total_bytes=9, memory_available_bytes=5, temperature_celsius=celsius)
    config = node_config.read({key.replace("_", "-"): value for key, value in owner.items()})
    return rest_of(config, report, tmp_path, now, root=tmp_path)


@pytest.mark.parametrize(
    ("hours", "hour", "left"),
    [
        ("22:00-06:00", 22, 0),
        ("22:00-06:00", 3, 0),
        ("22:00-06:00", 6, 16),
        ("22:00-06:00", 12, 10),
        ("09:00-17:00", 8, 1),
        ("09:00-17:00", 17, 16),
        ("09:00-17:00", 33, 0),  # 9:00 of the second day
    ],
)
def test_hours_may_pass_midnight(hours, hour, left):
    assert seconds_until(hours, hour * HOUR) == left * HOUR


def test_without_a_word_of_the_owner_a_device_takes_part(tmp_path):
    assert resting(tmp_path, celsius=99.0) is None


def test_a_device_rests_until_its_hours_begin(tmp_path):
    rest = resting(tmp_path, hours="22:00-06:00")
    assert (rest.why, rest.seconds) == ("hours = 22:00-06:00, and it is 12:00 there", 10 * HOUR)
    assert resting(tmp_path, NOON.replace(hour=23), hours="22:00-06:00") is None


def test_a_day_and_a_month_have_their_limits(tmp_path):
    note_use(tmp_path, 600, 90.0, NOON)
    assert resting(tmp_path, max_minutes_per_day=2.0, max_bytes_per_month=1000) is None
    note_use(tmp_path, 400, 30.0, NOON.replace(hour=13))
    of_day = resting(tmp_path, max_minutes_per_day=2.0)
    assert of_day.why == "it has worked for 2 of max-minutes-per-day = 2"
    assert of_day.seconds == 12 * HOUR
    assert resting(tmp_path, max_bytes_per_month=1000).why.startswith("1000 bytes have travelled")
    tomorrow, next_month = NOON.replace(day=30), NOON.replace(month=12, day=1)
    assert resting(tmp_path, tomorrow, max_minutes_per_day=2.0) is None
    assert resting(tmp_path, tomorrow, max_bytes_per_month=1000) is not None
    assert resting(tmp_path, next_month, max_bytes_per_month=1000) is None


def test_a_clock_that_goes_back_gives_no_new_day(tmp_path):
    note_use(tmp_path, 600, 130.0, NOON)
    yesterday = NOON.replace(day=28)
    assert resting(tmp_path, yesterday, max_minutes_per_day=2.0) is not None
    note_use(tmp_path, 400, 0.0, yesterday)
    assert resting(tmp_path, NOON, max_minutes_per_day=2.0) is not None
    assert resting(tmp_path, NOON, max_bytes_per_month=1000) is not None
    assert resting(tmp_path, NOON.replace(day=30), max_minutes_per_day=2.0) is None


def test_a_clock_that_was_years_ahead_keeps_nobody_out_until_then(tmp_path):
    note_use(tmp_path, 600, 130.0, NOON.replace(year=2040))
    assert resting(tmp_path, max_minutes_per_day=2.0) is None


def test_a_damaged_file_of_use_counts_as_none(tmp_path):
    (tmp_path / conditions.USE_FILE).write_text('{"month": 3}')
    assert resting(tmp_path, max_minutes_per_day=2.0) is None


def test_a_hot_device_rests_and_one_without_a_sensor_does_not(tmp_path):
    assert resting(tmp_path, celsius=71.0, max_temperature=70.0).why == "it has 71 °C, above max-temperature = 70"
    assert resting(tmp_path, celsius=70.0, max_temperature=70.0) is None
    assert resting(tmp_path, max_temperature=70.0) is None


@pytest.mark.parametrize(("plugged", "rests"), [(True, False), (None, False), (False, True)])
def test_a_battery_that_is_not_charged_keeps_the_device(plugged, rests, tmp_path, monkeypatch):
    battery = SimpleNamespace(power_plugged=plugged)
    monkeypatch.setattr(conditions.psutil, "sensors_battery", lambda: battery, raising=False)
    assert (resting(tmp_path, charging=True) is not None) == rests
    monkeypatch.setattr(conditions.psutil, "sensors_battery", lambda: None, raising=False)
    assert resting(tmp_path, charging=True) is None


def test_a_kernel_without_power_supplies_has_no_battery(tmp_path, monkeypatch):
    def sensors_battery():
        raise FileNotFoundError("/sys/class/power_supply")

    monkeypatch.setattr(conditions.psutil, "sensors_battery", sensors_battery, raising=False)
    assert resting(tmp_path, charging=True) is None


def test_a_busy_device_rests(tmp_path, monkeypatch):
    for percent, rests in ((5.0, False), (80.0, True)):
        monkeypatch.setattr(conditions.psutil, "cpu_percent", lambda seconds, percent=percent: percent)
        assert (resting(tmp_path, idle=True) is not None) == rests


@pytest.mark.parametrize(
    ("interface", "told", "rests"), [("wwan0", "", True), ("wlan0", "yes (guessed)\n", True), ("wlan0", "no\n", False)]
)
def test_a_metered_network_keeps_the_device(interface, told, rests, tmp_path, monkeypatch):
    (tmp_path / "proc" / "net").mkdir(parents=True)
    (tmp_path / "proc" / "net" / "route").write_text(
        f"Iface\tDestination\tGateway\neth9\t0000A8C0\t00000000\n{interface}\t00000000\t0100A8C0\n"
    )
    monkeypatch.setattr(conditions.shutil, "which", lambda name: f"/usr/bin/{name}")

    def run(command, *, env, **_):
        return SimpleNamespace(stdout=told if env["LC_ALL"] == "C" else "ja (vermutet)\n")

    monkeypatch.setattr(conditions.subprocess, "run", run)
    assert (resting(tmp_path, unmetered=True) is not None) == rests


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hours", "22-6"),
        ("hours", "24:00-06:00"),
        ("hours", "06:00-06:00"),
        ("max-temperature", 0),
        ("max-minutes-per-day", 2000.0),
        ("max-bytes-per-month", -1),
        ("charging", "yes"),
    ],
)
def test_a_condition_that_says_nothing_is_named(key, value):
    with pytest.raises(ValueError, match=f"node config: {key}"):
        node_config.read({key: value})
