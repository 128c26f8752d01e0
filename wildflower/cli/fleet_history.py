"""Thirty days of a fleet in SQLite: when devices were heard of, what they reported, and how their rounds ended."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from wildflower.devices.private import private_open
from wildflower.plugins.user_error import UserError

if TYPE_CHECKING:
    from wildflower.launch.known_nodes import KnownNode
    from wildflower.server_app.node_records import LastReport
    from wildflower.server_app.run_records import DeviceRecord, RoundRecord

KEPT_DAYS, EVERY_SECONDS = 30, 600
MAX_ROWS, MAX_BYTES = 250_000, 2**28  # of each table; of the file, which so many rows do not reach
PAGE_BYTES = 4096
TABLES = """
CREATE TABLE IF NOT EXISTS seen (
    at INTEGER, device INTEGER, memory_bytes INTEGER, limit_bytes INTEGER, celsius REAL, down REAL, up REAL,
    flop_per_s REAL,
    PRIMARY KEY (at, device)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS outcomes (
    at INTEGER, run TEXT, round INTEGER, device INTEGER, word TEXT,
    PRIMARY KEY (run, round, device, word)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS outcomes_at ON outcomes (at);
"""
DAYS = """
SELECT day, sum(asked), sum(trained), min(least), max(most), max(hottest), sum(seconds) FROM (
    SELECT date(at, 'unixepoch', 'localtime') AS day, 0 AS asked, 0 AS trained,
        memory_bytes AS least, memory_bytes AS most, celsius AS hottest, :every AS seconds
    FROM seen WHERE device = :device
    UNION ALL
    SELECT date(at, 'unixepoch', 'localtime'), 1, word = 'trained', NULL, NULL, NULL, 0
    FROM outcomes WHERE device = :device)
GROUP BY day ORDER BY day DESC
"""
OUTCOMES = """
SELECT date(at, 'unixepoch', 'localtime'), word, count(*) FROM outcomes
WHERE device = ? AND word != 'trained' GROUP BY 1, 2 ORDER BY 1, 2
"""
DAY_HEADERS = ("day", "heard of", "trained in", "other outcomes", "free memory", "hottest")


@contextmanager
def history_at(file: Path) -> Iterator[sqlite3.Connection]:
    """Open a fleet's history, made where there is none. UserError where SQLite cannot."""
    try:
        with private_open(file, "a"), closing(sqlite3.connect(file, timeout=10)) as history, history:
            history.execute(f"PRAGMA max_page_count = {MAX_BYTES // PAGE_BYTES}")
            history.executescript(TABLES)
            yield history
    except sqlite3.Error as error:
        raise UserError(f"{file}: {error}: not the history of a fleet? Move it away to begin anew") from None


def remember(
    history: sqlite3.Connection,
    run: str,
    reports: Sequence[LastReport],
    known: Mapping[int, KnownNode],
    ended: Iterable[tuple[float, DeviceRecord]],
    now: float,
) -> None:
    """Keep what a look at the fleet has shown, and drop what is older than thirty days or beyond the bounds.

    A device has one row for each ten minutes in which it was heard of. What it reported is in the row if the report is
    about as new.

    Args:
        ended: the outcomes of the run's devices, each with the time at which its round ended.
        now: seconds since 1970.
    """
    from wildflower.launch.known_nodes import heard_at

    at = int(now // EVERY_SECONDS) * EVERY_SECONDS
    for last in reports:
        if heard_at(last, known.get(last.node)) >= now - EVERY_SECONDS:
            report = last.report
            figures = [report.memory_available_bytes, report.memory_limit_bytes, report.temperature_celsius]
            figures += [report.down_mbit_per_s, report.up_mbit_per_s, report.flop_per_s]
            if last.reported_at < at - EVERY_SECONDS:
                figures = [None] * len(figures)
            history.execute("INSERT OR REPLACE INTO seen VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (at, last.device, *figures))
    rows = ((int(end), run, record.round, record.device, record.outcome_word) for end, record in ended)
    history.executemany("INSERT OR IGNORE INTO outcomes VALUES (?, ?, ?, ?, ?)", rows)
    for table in ("seen", "outcomes"):
        history.execute(f"DELETE FROM {table} WHERE at < ?", (now - KEPT_DAYS * 86400,))
        beyond = f"SELECT at FROM {table} ORDER BY at DESC LIMIT 1 OFFSET {MAX_ROWS}"
        history.execute(f"DELETE FROM {table} WHERE at <= ({beyond})")


def ends_of(
    records: Iterable[DeviceRecord], rounds: Sequence[RoundRecord], last_end: float
) -> Iterator[tuple[float, DeviceRecord]]:
    """Yield the records of finished rounds with the time of their rounds' ends, which no journal has.

    last_end: of the newest round, in seconds since 1970. A pause of a run that was resumed is not seen.
    """
    ends = dict[int, float]()
    for record in reversed(rounds):
        ends[record.round] = last_end
        last_end -= record.wall_seconds
    for device in records:
        if device.round in ends:
            yield ends[device.round], device


def days_of(history: sqlite3.Connection, device: int) -> list[list[str]]:
    """Return a row under DAY_HEADERS for each day of a device, the newest first."""
    others = dict[str, list[str]]()
    for day, word, count in history.execute(OUTCOMES, (device,)):
        others.setdefault(day, []).append(f"{count} {word}")
    rows = []
    for day, asked, trained, least, most, hottest, seconds in history.execute(
        DAYS, {"device": device, "every": EVERY_SECONDS}
    ):
        memory = "" if least is None else f"{least / 1e6:,.0f} to {most / 1e6:,.0f} MB"
        hot = "" if hottest is None else f"{hottest:.0f} °C"
        outcomes = ", ".join(others.get(day, []))
        heard = f"{seconds / 3600:.1f} h" if seconds else ""
        rows.append([day, heard, f"{trained} of {asked}", outcomes, memory, hot])
    return rows
