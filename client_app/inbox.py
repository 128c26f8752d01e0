"""The inbox of a worker of one or several runs: training messages of several runs come out together.

Each link has a thread that reads it, so that a server can send while the worker is busy with other runs.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from wildflower.client_app import frames
from wildflower.plugins.flower_log import log

Received = tuple[dict[str, Any], list[bytes]]  # a message's header and arrays
LEAST_PATIENCE, MOST_PATIENCE = 0.1, 30.0  # seconds


def messages_of(links: Sequence[socket.socket]) -> Iterator[dict[socket.socket, Received]]:
    """Yield what is to be done next, as long as there are links: a message, or a training message of several runs each.

    A run's training message waits for the others' as long as the last ones took, but not longer than `MOST_PATIENCE`.
    So runs that are in step stay so, and one that trains no more, or later, costs the others little. Whoever empties
    what is yielded lets the messages go.
    """
    inbox: queue.SimpleQueue[tuple[socket.socket, Received | None]] = queue.SimpleQueue()
    for link in links:
        threading.Thread(target=_read, args=(link, inbox), daemon=True).start()
    going, patience, until = set(links), LEAST_PATIENCE, 0.0
    held: dict[socket.socket, Received] = {}
    while going:
        try:
            link, received = inbox.get(timeout=max(0.0, until - time.monotonic()) if held else None)
        except queue.Empty:
            late = True
        else:
            late = False
            if received is None:
                going.discard(link)
                held.pop(link, None)  # nobody waits for it any more
            elif received[0].get("kind") != "train":
                by_itself = {link: received}
                del received
                yield by_itself
            else:
                until = until if held else time.monotonic() + patience
                held[link] = received
                del received
        if held and (going <= held.keys() or late):
            together, held = held, {}
            started = time.monotonic()
            yield together
            del together
            patience = min(MOST_PATIENCE, max(LEAST_PATIENCE, time.monotonic() - started))


def _read(link: socket.socket, inbox: queue.SimpleQueue[tuple[socket.socket, Received | None]]) -> None:
    """Put all that comes into the inbox, and None at the end."""
    try:
        while True:
            inbox.put((link, frames.receive(link)))
    except Exception as error:
        if not isinstance(error, OSError | EOFError):
            log.error("A worker cannot read what it is asked: %s", error)
        with suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)  # not closed: what is still sent on it must not reach another file
        inbox.put((link, None))
