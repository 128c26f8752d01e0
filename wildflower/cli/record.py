"""`wildflower record`: a fleet file of what real devices had, so that any method can be run over them again."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from wildflower.plugins.user_error import UserError
from wildflower.server_app.units import seconds_text

if TYPE_CHECKING:
    import sqlite3

VALUES = 20  # of memory or a link, as quantiles of what was reported
PRESENT = 0.5  # share of the days on which a device was heard of in an hour that belongs to its hours
SHORT_DAYS = 3  # of a history, up to which no device has hours: it may just have been looked at by day
REFERENCE_FLOP_PER_S = 10e9


def record(
    history: Annotated[Path, typer.Argument(metavar="FLEET.sqlite", help="The history that `fleet --serve` keeps.")],
    fleet: Annotated[Path, typer.Argument(metavar="FLEET.toml", help="The fleet file to write.")],
) -> None:
    """Write a fleet file of the memory, links, speed and hours that real devices had in the last thirty days.

    Each device is a group of its own. A run over the file draws each round's memory and links from what was reported.
    """
    from wildflower.cli.fleet_history import history_at

    if not history.is_file():
        raise UserError(f"{history} does not exist: `wildflower fleet RUN_DIR --serve HOST:PORT` keeps a history")
    if fleet.exists():
        raise UserError(f"{fleet} exists already: nothing was written")
    with history_at(history) as rows:
        text, devices = fleet_text(rows)
        days = history_days(rows)
    if not devices:
        raise UserError(f"{history}: no device has reported yet")
    fleet.write_text(text, encoding="utf-8")
    if days < SHORT_DAYS:
        typer.echo(
            f"Warning: the history covers {seconds_text(round(86400 * days))}. With less than {SHORT_DAYS} days, hours "
            "are left out, and memory and links vary less than they do over days: record again later",
            err=True,
        )
    typer.echo(f"{fleet}: {devices} devices. In an experiment: fleet = {str(fleet)!r}, devices = {devices}")


def history_days(history: sqlite3.Connection) -> float:
    """Return how many days lie between the first and the last time that any device was heard of."""
    ((seconds,),) = history.execute("SELECT max(at) - min(at) FROM seen")
    return (seconds or 0) / 86400


def fleet_text(history: sqlite3.Connection) -> tuple[str, int]:
    """Return the fleet file of a history, and the number of its devices; those that never reported are left out."""
    groups, days = [], history_days(history)
    for (device,) in history.execute("SELECT DISTINCT device FROM seen WHERE memory_bytes > 0 ORDER BY device"):
        columns = list(
            zip(
                *history.execute(
                    "SELECT memory_bytes, limit_bytes, down, up, flop_per_s FROM seen "
                    "WHERE device = ? AND memory_bytes IS NOT NULL ORDER BY at",
                    (device,),
                ),
                strict=True,
            )
        )
        memory, limits, down, up, speed = ([value for value in column if value is not None] for column in columns)
        heard = [at for (at,) in history.execute("SELECT at FROM seen WHERE device = ?", (device,))]
        lines = [f'name = "device-{device}"', "count = 1"]
        if columns[1][-1] is None:
            lines.append(f"memory = {_drawn(memory, '{:.0f} B')}")
        else:
            lines.append(f'training_memory = "{limits[-1]} B"')
        for key, values in (("down", down), ("up", up)):
            if values:
                lines.append(f"{key} = {_drawn(values, '{:.6g} Mbit/s')}")
        if speed:
            lines.append(f"speed = {median(speed) / REFERENCE_FLOP_PER_S:.6g}")
        if days >= SHORT_DAYS and (hours := usual_hours(heard)):
            lines.append(f'hours = "{hours}"')
        groups.append("[[group]]\n" + "\n".join(lines) + "\n")
    reference = f'reference = "{REFERENCE_FLOP_PER_S / 1e9:g} GFLOP/s"\n'
    return "\n".join([reference, *groups]), len(groups)


def _drawn(values: Sequence[float], form: str) -> str:
    """Return values as a fleet file draws them anew in each round: all, or so many quantiles of them."""
    ordered = sorted(values)
    if len(ordered) > VALUES:
        ordered = [ordered[round(place * (len(ordered) - 1) / (VALUES - 1))] for place in range(VALUES)]
    texts = [form.format(value) for value in ordered]
    if len(set(texts)) == 1:
        return json.dumps(texts[0])
    return f'{{ choice = {json.dumps(texts)}, every = "round" }}'


def usual_hours(heard: Sequence[float]) -> str:
    """Return the hours of the day in which a device is usually heard of, "22:00-06:00"; "" if that is at any hour.

    The longest stretch of hours counts, because a fleet file has one for a device.

    Args:
        heard: when it was, in seconds since 1970; days and hours are those of this machine.
    """
    moments = [time.localtime(at) for at in heard]
    days = {(at.tm_year, at.tm_yday) for at in moments}
    seen = {(at.tm_year, at.tm_yday, at.tm_hour) for at in moments}
    there = [sum((*day, hour) in seen for day in days) >= PRESENT * len(days) for hour in range(24)]
    if all(there) or not any(there):
        return ""
    starts = [hour for hour in range(24) if there[hour] and not there[hour - 1]]
    lengths = {start: next(n for n in range(1, 25) if not there[(start + n) % 24]) for start in starts}
    start = max(lengths, key=lambda hour: lengths[hour])
    return f"{start:02}:00-{(start + lengths[start]) % 24:02}:00"
