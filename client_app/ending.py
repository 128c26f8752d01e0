"""Ends the process of a message for sure, whatever Flower's code in it waits for.

Flower starts a process for every message, and tells one whose run was stopped by raising SIGINT in it. The handler then
makes requests and waits for threads, in the middle of whatever the process was doing: one was seen to stay for ever.
On a device of 600 MB its 92 MB leave no room for work.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

LEAVE_SECONDS = 5  # after a signal that asks the process to end
ANSWERED_SECONDS = 300  # after the answer, which only goes to the SuperNode on the same machine


def is_messenger() -> bool:
    """Say whether Flower has started this process for one message."""
    return Path(sys.argv[0]).name == "flwr-clientapp"


@contextmanager
def ends_for_sure() -> Iterator[None]:
    """Around the work of a message: its process does not outlive the answer, or the exception, by much.

    From the beginning on a signal that asks the process to end ends it within `LEAVE_SECONDS`. The kernel does it
    (SIGALRM), so that no lock can be in the way. To be called by the main thread; other processes are left alone.
    """
    if not is_messenger():
        yield
        return
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        handler = signal.getsignal(number)
        if callable(handler):
            signal.signal(number, partial(_leave, handler))
    try:
        yield
    finally:
        left_seconds = signal.alarm(ANSWERED_SECONDS)
        if left_seconds:  # the process has been asked to end, which this exception may come from
            signal.alarm(left_seconds)


def _leave(handler: Callable[[int, FrameType | None], Any], number: int, frame: FrameType | None) -> None:
    signal.alarm(LEAVE_SECONDS)
    handler(number, frame)
