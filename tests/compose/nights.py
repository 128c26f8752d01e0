"""Two nights of seven devices, and the day between them, in 35 minutes: four containers and three processes.

All of them reach one SuperLink through one gate, with keys over TLS, and take part from 22 to 6 o'clock. One is slow,
because its container computes something else all the time. One is hot in the first night, and has older libraries. One
is replaced by another board, one is revoked, and the SuperLink is killed in the second night.

What is compressed: the clock by which a node decides whether it takes part runs 60 times as fast as this machine's, and
so does the time after which it says it is worth asking again. The temperature of the hot one is made up. All else takes
its time: messages, trainings, leases, deliveries.

Not part of `make test`: `make test-nights` names this file.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import time
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.compose.conftest import same_figures
from tests.compose.engine import GATE_PORT, NODES, ROOT, Deployment, build_images, engine, run, wait_for
from tests.compose.recovery import site
from tests.deployment import Deployment as Processes
from tests.deployment import kill
from wildflower.server_app.app import build
from wildflower.server_app.config import RunConfig
from wildflower.server_app.deliveries import newest, read_delivered
from wildflower.server_app.run_folder import read_devices, read_rounds, read_summary
from wildflower.server_app.run_records import RoundRecord

FASTER = 60
EVENING, MORNING = datetime(2026, 11, 29, 21, 0), timedelta(hours=9)
NEXT_NOON, NEXT_NIGHT, END = timedelta(hours=15), timedelta(hours=25), timedelta(hours=33)
SLOW, REVOKED, HOT, REPLACED = 0, 3, 4, 6  # devices 0 to 3 are containers
DEVICES, KEYS, NEW_KEY = 7, 8, 7
SMALL = (0, 1, 5)  # those whose memory allows half the width
OLDER = ("numpy==2.1.3", "safetensors==0.5.3", "psutil==6.1.1")
# Instead of the node's own clock, its own thermometer and the seconds that it would tell.
CLOCK = """owner, report, folder, _, *more = arguments
                now = datetime.datetime.fromisoformat({evening!r})
                with open(os.path.join(os.path.dirname(__file__), "begin")) as file:
                    now += datetime.timedelta(seconds={faster} * (time.time() - float(file.read())))
                import dataclasses
                celsius = 80.0 if os.path.exists(folder / "hot") else 50.0
                report = dataclasses.replace(report, temperature_celsius=celsius)
                rest = honest(owner, report, folder, now, *more)
                return rest and dataclasses.replace(rest, seconds=rest.seconds / {faster})"""
BUSY = "while :; do :; done"
SETTINGS = {
    "family": "cnn3",
    "family-arguments": "",
    "widths": "1, 0.5",
    "devices": DEVICES,
    "devices-per-round": 5,
    "budget.memory-fraction": 0.85,
    "budget.transfer-seconds": 0.0,
    "deadline-seconds": 150.0,
    "test-fraction": 0.25,
    "evaluate-every": 2,
    "delivery.every": 4,
    "rounds": 1000,
    "run-name": "nights",
}


class Nights:
    """The deployment of a test, by the clock of its devices."""

    def __init__(self, folder: Path, images: str) -> None:
        self.folder = folder
        change = CLOCK.format(evening=EVENING.isoformat(), faster=FASTER)
        self.clock = site(folder / "clock", module="wildflower.devices.conditions", function="rest_of", change=change)
        half, whole = (self.limit(folder, width) for width in (0.5, 1.0))
        assert half < whole
        self.limits = [half if device in SMALL else whole for device in range(DEVICES)]
        other = {}
        for device, node in enumerate(NODES):
            more = f'hours="22:00-06:00" max-temperature=70.0 memory-limit-bytes={self.limits[device]}'
            own = {"PYTHONPATH": "/clock", "MORE": more, "KIND": self.kind(device)}
            other[node] = {"environment": own, "volumes": [f"{folder / 'clock'}:/clock:ro"]}
        self.containers = Deployment(folder, images, other)
        run(ROOT / "deploy/certs", "--out", self.containers.secrets, "--nodes", str(KEYS))
        self.processes = Processes(folder / "processes")
        self.processes.secrets = self.containers.secrets
        self.processes.address = f"127.0.0.1:{GATE_PORT}"

    def begin_now(self) -> None:
        """Let the devices' clock go; it is read by them from a file."""
        self.begin = time.time()
        (self.folder / "clock" / "begin").write_text(str(self.begin))

    @staticmethod
    def kind(device: int) -> str:
        return "small-board" if device in SMALL else "large-board"

    @staticmethod
    def limit(folder: Path, width: float) -> int:
        values = {"task": "digits", "strategy": "heterofl", "fleet": "", "output-dir": str(folder)} | SETTINGS
        method = build(RunConfig.from_run_config(values))[0].method
        cost = method.cost(method.family.width(width))
        return int(cost.peak_training_memory_bytes + 6 * cost.payload_bytes)  # beside its training, the message

    def start_process(self, device: int, *, key: int | None = None) -> subprocess.Popen[bytes]:
        """Start the node of a board; the hot one has older libraries."""
        path = [self.clock["PYTHONPATH"], str(ROOT)]
        path = [str(self.folder / "older"), *path] if device == HOT else path
        return self.processes.start_node(
            device,
            DEVICES,
            key=key,
            again=True,
            environment={"PYTHONPATH": os.pathsep.join(path)},
            log=f"node-{device if key is None else key}.log",
            **{
                "state-dir": str(self.state(device, key)),
                "hours": "22:00-06:00",
                "max-temperature": 70.0,
                "memory-limit-bytes": self.limits[device],
                "kind": self.kind(device),
            },
        )

    def state(self, device: int, key: int | None = None) -> Path:
        return self.processes.folder / f"state-{device if key is None else key}"

    @property
    def now(self) -> timedelta:
        """How long it has been since the first evening, by the clock of the devices."""
        return timedelta(seconds=FASTER * (time.time() - self.begin))

    def seconds_until(self, moment: timedelta) -> float:
        """How long it takes by the clock of this machine."""
        return (moment - self.now).total_seconds() / FASTER

    def wait_until(self, moment: timedelta) -> None:
        wait_for(f"{moment} of the devices' clock", lambda: self.now >= moment, self.seconds_until(moment) + 5)

    def rounds(self) -> list[dict[str, Any]]:
        return self.containers.journal("nights")

    def trained(self) -> set[int]:
        """The devices that have trained."""
        return {d["device"] for d in self.containers.journal("nights", "devices") if d["outcome"] == "trained"}

    def wait_for_round(self, process: subprocess.Popen[bytes], number: int, before: timedelta) -> None:
        def look() -> bool:
            assert process.poll() is None, self.containers.output("nights")[-3000:]
            return len(self.rounds()) >= number

        wait_for(f"round {number}", look, self.seconds_until(before))

    def log_of(self, device: int, key: int | None = None) -> str:
        if device < len(NODES):
            return run("docker", "logs", self.containers.container(NODES[device]), timeout=60)
        return (self.processes.folder / f"node-{device if key is None else key}.log").read_text()

    def model_of(self, device: int, key: int | None = None) -> tuple[str, str]:
        """The version that a device uses, and the digest of its program."""
        if device < len(NODES):
            there = "cd /state/model && readlink current && sha256sum current/model.pt2"
            version, told = run("docker", "exec", self.containers.container(NODES[device]), "sh", "-c", there).split(
                "\n", 1
            )
            return version, told.split()[0]
        place = self.state(device, key) / "model" / "current"
        return os.readlink(place), hashlib.sha256((place / "model.pt2").read_bytes()).hexdigest()


