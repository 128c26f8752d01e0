"""The end of the command's processes."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Sequence


def run_and_leave(main: Callable[[], object]) -> None:
    """Call what ends with SystemExit, and end this process with its code, in place of freeing every object first.

    With torch loaded that takes Python half a second, and the system frees the memory anyway. Everything that is
    registered with `atexit` from now on is called before.
    """
    ended: list[int] = []
    atexit.register(_leave, ended)  # functions are called in the reverse order
    try:
        main()
    except SystemExit as ending:
        if isinstance(ending.code, int | None):  # a text is still to be printed
            ended.append(ending.code or 0)
        raise


def _leave(ended: Sequence[int]) -> None:
    """End with the code, if there is one."""
    if not ended:
        return
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # it was closed before this process began
                stream.flush()
    except (OSError, ValueError):  # whoever read the output has gone, which Python itself tells
        return
    os._exit(ended[0])
