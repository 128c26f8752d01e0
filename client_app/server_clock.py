"""A node's clock beside the server's: Flower refuses signatures from the future, and old ones."""

from __future__ import annotations

import http.client
import ssl
import time
from email.utils import parsedate_to_datetime
from pathlib import Path

# Beyond these Flower 1.42 refuses what a node signs (SYSTEM_TIME_TOLERANCE and TIMESTAMP_TOLERANCE).
MAX_AHEAD_SECONDS, MAX_BEHIND_SECONDS = 5.0, 300.0
TIMEOUT_SECONDS = 5.0
_NO_CHECK_TIME = 0x200000  # OpenSSL's X509_V_FLAG_NO_CHECK_TIME: a wrong clock must not hide behind the certificate


def clock_trouble(server: str, root_certificates: str | None, insecure: bool) -> str:
    """Return what is wrong with this machine's clock and how it is mended; "" if nothing is, or nobody can say."""
    try:
        ahead_seconds = seconds_ahead(server, root_certificates, insecure)
    except (OSError, ValueError, http.client.HTTPException):
        return ""  # Flower says in its own words that the server cannot be reached
    if -MAX_BEHIND_SECONDS <= ahead_seconds <= MAX_AHEAD_SECONDS:
        return ""
    word = "ahead of" if ahead_seconds > 0 else "behind"
    return (
        f"This machine's clock is {abs(ahead_seconds):.0f} s {word} the server's. Flower refuses nodes whose clocks "
        f"are more than {MAX_AHEAD_SECONDS:.0f} s ahead or {MAX_BEHIND_SECONDS / 60:.0f} min behind: this node stops. "
        f"`sudo timedatectl set-ntp true` mends it; where no time server is in reach: "
        f"`sudo date -u -s @{time.time() - ahead_seconds:.0f}`"
    )


def seconds_ahead(server: str, root_certificates: str | None, insecure: bool) -> float:
    """Return how far this clock is ahead of a server's, "host:port", by the date of its answer (to about a second).

    OSError, ValueError or HTTPException where it does not say.
    """
    host, _, port = server.rpartition(":")
    connection: http.client.HTTPConnection
    if insecure:
        connection = http.client.HTTPConnection(host, int(port), timeout=TIMEOUT_SECONDS)
    else:
        trust = ssl.create_default_context(cadata=Path(root_certificates).read_text() if root_certificates else None)
        trust.verify_flags |= ssl.VerifyFlags(_NO_CHECK_TIME)
        connection = http.client.HTTPSConnection(host, int(port), timeout=TIMEOUT_SECONDS, context=trust)
    try:
        before = time.time()
        connection.request("HEAD", "/")
        date = connection.getresponse().headers["Date"]
        if date is None:
            raise ValueError("the server gives no date")
        middle = (before + time.time()) / 2
        return middle - (parsedate_to_datetime(date).timestamp() + 0.5)  # the date is cut to whole seconds
    finally:
        connection.close()
