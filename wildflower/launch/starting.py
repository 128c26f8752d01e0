"""The start of the command's processes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading_modules() -> Iterator[None]:
    """Switch garbage collection off for a `with` block that imports modules; afterwards it passes over what is there.

    Modules are never garbage. Collections while torch is loaded take half a second together, and the first one
    afterwards would take two tenths.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
