"""The records of a round for the journal (docs/run-folder.md)."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from wildflower.messages.tensor_sets import nbytes
from wildflower.rounds.hooks import Round
from wildflower.rounds.requests import Assignment, Orders, Work, by_device
from wildflower.rounds.scores import Evaluation, Personal
from wildflower.strategies.pricing import fits
from wildflower.strategies.statistics import TakeStatistics

# Of a round, as far as the server works; a method may name parts of its own beside them.
PARTS = ("assign", "payload", "absorb", "finish", "evaluate")
# Of a round, by what it travels for: how often one evaluates is no part of what training takes. First questions and the
# exchanges about masks are training's. What comes back of scoring are a few numbers, which are not counted.
TRAFFIC = (
    *("training_bytes_down", "training_bytes_up"),
    *("statistics_bytes_down", "statistics_bytes_up"),
    "scoring_bytes_down",
)
# What the line of a round says of its evaluations as they say it.
OF_EVALUATION = (
    *("score", "loss", "score_by_tier", "score_by_exit", "accuracy_by_class", "score_by_device"),
    *("worst_device", "worst_score", "scored_devices"),
)
OF_PERSONAL = ("score", "score_by_tier", "score_by_device", "score_by_network", "devices", "failed")


def count_work(traffic: Counter[str], work: Work) -> None:
    """Add the bytes of work that is done to a round's `TRAFFIC`.

    Under a fleet the late ones, which the clock has timed, do not train, but they too are sent their weights.
    """
    for a in work.assignments:
        if a.node is not None or a.timing is not None:
            purpose = "statistics" if isinstance(a.task.client_step, TakeStatistics) else "training"
            traffic[f"{purpose}_bytes_down"] += work.bytes_down(a)
            traffic[f"{purpose}_bytes_up"] += work.bytes_up(a) if a.outcome == "trained" else 0


def count_scoring(traffic: Counter[str], orders: Orders) -> None:
    """Add the bytes of models that devices were sent to score, which travel as they are, whatever the wire."""
    for a in orders.assignments:
        if a.node is not None:
            traffic["scoring_bytes_down"] += nbytes(orders.groups[a.group].sent) + a.frozen.nbytes


def round_record(round: Round, evaluation: Evaluation | None, personal: Personal | None) -> dict[str, Any]:
    """One line of rounds.jsonl. Utilisation is the mean over the devices that trained, each of its own budget.

    A device is below the smallest where it got nothing, or got what it cannot afford: a strategy does neither to a
    device that can afford any of its architectures.
    Devices are counted, not orders: one counts as trained that did any of its orders, else by its first. Of the orders
    that a device did, the largest memory and the sum of the payloads count, of the link that is used more.
    """
    work, settings, delivered = round.asked, round.settings, evaluation.delivered if evaluation else None
    privacy = settings.privacy
    trained = by_device(a for a in work.assignments if a.outcome == "trained")
    first = [orders[0] for orders in by_device(work.assignments).values()]
    outcomes = Counter(a.outcome.split(":")[0] for a in first if a.device not in trained)
    memory = [
        max(a.task.cost.peak_training_memory_bytes for a in orders) / orders[0].budget.memory_bytes
        for orders in trained.values()
        if orders[0].budget.memory_bytes
    ]
    link = [share for orders in trained.values() if (share := _link_share(orders)) is not None]
    return {
        "round": work.round,
        "strategy": round.method.name(),
        "task": settings.task_name,
        "metric": settings.metric.name,
        "higher_is_better": settings.metric.scale.higher_is_better,
        **{name: getattr(evaluation, name, None) for name in OF_EVALUATION},
        "delivered_score": delivered.score if delivered else None,
        "delivered_score_by_tier": delivered.score_by_tier if delivered else None,
        "delivered_devices": delivered.devices if delivered else None,
        "devices_without_model": delivered.without if delivered else None,
        "devices_beyond_budget": delivered.beyond if delivered else None,
        **{f"personal_{name}": getattr(personal, name, None) for name in OF_PERSONAL},
        "epsilon": privacy.account.epsilon() if privacy else None,
        "delta": privacy.delta if privacy else None,
        "noised_releases": len(privacy.account.releases) if privacy else None,
        "devices_sampled": len(first),
        "devices_replied": len(trained),
        "devices_failed": outcomes["failed"] + outcomes["late"],
        "devices_refused": outcomes["refused"],
        "devices_bounded": len({a.device for a in work.assignments if a.update is not None and a.update.bounded}),
        "devices_state_lost": len({a.device for a in work.assignments if a.update is not None and a.update.state_lost}),
        "devices_below_smallest": sum(a.given is None or not fits(a.given.cost, a.budget) for a in first),
        **{key: round.traffic[key] for key in TRAFFIC},
        "memory_utilisation": sum(memory) / len(memory) if memory else None,
        "bandwidth_utilisation": sum(link) / len(link) if link else None,
        "distinct_architectures": len({a.task.architecture for orders in trained.values() for a in orders}),
        "simulated_seconds": round.population.now_seconds,
        "wall_seconds": time.perf_counter() - round.started,
        "server_seconds": dict.fromkeys(PARTS, 0.0) | round.method.stopwatch.seconds,
        "metrics": dict(round.metrics),
        "server_peak_rss_bytes": peak_rss_bytes(),
    }


def _link_share(orders: Sequence[Assignment]) -> float | None:
    """The larger of the shares that a device's orders take of its links' budgets; None where neither has a limit."""
    budget = orders[0].budget
    ways = [
        (sum(a.task.cost.download_bytes for a in orders), budget.download_bytes),
        (sum(a.task.cost.upload_bytes for a in orders), budget.upload_bytes),
    ]
    return max((used / limit for used, limit in ways if limit), default=None)


def device_record(round_number: int, a: Assignment) -> dict[str, Any]:
    """One line of devices.jsonl, of one order; None for what a device that did not train cannot have."""
    update, given = a.update, a.given
    return {
        "device": a.device,
        "node": a.node,
        "round": round_number,
        "tier": a.tier,
        "architecture": given.architecture.to_json() if given else None,
        "parameters": given.cost.parameters if given else None,
        "download_bytes": given.cost.download_bytes if given else None,
        "upload_bytes": given.cost.upload_bytes if given else None,
        "budget": {
            "memory_bytes": a.budget.memory_bytes,
            "download_bytes": a.budget.download_bytes,
            "upload_bytes": a.budget.upload_bytes,
            "deadline_seconds": a.budget.deadline_seconds,
        },
        "predicted_memory_bytes": given.cost.peak_training_memory_bytes if given else None,
        "training_flops": given.cost.training_flops if given else None,
        "measured_memory_bytes": update.measured_memory_bytes if update else None,
        "seconds": update.seconds if update else None,
        "at_once": update.at_once if update else 1,
        "simulated_seconds": a.simulated_seconds if a.timing and math.isfinite(a.simulated_seconds) else None,
        "examples": update.examples if update else None,
        "loss": update.loss if update else None,
        "bounded": update.bounded if update else False,
        "outcome": a.outcome,
    }


def peak_rss_bytes() -> int:
    """The most memory this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
