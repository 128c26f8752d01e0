"""How much memory this process holds, and how much one piece of work took."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch


class MemoryMeter:
    """Peak memory of a piece of work above what the process held before.

    On CUDA, PyTorch's allocator knows it. On Linux the kernel keeps a high-water mark that may be set back (Linux 4.0
    and newer); where that is not allowed, `now_bytes` samples are all there is.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)
            self._before = torch.cuda.memory_allocated(self._cuda)
            return
        self._marks = _reset_high_water_mark()
        self._before = self._largest = resident_bytes()

    def now_bytes(self) -> int:
        """What the work holds at this moment."""
        if self._cuda is not None:
            return max(0, torch.cuda.memory_allocated(self._cuda) - self._before)
        now = resident_bytes()
        self._largest = max(self._largest, now)
        return max(0, now - self._before)

    def peak_bytes(self) -> int:
        """The most that the work has held."""
        if self._cuda is not None:
            return max(0, torch.cuda.max_memory_allocated(self._cuda) - self._before)
        self.now_bytes()
        peak = _high_water_mark_bytes() if self._marks else self._largest
        return max(0, peak - self._before)


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(psutil.Process().memory_info().rss)


def _reset_high_water_mark() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _high_water_mark_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
