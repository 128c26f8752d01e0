import datetime
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

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


def test_the_certificate_is_the_authoritys_and_names_every_way_to_the_server(secrets):
    authority = x509.load_pem_x509_certificate((secrets / "ca.crt").read_bytes())
    server = x509.load_pem_x509_certificate((secrets / "server.crt").read_bytes())
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {"superlink", "gate", "bandwidth", "localhost", "fl.example"} <= set(names.get_values_for_type(x509.DNSName))
    assert {"127.0.0.1", "192.0.2.7"} <= {str(ip) for ip in names.get_values_for_type(x509.IPAddress)}
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
    assert script("certs", "--out", secrets, "--renew")[0] == 0
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
        ("raspberry-pi", "/opt/wildflower/bin/flower-supernode"),
        ("jetson", "wildflower-device flower-supernode"),
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
    assert not Path("/etc/wildflower").exists()
    code, text = script(f"{board}/install", "--uninstall", "--dry-run")
    assert code == 0
    assert "+ rm -rf /etc/wildflower" in text
    assert "rm -rf /var/lib/wildflower" not in text


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
    assert "After=network-online.target docker.service wildflower-gpu.service" in text
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
        ("--ca", secrets / "none", "no such file"),
        ("--key", secrets / "public" / "node-1.pub", "is no private key"),
        ("--bandwidth", "fl.example:9100", "--bandwidth needs --token"),
    ):
        arguments = [part for pair in {**given, name: wrong}.items() for part in pair]
        code, text = script(f"{board}/install", "--dry-run", *arguments)
        assert code == 1, text
        assert words in text
        assert "+ " not in text
