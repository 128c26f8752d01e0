"""The memory of this process: how much it holds, how much one piece of work took, and a limit that it cannot pass."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from torch import nn

# What work takes beside its tensors: the stack of every thread, and what libraries keep for themselves.
LIBRARY_BYTES = 32 * 2**20
# oneDNN writes machine code for every convolution and size of batch, into buffers of 256 KiB of which it touches a
# few pages. Measured: 1.1 to 2.4 MiB per convolution in networks of 8 to 120 of them, with a short last batch.
CODE_BYTES = 3 * 2**20
# What libraries touch of all that, and what the heap grows by beside tensors, which alone are predicted. Measured: at
# most 1.1 MB in networks of 3 to 8 convolutions; 1 to 5.2 MB with 20, 1.6 to 5.7 with 36, 4.5 to 15 with 155, the most
# where layers have few channels, whose code is long.
TOUCHED_BYTES, TOUCHED_CODE_BYTES = 4 * 2**20, 128 * 2**10
# PyTorch's allocator for CUDA takes segments of 20 MiB for tensors of 1 MiB and more, and libraries take workspaces.
SEGMENTS_BYTES = 64 * 2**20
# What allocators say that were refused memory. torch has an exception of its own on CUDA only.
NO_MEMORY = ("can't allocate memory", "cannot allocate memory", "out of memory", "bad_alloc", "can't start new thread")
# What oneDNN says when it gets none for its code or its scratchpad; a "primitive descriptor" is another trouble.
NO_PRIMITIVE = ("could not create a primitive", "could not execute a primitive")


class MemoryMeter:
    """Peak memory of a piece of work above what the process held before.

    On CUDA, PyTorch's allocator knows it. On Linux the kernel keeps a high-water mark that may be set back (Linux 4.0
    and newer); where that is not allowed, `now_bytes` samples are all there is. Pages of files do not count: the code
    of PyTorch, tens of megabytes, is read in when it first runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)
            self._before = torch.cuda.memory_allocated(self._cuda)
            return
        self._marks = _reset_high_water_mark()
        self._before = self._largest = resident_bytes()
        self._files_before = _status_bytes("RssFile")

    def now_bytes(self) -> int:
        """Return what the work holds at this moment."""
        if self._cuda is not None:
            return max(0, torch.cuda.memory_allocated(self._cuda) - self._before)
        now = resident_bytes()
        self._largest = max(self._largest, now)
        return max(0, now - self._before - self._files_bytes())

    def peak_bytes(self) -> int:
        """Return the most that the work has held."""
        if self._cuda is not None:
            return max(0, torch.cuda.max_memory_allocated(self._cuda) - self._before)
        self.now_bytes()
        peak = _status_bytes("VmHWM") if self._marks else self._largest
        return max(0, peak - self._before - self._files_bytes())

    def _files_bytes(self) -> int:
        """Pages of files that were read in since."""
        return max(0, _status_bytes("RssFile") - self._files_before)


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(psutil.Process().memory_info().rss)


def own_bytes() -> int:
    """Memory that the system gets back when this process ends: what it shares with no other."""
    try:
        return int(psutil.Process().memory_full_info().uss)
    except (psutil.AccessDenied, AttributeError, NotImplementedError):  # not on every kernel
        return 0


def _reset_high_water_mark() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status_bytes(key: str) -> int:
    """Return a figure of /proc/self/status; 0 where the kernel does not tell it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":")), 0)


@contextmanager
def memory_limit(limit_bytes: int | None, device: torch.device, *models: nn.Module) -> Iterator[None]:
    """Refuse memory beyond `limit_bytes` more than is held now, for the time of a `with` block.

    On the CPU the kernel refuses (RLIMIT_DATA, which counts what a process may write and not, as RLIMIT_AS does, what
    it has only reserved), on CUDA PyTorch's allocator does. What then fails is one allocation: `is_out_of_memory`
    tells. The stacks of threads, `LIBRARY_BYTES` and `CODE_BYTES` for every convolution of `models`, those that compute
    meanwhile, come on top; on CUDA `SEGMENTS_BYTES` do. None: no limit. A limit within a limit cannot pass it.
    """
    if limit_bytes is None:
        yield
        return
    if device.type == "cuda":
        allowed_bytes = torch.cuda.memory_reserved(device) + limit_bytes + SEGMENTS_BYTES
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        before = torch.cuda.get_per_process_memory_fraction(device)
        torch.cuda.set_per_process_memory_fraction(min(before, allowed_bytes / total_bytes), device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(before, device)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    stack_bytes = 8 * 2**20 if stack == resource.RLIM_INFINITY else stack
    beside_bytes = torch.get_num_threads() * stack_bytes + LIBRARY_BYTES + _convolutions(*models) * CODE_BYTES
    allowed_bytes = _status_bytes("VmData") + limit_bytes + beside_bytes
    for bound in (soft, hard):
        if bound != resource.RLIM_INFINITY:
            allowed_bytes = min(allowed_bytes, bound)
    resource.setrlimit(resource.RLIMIT_DATA, (allowed_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def touched_bytes(model: nn.Module) -> int:
    """Return what training a model may touch beside its tensors, and is no overrun."""
    return TOUCHED_BYTES + _convolutions(model) * TOUCHED_CODE_BYTES


def _convolutions(*models: nn.Module) -> int:
    return sum(isinstance(part, nn.modules.conv._ConvNd) for model in models for part in model.modules())


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an exception says that memory was refused."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    said = str(error).lower()
    return isinstance(error, RuntimeError) and (
        any(words in said for words in NO_MEMORY) or said.split("\n")[0].endswith(NO_PRIMITIVE)
    )
