"""What lies beside an experiment: found, sent with the app, and never mistaken for something else."""

import hashlib
import io
import json
import os
import shutil
import sys
import sysconfig
import tomllib
import zipfile
from datetime import datetime
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk
from rich.console import Console

from tests.programs import run_python
from wildflower.launch.app_log import last_traceback
from wildflower.launch.bundle import make_bundle
from wildflower.launch.experiment import run_experiment
from wildflower.launch.experiment_file import SettingsError, beside, place, resolve
from wildflower.plugins.beside import digests, files_of, look_for, looked_for_beside
from wildflower.plugins.reference import PluginError, class_of
from wildflower.server_app.config import RunConfig
from wildflower.server_app.journal import Journal
from wildflower.server_app.run_folder import read_config, read_rounds, read_summary
from wildflower.strategies.method import Method

ROOT = Path(__file__).parents[2]
METHOD = """
from typing import ClassVar
from pydantic import Field
from wildflower.strategies.method import ClientStep, Training
from wildflower.strategies.params import Params
from wildflower.strategies.submodel import SubModelMethod
from {parts} import RATE

class Settings(Params):
    damping: float = Field(RATE, gt=0, le=1, description="A part of the way,\\n  with a line break")
    rule: str = Field("mean", description="A text")

class Mine(SubModelMethod):
    params_type: ClassVar = Settings

    def client_step(self, order) -> ClientStep:
        return Training()
"""


@pytest.fixture
def folder(tmp_path):
    """An experiment, a method in a file, a package that it imports, and things that do not belong to it."""
    here = tmp_path / "own"
    parts = here / "bundled_parts"
    (parts / "deep").mkdir(parents=True)
    (here / "bundled_method.py").write_text(METHOD.format(parts="bundled_parts"))
    (parts / "__init__.py").write_text("from bundled_parts.deep.rates import RATE\nimport random, json\n")
    (parts / "deep" / "__init__.py").write_text("")
    (parts / "deep" / "rates.py").write_text("from bundled_more import RATE\n")
    (here / "bundled_more.py").write_text("RATE = 0.25\n")
    (parts / "table.json").write_text("{}")
    for left in ("notes.txt", "test_rates.py", "pyproject.toml"):
        (parts / left).write_text("")
    (here / "random.py").write_text("raise RuntimeError\n")  # hides nothing, because no run names it
    (here / "other.py").write_text("raise RuntimeError\n")
    (here / "experiment.toml").write_text('strategy = "bundled_method:Mine"\n[bundled-method]\ndamping = 0.5\n')
    return here


TRAVELLING = [
    "bundled_method.py",
    "bundled_more.py",
    "bundled_parts/__init__.py",
    "bundled_parts/deep/__init__.py",
    "bundled_parts/deep/rates.py",
    "bundled_parts/table.json",
]


def test_a_module_beside_the_experiment_travels_with_what_it_imports_from_there(folder):
    with beside(folder / "experiment.toml") as modules:
        settings = resolve(folder / "experiment.toml", ["bundled-method.rule=5"])
        assert modules == {
            "bundled_method": folder / "bundled_method.py",
            "bundled_more": folder / "bundled_more.py",
            "bundled_parts": folder / "bundled_parts",
        }
        assert sorted(name for path in modules.values() for name in files_of(path)) == TRAVELLING
        assert settings.config.groups["bundled-method"].damping == 0.5
        assert settings.config.groups["bundled-method"].rule == "5"  # a text, as its default is
        assert settings.sources["bundled-method.damping"] == str(folder / "experiment.toml")
        assert settings.sources["bundled-method.rule"] == "--set"
        assert settings.sources.keys() == settings.config.to_dict().keys()
        held = resolve(None, ["strategy=bundled_method:Mine", "strategy-settings=damping = 0.75"])
        assert held.sources["bundled-method.damping"] == "--set"
        assert held.sources["bundled-method.rule"] == "default"
        found = digests(settings.config.modules())
        assert list(found) == ["bundled_method", "bundled_more", "bundled_parts"]
        more = (folder / "bundled_more.py").read_bytes()
        assert found["bundled_more"] == hashlib.sha256(b"bundled_more.py 12\n" + more).hexdigest()
    # Outside the block nothing of it is left.
    assert not any(name.startswith("bundled_") for name in sys.modules)
    with pytest.raises(PluginError, match="there is no module 'bundled_method' among the installed packages"):
        class_of("bundled_method:Mine", Method, "a method")


def test_a_run_without_a_name_is_called_after_the_file(folder, tmp_path):
    with beside(folder / "experiment.toml"):
        config, _ = place(resolve(folder / "experiment.toml", []).config, tmp_path, datetime(2026, 1, 2, 3, 4, 5))
    assert config.run_name == "bundled-method-digits-20260102-030405"


