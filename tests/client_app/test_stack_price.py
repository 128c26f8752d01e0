"""The predicted memory of devices that are trained at once."""

import json
import subprocess
import sys

import pytest
import torch

from benchmarks.memory.stacks import CASES, RECORDED, predicted
from tests.programs import run_python
from wildflower.client_app import side_by_side
from wildflower.client_app.side_by_side import number_at_once
from wildflower.client_app.stack_price import price_at_once
from wildflower.messages.orders import LocalTraining
from wildflower.models.architecture import Architecture
from wildflower.models.cost import cost
from wildflower.models.family import make_family

FOUND = json.loads(RECORDED.read_text())["cases"]
FAST = 7  # the MLP


@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=() if n == FAST else pytest.mark.thorough) for n in range(len(CASES))]
)
def test_the_price_of_a_stack_is_within_a_tenth_of_what_was_measured(case):
    spec, width, devices, batch_size, optimizer = CASES[case]
    family = make_family(spec)
    now_bytes = predicted(family, family.width(width), devices, batch_size, optimizer)
    assert now_bytes == pytest.approx(FOUND[case]["measured_bytes"], rel=0.1)


def test_as_many_train_at_once_as_half_of_the_free_memory_holds(monkeypatch):
    class Machine:
        memory_available_bytes = 2 * 1_050

    monkeypatch.setattr(side_by_side, "probe_machine", Machine)
    cpu = torch.device("cpu")
    assert number_at_once(cpu, 100, 50) == 10
    assert number_at_once(cpu, 100, 1_050) == 1
    assert number_at_once(cpu, 1, 0) == side_by_side.MOST_FOUND


@pytest.mark.thorough
@pytest.mark.parametrize("case", [0, 7])
def test_a_stack_takes_what_is_predicted_on_this_machine(case):
    command = [sys.executable, "-m", "benchmarks.memory.stacks", str(case)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    spec, width, devices, batch_size, optimizer = CASES[case]
    family = make_family(spec)
    assert predicted(family, family.width(width), devices, batch_size, optimizer) == pytest.approx(
        int(done.stdout), rel=0.1
    )


def test_a_model_without_a_stack_has_the_price_of_its_orders():
    family = make_family({"name": "mlp"})
    training = LocalTraining(batch_size=4, learning_rate=0.1)
    unknown = Architecture((1,) * 9)
    assert price_at_once(family, unknown, training, 12_345) == (12_345, 0)


def test_what_a_client_step_takes_beside_is_in_the_price_of_each_device():
    family, training = make_family({"name": "mlp"}), LocalTraining(batch_size=4, learning_rate=0.1)
    alone_bytes = cost(family, family.full(), batch_size=4, optimizer="sgd").peak_training_memory_bytes
    plain, beside = price_at_once(family, family.full(), training, alone_bytes)
    assert price_at_once(family, family.full(), training, alone_bytes + 1_000) == (plain + 1_000, beside)


def test_a_price_does_not_load_the_compiler():
    program = """if True:
        import sys
        from wildflower.client_app.stack_price import stack_bytes
        from wildflower.models.family import make_family
        family = make_family({"name": "cnn3", "input_shape": (1, 8, 8)})
        stack_bytes(family, family.full(), 8, "sgd")
        print("torch._dynamo" in sys.modules)"""
    done = run_python("-c", program)
    assert done.stdout == "False\n", done.stderr
