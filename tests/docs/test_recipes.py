"""The recipes of docs/recipes.md are files that run, and that a resumed run goes on with."""

import ast
import re
import shutil
from pathlib import Path

import pytest

import wildflower as wf
import wildflower.method

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/recipes.md").read_text()
FILES = dict(re.findall(r"New file `mine/(\w+)\.py`:\n\n```python\n(.*?)```", PAGE, re.DOTALL))
SETTINGS = {
    "own_head": {"personal": {"every": 2}, "test_fraction": 0.2},
    "server_steps": {"public": {"task": "digits"}},
}


def lines_of(text):
    """How many lines a file has, without those that are blank or import."""
    imports = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)]
    importing = sum(node.end_lineno - node.lineno + 1 for node in imports)
    return sum(bool(line.strip()) for line in text.splitlines()) - importing


def test_there_are_seven_short_ones():
    assert len(FILES) == 7
    assert all(lines_of(text) <= 80 for text in FILES.values())


@pytest.mark.parametrize("name", FILES)
def test_a_recipe_imports_from_one_place(name):
    modules = {node.module for node in ast.walk(ast.parse(FILES[name])) if isinstance(node, ast.ImportFrom)}
    assert {module for module in modules if module.startswith("wildflower")} == {"wildflower.method"}


def test_all_that_is_offered_is_there():
    assert all(hasattr(wildflower.method, name) for name in wildflower.method.__all__)


@pytest.mark.thorough
@pytest.mark.parametrize("name", FILES)
def test_a_recipe_runs_and_is_resumed_with_the_same_bits(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(f"{name}.py").write_text(FILES[name])
    method = f"{name}:{''.join(part.title() for part in name.split('_'))}"
    given = {
        "task": "digits",
        "strategy": method,
        "rounds": 2,
        "devices_per_round": 4,
        "workers": 1,
        "fleet": "five-memories",
    }
    given |= SETTINGS.get(name, {})
    whole = wf.run(**given, run_name="whole")
    assert whole.status == "finished"
    first = wf.run(**given | {"rounds": 1}, run_name="part")
    assert len(first.rounds) == 1
    again = wf.run(**given, run_name="part", resume=True)
    assert list(again.rounds["loss"]) == list(whole.rounds["loss"])
    assert whole.rounds["loss"].notna().all() or name == "own_head"
    shutil.rmtree("runs")
