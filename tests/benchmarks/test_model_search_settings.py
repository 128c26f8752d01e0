import tomllib
from pathlib import Path

import pytest

from devices.budget import budget_of
from devices.fleet import Fleet
from models.cost import cost
from models.family import make_family
from models.space import Space
from strategies.method import fits
from wildflower.settings import resolve

SETTINGS = sorted(Path("benchmarks/model_search/settings").glob("*.toml"))
SHAPES: dict[str, tuple[list[int], int]] = {
    "cifar10": ([3, 32, 32], 10),
    "femnist": ([1, 28, 28], 62),
    "shakespeare": ([80], 84),
}
# What the paper says of each: devices, per round, rounds by its schedule, optimizer, rate, decays after rounds, shares.
SIXTEENTHS, HALVES = (0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1), (0, 0.5, 1)
PAPER = {
    "s1": ("resnet152", 100, 10, 800, "sgd", 0.1, (300, 500), SIXTEENTHS),
    "s2": ("resnet152", 100, 10, 2500, "sgd", 2e-4, (800, 1250), SIXTEENTHS),
    "s3": ("resnet34", 50, 50, 400, "sgd", 0.1, (150, 250), HALVES),
    "s4": ("resnet152", 100, 10, 800, "sgd", 0.1, (300, 500), HALVES),
    "s5": ("vit-tiny", 3597, 120, 500, "adamw", 1e-3, (), (0, 1)),
    # Of the paper are 120 per round, the optimizer and the decays; the file says why the others differ.
    "s6": ("bert", 448, 120, 30, "sgd", 0.1, (10, 20), (0, 0.25, 0.5, 1)),
}


@pytest.mark.parametrize("path", SETTINGS, ids=lambda path: path.stem)
def test_a_setting_is_the_papers(path):
    config = resolve(path, []).config
    assert PAPER[path.stem] == (
        config.family,
        config.devices,
        config.devices_per_round,
        config.rounds,
        config.optimizer,
        config.learning_rate,
        config.decay_rounds,
        config.params.shares,
    )
    distillation = config.shared["distillation"]
    assert (config.strategy, config.batch_size) == ("model-search", 64)
    assert (distillation.steps, distillation.learning_rate) == (100, 1e-3)
    if config.optimizer == "sgd":
        assert (config.momentum, config.weight_decay, config.schedule) == (0.9, 5e-4, "steps")
    else:
        assert (config.betas, config.weight_decay, config.schedule) == ((0.9, 0.99), 0.01, "cosine")


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
    family = make_family(
        {"name": config.family, "input_shape": shape, "classes": classes, "norm": "static"} | arguments
    )
    space = Space.of(family, config.params.shares, min_blocks=config.params.min_blocks)
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
    if path.stem in ("s5", "s6"):  # whose ranges begin at their smallest; those of ResNets at another network's size
        assert 1.1 < min(memory) / smallest.peak_training_memory_bytes < 1.3
        assert 1 <= min(payload) / smallest.payload_bytes < 1.05
