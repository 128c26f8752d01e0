"""Probe of this machine: RAM and CPUs within the limits of its container, CUDA, the kind of board."""

import os
import platform
import re
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from wildflower.devices.resource_report import MAX_KIND_LETTERS, DeviceReport
from wildflower.devices.validation import one_line

# Sensors that are not connected say things like -273 or 255 degrees.
MIN_CELSIUS, MAX_CELSIUS = -60.0, 200.0
# Bits of the firmware's word: the voltage is low; the clock is capped, slowed down, or at its soft limit of heat.
PI_THROTTLED_NOW = 0b1111

# NVIDIA's boards whose device tree does not say "Jetson" as their model name a chip in its place.
TEGRA_KINDS = {
    "nvidia,tegra210": "jetson-nano",
    "nvidia,tegra186": "jetson-tx2",
    "nvidia,tegra194": "jetson-xavier",
    "nvidia,tegra234": "jetson-orin",
}


def probe_machine(root: Path = Path("/")) -> DeviceReport:
    """Report what this process may use of this machine.

    Memory is the least of the host's RAM, of every control group around this process (versions 1 and 2) and of the
    limits on address space and data (`ulimit -v`, `-d`). What other processes hold, a SuperNode among them, is not
    available. Where a CUDA card with memory of its own is found, its memory is reported, as training happens there; a
    Jetson's GPU shares the RAM, so its RAM is reported. Links and speed are not measured here.

    Args:
        root: Where /proc, /sys and /dev are found; tests put trees of files there.

    Raises:
        ValueError: a limit of a control group is not what the kernel writes; names the file.
    """
    kind = board_kind(root)
    cuda = _cuda(kind, root)
    if cuda is not None and not cuda.shares_ram:
        total_bytes, available_bytes = cuda.total_bytes, cuda.free_bytes
    else:
        total_bytes, available_bytes = _ram(root)
    return DeviceReport(
        kind=kind,
        memory_total_bytes=total_bytes,
        memory_available_bytes=max(0, min(available_bytes, total_bytes)),
        accelerator=None if cuda is None else one_line(cuda.name),
        memory_is_ram=cuda is None or cuda.shares_ram,
        cpus=_cpus(root),
        temperature_celsius=_temperature(root),
        throttled=_throttled(root),
    )


def board_kind(root: Path = Path("/")) -> str:
    """Return the board by its device tree ("raspberry-pi-4", "jetson-orin-nano"), or else the processor ("x86-64")."""
    model = _device_tree(root, "model")
    for maker in ("Raspberry Pi", "NVIDIA Jetson"):
        if model.startswith(maker):
            name = re.sub(r"\s+(Rev|Model|Developer Kit|Engineering).*", "", model).removeprefix("NVIDIA ")
            return re.sub(r"[^a-z0-9]+", "-", name.lower())[:MAX_KIND_LETTERS].strip("-")
    compatible = _device_tree(root, "compatible").split("\0")
    for chip, kind in TEGRA_KINDS.items():
        if chip in compatible:
            return kind
    return platform.machine().lower().replace("_", "-") or "unknown"


def _device_tree(root: Path, name: str) -> str:
    """Return a text of the device tree, without the NUL at its end; empty where there is no device tree."""
    text = _read(root / "proc" / "device-tree" / name)
    return "" if text is None else text.rstrip("\0\n ")


