"""report.html: one self-contained page about a run, made from its journal alone; and its data as CSV files."""

import csv
import io
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from pathlib import Path
from typing import IO, Any

from wildflower.server_app.charts import Chart, Line, bar_chart, cell_chart, line_chart
from wildflower.server_app.config import RunConfig, descriptions
from wildflower.server_app.label_spread import Labels, read_labels
from wildflower.server_app.ledger import spent
from wildflower.server_app.pages import Block, Cards, Charts, Data, Heading, Paragraph, Preformatted, Table, page
from wildflower.server_app.run_folder import has_virtual_clock, read_config, read_devices, read_rounds, read_summary
from wildflower.server_app.run_records import BudgetRecord, DeviceRecord, RoundRecord, Summary, flat
from wildflower.server_app.summary import in_fleet_order, summarize
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
from wildflower.server_app.whole_files import file_written_whole

# Above these the map and the table speak of tiers instead of single devices, so that the page stays small.
MAX_DEVICES = 200
MAX_CELLS = 6000
MAX_COLUMNS = 150
MAX_REASONS = 12
MAX_SIZES = 200  # of models; of more, only three digits are kept
SHADES = 6  # of sizes, as defined in the page's style
DATA, DEVICES, MODELS, LABELS = "rounds.csv", "devices.csv", "models.csv", "labels.csv"
HOW_TO_READ = "Drag over a chart to zoom, double-click to see all of it again, click a name to hide its line."
MISSED = ("late", "failed", "refused", "skipped")
OUTCOMES = ("trained", *MISSED)
REASON_LETTERS = 160


def write_report(run_dir: Path) -> Path:
    """Write report.html and its data as CSV in a run's folder, beside and then renamed; the path of the page.

    The run need not have ended.

    Raises JournalError when `run_dir` does not hold a run, and where nobody knows what a private one has released.
    """
    content = read_config(run_dir)
    rounds = read_rounds(run_dir)
    spent(run_dir, rounds)
    summary = read_summary(run_dir) or summarize(run_dir, "unfinished", None)
    labels = read_labels(run_dir)
    with file_written_whole(run_dir / DEVICES) as devices, file_written_whole(run_dir / MODELS) as models:
        records = _devices_csv(read_devices(run_dir), len(rounds), devices)
        fleet = gather_activity(_models_csv(records, len(rounds), models), rounds=len(rounds))
    if labels is not None:
        fleet.tiers = dict(enumerate(labels.tiers)) | fleet.tiers  # also of devices that no round has asked
    blocks: list[Block] = [
        _lead(content["config"]),
        *_stopped(summary),
        _headline(summary, fleet, virtual_clock=has_virtual_clock(run_dir)),
        *(_charts(rounds, fleet) if rounds else []),
        *_label_chart(labels, fleet),
        *_device_tables(fleet),
        *_configuration(content),
    ]
    if rounds:
        with file_written_whole(run_dir / DATA) as file:
            file.write(rounds_csv(rounds).encode())
    if labels is not None:
        with file_written_whole(run_dir / LABELS) as file:
            file.write(labels_csv(labels).encode())
    path = run_dir / "report.html"
    name = run_dir.resolve().name
    with file_written_whole(path) as file:
        file.write(page(f"{name} - Wildflower", name, blocks, summary.status).encode())
    return path


