"""A comparison for a paper: the columns of its one table, and figures with seeds as bands."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from itertools import accumulate
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from wildflower.plugins.extras import needed
from wildflower.plugins.nearest import nearest
from wildflower.server_app.compared_runs import Group, Run
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
    known = all(run.summary.delivered_score is not None for group in groups for run in group.runs)
    length, unit = time_unit(max(run.summary.simulated_seconds for group in groups for run in group.runs))
    for place, name in enumerate(asked, start=1):
        axes = found.add_subplot(high, wide, place)
        axes.set_xlabel(f"simulated {unit}" if name == "hours" else OVER[name])
        axes.set_ylabel(_y_label(name, scale, known))
        for number, group in enumerate(groups):
            _draw(axes, group, number, _xs(name, length), _ys(name, scale, known))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    found.axes[0].legend(frameon=False, fontsize="small")
    return found


def _y_label(name: str, scale: Scale, known: bool) -> str:
    if name == "memory":
        return "memory budget used (%)"
    return (f"delivered {scale.label}" if known else scale.label) + (" (%)" if scale.is_share else "")


def _xs(name: str, length: float) -> Callable[[Run], list[float]]:
    def xs(run: Run) -> list[float]:
        if name == "bytes":
            return [total / 1e6 for total in accumulate(r.training_bytes for r in run.rounds)]
        if name == "hours":
            return [r.simulated_seconds / length for r in run.rounds]
        return [float(r.round) for r in run.rounds]

    return xs


def _ys(name: str, scale: Scale, known: bool) -> Callable[[RoundRecord], float | None]:
    factor = 100 if scale.is_share or name == "memory" else 1

    def y(record: RoundRecord) -> float | None:
        score = record.delivered_score if known else record.score
        value = record.memory_utilisation if name == "memory" else score
        return None if value is None else factor * value

    return y


def _draw(
    axes: Axes,
    group: Group,
    number: int,
    xs_of: Callable[[Run], list[float]],
    y_of: Callable[[RoundRecord], float | None],
) -> None:
    """Draw a method up to the end of its shortest run; a round that one of its runs did not evaluate has no point."""
    columns = zip(*(zip(xs_of(run), map(y_of, run.rounds), strict=True) for run in group.runs), strict=False)
    points = [
        (fmean(x for x, _ in column), [y for _, y in column if y is not None])
        for column in columns
        if all(y is not None for _, y in column)
    ]
    xs = [x for x, _ in points]
    means = [fmean(ys) for _, ys in points]
    color = f"C{number % 10}"
    axes.plot(xs, means, color=color, label=group.name, marker="." if len(xs) <= 20 else "")
    if len(group.runs) > 1:
        spread = [stdev(ys) for _, ys in points]
        low = [mean - s for mean, s in zip(means, spread, strict=True)]
        high = [mean + s for mean, s in zip(means, spread, strict=True)]
        axes.fill_between(xs, low, high, color=color, alpha=0.2, linewidth=0)
