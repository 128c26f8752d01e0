"""An HTTP server that neither many clients nor slow ones can hold."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from typing_extensions import override

MAX_AT_ONCE, CONNECTION_SECONDS = 16, 30.0


class BoundedServer(ThreadingHTTPServer):
    """Serves so many connections at once, each for so long in all; a further one is closed at once."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._at_once = threading.BoundedSemaphore(MAX_AT_ONCE)
        super().__init__(address, handler)

    @override
    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._at_once.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started now
            self._at_once.release()
            raise

    @override
    def process_request_thread(self, request: Any, client_address: Any) -> None:
        # Who sends or reads a byte at a time would keep all others out. TLS takes the request over: a copy is ended.
        try:
            with request.dup() as copy:
                ending = threading.Timer(CONNECTION_SECONDS, _end, [copy])
                ending.start()
                try:
                    super().process_request_thread(request, client_address)
                finally:
                    ending.cancel()
        finally:
            self._at_once.release()


def _end(connection: socket.socket) -> None:
    with suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)
