"""A user's own `models/`, `tasks.py`, `strategies/`, `messages.py` and `utils.py`, where Wildflower is used."""

import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import nbformat
import pytest
from flwr.cli.build import build_fab_from_disk
from nbclient import NotebookClient

from tests.programs import run_python
from wildflower.launch.bundle import make_bundle
from wildflower.launch.experiment_file import beside, resolve
from wildflower.server_app.run_folder import read_config, read_rounds

ROOT = Path(__file__).parents[2]
# What a research repository has, under names that packages of Wildflower have too.
FILES = {
    "utils.py": "SHARE = 0.75\n",
    "messages.py": "from utils import SHARE\n\n\ndef hello():\n    return f'mine {SHARE}'\n",
    "models/__init__.py": "from models.net import Narrow\n",
    "models/net.py": """
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from wildflower.models.block_family import ImageFamily
from wildflower.models.layers import Block, Flatten, Linear, Relu


@dataclass(frozen=True)
class Narrow(ImageFamily):
    name: ClassVar[str] = "narrow"

    @cached_property
    def groups(self):
        return {"fc": 16}

    def blocks(self, arch):
        fc = self.channels(arch)["fc"]
        first = Linear("fc", self.inputs, fc, positions=self.input_shape[1] * self.input_shape[2])
        return [Block("all", (Flatten(), first, Relu(), Linear("out", fc, self.outputs)))]
""",
    "tasks.py": """
import torch

from wildflower.tasks.data import Data, make_data_set
from wildflower.tasks.task import Kind


def load(data_dir):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(600) % 8
    images = torch.randint(0, 50, (600, 1, 8, 8), generator=generator).to(torch.uint8)
    return make_data_set(Data(images[:500], labels[:500]), Data(images[500:], labels[500:]))


TASK = Kind(load, "models:Narrow")
""",
    "strategies/__init__.py": "",
    "strategies/mine.py": """
from messages import hello
from wildflower.strategies.heterofl import HeteroFL


class Mine(HeteroFL):
    def start(self):
        super().start()
        print(hello())
""",
    # What nobody names is never imported.
    **{
        f"{name}.py": "raise RuntimeError(__name__)\n" for name in ("devices", "plugins", "rounds", "server_app", "cli")
    },
}
SMALL = ["workers=1", "devices-per-round=2", "rounds=1", "local-steps=1", "below-smallest=smallest"]
SETTINGS = "".join(
    f"{key} = {value if value.isdigit() else repr(value)}\n" for key, value in (text.split("=") for text in SMALL)
)


@pytest.fixture
def installed(tmp_path):
    """The environment of a process that finds `wildflower` and nothing else of the checkout, as when installed."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "wildflower").symlink_to(ROOT / "wildflower")
    return {**os.environ, "PYTHONPATH": str(tmp_path / "site")}


@pytest.fixture
def repository(tmp_path):
    """A repository with packages and files of such names."""
    for name, text in FILES.items():
        file = tmp_path / "mine" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "mine"


def test_every_package_of_wildflower_has_a_users_namesake(repository):
    ours = {path.stem for path in (ROOT / "wildflower").iterdir() if not path.name.startswith("_")}
    assert {"models", "strategies", "tasks", "messages"} <= ours
    assert {"models", "strategies", "tasks", "messages"} <= {path.stem for path in repository.iterdir()}


CODE = """
import models, tasks, messages, utils
import wildflower as wf
run = wf.run("plain.toml", output_dir="runs", run_name="one")
assert models.__file__.startswith({here!r}) and tasks.__file__.startswith({here!r}), (models, tasks)
print(len(run.rounds), messages.hello(), models.Narrow.name)
"""


def code(repository: Path) -> str:
    (repository / "plain.toml").write_text(f'task = "digits"\n{SETTINGS}')
    return CODE.format(here=str(repository))


def test_beside_a_script(repository, installed):
    (repository / "experiment.py").write_text(f"if __name__ == '__main__':\n    exec({code(repository)!r})\n")
    done = subprocess.run(
        [sys.executable, "experiment.py"], cwd=repository, env=installed, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "1 mine 0.75 narrow"


@pytest.mark.thorough
def test_in_a_notebook(repository, installed, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", installed["PYTHONPATH"])
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code(repository))])
    ran = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(repository)}}).execute()
    said = "".join(output.get("text", "") for output in ran.cells[0].outputs)
    assert said.splitlines()[-1] == "1 mine 0.75 narrow"


def write_experiment(repository: Path) -> Path:
    experiment = repository / "experiment.toml"
    experiment.write_text(
        f'strategy = "strategies.mine:Mine"\ntask = "tasks:TASK"\noutput-dir = "{repository}"\n'
        f'run-name = "one"\n{SETTINGS}'
    )
    return experiment


def test_as_plug_ins(repository, installed):
    experiment = write_experiment(repository)
    done = run_python("-m", "wildflower", "run", str(experiment), folder=repository, environment=installed)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(r.strategy, r.task) for r in read_rounds(repository / "one")] == [("mine", "tasks:TASK")]
    assert list(read_config(repository / "one").plugins) == [
        "messages",
        "models",
        "strategies",
        "tasks",
        "utils",
    ]


def test_in_the_bundle_that_flower_sends_to_nodes(repository, tmp_path):
    """There a user's own lie beside `wildflower/`, in which all of the app is."""
    with beside(write_experiment(repository)) as modules:
        config = resolve(repository / "experiment.toml", []).config
        app = make_bundle(ROOT, tmp_path / "app", config.strategy, modules)
    zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app))).extractall(tmp_path / "node")
    program = (
        "import wildflower.client_app.app, wildflower.models.base as ours, strategies.mine, tasks, models; "
        "print(wildflower.__file__, ours.__file__, strategies.mine.Mine.name(), tasks.TASK.family, models.__file__)"
    )
    done = run_python("-c", program, folder=tmp_path / "node", environment={**os.environ, "PYTHONPATH": "."})
    assert done.returncode == 0, done.stderr
    node = tmp_path / "node"
    assert done.stdout.split() == [
        *(str(node / "wildflower" / name) for name in ("__init__.py", "models/base.py")),
        *("mine", "models:Narrow", str(node / "models" / "__init__.py")),
    ]


def test_a_bundle_that_flower_makes_of_a_checkout_is_whole(tmp_path):
    """As `flwr run .` sends it: Flower follows no links."""
    clone = tmp_path / "clone"
    names = subprocess.run(["git", "ls-files", "*.py", "*.toml", "LICENSE"], cwd=ROOT, capture_output=True, text=True)
    for name in names.stdout.splitlines():
        if not name.startswith(("tests/", "benchmarks/", "docs/")):
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            (clone / name).write_bytes((ROOT / name).read_bytes())
    zipfile.ZipFile(io.BytesIO(build_fab_from_disk(clone))).extractall(tmp_path / "node")
    program = (
        "import wildflower.client_app.app, wildflower.server_app.app, wildflower.strategies as s; print(s.__file__)"
    )
    done = run_python("-c", program, folder=tmp_path / "node", environment={**os.environ, "PYTHONPATH": "."})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "node" / "strategies" / "__init__.py")]
