import ctypes

import pytest

from wildflower.models.allocator import return_freed_memory


@pytest.fixture(autouse=True)
def _no_freed_memory_is_kept():
    """What earlier tests freed would serve allocations that a test measures, without the process growing."""
    return_freed_memory()
    ctypes.CDLL(None).malloc_trim(0)
