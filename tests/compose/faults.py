"""What must be seen when real containers, networks and processes fail: one test per row of docs/deployment.md's table.

Not part of `make test`: `make test-compose` names this file. All tests share one deployment and run in order.
"""

import json
import re
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from safetensors.torch import load

from tests.compose.engine import (
    BANDWIDTH_PORT,
    GATE_PORT,
    NETWORK,
    NODES,
    Deployment,
    build_images,
    engine,
    run,
    wait_for,
)
from wildflower.devices.bandwidth import SERVICE
from wildflower.server_app.run_records import RoundRecord

LIMITS_BYTES = (600 * 2**20, 800 * 2**20, 1200 * 2**20, 2000 * 2**20)
# Small, and the same for every device, whatever memory it has left; long enough to be hit in the middle.
QUICK = (
    "family=cnn3",
    "family-arguments=",
    "widths=1",
    "local-steps=100",
    "learning-rate=0.02",
    "strategy=fedavg",
    "fedavg.use=all-small",
    "budget.transfer-seconds=0",
    "budget.memory-fraction=0.5",
    "evaluate-tiers=false",
)
RETRYING = "Connection attempt failed, retrying"  # what Flower says in a node whose server does not answer
TRAINED_BUT_2 = {0: "trained", 1: "trained", 3: "trained"}
# Inside a node that trains, and until that is over: something else takes all memory, or the work gets 1 MiB more than
# it has, as if too little had been predicted. What takes all goes before the SuperNode and behind the work: the kernel
# adds to this number what a process holds.
FILL = """
open("/proc/self/oom_score_adj", "w").write("500")
held = []
while trains(child):
    held.append(bytearray(b"x" * 2**22))
    if len(held) > 600:
        raise SystemExit("memory has no end")
print(len(held), "x 4 MiB")
"""
BOUND = """
import signal

# Work is bounded as it begins: what later steps need, earlier ones have held. The bound must not come after the work.
found = {child}
while True:
    for child in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        if child not in found and trains(child):
            os.kill(child, signal.SIGSTOP)
            if trains(child):
                break
            os.kill(child, signal.SIGCONT)
    else:
        if time.monotonic() > end:
            raise SystemExit("nothing more was trained within 200 s")
        time.sleep(0.005)
        continue
    break
now = [line for line in open(f"/proc/{child}/status") if line.startswith("VmData:")][0]
bound = 1024 * int(now.split()[1]) + 2**20
resource.prlimit(child, resource.RLIMIT_DATA, (bound, resource.prlimit(child, resource.RLIMIT_DATA)[1]))
os.kill(child, signal.SIGCONT)
while trains(child):
    time.sleep(0.05)
print(bound)
"""


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compose")
    with engine(folder):
        found = Deployment(folder, build_images(folder))
        try:
            found.up()
            yield found
        finally:
            try:
                found.keep_logs_and_runs()
            finally:
                found.down()


@pytest.fixture(scope="module")
def shaped(deployment):
    """A run whose node-3 has had a link of 2 Mbit/s since its first round, without a new report of it yet."""
    process = deployment.start_run("shaped", "rounds=100", "evaluate-every=100")
    wait_for_round(deployment, "shaped", 1, process, 600)
    deployment.environment["NODE_3_MBIT_PER_S"] = "2"
    deployment.compose("--profile", "shaping", "up", "--detach", "--no-deps", "shape-node-3")
    try:
        wait_for("the link is shaped", lambda: "2 Mbit/s" in deployment.compose("logs", "shape-node-3"), 60)
        yield process
    finally:
        if process.poll() is None:
            deployment.stop_run(process, "shaped")
        unshape(deployment)


def unshape(deployment: Deployment) -> None:
    """Stop the shaper, which leaves the link as it was."""
    deployment.compose("--profile", "shaping", "stop", "shape-node-3")
    assert deployment.state("shape-node-3")["ExitCode"] == 0, "the link is not as before"


def wait_for_round(deployment: Deployment, name: str, number: int, process: subprocess.Popen, seconds: float) -> None:
    def look() -> bool:
        assert process.poll() is None or len(deployment.journal(name)) >= number, deployment.output(name)[-3000:]
        return len(deployment.journal(name)) >= number

    wait_for(f"round {number} of {name} is finished", look, seconds)


