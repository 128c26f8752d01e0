"""The settings that runs of this folder have in common: a small network on real or simulated nodes, with equal data."""

from __future__ import annotations

from typing import Any


def small_run(devices: int, rounds: int) -> dict[str, Any]:
    """Return the settings of a run in which all devices take part in every round, scored after the last one."""
    return {
        "family": "lenet5",
        "strategy": "fedavg",
        "partition": "iid",
        "fleet": "",
        "devices": devices,
        "devices-per-round": devices,
        "rounds": rounds,
        "evaluate-every": rounds,
        "evaluate-tiers": False,
    }
