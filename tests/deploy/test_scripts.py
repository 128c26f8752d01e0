import datetime
import io
import json
import os
import re
import runpy
import shlex
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import threading
from contextlib import redirect_stderr, redirect_stdout
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.proto.control_pb2 import ListNodesResponse, RegisterNodeRequest, RegisterNodeResponse, UnregisterNodeRequest
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from wildflower.devices.probe import board_kind

DEPLOY = Path(__file__).parents[2] / "deploy"

pytestmark = pytest.mark.skipif(
    not (shutil.which("openssl") and shutil.which("ssh-keygen")), reason="openssl and ssh-keygen make the keys"
)


def script(name: str, *arguments: object) -> tuple[int, str]:
    done = subprocess.run([DEPLOY / name, *map(str, arguments)], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def secrets(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("certs") / "secrets"
    code, text = script("certs", "--out", folder, "--nodes", 2, "--name", "fl.example", "--name", "192.0.2.7")
    assert code == 0, text
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def names_of(certificate: Path) -> set[str]:
    server = x509.load_pem_x509_certificate(certificate.read_bytes())
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))}


def test_the_certificate_is_the_authoritys_and_names_every_way_to_the_server(secrets):
    authority = x509.load_pem_x509_certificate((secrets / "ca.crt").read_bytes())
    server = x509.load_pem_x509_certificate((secrets / "server.crt").read_bytes())
    server.verify_directly_issued_by(authority)
    ways = {"superlink", "gate", "bandwidth", "localhost", "127.0.0.1", "::1"}
    assert names_of(secrets / "server.crt") == ways | {"fl.example", "192.0.2.7"}
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    left = server.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert 363 <= left.days <= 365


def test_node_keys_are_pairs_and_differ(secrets):
    seen = set()
    for name in ("node-0", "node-1"):
        private = load_ssh_private_key((secrets / "nodes" / name).read_bytes(), None)
        public = load_ssh_public_key((secrets / "public" / f"{name}.pub").read_bytes())
        assert private.public_key() == public
        assert private.curve.name == "secp384r1"
        seen.add((secrets / "public" / f"{name}.pub").read_bytes().split()[1])
    assert len(seen) == 2
    assert len((secrets / "bandwidth.token").read_text().strip()) == 64


def test_nobody_else_on_the_host_reads_them(secrets):
    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)

    assert mode(secrets) == mode(secrets / "nodes") == 0o700
    assert mode(secrets / "ca.key") == 0o600
    # Mounted one by one into containers, which run under a user of their own.
    assert mode(secrets / "server.key") == mode(secrets / "nodes" / "node-0") == 0o644


def test_nothing_is_overwritten_but_what_is_renewed(secrets):
    before = contents(secrets)
    code, text = script("certs", "--out", secrets)
    assert code == 1
    assert "exists already" in text
    assert script("certs", "--out", secrets, "--add-node", "node-1")[0] == 1
    assert contents(secrets) == before
    assert script("certs", "--out", secrets, "--add-node", "pi-4")[0] == 0
    names = names_of(secrets / "server.crt")
    assert script("certs", "--out", secrets, "--renew", "--name", "new.example", "--name", "2001:db8::7")[0] == 0
    assert script("certs", "--out", secrets, "--renew")[0] == 0
    # Devices know the server by the names that it had.
    assert names_of(secrets / "server.crt") == names | {"new.example", "2001:db8::7"}
    after = contents(secrets)
    assert set(after) - set(before) == {"nodes/pi-4", "public/pi-4.pub"}
    assert {name for name in before if before[name] != after[name]} == {"server.key", "server.crt"}


@pytest.mark.parametrize(
    ("task", "name", "mode", "right"),
    [
        (["--renew"], ".", 0o750, 0o700),
        (["--add-node", "more"], ".", 0o701, 0o700),
        (["--app-key"], "nodes", 0o755, 0o700),
        (["--renew"], "ca.key", 0o640, 0o600),
        (["--add-node", "more"], "server.key", 0o664, 0o644),
        (["--app-key"], "nodes/node-0", 0o646, 0o644),
    ],
)
def test_nothing_is_added_to_secrets_that_others_can_open(secrets, tmp_path, task, name, mode, right):
    folder = tmp_path / "secrets"
    shutil.copytree(secrets, folder)
    (folder / "app.key").unlink()
    opened, before = folder / name, contents(folder)
    opened.chmod(mode)
    code, text = script("certs", "--out", folder, *task)
    assert code == 1
    shown = folder if name == "." else opened
    assert (
        f"{shown} is open to other users of this machine: nothing was written. Close it: chmod {right:o} {shown}"
        in text
    )
    assert contents(folder) == before
    opened.chmod(right)
    assert script("certs", "--out", folder, *task)[0] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
