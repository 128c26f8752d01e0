import math
from itertools import combinations

import pytest

from tests.small_run import small_config
from wildflower.cli.plan import DevicePlan, Plan
from wildflower.cli.plan_hours import hours_text, round_seconds


def device(number, seconds, tier="pi", parameters=10):
    return DevicePlan(number, tier, parameters, 1, 1, 1, 1, None, seconds, None, (), ())


def plan(*devices, **counts):
    return Plan("heterofl", "lenet5", 10, list(devices), counts, [])


@pytest.fixture
def config(tmp_path):
    return small_config(tmp_path, devices=4, devices_per_round=2, rounds=100)


def test_a_round_lasts_as_long_as_the_slowest_that_is_drawn(config):
    seconds = [10.0, 20.0, 40.0, 100.0]
    of_four = plan(*(device(number, s) for number, s in enumerate(seconds)), pi=4)
    pairs = [max(pair) for pair in combinations(seconds, 2)]
    expected = sum(pairs) / len(pairs)
    assert round_seconds(of_four, config) == pytest.approx(expected)
    assert expected * 100 == pytest.approx(6667, abs=1)
    assert hours_text(of_four, config) == "100 rounds: about 1 h 51 min; in each 1 min 7 s for its slowest device"
    of_deadline = config.model_copy(update={"deadline_seconds": 30.0})
    assert round_seconds(of_four, of_deadline) == pytest.approx(sum(min(30.0, s) for s in pairs) / len(pairs))


def test_a_planned_device_stands_for_as_many_as_its_tier_has(config):
    one_of_each = plan(device(0, 1.0, "a"), device(3, 9.0, "b"), a=3, b=1)
    assert round_seconds(one_of_each, config) == pytest.approx(0.5 * 1.0 + 0.5 * 9.0)


def test_who_gets_no_model_takes_no_time_and_what_is_unknown_is_not_said(config):
    assert round_seconds(plan(device(0, 5.0), device(1, 50.0, parameters=0), pi=2), config) == pytest.approx(5.0)
    assert hours_text(plan(device(0, None), pi=1), config) == ""
    assert hours_text(plan(device(0, 5.0, parameters=0), pi=1), config) == ""
    assert hours_text(plan(device(0, 5.0), pi=1), config.model_copy(update={"buffer": 1})) == ""
    assert "never ends" in hours_text(plan(device(0, math.inf), pi=1), config)
