import math

import pytest

from wildflower.server_app.units import bytes_text, counted, percent, plain, range_text, seconds_text, time_unit


@pytest.mark.parametrize(
    ("form", "value", "text"),
    [
        (percent, 0.83124, "83.12 %"),
        (percent, 0.2, "20 %"),
        (plain, 44470, "44,470"),
        (plain, 0.24214, "0.2421"),
        (bytes_text, 0, "0 B"),
        (bytes_text, 999, "999 B"),
        (bytes_text, 1500, "1.5 kB"),
        (bytes_text, 29_700_000, "29.7 MB"),
        (bytes_text, 5e15, "5,000 TB"),
        (seconds_text, 2.514, "2.51 s"),
        (seconds_text, 59.99, "60 s"),
        (seconds_text, math.inf, "never"),
        (seconds_text, 60, "1 min"),
        (seconds_text, 245, "4 min 5 s"),
        (seconds_text, 3600 * 3 + 60 * 12 + 5, "3 h 12 min"),
        (seconds_text, 86400 * 2 + 3600, "2 d 1 h"),
    ],
)
def test_numbers_as_people_read_them(form, value, text):
    assert form(value) == text


def test_one_and_several():
    assert [counted(number, "round") for number in (1, 2, 1000)] == ["1 round", "2 rounds", "1,000 rounds"]
    assert [range_text(2.5, 2.5), range_text(2.5, 2.501), range_text(2, 2.5)] == ["2.5", "2.5", "2 to 2.5"]


def test_time_unit():
    assert [time_unit(seconds)[1] for seconds in (5, 119, 120, 7200, 200_000)] == [
        "seconds",
        "seconds",
        "minutes",
        "hours",
        "days",
    ]
