"""Runs in which nobody trains: how they end, and what they say of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from pathlib import Path

from typing_extensions import override

from wildflower.plugins.flower_log import log
from wildflower.rounds.asking import NOTHING_FITS
from wildflower.rounds.hooks import Round, RoundHook
from wildflower.server_app.config import RunConfig
from wildflower.server_app.run_folder import read_devices, read_rounds
from wildflower.server_app.units import bytes_text
from wildflower.strategies.method import Method
from wildflower.strategies.submodel import SubModelMethod

NO_PROGRESS_ROUNDS = 3  # in a row, after which something is wrong


class NoProgressError(RuntimeError):
    """A run that taught nothing, because no device trained. Its text is all there is to know: no frame tells more."""


class Progress(RoundHook):
    """Ends a run in which nobody trains.

    Attributes:
        trained: whether a device has trained in any round, also before a restart.
    """

    def __init__(self, run_dir: Path, config: RunConfig, method: Method) -> None:
        self._run_dir, self._config, self._method = run_dir, config, method
        self.trained = any(record.devices_replied for record in read_rounds(run_dir))
        self._idle_rounds = 0

    @override
    def at_end(self, round: Round) -> None:
        outcomes = [a.outcome for a in round.assignments]
        troubles = any(outcome.startswith(("failed", "refused")) for outcome in outcomes)
        replied = round.record["devices_replied"] > 0
        self.trained = self.trained or replied
        # Under a fleet nobody may have a link in this simulated minute; on hardware an empty round is trouble.
        empty = not replied and (troubles or not round.population.simulated)
        self._idle_rounds = self._idle_rounds + 1 if empty else 0
        if self._idle_rounds == NO_PROGRESS_ROUNDS:
            common = Counter(outcomes).most_common(1)
            last = f"{common[0][1]} of {len(outcomes)} {common[0][0]}" if common else "no device was free"
            raise NoProgressError(
                f"{self._idle_rounds} rounds in a row in which none trained; in round {round.number}, {last}"
            )
        if not self.trained and round.number == NO_PROGRESS_ROUNDS < self._config.rounds:
            why = why_nobody_trained(self._run_dir, self._config, self._method)
            log.warning("No device has trained in the first %s rounds: %s", round.number, why)

    def check_trained(self) -> None:
        """Raise NoProgressError where no device has trained in the whole run."""
        if not self.trained:
            why = why_nobody_trained(self._run_dir, self._config, self._method)
            raise NoProgressError(f"no device trained in any of {self._config.rounds} rounds: {why}")


def why_nobody_trained(run_dir: Path, config: RunConfig, method: Method) -> str:
    """Why no device of a run has trained so far, by its journal, and what would let some train."""
    outcomes: Counter[str] = Counter()
    others: Counter[str] = Counter()  # why devices were skipped for which something would fit
    memory_bytes = 0
    payload: dict[str, int | None] = {"down": 0, "up": 0}  # the largest that were seen; None: no limit
    for device in read_devices(run_dir):
        outcomes[device.outcome_word] += 1
        if device.outcome_word == "skipped" and device.outcome != NOTHING_FITS:
            others[device.outcome.partition(": ")[2]] += 1
        elif device.outcome_word == "skipped" and device.budget is not None:
            memory_bytes = max(memory_bytes, device.budget.memory_bytes)
            limits = {"down": device.budget.download_bytes, "up": device.budget.upload_bytes}
            payload = {way: _larger(payload[way], limit) for way, limit in limits.items()}
    if not outcomes:
        return "no device was asked"
    reasons = [", ".join(f"{count} {word}" for word, count in outcomes.most_common())]
    if others:
        [(why, count)] = others.most_common(1)
        reasons.append(
            f"{count} times {why}: try {more_of_each(config, method)}, or a strategy under which more devices train "
            "the same channels"
        )
    if outcomes["skipped"] > others.total():
        needed = method.cost(method.smallest_architecture)
        poor = memory_bytes < needed.peak_training_memory_bytes
        needs = {"down": needed.download_bytes, "up": needed.upload_bytes}
        slow = any(limit is not None and limit < needs[way] for way, limit in payload.items())
        reasons.append(
            f"the smallest model of {method.name()} over {method.family.name} needs "
            f"{bytes_text(needed.peak_training_memory_bytes)} of memory and {_ways(needs)}, "
            f"the largest budget seen was {bytes_text(memory_bytes)} of memory and {_ways(payload)}"
        )
        reasons.append(f"try {', or '.join(_remedies(config, method, poor=poor, slow=slow))}")
    if outcomes["late"]:
        deadline = f"deadline-seconds = {config.deadline_seconds:g}" if config.deadline_seconds else "any deadline"
        reasons.append(f"who is late misses {deadline}, or has a link that carries nothing")
    return "; ".join(reasons)


def _larger(one: int | None, other: int | None) -> int | None:
    """The larger of two limits, of which None is none."""
    return None if one is None or other is None else max(one, other)


def _ways(payload: Mapping[str, int | None]) -> str:
    """Such as "1.2 MB of weights down and 1.2 MB up"."""
    if set(payload.values()) == {None}:
        return "weights without limit"
    down, up = ("no limit" if limit is None else bytes_text(limit) for limit in (payload["down"], payload["up"]))
    return f"{down} of weights down and {up} up"


def goes_by_widths(config: RunConfig, method: Method) -> bool:
    """Return whether `widths` say what a method's candidates are.

    Levels, depths and members are the family's own, and some methods choose by exits or layers.
    """
    narrowest, candidates = min(config.widths), method.family.candidates
    if method.remedy is not None or candidates([narrowest]) == candidates([narrowest / 2]):
        return False
    return not isinstance(method, SubModelMethod) or set(method.candidates) <= set(candidates(config.widths))


def smaller_model(config: RunConfig, method: Method) -> str:
    """Return what makes the smallest model of a method smaller."""
    if method.remedy is not None:
        return method.remedy
    narrowest = method.family.candidates([min(config.widths)])[-1]
    if goes_by_widths(config, method) and method.smallest_architecture == narrowest:
        return f"a smaller width in widths = {config.to_dict()['widths']!r}"
    return "a smaller family or smaller family-arguments"


def more_of_each(config: RunConfig, method: Method) -> str:
    """Return what to change so that more devices of a round train the same sub-model, over which secure aggregation
    sums."""
    if goes_by_widths(config, method):
        fewer = f"fewer widths than widths = {config.to_dict()['widths']!r}"
    else:
        fewer = "fewer different models among the candidates"
    if config.fleet and config.devices_per_round >= config.devices:
        return fewer
    return f"{fewer}, or more devices-per-round than {config.devices_per_round}"


def smaller_batches(config: RunConfig, method: Method) -> list[str]:
    """Return what makes the smallest model need less memory in training: a smaller batch, or smaller parts of it."""
    training, found = method.settings.training, []
    if not training.accumulates and config.batch_size > 1:  # at small widths most of the memory is a batch's
        found.append(f"a smaller batch-size than {config.batch_size}")
    part = training.examples_at_once // 2
    if part > 1:  # batch norm cannot normalize a single example over a 1x1 map
        changed = copy(method)
        changed.settings = replace(method.settings, training=training.model_copy(update={"micro_batch_size": part}))
        now, then = (each.training_cost(method.smallest_architecture) for each in (method, changed))
        if then.peak_training_memory_bytes < now.peak_training_memory_bytes:
            found.append(f"micro-batch-size = {part}")
    return found


def _remedies(config: RunConfig, method: Method, *, poor: bool, slow: bool) -> list[str]:
    """What lets devices train that cannot afford the smallest model. Neither: no device had both at the same time."""
    remedies = []
    if poor or not (slow or config.budget.round_seconds):
        remedies.append(f"more memory in the fleet {config.fleet!r}" if config.fleet else "devices with more memory")
    if slow or not (poor or config.budget.round_seconds):
        if config.budget.transfer_seconds:
            remedies.append(f"a larger budget.transfer-seconds than {config.budget.transfer_seconds:g}")
        elif config.fleet:
            remedies.append(f"links that carry more in the fleet {config.fleet!r}, or a larger transfer there")
        else:
            remedies.append("a larger payload limit of the devices")
    if config.budget.round_seconds:
        remedies.append(f"a larger budget.round-seconds than {config.budget.round_seconds:g}")
    remedies.append(smaller_model(config, method))
    if poor:
        remedies += smaller_batches(config, method)
    if config.below_smallest == "skip" and method.traits(method.params).helps_below_smallest:
        remedies.append("below-smallest = 'smallest'")
    return remedies
