"""Settings of glibc for freed tensors: a device short of memory wants others than a simulation's worker."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from malloc.h
RETURN_FROM_BYTES = 128 * 1024
MAX_KEPT_BYTES = 2**25  # the largest tensor that glibc can be told to keep
HEAP_FACTOR = 2.6  # what a process held at worst of a predicted peak under glibc's default (benchmarks/memory)


def return_freed_memory() -> bool:
    """Let glibc give tensors of 128 KiB and more back to the system as soon as they are freed.

    By default glibc raises that size to 32 MiB as a program runs and keeps most freed tensors in a heap that
    fragments: a training process then holds 1.6 times the bytes that are ever live, at worst `HEAP_FACTOR` times. The
    price is CPU time for fresh pages. Acts on the whole process, from now on. Returns False where the C library has no
    such setting.
    """
    return _mallopt(M_MMAP_THRESHOLD, RETURN_FROM_BYTES)


def keep_freed_memory() -> bool:
    """Let this process keep freed memory for the next batch instead of giving it back to the kernel each time.

    In a simulation's worker glibc's defaults gave back and took anew the activations of every batch: page faults were
    15 % of the CPU time of training (benchmarks/overhead). Returns False where the C library has no such setting.
    """
    return _mallopt(M_TRIM_THRESHOLD, 2**30) and _mallopt(M_MMAP_THRESHOLD, MAX_KEPT_BYTES)


def _mallopt(setting: int, value: int) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(setting, value))
