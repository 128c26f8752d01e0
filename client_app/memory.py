"""How much memory this process holds, and how much one piece of work took."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import psutil
import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h


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


def keep_freed_memory() -> None:
    """Let this process keep freed memory for the next batch instead of giving it back to the kernel each time.

    In a simulation's worker glibc's defaults gave back and took anew the activations of every batch: page faults were
    15 % of the CPU time of training. C libraries other than glibc have no such settings and are left as they are.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_TRIM_THRESHOLD, 2**30)
        libc.mallopt(M_MMAP_THRESHOLD, 2**25)  # the most that glibc takes


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
