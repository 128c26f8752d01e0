"""The conditions of a device's owner in the node config, against what is measured before each message."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import psutil
from pydantic.dataclasses import dataclass as checked_dataclass

from wildflower.devices.checked import STRICT, AtLeast0, Whole, checked, save
from wildflower.devices.hours import DAY_SECONDS, seconds_until
from wildflower.devices.node_config import NodeConfig
from wildflower.devices.resource_report import DeviceReport

USE_FILE = "use.json"
AGAIN_SECONDS = 300.0  # after which it is looked again whether a device is charging, idle, cool or at another network
BUSY_PERCENT, LOOK_SECONDS = 30.0, 0.5  # of all CPUs, so long before a message: a device that is busier is not idle
LONGEST_STEP_BACK = timedelta(days=2)  # of a clock; one that was further ahead was wrong then
MODEMS = ("wwan", "ppp", "rmnet")  # how network interfaces over a mobile network begin


@dataclass(frozen=True)
class Rest:
    """The reason why a device takes no part now, and in how many seconds it is worth asking it again."""

    why: str
    seconds: float


@checked_dataclass(config=STRICT, frozen=True)
class Use:
    """The work of a device in a month, such as "2026-11", and on a day, such as "2026-11-29", of its own time."""

    month: str
    day: str
    month_bytes: Whole = 0
    day_seconds: AtLeast0 = 0.0

    @classmethod
    def load(cls, folder: Path, now: datetime) -> Use:
        """Return what a state folder holds of this month and day; a file that is damaged is worth no more than none.

        A clock that goes back, as that of a board without a battery does, gives no new day: up to two days the day of
        before goes on.
        """
        new = cls(f"{now:%Y-%m}", f"{now:%Y-%m-%d}")
        try:
            kept = checked(cls, json.loads((folder / USE_FILE).read_text()), USE_FILE)
            ahead = datetime.fromisoformat(kept.day) - datetime.fromisoformat(new.day)
        except (OSError, ValueError):
            return new
        if timedelta(0) < ahead <= LONGEST_STEP_BACK:
            return kept
        return cls(
            new.month,
            new.day,
            kept.month_bytes if kept.month == new.month else 0,
            kept.day_seconds if kept.day == new.day else 0.0,
        )


def has_limits(owner: NodeConfig) -> bool:
    """Return whether an owner bounds what a device does in a day or month; else nothing is written of it."""
    return owner.max_bytes_per_month is not None or owner.max_minutes_per_day is not None


def note_use(folder: Path, nbytes: int, seconds: float, now: datetime) -> None:
    """Add to what a device has done: the weights that came and went, and how long it has worked."""
    use = Use.load(folder, now)
    save(Use(use.month, use.day, use.month_bytes + nbytes, use.day_seconds + seconds), folder / USE_FILE)


def rest_of(
    owner: NodeConfig, report: DeviceReport, folder: Path, now: datetime, root: Path = Path("/")
) -> Rest | None:
    """Return why a device takes no part now; None where it does.

    What cannot be measured keeps nobody out: without a battery it counts as charging, without a sensor as cool.

    Args:
        owner: whose conditions must all hold.
        report: of this machine now.
        folder: the device's state folder.
        now: in the device's own time.
        root: where /proc is found.
    """
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    today_seconds = (now - midnight).total_seconds()
    if owner.hours and (left := seconds_until(owner.hours, today_seconds)):
        return Rest(f"hours = {owner.hours}, and it is {now:%H:%M} there", left)
    use = Use.load(folder, now)
    if owner.max_minutes_per_day is not None and use.day_seconds >= 60 * owner.max_minutes_per_day:
        why = f"it has worked for {use.day_seconds / 60:.0f} of max-minutes-per-day = {owner.max_minutes_per_day:g}"
        return Rest(why, DAY_SECONDS - today_seconds)
    if owner.max_bytes_per_month is not None and use.month_bytes >= owner.max_bytes_per_month:
        why = f"{use.month_bytes} bytes have travelled of max-bytes-per-month = {owner.max_bytes_per_month}"
        return Rest(why, DAY_SECONDS - today_seconds)
    celsius = report.temperature_celsius
    if owner.max_temperature is not None and celsius is not None and celsius > owner.max_temperature:
        return Rest(f"it has {celsius:.0f} °C, above max-temperature = {owner.max_temperature:g}", AGAIN_SECONDS)
    if owner.charging and not _charging():
        return Rest("it runs on its battery, and its owner wants it charging", AGAIN_SECONDS)
    if owner.unmetered and (network := _metered(root)):
        return Rest(f"its network {network} is metered, and its owner wants it unmetered", AGAIN_SECONDS)
    if owner.idle and (percent := psutil.cpu_percent(LOOK_SECONDS)) > BUSY_PERCENT:
        return Rest(f"its CPUs are in use by {percent:.0f} %, and its owner wants it idle", AGAIN_SECONDS)
    return None


def _charging() -> bool:
    try:
        battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    except OSError:  # of a kernel that knows of no power supplies
        return True
    return battery is None or battery.power_plugged is not False


def _metered(root: Path) -> str:
    """Return the network interface of the default route where it is metered; "" where it is not, or nobody says."""
    try:
        routes = [line.split() for line in (root / "proc" / "net" / "route").read_text().splitlines()[1:]]
    except OSError:
        return ""
    interface = next((fields[0] for fields in routes if len(fields) > 1 and fields[1] == "00000000"), "")
    if interface.startswith(MODEMS):
        return interface
    if not interface or (manager := shutil.which("nmcli")) is None:
        return ""
    command = [manager, "-g", "GENERAL.METERED", "device", "show", interface]
    english = os.environ | {"LC_ALL": "C"}  # or a board in Munich would say "ja"
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False, env=english).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return interface if told.startswith("yes") else ""
