"""Charts as figures of Plotly, which a page draws in the browser: plain dicts, in the colors of the page's style.

Nothing of Plotly is imported here: `tests/server_app/test_charts.py` has it check the dicts.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from wildflower.server_app.units import Format, bytes_text, percent, plain, seconds_text

COLORS = 8  # of lines, as the page's style names them; more lines than that are told apart by their dashes
DASHES = ("solid", "dash", "dot")
POINTS_WITH_MARKS = 40
FEW_ROUNDS = 8  # of which each has its tick
MAX_TICKS = 20  # below the columns of a map
TICKS: dict[Format, dict[str, Any]] = {
    percent: {"tickformat": ",.3~%"},
    bytes_text: {"tickformat": "~s", "ticksuffix": "B"},
    seconds_text: {"tickformat": "~g", "ticksuffix": " s"},
    plain: {"tickformat": ",.4~g"},
}


@dataclass(frozen=True)
class Line:
    """One named line of a chart. A point whose y is None or not finite is left out. `color` groups several lines."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    color: int | None = None
    faint: bool = False

    def points(self) -> list[tuple[float, float]]:
        """What can be drawn of it."""
        return [(x, y) for x, y in zip(self.xs, self.ys, strict=True) if y is not None and math.isfinite(y)]


@dataclass(frozen=True)
class Entry:
    """A trace in a legend: its number, its color in the page's style, its dash, its name, its last value."""

    trace: int
    color: str
    dash: str
    name: str
    last: str


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
    """

    title: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    height: int = 240
    legend: list[Entry] = field(default_factory=list)
    key: list[tuple[str, str]] = field(default_factory=list)
    note: str = ""
    wide: bool = False


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    y_format: Format = plain,
    x_format: Format = plain,
    from_zero: bool = False,
) -> Chart:
    """One line per entry of `lines` that has points, its last value in the legend, and a text on every point."""
    traces: list[dict[str, Any]] = []
    legend = []
    for index, line in enumerate(line for line in lines if line.points()):
        number = index if line.color is None else line.color
        color, dash = f"c{number % COLORS}", DASHES[number // COLORS % len(DASHES)]
        points = line.points()
        if not line.faint:
            legend.append(Entry(index, color, dash, line.name, y_format(points[-1][1])))
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if len(points) <= POINTS_WITH_MARKS and not line.faint else "lines",
                "x": [x for x, _ in points],
                "y": [y for _, y in points],
                "text": [_no_markup(f"{line.name}: {y_format(y)} at {x_label} {x_format(x)}") for x, y in points],
                "hoverinfo": "skip" if line.faint else "text",
                "opacity": 0.35 if line.faint else 1,
                "line": {"width": 1 if line.faint else 1.8, "dash": dash},
                "marker": {"size": 5},
                "meta": color,
            }
        )
    layout = {
        "xaxis": {"title": {"text": x_label}, **TICKS[x_format], **_whole(traces)},
        "yaxis": {"rangemode": "tozero" if from_zero else "normal", **TICKS[y_format]},
        "hovermode": "closest",
    }
    return Chart(title, traces, layout, legend=legend)


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
        }
        for name, color, xs, ys in parts
    ]
    layout = {
        "barmode": "stack",
        "bargap": 0.08,
        "xaxis": {"title": {"text": x_label}, **TICKS[plain], **_whole(traces)},
        "yaxis": dict(TICKS[y_format]),
    }
    legend = [Entry(number, color, "solid", name, "") for number, (name, color, _, _) in enumerate(parts)]
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
