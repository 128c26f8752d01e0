"""report.html: one self-contained page about a run, made from its journal alone; and its data as CSV files."""

import csv
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import IO, Any

from wildflower.server_app.activity import MISSED, OUTCOMES, Activity, gather_activity
from wildflower.server_app.config import RunConfig, descriptions
from wildflower.server_app.label_spread import Labels, read_labels
from wildflower.server_app.ledger import spent
from wildflower.server_app.pages import Block, Cards, Charts, Data, Heading, Paragraph, Preformatted, Table, page
from wildflower.server_app.report_lines import cost_charts, device_charts, own_charts, score_charts
from wildflower.server_app.report_maps import LABELS, architecture_charts, label_chart, map_chart, score_maps
from wildflower.server_app.run_folder import has_virtual_clock, read_config, read_devices, read_rounds, read_summary
from wildflower.server_app.run_records import BudgetRecord, DeviceRecord, RoundRecord, Summary, flat
from wildflower.server_app.summary import summarize
from wildflower.server_app.units import bytes_text, counted, percent, plain, score_format, seconds_text
from wildflower.server_app.whole_files import file_written_whole

MAX_REASONS = 12
DATA, DEVICES, MODELS = "rounds.csv", "devices.csv", "models.csv"
HOW_TO_READ = "Drag over a chart to zoom, double-click to see all of it again, click a name to hide its line."


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
        *label_chart(labels, fleet),
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
        Charts([*score_charts(rounds, activity.tiers), *score_maps(rounds, activity.tiers)]),
        Paragraph(HOW_TO_READ, "note"),
        Heading("What it cost"),
        Charts(cost_charts(rounds)),
        Heading("Who trained what"),
        Charts([*device_charts(rounds), *architecture_charts(rounds, activity), *map_chart(activity)]),
        *own_charts(rounds),
        Data(
            [
                (DATA, "every round"),
                (MODELS, "models that were trained"),
                (DEVICES, "every device of every round"),
            ]
        ),
    ]


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