@pytest.mark.parametrize("name", [".", "ca.key", "nodes/node-0"])
def test_nothing_is_added_to_secrets_of_another_user(secrets, tmp_path, name):
    folder = tmp_path / "secrets"
    shutil.copytree(secrets, folder)
    before = contents(folder)
    os.chown(folder / name, 10001, -1)
    code, text = script("certs", "--out", folder, "--renew")
    assert (code, "belongs to another user: nothing was written" in text) == (1, True)
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--days", "0"], "--days 0"),
        (["--nodes", "many"], "--nodes many"),
        (["--name", "a,DNS:b"], "--name a,DNS:b"),
        (["--add-node", "../x"], "holds no secrets yet"),
        (["--out"], "--out wants a value"),
        (["--force"], "unknown argument: --force"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_written(tmp_path, arguments, words):
    given = arguments if arguments == ["--out"] else ["--out", tmp_path / "new", *arguments]
    code, text = script("certs", *given)
    assert code == 1
    assert words in text
    assert not (tmp_path / "new" / "server.crt").exists()


@pytest.mark.parametrize(
    ("board", "command"),
    [
        ("raspberry-pi", "/opt/wildflower/bin/wildflower-node"),
        ("jetson", "wildflower-device wildflower-node"),
    ],
)
def test_a_dry_run_shows_the_service_and_changes_nothing(secrets, board, command):
    key, ca, token = secrets / "nodes" / "node-1", secrets / "ca.crt", secrets / "bandwidth.token"
    given = ["--superlink", "fl.example:8000", "--device", 1, "--ca", ca, "--key", key]
    code, text = script(f"{board}/install", "--dry-run", *given, "--bandwidth", "fl.example:9100", "--token", token)
    assert code == 0, text
    assert f"{command} --superlink fl.example:8000 --root-certificates /etc/wildflower/ca.crt" in text
    assert r'--node-config "partition-id=1 num-partitions=2 state-dir=\"/var/lib/wildflower\"' in text
    assert r"bandwidth-token-file=\"/etc/wildflower/bandwidth.token\"" in text
    assert f"--mode=0640 {key} /etc/wildflower/node.key" in text
    assert "Restart=always" in text
    assert "RestartPreventExitStatus=77" in text
    assert "LogRateLimitBurst=600" in text
    assert "+ timedatectl set-ntp true" in text
    assert "WILDFLOWER_CACHE=/var/lib/wildflower/cache" in text
    # A PyTorch that does not start on this board is found before there is a service of it.
    assert text.index("import\\ threading") < text.index("import\\ torch")
    assert text.index("import\\ torch") < text.index("write /etc/systemd/system/wildflower-node.service")
    assert not Path("/etc/wildflower").exists()
    code, text = script(f"{board}/install", "--uninstall", "--dry-run")
    assert code == 0
    assert "+ rm -rf /etc/wildflower" in text
    assert "rm -rf /var/lib/wildflower" not in text


def with_programs(folder: Path, *arguments: object, **programs: str) -> tuple[int, str]:
    """A script's exit code and what it says, with programs of our own first in its way."""
    for name, text in programs.items():
        program(folder / "bin", name, text)
    environment = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run([*map(str, arguments)], env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def usual(secrets: Path) -> list[object]:
    ca, key = secrets / "ca.crt", secrets / "nodes" / "node-1"
    return ["--superlink", "fl.example:8000", "--device", 1, "--ca", ca, "--key", key, "--dry-run"]


@pytest.mark.parametrize(("release", "knows"), [("237", False), ("242", False), ("243", True), ("252", True)])
def test_a_unit_has_only_what_its_systemd_knows(secrets, tmp_path, release, knows):
    systemctl = f'echo "systemd {release} ({release}.1-2)"'
    code, text = with_programs(tmp_path, DEPLOY / "raspberry-pi/install", *usual(secrets), systemctl=systemctl)
    assert code == 0, text
    assert ("OOMPolicy=continue" in text) is knows


@pytest.mark.parametrize("board", ["raspberry-pi", "jetson"])
def test_a_device_runs_signed_apps_only_where_it_is_told(secrets, board):
    assert "trusted-entities" not in script(f"{board}/install", *usual(secrets))[1]
    code, text = script(f"{board}/install", *usual(secrets), "--trusted", secrets / "trusted.yaml")
    assert code == 0, text
    assert f"--mode=0640 {secrets}/trusted.yaml /etc/wildflower/trusted.yaml" in text
    assert "node.key --trusted-entities /etc/wildflower/trusted.yaml " in text
    code, text = script(f"{board}/install", *usual(secrets), "--trusted", secrets / "none.yaml")
    assert (code, "no such file" in text) == (1, True)


def test_the_key_that_signs_apps_is_made_once(secrets, tmp_path):
    assert stat.S_IMODE((secrets / "app.key").stat().st_mode) == 0o600
    code, text = script("certs", "--out", secrets, "--app-key")
    assert (code, "app.key exists already" in text) == (1, True)
    older = tmp_path / "older"
    shutil.copytree(secrets, older)
    (older / "app.key").unlink()
    code, text = script("certs", "--out", older, "--app-key")
    assert code == 0, text
    known = (older / "trusted.yaml").read_text()
    assert known.startswith('wildflower-app: "ssh-ed25519 ')
    assert known != (secrets / "trusted.yaml").read_text()


def test_an_owner_limits_what_a_node_takes(secrets):
    limits = ["--memory-max", "1500M", "--cpu-quota", "150%", "--nice", "15"]
    code, text = script("raspberry-pi/install", *usual(secrets), *limits)
    assert code == 0, text
    for line in ("MemoryMax=1500M", "CPUQuota=150%", "Nice=15", "WatchdogSec=300"):
        assert f"    {line}\n" in text
    code, text = script("jetson/install", *usual(secrets), *limits)
    assert code == 0, text
    assert "    WatchdogSec=300\n    NotifyAccess=main\n" in text
    assert "ExecStart=/usr/bin/python3 /opt/wildflower/watched /var/lib/wildflower/notify /usr/bin/docker run " in text
    assert " --env NOTIFY_SOCKET=/var/lib/wildflower/notify " in text
    assert "--log-driver none --memory 1500M --memory-swap 1500M --cpus 1.5 --cpu-shares 256 " in text
    code, text = script("raspberry-pi/install", *usual(secrets))
    assert "MemoryMax" not in text
    assert "    Nice=10\n" in text
    for option, wrong in (("--memory-max", "lots"), ("--cpu-quota", "2"), ("--nice", "-5"), ("--image", "x")):
        code, text = script("raspberry-pi/install", *usual(secrets), option, wrong)
        assert code == 1
        assert text.startswith(f"Raspberry Pi: {option}")


NODE = """
import os, signal, socket, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(77))
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as said:
    for text in (b"STOPPING=1", b"WATCHDOG=1"):
        said.sendto(text, sys.argv[1])
signal.pause()
"""


def test_a_node_in_a_container_tells_systemd_that_it_is_alive_and_nothing_else(tmp_path):
    (tmp_path / "notify").symlink_to("nowhere")  # left by an earlier start, or put there by the node
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "systemd"))
        systemd.settimeout(60)
        command = [DEPLOY / "jetson/watched", tmp_path / "notify", sys.executable, "-c", NODE, tmp_path / "notify"]
        watched = subprocess.Popen(command, env=os.environ | {"NOTIFY_SOCKET": str(tmp_path / "systemd")})
        try:
            assert systemd.recv(64) == b"WATCHDOG=1"
            watched.terminate()  # as systemd ends a service
            assert watched.wait(60) == 77
        finally:
            watched.kill()


