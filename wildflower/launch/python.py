"""What `import wildflower` offers: runs and sweeps from Python, and what they left as tables (docs/python.md)."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from html import escape
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wildflower.launch import child
from wildflower.launch.app_log import WAITING, log_since, warnings_text
from wildflower.launch.before import check_population
from wildflower.launch.experiment_file import SettingsError, as_overrides, as_text, beside, place, resolve
from wildflower.launch.following import LOOK_SECONDS, JournalWatch
from wildflower.launch.showing import progress, summary_rows
from wildflower.launch.superlink import interrupted_later, last_lines
from wildflower.launch.sweeps import Row, check_seeds, folder_of, is_whole, make_rows, read_rows
from wildflower.launch.sweeps import sweep as run_sweep
from wildflower.launch.terminal import terminal
from wildflower.plugins.extras import needed
from wildflower.server_app.compare import Comparison
from wildflower.server_app.compare import compare as compare_runs
from wildflower.server_app.resuming import check_folder, check_resumable
from wildflower.server_app.run_folder import (
    JournalError,
    has_virtual_clock,
    read_config,
    read_devices,
    read_rounds,
    read_summary,
    runs_of,
)
from wildflower.server_app.run_records import DeviceRecord, RoundRecord, Summary
from wildflower.server_app.summary import summarize
from wildflower.server_app.tables import frame_of

if TYPE_CHECKING:
    import pandas as pd

    from wildflower.rounds.hooks import RoundHook
    from wildflower.server_app.config import RunConfig

__all__ = [
    "Comparison",
    "JournalError",
    "Run",
    "RunError",
    "SettingsError",
    "Sweep",
    "compare",
    "load",
    "run",
    "sweep",
]

SAID_LINES = 60
WARNING = "Warning: "  # how a run prints one
OF_A_ROUND = re.compile(r"round \d+/\d+,")


class RunError(RuntimeError):
    """A run that has failed, or runs of a sweep; the text says why, and how to go on with what is finished."""


class Run:
    """What a run has left in its folder, finished or not.

    Attributes:
        folder: where it lies.
        summary: its figures, as summary.json has them; of a run that has not ended those of its rounds so far.
    """

    def __init__(self, folder: Path, summary: Summary) -> None:
        self.folder = folder
        self.summary = summary

    def __repr__(self) -> str:
        return f"<Run {self.folder}: {self.status}, {self.summary.rounds} rounds>"

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><td style="text-align:left;white-space:pre">{escape(name)}</td>'
            f'<td style="text-align:left">{escape(value)}</td></tr>'
            for name, value in summary_rows(self.summary, virtual_clock=has_virtual_clock(self.folder))
        )
        return f"<b>{escape(self.folder.name)}</b><table>{rows}</table>"

    @property
    def status(self) -> str:
        """Finished, failed or unfinished."""
        return self.summary.status

    @cached_property
    def config(self) -> dict[str, Any]:
        """Every key of the run and its value."""
        return dict(read_config(self.folder)["config"])

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """One row per finished round, by its number: docs/design.md says what is in it.

        What a round has of every tier, exit or part of the work is a column each, such as
        `delivered_score_by_tier.small`. Where a round was not evaluated, its scores are NaN. Bytes and seconds are
        those of the round, `simulated_seconds` is the virtual clock at its end.
        """
        return frame_of(read_rounds(self.folder), RoundRecord).set_index("round")

    @cached_property
    def devices(self) -> pd.DataFrame:
        """One row per device and round in which it was sampled: its tier, its model, what that took, and the outcome.

        `architecture` holds dicts. What a device that did not train cannot have is missing.
        """
        finished = self.summary.rounds
        records = [record for record in read_devices(self.folder) if record.round <= finished]
        return frame_of(records, DeviceRecord, whole=("architecture",))

    @property
    def report(self) -> Path:
        """The page about the run, report.html."""
        return self.folder / "report.html"


class Sweep:
    """The finished runs of a sweep.

    Attributes:
        folder: where they lie.
        runs: seed by seed, with each in the order of the rows and of the grid.
        rows: of every run the name of its row; empty in a sweep without rows.
        grid: the values of every key of the grid.
    """

    def __init__(self, folder: Path, runs: list[Run], rows: Sequence[str], grid: Mapping[str, Sequence[str]]) -> None:
        self.folder = folder
        self.runs = runs
        self.rows = rows
        self.grid = grid

    def __repr__(self) -> str:
        return f"<Sweep {self.folder}: {len(self.runs)} runs>"

    @cached_property
    def table(self) -> pd.DataFrame:
        """One line per run: its row, its place in the grid, its seed, and its figures, shares between 0 and 1."""
        with needed("pandas", "a table"):
            import pandas as pd

        rows = [{"row": row} for row in self.rows] or [{} for _ in self.runs]
        own = [{key: run.config[key] for key in (*self.grid, "seed")} for run in self.runs]
        places = [row | place for row, place in zip(rows, own, strict=True)]
        names = [run.folder.name for run in self.runs]
        figures = frame_of([run.summary for run in self.runs], Summary)
        return pd.concat([pd.DataFrame(places, index=names), figures.set_axis(names)], axis="columns")

    @cached_property
    def comparison(self) -> Comparison:
        """The runs side by side, and in words which method to take and how sure that is."""
        return compare_runs([run.folder for run in self.runs], rows=self.rows)


def run(experiment: str | os.PathLike[str], *, hooks: Sequence[RoundHook] = (), **settings: Any) -> Run:
    """Run an experiment on simulated devices, as `wildflower run` does, in processes of its own.

    Args:
        experiment: the experiment file.
        hooks: what is done beside every round, such as `[EarlyStop(patience=5)]` (docs/extending.md). The run works
            with copies of them. A text names hooks as the key `hooks` does.
        settings: keys in place of the experiment's, with `_` for `-`: `learning_rate=0.1`. A method's own are given as
            a dict: `fedprox={"mu": 0.1}`. `resume=True` with a `run_name` goes on with a run that was stopped.

    Raises:
        SettingsError: no run can start with these settings; nothing was started.
        JournalError: there is such a run already, or none to be resumed; nothing was started.
        RunError: the run has failed.
        KeyboardInterrupt: the run was interrupted and stopped; the text says how it goes on.
    """
    file = Path(experiment)
    if isinstance(hooks, str):
        settings["hooks"], hooks = hooks, ()
    overrides = _overrides(settings)
    with beside(file):
        config, folder = place(resolve(file, overrides, given_in="Python").config, Path.cwd(), datetime.now())
        check_folder(folder, config.resume)
        if config.resume:
            check_resumable(folder, config.to_dict())
        check_population(config, None)
    if hooks:
        _check_hooks(hooks, config)
    told = [ignored] if (ignored := config.ignored_text()) else []
    for text in told:
        warnings.warn(text, stacklevel=2)
    overrides += _overrides({"run-name": config.run_name, "output-dir": config.output_dir})
    earlier = len(read_rounds(folder))
    app_log = folder / "app.log"
    app_log_start = app_log.stat().st_size if app_log.exists() else 0
    with tempfile.NamedTemporaryFile(prefix="wildflower-", suffix=".log") as said:
        started: list[child.Child] = []
        process: child.Child
        try:
            with open(said.name, "ab") as output, interrupted_later():
                if hooks:
                    process = child.fork(file, overrides, Path(said.name), hooks)
                else:
                    process = child.start(file, overrides, output)
                started.append(process)
            with progress(terminal(), config.rounds, earlier) as show:
                journal = JournalWatch(folder)
                while True:
                    ended = _has_ended(process)
                    for text in _first_warnings(Path(said.name)):
                        if text not in told:
                            told.append(text)
                            warnings.warn(text, stacklevel=2)
                    show.rounds(journal.rounds())
                    if ended:
                        break
        except KeyboardInterrupt:
            child.stop(started)
            raise KeyboardInterrupt(_how_to_go_on(folder, config.run_name, config.rounds)) from None
        except BaseException:
            child.stop(started)
            raise
        if later := warnings_text(log_since(app_log, app_log_start), app_log, already=told):
            warnings.warn(later, stacklevel=2)
        if process.returncode != 0:
            title = f"{config.run_name}: {config.strategy} on {config.task}, "
            reason = _reason(last_lines(Path(said.name), SAID_LINES), title)
            reason = reason or f"its process has ended with code {process.returncode}"
            raise RunError(f"{config.run_name}: {reason}")
    return load(folder)


def _check_hooks(hooks: Sequence[RoundHook], config: RunConfig) -> None:
    """SettingsError unless a run can have hooks that are objects of this process."""
    from wildflower.rounds.hooks import RoundHook

    in_a_file = "put the class into a file beside the experiment and name it: hooks = 'my_hooks:EarlyStop'"
    for hook in hooks:
        if not isinstance(hook, RoundHook):
            raise SettingsError(f"hooks: {hook!r} is no value of a class of wildflower.rounds.hooks.RoundHook")
    if config.engine != "local":
        raise SettingsError(f"hooks: a run with engine = {config.engine!r} is no fork of this process: {in_a_file}")
    if why := child.why_not_fork():
        raise SettingsError(f"hooks: {why}: {in_a_file}")


def _has_ended(process: child.Child) -> bool:
    try:
        process.wait(timeout=LOOK_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


def _reason(said: str, title: str) -> str:
    """What a run has said of its failure: without its title, its rounds, its waiting, and its warnings."""
    lines: list[str] = []
    of_a_warning = False
    for line in said.splitlines():
        of_a_warning = line.startswith(WARNING) or (of_a_warning and line.startswith("  "))
        if not of_a_warning and not OF_A_ROUND.match(line) and not line.startswith((title, WAITING)):
            lines.append(line)
    return "\n".join(lines).strip()


def _first_warnings(said: Path) -> list[str]:
    """What a run has warned of before its rounds; its warnings follow its title, a line each."""
    with said.open(encoding="utf-8", errors="replace") as lines:  # of which no more are read than are needed
        next(lines, "")
        # A line without an end is one that the run is writing now.
        first = takewhile(lambda line: line.startswith(WARNING) and line.endswith("\n"), lines)
        return [line.removeprefix(WARNING).removesuffix("\n") for line in first]


def _how_to_go_on(folder: Path, name: str, rounds: int) -> str:
    finished = len(read_rounds(folder))
    if not finished:
        return "the run was stopped before its first round was finished"
    return (
        f"the run was stopped; {finished} of {rounds} rounds are in {folder}. The same call with "
        f"run_name={name!r}, resume=True goes on with it"
    )


def load(folder: str | os.PathLike[str]) -> Run:
    """What a run has left so far: one from `run`, from the command, or from real devices.

    Raises:
        JournalError: the folder holds no run.
    """
    path = Path(folder).absolute()  # what is read later is read from there, wherever the notebook has gone meanwhile
    read_config(path)
    return Run(path, read_summary(path) or summarize(path, "unfinished", None))


def sweep(
    experiment: str | os.PathLike[str],
    *,
    seeds: Iterable[int] = (1, 2, 3),
    rows: Mapping[str, Mapping[str, Any]] | str | os.PathLike[str] | None = None,
    grid: Mapping[str, Iterable[Any]] | None = None,
    jobs: int = 1,
    folder: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> Sweep:
    """Run an experiment with several seeds, rows and values, as `wildflower sweep` does, as far as runs are missing.

    Args:
        experiment: the experiment file.
        seeds: what every row and combination of values is run with.
        rows: named sets of settings, such as `{"slow": {"learning_rate": 0.01}}`, or a file of them
            (docs/configuration.md). With `"seeds": [1]` among its settings, a row runs with that seed only.
        grid: the values of keys, such as `{"strategy": ["heterofl", "fedrolex"], "learning_rate": [0.1, 0.01]}`; those
            of a method's own keys as a dict: `{"fedprox": {"mu": [0.1, 1]}}`.
        jobs: runs at a time, which share the CPU's cores.
        folder: where the runs lie; by default runs/NAME-sweep, by the experiment's name. The same call goes on there.
        settings: keys of all runs, as for `run`.

    Raises:
        SettingsError: a run cannot start with its settings, or the folder has a run of other ones; none was started.
        RunError: some runs have failed; those that are finished stay.
        KeyboardInterrupt: the sweep was interrupted; the same call goes on with what is missing.
    """
    file = Path(experiment)
    texts = _grid(grid or {})
    if not is_whole(jobs, least=1):
        raise SettingsError(f"jobs = {jobs!r}: must be a whole number from 1 on")
    where = folder_of(file, None if folder is None else Path(folder))
    outcome = run_sweep(file, _overrides(settings), check_seeds(seeds), _rows(rows), texts, where, jobs, terminal())
    if outcome.interrupted:
        done, total = len(outcome.finished), len(outcome.planned)
        raise KeyboardInterrupt(
            f"the sweep was stopped; {done} of {total} runs are finished in {where}. The same call goes on with the "
            "others"
        )
    if outcome.failed:
        reasons = "\n".join(f"{run.name}: {why}" for run, why in outcome.failed.items())
        raise RunError(
            f"{len(outcome.failed)} of {len(outcome.planned)} runs have failed; the others are finished in {where}, "
            f"and the same call tries again what is missing.\n{reasons}"
        )
    names = [run.row for run in outcome.finished if run.row]
    return Sweep(where, [load(run.run_dir) for run in outcome.finished], names, texts)


Runs = Run | Sweep | str | os.PathLike[str]
"""What stands for one run or several."""


def compare(runs: Runs | Iterable[Runs], target: float | None = None) -> Comparison:
    """Lay finished runs side by side, as `wildflower compare` does: `print` the result, or save its `html`.

    Args:
        runs: runs, or their folders; a sweep, or its folder, stands for all its runs.
        target: the score that they are timed to reach; by default the worst that one of them delivers.

    Raises:
        JournalError: there is no run, a folder holds none, none is finished, or their scores are of different metrics.
    """
    several = runs if isinstance(runs, Iterable) and not isinstance(runs, str | os.PathLike) else [runs]
    folders = [folder for given in several for folder in _folders(given)]
    if not folders:
        raise JournalError('there is nothing to compare: give runs or their folders, such as wf.compare(["runs/one"])')
    return compare_runs(runs_of(folders), target)


def _folders(given: Runs) -> list[Path]:
    if isinstance(given, Sweep):
        return [run.folder for run in given.runs]
    if isinstance(given, Run):
        return [given.folder]
    if isinstance(given, str | os.PathLike):
        return [Path(given)]
    raise JournalError(f"{given!r} is neither a run nor a sweep, nor the name of a folder of one")


# Settings and tables --------------------------------------------------------------------------------------------------


def _key(name: object) -> str:
    if not isinstance(name, str):
        raise SettingsError(f"{name!r} is no key of a run's configuration: it must be a text, such as 'learning_rate'")
    return name.replace("_", "-")


def _grid(grid: object, prefix: str = "") -> dict[str, list[str]]:
    """The values of every key as texts; a dict in place of values has those of a method's own keys."""
    if not isinstance(grid, Mapping):
        raise SettingsError(
            f'grid = {grid!r}: must be a dict of keys and their values, such as {{"strategy": ["heterofl", "fedavg"]}}'
        )
    texts: dict[str, list[str]] = {}
    for name, values in grid.items():
        key = f"{prefix}{_key(name)}"
        if isinstance(values, Mapping) and not values:
            raise SettingsError(f"grid {key}: there is no key of the method, such as {{{key!r}: {{'mu': [0.1, 1]}}}}")
        found = _grid(values, f"{key}.") if isinstance(values, Mapping) else {key: _values(key, values)}
        if twice := next((one for one in found if one in texts), None):
            raise SettingsError(f"grid {twice}: it is given twice: put all its values into one list")
        texts |= found
    return texts


