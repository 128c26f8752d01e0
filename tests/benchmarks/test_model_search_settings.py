import tomllib
from pathlib import Path

import pytest

from devices.budget import budget_of
from devices.fleet import Fleet
from models.cost import cost
from models.family import make_family
from models.space import Space
from strategies.work import fits
from wildflower.settings import resolve

SETTINGS = sorted(Path("benchmarks/model_search/settings").glob("*.toml"))
SHAPES: dict[str, tuple[list[int], int]] = {
    "cifar10": ([3, 32, 32], 10),
    "femnist": ([1, 28, 28], 62),
    "shakespeare": ([80], 80),
}


@pytest.mark.parametrize("path", SETTINGS, ids=lambda path: path.stem)
def test_the_fleet_of_a_setting_has_its_devices(path):
    config = resolve(path, []).config
    fleet = Fleet.load(f"devices/fleets/{config.fleet}.toml", devices=config.devices, seed=1, requirement=None)
    assert fleet.size == config.devices >= config.devices_per_round


@pytest.mark.parametrize("path", SETTINGS, ids=lambda path: path.stem)
def test_the_budgets_of_a_setting_are_those_of_its_space(path):
    """From what the smallest architecture takes, or more, to about what the largest does."""
    config = resolve(path, []).config
    shape, classes = SHAPES[config.task]
    arguments = tomllib.loads(config.family_arguments)
    space = Space.of(
        make_family({"name": config.family, "input_shape": shape, "classes": classes} | arguments),
        config.model_search__shares,
    )
    fleet = Fleet.load(f"devices/fleets/{config.fleet}.toml", devices=config.devices, seed=1, requirement=None)
    budgets = [
        budget_of(
            fleet.report(device, 0.0),
            memory_fraction=config.memory_fraction,
            transfer_seconds=config.transfer_seconds or None,
            deadline_seconds=None,
        )
        for device in range(config.devices)
    ]
    optimizer = "sgd-momentum" if config.optimizer == "sgd" and config.momentum else config.optimizer
    smallest, largest = (
        cost(space.family, a, batch_size=config.batch_size, optimizer=optimizer)
        for a in (space.smallest(), space.largest())
    )
    assert all(fits(smallest, budget) for budget in budgets)
    memory = [budget.memory_bytes for budget in budgets]
    assert 1.1 < max(memory) / largest.peak_training_memory_bytes < 1.3
    payload = [budget.payload_bytes for budget in budgets]
    assert 0.95 < max(payload) / largest.payload_bytes < 1.01
    if path.stem == "s5":  # whose range begins at its smallest
        assert 1.1 < min(memory) / smallest.peak_training_memory_bytes < 1.3
        assert 1 <= min(payload) / smallest.payload_bytes < 1.05
