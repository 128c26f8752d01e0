"""The offer of `import wildflower`: runs and sweeps from Python, and what they left as tables (docs/python.md)."""

from __future__ import annotations

import os
import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import datetime
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wildflower.launch import child
from wildflower.launch.app_log import log_since, warnings_text
from wildflower.launch.before import check_population
from wildflower.launch.experiment_file import SettingsError, beside, free_name, place, read_toml, resolve
from wildflower.launch.following import JournalWatch, has_ended
from wildflower.launch.objects import Objects, are_objects, method_reference, written_down
from wildflower.launch.python_settings import by_reference, grid_of, overrides_of, rows_of, space_of, with_dashes
from wildflower.launch.results import Run, Sweep
from wildflower.launch.showing import progress
from wildflower.launch.superlink import last_lines
from wildflower.launch.sweeps import SweepRequest, check_seeds, is_whole
from wildflower.launch.sweeps import sweep as run_sweep
from wildflower.launch.terminal import terminal
from wildflower.launch.tuning import Tuned, checked_space
from wildflower.launch.tuning import tune as run_tune
from wildflower.plugins.raised_as import raised_as
from wildflower.plugins.reference import is_reference, module_label
from wildflower.server_app.compare import Comparison
from wildflower.server_app.compare import compare as compare_runs
from wildflower.server_app.resuming import check_folder, check_resumable
from wildflower.server_app.run_folder import JournalError, read_config, read_rounds, read_summary, runs_of
from wildflower.server_app.summary import global_model, summarize

if TYPE_CHECKING:
    from wildflower.rounds.hooks import RoundHook

SAID_LINES = 60
WARNING = "Warning: "  # how a run prints one


class RunError(RuntimeError):
    """A run that has failed, or runs of a sweep; the text says why, and how to go on with what is finished."""


def run(
    experiment: str | os.PathLike[str] | None = None,
    *,
    model: object = None,
    data: object = None,
    label: str | None = None,
    test: object = None,
    loss: object = None,
    metric: object = None,
    levels: Sequence[Mapping[str, Any]] | None = None,
    hooks: Sequence[RoundHook] | str = (),
    **settings: Any,
) -> Run:
    """Run an experiment on simulated devices, as `wildflower run` does, in processes of its own.

    Objects are written into the run's folder, as an experiment file with what it names (`Run.experiment`).

    Args:
        experiment: an experiment file; None where the arguments say everything.
        model: a class of `nn.Module`, a function that returns a module, a module, or the name of a family. Parameters
            called `classes` and `input_shape` are filled in.
        data: `(x, y)` of arrays or tensors, a Dataset of PyTorch or a DataLoader of one, a data set of Hugging
            Face's, a table of pandas, or one of these for each device, as a list or a dict.
        label: the column of labels, of tables.
        test: as `data`, what models are scored on; None keeps a fifth of `data` for that.
        loss: a function of outputs and labels that returns their mean over the batch, or a module such as
            `nn.CrossEntropyLoss()`.
        metric: a function of outputs and labels that returns a number for each example, or their mean; the higher the
            better. Or the name of a metric, such as "f1".
        levels: the arguments of the model's sizes, smallest first, such as `[{"width": 8}, {"width": 16}]`.
        hooks: what is done beside every round, such as `[EarlyStop(patience=5)]` (docs/hooks.md). The run works
            with copies of them. A text names hooks as the key `hooks` does.
        settings: keys in place of the experiment's, with `_` for `-`: `learning_rate=0.1`. A method's own are given as
            a dict: `fedprox={"mu": 0.1}`. `strategy` may be a class; `fleet` a list of memory sizes, a dict of names
            and sizes, or a list of tables; `budget` a share of the memory. `resume=True` with a `run_name` goes on
            with a run that was stopped.

    Raises:
        SettingsError: no run can start with these settings; nothing was started.
        JournalError: there is such a run already, or none to be resumed; nothing was started.
        RunError: the run has failed.
        KeyboardInterrupt: the run was interrupted and stopped; the text says how it goes on.
    """
    given = {"model": model, "data": data, "label": label, "test": test, "loss": loss, "metric": metric}
    asked = _Arguments.of(experiment, {**given, "levels": levels, "hooks": hooks, **settings})
    where = Path() if asked.base is None else _run_folder(asked.settings, asked.label)
    with _written(asked, where) as (file, overrides):
        return _run(file, overrides, asked.hooks)


# What arguments that are objects are called elsewhere.
_ELSEWHERE = {
    name: argument
    for argument, names in {
        "data": "train train-data train-dataset train-loader trainloader trainset dataset x",
        "test": "test-data test-dataset test-loader testloader testset val val-data valid validation eval",
        "model": "net network module",
        "loss": "criterion loss-fn",
        "metric": "metrics",
    }.items()
    for name in names.split()
}


