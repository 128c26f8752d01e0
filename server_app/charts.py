"""Charts as figures of Plotly, which a page draws in the browser: plain dicts, in the colors of the page's style.

Nothing of Plotly is imported here: `tests/server_app/test_charts.py` has it check the dicts.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from wildflower.server_app.units import Format, bytes_text, percent, plain, seconds_text, tenths

COLORS = 8  # of lines, as the page's style names them; more lines than that are told apart by their dashes
DASHES = ("solid", "dash", "dot")
POINTS_WITH_MARKS = 40
FEW_ROUNDS = 8  # of which each has its tick
OUTLIER = 4  # times what a usual line reaches: a line beyond that is cut off
SKEWED = 10  # times as far as another line goes: the axis is logarithmic
BAND_SPACE = 0.75  # of the range of all lines: the most of a band that is shown above and below them
EDGE = 0.06  # of the range of all lines: what is left free above and below
MAX_TICKS = 20  # below the columns of a map
TICKS: dict[Format, dict[str, Any]] = {
    percent: {"tickformat": ",.3~%"},
    tenths: {"tickformat": ",.3~%"},
    bytes_text: {"tickformat": "~s", "ticksuffix": "B"},
    seconds_text: {"tickformat": "~g", "ticksuffix": " s"},
    plain: {"tickformat": ",.4~g"},
}


@dataclass(frozen=True)
class Line:
    """One named line of a chart. A point whose y is None or not finite is left out.

    Attributes:
        color: of `COLORS`; None: the next one.
        dash: of `DASHES`; "": solid, until the colors are used up.
        band: what lies around the line: the lower and the upper end at each of `xs`.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    color: int | None = None
    dash: str = ""
    band: tuple[Sequence[float | None], Sequence[float | None]] | None = None

    def points(self) -> list[tuple[float, float]]:
        """Return what can be drawn of it."""
        return [(x, y) for x, y in zip(self.xs, self.ys, strict=True) if y is not None and math.isfinite(y)]


@dataclass(frozen=True)
class Dot:
    """A row of a dot chart.

    Attributes:
        interval: around the mean; None with one seed.
        seeds: the value of each.
        counts: whether it is compared with the others.
    """

    name: str
    mean: float
    interval: tuple[float, float] | None
    seeds: Mapping[int, float]
    counts: bool = True


@dataclass(frozen=True)
class Entry:
    """A trace in a legend: its number, its color in the page's style, its dash, its name."""

    trace: int
    color: str
    dash: str
    name: str


@dataclass(frozen=True)
class Chart:
    """A figure and what stands around it.

    Attributes:
        title: above it.
        traces: as Plotly takes them; each names its color in the page's style by its `meta`.
        layout: likewise.
        height: in pixels.
        legend: what the traces are called, which the page shows and lets the reader switch off.
        key: colors of the page's style and what they mean, where these are no traces.
        note: below it.
        wide: it takes a whole row.
        constant: the values of its lines, if none of them ever changes; "" if one does.
    """

    title: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    height: int = 240
    legend: list[Entry] = field(default_factory=list)
    key: list[tuple[str, str]] = field(default_factory=list)
    note: str = ""
    wide: bool = False
    constant: str = ""


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    y_format: Format = plain,
    x_format: Format = plain,
    from_zero: bool = False,
    cut: bool = False,
) -> Chart:
    """Return a chart with a line per entry of `lines` that has points, and a text on every point.

    Args:
        cut: a line far beyond the others is cut off at the top, which a note says, so that it does not flatten them.
    """
    drawn = [line for line in lines if line.points()]
    traces: list[dict[str, Any]] = []
    legend = []
    for index, line in enumerate(drawn):
        number = index if line.color is None else line.color
        color, dash = f"c{number % COLORS}", line.dash or DASHES[number // COLORS % len(DASHES)]
        if line.band is not None:
            traces.append(_band(line, color))
        points = line.points()
        legend.append(Entry(len(traces), color, dash, line.name))
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if len(points) <= POINTS_WITH_MARKS and not line.dash else "lines",
                "name": _no_markup(line.name),
                "showlegend": True,
                "x": [x for x, _ in points],
                "y": [y for _, y in points],
                "text": [_no_markup(f"{line.name}: {y_format(y)} at {x_label} {x_format(x)}") for x, y in points],
                "hoverinfo": "text",
                "line": {"width": 1.8, "dash": dash},
                "marker": {"size": 5},
                "meta": color,
            }
        )
    top, beyond = _cut(drawn) if cut else (0.0, [])
    ys = [y for line in drawn for _, y in line.points()]
    told = ", ".join(f"{line.name}, up to {y_format(high)}" for line, high in beyond)
    note = f"Beyond the chart: {told}." if beyond else ""
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": x_label}, **TICKS[x_format], **_whole(traces)},
        "yaxis": {"rangemode": "tozero" if from_zero else "normal", **TICKS[y_format]},
        "hovermode": "closest",
    }
    if beyond:
        layout["yaxis"]["range"] = [min(0.0, *ys), top]
    elif any(line.band for line in drawn) and max(ys) > min(ys):
        layout["yaxis"]["range"] = _with_bands(drawn, ys, from_zero=from_zero)
    if _is_skewed(drawn):
        layout["xaxis"] |= {"type": "log"}
    return Chart(title, traces, layout, legend=legend, note=note, constant=_constant(drawn, y_format))


