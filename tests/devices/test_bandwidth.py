import contextlib
import json
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from wildflower.devices import bandwidth
from wildflower.devices.bandwidth import (
    CHUNK_BYTES,
    MAX_BYTES,
    MAX_STREAMS,
    MIN_BYTES,
    SERVICE,
    Arrivals,
    BandwidthError,
    Measured,
    make_server,
    measure_links,
    read_token,
)

TOKEN = "a token of more than sixteen letters"
METADATA = (("authorization", f"Bearer {TOKEN}"),)


@pytest.fixture(scope="module")
def address():
    server, port = make_server("127.0.0.1:0", TOKEN, None, max_seconds=0.5)
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


@pytest.fixture
def channel(address):
    with grpc.insecure_channel(address) as made:
        yield made


def request(nbytes):
    return json.dumps({"bytes": nbytes}).encode()


def still_works(address):
    down, up = measure_links(address, TOKEN, None, nbytes=MIN_BYTES)
    return down.nbytes == up.nbytes == MIN_BYTES * 3 // 4


class Clock:
    def __init__(self, seconds):
        self.seconds = iter(seconds)

    def perf_counter(self):
        return next(self.seconds)


def arrived(total_bytes, chunks):
    arrivals = Arrivals(total_bytes)
    for nbytes in chunks:
        arrivals.add(nbytes)
    return arrivals


def test_a_stream_is_timed_behind_its_first_quarter(monkeypatch):
    monkeypatch.setattr(bandwidth, "time", Clock([10.0, 11.0, 11.5, 13.0]))
    found = arrived(700_000, [100_000, 100_000, 100_000, 50_000]).measured()
    assert found == Measured(150_000, 2.0)  # from the second chunk, where 175,000 bytes are passed
    assert found.mbit_per_s == pytest.approx(0.6)


@pytest.mark.parametrize("chunks", [[], [10], [100], [30, 0]], ids=["none", "too few", "all at once", "nothing after"])
def test_what_cannot_be_timed_is_none(chunks):
    assert arrived(100, chunks).measured() is None


@pytest.mark.parametrize(
    ("chunks", "nbytes"), [([], 4096), ([100], 4096), ([10_000, 10_000], 20_000), ([200_000], 200_000)]
)
def test_a_link_that_lets_no_quarter_pass_is_as_slow_as_what_came_in_all_the_time(chunks, nbytes):
    assert arrived(700_000, chunks).measured(over_seconds=2.0) == Measured(nbytes, 2.0)


def test_both_links_are_measured_with_the_bytes_that_were_asked(address):
    down, up = measure_links(address, TOKEN, None, nbytes=64 * CHUNK_BYTES)
    assert down.nbytes == up.nbytes == 48 * CHUNK_BYTES
    assert 1 < down.mbit_per_s < 1e6
    assert 1 < up.mbit_per_s < 1e6


