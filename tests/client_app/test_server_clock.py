"""A node whose clock is wrong is told so when it starts, before Flower refuses it without a word."""

import ssl
import subprocess
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.tls import self_signed
from wildflower.client_app.server_clock import clock_trouble


@pytest.fixture
def server():
    """A server whose clock is `offset` seconds behind this one's; it answers everything with 404, as the gate does."""

    class Answer(BaseHTTPRequestHandler):
        offset = 0.0

        def do_HEAD(self):
            self.send_response_only(404)
            self.send_header("Date", formatdate(time.time() - self.offset, usegmt=True))
            self.end_headers()

    found = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


def trouble(server, offset, certificate=None):
    server.RequestHandlerClass.offset = offset
    return clock_trouble(f"127.0.0.1:{server.server_port}", certificate, certificate is None)


@pytest.mark.thorough
@pytest.mark.parametrize("offset", [0, 3, -200])
def test_a_clock_that_flower_takes_is_not_told(server, offset):
    assert trouble(server, offset) == ""


@pytest.mark.thorough
@pytest.mark.parametrize(("offset", "words"), [(42, "42 s ahead of the server's"), (-400, "400 s behind the server's")])
def test_a_wrong_clock_is_told_with_the_command_that_mends_it(server, offset, words):
    told = trouble(server, offset)
    assert words in told or words.replace("42", "41") in told or words.replace("400", "401") in told
    assert "`sudo timedatectl set-ntp true`" in told
    right = int(told.rpartition("@")[2].rstrip("`"))
    assert right == pytest.approx(time.time() - offset, abs=2)


@pytest.mark.thorough
def test_a_certificate_that_is_not_valid_yet_does_not_hide_the_date(server, tmp_path):
    try:
        certificate, key = self_signed(tmp_path, days=-1)
    except subprocess.CalledProcessError:  # an OpenSSL that makes no expired ones
        certificate, key = self_signed(tmp_path, days=1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    assert "42 s ahead" in (told := trouble(server, 42, str(certificate))) or "41 s" in told
    assert trouble(server, 42, "/nowhere") == ""


def test_nobody_to_ask_is_no_trouble():
    assert clock_trouble("127.0.0.1:1", None, True) == ""
    assert clock_trouble("nowhere", None, True) == ""