def wait_for_device(
    deployment: Deployment,
    name: str,
    device: int,
    after: int,
    process: subprocess.Popen,
    seconds: float,
    trained: bool = True,
) -> dict[str, Any]:
    """A device's line of the first round behind `after` in which it trained, or did not."""

    def look() -> dict[str, Any] | None:
        assert process.poll() is None, deployment.output(name)[-3000:]
        lines = deployment.journal(name, "devices")
        own = (d for d in lines if d["device"] == device and d["round"] > after)
        return next((d for d in own if (d["outcome"] == "trained") == trained), None)

    what = f"device {device} {'trains' if trained else 'does not train'} in {name} after round {after}"
    found: dict[str, Any] = wait_for(what, look, seconds)
    return found


def limit(deployment: Deployment, node: str, nbytes: int) -> None:
    """Give a node's container another limit of memory."""
    run("docker", "update", "--memory", str(nbytes), "--memory-swap", str(nbytes), deployment.container(node))


def squeeze(deployment: Deployment, node: str, limit_bytes: int) -> int:
    """When a node trains, leave it 24 MB of free memory; returns the new limit.

    It has about 40 MB more when it reports, between two trainings: a quarter of that is less than its first model
    needs, and more than the smallest one does.
    """
    deployment.when_training(node)
    report = "from wildflower.devices.probe import probe_machine; print(probe_machine().memory_available_bytes)"
    free_bytes = int(run("docker", "exec", deployment.container(node), "python3", "-c", report))
    squeezed_bytes = limit_bytes - free_bytes + (24 << 20)
    limit(deployment, node, squeezed_bytes)
    return squeezed_bytes


def test_four_unequal_nodes_train_four_unequal_models(deployment):
    for node, limit_bytes in zip(NODES, LIMITS_BYTES, strict=True):
        report = json.loads(run("docker", "exec", deployment.container(node), "wildflower", "probe", "--json"))
        assert report["memory_total_bytes"] == limit_bytes
    # What is free in nodes differs from machine to machine, by up to a third. Of the last three each has 1.9 times as
    # much as the one before it, and a width takes at most 1.5 times the memory of the next: they never get the same.
    widths = "widths=1, 0.83, 0.69, 0.57, 0.48, 0.4, 0.33, 0.27, 0.23, 0.19, 0.16"
    wide = ("family-arguments=first_channels = 64", widths, "budget.memory-fraction=0.2", "budget.transfer-seconds=0")
    process = deployment.start_run("unequal", *wide, "rounds=2", "evaluate-tiers=false")
    deployment.finish(process, "unequal", 600)
    reports = {n["device"]: n["report"] for n in json.loads(deployment.read("unequal/nodes.json"))}
    assert [reports[device]["memory_total_bytes"] for device in range(4)] == list(LIMITS_BYTES)
    assert [reports[device]["cpus"] for device in range(4)] == [0.5, 0.5, 0.75, 1.0]
    rounds, devices = deployment.journal("unequal"), deployment.journal("unequal", "devices")
    assert [line["outcome"] for line in devices] == ["trained"] * 8
    first = {line["device"]: line for line in devices if line["round"] == 1}
    assert [first[device]["tier"] for device in range(4)] == [f"container-{mb}m" for mb in (600, 800, 1200, 2000)]
    budgets = [first[device]["budget"]["memory_bytes"] for device in range(4)]
    assert budgets == sorted(budgets)
    assert all(budget <= 0.2 * limit for budget, limit in zip(budgets, LIMITS_BYTES, strict=True))
    assert len({first[device]["parameters"] for device in range(4)}) >= 3
    assert rounds[1]["score"] > max(rounds[0]["score"], 0.15)


