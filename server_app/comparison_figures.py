"""A comparison for a paper: the columns of its one table, and figures with seeds as bands."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from wildflower.plugins.extras import needed
from wildflower.plugins.nearest import nearest
from wildflower.server_app.charts import Line
from wildflower.server_app.compare_charts import are_delivered, lines_over_seeds, xs_of
from wildflower.server_app.compared_runs import Group
from wildflower.server_app.run_folder import JournalError
from wildflower.server_app.run_records import RoundRecord
from wildflower.server_app.units import time_unit
from wildflower.tasks.metrics import Scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_COLUMNS = 12
PANEL_INCHES = (4.2, 3.0)
OVER = {
    "rounds": "round",
    "bytes": "training traffic, down and up (MB)",
    "hours": "simulated hours",
    "memory": "round",
}
"""What a figure may be drawn over, and what stands below it; memory is what was used of the budgets."""


def paper_columns(tables: Sequence[tuple[Sequence[str], Sequence[Sequence[str]]]]) -> tuple[list[str], list[list[str]]]:
    """Return headers and rows of several tables of the same methods in one, with at most `MAX_COLUMNS` columns."""
    (headers, rows), *others = tables
    found, lines = [*headers], [[*row] for row in rows]
    for more, its_rows in others:
        places = [place for place, name in enumerate(more) if place and name not in found]
        found += [more[place] for place in places]
        for line, row in zip(lines, its_rows, strict=True):
            line += [row[place] for place in places]
    return found[:MAX_COLUMNS], [line[:MAX_COLUMNS] for line in lines]


def figure(groups: Sequence[Group], scale: Scale, over: str | Sequence[str] | None = None) -> Figure:
    """Draw a line for each method and a band of one standard deviation over its seeds, a panel for each of `over`."""
    asked = list(OVER) if over is None else list(over) if isinstance(over, list | tuple) else [over]
    if not asked:
        raise JournalError(f"over = {over!r}: must be among {', '.join(OVER)}")
    if unknown := [name for name in asked if name not in OVER]:
        near = nearest(str(unknown[0]), OVER)
        raise JournalError(f"over = {unknown[0]!r}: must be among {', '.join(OVER)}; {near}")
    with needed("matplotlib", "a figure"):
        from matplotlib.figure import Figure

    class Shown(Figure):
        """A figure that a notebook shows as it is."""

        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png", dpi=110)
            return file.getvalue()

    wide = min(2, len(asked))
    high = -(-len(asked) // wide)
    found = Shown(figsize=(wide * PANEL_INCHES[0], high * PANEL_INCHES[1]), layout="constrained")
    known = are_delivered(groups)
    length, unit = time_unit(max(run.summary.simulated_seconds for group in groups for run in group.runs))
    for place, name in enumerate(asked, start=1):
        axes = found.add_subplot(high, wide, place)
        axes.set_xlabel(f"simulated {unit}" if name == "hours" else OVER[name])
        axes.set_ylabel(_y_label(name, scale, known))
        for line in lines_over_seeds(groups, xs_of(name, length), _ys(name, scale, known), _deviation):
            _draw(axes, line, 1e6 if name == "bytes" else 1.0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    found.axes[0].legend(frameon=False, fontsize="small")
    return found


def _y_label(name: str, scale: Scale, known: bool) -> str:
    if name == "memory":
        return "memory budget used (%)"
    return (f"delivered {scale.label}" if known else scale.label) + (" (%)" if scale.is_share else "")


def _ys(name: str, scale: Scale, known: bool) -> Callable[[RoundRecord], float | None]:
    factor = 100 if scale.is_share or name == "memory" else 1

    def y(record: RoundRecord) -> float | None:
        score = record.delivered_score if known else record.score
        value = record.memory_utilisation if name == "memory" else score
        return None if value is None else factor * value

    return y


def _deviation(values: Sequence[float]) -> tuple[float, float] | None:
    """Return one standard deviation around the mean of several values."""
    if len(values) < 2:
        return None
    return fmean(values) - stdev(values), fmean(values) + stdev(values)


def _draw(axes: Axes, line: Line, unit: float) -> None:
    """Draw a method, with points where all of its runs were evaluated. `unit`: of what it is drawn over."""
    points = [(x / unit, y) for x, y in line.points()]
    color = f"C{(line.color or 0) % 10}"
    marker = "." if len(points) <= 20 else ""
    axes.plot([x for x, _ in points], [y for _, y in points], color=color, label=line.name, marker=marker)
    if line.band is not None:
        ends = [(x / unit, low, high) for x, low, high in zip(line.xs, *line.band, strict=True) if low is not None]
        xs, low, high = zip(*ends, strict=True)
        axes.fill_between(xs, low, high, color=color, alpha=0.2, linewidth=0)
