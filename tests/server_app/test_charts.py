import plotly.graph_objects as go
import pytest

from wildflower.server_app.charts import Chart, Dot, Entry, Line, bar_chart, cell_chart, dot_chart, line_chart
from wildflower.server_app.units import bytes_text, percent, plain, seconds_text


def checked(chart: Chart) -> Chart:
    """Plotly raises ValueError for what is none of its properties, or no value of one; our colors are the page's."""
    go.Figure({"data": chart.traces, "layout": chart.layout})
    return chart


@pytest.mark.parametrize("form", [percent, plain, bytes_text, seconds_text])
def test_lines_are_as_plotly_takes_them(form):
    lines = [Line("a", [1, 2, 3], [0.0, 50.0, 100.0]), Line("b", [1, 3], [0.5, 0.25], band=([0.4, None], [0.75, None]))]
    chart = checked(line_chart("t", lines, x_label="round", y_format=form, from_zero=True))
    first, band, second = chart.traces
    assert (first["x"], first["y"]) == ([1, 2, 3], [0.0, 50.0, 100.0])
    assert first["text"][2] == f"a: {form(100.0)} at round 3"
    assert (band["x"], band["y"], band["fill"]) == ([1, 1], [0.4, 0.75], "toself")
    assert second["y"] == [0.5, 0.25]
    assert chart.legend == [Entry(0, "c0", "solid", "a"), Entry(2, "c1", "solid", "b")]


def test_what_is_not_a_number_is_left_out():
    lines = [Line("b", [1], [None]), Line("a", [1, 2, 3], [None, float("nan"), 5.0])]
    chart = line_chart("t", lines, x_label="round")
    assert [(trace["x"], trace["y"]) for trace in chart.traces] == [([3], [5.0])]
    assert [(entry.trace, entry.name) for entry in chart.legend] == [(0, "a")]
    assert line_chart("t", lines[:1], x_label="round").traces == []


def test_a_line_far_beyond_the_others_does_not_flatten_them():
    lines = [Line("a", [1, 2], [0.8, 0.9]), Line("b", [1, 2], [0.7, 1.0]), Line("c", [1, 2], [60.0, 50.0])]
    chart = checked(line_chart("t", lines, x_label="round", y_format=percent, cut=True))
    assert chart.layout["yaxis"]["range"] == [0.0, pytest.approx(1.1)]
    assert chart.note == "Beyond the chart: c, up to 6000 %."
    assert "range" not in line_chart("t", lines[:2], x_label="round", cut=True).layout["yaxis"]
    assert "range" not in line_chart("t", lines, x_label="round").layout["yaxis"]


def test_a_line_that_goes_on_for_long_does_not_push_the_others_together():
    short, long = Line("a", [0.1, 0.2], [0.5, 0.6]), Line("b", [10, 40], [0.5, 0.6])
    assert checked(line_chart("t", [short, long], x_label="hours")).layout["xaxis"]["type"] == "log"
    assert "type" not in line_chart("t", [short, Line("b", [0.1, 1], [0.5, 0.6])], x_label="hours").layout["xaxis"]
    assert "type" not in line_chart("t", [Line("a", [0, 0.2], [0.5, 0.6]), long], x_label="hours").layout["xaxis"]


def test_a_wide_band_does_not_flatten_the_lines():
    line = Line("a", [1, 2], [0.5, 0.7], band=([-3.0, -3.0], [4.0, 4.0]))
    assert line_chart("t", [line], x_label="round").layout["yaxis"]["range"] == [
        pytest.approx(0.35),
        pytest.approx(0.85),
    ]


def test_a_narrow_band_leaves_no_empty_space_around_the_lines():
    line = Line("a", [1, 2], [0.5, 0.7], band=([0.4, 0.6], [0.6, 0.8]))
    low, high = line_chart("t", [line], x_label="round").layout["yaxis"]["range"]
    assert (low, high) == (pytest.approx(0.388), pytest.approx(0.812))


def test_what_never_changes_is_told_in_words():
    flat = Line("a", [1, 2], [10, 10])
    assert line_chart("t", [flat], x_label="round").constant == "10"
    assert line_chart("t", [flat, Line("b", [1], [3])], x_label="round").constant == "a 10, b 3"
    assert line_chart("t", [flat, Line("b", [1, 2], [3, 4])], x_label="round").constant == ""
    assert line_chart("t", [Line("a", [1], [10])], x_label="round").constant == ""  # nobody knows of one round


