"""Aggregations that a few wrong devices cannot move far, by hand."""

import itertools

import pytest
import torch

from tests.small_run import METHODS, by_method, changed_reply, connected_grid, small_config, started
from tests.strategies.test_contract import HARDWARE, run_rounds
from wildflower.messages.packing import Layout
from wildflower.messages.sums import UNIT, WeightedSum, flatten
from wildflower.models.lenet import LeNet5
from wildflower.models.placement import whole
from wildflower.server_app.config import ConfigError
from wildflower.strategies.aggregation import Aggregation, running_mean

ROBUST = ("trimmed-mean", "median", "norm-bounded-mean")


def of_device(weights, weight=UNIT, present=None, spans=()):
    layout = Layout.of(weights)
    found = WeightedSum.zeros(layout, None if present is None else len(present))
    found.add(flatten(weights, layout), weight, None if present is None else torch.tensor(present), spans)
    return layout, found


def aggregated(kind, values, previous=0.0, weights=None, trim=0.2):
    """What becomes of one coordinate of these values."""
    mean = running_mean({"w": torch.zeros(1)}, Aggregation(kind, trim))
    for value, weight in zip(values, weights or [UNIT] * len(values), strict=True):
        tensors = {"w": torch.tensor([float(value)])}
        mean.add(whole(tensors), *of_device(tensors, weight))
    return float(mean.mean({"w": torch.tensor([previous])})["w"])


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        ("median", [3, 1, 1000], 3.0),
        ("median", [4, 1, 1000, 2], 3.0),  # the mean of the two in the middle
        ("median", [7], 7.0),
        ("median", [1.5, 4], 1.5),  # two owners: the change from 1 of 3 is brought down to 0.5
        ("trimmed-mean", [1, 2, 3, 6, 1000], 11 / 3),  # a fifth of five: one at each end
        ("trimmed-mean", [1, 2, 4, -1000, 6, 1000], 3.0),  # a fifth of six, rounded up: two at each end
        ("trimmed-mean", [0, 4], 1.0),
        ("mean", [1, 2, 3, 6, 1000], 202.4),
        # Changes from 1 of sizes 0, 1, 2, 2, 999: the median one is 2.
        ("norm-bounded-mean", [1, 2, 3, -1, 1000], (1 + 2 + 3 - 1 + 3) / 5),
    ],
)
def test_one_coordinate(kind, values, expected):
    for order in itertools.islice(itertools.permutations(values), 30):
        assert aggregated(kind, order, previous=1.0) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("kind", ["mean", *ROBUST])
def test_rounds_may_train_different_tensors(kind):
    """Of a tensor that nobody trained the weight is 0 and the value stays, as a copy; and every round starts over."""
    previous = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
    mean = running_mean(previous, Aggregation(kind))
    for name, other, values in (("a", "b", [5.0, 6.0]), ("b", "a", [7.0])):
        assert mean.empty
        assert {name: count.tolist() for name, count in mean.weight().items()} == {"a": [0, 0], "b": [0]}
        tensors = {name: torch.tensor(values)}
        mean.add(whole(tensors), *of_device(tensors))
        assert not mean.empty
        assert mean.weight()[name].tolist() == [UNIT] * len(values)
        assert not mean.weight()[other].any()
        found = mean.mean(previous)
        assert found[name].tolist() == values
        assert torch.equal(found[other], previous[other])
        assert found[other].data_ptr() != previous[other].data_ptr()


def test_sums_are_held_from_the_first_addition_to_the_mean():
    """They take four times the memory of the model in 32 bits, which workers need while the server waits."""
    previous = {"a": torch.zeros(2), "b": torch.zeros(1)}
    mean = running_mean(previous)

    def held():
        return {name for sums in (mean._totals, mean._counts) for name in sums}

    assert held() == set()
    tensors = {"a": torch.ones(2)}
    mean.add(whole(tensors), *of_device(tensors))
    assert held() == {"a"}
    mean.mean(previous)
    assert held() == set()


def test_nobody_changes_nothing():
    for kind in ("mean", *ROBUST):
        assert aggregated(kind, [], previous=5.0) == 5.0


def test_examples_that_a_device_claims_do_not_count_where_owners_count_alike():
    assert aggregated("median", [1, 2, 3], weights=[UNIT, UNIT, 10**6]) == 2.0
    assert aggregated("trimmed-mean", [1, 2, 3], weights=[UNIT, UNIT, 10**6]) == 2.0
    # The bound is on how far each goes; within it the mean weighs them as always.
    assert aggregated("norm-bounded-mean", [1, 1, 3], weights=[1, 1, 2]) == pytest.approx(1.0)


@pytest.mark.parametrize("kind", ROBUST)
def test_coordinates_have_owners_of_their_own(kind):
    """Five devices own the first two channels of the hidden layer, three the third, and nobody the last."""
    family = LeNet5(input_shape=(1, 8, 8), hidden=(4, 4))
    full = {name: torch.zeros(spec.shape) for name, spec in family.tensors(family.full()).items()}
    [name, *_] = [name for name, value in full.items() if value.shape == (4,)]
    group = next(g for g in family.groups if family.groups[g] == 4)
    mean = running_mean(full, Aggregation(kind))
    for size, value in ((2, 1.0), (2, 2.0), (3, 3.0), (3, 4.0), (3, 500.0)):
        architecture = family.architecture({group: size})
        tensors = {n: torch.full(spec.shape, value) for n, spec in family.tensors(architecture).items()}
        mean.add(family.place(architecture), *of_device(tensors))
    found = mean.mean({n: torch.full_like(v, -7.0) for n, v in full.items()})[name]
    if kind == "norm-bounded-mean":  # changes from -7 of sizes 8, 9, 10, 11, 507: none above 10
        expected = torch.tensor([(1 + 2 + 3 + 3 + 3) / 5, (1 + 2 + 3 + 3 + 3) / 5, 3.0, -7.0])
    else:
        expected = torch.tensor([3.0, 3.0, 4.0, -7.0])
    torch.testing.assert_close(found, expected)