def test_a_jetson_takes_an_image_that_is_there(secrets):
    code, text = script("jetson/install", *usual(secrets), "--image", "mine:2")
    assert code == 0, text
    assert "+ docker tag mine:2 wildflower-device" in text
    assert "docker build" not in text
    assert "docker build --network host " in script("jetson/install", *usual(secrets))[1]


def test_an_old_docker_engine_is_named_and_not_pytorch(secrets, tmp_path):
    nothing = dict.fromkeys(("useradd", "runuser", "install", "timedatectl", "systemctl"), "exit 0")
    docker = 'case "$*" in *threading*) echo "RuntimeError: can\'t start new thread" >&2; exit 1 ;; esac'
    given = [part for part in usual(secrets) if part != "--dry-run"]
    who = 'case "$1" in -u) echo 0 ;; esac'
    code, text = with_programs(tmp_path, DEPLOY / "jetson/install", *given, docker=docker, id=who, **nothing)
    assert code == 1
    assert "this Docker engine is too old for newer images (it blocks clone3" in text
    assert "PyTorch does not work" not in text


def test_boards_get_a_pytorch_that_their_processors_run(secrets):
    given = ["--dry-run", "--superlink", "fl.example:8000", "--device", 1, "--ca", secrets / "ca.crt"]
    given += ["--key", secrets / "nodes" / "node-1"]
    index = ["--torch-index", "https://wheels.example/cpu"]
    for board, usual, chosen in (
        (
            "raspberry-pi",
            r"torch\>=2.8\,\<2.10 ",
            r"--extra-index-url https://wheels.example/cpu torch\>=2.8\,\!=2.10.\* ",
        ),
        ("jetson", "--build-arg TORCH_VERSION=2.9.1 ", "--build-arg TORCH_INDEX_URL=https://wheels.example/cpu "),
    ):
        assert usual in script(f"{board}/install", *given)[1]
        assert chosen in script(f"{board}/install", *given, *index)[1]


