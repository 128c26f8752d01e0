"""The bandwidth probe: a small gRPC service beside the SuperLink, and the client that measures a link with it.

Flower downloads a model before any code of ours runs, so that transfers cannot be timed; this measures links by
themselves. Two streams of random bytes, because a network may compress or store what repeats. Whoever receives
measures: the client a download, the server an upload, from the end of the first quarter of the bytes on, when
connections have come up to speed and the buffers on the way are full. Where time is over before, the link is slow, and
what has come by then says how slow.
"""

import hmac
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import grpc
from pydantic import BaseModel, Field
from pydantic.dataclasses import dataclass

from wildflower.devices.checked import STRICT, Above0, checked
from wildflower.devices.resource_report import MIN_PROBE_BYTES
from wildflower.plugins.raised_as import raised_as

CHUNK_BYTES = 16 * 1024  # the most; 16 chunks of the smallest stream that is used are enough to see a slow link
CHUNKS = 16
MIN_BYTES, MAX_BYTES = MIN_PROBE_BYTES, 8 * 2**20  # of one stream
MAX_SECONDS = 5.0  # of one stream
MAX_STREAMS = 8  # at once; the next one is told to come again
MAX_CONNECTION_SECONDS = 60.0  # idle, or in all, until it takes no new streams
MIN_TOKEN_BYTES = 16
CONNECT_SECONDS = 3.0
SERVICE = "wildflower.Bandwidth"


class BandwidthError(RuntimeError):
    """A link that could not be measured; the text says why. `spent_bytes` have travelled for it."""

    def __init__(self, text: str, spent_bytes: int = 0) -> None:
        super().__init__(text)
        self.spent_bytes = spent_bytes


@dataclass(config=STRICT, frozen=True)
class Measured:
    """The bytes that arrived of a stream behind its first quarter, and how long that took; checked when it is made."""

    nbytes: Annotated[int, Field(ge=1, lt=2**63)]
    seconds: Above0

    @property
    def mbit_per_s(self) -> float:
        """10^6 bits per second."""
        return self.nbytes * 8 / 1e6 / self.seconds


class _Request(BaseModel):
    model_config = STRICT
    bytes: Annotated[int, Field(ge=MIN_BYTES, le=MAX_BYTES)]


