"""report.html: one self-contained page about a run, made from its journal alone."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from server_app.charts import (
    Line,
    bytes_text,
    cards,
    line_chart,
    page,
    percent,
    plain,
    score_format,
    seconds_text,
    table,
    time_unit,
)
from server_app.config import RunConfig, descriptions
from server_app.folders import file_written_whole
from server_app.journal import (
    DeviceRecord,
    RoundRecord,
    Summary,
    in_fleet_order,
    read_config,
    read_devices,
    read_rounds,
    read_summary,
    summarize,
)

# Above these the map and the table speak of tiers instead of single devices, so that the page stays small.
MAX_DEVICES = 200
MAX_CELLS = 6000
MAX_COLUMNS = 150
MAX_REASONS = 12
SHADES = 6  # of sizes, as defined in the page's style
MISSED = ("late", "failed", "refused", "skipped")
OUTCOMES = ("trained", *MISSED)
REASON_LETTERS = 160


def write_report(run_dir: Path) -> Path:
    """Write `run_dir`/report.html, beside and then renamed, and return its path. The run need not have ended.

    Raises JournalError when `run_dir` does not hold a run.
    """
    content = read_config(run_dir)
    rounds = read_rounds(run_dir)
    summary = read_summary(run_dir) or summarize(run_dir, "unfinished", None)
    fleet = gather_activity(read_devices(run_dir), rounds=len(rounds))
    body = "".join(
        [
            _heading(run_dir, summary.status, content["config"]),
            f"<h2>What stopped the run</h2><pre>{escape(summary.error)}</pre>" if summary.error else "",
            _headline(summary, fleet),
            _charts(rounds, fleet.tiers) if rounds else "",
            _who_trained_what(fleet) if fleet.rows else "",
            _device_table(fleet) if fleet.rows else "",
            _configuration(content),
        ]
    )
    path = run_dir / "report.html"
    with file_written_whole(path) as file:
        file.write(page(f"{run_dir.resolve().name} - Wildflower", body).encode())
    return path


@dataclass
class Tally:
    """What a row of the device table, or a cell of the map, adds up to."""

    outcomes: Counter[str] = field(default_factory=Counter)
    parameters: int = 0  # summed over what was trained
    memory_share: float = 0.0  # predicted memory over the budget, summed over what was trained
    payload_bytes: int = 0

    def add(self, record: DeviceRecord) -> None:
        """Count one device in one round."""
        word = record.outcome_word
        self.outcomes[word] += 1
        if word == "trained":
            self.parameters += record.parameters or 0
            self.payload_bytes += record.payload_bytes or 0
            if record.budget and record.budget.memory_bytes and record.predicted_memory_bytes is not None:
                self.memory_share += record.predicted_memory_bytes / record.budget.memory_bytes

    @property
    def total(self) -> int:
        """Rounds of devices that were counted."""
        return sum(self.outcomes.values())

    @property
    def mean_parameters(self) -> float | None:
        """Of the models that were trained; None when none was."""
        return self.parameters / self.outcomes["trained"] if self.outcomes["trained"] else None


@dataclass
class Activity:
    """Who trained what when: rows are devices, or tiers where there are too many; columns are one or more rounds."""

    rows: dict[int | str, Tally]
    cells: dict[tuple[int | str, int], Tally]
    columns: int
    rounds_per_column: int
    by_tier: bool
    tiers: dict[int, str]  # of the devices
    reasons: Counter[str]
    devices: int  # how many different ones were asked
    trained: int  # how many of them trained at least once
    models: Tally


def gather_activity(records: Iterable[DeviceRecord], rounds: int) -> Activity:
    """Read device records once, keeping sums only. Records beyond `rounds` belong to a round that never finished."""
    rounds_per_column = max(1, -(-rounds // MAX_COLUMNS))
    columns = -(-rounds // rounds_per_column)
    seen: dict[int, str] = {}
    trained: set[int] = set()
    reasons: Counter[str] = Counter()
    models = Tally()
    device_rows: dict[int | str, Tally] = {}
    device_cells: dict[tuple[int | str, int], Tally] = {}
    tier_rows: dict[int | str, Tally] = {}
    tier_cells: dict[tuple[int | str, int], Tally] = {}
    by_tier = False
    for record in records:
        if record.round > rounds:
            continue
        tier = record.tier or "unknown"
        column = (record.round - 1) // rounds_per_column
        seen[record.device] = tier
        if record.outcome_word == "trained":
            trained.add(record.device)
        else:
            # Without their numbers, reasons are few and can be counted.
            reasons[re.sub(r"\d[\d,.]*", "#", record.outcome)[:REASON_LETTERS]] += 1
        models.add(record)
        tier_rows.setdefault(tier, Tally()).add(record)
        tier_cells.setdefault((tier, column), Tally()).add(record)
        if not by_tier:
            device_rows.setdefault(record.device, Tally()).add(record)
            device_cells.setdefault((record.device, column), Tally()).add(record)
            by_tier = len(device_rows) > MAX_DEVICES or len(device_cells) > MAX_CELLS
    rows, cells = (tier_rows, tier_cells) if by_tier else (device_rows, device_cells)
    order: list[Any] = in_fleet_order(seen.values(), seen) if by_tier else sorted(device_rows)
    return Activity(
        rows={name: rows[name] for name in order},
        cells=cells,
        columns=columns,
        rounds_per_column=rounds_per_column,
        by_tier=by_tier,
        tiers=seen,
        reasons=reasons,
        devices=len(seen),
        trained=len(trained),
        models=models,
    )


def _heading(run_dir: Path, status: str, config: dict[str, Any]) -> str:
    what = " · ".join(
        f"{key} {config[key]}"
        for key in ("strategy", "task", "family", "fleet", "seed")
        if config.get(key) not in (None, "")
    )
    name = escape(run_dir.resolve().name)
    return f'<h1>{name} <span class="badge {status}">{status}</span></h1><p class="lead">{escape(what)}</p>'


def delivered_note(summary: Summary) -> str:
    """What must be known beside the delivered score: over how many evaluations it is, the last, and who is left out."""
    parts, text = [], score_format(summary.scale)
    if (summary.final_evaluations or 0) > 1 and summary.last_delivered_score is not None:
        last = text(summary.last_delivered_score)
        parts.append(f"mean of the last {summary.final_evaluations} evaluations, the last {last}")
    devices = summary.delivered_devices or 0
    if summary.devices_without_model:
        parts.append(f"{summary.devices_without_model} of {devices} devices get none")
    if summary.devices_beyond_budget:
        parts.append(f"{summary.devices_beyond_budget} of {devices} devices get more than they afford")
    return "; ".join(parts)


def _headline(summary: Summary, activity: Activity) -> str:
    outcomes = summary.devices_by_outcome
    missed = ", ".join(f"{outcomes[word]:,} {word}" for word in MISSED if outcomes.get(word))
    mean = activity.models.mean_parameters
    label, text = summary.scale.label, score_format(summary.scale)
    best = f"best {text(summary.best_score)} in round {summary.best_round}" if summary.best_score is not None else ""
    delivered = []
    if summary.delivered_score is not None:
        delivered.append((f"Delivered {label}", text(summary.delivered_score), delivered_note(summary)))
    if summary.worst_tier is not None and summary.worst_tier_score is not None:
        delivered.append(("Worst tier", text(summary.worst_tier_score), summary.worst_tier))
    if summary.worst_device is not None and summary.worst_device_score is not None:
        where = f"device {summary.worst_device}, of {summary.scored_devices} that have a score"
        delivered.append(("Worst device", text(summary.worst_device_score), where))
    whole = f"{summary.scale.title} of the whole model" if delivered else f"Final {label}"
    tiers = ", ".join(f"{tier} {text(score)}" for tier, score in (summary.personal_score_by_tier or {}).items())
    personal = (
        []
        if summary.personal_score is None
        else [(f"Personal {label}", text(summary.personal_score), f"last fifth of the rounds: {tiers}")]
    )
    private = (
        [] if summary.epsilon is None else [("Epsilon", f"{summary.epsilon:.3g}", f"with delta {summary.delta:g}")]
    )
    return cards(
        [
            *delivered,
            (whole, "none" if summary.final_score is None else text(summary.final_score), best),
            *personal,
            *private,
            ("Rounds", f"{summary.rounds:,}", f"{seconds_text(summary.wall_seconds)} on this machine"),
            ("Simulated time", seconds_text(summary.simulated_seconds), "of the devices' own clock"),
            ("Sent to devices", bytes_text(summary.bytes_down), "down"),
            ("Sent by devices", bytes_text(summary.bytes_up), "up"),
            ("Devices", f"{activity.trained:,} trained", f"of {activity.devices:,} that were asked"),
            ("Trainings", f"{outcomes.get('trained', 0):,}", missed or "none missed"),
            ("Mean model", "none" if mean is None else f"{plain(mean)}", "parameters"),
        ]
    )


def _charts(rounds: Sequence[RoundRecord], tier_of: Mapping[int, str]) -> str:
    numbers = [record.round for record in rounds]
    length, unit = time_unit(rounds[-1].simulated_seconds)
    clock = [record.simulated_seconds / length for record in rounds]
    scale = rounds[-1].scale
    text = score_format(scale)
    scores = [record.score for record in rounds]
    # Of earlier versions' runs only what tiers were given last is known.
    delivered = [record.delivered_score for record in rounds]
    known = any(score is not None for score in delivered)
    scores_of = [(r.delivered_score_by_tier if known else r.score_by_tier) or {} for r in rounds]
    tiers = in_fleet_order((tier for of_round in scores_of for tier in of_round), tier_of)
    by_tier = [Line(tier, numbers, [of_round.get(tier) for of_round in scores_of]) for tier in tiers]
    tier_title = f"{scale.title} delivered by tier" if known else f"{scale.title} by tier"
    delivered_lines = [Line("delivered", numbers, delivered)] if known else []
    delivered_clock = [Line("delivered", clock, delivered)] if known else []
    parts = [record.server_seconds for record in rounds]
    server = [sum(seconds.values()) for seconds in parts]
    own_figures = sorted({name for record in rounds for name, y in record.metrics.items() if y is not None})
    exits = range(max(len(record.score_by_exit or []) for record in rounds))
    by_exit = [[_at(record.score_by_exit, exit) for record in rounds] for exit in exits]
    personal_tiers = in_fleet_order(
        (tier for record in rounds for tier in record.personal_score_by_tier or {}), tier_of
    )
    personal = [Line("all devices", numbers, [record.personal_score for record in rounds])]
    personal += [
        Line(tier, numbers, [(record.personal_score_by_tier or {}).get(tier) for record in rounds])
        for tier in personal_tiers
    ]
    memory = [record.memory_utilisation for record in rounds]
    bandwidth = [record.bandwidth_utilisation for record in rounds]
    figures = [
        line_chart(
            f"{scale.title} over rounds",
            [*delivered_lines, Line("whole model", numbers, scores)],
            x_label="round",
            y_format=text,
        ),
        line_chart(
            f"{scale.title} over simulated time",
            [*delivered_clock, Line("whole model", clock, scores)],
            x_label=unit,
            y_format=text,
        ),
        *([line_chart(tier_title, by_tier, x_label="round", y_format=text)] if by_tier else []),
        line_chart("Loss", [Line("global model", numbers, [record.loss for record in rounds])], x_label="round"),
        line_chart(
            "Budget used by what was assigned",
            [Line("memory", numbers, memory), Line("bandwidth", numbers, bandwidth)],
            x_label="round",
            from_zero=True,
            y_format=percent,
        ),
        line_chart(
            "Bytes per round",
            [
                Line("down", numbers, [record.bytes_down for record in rounds]),
                Line("up", numbers, [record.bytes_up for record in rounds]),
            ],
            x_label="round",
            y_format=bytes_text,
            from_zero=True,
        ),
        line_chart(
            "Devices per round",
            [
                Line("replied", numbers, [record.devices_replied for record in rounds], color=2),
                Line("sampled", numbers, [record.devices_sampled for record in rounds], color=7),
                *_that_happened(
                    Line("failed", numbers, [record.devices_failed for record in rounds], color=1),
                    Line("refused", numbers, [record.devices_refused for record in rounds], color=3),
                    Line("scaled down", numbers, [record.devices_bounded for record in rounds], color=5),
                    Line("below the smallest", numbers, [record.devices_below_smallest for record in rounds], color=4),
                    Line("lost what they kept", numbers, [record.devices_state_lost for record in rounds], color=6),
                ),
            ],
            x_label="round",
            from_zero=True,
        ),
        line_chart(
            "Seconds per round on this machine",
            [Line("whole round", numbers, [record.wall_seconds for record in rounds]), Line("server", numbers, server)],
            x_label="round",
            y_format=seconds_text,
            from_zero=True,
        ),
        line_chart(
            "Seconds per round on the server",
            _that_happened(
                *(
                    Line(part, numbers, [seconds.get(part, 0.0) for seconds in parts], color)
                    for color, part in enumerate(dict.fromkeys(name for seconds in parts for name in seconds))
                )
            ),
            x_label="round",
            y_format=seconds_text,
            from_zero=True,
        ),
        line_chart(
            "Different architectures per round",
            [Line("architectures", numbers, [record.distinct_architectures for record in rounds])],
            x_label="round",
            from_zero=True,
        ),
    ]
    if exits:
        figures.append(
            line_chart(
                f"{scale.title} by exit of the global model",
                [Line(f"exit {exit + 1}", numbers, by_exit[exit]) for exit in exits],
                x_label="round",
                y_format=text,
            )
        )
    if personal_tiers:
        title = f"Personal {scale.label}, on devices' own test shards"
        figures.append(line_chart(title, personal, x_label="round", y_format=text))
    for name in own_figures:
        figures.append(
            line_chart(
                name.replace("_", " ").capitalize(),
                [Line(name.replace("_", " "), numbers, [record.metrics.get(name) for record in rounds])],
                x_label="round",
                from_zero=True,
            )
        )
    return f'<div class="charts">{"".join(figures)}</div>'


def _that_happened(*lines: Line) -> list[Line]:
    """The lines that are not 0 all the time: what never happened only hides the others."""
    return [line for line in lines if any(y != 0 for _, y in line.points())]


def _at(values: Sequence[float] | None, place: int) -> float | None:
    return values[place] if values is not None and place < len(values) else None


def shade_bounds(sizes: Iterable[float]) -> list[float]:
    """The upper bounds of the map's shades: one per size where there are few, else equal steps up to the largest."""
    distinct = sorted(set(sizes))
    if len(distinct) <= SHADES:
        return distinct
    low, high = distinct[0], distinct[-1]
    return [low + (high - low) * (step + 1) / SHADES for step in range(SHADES - 1)] + [high]


