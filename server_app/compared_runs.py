"""Runs that are compared: as their folders have them, grouped by experiment, with names that tell them apart."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from wildflower.plugins.extras import needed
from wildflower.plugins.reference import is_reference, top_module
from wildflower.server_app.config import READ_WITH, unread
from wildflower.server_app.own_hooks import hook_references
from wildflower.server_app.resuming import is_of_a_folder
from wildflower.server_app.run_folder import JournalError, read_config, read_rounds, read_summary
from wildflower.server_app.run_records import RoundRecord, Summary, TierBudget
from wildflower.server_app.summary import global_model, summarize
from wildflower.tasks.metrics import Scale

SEARCH = "search.json"


def trials_of(run_dir: Path) -> str:
    """Return of how many trials a run is one, in words; "" where it is of no search, or its file cannot be read."""
    for folder in run_dir.resolve().parents[:2]:  # a run of the search, or of a sweep beside its runs
        try:
            found = json.loads((folder / SEARCH).read_bytes())
            return f"{int(found['trials'])} trials ({int(found['pruned'])} ended early) over {', '.join(found['keys'])}"
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return ""


# Keys that do not make another experiment: the seed, and where and how a run was done.
NOT_THE_EXPERIMENT = frozenset(
    {"seed", "run-name", "output-dir", "data-dir", "workers", "engine", "hooks"}
    | {"resume", "checkpoints.resume-from", "dp.resume-copy", "checkpoints.keep", "tracker"}
)
DATA_HASH = "data-sha256"  # of what identifies the data
FLEET_HASH = "fleet-sha256"
CONFIDENCE = 0.95
MAX_VALUE_LETTERS = 24  # of a setting in the name of a row


@dataclass(frozen=True)
class Run:
    """Figures of one run that are compared.

    Attributes:
        budgets: by tier, the most bytes of memory and of payload of its simulated devices; {} of real ones.
        row: what its group is called, if whoever asked has a name for it.
        finished_rounds: how many its summary.json has, where there is one.
        whole: whether there is a whole model.
        search: of how many trials its settings are one; "" of a run of no search.
    """

    name: str
    config: dict[str, object]
    rounds: list[RoundRecord]
    summary: Summary
    budgets: Mapping[str, TierBudget]
    row: str = ""
    finished_rounds: int | None = None
    whole: bool = True
    search: str = ""

    @property
    def experiment(self) -> dict[str, object]:
        """The configuration without what makes no other experiment."""
        same = NOT_THE_EXPERIMENT | set(unread(self.config))
        if is_of_a_folder(self.config.get("task")):
            same -= {"data-dir"}
        return {key: value for key, value in self.config.items() if key not in same}

    @property
    def identity(self) -> str:
        """Return what its replicates have in common."""
        return json.dumps([self.row, self.experiment], sort_keys=True)

    @property
    def seed(self) -> int:
        """The number of the replicate of its experiment."""
        seed = self.config["seed"]
        assert isinstance(seed, int)
        return seed

    def first_at(self, target: float) -> RoundRecord | None:
        """The first round that delivers a score at least as good as `target`."""
        rank = self.summary.scale.rank
        reached = ((r, r.score if self.summary.delivered_score is None else r.delivered_score) for r in self.rounds)
        return next((r for r, score in reached if score is not None and rank(score) >= rank(target)), None)


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed, one of each seed."""

    name: str
    runs: list[Run]

    @property
    def by_seed(self) -> dict[int, Run]:
        """The run of each seed."""
        return {run.seed: run for run in self.runs}

    @property
    def mean(self) -> float | None:
        """The mean over seeds of what the runs are ranked by."""
        known = [run.summary.figure for run in self.runs if run.summary.figure is not None]
        return fmean(known) if known else None

    @property
    def counts(self) -> bool:
        """Return whether it is compared with others: its devices can afford what it gives them."""
        return not any(run.summary.devices_beyond_budget for run in self.runs)

    @property
    def label(self) -> str:
        """Its name, as tables and charts show it."""
        return self.name if self.counts else f"{self.name} (does not count)"

    @property
    def is_baseline(self) -> bool:
        """Return whether it is what others should be better than: one model that all devices can train."""
        config = self.runs[0].config
        return config["strategy"] == "one-model" or (
            config["strategy"] == "fedavg" and config.get("fedavg.use") == "all-small"
        )

    @property
    def seeds(self) -> str:
        """The seeds as text, such as "1-3, 7"."""
        spans: list[list[int]] = []
        for seed in sorted(run.seed for run in self.runs):
            if spans and seed == spans[-1][1] + 1:
                spans[-1][1] = seed
            else:
                spans.append([seed, seed])
        return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def load_run(run_dir: Path, row: str) -> Run:
    """Read what is compared of the run in a folder, in a group of this name. Raise JournalError or OSError."""
    content = read_config(run_dir)
    # The contents of files are part of the experiment, whatever the files are called.
    hashes = {FLEET_HASH: content.fleet, "initial-weights-sha256": content.initial}
    hashes |= {DATA_HASH: str(content.data.get("sha256", ""))}
    of_hooks = _modules_of_hooks(content.config)
    hashes |= {f"module {name}-sha256": digest for name, digest in content.plugins.items() if name not in of_hooks}
    held = {name: digest[:12] for name, digest in hashes.items() if digest or name == FLEET_HASH}
    config = content.config | held | {"seed": content.seed}
    written = read_summary(run_dir)
    summary = summarize(run_dir, written.status if written else "unfinished", None)
    finished_rounds = None if written is None else written.rounds
    whole = bool(global_model(run_dir, config))
    name, rounds, search = run_dir.resolve().name, read_rounds(run_dir), trials_of(run_dir)
    return Run(name, config, rounds, summary, content.budgets, row, finished_rounds, whole, search)


