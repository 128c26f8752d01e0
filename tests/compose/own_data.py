"""Devices with data of their own in containers: each has a volume that nobody else has, and the server has none.

Not part of `make test`: `make test-guides` names this file.
"""

import json
import re
import shlex
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.compose.engine import NODES, PROJECT, ROOT, Deployment, build_images, engine, fill, run, wait_for
from tests.own_folders import digits, image_folder
from tests.small_run import simulated_grid
from wildflower.server_app.app import build
from wildflower.server_app.app import run as run_here
from wildflower.server_app.config import RunConfig
from wildflower.server_app.run_folder import read_rounds

PAGE = (ROOT / "docs" / "your-devices.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
LINES = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]

SHARES = (120, 200, 280, 360)  # examples of each device
WIDTHS = (0.5, 0.5, 1.0, 1.0)  # what the memory that is set apart on each allows
EXPERIMENT = {
    "task": "images",
    "task-arguments": "color = 'gray'",
    "partition": "own",
    "test-fraction": 0.2,
    "examples-per-device": 0,
    "family": "cnn3",
    "family-arguments": "",
    "strategy": "heterofl",
    "widths": "1, 0.5",
    "budget.memory-fraction": 0.85,
    "budget.transfer-seconds": 0.0,
    "devices": 4,
    "devices-per-round": 4,
    "rounds": 6,
    "local-steps": 30,
    "batch-size": 16,
    "learning-rate": 0.05,
    "evaluate-every": 3,
    "seed": 2,
}


