"""`wildflower sweep`: one experiment with several seeds, rows and values, what is missing of it, and a table."""

import csv
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256
from itertools import product
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from wildflower.devices.private import private_folder
from wildflower.launch import child, together
from wildflower.launch.before import check_population
from wildflower.launch.experiment_file import (
    SettingsError,
    as_overrides,
    beside,
    cpu_cores,
    place,
    read_experiment,
    read_toml,
    resolve,
    strategy_of,
    without_keys_of_others,
)
from wildflower.launch.following import JournalWatch
from wildflower.launch.showing import notebook_bar
from wildflower.launch.superlink import interrupted_later, last_lines
from wildflower.launch.terminal import say
from wildflower.launch.together import Planned
from wildflower.plugins.beside import digests
from wildflower.plugins.raised_as import raised_as
from wildflower.server_app.resuming import check_resumable, check_same
from wildflower.server_app.run_folder import SWEEP_LOGS, JournalError, is_run, read_config, read_summary
from wildflower.server_app.run_records import Summary
from wildflower.server_app.units import score_format, seconds_text

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from wildflower.rounds.hooks import RoundHook
    from wildflower.server_app.config import RunConfig
    from wildflower.server_app.inputs import Known

MAX_RUNS = 10_000
MAX_NAME_LETTERS = 150

LOOK_SECONDS = 0.2
LOG_LINES = 15
SET_FOR_EVERY_RUN = ("seed", "run-name", "output-dir", "resume")
ROW_NAME = re.compile(r"\w[\w.+-]*")


@dataclass(frozen=True)
class Row:
    """A named set of settings.

    Attributes:
        name: what its line of the table is called; the names of its runs begin with it.
        overrides: its settings beside those of the experiment, "key=value".
        seeds: those of the sweep's seeds with which it runs; None for all.
    """

    name: str
    overrides: tuple[str, ...]
    seeds: tuple[int, ...] | None = None


@dataclass(frozen=True)
class SweepRequest:
    """The runs that a sweep is to have: those of every row, seed and combination of values.

    Attributes:
        experiment: the experiment file.
        overrides: settings of all runs, "key=value".
        folder: where the runs lie.
        seeds: one run with each.
        rows: without any, the experiment as it is.
        grid: values of keys.
        jobs: runs at a time.
        hooks: objects of this process, from which runs are then forked.
        alone: this process does nothing but the sweep, so that runs can be forked from it without hooks too.
    """

    experiment: Path
    overrides: Sequence[str]
    folder: Path
    seeds: Sequence[int]
    rows: Sequence[Row] = ()
    grid: Mapping[str, Sequence[str]] = field(default_factory=dict)
    jobs: int = 1
    hooks: Sequence["RoundHook"] = ()
    alone: bool = False


@dataclass
class Running:
    """A run that goes on in a process of its own; `job` is the number of those that share their workers."""

    job: int
    run: Planned
    process: child.Child
    log: Path
    journal: JournalWatch


@dataclass(frozen=True)
class Outcome:
    """The outcome of a sweep.

    Attributes:
        planned: all of its runs.
        finished: those that are finished, now or before.
        failed: why the others have failed, in the words of their logs; what was only stopped is not among them.
        interrupted: somebody has stopped it.
    """

    planned: list[Planned]
    finished: list[Planned]
    failed: dict[Planned, str]
    interrupted: bool


def parse_seeds(text: str) -> list[int]:
    """Seeds such as "1-3" or "1,4,7-9", in the order given and each once. Raises SettingsError."""
    seeds: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,18})(?:\s*-\s*(\d{1,18}))?\s*", part)
        if not found or (found[2] and int(found[2]) < int(found[1])):
            raise SettingsError(f"--seeds {text!r}: give seeds like 1-3 or 1,4,7-9, not {part.strip()!r}")
        first, last = int(found[1]), int(found[2] or found[1])
        if last - first >= MAX_RUNS:
            raise SettingsError(f"--seeds {text!r}: a sweep has at most {MAX_RUNS} runs")
        seeds += range(first, last + 1)
    return list(dict.fromkeys(seeds))


