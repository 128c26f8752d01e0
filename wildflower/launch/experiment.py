"""`wildflower run`: one experiment from start to report, watched through its journal."""

import html
import math
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from itertools import takewhile
from logging import WARNING, LogRecord
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from wildflower.launch.before import (
    Deployment,
    check_buildable,
    check_disk,
    check_free,
    check_same_files,
    check_start,
)
from wildflower.launch.bundle import make_bundle
from wildflower.launch.experiment_file import SettingsError, beside, place, resolve, write_toml
from wildflower.launch.forked_server import local_server, prepare_to_fork, told_later
from wildflower.launch.starting import loading_modules
from wildflower.launch.superlink import FlowerError, SuperLink, connected, last_lines, stop_signals_interrupt, superlink
from wildflower.plugins.beside import APP, files_of
from wildflower.plugins.extras import MissingExtraError
from wildflower.plugins.reference import is_reference
from wildflower.server_app.resuming import check_folder
from wildflower.server_app.run_folder import COMMAND_LOCK, JournalError, alone_in, is_held, read_rounds, read_summary
from wildflower.server_app.run_records import RoundRecord, Summary
from wildflower.server_app.units import bytes_text, counted, plain, score_format, seconds_text

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from IPython.display import DisplayHandle
    from rich.progress import Progress, TaskID

    from wildflower.rounds.hooks import RoundHook
    from wildflower.server_app.config import RunConfig

INTERRUPTED = 130
WAITING = "Waiting for nodes: "  # how an app's log says so
LOOK_SECONDS = 0.3
TRACEBACK_LINES = 30
LOG_SECONDS = 10  # after the end of a run, in which Flower hands over the rest of its log and its own view of it
ENDED_WITH_AN_ERROR = "The run's server has ended with an error"
ENDED_SILENTLY = "The server's process has ended without a word: it was killed, or the run was stopped from elsewhere"
MAX_WARNINGS = 5
FULL_DISK_BYTES = 10**6
WARNING_LETTERS = 400
FLOWERS_WARNING = "Since flwr "  # how what Flower itself warns of in every run begins
LOGGER_LINE = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) *:")