def test_a_fleet_over_several_containers_has_the_bits_of_a_fleet_in_one(deployment):
    # Devices of five kinds, of which each keeps corrections of its own (SCAFFOLD) in its node's state folder.
    fleet = (
        *QUICK,
        *("fleet=five-memories", "devices=20", "devices-per-round=10", "strategy=scaffold", "local-steps=5"),
        *("rounds=3", "deadline-seconds=0", "evaluate-every=3", "seed=2"),
    )
    nodes = deployment.start_run("fleet-over-nodes", *fleet, "engine=nodes", "workers=4")
    deployment.finish(nodes, "fleet-over-nodes", 600)
    settings = [part for setting in ("run-name=fleet-in-one", *fleet, "workers=2") for part in ("--set", setting)]
    here = ("run", "--rm", "-T", "--entrypoint", "wildflower", "runner", "run")
    deployment.compose(*here, "/app/benchmarks/deployment/digits.toml", *settings)
    devices = deployment.journal("fleet-over-nodes", "devices")
    assert [d["outcome"] for d in devices] == ["trained"] * 30
    # Which node a device has follows from numbers that the SuperLink draws, so one of the four may have none. Twenty
    # devices, most of which are drawn, leave out two in less than one of ten thousand deployments.
    node_of = {d["device"]: d["node"] for d in devices}
    assert all(d["node"] == node_of[d["device"]] for d in devices)
    assert len(node_of) >= 16
    assert len(set(node_of.values())) >= 3
    file = "checkpoint/round-3/state.safetensors"
    over_nodes, in_one = (deployment.read(f"{name}/{file}") for name in ("fleet-over-nodes", "fleet-in-one"))
    assert len(over_nodes) > 10_000
    assert over_nodes == in_one


