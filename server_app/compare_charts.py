"""Charts of several runs side by side, and their evaluations as one table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from statistics import fmean

from wildflower.plugins.extras import needed
from wildflower.server_app.charts import Chart, Dot, Line, dot_chart, line_chart
from wildflower.server_app.compared_runs import Group, Run, interval
from wildflower.server_app.run_records import TRAFFIC, RoundRecord
from wildflower.server_app.tables import frame_of
from wildflower.server_app.units import Format, bytes_text, one_digit, plain, tenths, time_unit
from wildflower.tasks.metrics import Scale

LEGEND = (
    "A dot or a line is the mean over seeds, and small marks are the seeds. Around it lies the range of two seeds, or "
    "the 95 % interval of the mean of more. Hollow dots do not count."
)


def score_chart(groups: Sequence[Group], scale: Scale) -> list[Chart]:
    """Draw what each method delivers, with its seeds, and the baseline; [] if nothing was scored."""
    dots = []
    for group in groups:
        seeds = {seed: y for seed, run in sorted(group.by_seed.items()) if (y := run.summary.figure) is not None}
        if seeds and group.mean == group.mean:  # not NaN
            dots.append(Dot(group.label, fmean(seeds.values()), interval([*seeds.values()]), seeds, group.counts))
    baseline = next((g for g in groups if g.is_baseline and g.mean is not None), None)
    line_at = None if baseline is None or baseline.mean is None else (f"baseline, {baseline.name}", baseline.mean)
    label = _title(groups, scale)
    return [dot_chart(label, dots, x_label=label, x_format=one_digit(scale), line_at=line_at)] if dots else []


def are_delivered(groups: Sequence[Group]) -> bool:
    """Return whether all runs say what they deliver: else they are drawn by their whole models."""
    return all(run.summary.delivered_score is not None for group in groups for run in group.runs)


def _title(groups: Sequence[Group], scale: Scale) -> str:
    return f"Delivered {scale.label}" if are_delivered(groups) else scale.title


def line_charts(groups: Sequence[Group], scale: Scale) -> list[Chart]:
    """Draw scores over rounds, simulated time and traffic, the loss, and the budgets used."""
    length, unit = time_unit(max((run.summary.simulated_seconds for group in groups for run in group.runs), default=0))
    known = are_delivered(groups)
    rounds, clock, traffic = (xs_of(name, length) for name in ("rounds", "hours", "bytes"))

    def score(r: RoundRecord) -> float | None:
        return r.delivered_score if known else r.score

    title, text = _title(groups, scale), one_digit(scale)
    over_traffic = lines_over_seeds(groups, traffic, score)
    charts = [
        line_chart(f"{title} over rounds", lines_over_seeds(groups, rounds, score), x_label="round", y_format=text),
        line_chart(f"{title} over simulated time", lines_over_seeds(groups, clock, score), x_label=unit, y_format=text),
        line_chart(
            f"{title} over traffic", over_traffic, x_label="training, down and up", y_format=text, x_format=bytes_text
        ),
    ]
    if known:
        lines = lines_over_seeds(groups, rounds, lambda r: r.score)
        lines = [line for line, group in zip(lines, groups, strict=True) if group.runs[0].whole]
        charts.append(line_chart(f"{scale.title} of the whole model", lines, x_label="round", y_format=text))

    def by_round(title: str, y_of: Callable[[RoundRecord], float | None], form: Format) -> Chart:
        from_zero = form is tenths
        lines = lines_over_seeds(groups, rounds, y_of)
        return line_chart(title, lines, x_label="round", y_format=form, from_zero=from_zero, cut=True)

    charts.append(by_round("Loss", lambda r: r.loss, plain))
    charts.append(by_round("Memory budget used", lambda r: r.memory_utilisation, tenths))
    charts.append(by_round("Bandwidth budget used", lambda r: r.bandwidth_utilisation, tenths))
    return [chart for chart in charts if chart.traces]


def xs_of(name: str, length: float) -> Callable[[Run], list[float]]:
    """Return what gives where a run's rounds stand: by their "rounds", "bytes" or "hours", the latter in `length`."""

    def xs(run: Run) -> list[float]:
        if name == "bytes":
            return [float(total) for total in accumulate(r.training_bytes for r in run.rounds)]
        return [r.simulated_seconds / length if name == "hours" else float(r.round) for r in run.rounds]

    return xs


def lines_over_seeds(
    groups: Sequence[Group],
    xs_of_run: Callable[[Run], list[float]],
    y_of: Callable[[RoundRecord], float | None],
    around: Callable[[Sequence[float]], tuple[float, float] | None] = interval,
) -> list[Line]:
    """Return a line per group: the mean over its runs, up to the end of the shortest, and what is `around` it."""
    lines = []
    for color, group in enumerate(groups):
        xs = [fmean(x) for x in zip(*(xs_of_run(run) for run in group.runs), strict=False)]
        of_rounds = list(zip(*([y_of(r) for r in run.rounds] for run in group.runs), strict=False))
        # A round that one of the runs did not evaluate has no mean.
        known = [[y for y in ys if y is not None] for ys in of_rounds]
        whole = [ys if len(ys) == len(group.runs) else [] for ys in known]
        ends = [around(ys) or (None, None) for ys in whole]
        band = ([low for low, _ in ends], [high for _, high in ends]) if len(group.runs) > 1 else None
        means = [fmean(ys) if ys else None for ys in whole]
        lines.append(Line(group.label, xs, means, color, dash="" if group.counts else "dot", band=band))
    return lines


def evaluations(groups: Sequence[Group]) -> str:
    """Return every evaluation of every run as a line of CSV, with the scores of tiers in columns of their own."""
    with needed("pandas", "a table"):
        import pandas as pd

    first = ["run", "method", "seed", "round", "simulated_seconds", *TRAFFIC, "metric", "delivered_score", "score"]
    first += ["loss", "delivered_devices", "devices_without_model", "devices_beyond_budget"]
    frames = []
    for group in groups:
        for run in group.runs:
            frame = frame_of(run.rounds, RoundRecord).astype(object)
            frame[TRAFFIC] = frame[TRAFFIC].cumsum()
            own = frame.loc[[r.score_by_tier is not None for r in run.rounds]]
            frames.append(own.assign(run=run.name, method=group.name, seed=run.seed))
    by_tier = "delivered_score_by_tier."
    whole = pd.concat(frames)
    tiers = {name: f"delivered_score {name.removeprefix(by_tier)}" for name in whole if name.startswith(by_tier)}
    columns = whole.reindex(columns=[*first, *tiers]).rename(columns=tiers)
    return columns.to_csv(index=False, lineterminator="\n")
