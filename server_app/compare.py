"""Several runs side by side: what each method delivers to this fleet, how sure that is, and what it took."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from wildflower.server_app.advice import advice_on
from wildflower.server_app.compare_charts import LEGEND, evaluations, line_charts, score_chart
from wildflower.server_app.compared_runs import Group, differing_keys, grouped, load_run, replicates, scale_of_all
from wildflower.server_app.comparison_figures import figure, paper_columns
from wildflower.server_app.config import defaults
from wildflower.server_app.pages import Block, Charts, blocks, page, table_html, words_table
from wildflower.server_app.run_folder import JournalError, is_run
from wildflower.server_app.run_records import Summary
from wildflower.server_app.tables import TextTable
from wildflower.server_app.units import Format, bytes_text, counted, one_digit, plain, seconds_text
from wildflower.tasks.metrics import Scale

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class Comparison:
    """Runs side by side: tables, plots, and which method to take.

    Attributes:
        target: the score that the runs are timed to reach.
        advice: sentences about which method to take, how sure that is, and what is not counted.
        tables: the tables, as texts; each has `csv()`, `latex()` and `markdown()`.
        html: a whole page with all this, and plots.
        csv: every evaluation of every run that is compared, one per line.
        groups: the runs, with the seeds of one method together.
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
        return "\n\n".join(["\n".join(self.advice), *map(str, self.tables)]).strip()

    def to_markdown(self) -> str:
        """Return what a paper reports of each method as one table in Markdown, shares in percent."""
        return self._for_paper().markdown()

    def to_latex(self) -> str:
        """Return what a paper reports of each method as one table in LaTeX (booktabs), shares in percent."""
        return self._for_paper().latex()

    def _for_paper(self) -> TextTable:
        scores, _, costs, *_ = self.tables
        return TextTable("", *paper_columns([(scores.headers, scores.rows), (costs.headers, costs.rows)]), 2)

    def plot(self, over: str | Sequence[str] | None = None) -> "Figure":
        """Return a figure of Matplotlib: the mean over seeds, and one standard deviation around it as a band.

        Args:
            over: "rounds", "bytes", "hours" (simulated) or "memory", or several of these; None draws all.
        """
        return figure(self.groups, self.scale, over)

    def _repr_html_(self) -> str:
        """What a notebook shows: the advice and the tables."""
        advice = "".join(f"<p>{escape(sentence)}</p>" for sentence in self.advice)
        return advice + "".join(f"<b>{escape(table.title)}</b>{table_html(table)}" for table in self.tables)