@pytest.mark.parametrize(
    "tree",
    [
        {"model": "Raspberry Pi 4 Model B Rev 1.4\0"},
        {"model": "Raspberry Pi 5 Model B Rev 1.0\0"},
        {"model": "NVIDIA Jetson Nano Developer Kit\0", "compatible": "nvidia,p3450-0000\0nvidia,tegra210\0"},
        {"model": "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit\0"},
        {"model": "quill\0", "compatible": "nvidia,p2771-0000\0nvidia,tegra186\0"},
        {"model": "NVIDIA Orin NX Developer Kit\0", "compatible": "nvidia,p3768-0000\0nvidia,tegra234\0"},
        {"model": "Banana Pi\0", "compatible": "bananapi,m5\0"},
        {},
    ],
)
def test_a_board_is_named_as_its_own_probe_would_name_it(tree, tmp_path):
    folder = tmp_path / "proc" / "device-tree"
    folder.mkdir(parents=True)
    for name, text in tree.items():
        (folder / name).write_text(text)
    command = f"board=x python=y; . {DEPLOY / 'board.sh'}; board_kind {folder}"
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == board_kind(tmp_path)


def program(folder: Path, name: str, text: str) -> None:
    """Put a program of that name first in the way of a script that is run with `folder` in front of PATH."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize("board", ["raspberry-pi", "jetson"])
def test_the_key_is_removed_also_where_nothing_else_was_ever_installed(board, tmp_path):
    log = tmp_path / "log"
    program(tmp_path / "bin", "id", "echo 0")
    program(tmp_path / "bin", "rm", f'echo rm "$@" >>{log}')
    for name in ("systemctl", "docker"):
        program(tmp_path / "bin", name, f'echo {name} "$@" >>{log}; exit 1')
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run([DEPLOY / board / "install", "--uninstall"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    did = log.read_text().splitlines()
    assert did[:2] == ["systemctl disable --now wildflower-node.service", "rm -rf /etc/wildflower"]
    assert "rm -f /etc/systemd/system/wildflower-node.service" in did


@pytest.fixture
def superlink(secrets):
    """What answers as a SuperLink's control API would: what `said` holds, a status and a body. Keeps the requests."""

    class Control(BaseHTTPRequestHandler):
        said: ClassVar[tuple[int, bytes]] = (200, b"")
        listed: ClassVar[bytes] = b""
        asked: ClassVar[list[tuple[str, bytes]]] = []

        def do_POST(self):
            self.asked.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            status, body = (200, self.listed) if self.path.endswith("/list-nodes") else self.said
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Control)
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trust.load_cert_chain(secrets / "server.crt", secrets / "server.key")
    server.socket = trust.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def says(detail: str) -> tuple[int, bytes]:
    return 412, json.dumps({"code": 23, "detail": detail}).encode()


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        ((200, RegisterNodeResponse(node_id=7).SerializeToString()), 0, "node-1: registered as node 7"),
        (says("Public key already in use."), 0, "node-1: registered before"),
        (says("no such thing"), 1, "node-1: [code: 23] no such thing"),
    ],
)
def test_every_public_key_is_registered(secrets, superlink, answer, code, words):
    superlink.RequestHandlerClass.said = answer
    found, text = enroll(secrets, superlink, secrets / "public")
    assert (found, words in text) == (code, True), text
    files = sorted((secrets / "public").iterdir())
    keys = {file.stem: public_key_to_bytes(load_ssh_public_key(file.read_bytes())) for file in files}
    asked = [(path, RegisterNodeRequest.FromString(body)) for path, body in superlink.RequestHandlerClass.asked]
    assert {path for path, _ in asked} == {"/v1/control/register-node"}
    assert {request.name: request.public_key for _, request in asked} == keys


