"""Several runs side by side: what each method delivers to this fleet, how sure that is, and what it took."""

import csv
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from wildflower.server_app.advice import advice_on
from wildflower.server_app.charts import Chart, Line, line_chart
from wildflower.server_app.compared_runs import Group, Run, differing_keys, grouped, load_run, replicates, scale_of_all
from wildflower.server_app.comparison_figures import figure, latex, markdown, paper_columns
from wildflower.server_app.config import defaults
from wildflower.server_app.pages import Block, Charts, Heading, Paragraph, Table, page, table_html
from wildflower.server_app.run_folder import JournalError, is_run
from wildflower.server_app.run_records import TRAFFIC, RoundRecord, Summary
from wildflower.server_app.units import (
    Format,
    bytes_text,
    counted,
    percent,
    plain,
    score_format,
    seconds_text,
    time_unit,
)
from wildflower.tasks.metrics import Scale

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class TextTable:
    """A table as it is printed and as it stands on the page."""

    title: str
    headers: list[str]
    rows: list[list[str]]
    text_columns: int = 1


def _text(table: TextTable) -> str:
    """A table whose columns are aligned by spaces: texts to the left, figures to the right."""
    lines = [table.headers, *table.rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.headers))]

    def row(line: Sequence[str]) -> str:
        cells = (
            cell.ljust(width) if column < table.text_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return "\n".join([table.title, *map(row, lines)])


@dataclass(frozen=True, repr=False)
class Comparison:
    """The outcome.

    Attributes:
        target: the score that the runs are timed to reach.
        advice: sentences about which method to take, how sure that is, and what is not counted.
        tables: of texts.
        html: a whole page with all this, and plots.
        csv: every evaluation of every run that is compared, one per line.
        groups: the runs, those of one method together, and of several seeds.
        scale: what their scores mean.
    """

    target: float | None
    advice: list[str]
    tables: list[TextTable]
    html: str
    csv: str
    groups: list[Group]
    scale: Scale

    def __repr__(self) -> str:
        return "\n".join(self.advice) or "<Comparison of one method>"

    def __str__(self) -> str:
        """What `print` shows: the advice and the tables."""
        return "\n\n".join(["\n".join(self.advice), *map(_text, self.tables)]).strip()

    def to_markdown(self) -> str:
        """Return what a paper reports of each method as one table in Markdown, shares in percent."""
        return markdown(*self._for_paper(), text_columns=2)

    def to_latex(self) -> str:
        """Return what a paper reports of each method as one table in LaTeX (booktabs), shares in percent."""
        return latex(*self._for_paper(), text_columns=2)

    def _for_paper(self) -> tuple[list[str], list[list[str]]]:
        scores, _, costs, *_ = self.tables
        return paper_columns([(scores.headers, scores.rows), (costs.headers, costs.rows)])

    def plot(self, over: str | Sequence[str] | None = None) -> "Figure":
        """Return a figure of Matplotlib: the mean over seeds, and one standard deviation around it as a band.

        Args:
            over: "rounds", "bytes", "hours" (simulated) or "memory", or several of these; None draws all.
        """
        return figure(self.groups, self.scale, over)

    def _repr_html_(self) -> str:
        """What a notebook shows: the advice and the tables."""
        advice = "".join(f"<p>{escape(sentence)}</p>" for sentence in self.advice)
        tables = (
            f"<b>{escape(t.title)}</b>{table_html(Table(t.headers, t.rows, t.text_columns))}" for t in self.tables
        )
        return advice + "".join(tables)


def compare(run_dirs: Sequence[Path], target: float | None = None, rows: Sequence[str] = ()) -> Comparison:
    """Compare the finished runs in `run_dirs`, those that deliver most first; the others are listed as left out.

    Runs whose configurations are equal but for the seed share a row, with mean and standard deviation over the seeds.
    `rows` holds a name for every run, by which it is called in place of its method; runs of two names share no row.
    `target` is a score, of metrics that are shares one between 0 and 1, by default the worst that a run delivers.
    A run whose files are broken is left out as well.
    Raises JournalError when a folder does not hold a run, when no run is finished, when the runs are not scored by one
    metric, and when the target is no score of it.
    """
    loaded, broken = [], []
    for run_dir, row in zip(run_dirs, rows or [""] * len(run_dirs), strict=True):
        try:
            loaded.append(load_run(run_dir, row))
        except (JournalError, OSError) as error:
            if not is_run(run_dir):
                raise
            broken.append((run_dir.resolve().name, f"broken: {error}"))
    runs, left_out = replicates(loaded)
    left_out += broken
    if not runs:
        raise JournalError(f"none of the runs is finished: {'; '.join(f'{name} is {why}' for name, why in left_out)}")
    scale = scale_of_all(runs)
    given = target is not None
    if target is None:
        figures = [run.figure for run in runs]
        target = min((f for f in figures if f is not None and not math.isnan(f)), key=scale.rank, default=None)
    elif scale.is_share and not 0 <= target <= 1:
        raise JournalError(f"a target of {target:g} is no {scale.label}, which is between 0 and 1")
    groups = sorted(grouped(runs), key=lambda group: scale.rank(group.mean), reverse=True)
    tables = [
        _score_table(groups, scale),
        _last_table(groups, scale),
        _cost_table(groups, scale, target, given=given),
        *_part_tables(groups, scale),
        *_privacy_table(groups),
        *_settings_table(groups),
        *_search_table(groups),
        *([TextTable("Left out", ["run", "why"], [list(pair) for pair in left_out], 2)] if left_out else []),
    ]
    advice = advice_on(groups, scale)
    title = f"{len(runs)} runs side by side"
    leads = [Paragraph(sentence) for sentence in advice]
    if any(len(group.runs) > 1 for group in groups):
        leads.append(Paragraph("A strong line is the mean over seeds, faint lines are the runs."))
    blocks: list[Block] = [*leads]
    for number, t in enumerate(tables):
        blocks += [Heading(t.title), Table(t.headers, t.rows, t.text_columns)]
        if number == 0:
            blocks.append(Charts(_plots(groups, scale)))
    return Comparison(target, advice, tables, page(f"{title} - Wildflower", title, blocks), _csv(groups), groups, scale)


def _spread(values: Sequence[float | None], form: Callable[[float], str], missing: str = "none") -> str:
    """The mean of what there is, with the standard deviation of several, and how many of the runs lack it."""
    known = [value for value in values if value is not None]
    if not known:
        return missing
    text = form(fmean(known))
    if len(known) > 1:
        text += f" ± {form(stdev(known))}"
    return text if len(known) == len(values) else f"{text} ({len(known)} of {len(values)})"


def _mean(values: Sequence[float | None], form: Format, missing: str = "none") -> str:
    """The mean of what there is, and how many of the runs lack it."""
    known = [value for value in values if value is not None]
    if not known:
        return missing
    return form(fmean(known)) if len(known) == len(values) else f"{form(fmean(known))} ({len(known)} of {len(values)})"


def _short(scale: Scale) -> tuple[Format, str]:
    """How scores stand in narrow columns, and what then stands in their headers: percent without the sign."""
    return ((lambda value: f"{100 * value:.1f}"), ", %") if scale.is_share else (plain, "")


def _score_table(groups: Sequence[Group], scale: Scale) -> TextTable:
    text, unit = _short(scale)
    headers = ["method", "seeds", f"delivered{unit}", f"worst tier{unit}", f"whole model{unit}"]
    rows = []
    for group in groups:
        summaries = [run.summary for run in group.runs]
        rows.append(
            [
                group.name,
                group.seeds,
                _spread([summary.delivered_score for summary in summaries], text),
                _spread([summary.worst_tier_score for summary in summaries], text),
                _spread([summary.final_score for summary in summaries], text),
            ]
        )
    return TextTable(f"{scale.title}, mean of the last fifth of the evaluations", headers, rows, text_columns=2)


def _last_table(groups: Sequence[Group], scale: Scale) -> TextTable:
    text, unit = _short(scale)
    headers = ["method", "rounds", f"delivered{unit}", f"whole model{unit}", f"its best{unit}", "time here"]
    rows = []
    for group in groups:
        summaries = [run.summary for run in group.runs]
        rows.append(
            [
                group.name,
                _mean([summary.rounds for summary in summaries], _number),
                _spread([summary.last_delivered_score for summary in summaries], text),
                _spread([summary.last_score for summary in summaries], text),
                _spread([summary.best_score for summary in summaries], text),
                _mean([summary.wall_seconds for summary in summaries], seconds_text),
            ]
        )
    return TextTable(f"{scale.title} of the last evaluation", headers, rows)


def _cost_table(groups: Sequence[Group], scale: Scale, target: float | None, *, given: bool) -> TextTable:
    goal = "to the target" if target is None else f"to {score_format(scale)(target)}"
    headers = ["method", f"rounds {goal}", "simulated time", "training bytes", "down in all", "up in all"]
    headers += ["statistics in all", "scoring in all"]
    rows = []
    for group in groups:
        reached = [None if target is None else run.first_at(target) for run in group.runs]
        summaries = [run.summary for run in group.runs]
        bytes_then = [
            None if at is None else sum(r.training_bytes for r in run.rounds[: at.round])
            for run, at in zip(group.runs, reached, strict=True)
        ]
        rows.append(
            [
                group.name,
                _mean([at.round if at else None for at in reached], _number, "never"),
                _mean([at.simulated_seconds if at else None for at in reached], seconds_text, "never"),
                _mean(bytes_then, bytes_text, "never"),
                _mean([summary.training_bytes_down for summary in summaries], bytes_text),
                _mean([summary.training_bytes_up for summary in summaries], bytes_text),
                _mean([s.statistics_bytes_down + s.statistics_bytes_up for s in summaries], bytes_text),
                _mean([summary.scoring_bytes_down for summary in summaries], bytes_text),
            ]
        )
    whence = ""
    if target is not None and not given:
        whence = f" ({score_format(scale)(target)} is what the worst of these runs delivers)"
    return TextTable(f"What it took{whence}", headers, rows)


def _privacy_table(groups: Sequence[Group]) -> list[TextTable]:
    """What the runs cost of privacy by their ledgers, of several seeds the most; nothing where none is private."""
    rows = []
    for group in groups:
        private = [run.summary for run in group.runs if run.summary.epsilon is not None]
        worst = max(private, key=lambda summary: summary.epsilon or 0.0, default=None)
        models = "" if worst is None else f"{worst.noised_releases} in {counted(worst.rounds, 'round')}"
        rows.append(
            [group.name, "none", "", ""]
            if worst is None
            else [group.name, f"{worst.epsilon:.3g}", f"{worst.delta:g}", models]
        )
    if all(row[1] == "none" for row in rows):
        return []
    return [TextTable("Privacy", ["method", "epsilon", "delta", "noised models"], rows)]


def _number(value: float) -> str:
    return f"{round(value, 1):g}"


def _part_tables(groups: Sequence[Group], scale: Scale) -> list[TextTable]:
    """Scores by tier and by exit, and personal ones: each where one of the runs has them."""

    def tiers(summary: Summary) -> dict[str, float]:
        return summary.delivered_score_by_tier or summary.score_by_tier or {}

    def exits(summary: Summary) -> dict[str, float]:
        return {f"exit {number}": score for number, score in enumerate(summary.score_by_exit or [], start=1)}

    def personal(summary: Summary) -> dict[str, float]:
        everyone = {} if summary.personal_score is None else {"all devices": summary.personal_score}
        return everyone | (summary.personal_score_by_tier or {})

    def networks(summary: Summary) -> dict[str, float]:
        return summary.personal_score_by_network or {}

    text, unit = _short(scale)
    tables = [
        _part_table(f"{scale.title} by tier{unit}", groups, tiers, text),
        _part_table(f"{scale.title} of the whole model by exit{unit}", groups, exits, text),
        _part_table(f"Personal {scale.label}, mean over the last fifth of the rounds{unit}", groups, personal, text),
        _part_table(f"Personal {scale.label} of devices' other networks{unit}", groups, networks, text),
    ]
    return [table for table in tables if len(table.headers) > 1]


def _part_table(
    title: str, groups: Sequence[Group], parts_of: Callable[[Summary], dict[str, float]], text: Format
) -> TextTable:
    # A dict, because parts stand in the order in which they are first met.
    names = list(dict.fromkeys(name for group in groups for run in group.runs for name in parts_of(run.summary)))
    rows = [
        [group.name] + [_spread([parts_of(run.summary).get(name) for run in group.runs], text) for name in names]
        for group in groups
    ]
    return TextTable(title, ["method", *names], rows)


def _settings_table(groups: Sequence[Group]) -> list[TextTable]:
    """The settings in which the experiments differ; those that a method does not read are not its own."""
    experiments = [group.runs[0].experiment for group in groups]
    usual, rows = defaults(), []
    for group, experiment in zip(groups, experiments, strict=True):
        own = [
            key
            for key in differing_keys(experiments)
            if key in experiment
            and (key != "strategy" or group.runs[0].row)
            and (experiment[key] != usual.get(key) or len({str(e[key]) for e in experiments if key in e}) > 1)
        ]
        rows.append([group.name, ", ".join(f"{key} = {experiment[key]}" for key in own)])
    if not any(settings for _, settings in rows):
        return []
    return [TextTable("Settings that differ", ["method", "settings"], rows, text_columns=2)]


def _search_table(groups: Sequence[Group]) -> list[TextTable]:
    """How many trials each method's settings were chosen from; nothing where none was searched."""
    rows = [[group.name, group.runs[0].search or "none"] for group in groups]
    searched = any(row[1] != "none" for row in rows)
    return [TextTable("Search for settings", ["method", "search"], rows, text_columns=2)] if searched else []


def _csv(groups: Sequence[Group]) -> str:
    """Every evaluation as a line, with the scores of tiers in columns of their own."""
    runs = [(group, run) for group in groups for run in group.runs]
    tiers = list(dict.fromkeys(tier for _, run in runs for r in run.rounds for tier in r.delivered_score_by_tier or {}))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        ["run", "method", "seed", "round", "simulated_seconds", *TRAFFIC, "metric", "delivered_score"]
        + ["score", "loss", "delivered_devices", "devices_without_model", "devices_beyond_budget"]
        + [f"delivered_score {tier}" for tier in tiers]
    )
    for group, run in runs:
        so_far = [[*accumulate(getattr(r, key) for r in run.rounds)] for key in TRAFFIC]
        for r, *traffic in zip(run.rounds, *so_far, strict=True):
            if r.score_by_tier is not None:
                cost = [r.round, r.simulated_seconds, *traffic]
                scores = [r.metric, r.delivered_score, r.score, r.loss]
                devices = [r.delivered_devices, r.devices_without_model, r.devices_beyond_budget]
                by_tier = [(r.delivered_score_by_tier or {}).get(tier) for tier in tiers]
                writer.writerow([run.name, group.name, run.seed, *cost, *scores, *devices, *by_tier])
    return out.getvalue()


