"""An arm64 node, emulated, among three of this machine's processor: what a Raspberry Pi would be to a fleet.

Not part of `make test`: `make test-arm64` names this file. An emulator is some ten times slower than a board: nothing
here is timed.
"""

import json

import pytest

from tests.compose.engine import Deployment, build_arm64_device, build_images, engine, run

# That of a Raspberry Pi 4: it lacks instructions that newer ones have, and that PyTorch has been built with.
PROCESSOR = "cortex-a72"


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("arm64")
    with engine(folder):
        emulated = {"image": build_arm64_device(folder), "environment": {"QEMU_CPU": PROCESSOR}}
        found = Deployment(folder, build_images(folder), {"node-3": emulated})
        try:
            found.up(600)
            yield found
        finally:
            try:
                found.keep_logs_and_runs()
            finally:
                found.down()


def test_an_arm64_node_trains_among_the_others(deployment):
    node = deployment.container("node-3")
    assert run("docker", "exec", node, "uname", "-m").strip() == "aarch64"
    report = json.loads(run("docker", "exec", node, "wildflower", "probe", "--json"))
    assert report["kind"] == "aarch64"
    # HWCAP_ATOMICS: the atomic instructions of ARMv8.1.
    atomics = "import ctypes; print(bool(ctypes.CDLL(None).getauxval(16) & 1 << 8))"
    assert run("docker", "exec", node, "python3", "-c", atomics).strip() == "False"
    deployment.finish(deployment.start_run("arm64", "rounds=2", "deadline-seconds=600"), "arm64", 1800)
    rounds, devices = deployment.journal("arm64"), deployment.journal("arm64", "devices")
    assert [line["outcome"] for line in devices] == ["trained"] * 8
    losses = {line["device"]: line["loss"] for line in devices if line["round"] == 2}
    assert max(losses.values()) < 2.3  # that of guessing
    assert rounds[1]["score"] > max(rounds[0]["score"], 0.15)
