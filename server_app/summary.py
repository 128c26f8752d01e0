"""The figures of summary.json, from the lines of a journal."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from wildflower.server_app.ledger import spent
from wildflower.server_app.run_folder import read_devices, read_rounds
from wildflower.server_app.run_records import TRAFFIC, Summary
from wildflower.server_app.unread_keys import loaded_method
from wildflower.strategies import METHODS
from wildflower.strategies.on_devices import OnDevices

T = TypeVar("T")
WHOLE = "whole model"
OF_DEVICES = "mean of the devices' models"


def summarize(run_dir: Path, status: Literal["finished", "failed", "unfinished"], error: str | None) -> Summary:
    """The figures of summary.json, from the journal files as they are now."""
    rounds = read_rounds(run_dir)
    evaluated = [record for record in rounds if record.score_by_tier is not None]
    # The first of equals.
    whole = [record for record in evaluated if record.score is not None]
    best = max(whole, key=lambda record: record.scale.rank(record.score), default=None)
    last, final = (evaluated[-1] if evaluated else None), last_fifth(evaluated)
    # RecipFL's paper takes the mean over the last 20 % of its rounds.
    personal = [r for r in rounds[-max(1, round(len(rounds) / 5)) :] if r.personal_score is not None]
    outcomes: Counter[str] = Counter()
    tier_of: dict[int, str] = {}
    for device in read_devices(run_dir):
        if device.round <= len(rounds):
            outcomes[device.outcome_word] += 1
            if device.tier is not None:
                tier_of[device.device] = device.tier
    delivered = _means_by_name([r.delivered_score_by_tier for r in final], tier_of)
    of_tiers = (delivered or {}).items()
    worst, worst_score = min(of_tiers, key=lambda of_tier: rounds[-1].scale.rank(of_tier[1]), default=(None, None))
    privacy = spent(run_dir, rounds)
    exits = [r.score_by_exit for r in final if r.score_by_exit is not None]
    return Summary(
        status=status,
        rounds=len(rounds),
        metric=rounds[-1].metric if rounds else None,
        higher_is_better=rounds[-1].higher_is_better if rounds else True,
        final_score=_mean(r.score for r in final),
        best_score=best.score if best else None,
        best_round=best.round if best else None,
        score_by_tier=_means_by_name([r.score_by_tier for r in final], tier_of),
        score_by_exit=[sum(scores) / len(scores) for scores in zip(*exits, strict=True)] if exits else None,
        delivered_score=_mean(r.delivered_score for r in final),
        delivered_score_by_tier=delivered,
        worst_tier=worst,
        worst_tier_score=worst_score,
        last_score=last.score if last else None,
        last_delivered_score=last.delivered_score if last else None,
        delivered_devices=_most(r.delivered_devices for r in final),
        devices_without_model=_most(r.devices_without_model for r in final),
        devices_beyond_budget=_most(r.devices_beyond_budget for r in final),
        worst_device=last.worst_device if last else None,
        worst_device_score=last.worst_score if last else None,
        scored_devices=last.scored_devices if last else None,
        final_evaluations=len(final),
        personal_score=_mean(r.personal_score for r in personal),
        personal_score_by_tier=_means_by_name([r.personal_score_by_tier for r in personal], tier_of),
        personal_score_by_network=_means_by_name([r.personal_score_by_network for r in personal], {}),
        epsilon=privacy.epsilon if privacy else None,
        delta=privacy.delta if privacy else None,
        noised_releases=privacy.releases if privacy else None,
        **{name: sum(getattr(record, name) for record in rounds) for name in TRAFFIC},
        devices_by_outcome=dict(sorted(outcomes.items())),
        simulated_seconds=rounds[-1].simulated_seconds if rounds else 0.0,
        wall_seconds=sum(record.wall_seconds for record in rounds),
        error=error,
    )


def last_fifth(evaluated: Sequence[T]) -> Sequence[T]:
    """The last fifth of the evaluations, at least one: single evaluations swing, and their mean is a run's figure."""
    return evaluated[-max(1, round(len(evaluated) / 5)) :]


def global_model(run_dir: Path, config: Mapping[str, Any]) -> str:
    """Return what a run's global model is called, whose score is `score`; "" if all models stay on devices.

    If devices have models of their own beside it, it need not be as large as the largest of them. A method from outside
    is asked only where its module is imported, as it is during a run.
    """
    strategy = str(config.get("strategy"))
    kind = METHODS.get(strategy) or loaded_method(strategy)
    if kind is None or kind.scored_on_devices is OnDevices.scored_on_devices:
        return WHOLE
    return "global model" if (run_dir / "models").exists() else ""


def _means_by_name(
    of_rounds: Sequence[Mapping[str, float] | None], tier_of: Mapping[int, str]
) -> dict[str, float] | None:
    """The means by name, each over the rounds that have one; None where no round has any.

    Names of tiers come in the order of the fleet, others as rounds have them.
    """
    there = [by_name for by_name in of_rounds if by_name is not None]
    names = in_fleet_order((name for by_name in there for name in by_name), tier_of)
    means = {name: _mean(by_name.get(name) for by_name in there) for name in names}
    return {name: mean for name, mean in means.items() if mean is not None} if there else None


def in_fleet_order(tiers: Iterable[str], tier_of: Mapping[int, str]) -> list[str]:
    """Each tier once, as the fleet file has them: it numbers devices group after group.

    Args:
        tiers: those of a round stand as the fleet file has them, those of devices as these were asked.
        tier_of: the tiers of devices that trained or were to train. Where these stand in another order than `tiers`, a
            tier that none of them has comes last.
    """
    first = {tier_of[device]: device for device in sorted(tier_of, reverse=True)}
    names = list(dict.fromkeys(tiers))
    known = [first[tier] for tier in names if tier in first]
    return names if known == sorted(known) else sorted(names, key=lambda tier: first.get(tier, float("inf")))


def _most(values: Iterable[int | None]) -> int | None:
    """The largest of what is there."""
    return max((value for value in values if value is not None), default=None)


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean of what is there."""
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None
