"""Make a process's memory follow its tensors: what a device needs so that a predicted peak is also the measured one."""

from __future__ import annotations

import ctypes

M_MMAP_THRESHOLD = -3  # from malloc.h
RETURN_FROM_BYTES = 128 * 1024


def return_freed_memory() -> bool:
    """Let glibc give tensors of 128 KiB and more back to the system as soon as they are freed.

    By default glibc raises that size to 32 MiB as a program runs and keeps most freed tensors in a heap that
    fragments: a training process then holds 1.6 times the bytes that are ever live, at worst 2.6 times
    (benchmarks/memory). The price is CPU time for fresh pages, so a device short of memory wants this and a simulation
    does not. Acts on the whole process, from now on. Returns False where the C library has no such setting.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, RETURN_FROM_BYTES))