def _modules_of_hooks(config: Mapping[str, Any]) -> set[str]:
    """Return the modules that a run has for its hooks alone, which are no part of the experiment."""
    try:
        hooks = {top_module(reference) for reference in hook_references(str(config.get("hooks", "")))}
    except ValueError:  # what no run has written
        return set()
    others = (str(value) for key, value in config.items() if key in ("strategy", "task", "public.task", "family"))
    return hooks - {top_module(reference) for reference in others if is_reference(reference)}


def hooks_note(groups: Sequence[Group]) -> list[str]:
    """Return a sentence if some of the runs had other hooks than others: those make no other experiment."""
    hooks = {run.name: str(run.config.get("hooks", "")) for group in groups for run in group.runs}
    if len(set(hooks.values())) < 2:
        return []
    named = "; ".join(f"{name}: {text}" for name, text in hooks.items() if text)
    return [f"Some runs had hooks, which are not counted among the settings ({named})."]


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return what is shown around a mean of seeds: the range of two, the 95 % interval of the mean of more."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    return (min(values), max(values)) if len(values) == 2 else t_interval(values)


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the interval of Student's t around the mean of two or more values."""
    with needed("scipy", "a comparison over several seeds"):
        from scipy.special import stdtrit  # what scipy.stats.t asks, without the second that it takes to load

    mean = fmean(values)
    half = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)) * stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def replicates(runs: Sequence[Run]) -> tuple[list[Run], list[tuple[str, str]]]:
    """The finished runs, one of each experiment and seed; and of the others the names, and why they are left out."""
    found: dict[tuple[str, int], Run] = {}
    left_out = []
    for run in runs:
        key = run.identity, run.seed
        if run.summary.status != "finished":
            left_out.append((run.name, f"{run.summary.status} after {run.summary.rounds} rounds"))
        elif run.finished_rounds != len(run.rounds):
            left_out.append((run.name, f"short of rounds: rounds.jsonl has {len(run.rounds)} of {run.finished_rounds}"))
        elif key in found:
            left_out.append((run.name, f"of the same settings and seed as {found[key].name}"))
        else:
            found[key] = run
    return list(found.values()), left_out


def scale_of_all(runs: Sequence[Run]) -> Scale:
    """Return what the scores of all runs mean. Raise JournalError where they are scored by different metrics."""
    scored = {run.summary.metric: run for run in runs if run.summary.metric is not None}
    if len(scored) > 1:
        metrics = " and ".join(f"{run.name} by {run.summary.scale.label}" for run in scored.values())
        raise JournalError(f"runs that are scored by different metrics cannot be compared: {metrics}")
    return next(iter(scored.values()), runs[0]).summary.scale


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Group runs that differ only in their seed, in the order of the first of each."""
    by_experiment: dict[str, list[Run]] = {}
    for run in runs:
        by_experiment.setdefault(run.identity, []).append(run)
    experiments = list(by_experiment.values())
    names = _names([members[0] for members in experiments])
    return [Group(name, members) for name, members in zip(names, experiments, strict=True)]


def _names(runs: Sequence[Run]) -> list[str]:
    """What rows are called: the method or the given name, and the settings that tell it from others of the same."""
    heads = [run.row or str(run.config["strategy"]) for run in runs]
    experiments = [run.experiment for run in runs]
    differing = {
        head: differing_keys([experiment for its, experiment in zip(heads, experiments, strict=True) if its == head])
        for head in dict.fromkeys(heads)
    }
    names: list[str] = []
    for head, run, experiment in zip(heads, runs, experiments, strict=True):
        keys = [key for key in differing[head] if key in experiment]
        prefix = f"{experiment['strategy']}."
        settings = []
        for key in keys:
            short = key.removeprefix(prefix)
            # A method's key keeps its whole name where the run has a key of the short one, such as momentum.
            settings.append(f"{key if short in run.config else short}={shortened(experiment[key])}")
        name = " ".join([head, *settings])
        again = sum(earlier == name or earlier.startswith(f"{name} (") for earlier in names)
        names.append(f"{name} ({again + 1})" if again else name)
    return names


def differing_keys(experiments: Sequence[dict[str, object]]) -> list[str]:
    """The keys in which experiments differ.

    A key of the run that another one rules out in some of them, such as `momentum` under Adam, has the values of the
    others alone.
    """

    def values(key: str) -> set[str]:
        read = [e for e in experiments if key in e] if key in READ_WITH else experiments
        return {json.dumps(experiment.get(key), sort_keys=True) for experiment in read}

    return [key for key in sorted({key for e in experiments for key in e}) if len(values(key)) > 1]


def shortened(value: object) -> str:
    """Return a value as text that is short enough for the name of a row."""
    text = str(value)
    return text if len(text) <= MAX_VALUE_LETTERS else f"{text[: MAX_VALUE_LETTERS - 1]}…"