def run_experiment(
    experiment: Path,
    overrides: Sequence[str],
    app_dir: Path | None,
    console: Console,
    deployment: Deployment | None = None,
    hooks: Sequence["RoundHook"] = (),
) -> int:
    """Run an experiment and tell about it on `console`; returns the exit code: 0 only if the run really finished.

    Devices are simulated here, or those of a `deployment`, which writes the run's folder where we read it: this command
    and its SuperLink must see the same output-dir. `hooks` are of this process, from which the run is forked.
    """
    try:
        with stop_signals_interrupt(), beside(experiment) as modules, ExitStack() as held:
            return _run(experiment, overrides, app_dir, console, deployment, modules, held, hooks)
    except (SettingsError, MissingExtraError, JournalError, FlowerError, OSError) as error:
        console.print(f"[bold red]Error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("[yellow]Stopped, and everything that was started with it.[/]")
        return INTERRUPTED


def _run(
    experiment: Path,
    overrides: Sequence[str],
    app_dir: Path | None,
    console: Console,
    deployment: Deployment | None,
    modules: Mapping[str, Path],
    held: ExitStack,
    hooks: Sequence["RoundHook"],
) -> int:
    with loading_modules():
        import wildflower.server_app.config  # noqa: F401  torch above all

    config, run_dir = place(resolve(experiment, overrides).config, Path.cwd(), datetime.now())
    local = deployment is None and config.engine == "local"
    app_dir = _code_here(app_dir) if local else find_app(app_dir)
    check_start(config, run_dir, deployment)
    said: list[LogRecord] = []
    with ExitStack() as stack:
        if local:
            prepare_to_fork()
        said = stack.enter_context(told_later())
        built = check_buildable(config, hooks) if config.fleet else None
    if config.resume:
        check_same_files(run_dir, config, built[0] if built else None)
    already = list(check_disk(built[0], config, run_dir)) if built else []
    # Another command may have begun the same run, or even ended it, while this one was built.
    held.enter_context(alone_in(run_dir, COMMAND_LOCK))
    check_folder(run_dir, config.resume)
    check_free(run_dir)
    console.print(
        f"[bold]{escape(config.run_name)}[/]: {config.strategy} on {config.task}, {counted(config.rounds, 'round')}, "
        f"{config.devices_per_round} of {config.devices} devices per round, "
        + (f"{config.workers} workers" if config.fleet else "")
        + (" " if config.fleet and deployment else "")
        + (f"at {escape(deployment.address)}" if deployment else ""),
        highlight=False,
        soft_wrap=True,
    )
    # What was found while the run was built, such as first weights that are not in the file, before its rounds.
    ignored = config.ignored_text()
    already += [*([ignored] if ignored else []), *(r.getMessage() for r in said if r.levelno >= WARNING)]
    for warning in dict.fromkeys(already):
        console.print(f"[yellow]Warning:[/] {escape(warning)}", highlight=False, soft_wrap=True)
    earlier = len(read_rounds(run_dir))
    app_log = run_dir / "app.log"
    app_log_start = app_log.stat().st_size if app_log.exists() else 0
    with ExitStack() as stack:
        stack.enter_context(_resume_hint(run_dir, config, console))
        if local:
            assert built is not None
            server = stack.enter_context(local_server(config, built, said, app_log))
            with progress(console, config.rounds, earlier) as show:
                failure = follow_process(server, run_dir, show)
        else:
            if deployment is None:
                flower = stack.enter_context(superlink(run_dir / "superlink.log"))
            else:
                flower = stack.enter_context(connected(deployment.address, deployment.root_certificates))
            config_file = flower.folder / "config.toml"
            config_file.write_text(write_toml(config.to_dict()), encoding="utf-8")
            app = app_dir
            if modules or is_reference(config.strategy):
                app = make_bundle(app_dir, flower.folder / "app", config.strategy, modules)
            run_id = flower.submit(app, config_file, {} if deployment else simulation(config.workers))
            if deployment is not None:
                stack.enter_context(_stopped_when_interrupted(flower, run_id))
            with progress(console, config.rounds, earlier) as show:
                failure = follow(flower, run_id, run_dir, app_log, show, app_log_start)
    log = log_since(app_log, app_log_start)
    if told := warnings_text(log, app_log, already=already):
        console.print(f"[yellow]Warning:[/] {escape(told)}", highlight=False, soft_wrap=True)
    summary = read_summary(run_dir)
    if failure is None and (summary is None or summary.status != "finished"):
        failure = f"{'Its server' if local else 'Flower'} says that the run finished, but its summary.json does not"
    if failure is not None:
        own = summary.error if summary else None
        reason = last_traceback(log, app_dir, modules) or own or failure
        # What the run says of itself in words, which is one line, needs no frames and is said once.
        if own and "\n" not in own and reason.endswith(own):
            reason = failure = own
        console.print(f"[bold red]The run failed.[/] {escape(failure)}", highlight=False, soft_wrap=True)
        if reason != failure:
            console.print(reason, markup=False, highlight=False, soft_wrap=True)
        if full := full_disk_text(run_dir):
            console.print(full, markup=False, highlight=False, soft_wrap=True)
        logs = str(app_log) if deployment or local else f"{app_log} and {run_dir / 'superlink.log'}"
        console.print(f"Logs: {logs}", markup=False, highlight=False, soft_wrap=True)
        # What a run says in words before its first round or after its last one would come again. Some of it says how to
        # go on.
        in_words = own is not None and "\n" not in own
        comes_again = in_words and len(read_rounds(run_dir)) in (earlier, config.rounds)
        if not comes_again and "resume=true" not in (own or ""):
            print_resume_hint(run_dir, config, console)
        return 1
    assert summary is not None
    console.print(summary_table(summary, virtual_clock=bool(config.fleet)))
    console.print(f"Report: {run_dir / 'report.html'}", markup=False, highlight=False, soft_wrap=True)
    return 0


def full_disk_text(run_dir: Path) -> str:
    """What to do where the disk of a run's folder has no room left, not even for its log; "" where it has."""
    free_bytes = shutil.disk_usage(run_dir).free
    if free_bytes >= FULL_DISK_BYTES:
        return ""
    return f"The disk of {run_dir} is full ({bytes_text(free_bytes)} are free): make room before the run goes on"


def _code_here(app_dir: Path | None) -> Path:
    """The folder of the code that runs here; SettingsError where the user asks for another app's."""
    here = APP
    if app_dir is not None and app_dir.expanduser().resolve() != here:
        raise SettingsError(
            f"--app {app_dir}: engine = 'local' runs the app of this installation; --set engine=flower hands that one "
            "to Flower"
        )
    return here


def find_app(app_dir: Path | None) -> Path:
    """The folder of the Flower app: the one given, or the project that this file is part of. Raises SettingsError."""
    found = APP if app_dir is None else app_dir.expanduser().resolve()
    if not (found / "pyproject.toml").is_file():
        raise SettingsError(
            f"there is no pyproject.toml in {found}: name the folder of the app with --app"
            if app_dir is not None
            else "this installation does not hold the app's pyproject.toml: name the project's folder with --app"
        )
    return found


def simulation(workers: int) -> dict[str, int | float]:
    """Flower's federation settings for that many workers: one CPU each, and an equal share of the GPUs."""
    import torch

    settings: dict[str, int | float] = {
        "num-supernodes": workers,
        "client-resources-num-cpus": 1,
        # Ray starts a process per CPU it knows of: no more than there are nodes.
        "init-args-num-cpus": workers,
    }
    if gpus := torch.cuda.device_count():
        settings["client-resources-num-gpus"] = min(1.0, math.floor(10_000 * gpus / workers) / 10_000)
    return settings


def follow(
    flower: SuperLink, run_id: str, run_dir: Path, app_log: Path, show: "Show", app_log_start: int
) -> str | None:
    """Show every round as it ends until the run ends; returns None, or why the run did not complete.

    What the log holds before byte `app_log_start` was written by the run that this one goes on with.
    """
    journal = JournalWatch(run_dir)
    while True:
        log_stream = flower.follow_log(run_id, app_log)
        over = False
        while not over and not _ended(log_stream):
            show.rounds(journal.rounds(), waiting_text(app_log, app_log_start))
            if flower.process is not None and flower.process.poll() is not None:
                break
            over = journal.writer_was_killed() or journal.seconds_since_the_end() > LOG_SECONDS
        show.rounds(journal.rounds())
        if flower.process is not None and flower.process.poll() is not None:
            last = last_lines(run_dir / "superlink.log", 10)
            return f"flower-superlink ended with code {flower.process.returncode}; its last lines:\n{last}"
        if over:  # Flower itself would notice after a minute, or where it cannot store anything never
            return _end_by_summary(run_dir)
        try:
            status = flower.status(run_id)
        except FlowerError:
            if not journal.writer_ends_within(LOG_SECONDS):
                raise
            return _end_by_summary(run_dir)
        if status.ended:
            return None if status.completed else f"Flower says {status.status}: {status.details}"
        # The log stream broke off and the run goes on.
        time.sleep(LOOK_SECONDS)


def _end_by_summary(run_dir: Path) -> str | None:
    """None where a run that is over has finished by its summary; else that its server has ended, and how."""
    summary = read_summary(run_dir)
    if summary is None:
        return ENDED_SILENTLY
    return None if summary.status == "finished" else ENDED_WITH_AN_ERROR


def follow_process(server: "BaseProcess", run_dir: Path, show: "Show") -> str | None:
    """Show every round as it ends until the run's server ends; returns None, or why the run did not complete."""
    journal = JournalWatch(run_dir)
    while server.exitcode is None:
        server.join(timeout=LOOK_SECONDS)
        show.rounds(journal.rounds())
    if server.exitcode < 0:
        return f"{ENDED_SILENTLY} ({signal.Signals(-server.exitcode).name})"
    return None if server.exitcode == 0 else ENDED_WITH_AN_ERROR


def _ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(timeout=LOOK_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


class JournalWatch:
    """Reads the finished rounds of a run again whenever the file has changed."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._seen: tuple[int, int] | None = None
        self._rounds: list[RoundRecord] = []
        self._held = False
        self._ended_at: float | None = None

    def writer_was_killed(self) -> bool:
        """Whether the process that wrote the run is gone without having ended it."""
        held = is_held(self.run_dir)
        if self._held and held is False:
            return True
        if self._held and held is None and self._ended_at is None:
            self._ended_at = time.monotonic()
        self._held = self._held or held is True  # a lock that nobody holds yet may be left from an earlier run
        return False

    def seconds_since_the_end(self) -> float:
        """How long ago `writer_was_killed` has seen that the run had ended in order; 0 where it has not."""
        return 0.0 if self._ended_at is None else time.monotonic() - self._ended_at

    def writer_ends_within(self, seconds: float) -> bool:
        """Wait so long for a process that writes the run to end; whether there was one, and it has ended."""
        end = time.monotonic() + seconds
        while self._held:
            if self.writer_was_killed() or self._ended_at is not None:
                return True
            if time.monotonic() >= end:
                break
            time.sleep(LOOK_SECONDS)
        return False

    def rounds(self) -> list[RoundRecord]:
        """All finished rounds so far."""
        try:
            state = (self.run_dir / "rounds.jsonl").stat()
        except FileNotFoundError:
            return self._rounds
        if (state.st_mtime_ns, state.st_size) != self._seen:
            self._seen = (state.st_mtime_ns, state.st_size)
            self._rounds = read_rounds(self.run_dir)
        return self._rounds


class Show(Protocol):
    """Where finished rounds are shown."""

    def rounds(self, rounds: Sequence[RoundRecord], waiting: str = "") -> None:
        """Show the rounds so far, and what the run waits for; called many times, mostly without anything new."""


@contextmanager
def progress(console: Console, total: int, earlier: int) -> Iterator[Show]:
    """A bar on a terminal or in a notebook; elsewhere a line per round, but for the `earlier` ones of a resumed run."""
    if console.is_jupyter:
        yield notebook_bar("starting", total)
        return
    if not console.is_terminal:
        yield Lines(console, total, earlier)
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[figures]}"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as bars:
        task = bars.add_task("starting", total=total, figures="")
        yield Bar(bars, task, total)


class Lines:
    """One plain line per round, for logs and pipes."""

    def __init__(self, console: Console, total: int, earlier: int) -> None:
        self._console = console
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
                whole = record.scale.label if record.delivered_score is None else "whole model"
                parts.append(f"{whole} {scored(record.score)}")
            if record.loss is not None:
                parts.append(f"loss {plain(record.loss)}")
            parts += [
                f"{record.devices_replied} of {record.devices_sampled} devices",
                f"training {bytes_text(record.training_bytes_down)} down",
                f"{bytes_text(record.training_bytes_up)} up",
                seconds_text(record.wall_seconds),
            ]
            line = ", ".join(parts)
            left = seconds_left(rounds[: record.round], self._total)
            if left:
                line += f", {seconds_text(round(left))} left"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._shown = len(rounds)
        if waiting not in ("", self._waiting):
            self._console.print(waiting, markup=False, highlight=False, soft_wrap=True)
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
    """Of finished rounds in a few words: the last score, the bytes of training so far, the time that is left.

    The score is that of what devices get, and the whole model's where that was not evaluated.
    """
    scores = (record.score if record.delivered_score is None else record.delivered_score for record in rounds)
    evaluated = [score for score in scores if score is not None]
    figures = [score_format(rounds[-1].scale)(evaluated[-1])] if evaluated else []
    figures.append(bytes_text(sum(record.training_bytes for record in rounds)))
    if left := seconds_left(rounds, total):
        figures.append(f"{seconds_text(round(left))} left")
    return " · ".join(figures)


def seconds_left(rounds: Sequence[RoundRecord], total: int) -> float:
    """What the rounds to come should take, by the median of the last ten: the first one also starts the workers."""
    recent = [record.wall_seconds for record in rounds[-10:]]
    return max(0, total - len(rounds)) * median(recent) if recent else 0.0


@contextmanager
def _resume_hint(run_dir: Path, config: "RunConfig", console: Console) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, FlowerError):
        print_resume_hint(run_dir, config, console)
        raise


def print_resume_hint(run_dir: Path, config: "RunConfig", console: Console) -> None:
    """Say how a run goes on that has broken off; nothing where no round was finished."""
    if finished := len(read_rounds(run_dir)):
        console.print(
            f"{finished} of {config.rounds} rounds are in {run_dir}; go on with the same command and "
            f"--set resume=true --set run-name={config.run_name}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


@contextmanager
def _stopped_when_interrupted(flower: SuperLink, run_id: str) -> Iterator[None]:
    """A SuperLink that is not ours would go on with a run that nobody follows any more."""
    try:
        yield
    except KeyboardInterrupt:
        flower.stop(run_id)
        raise


def waiting_text(log: Path, start: int) -> str:
    """What an app waits for, by the last line of its log after `start` bytes; "" where it does not wait."""
    found = re.search(rf"{WAITING}\d+ connected so far", last_lines(log, 1, start))
    return found[0] if found else ""


def log_since(log: Path, start: int) -> str:
    """What a log holds after its first `start` bytes, without colors; "" where there is none."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(start)
        return re.sub(r"\x1b\[[0-9;]*m", "", file.read().decode("utf-8", errors="replace"))


def warnings_text(log: str, path: Path, already: Collection[str]) -> str:
    """How often the app warned in a log, and of what: the first of each kind, at most `MAX_WARNINGS`; "" if never.

    What has been told `already` is left out.

    Warnings that differ in their numbers only are of one kind. Those of Ray's actors, which begin with their name, are
    none of the app's.
    """
    told = {text.partition("\n")[0].strip() for text in already}
    kinds: dict[str, list[str]] = {}
    for line in log.splitlines():
        begin, colon, text = line.partition(":")
        text = text.strip()
        if colon and begin.rstrip() == "WARNING" and text not in told and not text.startswith(FLOWERS_WARNING):
            kinds.setdefault(re.sub(r"\d[\d,.]*", "#", text), []).append(text[:WARNING_LETTERS])
    if not kinds:
        return ""
    total = sum(map(len, kinds.values()))
    lines = [f"{total} warning{'s' if total > 1 else ''} in {path}"]
    for texts in list(kinds.values())[:MAX_WARNINGS]:
        more = f" (and {len(texts) - 1} more like it)" if len(texts) > 1 else ""
        lines.append(f"  {texts[0]}{more}")
    if len(kinds) > MAX_WARNINGS:
        lines.append(f"  and {len(kinds) - MAX_WARNINGS} of other kinds")
    return "\n".join(lines)


def last_traceback(text: str, app_dir: Path, modules: Mapping[str, Path] | None = None) -> str | None:
    """The last Python traceback in the text of a log, at most its last lines; or None.

    Flower's own frames are left out, and files of the submitted app, whose copy is gone by now, are named as they are
    in `app_dir`, or where the modules lie that travelled with it.
    """
    sources = {str(app_dir / name): file for path in (modules or {}).values() for name, file in files_of(path).items()}
    found = text.rfind("Traceback (most recent call last)")
    if found < 0:
        return None
    kept: list[str] = []
    flowers = False
    # It ends where a blank line or the next message of Flower's logger begins.
    for line in takewhile(lambda line: line.strip() and not LOGGER_LINE.match(line), text[found:].splitlines()):
        if line.startswith('  File "') or not line.startswith("  "):
            flowers = "/site-packages/flwr/" in line
        if not flowers:
            line = re.sub(r'(?<=File ").*/home/apps/[^/]+', lambda _: str(app_dir), line)
            kept.append(re.sub(r'(?<=File ")[^"]+', lambda file: str(sources.get(file[0], file[0])), line))
    return "\n".join(kept[-TRACEBACK_LINES:])


def summary_table(summary: Summary, *, virtual_clock: bool) -> Table:
    """The end of a run in a few lines."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in summary_rows(summary, virtual_clock=virtual_clock):
        table.add_row(escape(name), escape(value))
    return table


def summary_rows(summary: Summary, *, virtual_clock: bool) -> list[tuple[str, str]]:
    """The end of a run as names and values; what belongs to the row above begins with two spaces.

    Args:
        virtual_clock: whether its devices have one, as those of a fleet do.
    """
    rows: list[tuple[str, str]] = []

    def row(name: str, value: str) -> None:
        rows.append((name, value))

    row("status", summary.status)
    row("rounds", str(summary.rounds))
    label, text = summary.scale.label, score_format(summary.scale)
    if summary.delivered_score is not None:
        row(f"delivered {label}", text(summary.delivered_score))
        if note := summary.delivered_note():
            row("", note)
    by_tier = summary.delivered_score_by_tier or {}
    for tier, score in by_tier.items():
        is_worst = tier == summary.worst_tier and len(set(by_tier.values())) > 1
        row(f"  tier {tier}", f"{text(score)}{' (worst)' if is_worst else ''}")
    if summary.worst_device is not None and summary.worst_device_score is not None:
        row("worst device", f"{text(summary.worst_device_score)}, device {summary.worst_device}")
    if summary.final_score is not None and summary.best_score is not None:
        row("whole model", text(summary.final_score))
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
