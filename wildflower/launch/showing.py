"""A run on the screen: its rounds as they end, in a terminal, a pipe or a notebook, and its summary."""

import html
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from wildflower.launch.terminal import say
from wildflower.server_app.run_records import RoundRecord, Summary
from wildflower.server_app.summary import OF_DEVICES, WHOLE
from wildflower.server_app.units import bytes_text, counted, plain, score_format, seconds_text

if TYPE_CHECKING:
    from IPython.display import DisplayHandle
    from rich.progress import Progress, TaskID


class Show(Protocol):
    """Where finished rounds are shown."""

    def rounds(self, rounds: Sequence[RoundRecord], waiting: str = "") -> None:
        """Show the rounds so far, and what the run waits for; called many times, mostly without anything new."""


@contextmanager
def progress(console: Console, total: int, earlier: int, named: Callable[[], str] = lambda: WHOLE) -> Iterator[Show]:
    """A bar on a terminal or in a notebook; elsewhere a line per round, but for the `earlier` ones of a resumed run.

    Args:
        named: what the global model is called.
    """
    if console.is_jupyter:
        yield notebook_bar("starting", total)
        return
    if not console.is_terminal:
        yield Lines(console, total, earlier, named)
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[figures]}"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as bars:
        task = bars.add_task("starting", total=total, figures="")
        yield Bar(bars, task, total)


class Lines:
    """One plain line per round, for logs and pipes."""

    def __init__(self, console: Console, total: int, earlier: int, named: Callable[[], str] = lambda: WHOLE) -> None:
        self._console = console
        self._named = named
        self._total = total
        self._shown = earlier
        self._waiting = ""

    def rounds(self, rounds: Sequence[RoundRecord], waiting: str = "") -> None:
        """Print the rounds that were not printed yet, and what the run waits for when that is something else."""
        # A resumed run goes back to its checkpoint, and does again what came after it.
        self._shown = min(self._shown, len(rounds))
        for record in rounds[self._shown :]:
            parts = [f"round {record.round}/{self._total}"]
            scored = score_format(record.scale)
            if record.delivered_score is not None:
                parts.append(f"delivered {record.scale.label} {scored(record.delivered_score)}")
            if record.score is not None:
                whole = record.scale.label if record.delivered_score is None else self._named() or OF_DEVICES
                parts.append(f"{whole} {scored(record.score)}")
            if record.loss is not None:
                parts.append(f"loss {plain(record.loss)}")
            parts += [
                f"{record.devices_replied} of {record.devices_sampled} devices",
                *([f"staleness {age:.1f}"] if (age := record.metrics.get("staleness_mean")) is not None else []),
                f"training {bytes_text(record.training_bytes_down)} down",
                f"{bytes_text(record.training_bytes_up)} up",
                seconds_text(record.wall_seconds),
            ]
            line = ", ".join(parts)
            left = seconds_left(rounds[: record.round], self._total)
            if left:
                line += f", {seconds_text(round(left))} left"
            say(self._console, line)
        self._shown = len(rounds)
        if waiting not in ("", self._waiting):
            say(self._console, waiting)
            self._waiting = waiting


class Bar:
    """A progress bar with the newest figures beside it."""

    def __init__(self, bars: "Progress", task: "TaskID", total: int) -> None:
        self._bars = bars
        self._task = task
        self._total = total

    def rounds(self, rounds: Sequence[RoundRecord], waiting: str = "") -> None:
        """Move the bar to the last finished round, with what the run waits for in place of the round."""
        self._bars.update(
            self._task,
            completed=len(rounds),
            description=waiting or (f"round {len(rounds)}/{self._total}" if rounds else "starting"),
            figures=newest_figures(rounds, self._total) if rounds else "",
        )


class NotebookBar:
    """A progress bar in a notebook's output, which every front end shows and a saved notebook keeps."""

    def __init__(self, handle: "DisplayHandle", total: int) -> None:
        self._handle = handle
        self._total = total
        self._shown = ""

    def rounds(self, rounds: Sequence[RoundRecord], waiting: str = "") -> None:
        """Move the bar to the last finished round. Runs from notebooks have no nodes to wait for."""
        if rounds:
            self.show(len(rounds), f"round {len(rounds)}/{self._total}", newest_figures(rounds, self._total))

    def show(self, done: int, what: str, figures: str) -> None:
        """Move the bar to `done`, with texts before and behind it."""
        markup = f'{html.escape(what)} <progress value="{done}" max="{self._total}"></progress> {html.escape(figures)}'
        if markup != self._shown:
            self._shown = markup
            text = f"{what}, {figures}" if figures else what
            self._handle.update({"text/html": markup, "text/plain": text}, raw=True)


