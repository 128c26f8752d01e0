import datetime
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from devices.probe import board_kind

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
    assert "OOMPolicy=continue" in text
    assert "WILDFLOWER_CACHE=/var/lib/wildflower/cache" in text
    # A PyTorch that does not start on this board is found before there is a service of it.
    assert text.index("import\\ threading\\,\\ torch") < text.index("write /etc/systemd/system/wildflower-node.service")
    assert not Path("/etc/wildflower").exists()
    code, text = script(f"{board}/install", "--uninstall", "--dry-run")
    assert code == 0
    assert "+ rm -rf /etc/wildflower" in text
    assert "rm -rf /var/lib/wildflower" not in text


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


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        ('{"success": true, "node-id": "7"}', 0, "node-1: registered as node 7"),
        ('{"success": false, "error-message": "Public key already in use"}', 0, "node-1: registered before"),
        ('{"success": false, "error-message": "no such thing"}', 1, "node-1: no such thing"),
        ("Connection refused", 1, "node-1: Connection refused"),
    ],
)
def test_every_public_key_is_registered(secrets, tmp_path, answer, code, words):
    program(tmp_path / "bin", "flwr", f"echo '{answer}'")
    found, text = enroll(tmp_path, secrets / "public")
    assert (found, words in text) == (code, True), text


def test_a_node_is_revoked_by_its_number(tmp_path):
    program(tmp_path / "bin", "flwr", f"""echo "$@" >{tmp_path / "log"}; echo '{{"success": true}}'""")
    code, text = enroll(tmp_path, "--revoke", "42")
    assert code == 0, text
    assert "node 42: its key is refused" in text
    assert (tmp_path / "log").read_text() == "supernode unregister 42 here --format json\n"
    program(tmp_path / "bin", "flwr", """echo '{"success": false, "error-message": "unknown node"}'""")
    code, text = enroll(tmp_path, "--revoke", "42")
    assert (code, "node 42: unknown node" in text) == (1, True)


def enroll(folder: Path, *what: object) -> tuple[int, str]:
    environment = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    command = [sys.executable, DEPLOY / "enroll", "superlink:8000", "/ca.crt", *map(str, what)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


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
