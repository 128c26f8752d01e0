"""A device measures its training speed once, and says how old the figure is."""

import json
import time
from pathlib import Path

import pytest

from wildflower.client_app.device_report import device_report
from wildflower.devices import speed
from wildflower.devices.checked import load, save
from wildflower.devices.resource_report import DeviceReport
from wildflower.devices.speed import FILE, OLDEST_SECONDS, Speed, with_speed

REPORT = DeviceReport("board", 10**9, 10**9, cpus=2.0)


@pytest.fixture
def measured(monkeypatch):
    """The speeds that are measured, one after the other, and how often that was."""
    calls = []

    def measure(seconds=None):
        calls.append(len(calls))
        return 1e9 * (1 + calls[-1])

    monkeypatch.setattr(speed, "_can_look", lambda: False)

    monkeypatch.setattr(speed, "measure", measure)
    return calls


@pytest.mark.measures
def test_a_machine_has_a_speed():
    started = time.perf_counter()
    found = speed.measure()
    assert time.perf_counter() - started < 5
    assert 1e7 < found < 1e15  # from a slow board to a large card


def test_it_is_measured_once_and_grows_old(tmp_path, measured):
    first = with_speed(REPORT, {}, tmp_path)
    assert (first.flop_per_s, first.speed_age_seconds) == (1e9, pytest.approx(0, abs=1))
    kept = load(Speed, tmp_path / FILE)
    save(Speed(kept.flop_per_s, kept.measured_at - 500, kept.machine), tmp_path / FILE)
    later = with_speed(REPORT, {}, tmp_path)
    assert (later.flop_per_s, later.speed_age_seconds) == (1e9, pytest.approx(500, abs=5))
    assert len(measured) == 1


@pytest.mark.parametrize(
    "change", [{"measured_at": -OLDEST_SECONDS - 1}, {"measured_at": 1000.0}, {"machine": "another"}]
)
def test_what_is_old_or_of_another_machine_is_measured_again(tmp_path, measured, change):
    with_speed(REPORT, {}, tmp_path)
    value = json.loads((tmp_path / FILE).read_text())
    if "measured_at" in change:
        change = {"measured_at": value["measured_at"] + change["measured_at"]}
    (tmp_path / FILE).write_text(json.dumps(value | change))
    assert with_speed(REPORT, {}, tmp_path).flop_per_s == 2e9


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"flop_per_s": -1, "measured_at": 1, "machine": "x"}'])
def test_a_damaged_file_is_none(tmp_path, measured, text):
    (tmp_path / FILE).write_text(text)
    assert load(Speed, tmp_path / FILE) is None
    assert with_speed(REPORT, {}, tmp_path).flop_per_s == 1e9


def test_what_the_owner_wrote_down_is_not_measured(tmp_path, measured):
    report = device_report({"flop-per-s": 5e9, "state-dir": str(tmp_path)})
    assert (report.flop_per_s, report.speed_age_seconds, measured) == (5e9, None, [])
    with pytest.raises(ValueError, match="node config: flop-per-s = 0"):
        device_report({"flop-per-s": 0, "state-dir": str(tmp_path)})


def test_where_training_happens_elsewhere_nothing_is_measured(tmp_path, measured):
    assert with_speed(REPORT, {"gpu-trainer": "/somewhere"}, tmp_path).flop_per_s is None
    assert measured == []


def test_where_nothing_can_be_kept_the_report_is_made_all_the_same(measured):
    assert with_speed(REPORT, {}, Path("/proc/nowhere")).flop_per_s == 1e9


@pytest.mark.parametrize(
    ("measured", "found", "times"),
    [
        ([0.7e9], 1e9, 1),  # less than a third slower
        ([0.6e9, 0.95e9], 1e9, 2),  # for a moment only
        ([0.6e9, 0.5e9], 0.5e9, 2),
        ([1.3e9], 1e9, 1),
        ([1.5e9, 1.4e9], 1.4e9, 2),
    ],
)
def test_it_is_measured_again_when_it_has_changed_by_a_third(tmp_path, monkeypatch, measured, found, times):
    monkeypatch.setattr(speed, "measure", lambda: 1e9)
    assert with_speed(REPORT, {}, tmp_path).flop_per_s == 1e9
    left = list(measured)
    monkeypatch.setattr(speed, "measure", lambda seconds=None: left.pop(0))
    monkeypatch.setattr(speed, "_can_look", lambda: True)
    assert with_speed(REPORT, {}, tmp_path).flop_per_s == found
    assert len(measured) - len(left) == times
    assert load(Speed, tmp_path / FILE).flop_per_s == found


@pytest.mark.parametrize("trouble", [RuntimeError("could not create a primitive"), MemoryError()])
def test_a_report_does_without_a_speed_that_cannot_be_measured(tmp_path, monkeypatch, trouble):
    def fail(seconds=None):
        raise trouble

    monkeypatch.setattr(speed, "_can_look", lambda: True)
    monkeypatch.setattr(speed, "measure", fail)
    assert with_speed(REPORT, {}, tmp_path) == REPORT
    monkeypatch.setattr(speed, "measure", lambda: 1e9)
    with_speed(REPORT, {}, tmp_path)
    monkeypatch.setattr(speed, "measure", fail)
    assert with_speed(REPORT, {}, tmp_path).flop_per_s == 1e9
    kept = load(Speed, tmp_path / FILE)
    save(Speed(kept.flop_per_s, kept.measured_at - OLDEST_SECONDS - 1, kept.machine), tmp_path / FILE)
    assert with_speed(REPORT, {}, tmp_path) == REPORT