def test_sizes_of_changes_are_compared_within_a_tensor_set():
    """Changes of a are 0.1, 0.2 and 0.1, those of b 4, 2 and 3: bounded to 0.1 and to 3, each by its own median."""
    previous = {"a": torch.zeros(1), "b": torch.full((1,), 10.0)}
    mean = running_mean(previous, Aggregation("norm-bounded-mean"))
    for a, b in ((0.1, 14.0), (0.2, 12.0), (0.1, 13.0)):
        for tensor_set, tensors in (("changes", {"a": torch.tensor([a])}), ("statistics", {"b": torch.tensor([b])})):
            mean.add(whole(tensors), *of_device(tensors), tensor_set=tensor_set)
    found = mean.mean(previous)
    assert float(found["a"]) == pytest.approx(0.1, rel=1e-4)
    assert float(found["b"]) == pytest.approx((13 + 12 + 13) / 3, rel=1e-6)


@pytest.mark.parametrize("kind", ROBUST)
def test_rows_of_absent_classes_are_not_owned(kind):
    family = LeNet5(input_shape=(1, 8, 8), classes=2)
    full = {name: torch.zeros(spec.shape) for name, spec in family.tensors(family.full()).items()}
    bias = next(name for name, value in full.items() if value.shape == (2,))
    mean = running_mean(full, Aggregation(kind))
    start = 0
    for entry in Layout.of(full).entries:
        if entry.name == bias:
            break
        start += entry.numel
    for value, present in ((1.0, [True, True]), (1.0, [True, False]), (1.0, [True, False])):
        tensors = {n: torch.full(v.shape, value) for n, v in full.items()}
        tensors[bias] = torch.tensor([value, 2 * value])
        mean.add(family.place(family.full()), *of_device(tensors, present=present, spans=((start, start + 2, 1),)))
    found = mean.mean(full)[bias]
    assert float(found[0]) == pytest.approx(1.0, abs=1e-3)
    assert float(found[1]) == pytest.approx(2.0, abs=1e-3)  # of the one device that has the class, not 2 / 3


# Whole rounds, in which one device of four answers with weights of a million.


def hostile(reply, arrays):
    arrays[0] = torch.full((len(arrays[0]) // 4,), 1e6).numpy().tobytes()


def rounds_with_one_hostile(tmp_path, method, kind, number=1):
    grid = connected_grid(5, tmp_path / f"{kind}")
    kinds = {("train", 1)}
    grid.tamper = lambda m: (
        changed_reply(hostile)(m) if (m.metadata.message_type, m.metadata.src_node_id) in kinds else m
    )
    changes = HARDWARE | {"aggregation.rule": kind, "devices": 5, "devices-per-round": 5}
    engine, results = run_rounds(tmp_path / f"run-{kind}", method, grid, number, **changes)
    assert {line["outcome"] for line in results[0].devices} == {"trained"}
    return max(float(v.abs().max()) for n, v in engine.state().tensors.items() if n.startswith("weights/"))


def allowed(method):
    try:
        config = small_config_of(method)
    except ConfigError:
        return False
    return config.aggregation.rule == "median"


def small_config_of(method):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        return small_config(Path(folder), **METHODS[method] | {"aggregation.rule": "median"})


def test_methods_that_rely_on_the_mean_or_have_none_say_so(tmp_path):
    refused = {METHODS[method]["strategy"] for method in METHODS if not allowed(method)}
    assert {"local", "recipfl", "hypemefed", "scaffold", "q-fedavg"} <= refused
    with pytest.raises(ConfigError, match=r"aggregation\.rule = 'median': strategy = 'scaffold' relies on the mean"):
        small_config(tmp_path, strategy="scaffold", aggregation__rule="median")
    with pytest.raises(ConfigError, match="strategy = 'depthfl'"):
        small_config(tmp_path, **METHODS["depthfl"] | {"depthfl.alpha": 0.1, "aggregation.rule": "median"})


@by_method(method for method in METHODS if allowed(method))
def test_one_device_does_not_move_the_model_of_any_method_that_takes_it(method, tmp_path):
    assert rounds_with_one_hostile(tmp_path, method, "median") < 100


@pytest.mark.parametrize("kind", ["trimmed-mean", "norm-bounded-mean"])
@pytest.mark.parametrize("method", ["all-large", "heterofl"])
def test_other_robust_means_do_as_well(kind, method, tmp_path):
    assert rounds_with_one_hostile(tmp_path, method, kind) < 100


def test_the_mean_is_moved(tmp_path):
    assert rounds_with_one_hostile(tmp_path, "all-large", "mean") > 10**5


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ROBUST)
def test_a_simulation_and_nodes_of_their_own_come_to_the_same_model(kind, tmp_path):
    from tests.small_run import same_bits, simulated_grid

    states = []
    for nodes in (1, 3):
        grid = simulated_grid(nodes)
        grid.turn = lambda messages: messages[::-1]
        folder = tmp_path / f"{nodes}"
        folder.mkdir()
        engine, scorer = started(small_config(folder, aggregation__rule=kind, workers=nodes, evaluate_every=1))
        result = engine.run_round(grid, 1, scorer)
        assert result.record["devices_replied"] == 4
        assert result.record["score"] is not None
        states.append(engine.state().tensors)
    assert same_bits(*states)
