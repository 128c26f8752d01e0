"""The notebook of docs, a notebook whose runs are stood in for, and what docs/python.md speaks of."""

import ast
import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import wildflower as wf
from tests.programs import run_python

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


CELLS = [
    """import wildflower as wf

run = wf.run("../benchmarks/demo/digits.toml", strategy="fedrolex", rounds=5)
run""",
    "run.rounds[['delivered_score', 'score', 'loss', 'simulated_seconds']]",
    """trained = run.devices.query("outcome == 'trained'")
trained.assign(memory_used=trained["predicted_memory_bytes"] / trained["budget.memory_bytes"]).groupby("tier")[
    ["parameters", "download_bytes", "memory_used"]
].mean()""",
    """sweep = wf.sweep(
    "../benchmarks/demo/digits.toml", seeds=range(1, 4), grid={"strategy": ["heterofl", "fedrolex"]}, rounds=5, jobs=2
)
sweep.table[["strategy", "seed", "delivered_score", "worst_tier", "worst_tier_score"]]""",
    "sweep.comparison",
    "wf.load(run.folder).summary.delivered_score_by_tier",
]


def texts(cell, kind="text/plain"):
    return [output.data[kind] for output in cell.outputs if "data" in output and kind in output.data]


@pytest.mark.thorough
def test_a_notebook_shows_bars_and_tables(tmp_path):
    here = tmp_path / "docs"
    here.mkdir()
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    stopped = nbformat.v4.new_code_cell(INTERRUPTED, metadata={"tags": ["raises-exception"]})
    cells = [*map(nbformat.v4.new_code_cell, (STAND_IN, *CELLS)), stopped]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(here)}}).execute()
    _, run, rounds, tiers, sweep, comparison, loaded, _ = notebook.cells
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


@pytest.mark.thorough
def test_the_notebook_runs_as_it_was_committed(tmp_path):
    notebook = nbformat.read(ROOT / "docs/python.ipynb", as_version=4)
    assert len(notebook.cells) <= 25
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    committed = [sorted({kind for output in cell.outputs for kind in output.get("data", ())}) for cell in code]
    assert any("image/png" in kinds for kinds in committed)
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute(
        env={**os.environ, "PYTHONPATH": path}
    )
    again = [sorted({kind for output in cell.outputs for kind in output.get("data", ())}) for cell in code]
    assert again == committed
    assert "class Net(nn.Module)" in (tmp_path / "runs/net-sweep/experiment/own_model.py").read_text()


@pytest.mark.thorough
def test_fifteen_lines_make_a_figure_with_error_bars(tmp_path):
    """From nothing to two methods with three seeds each on an own class and own arrays, in three minutes."""
    text = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)[0]
    assert sum(bool(line.strip()) for line in text.splitlines()) <= 15
    checked = """
figure = sweep.comparison.plot()
assert [len(axes.collections) for axes in figure.axes] == [2] * 4  # a band for each method
assert [line.get_label() for line in figure.axes[0].lines] != []
assert len(sweep.runs) == 6
"""
    (tmp_path / "page.py").write_text(text + checked)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = run_python("page.py", folder=tmp_path, environment=environment, timeout_seconds=180)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_page_uses_what_there_is():
    used = set()
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "wf":
                used.add(node.attr)
    assert used >= {"run", "load", "sweep", "compare"}
    assert used <= set(wf.__all__)
