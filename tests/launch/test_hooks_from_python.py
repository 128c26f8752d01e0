"""`wf.run(..., hooks=[...])`: objects of this process, whose run is forked from it."""

import subprocess
import sys
import textwrap

import nbformat
import pytest
import torch
from nbclient import NotebookClient

import wildflower as wf
from tests.programs import run_python
from wildflower.rounds.hooks import RoundHook

EXPERIMENT = """
task = "digits"
rounds = 5
devices-per-round = 3
local-steps = 2
evaluate-every = 1
"""

SCRIPT = """
import wildflower as wf
from wildflower.rounds.hooks import RoundHook


class StopAt(RoundHook):  # of __main__: no other process could import it
    def __init__(self, number):
        self.number = number

    def at_end(self, round):
        round.metrics  # of the forked run
        if round.number == self.number:
            round.stop("it is enough")


run = wf.run("experiment.toml", hooks=[StopAt(2)], run_name="stopped")
print(run.status, len(run.rounds))
try:
    wf.run("experiment.toml", hooks=[StopAt("two").number], run_name="other")
except wf.SettingsError as error:
    print(error)
"""

SWEEP = """
print([len(run.rounds) for run in wf.sweep("experiment.toml", seeds=[1, 2], jobs=2, hooks=[StopAt(1)]).runs])
found = wf.tune("experiment.toml", search={"learning_rate": [0.1, 0.2]}, trials=1, hooks=[StopAt(1)])
print([len(wf.load(run).rounds) for run in found.runs])
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiment.toml").write_text(EXPERIMENT)
    return tmp_path


def test_a_hook_of_a_script_ends_its_run(folder):
    (folder / "script.py").write_text(textwrap.dedent(SCRIPT))
    ran = run_python("script.py", folder=folder, timeout_seconds=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    stopped, refused = ran.stdout.strip().splitlines()[-2:]
    assert stopped == "finished 2"
    assert refused.startswith("hooks: 'two' is no value of a class of wildflower.rounds.hooks.RoundHook")


def test_a_hook_of_a_script_ends_every_run_of_a_sweep_and_every_trial_of_a_search(folder):
    (folder / "script.py").write_text(SCRIPT.partition("run = ")[0] + SWEEP)
    ran = run_python("script.py", folder=folder, timeout_seconds=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    swept, *_, searched = ran.stdout.strip().splitlines()[-3:]
    assert (swept, searched) == ("[1, 1]", "[1]")


class AtEnd(RoundHook):
    def at_end(self, round):
        raise RuntimeError("of a hook")


def test_where_a_run_cannot_be_forked_it_is_said_what_to_do(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(wf.SettingsError, match=r"has used a GPU, which .*: put the class into a file beside"):
        wf.run("experiment.toml", hooks=[AtEnd()])


def test_a_process_that_has_trained_is_told(folder):
    code = """
import torch, wildflower as wf
from wildflower.rounds.hooks import RoundHook
class Any(RoundHook):
    def at_end(self, round): pass
torch.ones(1, requires_grad=True).sum().backward()
try:
    print(wf.run("experiment.toml", hooks=[Any()], rounds=1).status)
except wf.SettingsError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120)
    assert "finished" in ran.stdout or "has trained with PyTorch" in ran.stdout, ran.stdout + ran.stderr


def test_a_failing_hook_is_named_in_the_error_of_the_run(folder):
    code = SCRIPT.replace('round.stop("it is enough")', 'raise RuntimeError("too much")').partition("try:")[0]
    (folder / "script.py").write_text(code)
    ran = run_python("script.py", folder=folder, timeout_seconds=120)
    assert "RunError: stopped: " in ran.stderr
    assert "hook StopAt: RuntimeError: too much" in ran.stderr


@pytest.mark.thorough
def test_a_hook_of_a_notebook_ends_its_run(folder):
    """The run is forked from the kernel, with the class that a cell has made."""
    cells = [nbformat.v4.new_code_cell(SCRIPT.partition("run = ")[0])]
    cells.append(nbformat.v4.new_code_cell('run = wf.run("experiment.toml", hooks=[StopAt(2)], run_name="stopped")'))
    cells.append(nbformat.v4.new_code_cell("print(run.status, len(run.rounds))"))
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()
    assert notebook.cells[-1].outputs[0].text == "finished 2\n"
    assert not any("Traceback" in str(output) for cell in notebook.cells for output in cell.outputs)