def _with_bands(lines: Sequence[Line], ys: Sequence[float], *, from_zero: bool) -> list[float]:
    """Return the ends of an axis that shows all lines, and of their bands what does not flatten the lines."""
    bands = [y for line in lines if line.band for end in line.band for y in end if y is not None and math.isfinite(y)]
    height = max(ys) - min(ys)
    low = max(min(ys) - BAND_SPACE * height, min([*bands, *ys]) - EDGE * height)
    high = min(max(ys) + BAND_SPACE * height, max([*bands, *ys]) + EDGE * height)
    return [0.0 if from_zero else low, high]


def _band(line: Line, color: str) -> dict[str, Any]:
    """Return the trace of what lies around a line."""
    assert line.band is not None
    ends = [
        (x, low, high)
        for x, low, high in zip(line.xs, *line.band, strict=True)
        if low is not None and high is not None and math.isfinite(low) and math.isfinite(high)
    ]
    return {
        "type": "scatter",
        "mode": "lines",
        "fill": "toself",
        "x": [x for x, _, _ in ends] + [x for x, _, _ in reversed(ends)],
        "y": [low for _, low, _ in ends] + [high for _, _, high in reversed(ends)],
        "hoverinfo": "skip",
        "showlegend": False,
        "meta": color,
    }


def _is_skewed(lines: Sequence[Line]) -> bool:
    """Return whether some lines end so far before others that only a logarithmic axis shows all."""
    ends = [line.points()[-1][0] for line in lines]
    return len(ends) > 1 and min(x for line in lines for x, _ in line.points()) > 0 and max(ends) > SKEWED * min(ends)