def compare(run_dirs: Sequence[Path], target: float | None = None, rows: Sequence[str] = ()) -> Comparison:
    """Compare the finished runs in `run_dirs`, those that deliver most first; the others are listed as left out.

    Runs whose configurations are equal but for the seed share a row, with mean and standard deviation over the seeds.
    Rows of runs that do not count come last, and say so.
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
        figures = [run.summary.figure for run in runs]
        target = min((f for f in figures if f is not None and not math.isnan(f)), key=scale.rank, default=None)
    elif isinstance(target, bool) or not isinstance(target, int | float):
        raise JournalError(f"target = {target!r}: must be a score that the runs are timed to reach, such as 0.9")
    elif scale.is_share and not 0 <= target <= 1:
        raise JournalError(f"a target of {target:g} is no {scale.label}, which is between 0 and 1")
    groups = sorted(grouped(runs), key=lambda group: (group.counts, scale.rank(group.mean)), reverse=True)
    out = [TextTable("Left out", ["run", "why"], [list(pair) for pair in left_out], 2)] if left_out else []
    found = [
        _score_table(groups, scale),
        _last_table(groups, scale),
        _cost_table(groups, scale, target, given=given),
        *_part_tables(groups, scale),
        *_privacy_table(groups),
        *_settings_table(groups),
        *_search_table(groups),
    ]
    not_counted = [number for number, group in enumerate(groups) if not group.counts]
    tables = [TextTable(t.title, t.headers, t.rows, t.text_columns, not_counted) for t in found] + out
    advice = advice_on(groups, scale)
    title = f"{len(runs)} runs side by side"
    return Comparison(
        target, advice, tables, _page(title, groups, tables, advice, scale), evaluations(groups), groups, scale
    )


def _page(title: str, groups: Sequence[Group], tables: Sequence[TextTable], advice: Sequence[str], scale: Scale) -> str:
    baseline = any(group.is_baseline for group in groups)
    words = ["delivered", "tier", "worst tier", "whole model", "simulated time", "statistics", "budget"]
    told = list(advice)
    if not baseline and len(groups) > 1:
        told.append(
            "There is no baseline among the runs: add one model that all devices can train, as the least that a method "
            'should be better than (strategy = "one-model").'
        )
    parts: list[Block] = [blocks.points("Which method to take", told)] if told else []
    first, *others = tables
    parts += [
        blocks.heading(first.title),
        Charts(score_chart(groups, scale)),
        blocks.shown(first),
        Charts(line_charts(groups, scale)),
        blocks.paragraph(LEGEND, "note"),
    ]
    for table in others:
        parts += [blocks.heading(table.title), blocks.shown(table)]
    parts += words_table([*words, "baseline"] if baseline else words)
    return page(f"{title} - Wildflower", title, parts)


def _spread(values: Sequence[float | None], form: Callable[[float], str]) -> str:
    """The mean of what there is, with the standard deviation of several, and how many of the runs lack it."""
    known = [value for value in values if value is not None]
    return _mean(values, (lambda mean: f"{form(mean)} ± {form(stdev(known))}") if len(known) > 1 else form)


def _mean(values: Sequence[float | None], form: Format, missing: str = "none") -> str:
    """The mean of what there is, and how many of the runs lack it."""
    known = [value for value in values if value is not None]
    if not known:
        return missing
    return form(fmean(known)) if len(known) == len(values) else f"{form(fmean(known))} ({len(known)} of {len(values)})"


def _short(scale: Scale) -> tuple[Format, str]:
    """How scores stand in narrow columns, and what then stands in their headers: percent without the sign."""
    return ((lambda value: f"{100 * value:.1f}"), ", %") if scale.is_share else (plain, "")


def _table(
    title: str, groups: Sequence[Group], columns: dict[str, Callable[[Group], str]], text_columns: int = 1
) -> TextTable:
    """A table with a row per group."""
    rows = [[group.label, *(cell(group) for cell in columns.values())] for group in groups]
    return TextTable(title, ["method", *columns], rows, text_columns)


def _of(
    value: Callable[[Summary], float | None], form: Format, over: Callable[..., str] = _mean
) -> Callable[[Group], str]:
    """A cell of what the summaries of a group's runs have."""
    return lambda group: over([value(run.summary) for run in group.runs], form)


def _whole(value: Callable[[Summary], float | None], form: Format) -> Callable[[Group], str]:
    """A cell about the whole model, of which some methods have none."""
    return lambda group: _spread([value(run.summary) if run.whole else None for run in group.runs], form)


def _score_table(groups: Sequence[Group], scale: Scale) -> TextTable:
    text, unit = _short(scale)
    columns = {
        "seeds": lambda group: group.seeds,
        f"delivered{unit}": _of(lambda summary: summary.delivered_score, text, _spread),
        f"worst tier{unit}": _of(lambda summary: summary.worst_tier_score, text, _spread),
        f"whole model{unit}": _whole(lambda summary: summary.final_score, text),
    }
    baseline = next((group for group in groups if group.is_baseline), None)
    if baseline is not None and len(groups) > 1:
        columns["against the baseline"] = lambda group: _lead(group, baseline, scale)
    title = f"{scale.title}, mean of the last fifth of the evaluations"
    return _table(title, groups, columns, text_columns=2)


