"""Flower's retries of a request, which go on where a connection is closed under TLS as where a plain one is.

A busy SuperLink may close a connection before its TLS handshake is over, or after. Flower sends a request again whose
connection was lost, but Flower 1.42 does so without TLS only: with TLS the error's text names it, Flower takes the
lost connection for a server that cannot be trusted, gives up, and the run or the node ends.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flwr.supercore.retry import RetryInvoker


def retry_closed_connections(retries: RetryInvoker) -> RetryInvoker:
    """Return the same retries, which no longer give up where the server closes a connection without saying why.

    A certificate of another authority and every other error of TLS end them at once, as before.
    """
    flowers = retries.should_giveup

    def gives_up(error: Exception) -> bool:
        return not _closed(error) and flowers is not None and flowers(error)

    retries.should_giveup = gives_up
    return retries


def _closed(error: BaseException | None) -> bool:
    """Return whether what an error came from is a TLS connection that the other side has closed."""
    while error is not None:
        if isinstance(error, ssl.SSLZeroReturnError | ssl.SSLEOFError):
            return True
        error = error.__cause__ or error.__context__
    return False
