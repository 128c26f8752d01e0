import re

import pytest

from server_app.charts import Line, bytes_text, line_chart, percent, plain, seconds_text, table, ticks, time_unit


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
        (seconds_text, 60, "1 min"),
        (seconds_text, 245, "4 min 5 s"),
        (seconds_text, 3600 * 3 + 60 * 12 + 5, "3 h 12 min"),
        (seconds_text, 86400 * 2 + 3600, "2 d 1 h"),
    ],
)
def test_numbers_as_people_read_them(form, value, text):
    assert form(value) == text


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 100, [0, 20, 40, 60, 80, 100]),
        (0.13, 0.97, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (1, 30, [0, 5, 10, 15, 20, 25, 30]),
        (3, 3, [3, 3.5]),
        (-2, 2, [-2, -1, 0, 1, 2]),
    ],
)
def test_ticks_are_round_and_hold_the_data(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


def test_time_unit():
    assert [time_unit(seconds)[1] for seconds in (5, 119, 120, 7200, 200_000)] == [
        "seconds",
        "seconds",
        "minutes",
        "hours",
        "days",
    ]


def test_points_lie_where_their_values_are():
    # 440 x 240 with the plot from 72 to 428 and from 10 to 206: 0 is at the bottom, 100 at the top.
    chart = line_chart("t", [Line("a", [1, 2, 3], [0.0, 50.0, 100.0])], x_label="round")
    assert 'points="72.0,206.0 250.0,108.0 428.0,10.0"' in chart


def test_what_is_not_a_number_is_left_out():
    chart = line_chart("t", [Line("a", [1, 2, 3], [None, float("nan"), 5.0]), Line("b", [1], [None])], x_label="round")
    assert len(re.findall("<circle", chart)) == 1
    assert ">b <b>" not in chart
    assert "nothing was measured" in line_chart("t", [Line("b", [1], [None])], x_label="round")


def test_many_points_have_no_text_each():
    long = line_chart("t", [Line("a", range(1000), [float(x) for x in range(1000)])], x_label="round")
    assert "<circle" not in long
    assert "<polyline" in long


def test_lines_beyond_the_colors_are_dashed():
    chart = line_chart("t", [Line(f"line {i}", [1, 2], [0.0, i]) for i in range(10)], x_label="round")
    assert chart.count('class="line c0" stroke-dasharray=""') == 2  # the line and its key
    assert chart.count('class="line c0" stroke-dasharray="6 3"') == 2


def test_texts_are_escaped():
    chart = line_chart("<t>", [Line("<a>", [1], [1.0])], x_label="<x>", y_format=lambda _: "<y>")
    assert not re.search("<[taxy]>", chart)
    assert "<td>&lt;b&gt;</td><td class=n>1</td>" in table(["k", "v"], [("<b>", "1")])
