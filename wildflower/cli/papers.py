"""The output of `wildflower paper`: the papers' tables and figures listed, explained, copied and planned."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from wildflower.launch.experiment_file import SettingsError, place, resolve
from wildflower.launch.sweeps import Row
from wildflower.papers.catalog import Entry, full_size
from wildflower.plugins.nearest import did_you_mean

if TYPE_CHECKING:
    from rich.table import Table

    from wildflower.cli.plan import Plan
    from wildflower.server_app.config import RunConfig

MODELS_NAMED = 5  # in a line on a plan


def chosen(one: Entry, names: Sequence[str]) -> list[Row]:
    """Return the rows of these names, or all.

    Raises:
        SettingsError: there is no row of a name; the nearest are named.
    """
    rows = {row.name: row for row in one.methods()}
    for name in names:
        if name not in rows:
            meant = did_you_mean(name, rows) or f"its rows are {', '.join(rows)}"
            raise SettingsError(f"{one.name} has no row {name!r}: {meant}")
    return [rows[name] for name in names] or list(rows.values())


def about(one: Entry) -> Iterator[str]:
    """Yield lines about an experiment: whose it is, its rows with the paper's figures, and what is open or missing."""
    yield f"{one.what}\n{one.paper}"
    for row in one.methods():
        yield f"  {row.name}: {one.printed.get(row.name, 'no figure printed')}"
    yield from (f"Open in the paper: {text}" for text in one.open)
    yield from (f"Not here: {text}" for text in one.missing)


def copy(one: Entry, folder: Path) -> list[str]:
    """Copy an experiment's files into a folder, and return the command that runs them there.

    Raises:
        SettingsError: the folder has one of the files.
    """
    rows = [text for row in one.methods() for text in row.overrides]
    fleets = {Path(text.partition("=")[2]) for text in [*one.settings(), *rows] if text.startswith("fleet=")}
    files = [one.experiment_file, one.folder / one.rows, *(file for file in sorted(fleets) if file.is_file())]
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        if (folder / file.name).exists():
            raise SettingsError(f"{folder / file.name} is there: name another folder")
    for file in files:
        shutil.copyfile(file, folder / file.name)
    grid = "".join(f' --grid "{values}"' for values in one.grid)
    return [f"cd {folder}", f"wildflower sweep {one.experiment} --rows {one.rows}{grid}"]


def configured(one: Entry, row: Row, settings: Sequence[str]) -> RunConfig:
    """Return the configuration of a row with its paths made whole. Raises SettingsError."""
    found = resolve(one.experiment_file, [*one.settings(), *row.overrides, *settings])
    return place(found.config, Path.cwd(), datetime.now())[0]


def planned(one: Entry, row: Row, settings: Sequence[str], folder: Path) -> tuple[RunConfig, Plan]:
    """Return a row's configuration and plan at full size, on data made in `folder` unless settings name a data-dir.

    Which examples a device has makes no difference to a plan, but how many does: there are as many as in the real data,
    or every device draws as many as it would have there.
    """
    from wildflower.cli.plan import make_plan

    if all(text.partition("=")[0] != "data-dir" for text in settings):
        settings = [*settings, *full_size(one, row, folder)]
    config = configured(one, row, settings)
    return config, make_plan(config)


def hours(config: RunConfig, plan: Plan) -> float:
    """Return the simulated hours of a run whose every round lasts as long as its slowest tier takes."""
    return config.rounds * max((device.seconds for device in plan.devices), default=0.0) / 3600


def summary(config: RunConfig, plan: Plan) -> str:
    """Return a line on a plan: rounds, hours, memory and the models that devices get."""
    models = Counter(device.parameters for device in plan.devices)
    sizes = ", ".join(f"{size:,}" if size else "none" for size in sorted(models, reverse=True)[:MODELS_NAMED])
    more = f" and {len(models) - MODELS_NAMED} more" if len(models) > MODELS_NAMED else ""
    memory = max((device.needed_memory_bytes for device in plan.devices), default=0)
    return (
        f"{config.rounds} rounds of {config.devices_per_round} of {config.devices} devices, {hours(config, plan):.3g} "
        f"simulated hours; at most {memory / 1e6:,.0f} MB of memory in training; models of {sizes}{more} parameters"
    )


def plan_text(one: Entry, row: Row, settings: Sequence[str], folder: Path) -> Iterator[str | Table]:
    """Yield what a plan of a row says: a line, and what every tier gets and how long a round takes there."""
    from rich.markup import escape

    from wildflower.cli.plan import plan_tables

    config, plan = planned(one, row, settings, folder)
    yield escape(f"{row.name}: {summary(config, plan)}")
    yield from plan_tables(plan, by_node=False)
