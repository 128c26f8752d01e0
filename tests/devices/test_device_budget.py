import json
from dataclasses import replace

import pytest

from wildflower.devices.budget import Budget, budget_of
from wildflower.devices.resource_report import DeviceReport

REPORT = DeviceReport(kind="test", memory_total_bytes=2_000_000, memory_available_bytes=1_000_000)


def budget(report, *, memory_fraction=0.5, transfer_seconds=10.0, deadline_seconds=None, **others):
    return budget_of(
        report,
        memory_fraction=memory_fraction,
        transfer_seconds=transfer_seconds,
        deadline_seconds=deadline_seconds,
        **others,
    )


def test_memory_is_a_fraction_of_what_is_available():
    assert budget(REPORT, memory_fraction=0.8).memory_bytes == 800_000
    assert budget(REPORT, memory_fraction=1).memory_bytes == 1_000_000


def test_what_the_owner_set_apart_replaces_the_fraction_but_not_what_is_available():
    assert budget(replace(REPORT, memory_limit_bytes=900_000)).memory_bytes == 900_000
    assert budget(replace(REPORT, memory_limit_bytes=1_500_000)).memory_bytes == 1_000_000


def test_each_link_limits_what_travels_over_it_and_the_slower_one_what_travels_both_ways():
    # 2 Mbit/s for 10 s are 20 Mbit, 2.5 million bytes.
    slow_up = budget(replace(REPORT, down_mbit_per_s=8.0, up_mbit_per_s=2.0))
    assert (slow_up.download_bytes, slow_up.upload_bytes, slow_up.both_ways_bytes) == (10_000_000, 2_500_000, 2_500_000)
    slow_down = budget(replace(REPORT, down_mbit_per_s=2.0, up_mbit_per_s=8.0))
    limits = slow_down.download_bytes, slow_down.upload_bytes, slow_down.both_ways_bytes
    assert limits == (2_500_000, 10_000_000, 2_500_000)
    assert slow_up.can_travel(10_000_000, 2_500_000)
    assert not slow_up.can_travel(10_000_001, 2_500_000)
    assert not slow_up.can_travel(10_000_000, 2_500_001)


def test_a_link_that_nobody_measured_limits_nothing():
    assert budget(REPORT).both_ways_bytes is None
    assert budget(replace(REPORT, up_mbit_per_s=2.0)).both_ways_bytes == 2_500_000


def test_a_link_that_carries_nothing_leaves_no_payload():
    assert budget(replace(REPORT, down_mbit_per_s=5.0, up_mbit_per_s=0.0)).both_ways_bytes == 0


def test_the_largest_report_makes_a_budget():
    maximum = 2**63 - 1
    report = DeviceReport("test", maximum, maximum, down_mbit_per_s=1e6, up_mbit_per_s=1e6, payload_limit_bytes=maximum)
    for seconds in (1e9, 1e305):
        assert budget(report, memory_fraction=1.0, transfer_seconds=seconds) == Budget(maximum, maximum, maximum)


def test_without_a_transfer_time_links_set_no_limit():
    report = replace(REPORT, down_mbit_per_s=8.0, up_mbit_per_s=0.0)
    assert budget(report, transfer_seconds=None).both_ways_bytes is None


def test_the_owner_limits_the_payload_too():
    report = replace(REPORT, down_mbit_per_s=2.0, up_mbit_per_s=2.0, payload_limit_bytes=1_000_000)
    assert budget(report).both_ways_bytes == 1_000_000
    assert budget(report, transfer_seconds=1.0).both_ways_bytes == 250_000
    assert budget(report, transfer_seconds=None).both_ways_bytes == 1_000_000


def test_the_deadline_is_passed_on():
    assert budget(REPORT).deadline_seconds is None
    assert budget(REPORT, deadline_seconds=60.0).deadline_seconds == 60.0


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("deadline_seconds", 0),
        ("deadline_seconds", float("inf")),
    ],
)
def test_a_wrong_setting_is_named(setting, value):
    with pytest.raises(ValueError, match=setting):
        budget(REPORT, **{setting: value})


@pytest.mark.parametrize("one", [Budget(5), Budget(5, 0, 7, 2.5)])
def test_json_round_trip(one):
    assert Budget(**json.loads(json.dumps(one.to_json()))) == one


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("memory_bytes", None),
        ("memory_bytes", 1.5),
        ("download_bytes", -1),
        ("upload_bytes", 0.5),
        ("deadline_seconds", float("nan")),
    ],
)
def test_a_wrong_value_is_named(key, value):
    with pytest.raises(ValueError, match=key):
        Budget(**{**Budget(5, 5, 5, 5.0).to_json(), key: value})


def test_a_round_takes_both_ways_of_the_payload_and_the_training():
    # 8 Mbit/s are a byte per microsecond, 2 Mbit/s four: 1,000,000 bytes take 1 s down and 4 s up.
    # 50 examples of 2e6 operations each on 1e8 per second take 1 s.
    report = replace(REPORT, down_mbit_per_s=8.0, up_mbit_per_s=2.0, flop_per_s=1e8)
    found = budget(report, transfer_seconds=None, round_seconds=6.0, examples=50)
    assert found.seconds(10**6, 10**6, 2e6) == pytest.approx(6.0)
    assert found.seconds(3 * 10**6, 0, 2e6) == pytest.approx(4.0)
    assert found.in_time(10**6 - 1, 10**6, 2e6)
    assert not found.in_time(10**6, 10**6, 2.001e6)
    assert not found.in_time(10**6 + 1000, 10**6, 2e6)
    assert not found.in_time(10**6, 10**6 + 1000, 2e6)
    assert found.both_ways_bytes is None  # it is not a limit of the payload alone


def test_what_nobody_measured_takes_no_time():
    found = budget(REPORT, round_seconds=0.001, examples=10**6)
    assert found.in_time(10**12, 10**12, 1e15)


def test_over_a_link_that_carries_nothing_only_nothing_travels_in_time():
    found = budget(replace(REPORT, up_mbit_per_s=0.0), transfer_seconds=None, round_seconds=1e9)
    assert found.in_time(10**12, 0, 1e9)
    assert not found.in_time(0, 1, 0)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan"), "5"])
def test_a_time_that_is_none_is_refused(seconds):
    with pytest.raises(ValueError, match="round_seconds"):
        budget(REPORT, round_seconds=seconds)