def test_dots_have_their_seeds_and_intervals():
    dots = [Dot("a", 0.5, (0.4, 0.6), {1: 0.45, 2: 0.55}), Dot("b", 0.2, None, {1: 0.2}, counts=False)]
    chart = checked(dot_chart("t", dots, x_label="score", x_format=percent, line_at=("baseline", 0.3)))
    seeds, mean, other, line = chart.traces
    assert (seeds["x"], seeds["y"]) == ([0.45, 0.55], ["a", "a"])
    assert (mean["error_x"]["array"], mean["error_x"]["arrayminus"]) == ([pytest.approx(0.1)], [pytest.approx(0.1)])
    assert mean["text"] == ["a: 50 %, 40 % to 60 %"]
    assert "error_x" not in other
    assert [trace["marker"]["symbol"] for trace in (mean, other)] == ["circle", "circle-open"]
    assert (line["x"], chart.legend[0].name) == ([0.3, 0.3], "baseline: 30 %")
    assert chart.layout["yaxis"]["categoryarray"] == ["b", "a"]  # from below


def test_there_are_no_halves_of_rounds():
    ticks = [
        line_chart("t", [Line("a", xs, [1.0] * len(xs))], x_label="round").layout["xaxis"].get("dtick")
        for xs in ([1, 2, 3], [1, 2.5, 3], list(range(1, 100)))
    ]
    assert ticks == [1, None, None]


def test_ticks_stand_below_columns():
    """Rounds 3, 6, ... have been evaluated: a tick at 5 would stand between two of them."""
    ticks = [
        cell_chart("t", ["a"], range(3, last, 3), [], x_label="round", key=[("s0", "")]).layout["xaxis"]["tickvals"]
        for last in (10, 91)
    ]
    assert ticks == [[3, 6, 9], list(range(3, 91, 6))]
    # One by one there is nothing between them, and Plotly's own ticks follow a zoom.
    axis = cell_chart("t", ["a"], range(1, 100), [], x_label="round", key=[("s0", "")]).layout["xaxis"]
    assert "tickvals" not in axis


def test_many_points_have_no_marks():
    long = line_chart("t", [Line("a", range(1000), [float(x) for x in range(1000)])], x_label="round")
    assert long.traces[0]["mode"] == "lines"
    assert len(long.traces[0]["x"]) == 1000


def test_lines_beyond_the_colors_are_dashed():
    chart = checked(line_chart("t", [Line(f"line {i}", [1, 2], [0.0, i]) for i in range(10)], x_label="round"))
    assert [(e.color, e.dash) for e in chart.legend[7:]] == [("c7", "solid"), ("c0", "dash"), ("c1", "dash")]
    assert chart.traces[8]["line"]["dash"] == "dash"


def test_bars_are_stacked():
    chart = checked(
        bar_chart("t", [("a", "s0", [1, 2], [3, 4]), ("b", "s5", [1], [2])], x_label="round", y_format=plain)
    )
    assert chart.layout["barmode"] == "stack"
    assert [(entry.color, entry.name) for entry in chart.legend] == [("s0", "a"), ("s5", "b")]
    assert chart.traces[0]["text"] == ["a: 3 at round 1", "a: 4 at round 2"]


def test_cells_have_the_colors_of_the_key():
    key = [("s0", "small"), ("s5", "large"), ("late", "late")]
    cells = [(0, 0, "s0", "first"), (1, 1, "late", "last")]
    chart = cell_chart("t", ["7", "8"], [1, 2], cells, x_label="round", key=key)
    (trace,) = chart.traces
    assert trace["z"] == [[0, None], [None, 2]]
    assert trace["text"] == [["first", ""], ["", "last"]]
    assert chart.layout["yaxis"]["type"] == "category"  # 7 is a name
    # Of three steps from 0 to 1 each has one color: a value n lies in the middle of its step.
    steps = [(pytest.approx(at), color) for at, color in trace["meta"]]
    assert steps == [(0, "s0"), (1 / 3, "s0"), (1 / 3, "s5"), (2 / 3, "s5"), (2 / 3, "late"), (1, "late")]
    assert (trace["zmin"], trace["zmax"]) == (-0.5, 2.5)
    colors = {"s0": "#111", "s5": "#222", "late": "#333"}
    trace["colorscale"] = [[at, colors[name]] for at, name in trace["meta"]]  # as the page's script does
    checked(chart)


def test_texts_are_no_markup_to_plotly():
    line = line_chart("t", [Line("<a>&", [1], [1.0])], x_label="<x>")
    assert line.traces[0]["text"] == ["&lt;a>&amp;: 1 at &lt;x> 1"]
    bars = bar_chart("t", [("<a>", "s0", [1], [3])], x_label="r", y_format=plain)
    assert bars.traces[0]["text"] == ["&lt;a>: 3 at r 1"]
    cells = cell_chart("t", ["<a>"], [1], [(0, 0, "s0", "<b>")], x_label="r", key=[("s0", "<s>")])
    assert (cells.traces[0]["y"], cells.traces[0]["text"]) == (["&lt;a>"], [["&lt;b>"]])
