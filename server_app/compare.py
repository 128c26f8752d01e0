"""Several runs side by side: what each method delivers to this fleet, how sure that is, and what it took."""

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from pathlib import Path
from statistics import fmean, stdev

from wildflower.plugins.extras import needed
from wildflower.plugins.reference import top_module
from wildflower.server_app.charts import Chart, Line, line_chart
from wildflower.server_app.config import READ_WITH, defaults, unread
from wildflower.server_app.keys import to_toml
from wildflower.server_app.pages import Block, Charts, Heading, Paragraph, Table, page, table_html
from wildflower.server_app.resuming import is_of_a_folder
from wildflower.server_app.run_folder import (
    BUDGETS,
    DATA,
    INITIAL,
    PLUGINS,
    JournalError,
    is_run,
    read_config,
    read_rounds,
    read_summary,
)
from wildflower.server_app.run_records import TRAFFIC, RoundRecord, Summary
from wildflower.server_app.summary import summarize
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

# Keys that do not make another experiment: the seed, and where and how a run was done.
NOT_THE_EXPERIMENT = frozenset(
    {"seed", "run-name", "output-dir", "data-dir", "state-dir", "workers", "engine"}
    | {"resume", "resume-from", "dp.resume-copy", "keep-checkpoints", "tracker"}
)
DATA_HASH = "data-sha256"  # of what identifies the data
FLEET_HASH = "fleet-sha256"
# Conditions: methods are recommended among runs that have them in common. What is learned from which data, by devices
# that may spend how much for how long, with what privacy, and how that is scored. The seed and the budgets of the tiers
# come on top. How one trains is no condition, but what is compared.
CONDITIONS = (
    *("task", "task-arguments", "data-dir", DATA_HASH, "partition", "alpha", "test-fraction", "examples-per-device"),
    *("max-examples", "strong.devices", "strong.share", "strong.test"),
    *(
        FLEET_HASH,
        "devices",
        "devices-per-round",
        "over-selection",
        "budget.memory-fraction",
        "budget.transfer-seconds",
    ),
    *("deadline-seconds", "budget.round-seconds", "rounds"),
    *("dp.epsilon", "dp.noise-multiplier", "dp.delta", "secure-aggregation.minimum"),
    *("evaluate-every", "deliver", "statistics.devices", "statistics.examples"),
)
MAX_VALUE_LETTERS = 24  # of a setting in the name of a row
MAX_VALUES = 3  # of a condition in which runs differ
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Run:
    """What is compared of one run.

    Attributes:
        budgets: by tier, the most bytes of memory and of payload of its simulated devices; {} of real ones.
        row: what its group is called, if whoever asked has a name for it.
        finished_rounds: how many its summary.json has, where there is one.
    """

    name: str
    config: dict[str, object]
    rounds: list[RoundRecord]
    summary: Summary
    budgets: Mapping[str, Mapping[str, int | None]]
    row: str = ""
    finished_rounds: int | None = None

    @property
    def experiment(self) -> dict[str, object]:
        """The configuration without what makes no other experiment."""
        same = NOT_THE_EXPERIMENT | set(unread(self.config))
        if is_of_a_folder(self.config.get("task")):
            same -= {"data-dir"}
        return {key: value for key, value in self.config.items() if key not in same}

    @property
    def identity(self) -> str:
        """What its replicates have in common."""
        return json.dumps([self.row, self.experiment], sort_keys=True)

    @property
    def seed(self) -> int:
        """Which replicate of its experiment it is."""
        seed = self.config["seed"]
        assert isinstance(seed, int)
        return seed

    @property
    def figure(self) -> float | None:
        """What it is ranked by: the delivered score, or the final one where it has none."""
        return self.summary.final_score if self.summary.delivered_score is None else self.summary.delivered_score

    def first_at(self, target: float) -> RoundRecord | None:
        """The first round that delivers a score at least as good as `target`."""
        rank = self.summary.scale.rank
        reached = ((r, r.score if self.summary.delivered_score is None else r.delivered_score) for r in self.rounds)
        return next((r for r, score in reached if score is not None and rank(score) >= rank(target)), None)


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed, one of each seed."""

    name: str
    runs: list[Run]

    @property
    def by_seed(self) -> dict[int, Run]:
        """The run of each seed."""
        return {run.seed: run for run in self.runs}

    @property
    def mean(self) -> float | None:
        """The mean over seeds of what the runs are ranked by."""
        known = [run.figure for run in self.runs if run.figure is not None]
        return fmean(known) if known else None

    @property
    def seeds(self) -> str:
        """The seeds as text, such as "1-3, 7"."""
        spans: list[list[int]] = []
        for seed in sorted(run.seed for run in self.runs):
            if spans and seed == spans[-1][1] + 1:
                spans[-1][1] = seed
            else:
                spans.append([seed, seed])
        return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


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
    """

    target: float | None
    advice: list[str]
    tables: list[TextTable]
    html: str
    csv: str

    def __repr__(self) -> str:
        return "\n".join(self.advice) or "<Comparison of one method>"

    def __str__(self) -> str:
        """What `print` shows: the advice and the tables."""
        return "\n\n".join(["\n".join(self.advice), *map(_text, self.tables)]).strip()

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
            loaded.append(_load(run_dir, row))
        except (JournalError, OSError) as error:
            if not is_run(run_dir):
                raise
            broken.append((run_dir.resolve().name, f"broken: {error}"))
    runs, left_out = _replicates(loaded)
    left_out += broken
    if not runs:
        raise JournalError(f"none of the runs is finished: {'; '.join(f'{name} is {why}' for name, why in left_out)}")
    scale = _scale_of_all(runs)
    given = target is not None
    if target is None:
        figures = [run.figure for run in runs]
        target = min((f for f in figures if f is not None and not math.isnan(f)), key=scale.rank, default=None)
    elif scale.is_share and not 0 <= target <= 1:
        raise JournalError(f"a target of {target:g} is no {scale.label}, which is between 0 and 1")
    groups = sorted(_group(runs), key=lambda group: scale.rank(group.mean), reverse=True)
    tables = [
        _score_table(groups, scale),
        _last_table(groups, scale),
        _cost_table(groups, scale, target, given=given),
        *_part_tables(groups, scale),
        *_privacy_table(groups),
        *_settings_table(groups),
        *([TextTable("Left out", ["run", "why"], [list(pair) for pair in left_out], 2)] if left_out else []),
    ]
    advice = _advice(groups, scale)
    title = f"{len(runs)} runs side by side"
    leads = [Paragraph(sentence) for sentence in advice]
    if any(len(group.runs) > 1 for group in groups):
        leads.append(Paragraph("A strong line is the mean over seeds, faint lines are the runs."))
    blocks: list[Block] = [*leads]
    for number, t in enumerate(tables):
        blocks += [Heading(t.title), Table(t.headers, t.rows, t.text_columns)]
        if number == 0:
            blocks.append(Charts(_plots(groups, scale)))
    return Comparison(target, advice, tables, page(f"{title} - Wildflower", title, blocks), _csv(groups))


