"""A search for good values of keys: trials are runs, which Optuna chooses and ends early where others did better."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wildflower.devices.private import private_folder
from wildflower.launch import child
from wildflower.launch.experiment_file import SettingsError, as_overrides, beside, parse_override, resolve
from wildflower.launch.following import LOOK_SECONDS, JournalWatch
from wildflower.launch.superlink import last_lines
from wildflower.launch.sweeps import run_name
from wildflower.launch.terminal import say
from wildflower.plugins.extras import needed
from wildflower.server_app.compared_runs import SEARCH
from wildflower.server_app.run_folder import SWEEP_LOGS, is_run, read_summary
from wildflower.server_app.run_records import RoundRecord

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
    from rich.console import Console

    from wildflower.rounds.hooks import RoundHook

STUDY = "study.jsonl"
"""What Optuna keeps of the trials, as lines of JSON."""

FIRST_TRIALS = 4  # that none is ended before
LOG_LINES = 15
CAN_BE = "must be two numbers (lowest, highest), such as (0.001, 0.3), or a list of two values or more"


Space = Mapping[str, "CategoricalDistribution | FloatDistribution | IntDistribution"]


@dataclass(frozen=True)
class Tuned:
    """The result of a search.

    Attributes:
        folder: the folder of the trials' runs.
        best: the values of the best trial, by key.
        score: the delivered score of its run.
        runs: the folders of all trials that were not ended early, best first.
        trials, pruned: how many there were, and how many of these were ended early.
        study: the study of Optuna.
    """

    folder: Path
    best: dict[str, Any]
    score: float
    runs: list[Path]
    trials: int
    pruned: int
    study: optuna.Study


def parse_space(texts: Sequence[str]) -> Space:
    """Return what is searched, from texts such as "learning-rate=0.001..0.3" and "strategy=heterofl,fedavg"."""
    space: dict[str, Any] = {}
    for text in texts:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not key or not value:
            raise SettingsError(f"--search {text!r}: must be like learning-rate=0.001..0.3 or batch-size=8,16,32")
        low, dots, high = value.partition("..")
        parts = [parse_override(f"{key}={part}", {})[1] for part in ((low, high) if dots else value.split(","))]
        space[key] = tuple(parts) if dots else parts
    return checked_space(space)


def checked_space(space: Mapping[str, Any]) -> Space:
    """Return what is searched as Optuna draws it; SettingsError for what is neither a range nor a list of values.

    Of ranges of positive numbers that differ by ten times or more, numbers are drawn by their logarithm.
    """
    with needed("optuna", "a search"):
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
    found: dict[str, CategoricalDistribution | FloatDistribution | IntDistribution] = {}
    for key, values in space.items():
        if key in ("seed", "run-name", "output-dir", "resume"):
            raise SettingsError(f"search {key}: it is the same in all trials, or follows from the trial")
        numbers = isinstance(values, tuple) and len(values) == 2 and all(map(_is_number, values))
        if numbers and values[0] < values[1]:
            low, high = values
            kind = IntDistribution if isinstance(low, int) and isinstance(high, int) else FloatDistribution
            found[key] = kind(low, high, log=low > 0 and high >= 10 * low)
        elif isinstance(values, list) and len(values) > 1 and all(isinstance(v, str | int | float) for v in values):
            found[key] = CategoricalDistribution(values)
        else:
            raise SettingsError(f"search {key} = {values!r}: {CAN_BE}")
    if not found:
        raise SettingsError(f'search: there is no key to search, such as {{"learning_rate": (0.001, 0.3)}}; {CAN_BE}')
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def tune(
    experiment: Path,
    overrides: Sequence[str],
    space: Space,
    trials: int,
    folder: Path,
    console: Console,
    hooks: Sequence[RoundHook] = (),
) -> Tuned:
    """Run trials until there are so many, and return the best; the same call goes on with what is missing.

    A trial is ended early if its delivered score is below the median of the earlier ones at the same round. `hooks` are
    objects of this process, from which trials are then forked.

    Raises:
        SettingsError: a trial cannot start with its settings; nothing of it was started.
        RuntimeError: no trial is finished; the text says why the last one failed.
    """
    with needed("optuna", "a search"):
        import optuna
        from optuna.distributions import CategoricalDistribution as Categorical
        from optuna.storages.journal import JournalFileBackend
    if not isinstance(trials, int) or isinstance(trials, bool) or trials < 1:
        raise SettingsError(f"trials = {trials!r}: must be a whole number from 1 on")
    first = {key: of.choices[0] if isinstance(of, Categorical) else of.low for key, of in space.items()}
    with beside(experiment):  # before anything is written
        config = resolve(experiment, [*overrides, *as_overrides(first)], given_in="the search's settings").config
    child.check_hooks(hooks)
    private_folder(folder / SWEEP_LOGS)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        storage=optuna.storages.JournalStorage(JournalFileBackend(str(folder / STUDY))),
        study_name="wildflower",
        load_if_exists=True,
        direction="maximize",
        pruner=optuna.pruners.MedianPruner(n_startup_trials=FIRST_TRIALS, n_warmup_steps=max(1, config.rounds // 5)),
    )
    described = {key: optuna.distributions.distribution_to_json(of) for key, of in space.items()}
    asked = {"space": described, "settings": sorted(overrides)}
    if study.user_attrs.get("asked", asked) != asked:
        raise SettingsError(f"{folder} holds a search over other keys or settings: give this one another folder")
    study.set_user_attr("asked", asked)
    for broken_off in study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):  # an earlier call was stopped in it
        study.tell(broken_off.number, state=optuna.trial.TrialState.FAIL)
        study.enqueue_trial(broken_off.params)
    # Not the draws of the trials that there are.
    study.sampler = optuna.samplers.TPESampler(seed=len(study.get_trials(deepcopy=False)))
    ends = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
    failed, why = 0, ""
    while len(study.get_trials(deepcopy=False, states=ends)) + failed < trials:
        trial = study.ask(fixed_distributions=dict(space))
        values = trial.params
        name = run_name([f"{key}={value}" for key, value in values.items()])
        outcome = _run(experiment, [*overrides, *as_overrides(values)], trial, folder, name, hooks)
        shown = ", ".join(f"{key} = {_short(value)}" for key, value in values.items())
        if isinstance(outcome, str):
            failed, why = failed + 1, outcome
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            say(console, f"{shown}: failed: {outcome}")
        elif outcome is None:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            say(console, f"{shown}: ended early")
        else:
            study.tell(trial, outcome)
            say(console, f"{shown}: {outcome:.4f}")
        found = study.get_trials(deepcopy=False, states=ends)
        pruned = sum(one.state == optuna.trial.TrialState.PRUNED for one in found)
        searched = {"trials": len(found), "pruned": pruned, "keys": list(space)}
        (folder / SEARCH).write_text(json.dumps(searched) + "\n", encoding="utf-8")
    complete = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    if not complete:
        raise RuntimeError(f"no trial is finished: {why}")
    complete.sort(key=lambda one: one.value or 0.0, reverse=True)
    names = [run_name([f"{key}={value}" for key, value in one.params.items()]) for one in complete]
    ended = study.get_trials(deepcopy=False, states=ends)
    best = complete[0]
    summary = read_summary(folder / names[0])
    score = best.value if summary is None or summary.scale.higher_is_better else -(best.value or 0.0)
    folders = [folder / name for name in dict.fromkeys(names)]
    return Tuned(folder, dict(best.params), score or 0.0, folders, len(ended), len(ended) - len(complete), study)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _run(
    experiment: Path,
    overrides: Sequence[str],
    trial: optuna.Trial,
    folder: Path,
    name: str,
    hooks: Sequence[RoundHook],
) -> float | str | None:
    """Run a trial; returns its rank, the higher the better, None where it was ended early, or why it failed."""
    run_dir = folder / name
    own = [*overrides, f"run-name={name}", f"output-dir={folder}", *(["resume=true"] if is_run(run_dir) else [])]
    log = folder / SWEEP_LOGS / f"{name}.log"
    summary = read_summary(run_dir) if is_run(run_dir) else None
    if summary is None or summary.status != "finished":
        with child.running(experiment, own, log, hooks) as process:
            journal, told = JournalWatch(run_dir), 0
            while process.poll() is None:
                told = _report(trial, journal.rounds(), told)
                if told and trial.should_prune():
                    return None
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=LOOK_SECONDS)
            _report(trial, journal.rounds(), told)  # by which later trials are measured
            if process.returncode != 0:
                return last_lines(log, LOG_LINES) or f"its process has ended with code {process.returncode}"
    summary = read_summary(run_dir)
    if summary is None:
        return "its run has no summary"
    if summary.figure is None or math.isnan(summary.figure):
        return "its run has no score"
    return summary.scale.rank(summary.figure)


def _report(trial: optuna.Trial, rounds: Sequence[RoundRecord], told: int) -> int:
    """Tell a trial the scores of rounds after `told`; returns the last one that was evaluated."""
    for record in rounds:
        if record.round > told and record.figure is not None and not math.isnan(record.figure):
            trial.report(record.scale.rank(record.figure), record.round)
            told = record.round
    return told