@dataclass(frozen=True)
class _Arguments:
    """What `run`, `tune` and `sweep` are all given: an experiment file, objects, keys of the configuration, hooks."""

    experiment: Path | None
    objects: Objects
    settings: dict[str, Any]
    hooks: Sequence[RoundHook]
    base: dict[str, Any] | None  # keys of the file that objects are laid over; None where there are no objects

    @staticmethod
    def of(experiment: object, given: Mapping[str, Any], methods: tuple[type, ...] = ()) -> _Arguments:
        """Tell the arguments of a call apart; `methods` are classes that it compares. Raises SettingsError."""
        if experiment is not None and not isinstance(experiment, str | os.PathLike):
            raise SettingsError(
                f"experiment = {experiment!r}: must be the name of an experiment file; a model is given as model=, and "
                "data as data="
            )
        names = {field.name for field in fields(Objects)} & given.keys() - {"methods"}
        objects = Objects(**{name: given[name] for name in names}, methods=methods)
        settings = with_dashes({name: value for name, value in given.items() if name not in names})
        for name, value in settings.items():
            if name in _ELSEWHERE and not isinstance(value, str | int | float):
                raise SettingsError(f"{name.replace('-', '_')}: there is no such argument: give {_ELSEWHERE[name]}=")
        hooks = () if isinstance(settings.get("hooks"), str) else settings.pop("hooks", ())
        if experiment is None and not objects and not settings:
            raise SettingsError("there is nothing to run: give an experiment file, or model= and data=")
        file = None if experiment is None else Path(experiment)
        if file is not None and not are_objects(objects, settings):
            return _Arguments(file, objects, settings, hooks, None)
        base = {} if file is None else with_dashes(read_toml(file, "the experiment"))
        return _Arguments(file, objects, settings, hooks, base)

    @property
    def label(self) -> str:
        """The name of a run, a sweep or a search that has none: of its file, or its method and its model or task."""
        if self.base is None:
            assert self.experiment is not None
            return self.experiment.stem
        keys, model = {**self.base, **self.settings}, self.objects.model
        strategy = keys.get("strategy", "")
        strategy = strategy if isinstance(strategy, str) else method_reference(strategy)
        strategy = module_label(strategy) if is_reference(strategy) else strategy
        name = getattr(model, "__name__", type(model).__name__) if model is not None else keys.get("task", "own-data")
        name = model if isinstance(model, str) else name
        return "-".join(part for part in (strategy, re.sub(r"\W+", "-", str(name)).strip("-").lower()) if part)


def _run_folder(keys: dict[str, Any], label: str) -> Path:
    """Give a run a name if it has none, and return its folder; SettingsError and JournalError as `run`."""
    output_dir = Path(keys.get("output-dir", "runs")).expanduser().absolute()
    if not keys.get("run-name"):
        if keys.get("resume"):
            raise SettingsError("resume=True needs the run_name of the run to go on with")
        keys["run-name"] = free_name(output_dir, f"{label}-{datetime.now():%Y%m%d-%H%M%S}")
    folder = output_dir / str(keys["run-name"])
    check_folder(folder, bool(keys.get("resume")))
    return folder