def unequal_folders(folder: Path) -> Path:
    """Digits as photos in a folder per device: of unequal numbers, and each with more of some digits than others."""
    inputs, labels, _, _ = digits()
    rng = np.random.default_rng(0)
    left = rng.permutation(len(labels))
    for device, count in enumerate(SHARES):
        liked = np.isin(labels[left], np.arange(10)[device * 2 : device * 2 + 4])
        order = np.argsort(~liked, kind="stable")
        picked = np.concatenate([left[order[: count // 2]], left[order[count // 2 :]][-(count - count // 2) :]])
        image_folder(folder / "devices" / f"{device:04d}", inputs[picked], [f"digit-{n}" for n in labels[picked]])
        left = np.setdiff1d(left, picked)
    return folder


def simulated(folder: Path, data: Path) -> RunConfig:
    """The same devices as a simulation over copies of their folders."""
    groups = [
        f'[[group]]\nname = "device-{device}"\ncount = 1\nfits_width = {width}\nspeed = 1.0\n'
        for device, width in enumerate(WIDTHS)
    ]
    (folder / "four.toml").write_text("\n".join(groups))
    here = {"fleet": str(folder / "four.toml"), "data-dir": str(data), "output-dir": str(folder), "run-name": "here"}
    return RunConfig.from_run_config(EXPERIMENT | here)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own-data")
    with engine(folder):
        yield folder, build_images(folder)


@pytest.fixture(scope="module")
def deployment(images):
    folder, prefix = images
    data = unequal_folders(folder / "photos")
    config = simulated(folder, data)
    method = build(config)[0].method
    other, volumes = {}, [f"{node}-data" for node in NODES]
    for device, (node, width) in enumerate(zip(NODES, WIDTHS, strict=True)):
        cost = method.cost(method.family.width(width))
        limit = cost.peak_training_memory_bytes + 6 * cost.payload_bytes  # beside its training, the message
        # What it has decoded is its own as well: the volume of decoded data sets is everybody's, and read only.
        more = f'data-dir="/data" memory-limit-bytes={limit}'
        own = {"WILDFLOWER_CACHE": "/state/cache", "MORE": more}
        other[node] = {"volumes": [f"{node}-data:/data:ro"], "environment": own}
        fill(f"{PROJECT}_{node}-data", data / "devices" / f"{device:04d}", f"{prefix}-device")
    half, whole = (method.cost(method.family.width(width)) for width in (0.5, 1.0))
    assert half.peak_training_memory_bytes + 6 * half.payload_bytes < whole.peak_training_memory_bytes
    found = Deployment(folder, prefix, other, volumes)
    try:
        found.up(600)
        yield found
    finally:
        try:
            found.keep_logs_and_runs()
        finally:
            found.down()


def settings(**changes) -> list[str]:
    return [f"{key}={value}" for key, value in (EXPERIMENT | changes).items()]


def test_four_nodes_with_volumes_of_their_own_learn_as_in_simulation(deployment, images):
    folder, _ = images
    mounted = {
        service: [
            mount["Name"] for mount in deployment.inspect(service)["Mounts"] if mount.get("Name", "").endswith("-data")
        ]
        for service in ("superlink", "gate", "bandwidth", *NODES)
    }
    assert mounted == {service: [] for service in ("superlink", "gate", "bandwidth")} | {
        node: [f"{PROJECT}_{node}-data"] for node in NODES
    }
    deployment.finish(deployment.start_run("own", "deadline-seconds=600", *settings()), "own", 3000)
    rounds, devices = deployment.journal("own"), deployment.journal("own", "devices")
    assert [line["outcome"] for line in devices] == ["trained"] * 24
    assert {line["device"]: line["examples"] for line in devices} == {d: int(0.8 * n) for d, n in enumerate(SHARES)}
    parameters = {line["device"]: line["parameters"] for line in devices}
    assert parameters[0] == parameters[1] < parameters[2] == parameters[3]
    assert rounds[-1]["scored_devices"] == 4
    here = list(read_rounds(run_here(simulated_grid(), simulated(folder, folder / "photos"))))
    print("federated accuracy in containers", rounds[-1]["score"], "in simulation", here[-1].score)
    assert rounds[-1]["score"] > 0.6
    assert rounds[-1]["score"] == pytest.approx(here[-1].score, abs=0.01)


def test_a_node_whose_folder_has_other_shapes_is_refused_and_named(deployment, images):
    folder, prefix = images
    other = folder / "other" / "digit-1"
    other.mkdir(parents=True)
    for number in range(9):
        Image.fromarray(np.full((20, 30), number, np.uint8)).save(other / f"{number}.png")
    fill(f"{PROJECT}_node-3-data", other.parent, f"{prefix}-device")
    changes = {"rounds": 2, "evaluate-every": 2, "local-steps": 5}
    deployment.finish(deployment.start_run("odd", "deadline-seconds=600", *settings(**changes)), "odd", 1500)
    devices = deployment.journal("odd", "devices")
    refused = {line["outcome"] for line in devices if line["device"] == 3}
    assert len(refused) == 1
    assert next(iter(refused)).startswith("refused: its data do not fit: its examples are 1x20x30 bytes")
    assert [line["outcome"] for line in devices if line["device"] != 3] == ["trained"] * 6
    assert [line["devices_refused"] for line in deployment.journal("odd")] == [1, 1]


@pytest.fixture
def terminals(images):
    """The name of the user's container, and what types a line on a board, which has its own photos alone."""
    _, prefix = images
    user = f"{PROJECT}-user"
    # What `make` installs is the project's folder itself, which the page's commands are typed in; the image has a copy.
    there = [user]
    options = ("--init", "--user", "0", "--workdir", "/app", "--env", "PYTHONPATH=/app", "--network", "none")
    run("docker", "run", "--detach", *options, "--name", user, f"{prefix}-server", "sleep", "infinity")

    def board(number: int, line: str) -> None:
        """Type a line on a board, in a terminal that stays open."""
        name, volume = f"{PROJECT}-board-{number}", f"{PROJECT}-board-{number}"
        there.append(name)
        mount = f"{volume}:/board/photos/devices/{number:04d}:ro"
        options = ("--init", "--user", "0", "--workdir", "/board", "--network", f"container:{user}", "--volume", mount)
        run("docker", "run", "--detach", *options, "--name", name, f"{prefix}-device", "sh", "-c", line)

    try:
        yield user, board
    finally:
        for name in reversed(there):
            run("docker", "rm", "--force", name, check=False)
        for number in range(3):
            run("docker", "volume", "rm", f"{PROJECT}-board-{number}", check=False)


def test_the_guide_as_it_is_typed(images, terminals, tmp_path):
    _, prefix = images
    user, board = terminals

    def typed(line: str, *options: str, **more) -> str:
        return run("docker", "exec", *options, user, "sh", "-c", line, timeout=1500, **more)

    def written(name: str, text: str) -> None:
        (tmp_path / name).write_text(text)
        run("docker", "cp", tmp_path / name, f"{user}:/app/{name}")

    written("photos.py", next(text for kind, text in BLOCKS if kind == "python"))
    typed("python3 photos.py")
    for name, text in zip(("photos.toml", "boards.toml"), [t for k, t in BLOCKS if k == "toml"], strict=True):
        written(name, text)
    nodes = [line for line in LINES if line.startswith("wildflower-node")]
    commands = [line for line in LINES if line.startswith("wildflower ")]
    assert [shlex.split(line)[1] for line in commands] == ["plan", "run", "run", "export", "predict"]
    assert "laptop" in typed(commands[0])
    typed(commands[1])

    [superlink] = [line for line in LINES if line.startswith("wildflower-superlink")]
    typed(f"{superlink} >/tmp/superlink.log 2>&1", "--detach")
    run("docker", "cp", f"{user}:/app/photos", tmp_path / "photos")
    typed("rm -r photos")  # from here on only the boards have any
    for number, line in enumerate(nodes):
        folder = tmp_path / "photos" / "devices" / f"{number:04d}"
        fill(f"{PROJECT}-board-{number}", folder, f"{prefix}-device")
        [config] = [word for before, word in pairwise(shlex.split(line)) if before == "--node-config"]
        assert f'data-dir="photos/devices/{number:04d}"' in config
        board(number, line)
    log = wait_for("the SuperLink answers", lambda: typed("cat /tmp/superlink.log"), 60)
    said = typed(commands[2])
    assert "finished" in said, (said, log)
    agreed = json.loads(typed("cat runs/photos/agreed.json"))
    assert agreed["label_names"] == [f"digit-{number}" for number in range(10)]
    rounds = [json.loads(line) for line in typed("cat runs/photos/rounds.jsonl").splitlines()]
    assert [(r["devices_replied"], r["scored_devices"]) for r in rounds] == [(3, 3)] * 4
    for number in range(3):
        seen = run("docker", "exec", f"{PROJECT}-board-{number}", "ls", "/board/photos/devices")
        assert seen.split() == [f"{number:04d}"]

    run("docker", "cp", tmp_path / "photos", f"{user}:/app/photos")  # the copies of section 1, to ask the model about
    typed(commands[3])
    assert json.loads(typed("cat photos.pt2.json"))["labels"] == agreed["label_names"]
    assert "digit-" in typed(commands[4])
