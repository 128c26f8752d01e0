"""Several runs side by side: figures, and how far they are after the same rounds, simulated time and bytes."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean, stdev

from server_app.charts import (
    Format,
    Line,
    bytes_text,
    line_chart,
    page,
    percent,
    score_format,
    seconds_text,
    table,
    time_unit,
)
from server_app.config import unread
from server_app.journal import (
    JournalError,
    RoundRecord,
    Summary,
    is_of_a_folder,
    read_config,
    read_rounds,
    read_summary,
    summarize,
)
from tasks.metrics import Scale

# Keys that do not make another experiment: the seed, and where and how a run was done.
NOT_THE_EXPERIMENT = frozenset(
    {"seed", "run-name", "output-dir", "data-dir", "state-dir", "workers"}
    | {"resume", "resume-from", "keep-checkpoints"}
)


@dataclass(frozen=True)
class Run:
    """What is compared of one run."""

    name: str
    config: dict[str, object]
    rounds: list[RoundRecord]
    summary: Summary

    @property
    def experiment(self) -> dict[str, object]:
        """The configuration without what makes no other experiment."""
        same = NOT_THE_EXPERIMENT | set(unread(self.config))
        if is_of_a_folder(self.config.get("task")):
            same -= {"data-dir"}
        return {key: value for key, value in self.config.items() if key not in same}

    def first_at(self, target: float) -> RoundRecord | None:
        """The first round whose score is at least as good as `target`."""
        rank = self.summary.scale.rank
        return next((r for r in self.rounds if r.score is not None and rank(r.score) >= rank(target)), None)


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed."""

    name: str
    runs: list[Run]


@dataclass(frozen=True)
class TextTable:
    """A table as it is printed and as it stands on the page."""

    title: str
    headers: list[str]
    rows: list[list[str]]
    text_columns: int = 1


@dataclass(frozen=True)
class Comparison:
    """The outcome: the target score, tables of texts, and a whole HTML page with these tables and plots."""

    target: float | None
    tables: list[TextTable]
    html: str


def compare(run_dirs: Sequence[Path], target: float | None = None) -> Comparison:
    """Compare the runs in `run_dirs`, in their order.

    `target` is a score, of metrics that are shares one between 0 and 1, by default the worst final score of all, which
    every run reached or may have reached. Runs whose configurations are equal but for the seed share a row, with mean
    and standard deviation. Raises JournalError when a folder does not hold a run, when the runs are not scored by one
    metric, and when the target is no score of it.
    """
    runs = [_load(run_dir) for run_dir in run_dirs]
    scale = _scale_of_all(runs)
    if target is None:
        finals = [run.summary.final_score for run in runs]
        target = min((f for f in finals if f is not None and not math.isnan(f)), key=scale.rank, default=None)
    elif scale.is_share and not 0 <= target <= 1:
        raise JournalError(f"a target of {target:g} is no {scale.label}, which is between 0 and 1")
    groups = _group(runs)
    tables = [
        _score_table(groups, scale),
        _cost_table(groups, scale, target),
        *_part_tables(groups, scale),
        *_settings_table(groups),
    ]
    sections = [f"<h2>{t.title}</h2>{table(t.headers, t.rows, text_columns=t.text_columns)}" for t in tables]
    title = f"{len(runs)} runs side by side"
    several = any(len(group.runs) > 1 for group in groups)
    lead = (
        "Runs that differ only in their seed: a strong line is their mean, faint lines are the runs." if several else ""
    )
    plots = f'<div class="charts">{"".join(_plots(groups, scale))}</div>'
    body = f'<h1>{title}</h1><p class="lead">{lead}</p>{plots}{"".join(sections)}'
    return Comparison(target, tables, page(f"{title} - Wildflower", body))


def _load(run_dir: Path) -> Run:
    content = read_config(run_dir)
    # What a fleet file held is part of the experiment, whatever the file is called.
    config = content["config"] | {"fleet-sha256": content["fleet-sha256"][:12]}
    summary = read_summary(run_dir) or summarize(run_dir, "unfinished", None)
    return Run(run_dir.resolve().name, config, read_rounds(run_dir), summary)


def _scale_of_all(runs: Sequence[Run]) -> Scale:
    scored = {run.summary.metric: run for run in runs if run.summary.metric is not None}
    if len(scored) > 1:
        metrics = " and ".join(f"{run.name} by {run.summary.scale.label}" for run in scored.values())
        raise JournalError(f"runs that are scored by different metrics cannot be compared: {metrics}")
    return next(iter(scored.values()), runs[0]).summary.scale


def _group(runs: Sequence[Run]) -> list[Group]:
    by_experiment: dict[str, list[Run]] = {}
    for run in runs:
        by_experiment.setdefault(json.dumps(run.experiment, sort_keys=True), []).append(run)
    groups = []
    for members in by_experiment.values():
        names = members[0].name if len(members) == 1 else f"{members[0].name} (+{len(members) - 1} seeds)"
        groups.append(Group(names, members))
    return groups


