"""Admission of a node by the server, and the end of a node that is let in no more: in words, with exit codes.

Flower answers a node whose key was revoked as one that was killed and comes back before its lease has ended, and ends
both at once with the exit code 1, so that whatever starts the node again tries for ever. Here a node waits for the end
of that lease, and one that is refused all the same ends with a code at which systemd does not start it again.

While a node waits or is at work, it says to systemd's watchdog that it is alive.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from flwr.supercore.retry import RetryInvoker

# Of sysexits.h. The units of deploy/ name the first one.
REFUSED = 77
UNREACHABLE = 69
NO_MORE = 75  # of a node at work, or whose clock is wrong: started again, it is let in or learns that it is refused

# Flower's lease of a node that was killed is over a minute after its last heartbeat.
LEASE_SECONDS = 75.0
WAIT_SECONDS = 15.0
HOLD = "WILDFLOWER_REFUSED_SECONDS"
"""Variable of the environment: how long a refused node waits before it ends, where it is started again in any case."""

NO_LONGER = (
    "the server takes this node's signature no more: its key was revoked, this machine's clock is wrong, or the server "
    "was started anew without its database. A revoked device needs a new key (deploy/certs --add-node NAME)"
)
UNKNOWN = (
    "the server refuses this node's key: it was never enrolled, it was revoked, or another machine uses it. "
    "deploy/enroll registers keys, and takes no revoked one again: such a device needs a new key "
    "(deploy/certs --add-node NAME)"
)


def tell_watchdog() -> None:
    """Say to systemd that this service is alive; nothing where systemd has not asked for that."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            # A name in the abstract namespace is written with @.
            notify.sendto(b"WATCHDOG=1", f"\0{address[1:]}" if address.startswith("@") else address)


def status_of(error: BaseException | None) -> int | None:
    """Return the HTTP status that a request was answered with; None where it was not answered."""
    return getattr(getattr(error, "response", None), "status_code", None)


def end(ends: list[int], code: int, why: str) -> NoReturn:
    """End the node, whose main thread is another one: say why, note the code to end with, and stop it in order."""
    print(f"ERROR: {why}", file=sys.stderr, flush=True)
    ends.append(code)
    os.kill(os.getpid(), signal.SIGTERM)
    raise SystemExit(code)


def waiting_for_lease(
    activate: Callable[..., Any], ends: list[int], sleep: Callable[[float], None] = time.sleep
) -> Callable[..., Any]:
    """Return Flower's request to be let in, which waits for the end of a lease, and ends a node that is refused.

    ends: takes the code with which the node is to end.
    """

    def activate_or_end(*arguments: Any) -> Any:
        for tried in range(round(LEASE_SECONDS / WAIT_SECONDS) + 1):
            try:
                return activate(*arguments)
            except Exception as error:
                if status_of(error) != 412:
                    raise
            if tried == 0:
                print(
                    f"WARNING: the server does not let this node in. If it was killed a moment ago, the server holds "
                    f"its place until the lease ends: this node tries for {LEASE_SECONDS:g} s",
                    file=sys.stderr,
                    flush=True,
                )
            if tried < round(LEASE_SECONDS / WAIT_SECONDS):
                tell_watchdog()
                sleep(WAIT_SECONDS)
        if hold := float(os.environ.get(HOLD, "0")):
            print(f"ERROR: {UNKNOWN}. This node tries again in {hold:g} s", file=sys.stderr, flush=True)
            sleep(hold)
        end(ends, REFUSED, UNKNOWN)

    return activate_or_end


def noticing(retries: RetryInvoker, ends: list[int]) -> RetryInvoker:
    """Let retries of requests note a key that was revoked, and say to the watchdog that the node still tries."""
    flowers = retries.should_giveup

    def gives_up(error: Exception) -> bool:
        tell_watchdog()
        if status_of(error) == 401:
            note_revoked(ends)
        return flowers is not None and flowers(error)

    retries.should_giveup = gives_up
    return retries


def note_revoked(ends: list[int]) -> None:
    """Say once that the server takes this node's signature no more; Flower then ends the node as by Ctrl-C."""
    if not ends:
        ends.append(NO_MORE)
        print(f"ERROR: {NO_LONGER}", file=sys.stderr, flush=True)


def leaving_in_words(leave: Callable[..., NoReturn], server: str, ends: list[int]) -> Callable[..., NoReturn]:
    """Return Flower's exit of a node that could not connect, with a sentence and a code where no server answered."""

    def leave_in_words(*arguments: Any, **options: Any) -> NoReturn:
        error = sys.exception()
        if status_of(error) is not None:
            leave(*arguments, **options)
        end(
            ends,
            UNREACHABLE,
            f"the server {server} cannot be reached: {error}. Is it running, is this its address, and is "
            "--root-certificates the file of its authority?",
        )

    return leave_in_words
