"""The output of `wildflower family`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table

from wildflower.launch.experiment_file import resolve
from wildflower.models.cost import cost
from wildflower.models.family import Family
from wildflower.models.group_family import GroupFamily
from wildflower.models.placement import groups_of
from wildflower.models.traced.family import Traced
from wildflower.models.traced.making import written_module
from wildflower.plugins.user_error import UserError
from wildflower.server_app.app import build
from wildflower.server_app.config import RunConfig
from wildflower.strategies import METHODS

MOST_TENSORS = 4  # of a group, in its line
MOST_PINNED = 20


def family_page(config: RunConfig) -> Iterator[str | Table]:
    """Yield the parts of the page; ConfigError if a run could not begin."""
    engine, _ = build(config)
    family = engine.method.family
    whole = cost(family, family.full(), batch_size=config.batch_size, optimizer=config.optimizer)
    yield f"{_name(family)}: {whole.parameters:,} parameters"
    for one in family.alternatives.values():
        if isinstance(one, GroupFamily):
            yield _groups(one)
            yield from _depth(one)
        if isinstance(one, Traced):
            yield from _pinned(one)
    yield _widths(family, config)


def methods_table(experiment: Path | None, overrides: Sequence[str]) -> Table:
    """Return which methods take the experiment's model; of the others, why not."""
    table = Table("method", "takes it", title="Methods")
    for method in METHODS:
        try:
            build(resolve(experiment, [*overrides, f"strategy={method}"]).config)
            table.add_row(method, "yes")
        except (UserError, ValueError) as error:
            table.add_row(method, f"no: {error}")
    return table


def _name(family: Family) -> str:
    return family.function if isinstance(family, Traced) else str(family.spec()["name"])


def _groups(family: GroupFamily) -> Table:
    """Return the channel groups, and which tensors each ties."""
    table = Table("group", "channels", "tensors and dimensions that are cut together", title="Channel groups")
    tied: dict[str, list[str]] = {group: [] for group in family.groups}
    for name, spec in family.tensors(family.full()).items():
        for dimension, axis in enumerate(spec.axes):
            for group in groups_of(axis):
                tied.get(group, []).append(f"{name}[{dimension}]")
    for group, size in family.groups.items():
        shown, more = tied[group][:MOST_TENSORS], len(tied[group]) - MOST_TENSORS
        table.add_row(group, str(size), ", ".join(shown) + (f" and {more} more" if more > 0 else ""))
    return table


def _depth(family: GroupFamily) -> Iterator[str | Table]:
    """Yield the stacks of blocks and which of these may be left out, and the exits."""
    if family.stacks:
        table = Table("stack", "blocks", "may be left out", title="Depth")
        for stack, blocks in family.stacks.items():
            may = [block for block in blocks if block in family.removable]
            table.add_row(stack, ", ".join(blocks), ", ".join(may) or "none")
        yield table
    if len(family.segments) > 1:
        table = Table("exit", "channel groups between it and the one before", title="Exits")
        for head, groups in family.segments.items():
            table.add_row(head, ", ".join(groups))
        yield table


def _pinned(family: Traced) -> Iterator[str | Table]:
    """Yield what is never cut, and why."""
    written = written_module(
        family.function, family.arguments, family.input_shape, family.classes, family.tokens, family.cuts
    )
    pinned = written.pinned
    table = Table("dimension", "why", title="Never cut")
    for dimension, why in list(pinned.items())[:MOST_PINNED]:
        table.add_row(dimension, why)
    if pinned:
        yield table
    if len(pinned) > MOST_PINNED:
        yield f"and {len(pinned) - MOST_PINNED} more that are never cut"


def _widths(family: Family, config: RunConfig) -> Table:
    """Return what each width costs."""
    table = Table("width", "parameters", "sent", "memory in training", "operations per example", title="Widths")
    for width in config.widths:
        found = cost(family, family.width(width), batch_size=config.batch_size, optimizer=config.optimizer)
        table.add_row(
            f"{width:g}",
            f"{found.parameters:,}",
            f"{found.download_bytes / 1e6:.3g} MB",
            f"{found.peak_training_memory_bytes / 1e6:.3g} MB",
            f"{found.training_flops / 1e6:.3g} M",
        )
    return table