def _spread(values: Sequence[float | None], form: Callable[[float], str], missing: str = "none") -> str:
    """The mean of what there is, with the standard deviation of several, and how many of the runs lack it."""
    known = [value for value in values if value is not None]
    if not known:
        return missing
    text = form(fmean(known))
    if len(known) > 1:
        text += f" ± {form(stdev(known))}"
    return text if len(known) == len(values) else f"{text} ({len(known)} of {len(values)})"


def _score_table(groups: Sequence[Group], scale: Scale) -> TextTable:
    headers = ["run", "status", "runs", "rounds", f"final {scale.label}", f"best {scale.label}", "time here"]
    text = score_format(scale)
    rows = []
    for group in groups:
        summaries = [run.summary for run in group.runs]
        rows.append(
            [
                group.name,
                ", ".join(sorted({summary.status for summary in summaries})),
                str(len(group.runs)),
                _spread([summary.rounds for summary in summaries], _number),
                _spread([summary.final_score for summary in summaries], text),
                _spread([summary.best_score for summary in summaries], text),
                _spread([summary.wall_seconds for summary in summaries], seconds_text),
            ]
        )
    return TextTable(scale.title, headers, rows, text_columns=2)


def _cost_table(groups: Sequence[Group], scale: Scale, target: float | None) -> TextTable:
    goal = "reach the target" if target is None else f"reach {score_format(scale)(target)}"
    headers = ["run", f"rounds to {goal}", "simulated time", "bytes", "bytes down in all", "bytes up in all"]
    rows = []
    for group in groups:
        reached = [None if target is None else run.first_at(target) for run in group.runs]
        bytes_then = [
            None if at is None else sum(r.bytes_down + r.bytes_up for r in run.rounds[: at.round])
            for run, at in zip(group.runs, reached, strict=True)
        ]
        rows.append(
            [
                group.name,
                _spread([at.round if at else None for at in reached], _number, "never"),
                _spread([at.simulated_seconds if at else None for at in reached], seconds_text, "never"),
                _spread(bytes_then, bytes_text, "never"),
                _spread([run.summary.bytes_down for run in group.runs], bytes_text),
                _spread([run.summary.bytes_up for run in group.runs], bytes_text),
            ]
        )
    return TextTable("What it took", headers, rows)


def _number(value: float) -> str:
    return f"{round(value, 1):g}"


def _part_tables(groups: Sequence[Group], scale: Scale) -> list[TextTable]:
    """Scores by tier and by exit, and personal ones: each where one of the runs has them."""

    def tiers(summary: Summary) -> dict[str, float]:
        return summary.score_by_tier or {}

    def exits(summary: Summary) -> dict[str, float]:
        return {f"exit {number}": score for number, score in enumerate(summary.score_by_exit or [], start=1)}

    def personal(summary: Summary) -> dict[str, float]:
        everyone = {} if summary.personal_score is None else {"all devices": summary.personal_score}
        return everyone | (summary.personal_score_by_tier or {})

    label, text = scale.label, score_format(scale)
    tables = [
        _part_table(f"Final {label} by tier", groups, tiers, text),
        _part_table(f"Final {label} by exit", groups, exits, text),
        _part_table(f"Personal {label}, mean over the last fifth of the rounds", groups, personal, text),
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
    return TextTable(title, ["run", *names], rows)


def _settings_table(groups: Sequence[Group]) -> list[TextTable]:
    """The keys in which the experiments differ. What the method of one does not read is left empty there."""
    configs = [group.runs[0].config for group in groups]
    read = [group.runs[0].experiment for group in groups]
    keys = sorted({key for config in read for key in config} - NOT_THE_EXPERIMENT)
    differing = [key for key in keys if len({json.dumps(config.get(key)) for config in configs}) > 1]
    if not differing:
        return []
    rows = [[key, *(str(config.get(key, "")) for config in read)] for key in differing]
    return [
        TextTable("Settings that differ", ["key", *(group.name for group in groups)], rows, text_columns=len(rows[0]))
    ]


def _plots(groups: Sequence[Group], scale: Scale) -> list[str]:
    length, unit = time_unit(max((run.summary.simulated_seconds for group in groups for run in group.runs), default=0))

    def rounds(run: Run) -> list[float]:
        return [float(r.round) for r in run.rounds]

    def clock(run: Run) -> list[float]:
        return [r.simulated_seconds / length for r in run.rounds]

    def traffic(run: Run) -> list[float]:
        return [float(total) for total in accumulate(r.bytes_down + r.bytes_up for r in run.rounds)]

    def score(r: RoundRecord) -> float | None:
        return r.score

    title, text = scale.title, score_format(scale)
    return [
        line_chart(f"{title} over rounds", _lines(groups, rounds, score), x_label="round", y_format=text),
        line_chart(f"{title} over simulated time", _lines(groups, clock, score), x_label=unit, y_format=text),
        line_chart(
            f"{title} over traffic",
            _lines(groups, traffic, score),
            x_label="down and up",
            y_format=text,
            x_format=bytes_text,
        ),
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
