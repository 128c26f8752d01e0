from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.small_run import simulated_grid, small_config, started
from tests.strategies.by_hand import Devices, OneHidden, engine_of, filled, no_scores, setup
from wildflower.models.base import Family
from wildflower.models.vit import VitTiny
from wildflower.strategies.fedavg import FedAvg, FedAvgParams
from wildflower.tasks.task import TaskSpec, load_task


def test_the_mean_is_weighted_by_examples(tmp_path):
    # Devices 0, 1, 2 hold 1, 3, 4 examples and answer 8, 0, -2 everywhere: (8 + 0 - 8) / 8 = 0, and with 1, 3, 2
    # examples (8 + 0 - 4) / 6 = 2/3.
    family = OneHidden()
    strategy = FedAvg(setup(tmp_path, family), FedAvgParams())
    values = {0: 8.0, 1: 0.0, 2: -2.0}
    devices = Devices(family, lambda order, w: filled(w, values[order.device]), examples={0: 1, 1: 3, 2: 4})
    engine = engine_of(strategy, tmp_path)
    engine.run_round(devices.grid, 1, no_scores)
    assert all(torch.equal(value, torch.zeros_like(value)) for value in strategy.weights.values())
    devices.examples[2] = 2
    engine.run_round(devices.grid, 2, no_scores)
    assert all(torch.equal(value, torch.full_like(value, 2 / 3)) for value in strategy.weights.values())


@pytest.mark.parametrize(
    ("use", "widths"),
    [("all-large", {0: 4, 1: 4, 2: 4}), ("all-small", {0: 1, 1: 1, 2: 1}), ("exclusive", {0: 4})],
)
def test_who_trains_what(use, widths, tmp_path):
    family = OneHidden()
    strategy = FedAvg(setup(tmp_path, family), FedAvgParams(use=use))
    before = {name: value.clone() for name, value in strategy.weights.items()}
    devices = Devices(family, lambda order, w: filled(w, 5.0))
    result = engine_of(strategy, tmp_path).run_round(devices.grid, 1, no_scores)
    assert {device: order.architecture["widths"][0] for device, order in devices.orders.items()} == widths
    skipped = [d for d in result.devices if d["device"] not in widths]
    assert all(d["outcome"] == "skipped: no architecture of this strategy fits the budget" for d in skipped)
    trained = 1 if use == "all-small" else 4
    fc = strategy.weights["all.fc.weight"]
    assert fc[:trained].eq(5).all()
    assert torch.equal(fc[trained:], before["all.fc.weight"][trained:])


def test_a_device_that_is_given_more_than_its_budget_has_no_limit(tmp_path):
    family = OneHidden()
    devices = Devices(family, lambda order, w: w)
    strategy = FedAvg(setup(tmp_path, family), FedAvgParams())
    engine_of(strategy, tmp_path).run_round(devices.grid, 1, no_scores)
    assert devices.orders[0].memory_bytes == devices.orders[0].predicted_memory_bytes > 0
    assert devices.orders[2].memory_bytes == 0


def first_weights(family: Family, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return family.build(family.full()).state_dict()


def round_in_plain_pytorch(family: Family, task, weights, number: int, seed: int, devices: int, per_round: int):
    """FedAvg as a loop over devices, with the batches and the sample that the run draws from (seed, round, device)."""
    model = family.build(family.full())
    sampled = np.random.default_rng([seed, number, 0]).choice(devices, size=per_round, replace=False)
    total, examples = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in weights.items()}, 0
    for device in sampled:
        model.load_state_dict(weights)
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
        order_seed = int(np.random.default_rng([seed, number, 1, int(device)]).integers(2**63))
        generator = torch.Generator().manual_seed(order_seed)
        mine = task.shard(int(device)).train
        for picked in mine[torch.randperm(len(mine), generator=generator)].split(16):
            if len(picked) > 1:
                optimizer.zero_grad()
                x = task.prepare(task.train.inputs[picked], augment=None)
                F.cross_entropy(model(x), task.train.labels[picked]).backward()
                optimizer.step()
        for name, value in model.state_dict().items():
            total[name] += len(mine) * value.double()
        examples += len(mine)
    return {name: value / examples for name, value in total.items()}


def test_equal_architectures_equal_a_loop_in_plain_pytorch(tmp_path):
    config = small_config(
        tmp_path,
        strategy="fedavg",
        partition="dirichlet",
        examples_per_device=0,
        local_steps=0,
        devices_per_round=3,
        rounds=3,
        evaluate_every=9,
    )
    engine, scorer = started(config)
    strategy = engine.method
    grid = simulated_grid(2)
    task = load_task(TaskSpec.from_json(strategy.settings.task))
    sizes = {len(task.shard(device).train) for device in range(6)}
    assert len(sizes) > 3  # unequal, so that weights matter
    before = first_weights(strategy.family, seed=3)
    for number in (1, 2, 3):
        engine.run_round(grid, number, scorer)
        expected = round_in_plain_pytorch(strategy.family, task, before, number, seed=3, devices=6, per_round=3)
        for name, value in expected.items():
            assert float((strategy.weights[name] - value).abs().max()) <= 1e-6, (number, name)
        # The next round begins with the run's weights: their last bits are not those of the loop, whose mean is made
        # of floats, and where a unit is next to 0, training makes 1e-4 of that.
        before = strategy.weights


def test_uses_of_a_family_that_is_cut_in_depth(tmp_path):
    """Of 4 and 12 blocks `all-small` trains 4, the other uses know 12."""
    family = VitTiny(input_shape=(1, 8, 8), hidden=4, depth=12, heads=2, mlp=4, depths=(4, 12))
    for use, blocks in (("all-small", 4), ("all-large", 12), ("exclusive", 12)):
        method = FedAvg(replace(setup(tmp_path, OneHidden()), family=family), FedAvgParams(use=use))
        assert method.architecture == family.first_layers(blocks)