def test_a_file_that_holds_no_key_is_named_and_the_others_are_registered(secrets, superlink, tmp_path):
    superlink.RequestHandlerClass.said = 200, RegisterNodeResponse(node_id=7).SerializeToString()
    (tmp_path / "a.pub").write_text("ssh-rsa nothing")
    (tmp_path / "b.pub").write_bytes(bytes(10_001))
    shutil.copy(secrets / "public" / "node-1.pub", tmp_path / "c.pub")
    code, text = enroll(secrets, superlink, tmp_path)
    assert code == 1
    assert f"a: {tmp_path / 'a.pub'}: no public key in OpenSSH's form" in text
    assert f"b: {tmp_path / 'b.pub'}: more than 10000 bytes" in text
    assert "c: registered as node 7" in text
    assert enroll(secrets, superlink, secrets / "nodes") == (1, f"enroll: no public keys (*.pub) in {secrets}/nodes\n")


def test_a_node_is_revoked_by_its_number(secrets, superlink):
    code, text = enroll(secrets, superlink, "--revoke", 42)
    assert code == 0, text
    assert "node 42: its key is refused" in text
    [(path, body)] = superlink.RequestHandlerClass.asked
    assert (path, UnregisterNodeRequest.FromString(body).node_id) == ("/v1/control/unregister-node", 42)
    superlink.RequestHandlerClass.said = says("unknown node")
    code, text = enroll(secrets, superlink, "--revoke", 42)
    assert (code, "node 42: " in text, "unknown node" in text) == (1, True, True)


def test_a_node_is_revoked_by_its_name(secrets, superlink):
    nodes = [
        NodeInfo(node_id=2**64 - 2, name="node-1", status="online"),
        NodeInfo(node_id=3, name="node-1", status="unregistered"),
        NodeInfo(node_id=4, name="node-0", status="registered"),
    ]
    superlink.RequestHandlerClass.listed = ListNodesResponse(nodes_info=nodes).SerializeToString()
    superlink.RequestHandlerClass.said = 200, b""
    assert enroll(secrets, superlink, "--revoke", "node-1")[0] == 0
    path, body = superlink.RequestHandlerClass.asked[-1]
    assert (path, UnregisterNodeRequest.FromString(body).node_id) == ("/v1/control/unregister-node", 2**64 - 2)
    code, text = enroll(secrets, superlink, "--revoke", "cellar")
    assert (code, "0 nodes have this name; the names are node-0, node-1" in text) == (1, True)
    assert [path for path, _ in superlink.RequestHandlerClass.asked] == ["/v1/control/list-nodes"]
    assert "to 2^64 - 1" in enroll(secrets, superlink, "--revoke", 2**64)[1]


def kits(folder: Path, *arguments: object) -> tuple[int, str]:
    return script("kits", "--secrets", folder, "--superlink", "fl.example:8000", *arguments)


@pytest.fixture
def own_secrets(secrets, tmp_path):
    """Secrets that a test may change."""
    return Path(shutil.copytree(secrets, tmp_path / "secrets"))


