"""Devices that enroll keys of their own with a one-time token, and keys that expire."""

import http.client
import os
import runpy
import socket
import ssl
import subprocess
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from flwr.proto.control_pb2 import ListNodesResponse, UnregisterNodeRequest
from flwr.proto.node_pb2 import NodeInfo

from tests.deploy.test_scripts import (  # noqa: F401  fixtures among them
    DEPLOY,
    enroll,
    kits,
    own_secrets,
    pytestmark,
    secrets,
    superlink,
)
from wildflower.cli import bounded_server

NOW = datetime(2026, 11, 30, tzinfo=UTC)


@pytest.fixture(scope="module")
def program():
    return runpy.run_path(str(DEPLOY / "enrollment"))


@pytest.fixture
def kit(own_secrets):  # noqa: F811
    own_secrets.chmod(0o755)
    code, text = kits(own_secrets, "--count", 2, "--token-days", 7, "--enrollment", "fl.example:9200")
    assert code == 0, text
    assert "Run deploy/enrollment while they are installed" in text
    return own_secrets / "kits" / "device-0"


def key_of(folder: Path, name: str = "mine") -> str:
    command = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(folder / name)]
    subprocess.run(command, check=True)
    return (folder / f"{name}.pub").read_text()


def body_of(kit: Path, key: str) -> bytes:
    return ((kit / "enrollment.token").read_text() + key).encode()


def test_a_kit_with_a_token_holds_no_key(kit, own_secrets):  # noqa: F811
    assert own_secrets.stat().st_mode & 0o777 == 0o700  # for the folders in it are open to a container's user
    assert {file.name for file in kit.iterdir()} == {"ca.crt", "enrollment.token", "number", "install.txt"}
    token = (kit / "enrollment.token").read_text().split()[1]
    assert token not in (own_secrets / "tokens" / "device-0").read_text()
    assert not (own_secrets / "public" / "device-0.pub").exists()
    words = (kit / "install.txt").read_text().split()[2:]
    done = subprocess.run(
        [DEPLOY / "raspberry-pi/install", "--dry-run", *words], cwd=kit, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "+ ssh-keygen -q -t ecdsa -b 384" in done.stdout
    assert "https://fl.example:9200/" in done.stdout
    assert token not in done.stdout


@pytest.fixture(autouse=True)
def two_file_systems(monkeypatch):
    """In a container the tokens and the keys are two mounts, between which nothing is renamed."""

    def within(rename):
        def rename_within(source, target):
            assert Path(source).parent == Path(target).parent, "Invalid cross-device link"
            rename(source, target)

        return rename_within

    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, within(getattr(os, name)))


def test_a_token_is_good_for_one_key(program, kit, own_secrets, tmp_path):  # noqa: F811
    registered = []
    key = key_of(tmp_path)
    name = program["enroll"](
        body_of(kit, key), own_secrets, lambda public: registered.append(public) or True, time.time()
    )
    assert (name, [path.read_text() for path in registered]) == ("device-0", [key])
    again = body_of(kit, key_of(tmp_path, "another"))
    with pytest.raises(program["Refused"], match="was used before"):
        program["enroll"](again, own_secrets, registered.append, time.time())
    with pytest.raises(program["Refused"], match=r"no \.used at its end"):  # the name of the file of the used token
        program["enroll"](again.replace(b"device-0", b"device-0.used", 1), own_secrets, registered.append, time.time())
    assert (own_secrets / "public" / "device-0.pub").read_text() == key
    assert len(registered) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda body: body.replace(b"device-0", b"device-1", 1), "there is no such token"),
        (lambda body: body.replace(b"device-0", b"device-9", 1), "there is no such token"),
        (lambda body: body.replace(b"device-0", b"../public/node-0", 1), "the name has letters"),
        (lambda body: body.replace(b"device-0", b".device-0", 1), "the name has letters"),
        (lambda body: body.split(b"\n")[0] + b"\nssh-rsa AAAA", "no public key"),
        (lambda body: b"\xff", "expected the line NAME TOKEN"),
        (lambda body: b"", "expected the line NAME TOKEN"),
    ],
)
def test_what_is_no_enrollment_uses_no_token_up(program, kit, own_secrets, tmp_path, change, words):  # noqa: F811
    body = body_of(kit, key_of(tmp_path))
    with pytest.raises(program["Refused"], match=words):
        program["enroll"](change(body), own_secrets, lambda _: pytest.fail("registered"), time.time())
    assert program["enroll"](body, own_secrets, lambda _: True, time.time()) == "device-0"