def parse_grid(texts: Sequence[str]) -> dict[str, list[str]]:
    """Keys and their values from texts such as "strategy=heterofl,fedrolex".

    A value that has a comma stands in double quotes: `widths="1, 0.5","1, 0.25"`. Raises SettingsError.
    """
    grid: dict[str, list[str]] = {}
    for text in texts:
        key, equals, values = (part.strip() for part in text.partition("="))
        if not equals or not key or not values:
            raise SettingsError(f"--grid {text!r} is not of the form key=value,value")
        if key in grid:
            raise SettingsError(f"--grid {key} is given twice: put all its values into one")
        row = [value.strip() for value in next(csv.reader([values], skipinitialspace=True))]
        if "" in row or len(set(row)) < len(row):
            raise SettingsError(f"--grid {text!r}: a value is empty or stands there twice")
        grid[key] = row
    return grid


def read_rows(path: Path) -> list[Row]:
    """The rows of a TOML file, each of which is a table of settings. Raises SettingsError."""
    return make_rows(read_toml(path, "the rows"), str(path))


def make_rows(tables: Mapping[str, Any], given_in: str) -> list[Row]:
    """Rows from their tables of settings, in which `seeds` says that a row runs with some seeds only.

    Raises SettingsError, which says where the rows were given.
    """
    if not tables:
        raise SettingsError(f"{given_in}: there is no row, such as a table [heterofl] with its settings")
    rows = []
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise SettingsError(f"{given_in}: {name} = {table!r} belongs to no row: a row is a table of settings")
        if not isinstance(name, str) or not ROW_NAME.fullmatch(name):
            raise SettingsError(
                f"{given_in}: a row cannot be called {name!r}, because its runs' folders are named after it: take "
                "letters, digits and _ . + -"
            )
        settings = dict(table)
        if cut := next((key for key in settings if key[:1].isdigit()), ""):  # no key begins with one
            raise SettingsError(f'{given_in}: row {name}: a name with a dot stands in quotes: ["{name}.{cut}"]')
        with raised_as(SettingsError, f"{given_in}: row {name}: ", SettingsError):
            seeds = tuple(check_seeds(settings.pop("seeds"))) if "seeds" in settings else None
            rows.append(Row(name, tuple(as_overrides(settings)), seeds))
    return rows


def check_seeds(given: Any) -> list[int]:
    """Seeds that are given as numbers, each once. Raises SettingsError."""
    seeds = [*given] if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    wrong = [seed for seed in seeds if not is_whole(seed, least=0)]
    if wrong or not seeds:
        raise SettingsError(f"seeds must be whole numbers from 0 on, such as 1, 2, 3, not {(wrong or [given])[0]!r}")
    return list(dict.fromkeys(int(seed) for seed in seeds))