def test_every_device_has_a_kit_of_its_own(own_secrets):
    code, text = kits(own_secrets, "--count", 3, "--bandwidth", "fl.example:9100")
    assert code == 0, text
    assert "set devices = 3 or more" in text
    seen = set()
    for number in range(3):
        kit = own_secrets / "kits" / f"device-{number}"
        assert {file.name for file in kit.iterdir()} == {
            "ca.crt",
            "node.key",
            "bandwidth.token",
            "number",
            "install.txt",
        }
        private = load_ssh_private_key((kit / "node.key").read_bytes(), None)
        public = (own_secrets / "public" / f"device-{number}.pub").read_bytes()
        assert private.public_key() == load_ssh_public_key(public)
        seen.add(public.split()[1])
        assert not (own_secrets / "nodes" / f"device-{number}").exists()
        assert stat.S_IMODE(kit.stat().st_mode) == 0o700
        words = shlex.split((kit / "install.txt").read_text())[2:]
        # As it is typed in the folder of the kit.
        command = [DEPLOY / "raspberry-pi/install", "--dry-run", *words]
        done = subprocess.run(command, cwd=kit, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert f"partition-id={number} " in done.stdout
    assert len(seen) == 3


def test_the_devices_of_kits_run_signed_apps_alone(own_secrets):
    code, text = kits(own_secrets, "--trusted", "--count", 1)
    assert code == 0, text
    kit = own_secrets / "kits" / "device-0"
    assert (kit / "trusted.yaml").read_bytes() == (own_secrets / "trusted.yaml").read_bytes()
    words = shlex.split((kit / "install.txt").read_text())[2:]
    done = subprocess.run(
        [DEPLOY / "raspberry-pi/install", "--dry-run", *words], cwd=kit, capture_output=True, text=True
    )
    assert "--trusted-entities /etc/wildflower/trusted.yaml " in done.stdout, done.stderr
    (own_secrets / "trusted.yaml").unlink()
    code, text = kits(own_secrets, "--trusted", "--count", 1, "--first", 1)
    assert (code, "deploy/certs --app-key makes it" in text) == (1, True)


@pytest.mark.skipif(not shutil.which("docker-compose"), reason="Compose 1.29 reads the file")
def test_the_nodes_of_compose_run_signed_apps_alone(secrets):
    trusted = {"WILDFLOWER_TRUSTED": str(secrets / "trusted.yaml"), "WILDFLOWER_APP_KEY": str(secrets / "app.key")}
    for environment, given in (({}, False), (trusted, True)):
        command = ["docker-compose", "--profile", "run", "config"]
        done = subprocess.run(
            command, cwd=DEPLOY.parent, env=os.environ | environment, capture_output=True, text=True, check=True
        )
        found = yaml.safe_load(done.stdout)
        assert (found["secrets"]["app_key"]["file"] == trusted["WILDFLOWER_APP_KEY"]) is given
        for number in range(4):
            node = found["services"][f"node-{number}"]
            # What the node's own shell makes of its command, with another program in its place.
            words = [word.replace("$$", "$").replace("exec wildflower-node", "echo") for word in node["command"]]
            own = {name: str(value) for name, value in node["environment"].items()}
            said = subprocess.run(words, env=own | {"PATH": os.environ["PATH"]}, capture_output=True, text=True).stdout
            assert ("--trusted-entities /run/secrets/trusted_apps" in said) is given
            assert f"partition-id={number} " in said


def test_a_fleet_grows_and_a_key_is_rotated(own_secrets):
    assert kits(own_secrets, "--count", 2)[0] == 0
    before = contents(own_secrets)
    code, text = kits(own_secrets, "--count", 2, "--first", 1)
    assert (code, "device-1 exists already: nothing was written" in text) == (1, True)
    assert contents(own_secrets) == before
    assert kits(own_secrets, "--count", 2, "--first", 2)[0] == 0
    for old, new in (("device-1", "device-1.key-2"), ("device-1.key-2", "device-1.key-3")):
        code, text = kits(own_secrets, "--rotate", old)
        assert code == 0, text
        assert f"revoke the old key by its name, {old}." in text
        assert (own_secrets / "kits" / new / "number").read_text() == "1\n"
        assert (own_secrets / "public" / f"{new}.pub").exists()
    assert {name: text for name, text in contents(own_secrets).items() if name in before} == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--count ''"),
        (["--count", "0"], "--count '0'"),
        (["--count", "1", "--first", "-1"], "--first '-1'"),
        (["--count", "1", "--prefix", "../x"], "--prefix '../x'"),
        (["--count", "1", "--board", "toaster"], "--board 'toaster'"),
        (["--count", "1", "--bandwidth", "here"], "--bandwidth 'here'"),
        (["--rotate", "device-9"], "there is no kit"),
        (["--count"], "--count wants a value"),
    ],
)
def test_no_kit_is_made_of_wrong_words(own_secrets, arguments, words):
    code, text = kits(own_secrets, *arguments)
    assert (code, words in text) == (1, True), text
    assert not (own_secrets / "kits").exists()


def test_a_superlink_that_is_not_there_is_told(secrets, superlink):
    superlink.server_port = 1
    code, text = enroll(secrets, superlink, "--revoke", 42)
    assert (code, "node 42: Connection to the SuperLink is unavailable" in text) == (1, True)


def test_it_is_a_program(secrets, superlink):
    superlink.RequestHandlerClass.said = says("unknown node")
    command = [sys.executable, DEPLOY / "enroll", f"127.0.0.1:{superlink.server_port}", secrets / "ca.crt", "--revoke"]
    done = subprocess.run([*command, "42"], capture_output=True, text=True)
    assert (done.returncode, "node 42: " in done.stderr, "unknown node" in done.stderr) == (1, True, True)
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, "enroll HOST:PORT CA_CERTIFICATE FOLDER" in done.stderr) == (1, True)


