"""Asynchronous rounds against synchronous ones, a deadline and over-selection, on two fleets of unequal speeds.

python -m benchmarks.asynchronous.run [--jobs 2] [--seeds 1 2] [--methods NAME ...]
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan, nan
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from benchmarks.runs import rounds_of
from benchmarks.studies import Figures, Study, main
from benchmarks.tables import markdown
from wildflower.server_app.run_folder import read_devices

HERE = Path(__file__).resolve().parent


class Setting(NamedTuple):
    """A fleet and a method: how long its runs are in simulated seconds, and a deadline that about half the devices
    meet."""

    fleet: str
    method: str
    seconds: float
    deadline_seconds: float


SETTINGS = {
    "one model, speeds 20 to 1": Setting("benchmarks/time_budget/fleet.toml", "one-model", 150, 5.5),
    "HeteroFL, speeds 20 to 1": Setting("benchmarks/time_budget/fleet.toml", "heterofl", 150, 5.5),
    "one model, digits-demo": Setting("digits-demo", "one-model", 1.0, 0.012),
    "HeteroFL, digits-demo": Setting("digits-demo", "heterofl", 2, 0.035),
}
WAYS = {
    "synchronous": ["evaluate-every=1"],
    "deadline": ["evaluate-every=4"],  # of the setting
    "over-selection = 0.5": ["aggregation.over-selection=0.5", "evaluate-every=2"],
    "buffer = 5": ["buffer=5", "evaluate-every=5"],
}


def settings_of(setting: Setting, way: str) -> list[str]:
    """The settings of a row beside those of the experiment."""
    return [
        f"fleet={setting.fleet}",
        f"strategy={setting.method}",
        f"hooks=stop_after:StopAfter(seconds = {setting.seconds})",
        *([f"deadline-seconds={setting.deadline_seconds}"] if way == "deadline" else []),
        *WAYS[way],
    ]


ROWS = {f"{name}, {way}": settings_of(setting, way) for name, setting in SETTINGS.items() for way in WAYS}


def figures(folder: Path) -> dict:
    """Simulated seconds and accuracy of every evaluation, updates by tier, and how stale they were."""
    lines = rounds_of(folder)
    updates: dict[str, int] = {}
    for device in read_devices(folder):
        updates[device.tier] = updates.get(device.tier, 0) + (device.outcome == "trained")
    stale = [s for line in lines if (s := line["metrics"].get("staleness_mean")) is not None]
    most = [s for line in lines if (s := line["metrics"].get("staleness_max")) is not None]
    return {
        "curve": [[round(line["simulated_seconds"], 4), line["score"]] for line in lines if line["score"] is not None],
        "rounds": len(lines),
        "updates": dict(sorted(updates.items())),
        "staleness": [round(mean(stale), 2), max(most)] if stale else None,
    }


def at(curve: Sequence[Sequence[float]], seconds: float) -> float:
    """The accuracy of the last evaluation by a moment; NaN where there was none yet."""
    return next((score for when, score in reversed(curve) if when <= seconds), nan)


SHARES = (0.1, 0.25, 0.5, 1.0)  # of a run's simulated time, at which accuracies are compared


def table(_study: Study, results: dict[str, Figures]) -> str:
    """Accuracy over simulated time in percent, mean and standard deviation of the seeds, and how many updates."""
    rows = []
    for name, setting in SETTINGS.items():
        for way in WAYS:
            runs = list(results.get(f"{name}, {way}", {}).values())
            if len(runs) < 2:
                continue
            scores = [[100 * at(run["curve"], share * setting.seconds) for run in runs] for share in SHARES]
            cells = ["" if isnan(sum(of)) else f"{mean(of):.1f} ± {stdev(of):.1f}" for of in scores]
            updates = f"{mean(sum(run['updates'].values()) for run in runs):.0f}"
            lowest = f"{mean(min(run['updates'].values()) for run in runs):.0f}"
            stale = [run["staleness"] for run in runs if run["staleness"]]
            ages = f"{mean(s for s, _ in stale):.1f}, {max(s for _, s in stale):.0f}" if stale else ""
            rows.append([name, way, str(len(runs)), *cells, updates, lowest, ages])
    heads = ["", "rounds", "seeds", *(f"after {share:.0%}" for share in SHARES)]
    return markdown([*heads, "updates", "of the tier with the fewest", "staleness: mean, highest"], rows)


STUDY = Study(HERE / "table.toml", ROWS, figures=figures, table=table)

if __name__ == "__main__":
    main([STUDY], __doc__ or "")