def _load(run_dir: Path, row: str) -> Run:
    content = read_config(run_dir)
    # The contents of files are part of the experiment, whatever the files are called.
    hashes = {FLEET_HASH: content[FLEET_HASH], INITIAL: content.get(INITIAL, "")}
    hashes |= {DATA_HASH: content.get(DATA, {}).get("sha256", "")}
    hashes |= {f"module {name}-sha256": digest for name, digest in content.get(PLUGINS, {}).items()}
    held = {name: digest[:12] for name, digest in hashes.items() if digest or name == FLEET_HASH}
    config = content["config"] | held | {"seed": content["seed"]}
    written = read_summary(run_dir)
    summary = summarize(run_dir, written.status if written else "unfinished", None)
    finished_rounds = None if written is None else written.rounds
    budgets = content.get(BUDGETS, {})
    return Run(run_dir.resolve().name, config, read_rounds(run_dir), summary, budgets, row, finished_rounds)


def _replicates(runs: Sequence[Run]) -> tuple[list[Run], list[tuple[str, str]]]:
    """The finished runs, one of each experiment and seed; and of the others the names, and why they are left out."""
    found: dict[tuple[str, int], Run] = {}
    left_out = []
    for run in runs:
        key = run.identity, run.seed
        if run.summary.status != "finished":
            left_out.append((run.name, f"{run.summary.status} after {run.summary.rounds} rounds"))
        elif run.finished_rounds != len(run.rounds):
            left_out.append((run.name, f"short of rounds: rounds.jsonl has {len(run.rounds)} of {run.finished_rounds}"))
        elif key in found:
            left_out.append((run.name, f"of the same settings and seed as {found[key].name}"))
        else:
            found[key] = run
    return list(found.values()), left_out


