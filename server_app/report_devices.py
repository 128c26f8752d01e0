"""Tables of the models that devices got, and why, by tier and by device."""

from collections import Counter
from collections.abc import Mapping, Sequence

from wildflower.server_app.activity import MISSED, Activity, Tally
from wildflower.server_app.pages import Block, blocks
from wildflower.server_app.run_records import RoundRecord, Summary
from wildflower.server_app.tables import TextTable
from wildflower.server_app.units import Format, bytes_text, percent, plain, score_format

MAX_REASONS = 12
WHY = (
    "Memory and link are what a device may spend in a round. What binds is the limit of which its model takes most: a "
    "larger model would not fit. The largest model of the run is bound by nothing."
)


def device_blocks(activity: Activity, rounds: Sequence[RoundRecord], summary: Summary) -> list[Block]:
    """Return the section about devices; [] where none was asked."""
    if not activity.rows:
        return []
    text = score_format(summary.scale)
    of_tiers = summary.delivered_score_by_tier or summary.score_by_tier or {}
    of_devices = next((r.score_by_device for r in reversed(rounds) if r.score_by_device), None) or {}
    devices = Counter(activity.tiers[device] for device in activity.asked)
    missed = [word for word in MISSED if activity.models.outcomes[word]]
    gets = ["memory", "link", "model, parameters", "memory it takes", "what binds"]
    asked = ["sampled", "trained", *missed, "down in all", "up in all"]

    def cells(tally: Tally, score: float | None) -> list[str]:
        return _cells(tally, activity, "" if score is None else text(score), missed)

    tiers = [
        [tier, f"{devices[tier]:,}", *cells(tally, of_tiers.get(tier))] for tier, tally in activity.by_tier_rows.items()
    ]
    parts: list[Block] = [
        blocks.heading("Which devices got what, and why"),
        blocks.shown(TextTable("Tiers", ["tier", "devices", *gets, "score", *asked], tiers)),
        blocks.paragraph(WHY, "note"),
        *_missed(activity),
    ]
    if not activity.by_tier:
        rows = [
            [str(device), activity.tiers[device], *cells(tally, of_devices.get(device))]
            for device, tally in activity.rows.items()
            if isinstance(device, int)
        ]
        table = TextTable("Devices", ["device", "tier", *gets, "last score", *asked], rows, text_columns=2)
        parts.append(blocks.shown(table, folded=f"{len(rows):,} devices one by one"))
    return parts


def _cells(tally: Tally, activity: Activity, score: str, missed: Sequence[str]) -> list[str]:
    trained = tally.outcomes["trained"]
    return [
        _range(tally.ranges, "memory_bytes", bytes_text),
        _link(tally.ranges),
        _range(tally.ranges, "parameters", plain),
        percent(round(tally.memory_share / trained, 3)) if trained and tally.memory_share else "",
        _binding(tally, activity),
        score,
        f"{tally.total:,}",
        *(f"{tally.outcomes[word]:,}" if tally.outcomes[word] else "" for word in ("trained", *missed)),
        bytes_text(tally.down_bytes),
        bytes_text(tally.up_bytes),
    ]


def _range(ranges: Mapping[str, tuple[float, float]], name: str, text: Format) -> str:
    if name not in ranges:
        return ""
    low, high = map(text, ranges[name])
    return low if low == high else f"{low} to {high}"


def _link(ranges: Mapping[str, tuple[float, float]]) -> str:
    """Return what may travel in a round, one way."""
    down, up = (_range(ranges, name, bytes_text) for name in ("download_bytes", "upload_bytes"))
    if not down and not up:
        return "no limit" if "memory_bytes" in ranges else ""
    return down if down == up else f"{down or 'no limit'} down, {up or 'no limit'} up"


def _binding(tally: Tally, activity: Activity) -> str:
    """Return what keeps a device's model from being larger."""
    if "parameters" not in tally.ranges:
        return "no model fits" if tally.outcomes["skipped"] else ""
    if tally.ranges["parameters"][1] == activity.models.ranges["parameters"][1]:
        return "nothing"
    return tally.binding.most_common(1)[0][0] if tally.binding else "nothing"


def _missed(activity: Activity) -> list[Block]:
    """Return why devices did not train."""
    if not activity.reasons:
        return []
    common = activity.reasons.most_common(MAX_REASONS)
    rows = [(reason, f"{count:,}") for reason, count in common]
    more = len(activity.reasons) - len(common)
    return [
        blocks.heading("Why devices did not train"),
        blocks.shown(TextTable("Why devices did not train", ["outcome", "times"], rows)),
        *([blocks.paragraph(f"and {more:,} other reasons", "note")] if more else []),
    ]
