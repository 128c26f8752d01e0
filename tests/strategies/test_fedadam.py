import torch

from benchmarks.inclusivefl.inclusivefl_controls import ExclusiveAdam, SmallestAdam
from tests.strategies.by_hand import Devices, engine_of, filled, no_scores, setup
from wildflower.devices.budget import Budget
from wildflower.models.lenet import LeNet5
from wildflower.strategies.fedadam import FedAdam, FedAdamParams


def test_two_steps_by_hand(tmp_path):
    """eta = 1/2, beta_1 = beta_2 = 1/2, tau = 1, so v_0 = 1, and all weights start at 1.

    Step 1, Delta = 1: m = 1/2, v = 1/2 + 1/2 = 1, w = 1 + 1/2 * 1/2 / (1 + 1) = 1.125.
    Step 2, Delta = 7: m = 1/4 + 7/2 = 3.75, v = 1/2 + 49/2 = 25, w = 1.125 + 1/2 * 3.75 / (5 + 1) = 1.4375.
    Running statistics are no parameters: they become the devices' mean, (1 + 3) / 2 = 2 with equal examples.
    """
    family = LeNet5(input_shape=(1, 8, 8))
    strategy = FedAdam(setup(tmp_path, family), FedAdamParams(eta=0.5, betas=(0.5, 0.5), tau=1.0))
    strategy.weights = filled(strategy.weights, 1.0)
    deltas, statistics = {1: 1.0, 2: 7.0}, {0: 1.0, 1: 3.0, 2: 2.0}

    def answer(order, weights):
        trained = {name: value + deltas[strategy.round] for name, value in weights.items()}
        moved = {n: torch.full_like(v, statistics[order.device]) for n, v in trained.items() if "running" in n}
        return trained | moved

    devices = Devices(family, answer)
    for number, expected in ((1, 1.125), (2, 1.4375)):
        engine_of(strategy, tmp_path).run_round(devices.grid, number, no_scores)
        for name, value in strategy.weights.items():
            assert torch.allclose(value, torch.tensor(2.0 if "running" in name else expected), atol=1e-7, rtol=0), name
    assert strategy.adam.m["head.fc1.bias"].unique().tolist() == [3.75]
    assert strategy.adam.v["head.fc1.bias"].unique().tolist() == [25.0]
    assert not any("running" in name for name in strategy.adam.m)


def test_a_round_without_answers_moves_nothing(tmp_path):
    """Not even by the momentum of earlier rounds."""
    family = LeNet5(input_shape=(1, 8, 8))
    strategy = FedAdam(setup(tmp_path, family), FedAdamParams())
    devices = Devices(family, lambda order, w: {name: value + 1 for name, value in w.items()})
    engine_of(strategy, tmp_path).run_round(devices.grid, 1, no_scores)
    before = {name: value.clone() for name, value in strategy.state().tensors.items()}
    devices.grid.broken = {1: 5}
    engine_of(strategy, tmp_path).run_round(devices.grid, 2, no_scores)
    assert all(torch.equal(before[name], value) for name, value in strategy.state().tensors.items())


def test_the_state_holds_both_moments(tmp_path):
    family = LeNet5(input_shape=(1, 8, 8))
    first, second = (FedAdam(setup(tmp_path, family), FedAdamParams()) for _ in range(2))
    devices = Devices(family, lambda order, w: {name: value + 1 for name, value in w.items()})
    engine_of(first, tmp_path).run_round(devices.grid, 1, no_scores)
    second.load(first.state())
    for strategy in (first, second):
        engine_of(strategy, tmp_path).run_round(devices.grid, 2, no_scores)
    assert all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights)


def test_adam_steps_the_small_model_or_only_strong_devices_train(tmp_path):
    """The smallest: what the narrow model has makes step 1 of the first test, and what it lacks stays at 1.

    Exclusive: a device that cannot afford the whole model gets none.
    """
    family = LeNet5(input_shape=(1, 8, 8))
    adam = FedAdamParams(eta=0.5, betas=(0.5, 0.5), tau=1.0)
    strategy = SmallestAdam(setup(tmp_path, family), adam)
    strategy.weights = filled(strategy.weights, 1.0)
    devices = Devices(family, lambda order, w: {name: value + 1 for name, value in w.items()})
    engine_of(strategy, tmp_path).run_round(devices.grid, 1, no_scores)
    kept = family.tensors(strategy.candidates[-1])["head.fc1.weight"].shape
    weight = strategy.weights["head.fc1.weight"]
    assert kept != weight.shape
    assert weight[: kept[0], : kept[1]].unique().tolist() == [1.125]
    assert weight[kept[0] :].unique().tolist() == weight[:, kept[1] :].unique().tolist() == [1.0]

    exclusive = ExclusiveAdam(setup(tmp_path, family), FedAdamParams())
    needs = exclusive.cost(exclusive.architecture).peak_training_memory_bytes
    assert exclusive.assign(0, Budget(needs - 1)) is None
    assert exclusive.assign(0, Budget(needs)) == exclusive.architecture == exclusive.candidates[0]