def _scale_of_all(runs: Sequence[Run]) -> Scale:
    scored = {run.summary.metric: run for run in runs if run.summary.metric is not None}
    if len(scored) > 1:
        metrics = " and ".join(f"{run.name} by {run.summary.scale.label}" for run in scored.values())
        raise JournalError(f"runs that are scored by different metrics cannot be compared: {metrics}")
    return next(iter(scored.values()), runs[0]).summary.scale


def _group(runs: Sequence[Run]) -> list[Group]:
    by_experiment: dict[str, list[Run]] = {}
    for run in runs:
        by_experiment.setdefault(run.identity, []).append(run)
    experiments = list(by_experiment.values())
    names = _names([members[0] for members in experiments])
    return [Group(name, members) for name, members in zip(names, experiments, strict=True)]


def _names(runs: Sequence[Run]) -> list[str]:
    """What rows are called: the method or the given name, and the settings that tell it from others of the same."""
    heads = [run.row or str(run.config["strategy"]) for run in runs]
    experiments = [run.experiment for run in runs]
    differing = {
        head: _differing([experiment for its, experiment in zip(heads, experiments, strict=True) if its == head])
        for head in dict.fromkeys(heads)
    }
    names: list[str] = []
    for head, run, experiment in zip(heads, runs, experiments, strict=True):
        keys = [key for key in differing[head] if key in experiment]
        prefix = f"{experiment['strategy']}."
        settings = []
        for key in keys:
            short = key.removeprefix(prefix)
            # A method's key keeps its whole name where the run has a key of the short one, such as momentum.
            settings.append(f"{key if short in run.config else short}={_shortened(experiment[key])}")
        name = " ".join([head, *settings])
        again = sum(earlier == name or earlier.startswith(f"{name} (") for earlier in names)
        names.append(f"{name} ({again + 1})" if again else name)
    return names


def _differing(experiments: Sequence[dict[str, object]]) -> list[str]:
    """The keys in which experiments differ.

    A key of the run that another one rules out in some of them, such as `momentum` under Adam, has the values of the
    others alone.
    """

    def values(key: str) -> set[str]:
        read = [e for e in experiments if key in e] if key in READ_WITH else experiments
        return {json.dumps(experiment.get(key), sort_keys=True) for experiment in read}

    return [key for key in sorted({key for e in experiments for key in e}) if len(values(key)) > 1]


def _shortened(value: object) -> str:
    text = str(value)
    return text if len(text) <= MAX_VALUE_LETTERS else f"{text[: MAX_VALUE_LETTERS - 1]}…"


# In words -------------------------------------------------------------------------------------------------------------


def _advice(groups: Sequence[Group], scale: Scale) -> list[str]:
    """Which method to take for this fleet and how sure that is, and which methods are not counted."""
    told = [*_without_model(groups), *_beyond(groups)]
    if len(groups) < 2:
        return told
    if unequal := _unequal_conditions(groups) or _unequal_budgets(groups):
        return [unequal, *told]
    if any(run.summary.delivered_score is None for group in groups for run in group.runs):
        text = "Some of the runs do not say what devices are given (evaluate-tiers = false)"
        return [f"{text}, so that no method is recommended.", *told]
    able = [g for g in groups if not _is_beyond(g) and g.mean is not None and math.isfinite(g.mean)]
    if len(able) < 2:
        return told
    common = set.intersection(*({*group.by_seed} for group in able))
    if not common:
        seeds = "; ".join(f"{group.name} has {group.seeds}" for group in able)
        return [f"The runs have no seed in common ({seeds}), so that none of the methods is recommended.", *told]
    cut = [Group(group.name, [run for run in group.runs if run.seed in common]) for group in able]
    best, second, *others = sorted(cut, key=lambda group: scale.rank(group.mean), reverse=True)
    assert best.mean is not None
    if any(len(group.runs) > len(common) for group in able):
        told = [f"Only the seeds that all of them have are counted: {best.seeds}.", *told]
    take = f"Take {best.name}: over all devices of this fleet it delivers {score_format(scale)(best.mean)}."
    gap = _gap(best, second, scale)
    unsure = [other.name for other in others if not _gap(best, other, scale).is_sure]
    also = [f"Nor is it sure that it is better than {', '.join(unsure)}."] if unsure else []
    return [take, _how_sure(second.name, gap, scale), *also, *_beside_the_method(best, second), *told]