class Arrivals:
    """The bytes that have arrived of a stream, and when."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self.received_bytes = self._mark_bytes = 0
        self._now_seconds = 0.0
        self._mark_seconds: float | None = None

    def add(self, nbytes: int) -> None:
        """So many bytes have come now."""
        self._now_seconds = time.perf_counter()
        self.received_bytes += nbytes
        if self._mark_seconds is None and self.received_bytes * 4 >= self._total_bytes:
            self._mark_bytes, self._mark_seconds = self.received_bytes, self._now_seconds

    def measured(self, over_seconds: float | None = None) -> Measured | None:
        """Return the link's speed; None where the stream has ended within its first quarter, or came all at one moment.

        Args:
            over_seconds: the stream has not ended, but its time, which was so long. A link that has not let a quarter
                pass by then is as slow as all that came in all the time, or a smallest chunk where nothing did.
        """
        if self._mark_seconds is not None and self.received_bytes > self._mark_bytes:
            if self._now_seconds <= self._mark_seconds:
                return None
            return Measured(self.received_bytes - self._mark_bytes, self._now_seconds - self._mark_seconds)
        if over_seconds is None:
            return None
        return Measured(max(self.received_bytes, MIN_BYTES // CHUNKS), over_seconds)


def random_chunks(nbytes: int, until: float) -> Iterator[bytes]:
    """Random bytes in chunks, until there are `nbytes` of them or time.monotonic() has come to `until`."""
    size = min(CHUNK_BYTES, nbytes // CHUNKS)
    while nbytes > 0 and time.monotonic() < until:
        yield os.urandom(min(nbytes, size))
        nbytes -= size


def read_token(path: Path) -> str:
    """Return the token that a file holds; ValueError where it is short enough to be guessed."""
    token = path.read_text(encoding="ascii").strip()
    if len(token) < MIN_TOKEN_BYTES:
        raise ValueError(f"{path}: the token has {len(token)} letters: at least {MIN_TOKEN_BYTES} are needed")
    return token


# The service ---------------------------------------------------------------------------------------------------------


def make_server(
    address: str, token: str, certificate: tuple[bytes, bytes] | None, *, max_seconds: float = MAX_SECONDS
) -> tuple[grpc.Server, int]:
    """Return a service that is not started yet, and its port (which the system chooses for port 0).

    Args:
        address: "host:port" to listen at.
        token: what every client must say it knows.
        certificate: private key and certificate chain, as PEM; None: without TLS.
        max_seconds: after which a stream is cut off, whatever the client does.

    Raises:
        OSError: the address cannot be listened at.
    """
    server = grpc.server(
        ThreadPoolExecutor(MAX_STREAMS, thread_name_prefix="bandwidth"),
        maximum_concurrent_rpcs=MAX_STREAMS,
        options=[
            ("grpc.max_receive_message_length", CHUNK_BYTES),
            ("grpc.max_concurrent_streams", MAX_STREAMS),
            ("grpc.max_metadata_size", 4096),
            ("grpc.max_connection_idle_ms", int(MAX_CONNECTION_SECONDS * 1000)),
            ("grpc.max_connection_age_ms", int(MAX_CONNECTION_SECONDS * 1000)),
            ("grpc.max_connection_age_grace_ms", int(2000 * MAX_SECONDS)),  # then streams under way end with it
            ("grpc.so_reuseport", 0),
        ],
    )
    service = _Service(token, max_seconds)
    handlers = {
        # A stream of one request: of a call with a single one gRPC waits for it by itself, for ever.
        "Down": grpc.stream_stream_rpc_method_handler(service.down),
        "Up": grpc.stream_unary_rpc_method_handler(service.up),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    with raised_as(OSError, f"cannot listen at {address}: ", RuntimeError):  # grpc's own, without the system's reason
        if certificate is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, grpc.ssl_server_credentials([certificate]))
    return server, port


class _Service:
    def __init__(self, token: str, max_seconds: float) -> None:
        self._token, self._max_seconds = f"Bearer {token}".encode(), max_seconds

    def down(self, stream: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Answer a message {"bytes": n} with that many random bytes."""
        with self._bounded(context):
            nbytes = _asked(next(stream, b""), context)
            yield from random_chunks(nbytes, time.monotonic() + self._max_seconds)

    def up(self, stream: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """Answer a message {"bytes": n} and that many bytes with {"nbytes": counted, "seconds": it took}."""
        with self._bounded(context):
            nbytes = _asked(next(stream, b""), context)
            arrivals, surplus = Arrivals(nbytes), threading.Event()

            def receive() -> None:
                left_bytes = nbytes
                with suppress(grpc.RpcError):  # the call is over
                    for chunk in stream:
                        left_bytes -= len(chunk)
                        if left_bytes < 0:
                            return surplus.set()
                        arrivals.add(len(chunk))

            # A stream that stalls cannot be left, so that it is read beside.
            reader = threading.Thread(target=receive, daemon=True)
            reader.start()
            reader.join(self._max_seconds)
            if surplus.is_set():
                return context.abort(grpc.StatusCode.INVALID_ARGUMENT, "more bytes came than were announced")
            result = arrivals.measured(self._max_seconds if reader.is_alive() else None)
            if result is None:
                return context.abort(grpc.StatusCode.INVALID_ARGUMENT, "too little arrived to be measured")
            return json.dumps(asdict(result)).encode()

    @contextmanager
    def _bounded(self, context: grpc.ServicerContext) -> Iterator[None]:
        """Refuse whoever does not know the token; end the call when its time is over, even if nothing moves."""
        given = dict(context.invocation_metadata()).get("authorization", "")
        if not hmac.compare_digest(str(given).encode(), self._token):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong or missing token")
        # A second more: streams end by themselves, this is for a peer that has stopped to read or to send.
        timer = threading.Timer(self._max_seconds + 1.0, context.cancel)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _asked(request: bytes, context: grpc.ServicerContext) -> int:
    """Return the number of bytes that a request asks for, within what anyone may ask."""
    try:
        return checked(_Request, json.loads(request), "bandwidth request").bytes
    except (ValueError, RecursionError) as error:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error)[:200])
        raise


