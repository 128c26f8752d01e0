"""Advice in words: the method to take for a fleet, and how sure that is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from wildflower.plugins.reference import top_module
from wildflower.server_app.compared_runs import (
    CONFIDENCE,
    DATA_HASH,
    FLEET_HASH,
    Group,
    differing_keys,
    hooks_note,
    shortened,
    t_interval,
)
from wildflower.server_app.inline_tables import to_toml
from wildflower.server_app.units import Format, bytes_text, one_digit, plain
from wildflower.tasks.metrics import Scale

# Conditions: methods are recommended among runs that have them in common. What is learned from which data, by devices
# that may spend how much for how long, with what privacy, and how that is scored. The seed and the budgets of the tiers
# come on top. How one trains is no condition, but what is compared.
CONDITIONS = (
    *("task", "task-arguments", "data-dir", DATA_HASH, "partition", "alpha", "test-fraction", "examples-per-device"),
    *("max-examples", "strong.devices", "strong.share", "strong.test"),
    *(FLEET_HASH, "devices", "devices-per-round", "minimum-devices", "aggregation.over-selection", "buffer"),
    *("budget.memory-fraction", "budget.transfer-seconds", "deadline-seconds", "budget.round-seconds", "rounds"),
    *("dp.epsilon", "dp.noise-multiplier", "dp.delta", "secure-aggregation.minimum"),
    *("evaluate-every", "deliver", "statistics.devices", "statistics.examples"),
)
MAX_VALUES = 3  # of a condition in which runs differ


def advice_on(groups: Sequence[Group], scale: Scale) -> list[str]:
    """Return which method to take for this fleet and how sure that is, and which methods are not counted."""
    told = [*hooks_note(groups), *_without_model(groups), *_beyond(groups)]
    if len(groups) < 2:
        return told
    if unequal := _unequal_conditions(groups) or _unequal_budgets(groups):
        return [unequal, *told]
    if any(run.summary.delivered_score is None for group in groups for run in group.runs):
        text = "Some of the runs do not say what devices are given (evaluate-tiers = false)"
        return [f"{text}, so that no method is recommended.", *told]
    able = [g for g in groups if g.counts and g.mean is not None and math.isfinite(g.mean)]
    if len(able) < 2:
        return told
    common = set.intersection(*({*group.by_seed} for group in able))
    if not common:
        seeds = "; ".join(f"{group.name} has {group.seeds}" for group in able)
        return [f"The runs have no seed in common ({seeds}), so that none of the methods is recommended.", *told]
    cut = [Group(group.name, [run for run in group.runs if run.seed in common]) for group in able]
    best, second, *others = sorted(cut, key=lambda group: scale.rank(group.mean), reverse=True)
    assert best.mean is not None
    if any(len(group.runs) > len(common) for group in able):
        told = [f"Only the seeds that all of them have are counted: {best.seeds}.", *told]
    take = f"Take {best.name}: over all devices of this fleet it delivers {one_digit(scale)(best.mean)}."
    gap = _gap(best, second, scale)
    unsure = [other.name for other in others if not _gap(best, other, scale).is_sure]
    also = [f"Nor is it sure that it is better than {', '.join(unsure)}."] if unsure else []
    return [take, _how_sure(second.name, gap, scale), *also, *_beside_the_method(best, second), *told]


def _unequal_conditions(groups: Sequence[Group]) -> str:
    """In which conditions runs differ; "" where they have them in common."""
    experiments = [group.runs[0].experiment for group in groups]
    of_tasks = [f"module {top_module(str(experiment.get('task')))}-sha256" for experiment in experiments]
    keys = dict.fromkeys([*CONDITIONS, *of_tasks])
    conditions = [{key: experiment[key] for key in keys if key in experiment} for experiment in experiments]
    other = [_condition_in_words(key, experiments) for key in differing_keys(conditions)]
    # Of real devices no file says what there are: their kinds are the tiers.
    real = [group for group in groups if not group.runs[0].config.get("fleet")]
    if len({frozenset(run.summary.delivered_score_by_tier or {}) for group in real for run in group.runs}) > 1:
        other.append("the kinds of devices")
    if not other:
        return ""
    return (
        f"The runs differ in {', '.join(other)}, so that none of the methods is recommended: compare runs that have "
        "this in common."
    )


def _condition_in_words(key: str, experiments: Sequence[dict[str, object]]) -> str:
    """A condition in which runs differ, with the first values of it; hashes tell a person nothing."""
    if key == DATA_HASH:
        return "the data themselves"
    if key.startswith("module "):
        return f"the code of the {key.removesuffix('-sha256')}"
    shown = "fleet" if key == FLEET_HASH else key
    values = dict.fromkeys(to_toml(experiment[shown]) for experiment in experiments if shown in experiment)
    texts = list(dict.fromkeys(map(shortened, values)))
    if key == FLEET_HASH and len(values) < 2:
        return "what the fleet's files hold"
    if len(texts) < max(2, len(values)):  # long ones, such as paths, that begin alike
        return shown
    return f"{shown} ({', '.join(texts[:MAX_VALUES])}{', ...' if len(texts) > MAX_VALUES else ''})"


def _unequal_budgets(groups: Sequence[Group]) -> str:
    """Where one fleet gives devices more under one method than under another, and what to do; "" where it does not."""
    for key, what in (("memory_bytes", "of training memory"), ("payload_bytes", "of payload")):
        found = {
            tier: {
                group.name: getattr(run.budgets[tier], key)
                for group in groups
                for run in group.runs
                if tier in run.budgets
            }
            for tier in groups[0].runs[0].budgets
        }
        limits = {
            tier: {name: nbytes for name, nbytes in of.items() if nbytes is not None} for tier, of in found.items()
        }
        unequal = {tier: of for tier, of in limits.items() if len({*of.values()}) > 1}
        if unequal:
            tier, of = max(unequal.items(), key=lambda item: max(item[1].values()) / min(item[1].values()))
            least, most = min(of, key=lambda name: of[name]), max(of, key=lambda name: of[name])
            fleet = groups[0].runs[0].config.get("fleet")
            return (
                f"The fleet {fleet} gives devices of {tier} {_exactly(of[least])} {what} "
                f"under {least} and {_exactly(of[most])} under {most}, so that none of the methods is recommended: its "
                "fits_width means what each method needs for a width. Give its groups training_memory, and where it "
                "should bind payload, in bytes (docs/fleets.md), and run the methods again."
            )
    return ""


def _exactly(nbytes: int) -> str:
    """Bytes with a prefix, and as they are."""
    return f"{bytes_text(nbytes)} ({nbytes:,} bytes)"


@dataclass(frozen=True)
class Gap:
    """By how much one method is ahead of another, by runs of the same seeds.

    Attributes:
        wins, seeds: with how many seeds, of how many.
        low, high: the interval of Student's t around it; None with fewer than two seeds.
    """

    wins: int
    seeds: int
    mean: float
    low: float | None = None
    high: float | None = None

    @property
    def is_sure(self) -> bool:
        """Return whether the whole interval is above 0."""
        return self.low is not None and self.low > 0


def _gap(best: Group, other: Group, scale: Scale) -> Gap:
    """Paired by seeds, which the partition, the first weights and the sampled devices of a run follow from."""
    mine, theirs = best.by_seed, other.by_seed
    seeds = sorted(mine.keys() & theirs.keys())
    gaps = [scale.rank(mine[seed].summary.figure) - scale.rank(theirs[seed].summary.figure) for seed in seeds]
    wins = sum(gap > 0 for gap in gaps)
    if len(gaps) < 2:
        return Gap(wins, len(gaps), gaps[0])
    return Gap(wins, len(gaps), fmean(gaps), *t_interval(gaps))


def _how_sure(other: str, gap: Gap, scale: Scale) -> str:
    """By how much a method is ahead of the next one, and whether that is sure."""
    text: Format = (lambda value: f"{100 * value:.1f} points") if scale.is_share else plain
    if gap.low is None or gap.high is None:
        return f"That it is better than {other}, by {text(gap.mean)}, is a guess: they have one seed in common."
    interval = f"{100 * CONFIDENCE:.0f} % interval {text(gap.low)} to {text(gap.high)}"
    sure = "is sure" if gap.is_sure else "is not sure, and more seeds would tell"
    ahead = f"{text(gap.mean)} on average, and better with {gap.wins} of {gap.seeds} seeds ({interval})"
    return f"That it is better than {other} {sure}: by {ahead}."


def _beside_the_method(best: Group, second: Group) -> list[str]:
    """In which settings, which both read, runs of two methods differ that are no method's own."""
    experiments = [group.runs[0].experiment for group in (best, second)]
    if experiments[0]["strategy"] == experiments[1]["strategy"]:
        return []  # the settings are what is compared, and name the rows
    both = experiments[0].keys() & experiments[1].keys()
    keys = [key for key in differing_keys(experiments) if key in both and key != "strategy"]
    settings = ", ".join(keys)
    return [f"The two differ in {settings} as well, so that the methods alone need not be the reason."] if keys else []


def _beyond(groups: Sequence[Group]) -> list[str]:
    names = [group.name for group in groups if not group.counts]
    return [f"Not counted, since it gives devices more than they afford: {', '.join(names)}."] if names else []


def _without_model(groups: Sequence[Group]) -> list[str]:
    """Which methods give some devices no model, and how many devices that are."""
    told = []
    for group in groups:
        none = [run.summary.devices_without_model or 0 for run in group.runs]
        if any(none):
            devices = max(run.summary.delivered_devices or 0 for run in group.runs)
            several = len({*none}) > 1 or any((run.summary.final_evaluations or 0) > 1 for run in group.runs)
            told.append(
                f"Under {group.name} {'up to ' if several else ''}{max(none)} of {devices} devices get no model."
            )
    return told
