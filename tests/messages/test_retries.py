"""A request whose TLS connection the server closes is sent again; a certificate that is not trusted ends it."""

import socket
import ssl
import threading

import httpx
import pytest
from flwr.superlink.grid.http_grid import HttpGrid

from tests.tls import self_signed
from wildflower.messages.retries import retry_closed_connections


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return self_signed(tmp_path_factory.mktemp("tls"))


class ClosingServer:
    """Closes every second connection during its handshake, the first one too, and answers one request on the others."""

    def __init__(self, certificate, key):
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.connections = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            plain, _ = self._listening.accept()
            self.connections += 1
            with plain:
                if self.connections % 2:
                    plain.recv(2**16)  # the client's first word, which gets no answer
                    continue
                try:
                    with self._context.wrap_socket(plain, server_side=True) as connection:
                        connection.recv(2**16)
                        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                except OSError:
                    pass  # the client went first


def grid_to(server, certificate):
    grid = HttpGrid(server.address, root_certificates=certificate.read_bytes(), token="a token")
    waits = []
    grid._retry_invoker.wait_function = waits.append
    return grid, waits


def test_flower_gives_up_where_a_connection_under_tls_is_closed(certificate):
    """Where this fails, Flower does better by now and `wildflower.messages.retries` is not needed any more."""
    grid, waits = grid_to(ClosingServer(*certificate), certificate[0])
    with pytest.raises(httpx.ConnectError, match="EOF"):
        grid.get_nodes()
    assert not waits


def test_a_request_whose_connection_is_closed_is_sent_again(certificate):
    server = ClosingServer(*certificate)
    grid, waits = grid_to(server, certificate[0])
    retry_closed_connections(grid._retry_invoker)
    for _ in range(3):
        assert list(grid.get_nodes()) == []
    assert len(waits) == 3
    assert server.connections == 6


def test_a_certificate_of_another_authority_ends_it_at_once(certificate, tmp_path):
    server = ClosingServer(*self_signed(tmp_path))
    server.connections = 1  # the first one gets its handshake
    grid, waits = grid_to(server, certificate[0])
    retry_closed_connections(grid._retry_invoker)
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        grid.get_nodes()
    assert not waits


@pytest.mark.parametrize("status", [500, 503])
def test_answers_are_treated_as_by_flower(certificate, status):
    grid, _ = grid_to(ClosingServer(*certificate), certificate[0])
    request = httpx.Request("POST", "https://server/v1/runtime/get-nodes")
    error = httpx.HTTPStatusError("", request=request, response=httpx.Response(status, request=request))
    assert retry_closed_connections(grid._retry_invoker).should_giveup(error) == (status == 500)
