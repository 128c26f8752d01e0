"""What docs/your-model.md and levels.md say is done as written, with the real client in one process, and trains."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from tests.programs import run_python

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/your-model.md").read_text() + (ROOT / "docs/levels.md").read_text()
BLOCK = re.compile(r"^```(python|toml|sh)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"`(mine/\w+\.(?:py|toml))`")

RUN = """
import json
import sys
from pathlib import Path
from wildflower.server_app.app import run
from wildflower.server_app.run_folder import read_rounds
from tests.small_run import simulated_grid
from wildflower.launch.experiment_file import beside, place, resolve
from datetime import datetime
small = ["devices-per-round=4", "local-steps=4", "below-smallest=smallest"]
for number, (experiment, *settings) in enumerate(json.loads(sys.argv[1])):
    with beside(Path(experiment)) as modules:
        resolved = resolve(Path(experiment), [*small, f"run-name={number}", *settings]).config
        config, _ = place(resolved, Path.cwd(), datetime.now())
        run_dir = run(simulated_grid(), config)
        *_, record = read_rounds(run_dir)
        print(record.round, record.devices_replied, *modules)
"""


def done(folder, *command):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = run_python(*command, folder=folder, environment=environment)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return ran.stdout, ran.stderr


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The files that the page shows, and its commands; a file's name is the one in the text nearest to its block."""
    folder = tmp_path_factory.mktemp("typed")
    (folder / "mine").mkdir()
    commands = []
    for block in BLOCK.finditer(PAGE):
        kind, text = block.groups()
        if kind == "sh":
            commands += text.splitlines()
            continue
        ending = {"python": ".py", "toml": ".toml"}[kind]
        before = [name for name in FILE.findall(PAGE[: block.start()]) if name.endswith(ending)]
        after = [name for name in FILE.findall(PAGE[block.end() :]) if name.endswith(ending)]
        name = next((n for n in reversed(before) if not (folder / n).exists()), None) or after[0]
        (folder / name).write_text(text)
    return folder, commands


@pytest.mark.thorough
def test_the_page_is_typed_as_written(written):
    folder, commands = written
    runs = []
    for command in commands:
        if command.startswith("cd mine && python "):
            done(folder / "mine", *shlex.split(command)[4:])
            continue
        program, what, experiment, *rest = shlex.split(command)
        assert [program, what, *rest[::2]] == ["wildflower", "run"] + ["--set"] * (len(rest) // 2)
        runs.append([experiment, *rest[1::2]])
    assert len(runs) == 4
    # All in one process, which is what takes long to start; what a page says to write before a run is there by then.
    said, log = done(folder, "-c", RUN, json.dumps(runs))
    assert [line.split() for line in said.splitlines()] == [["3", "4", "network"]] * 4
    assert "8 of 10 tensors; drawn at random: head.weight, head.bias" in log