def is_whole(value: Any, least: int) -> bool:
    """Return whether a value is a whole number from `least` on."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def plan(asked: SweepRequest) -> list[Planned]:
    """The runs of a sweep, each checked before any is started: all with one seed, then all with the next one.

    Of runs of one row that differ only in keys that nothing reads, one is planned: the first that is finished, or
    else that was begun, or else the first.

    Raises SettingsError for settings that no run can start with, for fleets that have another number of devices, for
    first weights that are not there, for a grid over a key that no run reads, where a folder holds a run of other
    settings, modules from outside, fleet files, first weights or data, and where two runs would have one folder.
    """
    from wildflower.server_app.config import unread
    from wildflower.server_app.inputs import Known, check_files

    _check_keys(asked)
    rows, grid, overrides = asked.rows, asked.grid, asked.overrides
    combinations = list(product(*([f"{key}={value}" for value in values] for key, values in grid.items())))
    wanted = [
        (seed, row, combination)
        for seed in asked.seeds
        for row in rows or [Row("", ())]
        if row.seeds is None or seed in row.seeds
        for combination in combinations
    ]
    if not wanted:
        raise SettingsError("no row runs with any of these seeds")
    if len(wanted) > MAX_RUNS:
        raise SettingsError(f"{len(wanted)} runs: a sweep has at most {MAX_RUNS}")
    whole = "the sweep's settings"
    planned: list[Planned] = []
    taken: set[Path] = set()
    known: Known = {}
    unread_everywhere = set(grid)
    of_file = str(read_experiment(asked.experiment).get("strategy", ""))
    strategies = [strategy_of([*overrides, *row.overrides, *combination], of_file) for _, row, combination in wanted]
    compared = set(strategies)
    place_of: dict[tuple[str, str], int] = {}  # among the planned
    for (seed, row, combination), strategy in zip(wanted, strategies, strict=True):
        name = run_name([*([row.name] if row.name else []), *combination, f"seed={seed}"])
        of_sweep = [f"seed={seed}", f"output-dir={asked.folder}", f"run-name={name}"]
        own = without_keys_of_others([*overrides, *row.overrides, *combination, *of_sweep], strategy, compared)
        if "workers" not in _keys(own):
            own.insert(0, f"workers={max(1, cpu_cores() // asked.jobs)}")
        settings = resolve(asked.experiment, own, given_in=f"{whole} (row {row.name})" if row.name else whole)
        config, run_dir = place(settings.config, Path.cwd(), datetime.now())
        if run_dir in taken:
            raise SettingsError(
                f"two runs of the sweep would have the folder {name!r}, because the name of a run's folder keeps "
                "letters, digits and . , = + - _ alone: change one of the two values"
            )
        values = config.to_dict()
        ignored = set(unread(values))
        unread_everywhere &= ignored
        read = {key: value for key, value in values.items() if key not in ignored and key != "run-name"}
        same = row.name, json.dumps(read)
        run = Planned(run_dir, config.rounds, tuple(own), seed, row.name, together.alike(config))
        place_of_same = place_of.get(same)
        if place_of_same is not None and _stage(run) <= _stage(planned[place_of_same]):
            continue  # it would be the same run again
        try:
            check_population(config, None)
            check_files(config, known)
        except (ValueError, OSError) as error:
            raise SettingsError(f"row {row.name}: {error}" if row.name else str(error)) from None
        if is_run(run_dir):
            _check_begun(run_dir, config, known)
        taken.add(run_dir)
        if place_of_same is None:
            place_of[same] = len(planned)
            planned.append(run)
        else:
            planned[place_of_same] = run
    if unread_everywhere:
        key = min(unread_everywhere)
        raise SettingsError(f"--grid {key}: no run of the sweep reads this key, so that its values make no difference")
    return planned


def _check_keys(asked: SweepRequest) -> None:
    """Raise SettingsError where a key is given twice, or is one that the sweep sets for every run."""
    own_keys = {"the grid": set(asked.grid)} | {f"row {row.name}": _keys(row.overrides) for row in asked.rows}
    for where, keys in own_keys.items():
        for key in SET_FOR_EVERY_RUN:
            if key in keys:
                instead = "give the seeds as such" if key == "seed" else "the sweep sets it for every run"
                raise SettingsError(f"{key} cannot be in {where}: {instead}")
    if clash := sorted(_keys(asked.overrides) & set(SET_FOR_EVERY_RUN).union(*own_keys.values())):
        raise SettingsError(f"{clash[0]} is given for all runs, and the sweep sets it for each of them")
    for row in asked.rows:
        if both := sorted(_keys(row.overrides) & asked.grid.keys()):
            raise SettingsError(f"{both[0]} is in the grid and in row {row.name}")


def _check_begun(run_dir: Path, config: "RunConfig", known: "Known") -> None:
    """Raise SettingsError where a run that was begun cannot go on with these settings and files."""
    from wildflower.server_app.inputs import check_same_inputs

    try:
        check_resumable(run_dir, config.to_dict() | {"resume": True})
        check_same(run_dir, plugins=digests(config.modules()))
        check_same_inputs(run_dir, config, known)
    except JournalError as error:
        raise SettingsError(f"{error}. Give this sweep another folder: --folder, in Python folder=") from None
    except (ValueError, OSError) as error:  # of the files themselves
        raise SettingsError(str(error)) from None


def _keys(overrides: Sequence[str]) -> set[str]:
    return {text.partition("=")[0].strip() for text in overrides}


def folder_of(experiment: Path, folder: Path | None) -> Path:
    """Where the runs of a sweep lie: in the given folder, or in one that is named after the experiment."""
    return (folder or Path("runs") / f"{experiment.stem}-sweep").absolute()


def run_name(parts: Sequence[str]) -> str:
    """A folder's name that tells a run from the others of its sweep."""
    name = re.sub(r"[^\w.,=+-]+", "_", ",".join(parts))
    if len(name) <= MAX_NAME_LETTERS:
        return name
    return f"{name[: MAX_NAME_LETTERS - 9]}-{sha256(name.encode()).hexdigest()[:8]}"