def _lead(group: Group, baseline: Group, scale: Scale) -> str:
    """By how much a method is better than the baseline; "" for the baseline itself."""
    if group is baseline or group.mean is None or baseline.mean is None:
        return ""
    lead = scale.rank(group.mean) - scale.rank(baseline.mean)
    return f"{100 * lead:+.1f} points" if scale.is_share else f"{lead:+.4g}"


def _last_table(groups: Sequence[Group], scale: Scale) -> TextTable:
    text, unit = _short(scale)
    columns = {
        "rounds": _of(lambda summary: summary.rounds, _number),
        f"delivered{unit}": _of(lambda summary: summary.last_delivered_score, text, _spread),
        f"whole model{unit}": _whole(lambda summary: summary.last_score, text),
        f"its best{unit}": _whole(lambda summary: summary.best_score, text),
        "time here": _of(lambda summary: summary.wall_seconds, seconds_text),
    }
    return _table(f"{scale.title} of the last evaluation", groups, columns)


def _cost_table(groups: Sequence[Group], scale: Scale, target: float | None, *, given: bool) -> TextTable:
    score = "" if target is None else one_digit(scale)(target)

    def at_target(value: Callable[..., float], form: Format) -> Callable[[Group], str]:
        def cell(group: Group) -> str:
            reached = [(run, None if target is None else run.first_at(target)) for run in group.runs]
            return _mean([None if at is None else value(run, at) for run, at in reached], form, "never")

        return cell

    columns = {
        f"rounds {f'to {score}' if score else 'to the target'}": at_target(lambda run, at: at.round, _number),
        "simulated time": at_target(lambda run, at: at.simulated_seconds, seconds_text),
        "training bytes": at_target(lambda run, at: sum(r.training_bytes for r in run.rounds[: at.round]), bytes_text),
        "down in all": _of(lambda summary: summary.training_bytes_down, bytes_text),
        "up in all": _of(lambda summary: summary.training_bytes_up, bytes_text),
        "statistics in all": _of(lambda s: s.statistics_bytes_down + s.statistics_bytes_up, bytes_text),
        "scoring in all": _of(lambda summary: summary.scoring_bytes_down, bytes_text),
    }
    whence = f" ({score} is what the worst of these runs delivers)" if score and not given else ""
    return _table(f"What it took{whence}", groups, columns)


def _privacy_table(groups: Sequence[Group]) -> list[TextTable]:
    """What the runs cost of privacy by their ledgers, of several seeds the most; nothing where none is private."""
    rows = []
    for group in groups:
        private = [run.summary for run in group.runs if run.summary.epsilon is not None]
        worst = max(private, key=lambda summary: summary.epsilon or 0.0, default=None)
        models = "" if worst is None else f"{worst.noised_releases} in {counted(worst.rounds, 'round')}"
        rows.append(
            [group.label, "none", "", ""]
            if worst is None
            else [group.label, f"{worst.epsilon:.3g}", f"{worst.delta:g}", models]
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
    names = dict.fromkeys(name for group in groups for run in group.runs for name in parts_of(run.summary))

    def cell(name: str) -> Callable[[Group], str]:
        return _of(lambda summary: parts_of(summary).get(name), text, _spread)

    return _table(title, groups, {name: cell(name) for name in names})


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
        rows.append([group.label, ", ".join(f"{key} = {experiment[key]}" for key in own)])
    if not any(settings for _, settings in rows):
        return []
    return [TextTable("Settings that differ", ["method", "settings"], rows, text_columns=2)]


def _search_table(groups: Sequence[Group]) -> list[TextTable]:
    """How many trials each method's settings were chosen from; nothing where none was searched."""
    rows = [[group.name, group.runs[0].search or "none"] for group in groups]
    searched = any(row[1] != "none" for row in rows)
    return [TextTable("Search for settings", ["method", "search"], rows, text_columns=2)] if searched else []