def test_nobody_gets_in_with_a_wrong_key_no_key_a_wrong_authority_or_an_expired_certificate(
    deployment, shaped, tmp_path
):
    nodes_before = [deployment.state(node)["StartedAt"] for node in NODES]
    other = tmp_path / "other"
    run("deploy/certs", "--out", other, "--nodes", "1")
    expired = tmp_path / "expired"
    run("cp", "-r", deployment.secrets, expired)
    (tmp_path / "names").write_text("subjectAltName=DNS:old-gate")
    run(
        *("openssl", "x509", "-req", "-in", "/dev/stdin", "-CA", expired / "ca.crt", "-CAkey", expired / "ca.key"),
        *("-days", "-1", "-extfile", tmp_path / "names", "-out", expired / "server.crt"),
        input=run("openssl", "req", "-new", "-key", expired / "server.key", "-subj", "/CN=old-gate"),
    )
    # A key that took part and is revoked, as docs/security.md says, and one that is not.
    for name in ("lost", "spare"):
        run("deploy/certs", "--out", deployment.secrets, "--add-node", name)
    enrolled = deployment.compose("run", "--rm", "-T", "enroll")
    registered = re.search(r"lost: registered as node (\d+)", enrolled)
    assert registered
    assert "spare: registered as node" in enrolled
    enroll = ("run", "--rm", "-T", "enroll", "enroll", "superlink:8000", "/run/secrets/ca_certificate")
    deployment.compose(*enroll, "--revoke", registered[1])
    # Its file may still lie there, at every start.
    assert "lost: registered before" in deployment.compose("run", "--rm", "-T", "enroll")
    (deployment.secrets / "public/lost.pub").unlink()
    run("chmod", "755", other, other / "nodes", expired, expired / "nodes")
    ca, key = deployment.secrets / "ca.crt", deployment.secrets / "nodes/node-0"

    def command(certificate, private_key, superlink="gate:8000", *options):
        mounts = ["--volume", f"{certificate}:/ca.crt:ro"]
        node = ["wildflower-node", "--superlink", superlink, "--root-certificates", "/ca.crt", "--max-retries", "1"]
        node += ["--node-config", "partition-id=0"]
        if private_key is not None:
            mounts += ["--volume", f"{private_key}:/key:ro"]
            node += ["--auth-supernode-private-key", "/key"]
        docker = ["docker", "run", "--rm", "--network", NETWORK, "--tmpfs", "/tmp", *options, *mounts]
        return [*docker, f"{deployment.images}-device", "timeout", "200", *node]

    def node(*given):
        done = subprocess.run(command(*given), capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    server = [
        "docker",
        "run",
        "--detach",
        "--rm",
        "--network",
        NETWORK,
        "--network-alias",
        "old-gate",
    ]
    server += ["--volume", f"{expired / 'server.crt'}:/run/secrets/server_certificate:ro"]
    server += ["--volume", f"{expired / 'server.key'}:/run/secrets/server_key:ro"]
    server += ["--volume", f"{expired / 'ca.crt'}:/run/secrets/ca_certificate:ro", f"{deployment.images}-gate"]
    gate = run(*server).strip()
    spare = run(*command(ca, deployment.secrets / "nodes/spare", "gate:8000", "--detach")).strip()
    try:
        with ThreadPoolExecutor() as pool:
            refused = {
                pool.submit(node, ca, other / "nodes/node-0"): (77, "never enrolled"),
                pool.submit(node, ca, None): (1, "305"),
                pool.submit(node, ca, deployment.secrets / "nodes/lost"): (77, "never enrolled"),
                pool.submit(node, other / "ca.crt", key): (69, "ertificate"),
                pool.submit(node, expired / "ca.crt", key, "old-gate:8000"): (69, "certificate has expired"),
            }
        # Flower says the same of a gate that is gone. But it was there: who is let in stays.
        assert "true" in run("docker", "inspect", "--format", "{{.State.Running}}", spare, check=False)
    finally:
        run("docker", "stop", "--time", "1", gate, spare)
    for attempt, (ends_with, words) in refused.items():
        code, text = attempt.result()
        assert code == ends_with, text
        assert words in text, text
    assert [deployment.state(node)["StartedAt"] for node in NODES] == nodes_before
    assert shaped.poll() is None, deployment.output("shaped")[-3000:]


def test_garbage_oversized_requests_and_slow_senders_break_nothing(deployment, shaped):
    services = ("superlink", "gate", "bandwidth", *NODES)
    before = {service: deployment.state(service)["StartedAt"] for service in services}
    trust = ssl.create_default_context(cafile=str(deployment.secrets / "ca.crt"))

    def answer(request: bytes, port: int = GATE_PORT, tls: bool = True) -> bytes:
        """All that a port answers to some bytes, until it closes the connection."""
        with socket.create_connection(("127.0.0.1", port), 10) as plain:
            link = trust.wrap_socket(plain, server_hostname="localhost") if tls else plain
            link.settimeout(60)
            received = b""
            try:
                link.sendall(request)
                while data := link.recv(65536):
                    received += data
            except OSError:
                pass  # closed on us, which is an answer
            return received

    def request(method: str, path: str, body: bytes = b"", length: int | None = None) -> bytes:
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: "
        return f"{head}{len(body) if length is None else length}\r\n\r\n".encode() + body

    def seconds_to_answer(unfinished: bytes) -> float:
        started = time.monotonic()
        answer(unfinished)
        return time.monotonic() - started

    pool = ThreadPoolExecutor()
    header = pool.submit(seconds_to_answer, b"POST /v1/fleet/push-object HTTP/1.1\r\nHost:")  # and never a word more
    body = pool.submit(seconds_to_answer, request("POST", "/v1/fleet/push-object", b"x", length=1000))
    silent = [pool.submit(seconds_of_a_silent_call, deployment) for _ in range(4)]
    garbage = bytes(range(256)) * 64
    for tls in (False, True):
        assert b"200 OK" not in answer(garbage, tls=tls)
        answer(garbage, BANDWIDTH_PORT, tls=tls)
    with bandwidth_channel(deployment) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.stream_unary(f"/{SERVICE}/Up")(iter([bytes(2**20)]), metadata=token_of(deployment), timeout=30)
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    # The control and the runtime API do not exist for devices, whatever way the path is written.
    for path in (
        "/v1/control/start-run",
        "/v1/runtime/acquire-task",
        "/health",
        "/v1/fleet/../control/list-runs",
        "/v1/fleet/%2e%2e/control/list-runs",
        "/v1/control/list-runs/../../fleet/get-run",
        "/v1/fleet/..;/control/list-runs",
        "https://localhost/v1/fleet/../control/list-runs",
    ):
        # Flower's own answers are in JSON.
        refusal = answer(request("POST", path))
        assert refusal.startswith(b"HTTP/1.1 404"), path
        assert b"nginx" in refusal, path
    # Without a signature, and with nothing that could be read.
    status = answer(request("POST", "/v1/fleet/pull-messages", garbage)).split(b"\r\n")[0]
    assert status.split()[1][:1] == b"4", status
    assert answer(request("POST", "/v1/fleet/push-object", length=7 * 10**6)).startswith(b"HTTP/1.1 413")
    assert not answer(request("POST", "/v1/fleet/push-object", bytes(5 * 2**20))).startswith(b"HTTP/1.1 413")
    assert header.result() < 30
    assert body.result() < 50
    assert max(call.result() for call in silent) < 20
    pool.shutdown()

    # By its address: its name is not even known there.
    reach = "import socket, sys\ntry: socket.create_connection((sys.argv[1], 8000), 3)\nexcept OSError: sys.exit(0)\n"
    reach += "sys.exit('devices reach the SuperLink')"
    for network in deployment.inspect("superlink")["NetworkSettings"]["Networks"].values():
        image = f"{deployment.images}-device"
        run("docker", "run", "--rm", "--network", NETWORK, image, "python3", "-c", reach, network["IPAddress"])
    # Who has the token is served as before.
    report = measured_links(deployment, "node-0")
    assert (report["links_from"], report["links_problem"]) == ("probe", None)
    assert {service: deployment.state(service)["StartedAt"] for service in services} == before
    assert shaped.poll() is None, deployment.output("shaped")[-3000:]


def token_of(deployment: Deployment) -> tuple[tuple[str, str], ...]:
    """What a call to the bandwidth service says of itself."""
    return (("authorization", f"Bearer {(deployment.secrets / 'bandwidth.token').read_text().strip()}"),)


def bandwidth_channel(deployment: Deployment) -> grpc.Channel:
    """A connection to the bandwidth service."""
    credentials = grpc.ssl_channel_credentials((deployment.secrets / "ca.crt").read_bytes())
    options = [("grpc.use_local_subchannel_pool", 1)]
    return grpc.secure_channel(f"localhost:{BANDWIDTH_PORT}", credentials, options)


def seconds_of_a_silent_call(deployment: Deployment) -> float:
    """How long somebody who knows the token, and asks for nothing, can hold one of the service's streams."""
    release, started = threading.Event(), time.monotonic()

    def nothing() -> Iterator[bytes]:
        release.wait(60)
        yield b""

    with bandwidth_channel(deployment) as channel:
        channel.stream_stream(f"/{SERVICE}/Down")(nothing(), metadata=token_of(deployment)).code()
        release.set()
    return time.monotonic() - started


def measured_links(deployment: Deployment, node: str) -> dict[str, Any]:
    """The report of a node that has measured its links for the first time."""
    config = 'bandwidth-address="bandwidth:9100" bandwidth-ca="/run/secrets/ca_certificate" '
    config += 'bandwidth-token-file="/run/secrets/bandwidth_token"'
    probe = ["wildflower", "probe", "--json", "--state-dir", "/tmp/other", "--node-config", config]
    found: dict[str, Any] = json.loads(run("docker", "exec", deployment.container(node), *probe).splitlines()[-1])
    return found


def test_a_link_at_2_mbit_per_s_is_seen_and_makes_a_smaller_model(deployment, shaped):
    # In round 1 the link was as fast as the machine. The round behind which a new measurement is paid for is the last
    # one with a model that takes 45 s each way.
    def look() -> dict[str, Any] | None:
        assert shaped.poll() is None, deployment.output("shaped")[-3000:]
        lines = [d for d in deployment.journal("shaped", "devices") if d["device"] == 3]
        assert [d["outcome"] for d in lines] == ["trained"] * len(lines)
        return next((d for d in lines if d["budget"]["download_bytes"] <= 2.5e6 / 8 * 20), None)

    after = wait_for("node-3 has a budget for its new link", look, 500)
    before, *_ = (d for d in deployment.journal("shaped", "devices") if d["device"] == 3)
    # Of the run's own reports: what a stopped run leaves behind goes on to use the link for a while.
    (report,) = (n["report"] for n in json.loads(deployment.read("shaped/nodes.json")) if n["device"] == 3)
    deployment.stop_run(shaped, "shaped")
    unshape(deployment)  # the last that wants a slow link
    # A busy machine sends less than its link would carry: 1.46 was measured once.
    assert 1 <= report["down_mbit_per_s"] <= 2.5
    assert 1 <= report["up_mbit_per_s"] <= 2.5
    assert after["budget"]["download_bytes"] >= 1e6 / 8 * 20
    assert 2 <= after["round"] <= 4
    assert after["parameters"] < before["parameters"]


def test_a_killed_node_costs_its_round_and_comes_back_with_its_state(deployment):
    # Every device keeps a model of its own, so a state that was lost would show: its loss would begin anew.
    settings = ("rounds=100", "evaluate-every=100", "deadline-seconds=200")
    process = deployment.start_run("killed-node", *QUICK, *settings, "strategy=local")
    wait_for_round(deployment, "killed-node", 1, process, 300)
    node = deployment.container("node-2")
    deployment.when_training("node-2")
    run("docker", "kill", node)
    lost = wait_for_device(deployment, "killed-node", 2, 1, process, 250, trained=False)
    run("docker", "start", node)
    back = wait_for_device(deployment, "killed-node", 2, lost["round"], process, 300)
    deployment.stop_run(process, "killed-node")
    devices = deployment.journal("killed-node", "devices")
    others = {d["device"]: d["outcome"] for d in devices if d["round"] == lost["round"] and d["device"] != 2}
    assert others == TRAINED_BUT_2
    assert lost["outcome"].startswith("failed: the node is offline"), lost
    (first,) = (d for d in devices if d["device"] == 2 and d["round"] == 1)
    assert back["node"] == first["node"]
    assert back["loss"] < first["loss"] / 2, (first, back)


def test_a_link_gone_for_20_seconds_costs_no_reply_and_one_gone_for_100_seconds_costs_its_round(deployment):
    settings = ("rounds=100", "evaluate-every=100", "deadline-seconds=200")
    process = deployment.start_run("cut", *QUICK, *settings)
    wait_for_round(deployment, "cut", 1, process, 300)

    def cut(service: str, seconds: float) -> None:
        """When a node trains, take its link away for so long."""
        node = deployment.container(service)
        deployment.when_training(service)
        run("docker", "network", "disconnect", NETWORK, node)
        gone = time.monotonic()
        wait_for(f"{seconds:g} seconds without a link", lambda: time.monotonic() - gone >= seconds, seconds + 10)
        run("docker", "network", "connect", NETWORK, node)

    hit = len(deployment.journal("cut")) + 1
    with ThreadPoolExecutor() as pool:
        brief, long = pool.submit(cut, "node-1", 20), pool.submit(cut, "node-2", 100)
        brief.result()
        assert len(deployment.journal("cut")) < hit, "the round did not wait for the reply"
        long.result()
    meanwhile = len(deployment.journal("cut"))
    lost = wait_for_device(deployment, "cut", 2, 1, process, 100, trained=False)
    back = wait_for_device(deployment, "cut", 2, lost["round"], process, 300)
    deployment.stop_run(process, "cut")
    devices = deployment.journal("cut", "devices")
    assert lost["round"] == hit < meanwhile, "no round without the node ended while its link was gone"
    for number in range(1, meanwhile + 1):
        others = {d["device"]: d["outcome"] for d in devices if d["round"] == number and d["device"] != 2}
        assert others == TRAINED_BUT_2
    assert lost["outcome"].startswith("failed: the node is offline"), lost
    assert back["node"] == lost["node"]
    # The reply came over the link that was back: the cut took longer than the training.
    (reply,) = (d for d in devices if d["device"] == 1 and d["round"] == hit)
    assert reply["seconds"] < 20


def test_a_killed_gate_is_started_again(deployment, note):
    # Rounds are long enough to find all nodes at work at once, so that no order or reply is on its way when the gate is
    # hit: Flower hands an order out once, and loses one that is on its way at that moment.
    settings = ("rounds=100", "evaluate-every=100", "deadline-seconds=200", "local-steps=600")
    process = deployment.start_run("killed-gate", *QUICK, *settings)
    wait_for_round(deployment, "killed-gate", 1, process, 300)

    def finished() -> list[RoundRecord]:
        return [RoundRecord(**line) for line in deployment.journal("killed-gate")]

    def started() -> dict[str, str]:
        return {service: deployment.state(service)["StartedAt"] for service in ("superlink", "gate", *NODES)}

    def tried() -> int:
        return sum(deployment.compose("logs", node).count(RETRYING) for node in NODES)

    there, tried_before = started(), tried()
    for node in NODES:
        deployment.when_training(node)
    before = finished()
    # The container ends with nginx, and the shell in it may be killed before it returns: the status is 0 or 137.
    run("docker", "exec", deployment.container("gate"), "sh", "-c", "kill -9 $(cat /tmp/nginx.pid)", check=False)
    killed = time.monotonic()
    wait_for("Docker has started the gate again", lambda: started()["gate"] != there["gate"], 60)
    wait_for_round(deployment, "killed-gate", len(before) + 1, process, 300)
    seconds = time.monotonic() - killed
    wait_for_round(deployment, "killed-gate", len(before) + 2, process, 300)
    deployment.stop_run(process, "killed-gate")
    after = finished()
    assert {s: when for s, when in started().items() if s != "gate"} == {s: there[s] for s in there if s != "gate"}
    devices = [d for d in deployment.journal("killed-gate", "devices") if d["round"] <= len(before) + 2]
    assert [d["outcome"] for d in devices] == ["trained"] * 4 * (len(before) + 2)
    seen = f"nodes say `{RETRYING} ...`" if tried() > tried_before else "nothing"
    note("kill -9: gate", f"{seen}; Docker starts it again, and every reply arrives", seconds, before, after)


def test_a_killed_superlink_comes_back_and_the_run_is_resumed(deployment):
    settings = ("rounds=2", "deadline-seconds=200", *QUICK)
    undisturbed = deployment.start_run("undisturbed", *settings)
    deployment.finish(undisturbed, "undisturbed", 600)
    process = deployment.start_run("killed", *settings)
    wait_for_round(deployment, "killed", 1, process, 300)
    deployment.when_training("node-3")
    run("docker", "kill", deployment.container("superlink"))
    assert process.wait(120) == 1, deployment.output("killed")[-3000:]
    assert "--set resume=true --set run-name=killed" in deployment.output("killed")
    run("docker", "start", deployment.container("superlink"))
    wait_for("the SuperLink is healthy", lambda: deployment.state("superlink")["Health"]["Status"] == "healthy", 120)
    assert len(deployment.journal("killed")) == 1, "it was not killed in the middle of the run"
    deployment.finish(deployment.start_run("killed", "resume=true", *settings), "killed", 600)
    assert [record["round"] for record in deployment.journal("killed")] == [1, 2]
    devices = deployment.journal("killed", "devices")
    assert [d["outcome"] for d in devices] == ["trained"] * 8
    assert len({(d["device"], d["node"]) for d in devices}) == 4, "nodes have other ids than before"
    file = "checkpoint/round-2/state.safetensors"
    one, other = (load(deployment.read(f"{name}/{file}")) for name in ("undisturbed", "killed"))
    assert one.keys() == other.keys()
    for name in one:
        # Sums in order of arrival differ in their last bits.
        assert (one[name].double() - other[name].double()).abs().max() <= 1e-5, name


def test_devices_out_of_memory_lose_their_work_and_get_smaller_models(deployment):
    before = {node: deployment.state(node)["StartedAt"] for node in NODES}
    settings = (
        "rounds=100",
        "evaluate-every=100",
        "budget.memory-fraction=0.25",
        "budget.transfer-seconds=0",
        "deadline-seconds=200",
    )
    process = deployment.start_run("memory", *settings, "batch-size=128", "local-steps=10")
    wait_for_round(deployment, "memory", 1, process, 300)
    hit = len(deployment.journal("memory")) + 1
    with ThreadPoolExecutor() as pool:
        squeezed = pool.submit(squeeze, deployment, "node-1", LIMITS_BYTES[1])
        filled = pool.submit(deployment.when_training, "node-2", FILL)
        bounded = pool.submit(deployment.when_training, "node-3", BOUND)
    try:
        for done in (squeezed, filled, bounded):
            done.result()
        # Node 1 loses memory while it trains, or after it has answered, while the round waits for others: the report by
        # which the round after that one gives it a model may be older. Node 3 loses work after that which was found.
        now = len(deployment.journal("memory"))
        behind = {0: hit, 1: now + 2, 2: hit, 3: now + 1}
        after = {
            device: wait_for_device(deployment, "memory", device, behind[device], process, 300) for device in behind
        }
    finally:
        limit(deployment, "node-1", LIMITS_BYTES[1])
    deployment.stop_run(process, "memory")
    devices = deployment.journal("memory", "devices")
    first = {d["device"]: d for d in devices if d["round"] == 1}
    lost = {
        device: [d["outcome"] for d in devices if d["device"] == device and d["outcome"] != "trained"]
        for device in range(4)
    }
    killed = "refused: the kernel killed the work because this device's memory was used up"
    assert lost[2][0].startswith(killed), lost
    assert lost[3][0].startswith("refused: out of memory"), lost
    for device in (1, 2, 3):
        assert after[device]["parameters"] < first[device]["parameters"], (first[device], after[device])
    assert {d["outcome"] for d in devices if d["device"] == 0} == {"trained"}
    # No SuperNode has ended for it.
    assert {node: deployment.state(node)["StartedAt"] for node in NODES} == before
