"""The machine that a benchmark runs on."""

import platform
from pathlib import Path


def cpu_model() -> str:
    """The CPU's name where the kernel tells it, or else its architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