def _cut(lines: Sequence[Line]) -> tuple[float, list[tuple[Line, float]]]:
    """Return where a chart ends at the top, and the lines that go far beyond it, each with its highest value."""
    highest = [(line, max(y for _, y in line.points())) for line in lines]
    usual = sorted(high for _, high in highest)[(len(lines) - 1) // 2] if lines else 0.0
    beyond = [(line, high) for line, high in highest if high > OUTLIER * usual > 0]
    return 1.1 * max((high for _, high in highest if high <= OUTLIER * usual), default=0.0), beyond


def _constant(lines: Sequence[Line], y_format: Format) -> str:
    """Return the values of lines that have several points and never change; "" where one does."""
    values = [{y_format(y) for _, y in line.points()} for line in lines]
    if not lines or any(len(of_line) > 1 for of_line in values) or all(len(line.points()) == 1 for line in lines):
        return ""
    if len(lines) == 1:
        return values[0].pop()
    return ", ".join(f"{line.name} {value.pop()}" for line, value in zip(lines, values, strict=True))


def dot_chart(
    title: str, dots: Sequence[Dot], *, x_label: str, x_format: Format, line_at: tuple[str, float] | None = None
) -> Chart:
    """Return a chart with a row per method: its mean, the interval around it, and its seeds.

    Args:
        line_at: a name and a value, where a line is drawn across all rows.
    """
    names = [_no_markup(dot.name) for dot in dots]
    traces: list[dict[str, Any]] = []
    for number, dot in enumerate(dots):
        text = f"{dot.name}: {x_format(dot.mean)}"
        interval = {}
        if dot.interval is not None:
            low, high = dot.interval
            text += f", {x_format(low)} to {x_format(high)}"
            ends = {"array": [high - dot.mean], "arrayminus": [dot.mean - low]}
            interval = {"error_x": {"type": "data", "symmetric": False, "thickness": 1.5, **ends}}
        common = {"type": "scatter", "mode": "markers", "hoverinfo": "text", "meta": f"c{number % COLORS}"}
        seeds = [_no_markup(f"{dot.name}, seed {seed}: {x_format(value)}") for seed, value in dot.seeds.items()]
        own = {"x": list(dot.seeds.values()), "y": [names[number]] * len(dot.seeds), "text": seeds}
        if len(dot.seeds) > 1:
            traces.append({**common, **own, "marker": {"size": 5, "symbol": "line-ns"}, "showlegend": False})
        mark = {"size": 11, "symbol": "circle" if dot.counts else "circle-open"}
        mean = {"x": [dot.mean], "y": [names[number]], "text": [_no_markup(text)], "marker": mark}
        traces.append({**common, **mean, **interval, "showlegend": False})
    legend = []
    if line_at is not None:
        name, value = line_at
        legend.append(Entry(len(traces), "c7", "dot", f"{name}: {x_format(value)}"))
        across = {"x": [value] * len(names), "y": names, "line": {"width": 1.8, "dash": "dot"}, "marker": {"size": 5}}
        traces.append({"type": "scatter", "mode": "lines", "hoverinfo": "skip", "meta": "c7", **across})
    layout = {
        "xaxis": {"title": {"text": x_label}, **TICKS[x_format]},
        "yaxis": {
            "type": "category",
            "categoryarray": names[::-1],
            "categoryorder": "array",
            "range": [-0.6, len(names) - 0.4],
        },
        "hovermode": "closest",
    }
    return Chart(title, traces, layout, height=70 + 28 * len(names), legend=legend, wide=True)


def bar_chart(
    title: str, bars: Iterable[tuple[str, str, Sequence[float], Sequence[float]]], *, x_label: str, y_format: Format
) -> Chart:
    """Stacked bars.

    Args:
        bars: for each part its name, its color in the page's style, where its bars stand, and how high they are.
    """
    parts = list(bars)
    traces = [
        {
            "type": "bar",
            "x": list(xs),
            "y": list(ys),
            "text": [_no_markup(f"{name}: {y_format(y)} at {x_label} {plain(x)}") for x, y in zip(xs, ys, strict=True)],
            "textposition": "none",
            "hoverinfo": "text",
            "meta": color,
            "name": _no_markup(name),
            "showlegend": True,
        }
        for name, color, xs, ys in parts
    ]
    layout = {
        "barmode": "stack",
        "bargap": 0.08,
        "xaxis": {"title": {"text": x_label}, **TICKS[plain], **_whole(traces)},
        "yaxis": dict(TICKS[y_format]),
    }
    legend = [Entry(number, color, "solid", name) for number, (name, color, _, _) in enumerate(parts)]
    return Chart(title, traces, layout, legend=legend)


def cell_chart(
    title: str,
    rows: Sequence[str],
    columns: Sequence[float],
    cells: Iterable[tuple[int, int, str, str]],
    *,
    x_label: str,
    key: Sequence[tuple[str, str]],
    note: str = "",
) -> Chart:
    """A map of colored cells.

    Args:
        cells: row, column, color in the page's style, text.
        key: colors of the page's style and what they mean.
    """
    colors = list(dict.fromkeys(color for color, _ in key))
    z: list[list[int | None]] = [[None] * len(columns) for _ in rows]
    texts = [[""] * len(columns) for _ in rows]
    for row, column, color, text in cells:
        z[row][column] = colors.index(color)
        texts[row][column] = _no_markup(text)
    steps = len(colors)
    # Each color from its lower end to its upper one, so that no two run into each other.
    scale = [[place / steps, color] for number, color in enumerate(colors) for place in (number, number + 1)]
    traces = [
        {
            "type": "heatmap",
            "x": list(columns),
            "y": [_no_markup(name) for name in rows],
            "z": z,
            "text": texts,
            "hoverinfo": "text",
            "showscale": False,
            "colorbar": {"tickvals": list(range(steps)), "ticktext": [_no_markup(dict(key)[name]) for name in colors]},
            "zmin": -0.5,
            "zmax": steps - 0.5,
            "xgap": 1 if len(columns) <= 300 else 0,
            "ygap": 1 if len(rows) <= 100 else 0,
            "meta": scale,
        }
    ]
    layout = {
        "xaxis": {"title": {"text": x_label}, **TICKS[plain], **_below_columns(columns, traces)},
        "yaxis": {
            "autorange": "reversed",
            "type": "category",
            "showgrid": False,
            "nticks": 0 if len(rows) <= 40 else 40,
        },
    }
    height = 90 + len(rows) * (24 if len(rows) <= 12 else 15 if len(rows) <= 40 else 8 if len(rows) <= 100 else 5)
    return Chart(title, traces, layout, height=height, key=list(key), note=note, wide=True)


def _below_columns(columns: Sequence[float], traces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """No ticks between columns, which need not be numbered one by one, as where not every round is evaluated."""
    if all(after - before == 1 for before, after in pairwise(columns)):
        return {"nticks": MAX_TICKS, **_whole(traces)}
    return {"tickvals": list(columns[:: max(1, -(-len(columns) // MAX_TICKS))])}


def _whole(traces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """No ticks between rounds, of which there are no halves."""
    xs = [x for trace in traces for x in trace["x"]]
    few = bool(xs) and max(xs) - min(xs) <= FEW_ROUNDS and all(float(x).is_integer() for x in xs)
    return {"dtick": 1} if few else {}


def _no_markup(text: str) -> str:
    """A text as it is: Plotly takes some tags and entities in it for markup."""
    return text.replace("&", "&amp;").replace("<", "&lt;")
