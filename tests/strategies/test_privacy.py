"""Differential privacy: what one device can do, noise, the accountant, and what is refused."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy.integrate import quad

from tests.small_run import METHODS, connected_grid, same_bits, simulated_grid, small_config, started
from wildflower.cli.plan import make_plan
from wildflower.messages.bound import bounded_change
from wildflower.messages.packing import Layout
from wildflower.messages.sums import UNIT, WeightedSum
from wildflower.models.placement import whole
from wildflower.server_app.app import run
from wildflower.server_app.config import ConfigError
from wildflower.server_app.run_folder import JournalError, read_rounds, read_summary
from wildflower.strategies.method import LEADING, Contribution, Group, Method, Order
from wildflower.strategies.privacy import Privacy, epsilon_after, noise_multiplier_for
from wildflower.strategies.private_mean import PrivateMean, gaussian

STATIC = {"strategy": "fedavg", "family-arguments": "norm = 'static'"}
VIT = {
    "family": "vit-tiny",
    "family-arguments": "hidden = 12, depth = 3, heads = 2, mlp = 16",
    "below-smallest": "smallest",
}
DP = {"dp.noise-multiplier": 1.0, "dp.clip": 0.5, "dp.delta": 1e-3}


def renyi_epsilon(order: float, noise: float, rate: float) -> float:
    """The Renyi divergence of the sampled Gaussian mechanism by its definition (Mironov et al. 2019, Eq. 4)."""

    def density(x: float, mean: float) -> float:
        return math.exp(-((x - mean) ** 2) / (2 * noise**2)) / (noise * math.sqrt(2 * math.pi))

    def integrand(x: float) -> float:
        without = density(x, 0)
        mixed = (1 - rate) * without + rate * density(x, 1)
        return without * (mixed / without) ** order if without else 0.0

    total, _ = quad(integrand, -20 * noise, 20 * noise + 1, limit=500, points=[0, 1])
    return math.log(total) / (order - 1)


def test_epsilon_is_that_of_the_sampled_gaussian_mechanism():
    noise, rate, rounds, delta = 1.3, 0.05, 40, 1e-4
    # Over orders by the tighter conversion (Canonne et al. 2020, Proposition 12).
    expected = min(
        rounds * renyi_epsilon(a, noise, rate) + math.log1p(-1 / a) - math.log(delta * a) / (a - 1)
        for a in np.arange(1.1, 30, 0.1)
    )
    assert epsilon_after(rounds, noise, rate, delta) == pytest.approx(expected, rel=0.01)
    assert epsilon_after(2 * rounds, noise, rate, delta) > epsilon_after(rounds, noise, rate, delta)


@pytest.mark.thorough
def test_the_accountant_adds_no_second_handler_to_the_log():
    code = (
        "import logging; from wildflower.strategies.privacy import epsilon_after; epsilon_after(1, 1.0, 0.1, 1e-3); "
        "print(logging.getLogger().handlers)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "[]\n"


def test_the_noise_for_an_epsilon_costs_that_and_hardly_less():
    noise = noise_multiplier_for(2.0, 50, 0.1, 1e-4)
    assert 1.99 < epsilon_after(50, noise, 0.1, 1e-4) <= 2.0
    with pytest.raises(ValueError, match="no noise multiplier up to 1000"):
        noise_multiplier_for(1e-6, 10_000, 1.0, 1e-4)


def test_a_change_is_no_larger_than_the_bound():
    layout = Layout.of({"a": torch.zeros(2), "b": torch.zeros(1)})
    returned = {"a": torch.tensor([4.0, 1.0]), "b": torch.tensor([4.0])}
    change, moved = bounded_change(returned, {"a": torch.tensor([1.0, 1.0])}, layout, 2.5)
    assert moved
    assert change.dtype == torch.float64
    assert change.tolist() == pytest.approx([1.5, 0.0, 2.0])  # (3, 0, 4), of norm 5, halved
    same, moved = bounded_change(returned, {"a": torch.tensor([1.0, 1.0])}, layout, 5.0)
    assert not moved
    assert same.tolist() == [3.0, 0.0, 4.0]


def added(changes: list[list[float]], noise: float = 0.0, expected: int = 4, seed: int | None = 1) -> list[float]:
    """What becomes of a tensor of two elements (10, 20) when devices change it so."""
    before = {"a": torch.tensor([10.0, 20.0]), "still": torch.tensor([7.0])}
    privacy = Privacy(1.0, noise, 1e-3, 0.5, expected, seed is not None)
    mean = PrivateMean(before, privacy, ["still"], lambda: 1, lambda *_: np.random.default_rng(seed))
    part = {"a": before["a"]}
    layout = Layout.of(part)
    for change in changes:
        total = WeightedSum.zeros(layout)
        total.add(torch.tensor(change, dtype=torch.float64), UNIT)
        mean.add(whole(part), layout, total)
    after = mean.mean(before)
    assert after["still"].tolist() == [7.0]
    return after["a"].tolist()


def test_the_sum_is_divided_by_the_devices_that_are_expected():
    assert added([[1.0, 0.0], [1.0, 2.0]]) == [10.5, 20.5]
    assert added([]) == [10.0, 20.0]


def test_noise_is_there_also_where_nobody_came():
    values = np.array([added([], noise=2.0, seed=seed) for seed in range(400)]) - [10.0, 20.0]
    assert values.std() == pytest.approx(2.0 / 4, rel=0.1)  # z S over the expected four
    assert abs(values.mean()) < 0.06
    assert added([], noise=2.0, seed=None) != added([], noise=2.0, seed=None)


def test_noise_of_the_systems_entropy_is_normal():
    drawn = gaussian(100_001, None)
    assert drawn.shape == (100_001,)
    assert bool(torch.isfinite(drawn).all())
    assert abs(float(drawn.mean())) < 0.02
    assert float(drawn.std()) == pytest.approx(1, abs=0.02)
    assert float((drawn.abs() < 1).double().mean()) == pytest.approx(0.6827, abs=0.01)
    assert float((drawn[:50_000] * drawn[50_000:100_000]).mean()) == pytest.approx(0, abs=0.03)


@pytest.mark.parametrize("name", ["all-large", "heterofl", "fedrolex", "flexifed"])
def test_one_device_more_moves_the_model_by_its_clipped_change(name, tmp_path):
    """Also where it has the smallest sub-model."""
    config = small_config(tmp_path, **METHODS[name] | VIT | DP | {"dp.noise-multiplier": 1e-9, "dp.clip": 0.01})
    models = []
    for came in (False, True):
        method = started(config)[0].method
        method.round = 1
        if came:
            method.absorb(change_of_norm(method, 0.01))
        method.finish_round([])
        models.append({key: value.double() for key, value in method.state().tensors.items()})
    moved = sum(float((models[1][key] - models[0][key]).square().sum()) for key in models[0]) ** 0.5
    assert moved == pytest.approx(0.01 / 4, rel=1e-3)  # of four devices that are expected


def change_of_norm(method: Method, norm: float) -> Contribution:
    """What a device with the smallest sub-model contributes that changes every coordinate alike."""
    architecture = method.smallest_architecture
    half = method.client_step(Order(0, architecture))
    sent, returned = half.sent(method.family, architecture), half.returned(method.family, architecture)
    [(name, tensor_set)] = returned.items()
    total = WeightedSum.zeros(tensor_set.layout)
    total.add(torch.full((tensor_set.layout.numel,), norm / tensor_set.layout.numel**0.5, dtype=torch.float64), UNIT)
    group = Group(architecture, LEADING, sent, returned, method.family.place(architecture))
    return Contribution(group, [0], [0], 5, {name: total}, {})


@pytest.mark.thorough
def test_a_run_says_what_it_costs(tmp_path):
    config = small_config(tmp_path, **STATIC | {"dp.epsilon": 3.0, "dp.delta": 1e-3, "rounds": 3, "evaluate-every": 3})
    run(simulated_grid(), config)
    folder = tmp_path / "runs" / "small"
    rounds, summary = read_rounds(folder), read_summary(folder)
    spent = [record.epsilon for record in rounds]
    assert 0 < spent[0] < spent[1] < spent[2] <= 3.0
    assert spent[2] > 2.95
    assert summary.epsilon == spent[2]
    assert summary.delta == rounds[0].delta == 1e-3
    assert "Epsilon" in (folder / "report.html").read_text()
    plan = make_plan(config.model_copy(update={"run_name": "other"}))
    assert plan.epsilon == pytest.approx(spent[2])
    assert plan.to_json()["delta"] == 1e-3
    again = {**config.to_dict(), "resume": True, "rounds": 5}
    with pytest.raises(JournalError, match=r"noise with which 3 rounds reach dp\.epsilon = 3"):
        run(simulated_grid(), type(config).from_run_config(again))


@pytest.mark.parametrize("name", ["depthfl", "scalefl"])
def test_methods_of_several_exits_run_under_it(name, tmp_path):
    """Their families have batch norm, which must be static; DepthFL must keep no corrections."""
    arguments = METHODS[name]["family-arguments"] + ", norm = 'static'"
    keys = METHODS[name] | DP | {"family-arguments": arguments, "rounds": 1, "evaluate-every": 1}
    with pytest.raises(ConfigError, match="batch norm's statistics"):
        started(small_config(tmp_path, **keys | METHODS[name] | {"depthfl.alpha": 0.0}))
    run(simulated_grid(), small_config(tmp_path, **keys | {"depthfl.alpha": 0.0}))
    [record] = read_rounds(tmp_path / "runs" / "small")
    assert record.devices_replied == record.devices_sampled > 0
    assert record.distinct_architectures > 1
    assert record.epsilon == pytest.approx(epsilon_after(1, 1.0, 4 / 6, 1e-3))
    assert len(record.score_by_exit) == 3


def test_without_it_nothing_is_said(tmp_path):
    run(simulated_grid(), small_config(tmp_path, rounds=1))
    line = json.loads((tmp_path / "runs" / "small" / "rounds.jsonl").read_text())
    assert line["epsilon"] is None
    assert line["delta"] is None


def test_a_seeded_run_is_the_same_however_many_workers_carry_it(tmp_path):
    states = []
    for nodes in (1, 3):
        (folder := tmp_path / str(nodes)).mkdir()
        engine, scorer = started(small_config(folder, **STATIC | DP | {"workers": nodes}))
        engine.start()
        grid = simulated_grid(nodes)
        for number in (1, 2):
            engine.run_round(grid, number, scorer)
        states.append(engine.state().tensors)
    assert same_bits(*states)


def test_devices_take_part_by_chance_and_none_is_left_waiting(tmp_path):
    engine, _ = started(small_config(tmp_path, **STATIC | DP))
    counts = []
    for number in range(1, 301):
        engine.method.round = number
        counts.append(len(engine._sample(simulated_grid())))
    # Six devices, each with probability 4/6.
    assert np.mean(counts) == pytest.approx(4, abs=0.2)
    assert max(counts) == 6
    assert min(counts) < 3
    assert np.var(counts) == pytest.approx(6 * 2 / 3 / 3, rel=0.25)


def test_the_server_bounds_what_real_nodes_send(tmp_path, caplog):
    """A step with a huge learning rate goes far; without noise the model moves by the clip at most."""
    keys = STATIC | {"fleet": "", "devices": 2, "devices-per-round": 2, "dp.noise-multiplier": 1e-9, "dp.clip": 0.01}
    config = small_config(tmp_path, **keys | {"learning-rate": 50.0})
    engine, _ = started(config)
    engine.start()
    before = {name: value.clone() for name, value in engine.state().tensors.items()}
    with caplog.at_level("INFO"):
        result = engine.run_round(connected_grid(2, tmp_path), 1, lambda model: None)
    assert result.record["devices_bounded"] == 2
    [told] = [record for record in caplog.records if "scaled down" in record.getMessage()]
    assert told.getMessage() == "Round 1: the updates of devices [0, 1] are scaled down to dp.clip"
    assert told.levelname == "INFO"  # which is what clipping is for
    after = engine.state().tensors
    moved = math.sqrt(sum(float((after[n].double() - before[n].double()).square().sum()) for n in before))
    assert 0 < moved <= 0.01 * (1 + 1e-4)


def test_noise_over_real_nodes_is_not_of_the_seed(tmp_path):
    keys = STATIC | DP | {"fleet": "", "devices": 2, "devices-per-round": 2}
    states = []
    for _ in range(2):
        engine, _ = started(small_config(tmp_path, **keys))
        engine.method.round = 1
        engine.method.finish_round([])
        states.append(engine.state().tensors)
    assert not same_bits(*states)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"strategy": "scaffold"}, "strategy = 'scaffold': with these settings it learns more"),
        (METHODS["inclusivefl"], "strategy = 'inclusivefl': with these settings it learns more"),
        (METHODS["depthfl"] | {"depthfl.alpha": 0.1}, "strategy = 'depthfl'"),
        (STATIC | {"aggregation.rule": "median"}, "aggregation.rule = 'median': does not go with differential privacy"),
        (STATIC | {"aggregation.norm-bound": 1.0}, "aggregation.norm-bound = 1.0: .*dp.clip is the bound"),
        (STATIC | {"both-models": True}, "both-models = True"),
        (STATIC | {"aggregation.over-selection": 0.3}, "aggregation.over-selection = 0.3"),
        (STATIC | {"personal.every": 1, "test-fraction": 0.2}, "personal.every = 1"),
        (STATIC | {"dp.epsilon": 1.0}, "dp.noise-multiplier = 1.0: dp.epsilon = 1 says"),
        (STATIC | {"dp.delta": 0.2}, "dp.delta = 0.2: with devices = 6 it must be below 0.167"),
    ],
)
def test_what_breaks_it_is_refused(keys, why, tmp_path):
    with pytest.raises(ConfigError, match=why):
        small_config(tmp_path, **DP | keys)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"strategy": "fedavg"}, "batch norm's statistics"),
        ({"strategy": "heterofl"}, "batch norm's statistics"),
        ({"strategy": "fednova", "family-arguments": "norm = 'static'"}, "the fact 'effective_steps'"),
    ],
)
def test_what_travels_without_noise_is_refused(keys, why, tmp_path):
    with pytest.raises(ConfigError, match=why):
        started(small_config(tmp_path, **DP | keys))


def test_frozen_parts_get_no_noise(tmp_path):
    engine, _ = started(small_config(tmp_path, **STATIC | DP | {"freeze": "block1"}))
    engine.method.round = 1
    before = {name: value.clone() for name, value in engine.method.weights.items()}
    engine.method.finish_round([])
    after = engine.method.weights
    frozen = [name for name in before if name.startswith("block1")]
    assert frozen
    assert all(torch.equal(before[name], after[name]) for name in frozen)
    assert not any(torch.equal(before[name], after[name]) for name in before.keys() - set(frozen))


def test_methods_that_step_on_the_server_do_so_also_when_nobody_came(tmp_path):
    for method in ("fedadam", "fedavgm"):
        engine, _ = started(small_config(tmp_path, **STATIC | DP | {"strategy": method}))
        engine.method.round = 1
        before = {name: value.clone() for name, value in engine.method.weights.items()}
        engine.method.finish_round([])
        assert not any(torch.equal(before[name], engine.method.weights[name]) for name in before), method