def sweep(asked: SweepRequest, console: Console) -> Outcome:
    """Run what a sweep lacks; what is finished is not run again, what was stopped goes on.

    KeyboardInterrupt stops the runs, and is told in the outcome.

    Raises:
        SettingsError: a run could not be started with its settings.
    """
    with beside(asked.experiment):
        planned = plan(asked)
    child.check_hooks(asked.hooks)
    waiting = [run for run in planned if not _finished(run)]
    done = len(planned) - len(waiting)
    say(console, f"{len(planned)} runs in {asked.folder}, {done} of them finished")
    bar = notebook_bar("runs", len(planned)) if console.is_jupyter and waiting else None
    private_folder(asked.folder / SWEEP_LOGS)
    forks = asked.alone and bool(waiting) and child.load_for_forks()
    failed: dict[Planned, str] = {}
    running: list[Running] = []
    shared: list[BaseProcess] = []  # which fork workers of several runs
    begun, interrupted = 0, False
    try:
        while waiting or running:
            while waiting and len({each.job for each in running}) < asked.jobs:
                begun += 1
                with interrupted_later():
                    _start(asked, begun, together.next_of(waiting, forks or bool(asked.hooks)), forks, running, shared)
            if bar is not None:
                rounds = (f"{job.run.name}: round {len(job.journal.rounds())}/{job.run.rounds}" for job in running)
                bar.show(done, f"{done} of {len(planned)} runs", " · ".join(rounds))
            time.sleep(LOOK_SECONDS)
            for ended in [job for job in running if job.process.poll() is not None]:
                running.remove(ended)
                done += 1
                if ended.process.returncode == 0:
                    say(console, f"{done}/{len(planned)} {ended.run.name}: {_figures(ended.run)}")
                else:
                    failed[ended.run] = why = last_lines(ended.log, LOG_LINES)
                    say(console, f"{done}/{len(planned)} {ended.run.name}: failed; see {ended.log}\n{why}")
        if bar is not None:
            bar.show(done, f"{done} of {len(planned)} runs", "")
    except KeyboardInterrupt:
        interrupted = True
    finally:
        child.stop([job.process for job in running])
        for process in shared:  # without its runs one may still load data, which nobody is to wait for
            process.kill()
            process.join()
    return Outcome(planned, [run for run in planned if _finished(run)], failed, interrupted)


def _stage(run: Planned) -> int:
    """How far a run is: 0 where it was not begun, 1 where it was, 2 where it is finished."""
    return int(is_run(run.run_dir)) + int(_finished(run))


def _finished(run: Planned) -> bool:
    """Whether it has ended as it should: after all of its rounds, or where one of its hooks has ended it."""
    summary = read_summary(run.run_dir) if is_run(run.run_dir) else None
    if summary is None or summary.status != "finished":
        return False
    return bool(read_config(run.run_dir).config.get("rounds", 0) >= run.rounds)


def _start(
    asked: SweepRequest,
    job: int,
    runs: Sequence[Planned],
    forks: bool,
    running: list[Running],
    shared: list["BaseProcess"],
) -> None:
    """Start runs, which share their workers if they are several; what is started is added to the lists."""
    logs = asked.folder / SWEEP_LOGS
    process, ends = together.shared_workers(asked.experiment, runs, logs / f"workers-{runs[0].name}.log")
    if process is not None:
        shared.append(process)
    for number, run in enumerate(runs):
        overrides = [*run.overrides, *(["resume=true"] if is_run(run.run_dir) else [])]
        log = logs / f"{run.name}.log"
        begun = child.begin(asked.experiment, overrides, log, asked.hooks, forks, ends[number:])
        running.append(Running(job, run, begun, log, JournalWatch(run.run_dir)))
        for end in ends[number : number + 1]:
            end.close()


def _figures(run: Planned) -> str:
    summary: Summary | None = read_summary(run.run_dir)
    if summary is None or summary.final_score is None:
        return "finished"
    text, label = score_format(summary.scale), summary.scale.label
    score = f"{label} {text(summary.final_score)}"
    if summary.delivered_score is not None:
        score = f"delivered {label} {text(summary.delivered_score)}"
    return f"{score} in {seconds_text(summary.wall_seconds)}"
