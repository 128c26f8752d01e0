"""The time until the last round of a run, by its plan."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from wildflower.server_app.units import counted, seconds_text

if TYPE_CHECKING:
    from wildflower.cli.plan import Plan
    from wildflower.server_app.config import RunConfig


def round_seconds(plan: Plan, config: RunConfig) -> float | None:
    """Return the expected time of a round: that of the slowest of the devices that are drawn, or the deadline.

    None where nobody has measured links and speeds, or where no device gets a model. Devices are drawn without
    replacement from all that get a model, and each that was planned stands for as many as its tier has.
    """
    looked_at = [device.tier for device in plan.devices]
    times = sorted(
        (device.seconds, plan.counts[device.tier] / looked_at.count(device.tier))
        for device in plan.devices
        if device.parameters
    )
    if not times or not any(seconds for seconds, _ in times):
        return None
    total, below, expected, least = sum(count for _, count in times), 1e-9, 0.0, 0.0  # counts are rounded fractions
    drawn = min(config.devices_per_round, round(total))
    for seconds, count in times:
        below += count
        # The chance that all that are drawn are among those that are at most as slow.
        chance = min(1.0, math.exp(_log_ways(below, drawn) - _log_ways(total, drawn))) if below >= drawn else 0.0
        if chance > least:
            limited = min(seconds, config.deadline_seconds) if config.deadline_seconds else seconds
            expected += (chance - least) * limited
            least = chance
    return expected


def _log_ways(devices: float, drawn: int) -> float:
    """Return the logarithm of the number of ways to draw some of the devices."""
    return math.lgamma(devices + 1) - math.lgamma(devices - drawn + 1) - math.lgamma(drawn + 1)


def hours_text(plan: Plan, config: RunConfig) -> str:
    """Return the time that all rounds take, in a sentence; "" where that is not known.

    Waiting for devices outside their hours comes on top, and so does what the server computes. Under `buffer` no round
    waits for its slowest device.
    """
    seconds = None if config.buffer else round_seconds(plan, config)
    if seconds is None:
        return ""
    if math.isinf(seconds):
        return "A round never ends: a device that may be drawn has a link of 0 Mbit/s (set deadline-seconds)"
    rounds = counted(config.rounds, "round")
    each = f"in each {seconds_text(seconds)} for its slowest device"
    return f"{rounds}: about {seconds_text(config.rounds * seconds)}; {each}"
