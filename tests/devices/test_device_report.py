import json
import math

import pytest

from wildflower.devices.resource_report import DeviceReport

JETSON = DeviceReport(
    kind="jetson-nano",
    memory_total_bytes=4_000,
    memory_available_bytes=3_000,
    down_mbit_per_s=20.5,
    up_mbit_per_s=0,
    accelerator="NVIDIA Tegra X1",
    cpus=3.5,
    flop_per_s=59e9,
    memory_limit_bytes=2_000,
    payload_limit_bytes=1_000,
    down_age_seconds=0.5,
    up_age_seconds=90_000,
    links_from="probe",
    links_problem="superlink:9000 did not answer",
    temperature_celsius=-3.5,
    throttled=False,
    memory_is_ram=False,
)
BARE = DeviceReport(kind="x86-64", memory_total_bytes=10, memory_available_bytes=10)


@pytest.mark.parametrize("report", [JETSON, BARE])
def test_json_round_trip_keeps_every_field(report):
    assert DeviceReport.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_json_is_a_flat_dict_of_scalars():
    assert all(value is None or isinstance(value, str | int | float) for value in JETSON.to_json().values())


@pytest.mark.parametrize(
    ("key", "value", "right"),
    [
        ("kind", "", "must be a text of printable letters, and not blank"),
        ("kind", 3, "must be a text in quotes"),
        ("kind", "x" * 65, "must have at most 64 letters"),
        ("kind", "pi\x1b[2J", "must be a text of printable letters"),
        ("kind", "two\nlines", "must be a text of printable letters"),
        ("links_from", "x" * 10**7, "must be 'probe' or 'node config'"),
        ("memory_total_bytes", -1, "must be at least 0"),
        ("memory_total_bytes", 4000.0, "must be a whole number"),
        ("memory_total_bytes", True, "must be a whole number"),
        ("memory_total_bytes", None, "must be a whole number"),
        ("memory_available_bytes", "3000", "must be a whole number"),
        ("memory_available_bytes", 4001, "at most memory_total_bytes = 4000"),
        ("down_mbit_per_s", -0.1, "must be at least 0"),
        ("down_mbit_per_s", math.nan, "must be a finite number"),
        ("up_mbit_per_s", math.inf, "must be a finite number"),
        ("up_mbit_per_s", "fast", "must be a number"),
        ("accelerator", " ", "must be a text of printable letters, and not blank"),
        ("cpus", 0, "must be above 0"),
        ("memory_is_ram", None, "must be true or false"),
        ("flop_per_s", 0, "must be above 0"),
        ("memory_limit_bytes", -5, "must be at least 0"),
        ("payload_limit_bytes", 0.5, "must be a whole number"),
        ("memory_total_bytes", 10**400, "must be below 2^63"),
        ("memory_available_bytes", 10**400, "must be below 2^63"),
        ("memory_total_bytes", 2**63, "must be below 2^63"),
        ("cpus", 1e6, "must be at most 100000"),
        ("memory_limit_bytes", 10**400, "must be below 2^63"),
        ("payload_limit_bytes", 2**63, "must be below 2^63"),
        ("down_mbit_per_s", 10**400, "must be a number"),
        ("up_mbit_per_s", 1e305, "must be at most 1e+06"),
        ("up_mbit_per_s", 1_000_001, "must be at most 1e+06"),
        ("down_age_seconds", -1.0, "must be at least 0"),
        ("up_age_seconds", math.nan, "must be a finite number"),
        ("links_from", "guess", "must be 'probe' or 'node config'"),
        ("links_problem", "", "must be a text of printable letters, and not blank"),
        ("temperature_celsius", -300.0, "must be at least -273.15"),
        ("temperature_celsius", "hot", "must be a number"),
        ("throttled", 1, "must be true or false"),
        ("flop_per_s", 10**400, "must be a number"),
        ("flop_per_s", 1e300, "must be at most 1e+18"),
    ],
)
def test_a_wrong_value_is_named_with_what_would_be_right(key, value, right):
    with pytest.raises(ValueError) as error:
        DeviceReport.from_json({**JETSON.to_json(), key: value})
    assert f"{key} = {repr(value)[:13]}" in str(error.value)
    assert len(str(error.value)) < 300
    assert right in str(error.value)


def test_an_unknown_key_names_the_nearest_one():
    with pytest.raises(ValueError, match="unknown key 'memory_totl_bytes', did you mean 'memory_total_bytes'"):
        DeviceReport.from_json({**JETSON.to_json(), "memory_totl_bytes": 1})


def test_a_missing_key_is_named():
    value = JETSON.to_json()
    del value["cpus"]
    with pytest.raises(ValueError, match="the key 'cpus' is missing"):
        DeviceReport.from_json(value)


@pytest.mark.parametrize("value", [None, [], "report", 3])
def test_what_is_no_object_is_refused(value):
    with pytest.raises(ValueError, match="device report: expected a JSON object"):
        DeviceReport.from_json(value)