def _plots(groups: Sequence[Group], scale: Scale) -> list[Chart]:
    length, unit = time_unit(max((run.summary.simulated_seconds for group in groups for run in group.runs), default=0))

    def rounds(run: Run) -> list[float]:
        return [float(r.round) for r in run.rounds]

    def clock(run: Run) -> list[float]:
        return [r.simulated_seconds / length for r in run.rounds]

    def traffic(run: Run) -> list[float]:
        return [float(total) for total in accumulate(r.training_bytes for r in run.rounds)]

    # Where one of the runs does not say what it delivers, all are drawn by their whole models.
    known = all(run.summary.delivered_score is not None for group in groups for run in group.runs)

    def score(r: RoundRecord) -> float | None:
        return r.delivered_score if known else r.score

    title, text = f"Delivered {scale.label}" if known else scale.title, score_format(scale)
    whole = [
        line_chart(
            f"{scale.title} of the whole model",
            _lines(groups, rounds, lambda r: r.score),
            x_label="round",
            y_format=text,
        )
    ]
    return [
        line_chart(f"{title} over rounds", _lines(groups, rounds, score), x_label="round", y_format=text),
        line_chart(f"{title} over simulated time", _lines(groups, clock, score), x_label=unit, y_format=text),
        line_chart(
            f"{title} over traffic",
            _lines(groups, traffic, score),
            x_label="training, down and up",
            y_format=text,
            x_format=bytes_text,
        ),
        *(whole if known else []),
        line_chart("Loss", _lines(groups, rounds, lambda r: r.loss), x_label="round"),
        line_chart(
            "Memory budget used",
            _lines(groups, rounds, lambda r: r.memory_utilisation),
            x_label="round",
            y_format=percent,
            from_zero=True,
        ),
        line_chart(
            "Bandwidth budget used",
            _lines(groups, rounds, lambda r: r.bandwidth_utilisation),
            x_label="round",
            y_format=percent,
            from_zero=True,
        ),
    ]


def _lines(
    groups: Sequence[Group], xs_of: Callable[[Run], list[float]], y_of: Callable[[RoundRecord], float | None]
) -> list[Line]:
    lines = []
    for color, group in enumerate(groups):
        ys = [[y_of(r) for r in run.rounds] for run in group.runs]
        if len(group.runs) == 1:
            lines.append(Line(group.name, xs_of(group.runs[0]), ys[0], color))
            continue
        lines += [Line(run.name, xs_of(run), y, color, faint=True) for run, y in zip(group.runs, ys, strict=True)]
        # Up to the end of the shortest run; a round that one of them did not evaluate has no mean.
        xs = [fmean(x) for x in zip(*(xs_of(run) for run in group.runs), strict=False)]
        means = [None if None in y else fmean(v for v in y if v is not None) for y in zip(*ys, strict=False)]
        lines.append(Line(group.name, xs, means, color))
    return lines