def enroll(secrets: Path, superlink: ThreadingHTTPServer, *what: object) -> tuple[int, str]:
    """The script's exit code and what it prints, without a process of its own, which would import Flower anew."""
    superlink.RequestHandlerClass.asked.clear()
    program = runpy.run_path(str(DEPLOY / "enroll"))
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        code = program["main"](f"127.0.0.1:{superlink.server_port}", secrets / "ca.crt", *map(str, what))
    return code, printed.getvalue()


def test_a_jetson_trains_on_its_gpu_where_it_is_asked_to(secrets):
    given = ["--superlink", "fl.example:8000", "--device", 1, "--ca", secrets / "ca.crt"]
    given += ["--key", secrets / "nodes" / "node-1", "--dry-run", "--gpu-python"]
    code, text = script("jetson/install", *given, sys.executable)
    assert code == 0, text
    assert f"ExecStart={sys.executable} /opt/wildflower/gpu_trainer.py --socket /run/wildflower/gpu.sock" in text
    assert "gpu_trainer.py /opt/wildflower/gpu_trainer.py" in text
    assert "--volume /run/wildflower:/run/wildflower:ro wildflower-device" in text
    assert "+ systemctl restart wildflower-gpu.service" in text
    assert text.index("wildflower-gpu.service") < text.index("restart wildflower-node.service")
    assert r"gpu-trainer=\"/run/wildflower/gpu.sock\"" in text
    assert "After=network-online.target time-sync.target docker.service wildflower-gpu.service" in text
    code, text = script("jetson/install", *given, "/no/python3")
    assert code == 1
    assert "--gpu-python '/no/python3': no such program" in text
    code, text = script("jetson/install", *given, "python3")
    assert code == 1
    assert "--gpu-python 'python3': expected a whole path" in text
    code, text = script("raspberry-pi/install", *given, sys.executable)
    assert code == 1
    assert "no GPU of this board trains" in text


@pytest.mark.parametrize("board", ["raspberry-pi", "jetson"])
def test_a_board_is_not_set_up_with_half_of_what_it_needs(secrets, board):
    given = {"--superlink": "fl.example:8000", "--device": 1, "--ca": secrets / "ca.crt"}
    given["--key"] = secrets / "nodes" / "node-1"
    for name, wrong, words in (
        ("--superlink", "fl.example", "expected HOST:PORT"),
        ("--device", "one", "expected a whole number"),
        ("--device", "08", "expected a whole number"),
        ("--ca", secrets / "none", "no such file"),
        ("--key", secrets / "public" / "node-1.pub", "is no private key"),
        ("--bandwidth", "fl.example:9100", "--bandwidth needs --token"),
        ("--data-dir", "data", "expected a whole path"),
    ):
        arguments = [part for pair in {**given, name: wrong}.items() for part in pair]
        code, text = script(f"{board}/install", "--dry-run", *arguments)
        assert code == 1, text
        assert words in text
        assert "+ " not in text


def without_registry(
    folder: Path, *arguments: object, variables: dict[str, str] | None = None
) -> tuple[int, str, list[str]]:
    """What the command that builds images says, and the commands that it gives: none of them is really there."""
    log = folder / "log"
    log.write_text("")
    bins = folder / "bin"
    program(bins, "id", "echo 0")
    program(bins, "docker", f'[ "$1" != import ] || cat >/dev/null; echo docker "$@" >>{log}')
    made = "etc/ssl/certs etc/apt/sources.list.d var/cache/apt/archives"
    program(
        bins,
        "debootstrap",
        f'echo debootstrap "$@" >>{log}; for tree; do :; done; for part in {made}; do mkdir -p "$tree/$part"; done',
    )
    program(bins, "python", f'[ "$1" != -m ] && exec {sys.executable} "$@"; echo python "$@" >>{log}')
    # An index of the machine that tests must not change what is typed.
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_INDEX_URL"} | (variables or {})
    environment |= {"PATH": f"{bins}:{os.environ['PATH']}", "PYTHON": str(bins / "python")}
    command = [DEPLOY / "build-without-registry", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr, log.read_text().splitlines()


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="wheels are for the base image's Python, 3.11")
def test_images_are_built_without_a_registry(tmp_path):
    code, text, did = without_registry(tmp_path)
    assert code == 0, text
    assert did[0].startswith("debootstrap --variant=minbase --include=ca-certificates,python3-venv bookworm /")
    assert did[1] == "docker import - wildflower/base"
    wanted = did[2].split()
    assert wanted[:4] == ["python", "-m", "pip", "download"]
    assert {"torch>=2.8", "setuptools>=77", "wheel", "scikit-learn", "tensorboard", "opacus"} <= set(wanted)
    builds = did[3:]
    targets = ("device", "server", "gate", "shaper")
    assert [line.split(" --tag ")[1].split()[0] for line in builds] == [f"wildflower-{name}" for name in targets]
    assert [line.split(" --target ")[1].split()[0] for line in builds] == list(targets)
    assert all("--build-arg BASE_IMAGE=wildflower/base --build-arg PIP_NO_INDEX=1" in line for line in builds)
    code, text, did = without_registry(tmp_path, "--images", "mine", "--base", "debian:12")
    assert code == 0, text
    assert [line.partition(" ")[0] for line in did] == ["python", "docker", "docker", "docker", "docker"]
    assert "BASE_IMAGE=debian:12" in did[-1]
    assert "--tag mine-shaper" in did[-1]
    wheels = f"--find-links {DEPLOY.parent / 'wheelhouse'}"
    assert wheels in did[0]
    assert "--extra-index-url" not in did[0]
    index = {"TORCH_INDEX_URL": "https://wheels.example/cpu"}
    code, text, did = without_registry(tmp_path, "--base", "debian:12", variables=index)
    assert code == 0, text
    assert f"{wheels} --extra-index-url https://wheels.example/cpu " in did[0]


