"""The report in sentences: what happened, whether that is good, and what to try next."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from wildflower.server_app.activity import MISSED, Activity
from wildflower.server_app.label_spread import Labels
from wildflower.server_app.pages import Block, blocks
from wildflower.server_app.run_records import RoundRecord, Summary
from wildflower.server_app.summary import last_fifth
from wildflower.server_app.units import bytes_text, counted, percent, score_format, seconds_text

BIG_GAP = 0.1  # between tiers, of scores that are shares
STILL_RISING = 0.01  # from the second to last fifth of the evaluations to the last one, likewise
MANY_MISSED = 0.1  # of all trainings


def baseline_of(summary: Summary, labels: Labels | None) -> tuple[str, float] | None:
    """Return what a score is compared with, and its value: the accuracy of always answering the commonest class."""
    if labels is None or summary.metric != "accuracy":
        return None
    by_class = [sum(counts) for counts in zip(*labels.counts, strict=True)]
    return ("always the commonest class", max(by_class) / sum(by_class)) if sum(by_class) else None


def in_short(
    config: Mapping[str, Any],
    rounds: Sequence[RoundRecord],
    summary: Summary,
    activity: Activity,
    baseline: tuple[str, float] | None,
) -> list[Block]:
    """Return the answers to the three questions that come first."""
    if not rounds:
        return []
    good = _is_it_good(summary, baseline)
    return [
        blocks.points("What happened", _what_happened(config, summary, activity)),
        *([blocks.points("Is it good?", good)] if good else []),
        blocks.points("What to try next", _what_next(config, rounds, summary, activity)),
    ]


def _what_happened(config: Mapping[str, Any], summary: Summary, activity: Activity) -> list[str]:
    outcomes = summary.devices_by_outcome
    missed = sum(outcomes.get(word, 0) for word in MISSED)
    told = [
        f"{counted(len(activity.asked), 'device')} learned {config['task']} with {config['strategy']} in "
        f"{counted(summary.rounds, 'round')}: {counted(outcomes.get('trained', 0), 'training')}, "
        f"{f'{missed:,} missed' if missed else 'none missed'}."
    ]
    both = summary.training_bytes_down + summary.training_bytes_up
    time = f"It took {seconds_text(summary.wall_seconds)} on this machine"
    if config.get("fleet"):
        time += f" and {seconds_text(summary.simulated_seconds)} on the clock of the simulated devices"
    return [*told, f"{time}, and {bytes_text(both)} of training travelled."]


def _is_it_good(summary: Summary, baseline: tuple[str, float] | None) -> list[str]:
    scale, text = summary.scale, score_format(summary.scale)
    figure = summary.figure
    if figure is None:
        return []
    of = "The final model" if summary.delivered_score is None else "The model that a device would be given now"
    told = f"{of} has {scale.label} {text(figure)}"
    if summary.delivered_score is not None:
        told += " on average over all devices"
    sentences = [f"{told}."]
    if baseline is not None:
        name, value = baseline
        better = "more" if scale.rank(figure) > scale.rank(value) else "no more"
        sentences.append(f"That is {better} than the baseline: {name} would have {text(value)}.")
    by_tier = summary.delivered_score_by_tier or {}
    if len(by_tier) > 1 and summary.worst_tier is not None:
        best = max(by_tier, key=lambda tier: scale.rank(by_tier[tier]))
        sentences.append(
            f"Devices of tier {best} get the best models ({text(by_tier[best])}), those of {summary.worst_tier} the "
            "worst."
            if summary.tiers_differ
            else "Devices of all tiers get equally good models."
        )
    if summary.devices_without_model:
        sentences.append(f"{counted(summary.devices_without_model, 'device')} get no model at all, and count so.")
    if summary.devices_beyond_budget:
        beyond = counted(summary.devices_beyond_budget, "device")
        sentences.append(f"It does not count beside other methods: {beyond} would be given more than they afford.")
    return sentences


def _what_next(
    config: Mapping[str, Any], rounds: Sequence[RoundRecord], summary: Summary, activity: Activity
) -> list[str]:
    told = []
    if summary.status != "finished":
        told.append("Go on with this run: --set resume=true with its run-name.")
    outcomes = summary.devices_by_outcome
    missed, asked = sum(outcomes.get(word, 0) for word in MISSED), sum(outcomes.values())
    if asked and missed / asked > MANY_MISSED and activity.reasons:
        [(reason, _)] = activity.reasons.most_common(1)
        told.append(f"{percent(round(missed / asked, 2))} of the trainings were missed, most often so: {reason}")
    if _is_rising(rounds):
        told.append(f"The score was still rising at the end: try more rounds (rounds = {2 * len(rounds)}).")
    if (best := _best_before_it_fell(rounds)) is not None:
        told.append(
            f"The score was {score_format(best.scale)(best.figure or 0.0)} in round {best.round}, and the loss has "
            "more than doubled since: try a smaller learning-rate, or fewer local-epochs."
        )
    by_tier = summary.delivered_score_by_tier or {}
    worst = summary.worst_tier
    if summary.scale.is_share and worst in by_tier and max(by_tier.values()) - by_tier[worst] > BIG_GAP:
        if config.get("deliver") == "largest":
            told.append('Give every device the best model that fits it and not the largest: deliver = "best".')
        told.append(
            f"Give devices of tier {worst} more memory, or compare with one model that all devices can train: strategy "
            '= "one-model".'
        )
    told.append("One seed tells little: wildflower sweep EXPERIMENT.toml --seeds 1-3 repeats the run with three.")
    return told


def _is_rising(rounds: Sequence[RoundRecord]) -> bool:
    """Return whether the last fifth of the evaluations is clearly better than the fifth before."""
    scored = [r.figure for r in rounds if r.figure is not None]
    last = last_fifth(scored) if scored else []
    before = scored[-2 * len(last) : -len(last)] if last else []
    if not before or not rounds[-1].scale.is_share:
        return False
    return fmean(last) - fmean(before) > STILL_RISING


def _best_before_it_fell(rounds: Sequence[RoundRecord]) -> RoundRecord | None:
    """Return the best round where the score has clearly fallen since, and the loss has more than doubled; else None."""
    scored = [r for r in rounds if r.figure is not None and r.loss is not None]
    if not scored or not scored[-1].scale.is_share:
        return None
    best, last = max(scored, key=lambda r: r.figure or 0.0), last_fifth(scored)
    fallen = (best.figure or 0.0) - fmean(r.figure or 0.0 for r in last) > BIG_GAP
    return best if fallen and fmean(r.loss or 0.0 for r in last) > 2 * (best.loss or 0.0) else None