def shade(size: float, bounds: Sequence[float]) -> int:
    """Which of the six shades a model of `size` parameters gets; few sizes are spread over all shades."""
    step = next(step for step, bound in enumerate(bounds) if size <= bound)
    return SHADES - 1 if len(bounds) == 1 else round(step * (SHADES - 1) / (len(bounds) - 1))


def _who_trained_what(activity: Activity) -> str:
    names = list(activity.rows)
    cell_height = 22 if len(names) <= 12 else 14 if len(names) <= 40 else 7 if len(names) <= 100 else 4
    # Wide cells for a short run, but no wider than reads as a cell.
    left, top, width = 86, 18, 1210
    cell_width = min(60.0, (width - left - 4) / activity.columns)
    gap = 1 if cell_width >= 4 and cell_height >= 6 else 0
    height = top + cell_height * len(names) + 4
    sizes = [cell.mean_parameters for cell in activity.cells.values() if cell.mean_parameters is not None]
    bounds = shade_bounds(sizes)
    every_name = -(-15 // cell_height)  # a name needs 15 units
    parts = []
    for row, name in enumerate(names):
        if row % every_name == 0:
            label = escape(_shorten(str(name), 13))
            base = top + row * cell_height + min(cell_height, 15) - 2
            parts.append(f'<text class="y" x="{left - 6}" y="{base}">{label}</text>')
    every_column = max(1, -(-48 // int(max(cell_width, 1))))
    for column in range(0, activity.columns, every_column):
        middle = left + (column + 0.5) * cell_width
        parts.append(f'<text class="x" x="{middle:.1f}" y="{top - 6}">{column * activity.rounds_per_column + 1}</text>')
    rows = {name: row for row, name in enumerate(names)}
    for (name, column), cell in activity.cells.items():
        x, y = left + column * cell_width, float(top + rows[name] * cell_height)
        mean = cell.mean_parameters
        inner = []
        for word in OUTCOMES:
            if not cell.outcomes[word]:
                continue
            tall = (cell_height - gap) * cell.outcomes[word] / cell.total
            style = f"s{shade(mean, bounds)}" if word == "trained" and mean is not None else word
            inner.append(
                f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{cell_width - gap:.1f}" height="{tall:.1f}"/>'
            )
            y += tall
        text = escape(_cell_text(activity, name, column, cell))
        parts.append(f"<g><title>{text}</title>{''.join(inner)}</g>")
    rows_are = "tier" if activity.by_tier else "device"
    title = f"Who trained what when: {rows_are} by round"
    note = "Color is the size of the trained model."
    if activity.by_tier:
        note += f" {activity.devices:,} devices took part, so a cell is a tier: mean size, and the share that missed."
    if activity.rounds_per_column > 1:
        note += f" Each column is {activity.rounds_per_column} rounds."
    svg = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    return (
        f"<h2>{escape(title)}</h2><figure>{_map_legend(bounds, activity)}"
        f'<div class="scroll">{svg}</div><p class="note">{escape(note)}</p></figure>'
    )


def _cell_text(activity: Activity, name: int | str, column: int, cell: Tally) -> str:
    first = column * activity.rounds_per_column + 1
    last = first + activity.rounds_per_column - 1
    when = f"round {first}" if first == last else f"rounds {first} to {last}"
    who = f"tier {name}" if isinstance(name, str) else f"device {name} ({activity.tiers[name]})"
    what = ", ".join(f"{cell.outcomes[word]} {word}" for word in OUTCOMES if cell.outcomes[word])
    size = "" if cell.mean_parameters is None else f", {plain(cell.mean_parameters)} parameters"
    return f"{who}, {when}: {what}{size}"


def _map_legend(bounds: Sequence[float], activity: Activity) -> str:
    sizes = {cell.mean_parameters for cell in activity.cells.values()} - {None}
    up_to = "up to " if len(sizes) > len(bounds) else ""
    entries = [(f"s{shade(bound, bounds)}", f"{up_to}{plain(bound)} parameters") for bound in bounds]
    entries += [(word, word) for word in MISSED if any(tally.outcomes[word] for tally in activity.rows.values())]
    items = "".join(f'<li><span class="box {style}"></span>{escape(text)}</li>' for style, text in entries)
    return f'<ul class="legend">{items}</ul>'


def _device_table(activity: Activity) -> str:
    rows = []
    for name, tally in activity.rows.items():
        trained = tally.outcomes["trained"]
        rows.append(
            [
                str(name),
                *([] if isinstance(name, str) else [activity.tiers[name]]),
                f"{tally.total:,}",
                *(f"{tally.outcomes[word]:,}" if tally.outcomes[word] else "" for word in OUTCOMES),
                "" if tally.mean_parameters is None else plain(tally.mean_parameters),
                percent(tally.memory_share / trained) if trained and tally.memory_share else "",
                bytes_text(tally.payload_bytes),
            ]
        )
    first = ["tier"] if activity.by_tier else ["device", "tier"]
    headers = [*first, "sampled", *OUTCOMES, "mean parameters", "memory used", "payload in all"]
    devices = f"{len(rows):,} {'tiers' if activity.by_tier else 'devices'} by outcome"
    devices_table = table(headers, rows, text_columns=len(first))
    reasons = ""
    if activity.reasons:
        common = activity.reasons.most_common(MAX_REASONS)
        more = len(activity.reasons) - len(common)
        listed = table(["outcome", "times"], [(reason, f"{count:,}") for reason, count in common])
        reasons = f"<h2>Why devices did not train</h2>{listed}"
        reasons += f'<p class="note">and {more:,} other reasons</p>' if more else ""
    is_open = " open" if len(rows) <= 24 else ""
    return f"{reasons}<h2>Devices</h2><details{is_open}><summary>{devices}</summary>{devices_table}</details>"


def _configuration(content: dict[str, Any]) -> str:
    config, defaults = content["config"], RunConfig().to_dict()
    # A key of another version, or of a method that is not imported here, has no description.
    meanings = descriptions(str(config.get("strategy")))
    changed = [key for key in config if key not in defaults or config[key] != defaults[key]]
    own, others = (
        table(
            ["key", "value", "meaning"],
            [(key, str(config[key]), meanings.get(key, "")) for key in keys],
            text_columns=3,
        )
        for keys in (changed, [key for key in config if key not in changed])
    )
    versions = table(
        ["package", "version"], [(k, v or "not installed") for k, v in content["versions"].items()], text_columns=2
    )
    return (
        f"<h2>Configuration</h2>{own}"
        f"<details><summary>{len(config) - len(changed)} keys with their default</summary>{others}</details>"
        f"<details><summary>Versions</summary>{versions}</details>"
    )


def _shorten(text: str, letters: int) -> str:
    return text if len(text) <= letters else text[: letters - 1] + "…"
