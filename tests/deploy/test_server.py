"""The server without Docker: what its script writes is taken by nginx and systemd, where these are."""

import re
import shutil
import socket
import subprocess
import textwrap
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"
STARTED = ["superlink", "gate", "bandwidth", "fleet"]
SERVICES = [*STARTED, "enrollment"]
FOLDER = "/etc/wildflower-server"

pytestmark = pytest.mark.skipif(
    not (shutil.which("openssl") and shutil.which("ssh-keygen")), reason="openssl and ssh-keygen make the keys"
)


def install(*arguments: object) -> tuple[int, str]:
    done = subprocess.run([DEPLOY / "server/install", *map(str, arguments)], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def secrets(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("server") / "secrets"
    subprocess.run([DEPLOY / "certs", "--out", folder, "--nodes", "1"], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def written(secrets) -> dict[str, str]:
    """The files that a dry run shows, by their names."""
    code, text = install("--secrets", secrets, "--bind", "192.0.2.7", "--dry-run")
    assert code == 0, text
    found = re.findall(r"^\+ write (\S+):\n((?:    .*\n)*)", text, re.MULTILINE)
    assert not Path(FOLDER).exists()
    return {Path(name).name: textwrap.dedent(content) for name, content in found}


def test_devices_reach_the_gate_and_runs_are_submitted_on_the_server_alone(written):
    units = {name: written[f"wildflower-{name}.service"] for name in SERVICES}
    assert "wildflower-superlink --host=127.0.0.1 --port=8001 " in units["superlink"]
    assert "--enable-supernode-auth" in units["superlink"]
    assert "proxy_pass $superlink" in written["gate.conf"]
    assert "set $superlink https://127.0.0.1:8001;" in written["gate.conf"]
    assert "listen 192.0.2.7:8000 ssl;" in written["gate.conf"]
    assert "--address=192.0.2.7:9100" in units["bandwidth"]
    assert "/runs --serve 127.0.0.1:9464 --superlink 127.0.0.1:8001" in units["fleet"]
    assert "enrollment 127.0.0.1:8001 /etc/wildflower-server --address 192.0.2.7:9200" in units["enrollment"]
    assert all("User=wildflower\n" in unit for unit in units.values())
    writes = f"ReadWritePaths=/var/lib/wildflower-server {FOLDER}/tokens {FOLDER}/public\n"
    assert [name for name in SERVICES if writes in units[name]] == ["enrollment"]
    for left in ("/run/secrets", "resolver", "superlink:8000;"):
        assert left not in written["gate.conf"].replace("Host superlink:8000;", "")


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("nginx") is None, reason="no nginx is installed")
def test_nginx_takes_the_gate(written, secrets, tmp_path):
    conf = written["gate.conf"].replace("/tmp/", f"{tmp_path}/").replace(FOLDER, str(secrets))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "gate.conf").write_text(conf.replace("192.0.2.7:8000", f"127.0.0.1:{port}"))
    done = subprocess.run(["nginx", "-t", "-c", tmp_path / "gate.conf"], capture_output=True, text=True)
    assert "syntax is ok" in done.stderr, done.stderr


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd is installed")
def test_systemd_takes_the_units(written, tmp_path):
    files = []
    for name in SERVICES:
        files.append(tmp_path / f"wildflower-{name}.service")
        # The programs are not installed here.
        files[-1].write_text(
            re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", written[files[-1].name], flags=re.MULTILINE)
        )
    done = subprocess.run(["systemd-analyze", "verify", *files], capture_output=True, text=True)
    assert [line for line in done.stderr.splitlines() if "wildflower" in line] == []


def test_enrollment_is_started_by_hand_with_tokens_that_are_nowhere_else(secrets):
    text = install("--secrets", secrets, "--dry-run")[1]
    assert [name for name in SERVICES if f"+ systemctl restart wildflower-{name}.service" in text] == STARTED
    (secrets / "tokens").mkdir()
    (secrets / "tokens" / "device-0").touch()
    code, text = install("--enrollment", "--secrets", secrets, "--dry-run")
    assert code == 0, text
    there = f"{FOLDER}/tokens/device-0"
    assert text.splitlines()[:-1] == [
        f"+ install --owner=wildflower --group=wildflower --mode=0600 {secrets}/tokens/device-0 {there}",
        f"+ rm {secrets}/tokens/device-0",
        "+ systemctl start wildflower-enrollment.service",
    ]


def test_what_is_wrong_is_said(secrets, tmp_path):
    for arguments, told in (
        (["--secrets", tmp_path], "there is no ca.crt: deploy/certs makes it"),
        (["--secrets", secrets, "--bind", "fl.example; rm"], "--bind 'fl.example; rm': expected an address"),
        (["--ports", "1"], "unknown argument: --ports"),
        (["--enrollment", "--secrets", tmp_path], "there are no tokens: deploy/kits --token-days makes them"),
        (["--secrets"], "wants a value"),
    ):
        code, text = (
            install(*arguments, "--dry-run") if arguments != ["--secrets"] else install("--dry-run", "--secrets")
        )
        assert code == 1
        assert text.startswith("server: ")
        assert told in text


def test_keys_and_software_are_removed_and_state_stays():
    code, text = install("--uninstall", "--dry-run")
    assert code == 0
    for name in SERVICES:
        assert f"+ systemctl disable --now wildflower-{name}.service" in text
        assert f"+ rm -f /etc/systemd/system/wildflower-{name}.service" in text
    assert "+ rm -rf /etc/wildflower-server /opt/wildflower-server" in text
    assert "rm -rf /var/lib" not in text
