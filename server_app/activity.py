"""The devices' activity, from their records: sums by device or tier, and over rounds."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from wildflower.server_app.run_records import DeviceRecord
from wildflower.server_app.summary import in_fleet_order

# Above these the map and the table speak of tiers instead of single devices, so that the page stays small.
MAX_DEVICES = 200
MAX_CELLS = 6000
MAX_COLUMNS = 150
MAX_SIZES = 200  # of models; of more, only three digits are kept
MISSED = ("late", "failed", "refused", "skipped")
OUTCOMES = ("trained", *MISSED)
REASON_LETTERS = 160


@dataclass
class Tally:
    """Sums of a row of the device table, or of a cell of the map."""

    outcomes: Counter[str] = field(default_factory=Counter)
    parameters: int = 0  # summed over what was trained
    memory_share: float = 0.0  # predicted memory over the budget, summed over what was trained
    down_bytes: int = 0
    up_bytes: int = 0
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)  # of budgets, and of models' sizes
    binding: Counter[str] = field(default_factory=Counter)  # of which limit a model takes the largest share

    def add(self, record: DeviceRecord) -> None:
        """Count one device in one round."""
        word = record.outcome_word
        self.outcomes[word] += 1
        if record.budget is not None:
            for name in ("memory_bytes", "download_bytes", "upload_bytes"):
                self._widen(name, getattr(record.budget, name))
        if word == "trained":
            self.parameters += record.parameters or 0
            self.down_bytes += record.download_bytes or 0
            self.up_bytes += record.upload_bytes or 0
            self._widen("parameters", record.parameters)
            shares = _shares(record)
            self.memory_share += shares.get("memory", 0.0)
            if shares:
                self.binding[max(shares, key=lambda limit: shares[limit])] += 1

    def _widen(self, name: str, value: float | None) -> None:
        if value is not None:
            low, high = self.ranges.get(name, (value, value))
            self.ranges[name] = min(low, value), max(high, value)

    @property
    def total(self) -> int:
        """Rounds of devices that were counted."""
        return sum(self.outcomes.values())

    @property
    def mean_parameters(self) -> float | None:
        """Return that of the models that were trained; None when none was."""
        return self.parameters / self.outcomes["trained"] if self.outcomes["trained"] else None


def _shares(record: DeviceRecord) -> dict[str, float]:
    """Return which share of each limit of its budget a device's model takes."""
    if record.budget is None:
        return {}
    limits = {
        "memory": (record.predicted_memory_bytes, record.budget.memory_bytes),
        "link, down": (record.download_bytes, record.budget.download_bytes),
        "link, up": (record.upload_bytes, record.budget.upload_bytes),
    }
    return {limit: taken / most for limit, (taken, most) in limits.items() if taken is not None and most}


@dataclass
class Activity:
    """The devices' training: rows are devices, or tiers where there are too many; columns are one or more rounds.

    Attributes:
        rows, cells: by device, or with `by_tier` by tier; cells by column too.
        by_tier_rows: of each tier, also where rows are devices.
        asked, trained: the devices that were asked, and those that trained at least once.
        tiers: of the devices that are known.
        sizes: of the models that were trained in a column; of very many, with three digits.
    """

    columns: int
    rounds_per_column: int
    rows: dict[int | str, Tally] = field(default_factory=dict)
    cells: dict[tuple[int | str, int], Tally] = field(default_factory=dict)
    by_tier: bool = False
    by_tier_rows: dict[str, Tally] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)
    tiers: dict[int, str] = field(default_factory=dict)
    trained: set[int] = field(default_factory=set)
    reasons: Counter[str] = field(default_factory=Counter)
    models: Tally = field(default_factory=Tally)
    sizes: dict[int, Counter[int]] = field(default_factory=dict)


def gather_activity(records: Iterable[DeviceRecord], rounds: int) -> Activity:
    """Read device records once, keeping sums only. Records beyond `rounds` belong to a round that never finished."""
    rounds_per_column = max(1, -(-rounds // MAX_COLUMNS))
    found = Activity(-(-rounds // rounds_per_column), rounds_per_column)
    rounded: dict[int, Counter[int]] = {}
    distinct: set[int] = set()
    tier_cells: dict[tuple[int | str, int], Tally] = {}
    for record in records:
        if record.round > rounds:
            continue
        tier = record.tier or "unknown"
        column = (record.round - 1) // rounds_per_column
        found.asked.add(record.device)
        found.tiers[record.device] = tier
        if record.outcome_word == "trained":
            found.trained.add(record.device)
        else:
            # Without their numbers, reasons are few and can be counted.
            found.reasons[re.sub(r"\d[\d,.]*", "#", record.outcome)[:REASON_LETTERS]] += 1
        found.models.add(record)
        if record.outcome_word == "trained" and record.parameters:
            # Of sizes with three digits there are few, however many architectures a search finds.
            rounded.setdefault(column, Counter())[int(float(f"{record.parameters:.2e}"))] += 1
            if len(distinct) <= MAX_SIZES:
                distinct.add(record.parameters)
                found.sizes.setdefault(column, Counter())[record.parameters] += 1
        found.by_tier_rows.setdefault(tier, Tally()).add(record)
        tier_cells.setdefault((tier, column), Tally()).add(record)
        if not found.by_tier:
            found.rows.setdefault(record.device, Tally()).add(record)
            found.cells.setdefault((record.device, column), Tally()).add(record)
            found.by_tier = len(found.rows) > MAX_DEVICES or len(found.cells) > MAX_CELLS
    order = in_fleet_order(found.tiers.values(), found.tiers)
    found.by_tier_rows = {name: found.by_tier_rows[name] for name in order}
    if found.by_tier:
        found.rows, found.cells = dict(found.by_tier_rows.items()), tier_cells
    else:
        found.rows = {device: found.rows[device] for device in sorted(found.asked)}
    if len(distinct) > MAX_SIZES:
        found.sizes = rounded
    return found