@pytest.fixture
def nights(tmp_path):
    older = tmp_path / "older"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", older, *OLDER)
    with engine(tmp_path):
        found = Nights(tmp_path, build_images(tmp_path))
        try:
            yield found
        finally:
            found.processes.close()
            try:
                found.containers.keep_logs_and_runs()
            finally:
                found.containers.down()


def test_two_nights_of_four_containers_and_three_processes(nights, record_property):
    containers = nights.containers
    hot = nights.state(HOT) / "hot"
    hot.parent.mkdir(parents=True)
    hot.touch()
    containers.up(300)
    boards = {device: nights.start_process(device) for device in range(len(NODES), DEVICES)}
    run("docker", "exec", "--detach", containers.container(NODES[SLOW]), "sh", "-c", BUSY)
    settings = [f"{key}={value}" for key, value in SETTINGS.items() if key != "run-name"]
    for device in boards:
        wait_for(f"node {device} is connected", lambda d=device: "SuperNode ID" in nights.log_of(d), 300)
    nights.begin_now()
    process = containers.start_run("nights", *settings)

    wait_for(
        "devices that will go have trained",
        lambda: {REPLACED, REVOKED} <= nights.trained(),
        nights.seconds_until(MORNING),
    )
    kill(boards[REPLACED])  # another board takes its place, with a key and a folder of its own
    nights.start_process(REPLACED, key=NEW_KEY)
    nights.wait_for_round(process, len(nights.rounds()) + 1, MORNING)
    enroll = ("run", "--rm", "-T", "enroll", "enroll", "superlink:8000", "/run/secrets/ca_certificate")
    assert "refused for good" in containers.compose(*enroll, "--revoke", NODES[REVOKED])
    nights.wait_until(MORNING)
    in_morning = len(nights.rounds())
    nights.wait_until(NEXT_NOON)
    hot.unlink()
    first_night = len(nights.rounds())
    assert first_night <= in_morning + 1, "rounds went on by day"
    nights.wait_for_round(process, first_night + 1, END)
    assert nights.now > NEXT_NIGHT
    before = nights.rounds()

    run("docker", "kill", containers.container("superlink"))
    killed = time.time()
    assert process.wait(300) == 1, containers.output("nights")[-3000:]
    containers.compose("up", "--detach", "superlink")
    wait_for("the SuperLink answers", lambda: containers.state("superlink")["Health"]["Status"] == "healthy", 120)
    process = containers.start_run("nights", *settings, "resume=true", f"rounds={len(before) + 2}")
    nights.wait_for_round(process, len(before) + 1, END)
    seconds = time.time() - killed
    containers.finish(process, "nights", nights.seconds_until(END))
    wildflower = ("run", "--rm", "-T", "--entrypoint", "wildflower", "runner")
    there = ("--superlink", "superlink:8000", "--root-certificates", "/run/secrets/ca_certificate")
    told = containers.compose(*wildflower, "deliver", "/runs/nights", "--app", "/app", *there, check=False)
    assert nights.now < END, told

    containers.keep_logs_and_runs()
    run_dir = nights.folder / "runs" / "nights"
    rounds, devices = list(read_rounds(run_dir)), list(read_devices(run_dir))
    summary = read_summary(run_dir)
    assert summary is not None
    assert summary.status == "finished"
    lost = [one for one in before if not any(same_figures(RoundRecord(**one), other) for other in rounds)]
    assert lost == []
    assert [one.round for one in rounds] == list(range(1, len(before) + 3))

    # A round has each device once, and no message came to a node twice.
    assert set(Counter((d.round, d.device) for d in devices).values()) == {1}
    logs = [nights.log_of(device) for device in range(DEVICES)] + [nights.log_of(REPLACED, NEW_KEY)]
    came = Counter(number for log in logs for number in re.findall(r"Receiving: \S+ message \(ID: (\w+)\)", log))
    twice = [number for number, count in came.items() if count > 1]
    assert twice == []

    trained = [d for d in devices if d.outcome == "trained"]
    assert {d.device for d in trained} == set(range(DEVICES))
    assert min(d.round for d in trained if d.device == HOT) > first_night
    assert len({d.node for d in trained if d.device == REPLACED}) == 2
    assert max(d.round for d in trained if d.device == REVOKED) <= first_night

    # Every device that is left uses a checked model of its tier.
    place, programs = newest(run_dir) or pytest.fail("nothing was delivered")
    said = {device: answer for device, answer in read_delivered(run_dir).items() if device != REVOKED}
    assert said.keys() == set(range(DEVICES)) - {REVOKED}
    for device, answer in said.items():
        assert answer.version == programs.version, (device, answer, told)
        version, digest = nights.model_of(device, NEW_KEY if device == REPLACED else None)
        if answer.used:
            program = place / programs.tiers[nights.kind(device)]
            assert (version, digest) == (programs.version, hashlib.sha256(program.read_bytes()).hexdigest())
        else:
            assert "worse than the model in use" in answer.why
    nights_found = {
        "devices": DEVICES,
        "minutes": round((time.time() - nights.begin) / 60, 1),
        "rounds by night": [first_night, len(rounds) - first_night],
        "rounds lost": len(lost),
        "orders": len(devices),
        "outcomes": dict(Counter(d.outcome_word for d in devices)),
        "messages to nodes": sum(came.values()),
        "messages that came twice": len(twice),
        "seconds from the kill to the next round": round(seconds, 1),
        "devices that use the newest model": sum(answer.used for answer in said.values()),
        "devices that kept a better one": sum(not answer.used for answer in said.values()),
    }
    record_property("nights", nights_found)
