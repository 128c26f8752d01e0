"""The four hooks of docs/hooks.md, as they are printed there."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.small_run import simulated_grid, small_config
from wildflower.rounds.hooks import POINTS
from wildflower.server_app import checkpoint
from wildflower.server_app.app import run
from wildflower.server_app.run_folder import read_devices, read_rounds, read_summary

PAGE = (Path(__file__).parents[2] / "docs/hooks.md").read_text()
HOOKS = re.search(r"New file `mine/my_hooks.py`:\n\n```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)[1]


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    """The page's file among the installed modules, new for every test."""
    (tmp_path / "my_hooks.py").write_text(HOOKS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_hooks", raising=False)
    yield
    sys.modules.pop("my_hooks", None)


def hooked(tmp_path, hooks, **changes):
    return small_config(tmp_path, hooks=hooks, evaluate_every=1, evaluate_tiers=True, **changes)


def test_the_page_names_all_points():
    page = PAGE.partition("New file")[0]
    assert set(POINTS) == set(re.findall(r"^\| `(\w+)\(", page, re.MULTILINE)) | {"state", "load"}
    assert "`state`" in page
    assert "`load`" in page


def test_early_stopping_ends_a_run_as_finished_and_outlives_a_restart(tmp_path):
    # With so small a rate the score stays where it was: the first evaluation is the best.
    config = hooked(tmp_path, "my_hooks:EarlyStop(patience = 2)", rounds=9, learning_rate=1e-12)
    run_dir = run(simulated_grid(), config)
    stopped = len(read_rounds(run_dir))
    assert 3 <= stopped < 9
    assert read_summary(run_dir).status == "finished"
    kept = checkpoint.load(run_dir).state.values["hooks"]["EarlyStop"]
    assert kept["since"] == 2
    assert json.dumps(kept)
    again = run(simulated_grid(), config.model_copy(update={"resume": True}))
    assert len(read_rounds(again)) == stopped + 1  # it has no better score either
    assert checkpoint.load(again).state.values["hooks"]["EarlyStop"]["since"] == 3


def test_the_sampler_asks_new_devices_first_and_then_those_of_the_largest_loss(tmp_path):
    config = hooked(tmp_path, "my_hooks:PowerOfChoice(candidates = 6)", rounds=2, devices_per_round=4)
    devices = list(read_devices(run(simulated_grid(), config)))
    first, second = ({d.device: d.loss for d in devices if d.round == number} for number in (1, 2))
    new = set(range(6)) - set(first)
    assert len(new) == 2
    assert set(second) == new | set(sorted(first, key=first.get)[-2:])


def test_norms_of_layers_are_in_the_journal(tmp_path):
    run_dir = run(simulated_grid(), hooked(tmp_path, "my_hooks:PerLayerNorms", rounds=1))
    [record] = read_rounds(run_dir)
    norms = {name: value for name, value in record.metrics.items() if name.startswith("norm of ")}
    assert len(norms) >= 2
    assert all(value > 0 for value in norms.values())


def test_a_budget_rule_leaves_memory(tmp_path):
    budgets = []
    for name, hooks in (("whole", ""), ("less", "my_hooks:LeaveMemory(share = 0.25)")):
        run_dir = run(simulated_grid(), hooked(tmp_path, hooks, rounds=1, run_name=name))
        budgets.append({d.device: d.budget.memory_bytes for d in read_devices(run_dir)})
    whole, less = budgets
    assert less == {device: int(0.75 * memory) for device, memory in whole.items()}


def test_all_four_go_together(tmp_path):
    text = re.search(r'^hooks = "(.*)"$', PAGE, re.MULTILINE)[1]
    assert len(read_rounds(run(simulated_grid(), hooked(tmp_path, text, rounds=2)))) == 2