def _read(path: Path) -> str | None:
    """Return the text of a file, None if it does not exist."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None


def _ram(root: Path) -> tuple[int, int]:
    """Return the bytes in all and free for this process."""
    host = psutil.virtual_memory()
    totals, available = [host.total], [host.available]
    for folder in control_groups(root, "memory"):
        limit = _limit(folder / "memory.max", folder / "memory.limit_in_bytes")
        if limit is None:
            continue
        totals.append(limit)
        used = _limit(folder / "memory.current", folder / "memory.usage_in_bytes") or 0
        available.append(limit - used + _reclaimable(folder))
    for limit_of, held in ((resource.RLIMIT_AS, "vms"), (resource.RLIMIT_DATA, "data")):
        soft, _ = resource.getrlimit(limit_of)
        if soft != resource.RLIM_INFINITY:
            totals.append(soft)
            # macOS does not say how much of a process is data.
            available.append(soft - getattr(psutil.Process().memory_info(), held, 0))
    return min(totals), min(available)


def _temperature(root: Path) -> float | None:
    """Degrees Celsius of the hottest thermal zone that can be read."""
    found = []
    for zone in sorted((root / "sys" / "class" / "thermal").glob("thermal_zone*")):
        with suppress(OSError, ValueError):  # a sensor that is switched off answers with an error
            found.append(int((zone / "temp").read_text()) / 1000)
    return max((celsius for celsius in found if MIN_CELSIUS < celsius < MAX_CELSIUS), default=None)


def _throttled(root: Path) -> bool | None:
    """Return whether the firmware of a Raspberry Pi or the kernel holds the processor back now."""
    # "soc" is "soc@107c000000" on a Raspberry Pi 5.
    for firmware in (root / "sys" / "devices" / "platform").glob("soc*/soc*:firmware/get_throttled"):
        with suppress(OSError, ValueError):
            return bool(int(firmware.read_text(), 16) & PI_THROTTLED_NOW)
    states = []
    for device in (root / "sys" / "class" / "thermal").glob("cooling_device*"):
        with suppress(OSError, ValueError):
            kind = (device / "type").read_text().strip().lower()
            if "cpufreq" in kind or kind == "processor":  # a fan that turns holds nothing back
                states.append(int((device / "cur_state").read_text()) > 0)
    return any(states) if states else None


def _limit(*paths: Path) -> int | None:
    """Return the number of bytes in the first of the files that exists; None if none exists or it says "max"."""
    for path in paths:
        text = _read(path)
        if text is None:
            continue
        if text.strip() == "max":
            return None
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"{path}: {text.strip()!r}: expected a number of bytes or 'max'") from None
    return None


def _reclaimable(folder: Path) -> int:
    """Return the bytes of file cache and kernel caches that count as used and that the kernel gives back on demand.

    These are the same kinds of memory that the kernel counts into its own MemAvailable. The code of libraries is in the
    active part, and so it would otherwise depend on who read a file first how much memory a container seems to have.
    """
    found: dict[str, int] = {}
    for line in (_read(folder / "memory.stat") or "").splitlines():
        key, _, value = line.partition(" ")
        if key.removeprefix("total_") in ("active_file", "inactive_file", "slab_reclaimable"):
            found[key] = int(value)
    # In version 1 the plain figures leave out the groups inside; version 2 has only the plain ones.
    return sum(found.get(f"total_{key}", value) for key, value in found.items() if not key.startswith("total_"))


def _cpus(root: Path) -> float:
    """CPUs that this process may use."""
    # macOS has no affinities.
    count: float = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count() or 1
    for folder in control_groups(root, "cpu"):
        text = _read(folder / "cpu.max")  # version 2: "50000 100000" or "max 100000"
        if text is None:
            quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
            if quota is None or period is None:
                continue
            text = f"{quota} {period}"
        words = text.split()
        if words[:1] in (["max"], ["-1"]):
            continue
        if len(words) != 2 or not all(word.isdecimal() and int(word) > 0 for word in words):
            raise ValueError(f"{folder}: CPU quota and period {text!r}: expected two numbers above 0")
        count = min(count, int(words[0]) / int(words[1]))
    return count


def control_groups(root: Path, controller: str) -> list[Path]:
    """Return the folders of this process's control groups that may limit `controller`, the outermost last.

    In a container the outermost visible group is the container's own, and /proc/self/cgroup may still name the host's
    path to it: the mount table says which part of that path the mounted folder stands for.
    """
    mounts = _control_group_mounts(root)
    folders = []
    for line in (_read(root / "proc" / "self" / "cgroup") or "").splitlines():
        number, controllers, group = line.split(":", 2)
        version2 = number == "0" and not controllers
        if not version2 and controller not in controllers.split(","):
            continue
        for mounted_group, mount_point, options in mounts:
            if (options is None) != version2 or (options is not None and controller not in options):
                continue
            top = root / mount_point.lstrip("/")
            outer = mounted_group.rstrip("/")
            inside = group[len(outer) :] if group == mounted_group or group.startswith(f"{outer}/") else group
            folder = top / inside.strip("/")
            folders += [level for level in (folder, *folder.parents) if level == top or top in level.parents]
    return folders


def _control_group_mounts(root: Path) -> list[tuple[str, str, list[str] | None]]:
    """(group that is mounted, where, controllers of version 1 or None for version 2) of every mounted hierarchy."""
    mounts: list[tuple[str, str, list[str] | None]] = []
    for line in (_read(root / "proc" / "self" / "mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        fields, (kind, _, options) = left.split(), right.split(" ", 2)
        if kind == "cgroup2":
            mounts.append((fields[3], fields[4], None))
        elif kind == "cgroup":
            mounts.append((fields[3], fields[4], options.split(",")))
    return mounts


@dataclass(frozen=True)
class _Cuda:
    name: str
    total_bytes: int
    free_bytes: int
    shares_ram: bool


def _cuda(kind: str, root: Path) -> _Cuda | None:
    """Return the current CUDA device, if there is one.

    torch takes seconds to import on a small board, so it is imported only where NVIDIA's driver is.
    """
    drivers = ("dev/nvidiactl", "dev/nvhost-ctrl-gpu", "dev/nvmap")
    if "torch" not in sys.modules and not any((root / driver).exists() for driver in drivers):
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    # An integrated GPU, like a Jetson's, has no memory of its own.
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    shares_ram = kind.startswith("jetson") or bool(properties.is_integrated)
    free_bytes, total_bytes = (0, 0) if shares_ram else torch.cuda.mem_get_info()
    return _Cuda(properties.name, total_bytes, free_bytes, shares_ram)