def test_flower_builds_a_bundle_of_the_app_and_of_what_travels(folder, tmp_path):
    with beside(folder / "experiment.toml") as modules:
        config = resolve(folder / "experiment.toml", []).config
        app = make_bundle(ROOT, tmp_path / "app", config.strategy, modules)
    assert app == tmp_path / "app"
    archive = zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app)))
    names = set(archive.namelist())
    # Flower looks at every file of the folder: without the environment and the history there are fewer.
    clone = shutil.copytree(ROOT, tmp_path / "clone", ignore=shutil.ignore_patterns(".*", "__pycache__", "runs"))
    own = zipfile.ZipFile(io.BytesIO(build_fab_from_disk(clone)))
    # All of the app is in one package, beside which a user's own may have any other name.
    installed = {name: name if name in names else f"wildflower/{name}" for name in own.namelist()}
    assert names - set(installed.values()) == set(TRAVELLING)
    assert {name.partition("/")[0] for name in names - set(TRAVELLING)} == {
        "wildflower",
        "pyproject.toml",
        "LICENSE",
        ".info",
    }
    for name, there in installed.items():
        if name not in ("pyproject.toml", ".info/CONTENT"):
            assert archive.read(there) == own.read(name)
    keys = tomllib.loads(archive.read("pyproject.toml").decode())["tool"]["flwr"]["app"]["config"]
    assert keys["bundled-method"] == {"damping": 0.25, "rule": "mean"}
    assert keys["fedprox"] == {"mu": 0.01}
    given = tomllib.loads(own.read("pyproject.toml").decode())["tool"]["flwr"]["app"]["config"]
    del keys["bundled-method"]
    assert keys == given


def test_an_app_that_does_not_list_its_files_is_told(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.flwr.app]\n")
    with pytest.raises(SettingsError, match=r"pyproject\.toml does not list in one fab-include"):
        make_bundle(tmp_path, tmp_path / "app", "", {})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wildflower", "wildflower.py beside the experiment would hide the app's own 'wildflower'"),
        ("random", "random.py beside the experiment would hide the module 'random' of Python itself"),
        ("numpy", "numpy.py beside the experiment would hide the package 'numpy', which the app uses"),
        ("test_mine", "test_mine.py beside the experiment would not travel: Flower leaves such names out"),
        ("mine_test", "mine_test.py beside the experiment would not travel"),
        ("build", "build.py beside the experiment would not travel"),
    ],
)
def test_names_that_would_hide_something_or_be_left_behind_are_refused(tmp_path, name, words):
    (tmp_path / f"{name}.py").write_text("")
    with looked_for_beside(tmp_path), pytest.raises(PluginError) as error:
        class_of(f"{name}:Mine", Method, "a method")
    assert words in str(error.value)
    assert str(error.value).endswith("give it another name")


def test_what_a_module_imports_may_hide_nothing_either(tmp_path):
    (tmp_path / "hiding_method.py").write_text("import pydantic\n")
    (tmp_path / "pydantic.py").write_text("")
    with looked_for_beside(tmp_path), pytest.raises(PluginError, match="would hide the package 'pydantic'"):
        class_of("hiding_method:Mine", Method, "a method")


def test_an_experiment_in_the_projects_folder_hides_none_of_its_rooms():
    with looked_for_beside(ROOT) as modules:
        with pytest.raises(ValueError, match=r"is the app's own: write wildflower\.strategies\.fedprox"):
            look_for("strategies.fedprox")
        assert modules == {}
        assert class_of("wildflower.strategies.fedprox:FedProx", Method, "a method").__name__ == "FedProx"


def test_an_experiment_in_another_copy_of_the_project_takes_this_apps_rooms(tmp_path):
    (tmp_path / "wildflower" / "strategies").mkdir(parents=True)
    for file in ("__init__.py", "strategies/__init__.py", "strategies/fedprox.py", "strategies/mine.py"):
        (tmp_path / "wildflower" / file).write_text("")
    with looked_for_beside(tmp_path) as modules:
        assert class_of("wildflower.strategies.fedprox:FedProx", Method, "a method").__name__ == "FedProx"
        assert modules == {}
        with pytest.raises(PluginError, match="wildflower beside the experiment would hide the app's own"):
            class_of("wildflower.strategies.mine:Mine", Method, "a method")


