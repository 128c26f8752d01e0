"""report.html: one self-contained page about a run, made from its journal alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wildflower.server_app.activity import MISSED, Activity, gather_activity
from wildflower.server_app.config import RunConfig, descriptions
from wildflower.server_app.label_spread import read_labels
from wildflower.server_app.ledger import spent
from wildflower.server_app.model_map import keep_newest, model_map
from wildflower.server_app.pages import Block, Charts, blocks, page, words_table
from wildflower.server_app.report_devices import device_blocks
from wildflower.server_app.report_lines import cost_charts, device_charts, own_charts, score_charts
from wildflower.server_app.report_maps import architecture_charts, label_chart, map_chart, score_maps
from wildflower.server_app.report_text import baseline_of, in_short
from wildflower.server_app.run_folder import has_virtual_clock, read_config, read_devices, read_rounds, read_summary
from wildflower.server_app.run_records import DeviceRecord, RoundRecord, RunFile, Summary
from wildflower.server_app.summary import WHOLE, global_model, summarize
from wildflower.server_app.tables import TextTable
from wildflower.server_app.units import bytes_text, counted, plain, score_format, seconds_text
from wildflower.server_app.whole_files import write_whole

HOW_TO_READ = "Drag over a chart to zoom, double-click to see all of it again, click a name to hide its line."


def write_report(run_dir: Path) -> Path:
    """Write report.html in a run's folder, beside and then renamed; the path of the page.

    The run need not have ended.

    Raises JournalError when `run_dir` does not hold a run, and where nobody knows what a private one has released.
    """
    content = read_config(run_dir)
    rounds = read_rounds(run_dir)
    spent(run_dir, rounds)
    summary = read_summary(run_dir) or summarize(run_dir, "unfinished", None)
    labels = read_labels(run_dir)
    newest: list[DeviceRecord] = []
    fleet = gather_activity(keep_newest(read_devices(run_dir), len(rounds), newest), rounds=len(rounds))
    if labels is not None:
        fleet.tiers = dict(enumerate(labels.tiers)) | fleet.tiers  # also of devices that no round has asked
    whole, baseline = global_model(run_dir, content.config), baseline_of(summary, labels)
    stopped: list[Block] = (
        [blocks.heading("What stopped the run"), blocks.preformatted(summary.error)] if summary.error else []
    )
    parts: list[Block] = [
        _lead(content.config),
        *stopped,
        *in_short(content.config, rounds, summary, fleet, baseline),
        _headline(summary, fleet, virtual_clock=has_virtual_clock(run_dir), whole=whole),
        *(_scores(rounds, fleet, baseline, whole=whole) if rounds else []),
        *device_blocks(fleet, rounds, summary),
        *model_map(run_dir, newest),
        *(_charts(rounds, fleet) if rounds else []),
        *label_chart(labels, fleet),
        *_configuration(content),
        *words_table(_words(summary, whole=whole)),
    ]
    path = run_dir / "report.html"
    name = run_dir.resolve().name
    write_whole(path, page(f"{name} - Wildflower", name, parts, summary.status))
    return path


def _lead(config: dict[str, Any]) -> Block:
    keys = ("strategy", "task", "family", "fleet", "seed")
    return blocks.paragraph(" · ".join(f"{key} {config[key]}" for key in keys if config.get(key) not in (None, "")))


def _headline(summary: Summary, activity: Activity, *, virtual_clock: bool, whole: str) -> Block:
    """Return the figures of the run, each once."""
    label, text = summary.scale.label, score_format(summary.scale)
    outcomes = summary.devices_by_outcome
    missed = ", ".join(f"{outcomes[word]:,} {word}" for word in MISSED if outcomes.get(word))
    cards = []
    if summary.delivered_score is not None:
        cards.append((f"Delivered {label}", text(summary.delivered_score), summary.delivered_note()))
    if summary.worst_tier is not None and summary.worst_tier_score is not None:
        cards.append(("Worst tier", text(summary.worst_tier_score), summary.worst_tier))
    if summary.worst_device is not None and summary.worst_device_score is not None:
        where = f"device {summary.worst_device}, of {summary.scored_devices} that have a score"
        cards.append(("Worst device", text(summary.worst_device_score), where))
    if whole:
        title = f"{summary.scale.title} of the {whole}" if cards else f"Final {label}"
        best = "" if summary.best_score is None else f"best {text(summary.best_score)} in round {summary.best_round}"
        cards.append((title, "none" if summary.final_score is None else text(summary.final_score), best))
    if summary.personal_score is not None:
        of_parts = (summary.personal_score_by_tier or {}, summary.personal_score_by_network or {})
        parts = ", ".join(f"{name} {text(score)}" for scores in of_parts for name, score in scores.items())
        cards.append((f"Personal {label}", text(summary.personal_score), f"last fifth of the rounds: {parts}"))
    if summary.epsilon is not None:
        models = counted(summary.noised_releases or 0, "noised model")
        cards.append(("Epsilon", f"{summary.epsilon:.3g}", f"with delta {summary.delta:g}, of {models}"))
    cards.append(("Rounds", f"{summary.rounds:,}", f"{seconds_text(summary.wall_seconds)} on this machine"))
    if virtual_clock:
        cards.append(("Simulated time", seconds_text(summary.simulated_seconds), "of the devices' own clock"))
    cards.append(("Sent to devices", bytes_text(summary.training_bytes_down), "to train"))
    cards.append(("Sent by devices", bytes_text(summary.training_bytes_up), "after training"))
    statistics = summary.statistics_bytes_down + summary.statistics_bytes_up
    if for_scores := statistics + summary.scoring_bytes_down:
        of_scores = f"both ways; statistics of batch norm: {bytes_text(statistics)}" if statistics else "to devices"
        cards.append(("Sent for scores", bytes_text(for_scores), of_scores))
    cards.append(("Devices", f"{len(activity.trained):,} trained", f"of {len(activity.asked):,} that were asked"))
    cards.append(("Trainings", f"{outcomes.get('trained', 0):,}", missed or "none missed"))
    mean = activity.models.mean_parameters
    cards.append(("Mean model", "none" if mean is None else f"{plain(mean)}", "parameters"))
    return blocks.cards(cards)


def _words(summary: Summary, *, whole: str) -> list[str]:
    """Return the words of the page that a stranger does not know."""
    there = {
        "delivered": summary.delivered_score is not None,
        "tier": True,
        "worst tier": summary.worst_tier is not None,
        "whole model": whole == WHOLE,
        "budget": True,
        "personal": summary.personal_score is not None,
        "simulated time": summary.simulated_seconds > 0,
        "statistics": bool(summary.statistics_bytes_down),
        "epsilon": summary.epsilon is not None,
    }
    return [word for word, is_there in there.items() if is_there]


def _scores(
    rounds: Sequence[RoundRecord], activity: Activity, baseline: tuple[str, float] | None, *, whole: str
) -> list[Block]:
    """Return what was reached, over rounds, time and traffic."""
    lines = score_charts(rounds, activity.tiers, baseline, whole=whole)
    return [
        blocks.heading("Scores"),
        Charts([*lines, *score_maps(rounds, activity.tiers, whole=whole)]),
        blocks.paragraph(HOW_TO_READ, "note"),
    ]


def _charts(rounds: Sequence[RoundRecord], activity: Activity) -> list[Block]:
    """Return what it cost, and who trained what."""
    return [
        blocks.heading("What it cost"),
        Charts(cost_charts(rounds)),
        blocks.heading("Who trained what"),
        Charts([*device_charts(rounds), *architecture_charts(activity), *map_chart(activity)]),
        *own_charts(rounds),
        blocks.data([("rounds.jsonl", "every round"), ("devices.jsonl", "every device of every round")]),
    ]


def _configuration(content: RunFile) -> list[Block]:
    config, defaults = content.config, RunConfig().to_dict()
    # A key of another version, or of a method that is not imported here, has no description.
    meanings = descriptions(str(config.get("strategy")))
    changed = [key for key in config if key not in defaults or config[key] != defaults[key]]

    def keys(title: str, names: Sequence[str], folded: str = "") -> Block:
        rows = [(key, str(config[key]), meanings.get(key, "")) for key in names]
        return blocks.shown(TextTable(title, ["key", "value", "meaning"], rows, text_columns=3), folded)

    others = [key for key in config if key not in changed]
    versions = [(package, found or "not installed") for package, found in content.versions.items()]
    return [
        blocks.heading("Configuration"),
        keys("Configuration", changed),
        keys("Defaults", others, folded=f"{len(others)} keys with their default"),
        blocks.shown(TextTable("Versions", ["package", "version"], versions, text_columns=2), folded="Versions"),
    ]
