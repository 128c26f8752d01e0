"""model.json: the channel groups of a run's network; and the report's picture of how devices' models cut it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from wildflower.models.base import Family
from wildflower.models.group_family import GroupFamily
from wildflower.server_app.charts import cell_chart
from wildflower.server_app.pages import Block, Charts, blocks
from wildflower.server_app.report_maps import Shades, row_names
from wildflower.server_app.run_folder import read_if_there
from wildflower.server_app.run_records import DeviceRecord, Record
from wildflower.server_app.units import counted
from wildflower.server_app.whole_files import write_whole

FILE = "model.json"
MOST_GROUPS, MOST_MODELS = 100, 20  # in the picture; a search may give every device a model of its own


class ChannelGroups(Record):
    """Channels of every group of the whole network, in order of computation."""

    groups: Annotated[dict[str, Annotated[int, Field(ge=1)]], Field(max_length=100_000)]


def write_groups(run_dir: Path, family: Family) -> None:
    """Write the file where the family is cut by channel groups."""
    if isinstance(family, GroupFamily):
        write_whole(run_dir / FILE, ChannelGroups(groups=dict(family.groups)).model_dump_json())


def keep_newest(records: Iterable[DeviceRecord], rounds: int, kept: list[DeviceRecord]) -> Iterator[DeviceRecord]:
    """Pass device records on, and leave in `kept` those that trained in the newest of so many finished rounds."""
    for record in records:
        if record.round <= rounds and record.outcome_word == "trained" and record.architecture is not None:
            if kept and kept[0].round != record.round:
                kept.clear()
            kept.append(record)
        yield record


def model_map(run_dir: Path, newest: Sequence[DeviceRecord]) -> list[Block]:
    """Draw which share of every channel group the models of one round had. Rows are groups, columns are models.

    Raises JournalError where model.json is none of ours.
    """
    found = read_if_there(run_dir / FILE, ChannelGroups)
    if found is None or not newest:
        return []
    groups = list(found.groups.items())
    models: Counter[tuple[int, ...]] = Counter()
    tiers: dict[tuple[int, ...], set[str]] = {}
    parameters: dict[tuple[int, ...], int] = {}
    for record in newest:
        widths = tuple((record.architecture or {}).get("widths", ()))
        if len(widths) == len(groups):
            models[widths] += 1
            tiers.setdefault(widths, set()).add(record.tier or "unknown")
            parameters[widths] = record.parameters or 0
    shown = sorted((widths for widths, _ in models.most_common(MOST_MODELS)), key=lambda widths: parameters[widths])
    if not shown:
        return []
    rows = groups[:MOST_GROUPS]
    shares = [[widths[row] / full for widths in shown] for row, (_, full) in enumerate(rows)]
    shades = Shades(share for row in shares for share in row if share)
    cells = []
    for row, (name, full) in enumerate(rows):
        for column, widths in enumerate(shown):
            if widths[row]:
                who = f"{counted(models[widths], 'device')} of {', '.join(sorted(tiers[widths]))}"
                text = f"{name}: {widths[row]:,} of {full:,} channels; {parameters[widths]:,} parameters, {who}"
                cells.append((row, column, shades.color(shares[row][column]), text))
    notes = ["A blank cell is a layer that is left out."] if any(0 in row for row in shares) else []
    if len(shown) < len(models):
        notes.append(f"The {len(shown)} most frequent of {len(models):,} models are shown.")
    if len(rows) < len(groups):
        notes.append(f"The first {len(rows)} of {len(groups):,} groups are shown.")
    chart = cell_chart(
        f"Models of round {newest[0].round}: channel group by model",
        row_names(f"{name} ({full})" for name, full in rows),
        list(range(1, len(shown) + 1)),
        cells,
        x_label="model, from the smallest to the largest",
        key=shades.key(lambda share: f"{100 * share:.3g} % of its channels"),
        note=" ".join(notes),
    )
    told = (
        "Channels of a group are cut together. The command wildflower family shows of which tensors they are, and "
        "what is never cut."
    )
    return [blocks.heading("How the network was cut"), blocks.paragraph(told), Charts([chart])]