# The client ----------------------------------------------------------------------------------------------------------


def measure_links(
    address: str, token: str, ca: bytes | None, *, nbytes: int, seconds: float = 2.0
) -> tuple[Measured, Measured]:
    """Measure the link down and the link up with `nbytes` each, cut off after `seconds` each.

    Args:
        address: "host:port" of the service.
        token: the service's.
        ca: certificate of the authority that signed the service's, as PEM; None: without TLS.
        nbytes: from `MIN_BYTES` to `MAX_BYTES`.

    Raises:
        BandwidthError: the service cannot be reached, refuses, or sends nonsense.
    """
    if not MIN_BYTES <= nbytes <= MAX_BYTES:
        raise ValueError(f"nbytes = {nbytes}: must be from {MIN_BYTES} to {MAX_BYTES}")
    options: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", CHUNK_BYTES),
        ("grpc.enable_http_proxy", 0),  # the way to a proxy is not the link
        ("grpc.enable_retries", 0),
    ]
    if ca is None:
        channel = grpc.insecure_channel(address, options)
    else:
        channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(ca), options)
    metadata = (("authorization", f"Bearer {token}"),)
    request = json.dumps({"bytes": nbytes}).encode()
    came, went = Arrivals(nbytes), Arrivals(nbytes)
    with channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=CONNECT_SECONDS)
        except grpc.FutureTimeoutError:
            tls = "without TLS" if ca is None else "with the TLS certificate it was given"
            raise BandwidthError(f"{address} did not answer {tls} within {CONNECT_SECONDS:g} s") from None
        try:
            call = channel.stream_stream(f"/{SERVICE}/Down")(iter([request]), metadata=metadata, timeout=seconds)
            down = _download(call, nbytes, came, seconds)
            stream = _uploaded(request, nbytes, went, seconds)
            up = _upload(partial(channel.stream_unary(f"/{SERVICE}/Up"), stream, metadata=metadata), went)
        except (grpc.RpcError, ValueError) as error:
            why = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.RpcError) else error
            raise BandwidthError(f"{address}: {why}", came.received_bytes + went.received_bytes) from None
    return down, up


def _download(call: Any, nbytes: int, came: Arrivals, seconds: float) -> Measured:
    """Measure the link down; ValueError where the stream ended before it could be measured, or did not end."""
    over_seconds = None
    try:
        for chunk in call:
            came.add(len(chunk))
            if came.received_bytes > nbytes:
                call.cancel()
                raise ValueError(f"the service sent more than the {nbytes} bytes that it was asked for")
    except grpc.RpcError as error:
        if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
        over_seconds = seconds
    result = came.measured(over_seconds)
    if result is None:
        raise ValueError("too few bytes came, or all at one moment")
    return result


def _uploaded(request: bytes, nbytes: int, went: Arrivals, seconds: float) -> Iterator[bytes]:
    """Yield what is sent up."""
    yield request
    for chunk in random_chunks(nbytes, time.monotonic() + seconds):
        went.add(len(chunk))
        yield chunk


def _upload(call: Callable[..., bytes], went: Arrivals) -> Measured:
    """Measure the link up, by the server's answer; ValueError where it sends nonsense."""
    longest_seconds = MAX_SECONDS + CONNECT_SECONDS
    try:
        answer = call(timeout=longest_seconds)
    except grpc.RpcError as error:
        if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
        # Not even the answer came, behind what was still on its way: no faster than all that the link has taken.
        return Measured(max(went.received_bytes, MIN_BYTES // CHUNKS), longest_seconds)
    return checked(Measured, json.loads(answer), "bandwidth answer")