def test_chunks_are_random(channel):
    chunks = list(channel.unary_stream(f"/{SERVICE}/Down")(request(MIN_BYTES), metadata=METADATA))
    assert [len(chunk) for chunk in chunks] == [MIN_BYTES // 16] * 16
    assert len(set(chunks)) == 16


def slow_link(port_to, bytes_per_second):
    """A relay that lets so many bytes through, each way; returns its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source, sink):
        free_at = time.monotonic()
        with contextlib.suppress(OSError):  # the client hangs up when it has what it wants
            while data := source.recv(4096):
                free_at = max(free_at, time.monotonic()) + len(data) / bytes_per_second
                time.sleep(max(0.0, free_at - time.monotonic()))
                sink.sendall(data)

    def serve():
        near, _ = listener.accept()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        far = socket.create_connection(("127.0.0.1", port_to))
        threading.Thread(target=pump, args=(near, far), daemon=True).start()
        pump(far, near)

    threading.Thread(target=serve, daemon=True).start()
    return listener.getsockname()[1]


@pytest.mark.thorough
def test_a_slow_link_is_seen(address):
    port = slow_link(int(address.rsplit(":", 1)[1]), 1_000_000)
    down, up = measure_links(f"127.0.0.1:{port}", TOKEN, None, nbytes=16 * CHUNK_BYTES)
    assert 1 < down.mbit_per_s < 12  # 8 Mbit/s, or less on a busy machine; without the slow link it is hundreds
    assert 1 < up.mbit_per_s < 12


# The link carries 0.16 Mbit/s, but the buffers on the way take the first bytes at once: with many of them an upload's
# figure is no more than a bound.
@pytest.mark.thorough
@pytest.mark.parametrize(("nbytes", "maximum"), [(MIN_BYTES, 0.6), (2**20, 3.0)])
def test_a_link_too_slow_for_what_was_asked_is_seen_all_the_same(address, nbytes, maximum, monkeypatch):
    monkeypatch.setattr(bandwidth, "MAX_SECONDS", 1.0)
    port = slow_link(int(address.rsplit(":", 1)[1]), 20_000)
    down, up = measure_links(f"127.0.0.1:{port}", TOKEN, None, nbytes=nbytes, seconds=0.5)
    assert 0.02 < down.mbit_per_s < 0.6
    assert 0.02 < up.mbit_per_s < maximum


@pytest.mark.thorough
@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer wrong"),), (("authorization", TOKEN),)])
def test_a_wrong_token_is_refused(channel, address, metadata):
    with pytest.raises(grpc.RpcError) as caught:
        list(channel.unary_stream(f"/{SERVICE}/Down")(request(MIN_BYTES), metadata=metadata))
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    with pytest.raises(grpc.RpcError) as caught:
        channel.stream_unary(f"/{SERVICE}/Up")(iter([request(MIN_BYTES)]), metadata=metadata)
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert still_works(address)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "asked",
    [b"", b"\xff\x00", b"[" * 10_000, b"{}", b"5", request(1), request(MAX_BYTES + 1), request(True), request(1e5)],
)
def test_what_nobody_may_ask_is_refused(channel, address, asked):
    with pytest.raises(grpc.RpcError) as caught:
        list(channel.unary_stream(f"/{SERVICE}/Down")(asked, metadata=METADATA))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert still_works(address)


def test_oversized_messages_and_surplus_bytes_are_refused(channel, address):
    up = channel.stream_unary(f"/{SERVICE}/Up")
    with pytest.raises(grpc.RpcError) as caught:
        up(iter([request(MIN_BYTES), bytes(CHUNK_BYTES + 1)]), metadata=METADATA)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(grpc.RpcError) as caught:
        up(iter([request(MIN_BYTES), *[bytes(CHUNK_BYTES)] * 9]), metadata=METADATA)
    assert "more bytes came than were announced" in caught.value.details()
    assert still_works(address)


@pytest.mark.thorough
def test_a_sender_that_stops_is_cut_off_and_no_more_than_so_many_are_served(channel, address):
    release = threading.Event()
    another = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])

    def stops():
        yield request(MIN_BYTES)
        release.wait()

    def begun():
        return channel.stream_unary(f"/{SERVICE}/Up").future(stops(), metadata=METADATA)

    calls = [begun() for _ in range(MAX_STREAMS)]
    # One too many is told so at once, unless the others have not all arrived yet: then one of them may be it.
    full, codes = grpc.StatusCode.RESOURCE_EXHAUSTED, set()
    while full not in codes:
        calls = [begun() if call.done() and call.code() is full else call for call in calls]
        assert not any(call.done() and call.code() is not full for call in calls)
        try:
            list(another.unary_stream(f"/{SERVICE}/Down")(request(MIN_BYTES), metadata=METADATA))
        except grpc.RpcError as error:
            codes.add(error.code())
    # They are told that their links are slow: less than a chunk in all the time.
    assert {json.loads(call.result())["nbytes"] for call in calls} == {MIN_BYTES // 16}
    release.set()
    another.close()
    assert still_works(address)


@pytest.mark.thorough
@pytest.mark.parametrize("metadata", [(), METADATA], ids=["no token", "token"])
def test_calls_that_never_ask_for_anything_are_ended(address, metadata):
    release = threading.Event()

    def silent():
        release.wait()
        yield b""

    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        down = channel.stream_stream(f"/{SERVICE}/Down")
        calls = [down(silent(), metadata=metadata, timeout=30) for _ in range(MAX_STREAMS)]
        codes = {call.code() for call in calls}
        release.set()
    assert codes == {grpc.StatusCode.CANCELLED if metadata else grpc.StatusCode.UNAUTHENTICATED}
    assert still_works(address)


def test_garbage_on_the_port_harms_nobody(address):
    host, port = address.split(":")
    for garbage in (
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(range(256)) * 64,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 999,
    ):
        with socket.create_connection((host, int(port))) as link:
            link.sendall(garbage)
    assert still_works(address)


def certificate(folder, name="localhost"):
    key, cert = folder / f"{name}.key", folder / f"{name}.crt"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "1",
    ]
    command += [
        "-keyout",
        str(key),
        "-out",
        str(cert),
        "-subj",
        f"/CN={name}",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
    ]
    subprocess.run(command, check=True, capture_output=True)
    return key.read_bytes(), cert.read_bytes()


@pytest.mark.thorough
def test_tls_with_the_right_authority_and_no_other(tmp_path):
    own, other = certificate(tmp_path), certificate(tmp_path, "other")
    server, port = make_server("127.0.0.1:0", TOKEN, own)
    server.start()
    try:
        down, _ = measure_links(f"127.0.0.1:{port}", TOKEN, own[1], nbytes=4 * CHUNK_BYTES)
        assert down.nbytes == 3 * CHUNK_BYTES
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bandwidth, "CONNECT_SECONDS", 0.3)
            with pytest.raises(BandwidthError, match="did not answer with the TLS certificate"):
                measure_links(f"127.0.0.1:{port}", TOKEN, other[1], nbytes=4 * CHUNK_BYTES)
            with pytest.raises(BandwidthError, match="did not answer without TLS"):
                measure_links(f"127.0.0.1:{port}", TOKEN, None, nbytes=4 * CHUNK_BYTES)
    finally:
        server.stop(0).wait()


def test_a_client_says_what_the_service_refused(address):
    with pytest.raises(BandwidthError, match=r"UNAUTHENTICATED: wrong or missing token") as caught:
        measure_links(address, TOKEN + "?", None, nbytes=4 * CHUNK_BYTES)
    assert caught.value.spent_bytes == 0


def test_no_more_is_taken_than_was_asked_for():
    sent = []

    def flood(stream, context):
        while context.is_active():
            sent.append(CHUNK_BYTES)
            yield bytes(CHUNK_BYTES)

    server = grpc.server(ThreadPoolExecutor(2))
    handler = grpc.method_handlers_generic_handler(SERVICE, {"Down": grpc.stream_stream_rpc_method_handler(flood)})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(BandwidthError, match=f"sent more than the {MIN_BYTES} bytes") as caught:
            measure_links(f"127.0.0.1:{port}", TOKEN, None, nbytes=MIN_BYTES)
    finally:
        server.stop(0).wait()
    assert MIN_BYTES < caught.value.spent_bytes <= MIN_BYTES + CHUNK_BYTES
    assert sum(sent) < 100 * MIN_BYTES  # what flow control lets travel ahead; in two seconds it would be thousands


@pytest.mark.parametrize("answer", [b"{", b"{}", b'{"nbytes": 0, "seconds": 1}', b'{"nbytes": 5, "seconds": NaN}'])
def test_a_service_that_answers_nonsense_is_refused(answer):
    with pytest.raises(ValueError):
        bandwidth._upload(lambda timeout: answer, Arrivals(MIN_BYTES))


def test_a_port_in_use_is_said(address):
    with pytest.raises(OSError, match="cannot listen at"):
        make_server(address, TOKEN, None)


def test_a_short_token_is_refused(tmp_path):
    (tmp_path / "token").write_text("short\n")
    with pytest.raises(ValueError, match="the token has 5 letters: at least 16"):
        read_token(tmp_path / "token")
    (tmp_path / "token").write_text(TOKEN + "\n")
    assert read_token(tmp_path / "token") == TOKEN
