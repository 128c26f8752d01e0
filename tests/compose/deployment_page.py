"""The first commands of docs/deployment.md as they are typed there, with the Compose that is installed.

Not part of `make test`: `make test-guides` names this file. `docker compose` is typed as `docker-compose` where only
Compose 1.29 is there, as the page says.
"""

import os
import re
import shlex
import subprocess

import pytest

from tests.compose.engine import (
    BANDWIDTH_PORT,
    GATE_PORT,
    PROJECT,
    ROOT,
    build_images,
    compose_command,
    engine,
    run,
    working_copy,
)

PAGE = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
LINES = [
    line for text in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE) for line in text.splitlines()
]


@pytest.fixture
def checkout(tmp_path):
    """A copy of the project with images, the folder to type in, and what a file .env would have."""
    with engine(tmp_path):
        prefix = build_images(tmp_path)
        folder = working_copy(tmp_path / "checkout")
        environment = os.environ | {
            "COMPOSE_PROJECT_NAME": PROJECT,
            "WILDFLOWER_IMAGES": prefix,
            "WILDFLOWER_PORT": str(GATE_PORT),
            "WILDFLOWER_BANDWIDTH_PORT": str(BANDWIDTH_PORT),
        }
        try:
            yield folder, environment
        finally:
            everything = ("--profile", "run", "--profile", "shaping", "down", "--volumes", "--timeout", "1")
            run(*compose_command(), *everything, cwd=folder, env=environment, check=False)


def test_four_nodes_on_one_machine(checkout):
    folder, environment = checkout

    def typed(line: str) -> str:
        words = shlex.split(line)
        if words[:2] == ["docker", "compose"]:
            # Images are there already: no registry to build on is in reach of this test.
            words = [*compose_command(), *(word for word in words[2:] if word != "--build")]
        return run(*words, cwd=folder, env=environment, timeout=1500)

    assert LINES[0] == "deploy/certs"
    for line in LINES[:3]:
        said = typed(line)
    assert "status" in said
    assert "finished" in said
    first_run = [line for line in said.splitlines() if line.startswith("round ")]
    assert len(first_run) == 5
    assert all("4 of 4 devices" in line for line in first_run), said
    said = typed(LINES[3].replace("rounds=20", "rounds=1"))
    assert "fedrolex on digits, 1 rounds" in said
    container = subprocess.run(
        [*compose_command(), "ps", "-q", "superlink"], cwd=folder, env=environment, capture_output=True, text=True
    ).stdout.strip()
    copy = next(line for line in LINES if line.startswith("docker cp")).partition("#")[0]
    run("sh", "-c", copy.replace("$(docker compose ps -q superlink)", container), cwd=folder, env=environment)
    assert list((folder / "cache").iterdir())
    typed("docker compose down")
    typed("docker compose down --volumes")
