"""The notebook docs/python.ipynb in a real kernel, whose runs are stood in for; and what docs/python.md speaks of."""

import ast
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import wildflower as wf

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/python.md").read_text()
STAND_IN = f"""import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.launch.fake_child import in_place_of_processes
runs = in_place_of_processes()
"""
INTERRUPTED = """runs.waits = True
wf.run("../benchmarks/demo/digits.toml", run_name="stopped")
"""


def texts(cell, kind="text/plain"):
    return [output.data[kind] for output in cell.outputs if "data" in output and kind in output.data]


@pytest.mark.thorough
def test_the_notebook_does_what_it_says(tmp_path):
    here = tmp_path / "docs"
    here.mkdir()
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    notebook = nbformat.read(ROOT / "docs/python.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)
    stopped = nbformat.v4.new_code_cell(INTERRUPTED, metadata={"tags": ["raises-exception"]})
    notebook.cells = [nbformat.v4.new_code_cell(STAND_IN), *notebook.cells, stopped]
    NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(here)}}).execute()
    _, run, rounds, tiers, sweep, comparison, loaded, _ = [c for c in notebook.cells if c.cell_type == "code"]
    # The bar stays behind as it was in the end, and under it what the run has come to.
    bar, summary = texts(run, "text/html")
    assert bar.startswith('round 5/5 <progress value="5" max="5"></progress> ')
    assert "<td style" in summary
    assert re.findall(r"<th>(\d)</th>", texts(rounds, "text/html")[0]) == list("12345")
    assert "memory_used" in texts(tiers)[0]
    assert "6 of 6 runs" in texts(sweep)
    rows = set(re.findall(r"strategy=(\w+),seed=(\d)", texts(sweep)[-1]))
    assert rows == {(name, seed) for name in ("heterofl", "fedrolex") for seed in "123"}
    assert "no seed" not in texts(comparison)[0]
    assert texts(loaded)[0].startswith("{'small': ")
    (error,) = [output for output in stopped.outputs if output.output_type == "error"]
    assert error.ename == "KeyboardInterrupt"
    assert "1 of 30 rounds are in" in error.evalue
    assert "run_name='stopped', resume=True goes on with it" in error.evalue
    assert len(list((here / "runs/stopped/rounds.jsonl").open())) == 1


def test_the_page_uses_what_there_is():
    used = set()
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "wf":
                used.add(node.attr)
    assert used >= {"run", "load", "sweep", "compare"}
    assert used <= set(wf.__all__)