@contextmanager
def _written(asked: _Arguments, where: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield the experiment file of a call, which is written into the folder `where` if objects are given, and its keys.

    Keys are settings to lay over the file, "key=value".
    """
    if asked.base is None:
        assert asked.experiment is not None
        yield asked.experiment, overrides_of(asked.settings)
        return
    beside_of = Path.cwd() if asked.experiment is None else asked.experiment.absolute().parent
    with written_down(asked.base, asked.objects, asked.settings, beside_of, where) as (made, keys):
        yield made, overrides_of({key: keys[key] for key in asked.settings})


def _run(file: Path, overrides: list[str], hooks: Sequence[RoundHook]) -> Run:
    with beside(file):
        config, folder = place(resolve(file, overrides, given_in="Python").config, Path.cwd(), datetime.now())
        check_folder(folder, config.resume)
        if config.resume:
            check_resumable(folder, config.to_dict())
        check_population(config, None)
    child.check_hooks(hooks)
    told = [ignored] if (ignored := config.ignored_text()) else []
    for text in told:
        warnings.warn(text, stacklevel=3)
    overrides += overrides_of({"run-name": config.run_name, "output-dir": config.output_dir})
    earlier = len(read_rounds(folder))
    named = partial(global_model, folder, {"strategy": config.strategy})
    app_log = folder / "app.log"
    app_log_start = app_log.stat().st_size if app_log.exists() else 0
    with tempfile.NamedTemporaryFile(prefix="wildflower-", suffix=".log") as said:
        try:
            with (
                child.running(file, overrides, Path(said.name), hooks) as process,
                progress(terminal(), config.rounds, earlier, named) as show,
            ):
                journal = JournalWatch(folder)
                while True:
                    ended = has_ended(process.wait)
                    for text in _first_warnings(Path(said.name)):
                        if text not in told:
                            told.append(text)
                            warnings.warn(text, stacklevel=3)
                    show.rounds(journal.rounds())
                    if ended:
                        break
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_how_to_go_on(folder, config.run_name, config.rounds)) from None
        if later := warnings_text(log_since(app_log, app_log_start), app_log, already=told):
            warnings.warn(later, stacklevel=3)
        if process.returncode != 0:
            reason = _reason(last_lines(Path(said.name), SAID_LINES))
            reason = reason or f"its process has ended with code {process.returncode}"
            raise RunError(f"{config.run_name}: {reason}")
    return load(folder)


def _reason(said: str) -> str:
    """What a run has said of its failure, behind its title, its rounds and its warnings; "" where it was killed."""
    begins = re.search(r"^(Error: |(?=The run failed\. |Traceback ))", said, re.MULTILINE)
    return said[begins.end() :].strip() if begins else ""


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
    """Return what a run has left so far: one from `run`, from the command, or from real devices.

    Raises:
        JournalError: the folder holds no run.
    """
    if not isinstance(folder, str | os.PathLike):
        raise JournalError(f"{folder!r} is not the folder of a run: give its name, such as 'runs/NAME'")
    path = Path(folder).absolute()  # what is read later is read from there, wherever the notebook has gone meanwhile
    read_config(path)
    return Run(path, read_summary(path) or summarize(path, "unfinished", None))


def tune(
    experiment: str | os.PathLike[str] | None = None,
    *,
    search: Mapping[str, Any],
    trials: int = 20,
    folder: str | os.PathLike[str] | None = None,
    **given: Any,
) -> Tuned:
    """Search for the values of keys that deliver most, as `wildflower tune` does; the same call goes on.

    A trial is a run, which is ended early where it is below the median of earlier ones.

    Args:
        experiment: the experiment file; None where the arguments say everything.
        search: keys and what they may be, a range or a list: `{"learning_rate": (0.001, 0.3), "batch_size": [8, 32]}`;
            a method's own as a dict: `{"fedprox": {"mu": (0.001, 1.0)}}`.
        trials: how many there are in all.
        folder: where the runs lie; by default runs/NAME-tune, by the experiment's or the model's name.
        given: the other arguments of `run`, which all trials have: model, data, label, test, loss, metric, levels,
            hooks (every trial has copies of its own) and keys.

    Raises:
        SettingsError: a trial cannot start with its settings, or the folder has a search over other keys.
        RunError: no trial is finished.
        KeyboardInterrupt: the search was interrupted; the same call goes on.
    """
    space = checked_space(space_of(search))
    asked = _Arguments.of(experiment, given)
    where = _folder(folder, f"{asked.label}-tune")
    with _written(asked, where) as (file, overrides), raised_as(RunError, "", RuntimeError):
        return run_tune(file, overrides, space, trials, where, terminal(), asked.hooks)


def sweep(
    experiment: str | os.PathLike[str] | None = None,
    *,
    seeds: Iterable[int] = (1, 2, 3),
    rows: Mapping[str, Mapping[str, Any]] | str | os.PathLike[str] | None = None,
    grid: Mapping[str, Iterable[Any]] | None = None,
    jobs: int = 1,
    folder: str | os.PathLike[str] | None = None,
    **given: Any,
) -> Sweep:
    """Run an experiment with several seeds, rows and values, as `wildflower sweep` does, as far as runs are missing.

    Args:
        experiment: the experiment file; None where the arguments say everything.
        seeds: what every row and combination of values is run with.
        rows: named sets of settings, such as `{"slow": {"learning_rate": 0.01}}`, or a file of them
            (docs/configuration.md). With `"seeds": [1]` among its settings, a row runs with that seed only.
        grid: the values of keys, such as `{"strategy": ["heterofl", "fedrolex"], "learning_rate": [0.1, 0.01]}`; those
            of a method's own keys as a dict: `{"fedprox": {"mu": [0.1, 1]}}`. A method may be a class.
        jobs: runs at a time, which share the CPU's cores.
        folder: where the runs lie; by default runs/NAME-sweep, by the experiment's or the model's name. The same call
            goes on there.
        given: the other arguments of `run`, which all runs have: model, data, label, test, loss, metric, levels, hooks
            (every run has copies of its own) and keys.

    Raises:
        SettingsError: a run cannot start with its settings, or the folder has a run of other ones; none was started.
        RunError: some runs have failed; those that are finished stay.
        KeyboardInterrupt: the sweep was interrupted; the same call goes on with what is missing.
    """
    if not is_whole(jobs, least=1):
        raise SettingsError(f"jobs = {jobs!r}: must be a whole number from 1 on")
    grid, methods = by_reference(grid or {})
    rows, of_rows = by_reference(rows)
    asked = _Arguments.of(experiment, given, (*methods, *of_rows))
    where = _folder(folder, f"{asked.label}-sweep")
    with _written(asked, where) as (file, overrides):
        texts = grid_of(grid)
        request = SweepRequest(file, overrides, where, check_seeds(seeds), rows_of(rows), texts, jobs, asked.hooks)
        outcome = run_sweep(request, terminal())
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


def _folder(given: object, usual: str) -> Path:
    if not isinstance(given, str | os.PathLike | None):
        raise SettingsError(f"folder = {given!r}: must be the name of a folder, such as 'runs/one'")
    return Path("runs", usual).absolute() if given is None else Path(given).absolute()


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
