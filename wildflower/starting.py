"""How the processes of the command start."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading_modules() -> Iterator[None]:
    """For the time of a `with` block that imports modules, no garbage is looked for, and not among them afterwards.

    Modules stay. To go through torch's again and again while they are loaded takes half a second, and the first
    collection afterwards two tenths.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