def rounds_csv(rounds: Sequence[RoundRecord]) -> str:
    """Every round as a line, with a column per tier, exit and part of the server's work."""
    rows = [flat(record.model_dump()) for record in rounds]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    # What some rounds have none of stands beside the columns of the others' parts.
    parted = {column.partition(".")[0] for column in columns if "." in column}
    out = io.StringIO()
    writer = csv.DictWriter(
        out, [column for column in columns if column not in parted], extrasaction="ignore", lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def labels_csv(labels: Labels) -> str:
    """How many training examples of each class a device has: a line per device, a column per class."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["device", "tier", *labels.classes])
    of_devices = enumerate(zip(labels.tiers, labels.counts, strict=True))
    writer.writerows([device, tier, *counts] for device, (tier, counts) in of_devices)
    return out.getvalue()


def _devices_csv(records: Iterable[DeviceRecord], rounds: int, file: IO[bytes]) -> Iterator[DeviceRecord]:
    """Pass device records on, and write each as a line; its architecture is JSON, its budget a column per part."""
    budget = [f"budget.{part}" for part in BudgetRecord.model_fields]
    columns = [c for name in DeviceRecord.model_fields for c in (budget if name == "budget" else [name])]
    lines = io.StringIO()
    writer = csv.DictWriter(lines, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    file.write(lines.getvalue().encode())
    for record in records:
        if record.round <= rounds:
            values = flat(record.model_dump(), whole=("architecture",))
            if record.architecture is not None:
                values["architecture"] = json.dumps(record.architecture)
            lines.seek(0)
            lines.truncate()
            writer.writerow(values)
            file.write(lines.getvalue().encode())
        yield record


def _models_csv(records: Iterable[DeviceRecord], rounds: int, file: IO[bytes]) -> Iterator[DeviceRecord]:
    """Pass device records on, and write which models each tier trained in each round, one round at a time."""
    file.write(b"round,tier,parameters,trained\n")
    for number, of_round in groupby(records, lambda record: record.round):
        counts: Counter[tuple[str, int]] = Counter()
        for record in of_round:
            if number <= rounds and record.outcome_word == "trained" and record.parameters is not None:
                counts[record.tier or "unknown", record.parameters] += 1
            yield record
        lines = io.StringIO()
        rows = ([number, *model, count] for model, count in sorted(counts.items()))
        csv.writer(lines, lineterminator="\n").writerows(rows)
        file.write(lines.getvalue().encode())


@dataclass
class Tally:
    """What a row of the device table, or a cell of the map, adds up to."""

    outcomes: Counter[str] = field(default_factory=Counter)
    parameters: int = 0  # summed over what was trained
    memory_share: float = 0.0  # predicted memory over the budget, summed over what was trained
    down_bytes: int = 0
    up_bytes: int = 0

    def add(self, record: DeviceRecord) -> None:
        """Count one device in one round."""
        word = record.outcome_word
        self.outcomes[word] += 1
        if word == "trained":
            self.parameters += record.parameters or 0
            self.down_bytes += record.download_bytes or 0
            self.up_bytes += record.upload_bytes or 0
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
    tiers: dict[int, str]  # of the devices that are known
    reasons: Counter[str]
    devices: int  # how many different ones were asked
    trained: int  # how many of them trained at least once
    models: Tally
    sizes: dict[int, Counter[int]]  # of the models that were trained in a column; of very many, with three digits


def gather_activity(records: Iterable[DeviceRecord], rounds: int) -> Activity:
    """Read device records once, keeping sums only. Records beyond `rounds` belong to a round that never finished."""
    rounds_per_column = max(1, -(-rounds // MAX_COLUMNS))
    columns = -(-rounds // rounds_per_column)
    seen: dict[int, str] = {}
    trained: set[int] = set()
    reasons: Counter[str] = Counter()
    models = Tally()
    sizes: dict[int, Counter[int]] = {}
    rounded: dict[int, Counter[int]] = {}
    distinct: set[int] = set()
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
        if record.outcome_word == "trained" and record.parameters:
            rounded.setdefault(column, Counter())[_three_digits(record.parameters)] += 1
            if len(distinct) <= MAX_SIZES:
                distinct.add(record.parameters)
                sizes.setdefault(column, Counter())[record.parameters] += 1
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
        sizes=sizes if len(distinct) <= MAX_SIZES else rounded,
    )


def _three_digits(size: int) -> int:
    """A size with three digits, of which there are few, however many architectures a search finds."""
    return int(float(f"{size:.2e}"))


def _lead(config: dict[str, Any]) -> Paragraph:
    keys = ("strategy", "task", "family", "fleet", "seed")
    return Paragraph(" · ".join(f"{key} {config[key]}" for key in keys if config.get(key) not in (None, "")))


def _stopped(summary: Summary) -> list[Block]:
    return [Heading("What stopped the run"), Preformatted(summary.error)] if summary.error else []


def _headline(summary: Summary, activity: Activity, *, virtual_clock: bool) -> Cards:
    virtual = seconds_text(summary.simulated_seconds)
    outcomes = summary.devices_by_outcome
    missed = ", ".join(f"{outcomes[word]:,} {word}" for word in MISSED if outcomes.get(word))
    mean = activity.models.mean_parameters
    label, text = summary.scale.label, score_format(summary.scale)
    best = f"best {text(summary.best_score)} in round {summary.best_round}" if summary.best_score is not None else ""
    delivered = []
    if summary.delivered_score is not None:
        delivered.append((f"Delivered {label}", text(summary.delivered_score), summary.delivered_note()))
    if summary.worst_tier is not None and summary.worst_tier_score is not None:
        delivered.append(("Worst tier", text(summary.worst_tier_score), summary.worst_tier))
    if summary.worst_device is not None and summary.worst_device_score is not None:
        where = f"device {summary.worst_device}, of {summary.scored_devices} that have a score"
        delivered.append(("Worst device", text(summary.worst_device_score), where))
    whole = f"{summary.scale.title} of the whole model" if delivered else f"Final {label}"
    of_parts = (summary.personal_score_by_tier or {}, summary.personal_score_by_network or {})
    parts = ", ".join(f"{name} {text(score)}" for scores in of_parts for name, score in scores.items())
    personal = (
        []
        if summary.personal_score is None
        else [(f"Personal {label}", text(summary.personal_score), f"last fifth of the rounds: {parts}")]
    )
    private = []
    if summary.epsilon is not None:
        models = counted(summary.noised_releases or 0, "noised model")
        private.append(("Epsilon", f"{summary.epsilon:.3g}", f"with delta {summary.delta:g}, of {models}"))
    statistics = summary.statistics_bytes_down + summary.statistics_bytes_up
    for_scores = statistics + summary.scoring_bytes_down
    of_scores = f"both ways; statistics of batch norm: {bytes_text(statistics)}" if statistics else "to devices"
    return Cards(
        [
            *delivered,
            (whole, "none" if summary.final_score is None else text(summary.final_score), best),
            *personal,
            *private,
            ("Rounds", f"{summary.rounds:,}", f"{seconds_text(summary.wall_seconds)} on this machine"),
            *([("Simulated time", virtual, "of the devices' own clock")] if virtual_clock else []),
            ("Sent to devices", bytes_text(summary.training_bytes_down), "to train"),
            ("Sent by devices", bytes_text(summary.training_bytes_up), "after training"),
            *([("Sent for scores", bytes_text(for_scores), of_scores)] if for_scores else []),
            ("Devices", f"{activity.trained:,} trained", f"of {activity.devices:,} that were asked"),
            ("Trainings", f"{outcomes.get('trained', 0):,}", missed or "none missed"),
            ("Mean model", "none" if mean is None else f"{plain(mean)}", "parameters"),
        ]
    )


def _charts(rounds: Sequence[RoundRecord], activity: Activity) -> list[Block]:
    """What was reached, what it cost, and who trained what."""
    return [
        Charts([*_score_charts(rounds, activity.tiers), *_score_maps(rounds, activity.tiers)]),
        Paragraph(HOW_TO_READ, "note"),
        Heading("What it cost"),
        Charts(_cost_charts(rounds)),
        Heading("Who trained what"),
        Charts([*_device_charts(rounds), *_architecture_charts(rounds, activity), *_map_chart(activity)]),
        *_own_charts(rounds),
        Data(
            [
                (DATA, "every round"),
                (MODELS, "models that were trained"),
                (DEVICES, "every device of every round"),
            ]
        ),
    ]


def _score_charts(rounds: Sequence[RoundRecord], tier_of: Mapping[int, str]) -> list[Chart]:
    numbers = [record.round for record in rounds]
    length, unit = time_unit(rounds[-1].simulated_seconds)
    clock = [record.simulated_seconds / length for record in rounds]
    scale = rounds[-1].scale
    text = score_format(scale)
    scores = [record.score for record in rounds]
    # With evaluate-tiers = false nothing says what devices would be given.
    delivered = [record.delivered_score for record in rounds]
    known = any(score is not None for score in delivered)
    scores_of = [(r.delivered_score_by_tier if known else r.score_by_tier) or {} for r in rounds]
    tiers = in_fleet_order((tier for of_round in scores_of for tier in of_round), tier_of)
    by_tier = [Line(tier, numbers, [of_round.get(tier) for of_round in scores_of]) for tier in tiers]
    tier_title = f"{scale.title} delivered by tier" if known else f"{scale.title} by tier"
    delivered_lines = [Line("delivered", numbers, delivered)] if known else []
    delivered_clock = [Line("delivered", clock, delivered)] if known else []
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
    networks = dict.fromkeys(name for record in rounds for name in record.personal_score_by_network or {})
    personal += [
        Line(name, numbers, [(record.personal_score_by_network or {}).get(name) for record in rounds])
        for name in networks
    ]
    traffic = [float(total) for total in accumulate(record.training_bytes for record in rounds)]
    delivered_traffic = [Line("delivered", traffic, delivered)] if known else []
    charts = [
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
        line_chart(
            f"{scale.title} over traffic",
            [*delivered_traffic, Line("whole model", traffic, scores)],
            x_label="training, down and up",
            y_format=text,
            x_format=bytes_text,
        ),
        *([line_chart(tier_title, by_tier, x_label="round", y_format=text)] if by_tier else []),
        line_chart("Loss", [Line("global model", numbers, [record.loss for record in rounds])], x_label="round"),
    ]
    if exits:
        charts.append(
            line_chart(
                f"{scale.title} by exit of the global model",
                [Line(f"exit {exit + 1}", numbers, by_exit[exit]) for exit in exits],
                x_label="round",
                y_format=text,
            )
        )
    if personal_tiers:
        title = f"Personal {scale.label}, on devices' own test shards"
        charts.append(line_chart(title, personal, x_label="round", y_format=text))
    return charts


def _score_maps(rounds: Sequence[RoundRecord], tier_of: Mapping[int, str]) -> list[Chart]:
    """Accuracy of every class, and scores of every device, over the evaluations."""
    scale = rounds[-1].scale
    text = score_format(scale)

    def of_devices(found: Mapping[int, float] | None) -> dict[str, float]:
        return {
            f"{device} ({tier_of[device]})" if device in tier_of else f"{device}": v
            for device, v in (found or {}).items()
        }

    classes = {r.round: r.accuracy_by_class for r in rounds if r.accuracy_by_class}
    devices = {r.round: of_devices(r.score_by_device) for r in rounds if r.score_by_device}
    personal = {r.round: of_devices(r.personal_score_by_device) for r in rounds if r.personal_score_by_device}
    return [
        *_score_map("Accuracy of the whole model", "class", classes, percent),
        *_score_map(f"Delivered {scale.label}", "device", devices, text),
        *_score_map(f"Personal {scale.label}", "device", personal, text),
    ]


def _score_map(title: str, what: str, scores: Mapping[int, Mapping[str, float]], text: Format) -> list[Chart]:
    """A map of the scores of classes or devices, by name, over the rounds that have them; [] where none does.

    Of many rounds evenly spread ones are shown, the last among them, so that the page stays small.
    """
    everything = list(dict.fromkeys(name for of_round in scores.values() for name in of_round))
    names = everything[:MAX_DEVICES]
    places = {name: row for row, name in enumerate(names)}
    most = max(1, min(MAX_COLUMNS, MAX_CELLS // max(1, len(names))))
    stride = max(1, -(-len(scores) // most))
    shown = sorted(scores)[::-1][::stride][::-1]
    found = [
        (places[name], column, value)
        for column, number in enumerate(shown)
        for name, value in scores[number].items()
        if name in places and math.isfinite(value)
    ]
    if not found:
        return []
    bounds = shade_bounds(value for _, _, value in found)
    up_to = "up to " if len({value for _, _, value in found}) > len(bounds) else ""
    cells = [
        (row, column, f"s{shade(value, bounds)}", f"{what} {names[row]}, round {shown[column]}: {text(value)}")
        for row, column, value in found
    ]
    key = [(f"s{shade(bound, bounds)}", f"{up_to}{text(bound)}") for bound in bounds]
    of_rounds = f"One of {stride} evaluations is shown." if stride > 1 else ""
    of_names = f"The first {len(names)} of {len(everything):,} are shown." if len(names) < len(everything) else ""
    note = " ".join(filter(None, (of_rounds, of_names)))
    return [
        cell_chart(f"{title}: {what} by round", _row_names(names), shown, cells, x_label="round", key=key, note=note)
    ]


def _cost_charts(rounds: Sequence[RoundRecord]) -> list[Chart]:
    numbers = [record.round for record in rounds]
    length, unit = time_unit(rounds[-1].simulated_seconds)
    parts = [record.server_seconds for record in rounds]
    of_round = {
        "training, down": [record.training_bytes_down for record in rounds],
        "training, up": [record.training_bytes_up for record in rounds],
        "statistics, down": [record.statistics_bytes_down for record in rounds],
        "statistics, up": [record.statistics_bytes_up for record in rounds],
        "scoring, down": [record.scoring_bytes_down for record in rounds],
    }
    traffic = {name: sizes for name, sizes in of_round.items() if name.startswith("training") or any(sizes)}
    server = [sum(seconds.values()) for seconds in parts]
    return [
        line_chart(
            "Bytes per round",
            [Line(name, numbers, sizes) for name, sizes in traffic.items()],
            x_label="round",
            y_format=bytes_text,
            from_zero=True,
        ),
        line_chart(
            "Bytes in all",
            [Line(name, numbers, list(accumulate(sizes))) for name, sizes in traffic.items()],
            x_label="round",
            y_format=bytes_text,
            from_zero=True,
        ),
        line_chart(
            f"Simulated {unit} in all",
            [Line("the devices' clock", numbers, [record.simulated_seconds / length for record in rounds])],
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
            "Budget used by what was assigned",
            [
                Line("memory", numbers, [record.memory_utilisation for record in rounds]),
                Line("bandwidth", numbers, [record.bandwidth_utilisation for record in rounds]),
            ],
            x_label="round",
            from_zero=True,
            y_format=percent,
        ),
    ]


def _device_charts(rounds: Sequence[RoundRecord]) -> list[Chart]:
    numbers = [record.round for record in rounds]
    return [
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
            "Different architectures per round",
            [Line("architectures", numbers, [record.distinct_architectures for record in rounds])],
            x_label="round",
            from_zero=True,
        ),
    ]


def _architecture_charts(rounds: Sequence[RoundRecord], activity: Activity) -> list[Chart]:
    """How many devices trained models of which size, over time."""
    bounds = shade_bounds(size for counts in activity.sizes.values() for size in counts)
    if not bounds:
        return []
    distinct = {size for counts in activity.sizes.values() for size in counts}
    up_to = "up to " if len(distinct) > len(bounds) else ""
    xs = [column * activity.rounds_per_column + 1 for column in range(activity.columns)]
    bars = []
    for place, bound in enumerate(bounds):
        low = bounds[place - 1] if place else 0
        ys = [
            sum(count for size, count in activity.sizes.get(column, {}).items() if low < size <= bound)
            for column in range(activity.columns)
        ]
        bars.append((f"{up_to}{plain(bound)} parameters", f"s{shade(bound, bounds)}", xs, ys))
    return [bar_chart("Trained models by size", bars, x_label="round", y_format=plain)]


def _own_charts(rounds: Sequence[RoundRecord]) -> list[Block]:
    """Figures of the method's own."""
    names = sorted({name for record in rounds for name, y in record.metrics.items() if y is not None})
    if not names:
        return []
    numbers = [record.round for record in rounds]
    charts = [
        line_chart(
            name.replace("_", " ").capitalize(),
            [Line(name.replace("_", " "), numbers, [record.metrics.get(name) for record in rounds])],
            x_label="round",
            from_zero=True,
        )
        for name in names
    ]
    return [Heading("Figures of the method"), Charts(charts)]


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


def _map_chart(activity: Activity) -> list[Chart]:
    """Rows are devices or tiers, columns rounds; a cell is the size of what was trained, or why nothing was."""
    if not activity.rows:
        return []
    rows = {name: row for row, name in enumerate(activity.rows)}
    sizes = [cell.mean_parameters for cell in activity.cells.values() if cell.mean_parameters is not None]
    bounds = shade_bounds(sizes)
    up_to = "up to " if len(set(sizes)) > len(bounds) else ""
    key = [(f"s{shade(bound, bounds)}", f"{up_to}{plain(bound)} parameters") for bound in bounds]
    key += [(word, word) for word in MISSED if any(tally.outcomes[word] for tally in activity.rows.values())]
    cells = []
    for (name, column), cell in activity.cells.items():
        mean = cell.mean_parameters
        color = cell.outcomes.most_common(1)[0][0] if mean is None else f"s{shade(mean, bounds)}"
        cells.append((rows[name], column, color, _cell_text(activity, name, column, cell)))
    note = "Color is the mean size of the trained models, or why none was trained."
    if activity.by_tier:
        note += f" {activity.devices:,} devices took part, so a row is a tier."
    if activity.rounds_per_column > 1:
        note += f" Each column is {activity.rounds_per_column} rounds."
    chart = cell_chart(
        f"Who trained what when: {'tier' if activity.by_tier else 'device'} by round",
        _row_names(map(str, rows)),
        [column * activity.rounds_per_column + 1 for column in range(activity.columns)],
        cells,
        x_label="round",
        key=key,
        note=note,
    )
    return [chart]


def _label_chart(labels: Labels | None, activity: Activity) -> list[Block]:
    """Which labels the training examples of each simulated device have."""
    if labels is None:
        return []
    shown = labels.counts[:MAX_DEVICES]
    bounds = shade_bounds(count for row in shown for count in row if count)
    up_to = "up to " if len({count for row in shown for count in row if count}) > len(bounds) else ""
    cells = []
    for device, row in enumerate(shown):
        tier = f" ({activity.tiers[device]})" if device in activity.tiers else ""
        for place, count in enumerate(row):
            if count:
                text = f"device {device}{tier}: {count:,} of {sum(row):,} examples are {labels.classes[place]}"
                cells.append((place, device, f"s{shade(count, bounds)}", text))
    chart = cell_chart(
        "Labels of the training examples: class by device",
        _row_names(labels.classes),
        list(range(len(shown))),
        cells,
        x_label="device",
        key=[(f"s{shade(bound, bounds)}", f"{up_to}{int(bound):,} examples") for bound in bounds],
        note=_first_of(len(shown), labels.devices),
    )
    counted = _first_of(len(labels.counts), labels.devices)
    data = f"examples by device and class{f' ({counted})' if counted else ''}"
    return [Heading("What devices have"), Charts([chart]), Data([(LABELS, data)])]


def _first_of(shown: int, all_there_are: int) -> str:
    return f"The first {shown:,} of {all_there_are:,} devices" if shown < all_there_are else ""


def _cell_text(activity: Activity, name: int | str, column: int, cell: Tally) -> str:
    first = column * activity.rounds_per_column + 1
    last = first + activity.rounds_per_column - 1
    when = f"round {first}" if first == last else f"rounds {first} to {last}"
    who = f"tier {name}" if isinstance(name, str) else f"device {name} ({activity.tiers[name]})"
    what = ", ".join(f"{cell.outcomes[word]} {word}" for word in OUTCOMES if cell.outcomes[word])
    size = "" if cell.mean_parameters is None else f", {plain(cell.mean_parameters)} parameters"
    return f"{who}, {when}: {what}{size}"


def _device_tables(activity: Activity) -> list[Block]:
    if not activity.rows:
        return []
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
                bytes_text(tally.down_bytes),
                bytes_text(tally.up_bytes),
            ]
        )
    first = ["tier"] if activity.by_tier else ["device", "tier"]
    headers = [*first, "sampled", *OUTCOMES, "mean parameters", "memory used", "down in all", "up in all"]
    devices = f"{len(rows):,} {'tiers' if activity.by_tier else 'devices'} by outcome"
    blocks: list[Block] = []
    if activity.reasons:
        common = activity.reasons.most_common(MAX_REASONS)
        more = len(activity.reasons) - len(common)
        blocks += [
            Heading("Why devices did not train"),
            Table(["outcome", "times"], [(reason, f"{count:,}") for reason, count in common]),
            *([Paragraph(f"and {more:,} other reasons", "note")] if more else []),
        ]
    table = Table(headers, rows, text_columns=len(first), folded=devices, is_open=len(rows) <= 24)
    return [*blocks, Heading("Devices"), table]