def test_a_token_has_its_day_and_is_good_again_where_the_superlink_was_away(program, kit, own_secrets, tmp_path):  # noqa: F811
    body = body_of(kit, key_of(tmp_path))
    with pytest.raises(program["Refused"], match="the token's time is over"):
        program["enroll"](body, own_secrets, lambda _: True, time.time() + 8 * 86400)
    with pytest.raises(program["Refused"], match="does not take the key now"):
        program["enroll"](body, own_secrets, lambda _: False, time.time())
    assert not (own_secrets / "public" / "device-0.pub").exists()

    def away(public):
        raise ConnectionError("refused")

    with pytest.raises(ConnectionError):
        program["enroll"](body, own_secrets, away, time.time())
    assert not (own_secrets / "public" / "device-0.pub").exists()
    assert program["enroll"](body, own_secrets, lambda _: True, time.time()) == "device-0"


def test_a_device_enrolls_over_tls(program, kit, own_secrets, tmp_path):  # noqa: F811
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trust.load_cert_chain(own_secrets / "server.crt", own_secrets / "server.key")
    server = program["serve"]("127.0.0.1:0", own_secrets, lambda _: True, trust)
    threading.Thread(target=server.serve_forever).start()
    try:
        anyone = ssl.create_default_context(cafile=kit / "ca.crt")
        told = []
        body = body_of(kit, key_of(tmp_path))
        for sent, length in ((b"", 5000), (body, len(body)), (body, len(body))):
            connection = http.client.HTTPSConnection("127.0.0.1", server.server_port, timeout=60, context=anyone)
            connection.request("POST", "/", sent, {"Content-Length": str(length)})
            told.append(connection.getresponse().read().decode())
            connection.close()
    finally:
        server.shutdown()
        server.server_close()
    assert told[0] == "expected at most 4096 bytes\n"
    assert told[1] == "device-0: enrolled\n"
    assert "was used before" in told[2]


def test_a_connection_that_goes_on_and_on_is_ended(program, own_secrets, monkeypatch):  # noqa: F811
    """It sends a byte whenever the server waits for one, so that no read takes long."""
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trust.load_cert_chain(own_secrets / "server.crt", own_secrets / "server.key")
    monkeypatch.setitem(program["serve"].__globals__, "SECONDS", 600.0)  # of a read, far longer than the client waits
    monkeypatch.setattr(bounded_server, "CONNECTION_SECONDS", 2.0)  # enough for TLS on a busy machine
    server = program["serve"]("127.0.0.1:0", own_secrets, lambda _: True, trust)
    threading.Thread(target=server.serve_forever).start()
    anyone = ssl.create_default_context()
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as plain,
            anyone.wrap_socket(plain) as connection,
        ):
            connection.sendall(b"POST / HTTP/1.1\r\nContent-Length: 4000\r\n\r\na")
            assert connection.recv(1) == b""
    finally:
        server.shutdown()
        server.server_close()


def test_a_device_enrolls_once_for_each_kit(kit, own_secrets, tmp_path):  # noqa: F811
    code, text = kits(own_secrets, "--rotate", "device-0", "--token-days", 7, "--enrollment", "fl.example:9200")
    assert code == 0, text
    (keys := tmp_path / "keys").mkdir()
    lines = f"""
        set -euo pipefail
        board=any python=(any) dry_run=''
        . {DEPLOY / "board.sh"}
        keys={keys}
        chown() {{ :; }}
        curl() {{ cut -d ' ' -f 1 "$keys/enrollment" | head -n 1; }}
        for kit in device-0 device-0 device-0.key-2; do
            enroll_key fl.example:9200 {kit.parent}/$kit/enrollment.token {kit}/ca.crt
        done
    """
    done = subprocess.run(["bash", "-c", lines], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["device-0", "device-0.key-2"]
    assert {file.name for file in keys.iterdir()} == {"node.key", "node.name"}


def test_keys_expire_but_never_all_at_once(secrets, superlink):  # noqa: F811
    def known(*days):
        nodes = [
            NodeInfo(
                node_id=place, name=f"node-{place}", status="online", registered_at=(NOW - timedelta(d)).isoformat()
            )
            for place, d in enumerate(days)
        ]
        gone = NodeInfo(node_id=9, name="gone", status="unregistered", registered_at=NOW.isoformat())
        superlink.RequestHandlerClass.listed = ListNodesResponse(nodes_info=[*nodes, gone]).SerializeToString()
        superlink.RequestHandlerClass.said = 200, b""
        superlink.RequestHandlerClass.asked.clear()

    program = runpy.run_path(str(DEPLOY / "enroll"))

    def expired(days):
        address = f"127.0.0.1:{superlink.server_port}"
        with program["connection"](address, str(secrets / "ca.crt")) as connection:
            done = program["expire"](connection, days, NOW)
        asked = superlink.RequestHandlerClass.asked
        return done, [
            UnregisterNodeRequest.FromString(b).node_id for path, b in asked if path.endswith("unregister-node")
        ]

    known(400, 10, 366)
    assert expired(365) == (True, [0, 2])
    known(400, 10)
    assert expired(500) == (True, [])
    known(400, 366)
    assert expired(365) == (False, [])
    assert enroll(secrets, superlink, "--expire", 10)[0] == 1