def test_an_installed_package_does_not_travel_but_its_settings_are_listed(folder, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(folder)  # as if it were installed
    (tmp_path / "experiment.toml").write_text('strategy = "bundled_method:Mine"\n')
    with beside(tmp_path / "experiment.toml") as modules:
        config = resolve(tmp_path / "experiment.toml", []).config
        assert modules == {}
        app = make_bundle(ROOT, tmp_path / "app", config.strategy, modules)
        assert list(digests(config.modules())) == ["bundled_method", "bundled_more", "bundled_parts"]
    assert not (app / "bundled_method.py").exists()
    keys = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert keys["bundled-method"]["damping"] == 0.25
    for name in [name for name in sys.modules if name.startswith("bundled_")]:
        del sys.modules[name]


def test_of_installed_packages_only_the_named_one_is_hashed(monkeypatch):
    import numpy  # whose neighbors it may import

    assert Path(numpy.__file__).parents[1] == Path(sysconfig.get_path("platlib"))
    assert list(digests(["numpy", "strategies", "sys"])) == ["numpy"]


def test_frames_of_what_travelled_are_named_where_it_lies(folder):
    modules = {"bundled_parts": folder / "bundled_parts"}
    apps = "/x/home/apps/w.w.0.1.0.ff"
    text = (
        "Traceback (most recent call last):\n"
        f'  File "{apps}/bundled_parts/deep/rates.py", line 1, in f\n'
        f'  File "{apps}/strategies/fedavg.py", line 2, in g\n'
        "ValueError: no"
    )
    said = last_traceback(text, ROOT, modules)
    assert f'File "{folder}/bundled_parts/deep/rates.py", line 1' in said
    assert f'File "{ROOT}/strategies/fedavg.py", line 2' in said


def run(experiment: Path, *overrides: str) -> tuple[int, str]:
    text = io.StringIO()
    code = run_experiment(experiment, overrides, None, Console(file=text, width=400))
    return code, text.getvalue()


def test_a_method_that_does_not_go_together_is_told_before_anything_is_started(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = folder / "bundled_method.py"
    file.write_text(file.read_text() + "\n    def payload(self, group):\n        return {}\n")
    code, said = run(folder / "experiment.toml")
    assert code == 1
    assert "Error: strategy = 'bundled_method:Mine': `payload` holds the tensor sets []" in said
    code, said = run(folder / "experiment.toml", "strategy=bundled_methd:Mine", "bundled-method.damping=1")
    assert code == 1
    assert f"there is no module 'bundled_methd' in {folder}" in said
    assert not (tmp_path / "runs").exists()


def test_a_run_is_not_resumed_with_another_file(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    experiment = folder / "experiment.toml"
    with beside(experiment):
        config, run_dir = place(resolve(experiment, ["run-name=one"]).config, tmp_path, datetime.now())
        Journal.open(run_dir, config.to_dict(), False, plugins=digests(config.modules()))
    (folder / "bundled_more.py").write_text("RATE = 0.5 / 2\n")
    code, said = run(experiment, "run-name=one", "resume=true")
    assert code == 1
    assert "cannot be resumed: bundled_more from outside the project is not as when the run began" in said


OWN = '''
"""A method, a family and a task in one file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from pydantic import Field

from wildflower.models.block_family import ImageFamily
from wildflower.models.layers import Block, Flatten, Linear, Relu
from wildflower.strategies.method import ClientStep, Order, Setup, Trained, Training
from wildflower.strategies.params import Params
from wildflower.strategies.submodel import SubModelMethod
from wildflower.tasks.data import Data, DataSet, make_data_set
from wildflower.tasks.task import Kind


class Half(Training):
    share: float

    def facts(self, family):
        return {"share": 1}

    def train(self, context):
        answer = super().train(context)
        answer.facts["share"] = [self.share]
        return answer


class Settings(Params):
    share: float = Field(0.5, description="A share")


class Mine(SubModelMethod):
    params_type: ClassVar = Settings

    def __init__(self, setup: Setup, params: Settings) -> None:
        super().__init__(setup, params)
        self.share = params.share

    def client_step(self, order: Order) -> ClientStep:
        return Half(share=self.share)

    def finish_round(self, trained: Sequence[Trained]) -> Mapping[str, float | None]:
        super().finish_round(trained)
        return {"share": trained[0].facts["share"][0] if trained else None}


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


def load(data_dir: str) -> DataSet:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(600) % 8
    images = torch.randint(0, 50, (600, 1, 8, 8), generator=generator)
    images[torch.arange(600), 0, labels] += 200
    images = images.to(torch.uint8)
    return make_data_set(Data(images[:500], labels[:500]), Data(images[500:], labels[500:]))


TASK = Kind(load, "mine_all:Narrow")
'''


@pytest.mark.thorough
def test_a_method_a_family_and_a_task_of_ones_own_run_without_editing_the_project(tmp_path):
    (tmp_path / "mine_all.py").write_text(OWN)
    (tmp_path / "experiment.toml").write_text(
        'strategy = "mine_all:Mine"\ntask = "mine_all:TASK"\nworkers = 2\nrounds = 2\ndevices-per-round = 4\n'
        f'below-smallest = "smallest"\noutput-dir = "{tmp_path}"\nrun-name = "one"\n'
        "[mine-all]\nshare = 0.75\n"
    )
    done = run_python(
        *("-m", "wildflower", "run", str(tmp_path / "experiment.toml")),
        folder=tmp_path,
        environment={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rounds = read_rounds(tmp_path / "one")
    assert [(r.strategy, r.task, r.devices_replied) for r in rounds] == [("mine-all", "mine_all:TASK", 4)] * 2
    assert [r.metrics for r in rounds] == [{"share": 0.75}] * 2
    assert read_summary(tmp_path / "one").status == "finished"
    content = read_config(tmp_path / "one")
    assert list(content.plugins) == ["mine_all"]
    assert content.config["mine-all.share"] == 0.75
    assert "A share" in (tmp_path / "one" / "report.html").read_text()
    assert json.loads((tmp_path / "one" / "config.json").read_text())["config"] == content.config
    assert RunConfig().strategy == "heterofl"