def _configuration(content: dict[str, Any]) -> list[Block]:
    config, defaults = content["config"], RunConfig().to_dict()
    # A key of another version, or of a method that is not imported here, has no description.
    meanings = descriptions(str(config.get("strategy")))
    changed = [key for key in config if key not in defaults or config[key] != defaults[key]]

    def keys(names: Sequence[str], folded: str = "") -> Table:
        rows = [(key, str(config[key]), meanings.get(key, "")) for key in names]
        return Table(["key", "value", "meaning"], rows, text_columns=3, folded=folded)

    others = [key for key in config if key not in changed]
    versions = [(package, found or "not installed") for package, found in content["versions"].items()]
    return [
        Heading("Configuration"),
        keys(changed),
        keys(others, folded=f"{len(others)} keys with their default"),
        Table(["package", "version"], versions, text_columns=2, folded="Versions"),
    ]


def _row_names(names: Iterable[str]) -> list[str]:
    """Names short enough for an axis, no two of them alike: rows of one name would be drawn over each other."""
    found: list[str] = []
    for name in names:
        short, number = _shorten(name, 24), 1
        while short in found:
            number += 1
            short = f"{_shorten(name, 20)} ({number})"
        found.append(short)
    return found


def _shorten(text: str, letters: int) -> str:
    return text if len(text) <= letters else text[: letters - 1] + "…"
