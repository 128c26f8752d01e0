import pytest
import torch

from benchmarks.hypemefed.cka import activations, compare, gram, linear_cka, train
from tests.small_run import METHODS, same_bits, simulated_grid, small_config, started
from wildflower.models.cnn import Cnn3
from wildflower.rounds.asking import budget_in_round
from wildflower.tasks.task import TaskSpec, load_task


def test_cka_by_hand():
    """X = (1, -1, 0)^T and Y = (1, 0, -1)^T: Y^T X = 1, X^T X = Y^T Y = 2, so 1 / 4."""
    x, y = torch.tensor([[1.0], [-1.0], [0.0]]), torch.tensor([[1.0], [0.0], [-1.0]])
    assert linear_cka(x, y) == pytest.approx(0.25)
    # Centering takes a constant away.
    assert linear_cka(x + 5, y - 3) == pytest.approx(0.25)
    # Orthogonal features have nothing in common.
    assert linear_cka(x, torch.tensor([[1.0], [1.0], [-2.0]])) == pytest.approx(0.0)


def test_cka_of_itself_is_1_however_it_is_turned_or_scaled():
    x = torch.randn(20, 6)
    turn, _ = torch.linalg.qr(torch.randn(6, 6))
    assert linear_cka(x, x) == pytest.approx(1.0)
    assert linear_cka(x, 3.5 * x @ turn) == pytest.approx(1.0, abs=1e-6)
    # A map that is no rotation changes it.
    assert linear_cka(x, x * torch.tensor([10.0, 1, 1, 1, 1, 1])) < 0.95


def test_cka_is_the_quotient_of_its_definition():
    x, y = torch.randn(15, 4, dtype=torch.float64), torch.randn(15, 3, 2, dtype=torch.float64)
    a, b = x - x.mean(0), y.flatten(1) - y.flatten(1).mean(0)
    expected = (b.T @ a).norm() ** 2 / ((a.T @ a).norm() * (b.T @ b).norm())
    assert linear_cka(x, y) == pytest.approx(expected.item())
    assert linear_cka(y, x) == pytest.approx(expected.item())


def test_constant_activations_are_an_error():
    with pytest.raises(ValueError, match="the same for all examples"):
        linear_cka(torch.ones(4, 2), torch.randn(4, 2))


def test_activations_are_those_of_the_blocks_in_front_of_heads():
    family = Cnn3(input_shape=(1, 8, 8), exits=(1, 2, 3))
    model = family.build(family.up_to(2))
    found = activations(model, torch.randn(6, 1, 8, 8), set(family.segments))
    assert {name: tuple(value.shape) for name, value in found.items()} == {
        "block1": (6, 32, 4, 4),
        "block2": (6, 64, 2, 2),
    }


def test_layers_that_both_have_are_compared_over_all_pairs_of_devices():
    x, y = gram(torch.tensor([[1.0], [-1.0], [0.0]])), gram(torch.tensor([[1.0], [0.0], [-1.0]]))
    # Pairs of the first layer: (x, x) 1, (y, x) 1/4, (x, y) 1/4, (y, y) 1.
    tiers = {"small": [{"a": x}, {"a": y}], "large": [{"a": x, "b": x}, {"a": y, "b": x}]}
    assert compare(tiers) == {"small, large": {"a": pytest.approx(0.625)}}


def test_a_device_trains_its_part_as_in_a_round_and_keeps_nothing(tmp_path):
    """What the client returns for the order of the next round, bit for bit; a round is an epoch at the first rate."""
    keys = METHODS["hypemefed"] | {"local-epochs": 1, "local-steps": 0}
    engine, scorer = started(small_config(tmp_path, **keys))
    engine.run_round(simulated_grid(2), 1, scorer)
    method, population = engine.method, engine.population
    task = load_task(TaskSpec.from_json(method.settings.task))
    budgets = [budget_in_round(device, population, method.settings) for device in range(population.fleet.size)]
    found = {
        device: train(method, task, device, method.assign(device, budget), epochs=1)
        for device, budget in enumerate(budgets)
    }
    returned = {}
    absorb = method.absorb
    method.absorb = lambda c: (returned.update({c.devices[0]: c.own("weights")}), absorb(c))
    engine.run_round(simulated_grid(2), 2, scorer)
    assert returned
    for device, weights in returned.items():
        assert same_bits(weights, dict(found[device].state_dict()))
