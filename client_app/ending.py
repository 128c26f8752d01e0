"""Ends the process of a message for sure, whatever Flower's code in it waits for.

Flower starts a process for every message, and tells one whose run was stopped by raising SIGINT in it. The handler then
makes requests and waits for threads, in the middle of whatever the process was doing: one was seen to stay for ever.
On a device of 600 MB its 92 MB leave no room for work.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

LEAVE_SECONDS = 5  # after a signal that asks the process to end
ANSWERED_SECONDS = 300  # after the answer, which only goes to the SuperNode on the same machine


def is_messenger() -> bool:
    """Whether Flower has started this process for one message."""
    return Path(sys.argv[0]).name == "flwr-clientapp"


def watch_signals() -> None:
    """From now on a signal that asks this process to end ends it within `LEAVE_SECONDS`; called by the main thread.

    The kernel does it (SIGALRM), so that no lock can be in the way.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        handler = signal.getsignal(number)
        if callable(handler):
            signal.signal(number, partial(_leave, handler))


def _leave(handler: Callable[[int, FrameType | None], Any], number: int, frame: FrameType | None) -> None:
    signal.alarm(LEAVE_SECONDS)
    handler(number, frame)


def leave_soon() -> None:
    """The answer is made: what is left to do takes seconds."""
    signal.alarm(ANSWERED_SECONDS)