def _values(key: str, values: object) -> list[str]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise SettingsError(f"grid {key} = {values!r}: must be a list of values")
    values = [*values]
    if of_several := next((value for value in values if isinstance(value, Mapping)), None):
        first, value = next(iter(of_several.items()), ("KEY", "VALUE"))
        raise SettingsError(
            f"grid {key}: {of_several!r} is a set of settings, and a grid has lists of values: "
            f"{{{key!r}: {{{first!r}: [{value!r}, ...]}}}}. Settings that go together are rows"
        )
    texts = [as_text(key, value) for value in values]
    if not texts or len(set(texts)) < len(texts):
        raise SettingsError(f"grid {key}: there is no value, or one stands there twice")
    return texts


def _with_dashes(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the keys that their names in Python stand for, at every level."""
    return {
        _key(name): _with_dashes(value) if isinstance(value, Mapping) else value for name, value in settings.items()
    }


def _overrides(settings: Mapping[str, Any]) -> list[str]:
    """Settings as the command takes them; SettingsError for what is no setting's value."""
    return as_overrides(_with_dashes(settings))


def _rows(rows: Mapping[str, Mapping[str, Any]] | str | os.PathLike[str] | None) -> list[Row]:
    if rows is None:
        return []
    if isinstance(rows, str | os.PathLike):
        return read_rows(Path(rows))
    if not isinstance(rows, Mapping):
        raise SettingsError(
            f'rows = {rows!r}: must be a dict of named settings, such as {{"slow": {{"learning_rate": 0.01}}}}, or the '
            "name of a file of them"
        )
    return make_rows({n: _with_dashes(r) if isinstance(r, Mapping) else r for n, r in rows.items()}, "rows")