def _unequal_conditions(groups: Sequence[Group]) -> str:
    """In which conditions runs differ; "" where they have them in common."""
    experiments = [group.runs[0].experiment for group in groups]
    of_tasks = [f"module {top_module(str(experiment.get('task')))}-sha256" for experiment in experiments]
    keys = dict.fromkeys([*CONDITIONS, *of_tasks])
    conditions = [{key: experiment[key] for key in keys if key in experiment} for experiment in experiments]
    other = [_condition_in_words(key, experiments) for key in _differing(conditions)]
    # Of real devices no file says what there are: their kinds are the tiers.
    real = [group for group in groups if not group.runs[0].config.get("fleet")]
    if len({frozenset(run.summary.delivered_score_by_tier or {}) for group in real for run in group.runs}) > 1:
        other.append("the kinds of devices")
    if not other:
        return ""
    return (
        f"The runs differ in {', '.join(other)}, so that none of the methods is recommended: compare runs that have "
        "this in common."
    )


def _condition_in_words(key: str, experiments: Sequence[dict[str, object]]) -> str:
    """A condition in which runs differ, with the first values of it; hashes tell a person nothing."""
    if key == DATA_HASH:
        return "the data themselves"
    if key.startswith("module "):
        return f"the code of the {key.removesuffix('-sha256')}"
    shown = "fleet" if key == FLEET_HASH else key
    values = dict.fromkeys(to_toml(experiment[shown]) for experiment in experiments if shown in experiment)
    texts = list(dict.fromkeys(map(_shortened, values)))
    if key == FLEET_HASH and len(values) < 2:
        return "what the fleet's files hold"
    if len(texts) < max(2, len(values)):  # long ones, such as paths, that begin alike
        return shown
    return f"{shown} ({', '.join(texts[:MAX_VALUES])}{', ...' if len(texts) > MAX_VALUES else ''})"


def _unequal_budgets(groups: Sequence[Group]) -> str:
    """Where one fleet gives devices more under one method than under another, and what to do; "" where it does not."""
    for key, what in (("memory_bytes", "of training memory"), ("payload_bytes", "of payload")):
        found = {
            tier: {group.name: run.budgets[tier][key] for group in groups for run in group.runs if tier in run.budgets}
            for tier in groups[0].runs[0].budgets
        }
        limits = {
            tier: {name: nbytes for name, nbytes in of.items() if nbytes is not None} for tier, of in found.items()
        }
        unequal = {tier: of for tier, of in limits.items() if len({*of.values()}) > 1}
        if unequal:
            tier, of = max(unequal.items(), key=lambda item: max(item[1].values()) / min(item[1].values()))
            least, most = min(of, key=lambda name: of[name]), max(of, key=lambda name: of[name])
            fleet = groups[0].runs[0].config.get("fleet")
            return (
                f"The fleet {fleet} gives devices of {tier} {_exactly(of[least])} {what} "
                f"under {least} and {_exactly(of[most])} under {most}, so that none of the methods is recommended: its "
                "fits_width means what each method needs for a width. Give its groups training_memory, and where it "
                "should bind payload, in bytes (docs/fleets.md), and run the methods again."
            )
    return ""


def _exactly(nbytes: int) -> str:
    """Bytes with a prefix, and as they are."""
    return f"{bytes_text(nbytes)} ({nbytes:,} bytes)"


