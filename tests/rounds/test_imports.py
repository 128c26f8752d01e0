"""What a device loads: its memory and its seconds are counted, so that it loads nothing that only servers need."""

import json

import pytest

from tests.programs import run_python
from tests.small_run import METHODS, small_config, started
from wildflower.strategies.method import Order
from wildflower.strategies.statistics import TakeStatistics
from wildflower.strategies.training_steps import ClassCounts

HEAVY = ["torchvision", "torch_geometric", "transformers", "ray", "pandas", "datasets", "sklearn"]
HEAVY += ["matplotlib", "plotly", "tensorboard", "hypothesis"]
# A node's own process and its messenger have Flower.
SERVERS = ["wildflower.rounds", "wildflower.server_app", "flwr", "grpc"]

CODE = """
import importlib, json, sys
found = {}
for name in %r:
    before = set(sys.modules)
    module, _, attribute = name.partition(":")
    loaded = importlib.import_module(module)
    assert not attribute or hasattr(loaded, attribute)
    loaded = {".".join(m.split(".")[:depth]) for m in set(sys.modules) - before for depth in (1, 2)}
    found[name] = sorted(loaded & set(%r))
print(json.dumps(found))
"""


def loaded_by(names):
    """Of modules that are loaded one after the other, which of the packages above each brought along."""
    code = CODE % (names, HEAVY + SERVERS)
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def device_halves(folder):
    """The names by which devices find the client steps of all methods."""
    folder.mkdir(exist_ok=True)
    methods = [started(small_config(folder, **keys))[0].method for keys in METHODS.values()]
    halves = [method.client_step(Order(0, method.scored_architecture)) for method in methods]
    asked = [method.first_question for method in methods if method.first_question is not None]
    return sorted({half.reference().name for half in [*halves, *asked, ClassCounts(), TakeStatistics()]})


@pytest.mark.thorough
def test_a_device_does_not_load_what_only_servers_need(tmp_path):
    halves = device_halves(tmp_path)
    assert len(halves) > 10
    names = ["wildflower.client_app.work", "wildflower.client_app.context", *halves]
    assert loaded_by(names) == {name: [] for name in names}


@pytest.mark.thorough
def test_the_check_sees_what_is_loaded():
    """A server's module has it all."""
    assert {"flwr", "wildflower.rounds"} <= set(loaded_by(["wildflower.rounds.engine"])["wildflower.rounds.engine"])