def test_what_a_failed_step_has_made_is_removed(tmp_path):
    (tmp_path / "temporary").mkdir()
    program(tmp_path / "bin", "tar", "exit 1")
    code, _, did = without_registry(tmp_path, "--only-base", variables={"TMPDIR": str(tmp_path / "temporary")})
    assert code != 0
    assert did[0].startswith("debootstrap --variant=minbase")
    assert str(tmp_path / "temporary") in did[0]
    assert list((tmp_path / "temporary").iterdir()) == []


def test_the_settings_of_pip_are_in_no_image_that_does_not_need_them():
    """They may hold a password. What the command would copy is read from it, since not every machine has the file."""
    script_text = (DEPLOY / "build-without-registry").read_text()
    [line] = [line for line in script_text.splitlines() if line.strip().startswith("for file in ")]
    files = line.strip().removeprefix("for file in ").removesuffix("; do")
    for only_base, expected in (("", False), ("yes", True)):
        shell = f"set -u; only_base={only_base}; printf '%s\\n' {files}"
        named = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout.splitlines()
        assert ("etc/pip.conf" in named) == expected
        assert "etc/ssl/certs/ca-certificates.crt" in named


def test_a_base_of_another_processor_is_made_alone(tmp_path):
    code, text, did = without_registry(tmp_path, "--only-base", "--arch", "arm64")
    assert code == 0, text
    assert did[0].startswith("debootstrap --arch=arm64 ")
    assert not Path(did[0].split()[-1]).parent.exists()
    assert did[1:] == ["docker import - wildflower/base-arm64"]
    code, text, did = without_registry(tmp_path, "--arch", "arm64")
    assert (code, "--arch goes with --only-base" in text, did) == (1, True, [])
    code, text, did = without_registry(tmp_path, "--no-such")
    assert (code, "unknown argument: --no-such" in text, did) == (1, True, [])


@pytest.mark.skipif(not shutil.which("docker-compose"), reason="Compose 1.29 reads the file")
def test_the_commands_of_the_deployment_page_are_there():
    """`make test-compose` runs them; here Compose reads the file, and knows the services that are typed."""
    page = (DEPLOY.parent / "docs" / "deployment.md").read_text().replace("\\\n", " ")
    typed = [line for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    profiles = [part for name in ("run", "shaping", "enrollment") for part in ("--profile", name)]
    found = subprocess.run(
        ["docker-compose", *profiles, "config", "--services"],
        cwd=DEPLOY.parent,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    services = found.stdout.split()
    commands = [shlex.split(line, comments=True) for line in typed]
    runs = [words for words in commands if words[:4] == ["docker", "compose", "run", "--rm"]]
    assert len(runs) >= 3
    assert {words[4] for words in runs} <= set(services)
    scripts = {word for words in commands for word in words if word.startswith("deploy/") and "secrets" not in word}
    assert {"deploy/certs", "deploy/build-without-registry", "deploy/raspberry-pi/install"} <= scripts
    assert [script for script in scripts if not os.access(DEPLOY.parent / script, os.X_OK)] == []