@dataclass(frozen=True)
class Gap:
    """By how much one method is ahead of another, by runs of the same seeds.

    Attributes:
        wins, seeds: with how many seeds, of how many.
        low, high: the interval of Student's t around it; None with fewer than two seeds.
    """

    wins: int
    seeds: int
    mean: float
    low: float | None = None
    high: float | None = None

    @property
    def is_sure(self) -> bool:
        """Whether the whole interval is above 0."""
        return self.low is not None and self.low > 0


def _gap(best: Group, other: Group, scale: Scale) -> Gap:
    """Paired by seeds, which the partition, the first weights and the sampled devices of a run follow from."""
    mine, theirs = best.by_seed, other.by_seed
    seeds = sorted(mine.keys() & theirs.keys())
    gaps = [scale.rank(mine[seed].figure) - scale.rank(theirs[seed].figure) for seed in seeds]
    wins = sum(gap > 0 for gap in gaps)
    if len(gaps) < 2:
        return Gap(wins, len(gaps), gaps[0])
    with needed("scipy", "a comparison over several seeds"):
        from scipy.stats import t  # takes half a second

    mean = fmean(gaps)
    half = float(t.ppf((1 + CONFIDENCE) / 2, len(gaps) - 1)) * stdev(gaps) / math.sqrt(len(gaps))
    return Gap(wins, len(gaps), mean, mean - half, mean + half)


def _how_sure(other: str, gap: Gap, scale: Scale) -> str:
    """By how much a method is ahead of the next one, and whether that is sure."""
    text = _points(scale)
    if gap.low is None or gap.high is None:
        return f"That it is better than {other}, by {text(gap.mean)}, is a guess: they have one seed in common."
    interval = f"{100 * CONFIDENCE:.0f} % interval {text(gap.low)} to {text(gap.high)}"
    sure = "is sure" if gap.is_sure else "is not sure, and more seeds would tell"
    ahead = f"{text(gap.mean)} on average, and better with {gap.wins} of {gap.seeds} seeds ({interval})"
    return f"That it is better than {other} {sure}: by {ahead}."


def _beside_the_method(best: Group, second: Group) -> list[str]:
    """In which settings, which both read, runs of two methods differ that are no method's own."""
    experiments = [group.runs[0].experiment for group in (best, second)]
    if experiments[0]["strategy"] == experiments[1]["strategy"]:
        return []  # the settings are what is compared, and name the rows
    both = experiments[0].keys() & experiments[1].keys()
    keys = [key for key in _differing(experiments) if key in both and key != "strategy"]
    settings = ", ".join(keys)
    return [f"The two differ in {settings} as well, so that the methods alone need not be the reason."] if keys else []


def _points(scale: Scale) -> Format:
    """How differences of scores are shown."""
    return (lambda value: f"{100 * value:.1f} points") if scale.is_share else plain


def _is_beyond(group: Group) -> bool:
    return any(run.summary.devices_beyond_budget for run in group.runs)


def _beyond(groups: Sequence[Group]) -> list[str]:
    names = [group.name for group in groups if _is_beyond(group)]
    return [f"Not counted, since it gives devices more than they afford: {', '.join(names)}."] if names else []


def _without_model(groups: Sequence[Group]) -> list[str]:
    """Which methods give some devices no model, and how many devices that are."""
    told = []
    for group in groups:
        none = [run.summary.devices_without_model or 0 for run in group.runs]
        if any(none):
            devices = max(run.summary.delivered_devices or 0 for run in group.runs)
            several = len({*none}) > 1 or any((run.summary.final_evaluations or 0) > 1 for run in group.runs)
            told.append(
                f"Under {group.name} {'up to ' if several else ''}{max(none)} of {devices} devices get no model."
            )
    return told


# Tables ---------------------------------------------------------------------------------------------------------------


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
            for key in _differing(experiments)
            if key in experiment
            and (key != "strategy" or group.runs[0].row)
            and (experiment[key] != usual.get(key) or len({str(e[key]) for e in experiments if key in e}) > 1)
        ]
        rows.append([group.name, ", ".join(f"{key} = {experiment[key]}" for key in own)])
    if not any(settings for _, settings in rows):
        return []
    return [TextTable("Settings that differ", ["method", "settings"], rows, text_columns=2)]


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