def notebook_bar(what: str, total: int) -> NotebookBar:
    """A bar in the output of the cell that runs, with its first text."""
    from IPython.display import DisplayHandle

    handle = DisplayHandle()
    handle.display({"text/plain": what}, raw=True)
    bar = NotebookBar(handle, total)
    bar.show(0, what, "")
    return bar


def newest_figures(rounds: Sequence[RoundRecord], total: int) -> str:
    """Return finished rounds in a few words: the last score, the bytes of training so far, the time that is left.

    The score is that of what devices get, and the whole model's where that was not evaluated.
    """
    evaluated = [record.figure for record in rounds if record.figure is not None]
    figures = [score_format(rounds[-1].scale)(evaluated[-1])] if evaluated else []
    figures.append(bytes_text(sum(record.training_bytes for record in rounds)))
    if left := seconds_left(rounds, total):
        figures.append(f"{seconds_text(round(left))} left")
    return " · ".join(figures)


def seconds_left(rounds: Sequence[RoundRecord], total: int) -> float:
    """Return what the rounds to come should take, by the median of the last ten: the first one also starts the
    workers."""
    recent = [record.wall_seconds for record in rounds[-10:]]
    return max(0, total - len(rounds)) * median(recent) if recent else 0.0


def summary_table(summary: Summary, *, virtual_clock: bool, whole: str) -> Table:
    """The end of a run in a few lines."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in summary_rows(summary, virtual_clock=virtual_clock, whole=whole):
        table.add_row(escape(name), escape(value))
    return table


def summary_rows(summary: Summary, *, virtual_clock: bool, whole: str) -> list[tuple[str, str]]:
    """The end of a run as names and values; what belongs to the row above begins with two spaces.

    Args:
        virtual_clock: whether its devices have one, as those of a fleet do.
        whole: what its global model is called; "" if it has none.
    """
    rows = [("status", summary.status), ("rounds", str(summary.rounds))]

    def row(name: str, value: str) -> None:
        rows.append((name, value))

    label, text = summary.scale.label, score_format(summary.scale)
    if summary.delivered_score is not None:
        row(f"delivered {label}", text(summary.delivered_score))
        if note := summary.delivered_note():
            row("", note)
    by_tier = summary.delivered_score_by_tier or {}
    for tier, score in by_tier.items():
        is_worst = tier == summary.worst_tier and summary.tiers_differ
        row(f"  tier {tier}", f"{text(score)}{' (worst)' if is_worst else ''}")
    if summary.worst_device is not None and summary.worst_device_score is not None:
        row("worst device", f"{text(summary.worst_device_score)}, device {summary.worst_device}")
    if summary.final_score is not None and summary.best_score is not None:
        row(whole or OF_DEVICES, text(summary.final_score))
        row("  best", f"{text(summary.best_score)} in round {summary.best_round}")
    if summary.delivered_score is None:
        for tier, score in (summary.score_by_tier or {}).items():
            row(f"  tier {tier}", text(score))
    if summary.personal_score is not None:
        row(f"personal {label}", text(summary.personal_score))
    for tier, score in (summary.personal_score_by_tier or {}).items():
        row(f"  tier {tier}", text(score))
    for name, score in (summary.personal_score_by_network or {}).items():
        row(f"  {name}", text(score))
    if summary.epsilon is not None:
        models = counted(summary.noised_releases or 0, "noised model")
        row("epsilon", f"{summary.epsilon:.3g} with delta {summary.delta:g}, of {models}")
    row("training bytes", f"{bytes_text(summary.training_bytes_down)} down, {bytes_text(summary.training_bytes_up)} up")
    if summary.statistics_bytes_down:
        down, up = bytes_text(summary.statistics_bytes_down), bytes_text(summary.statistics_bytes_up)
        row("statistics bytes", f"{down} down, {up} up, to score batch norm")
    if summary.scoring_bytes_down:
        row("scoring bytes", f"{bytes_text(summary.scoring_bytes_down)} down")
    row("devices", ", ".join(f"{count} {word}" for word, count in summary.devices_by_outcome.items()))
    if virtual_clock:
        row("simulated time", seconds_text(summary.simulated_seconds))
    row("time here", seconds_text(summary.wall_seconds))
    return rows
