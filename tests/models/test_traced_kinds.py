"""Modules of many kinds are cut right, or refused with what to do."""

import own_kinds
import pytest
import torch

from tests.models.traced_weights import lively
from tests.small_run import simulated_grid, small_config, started
from wildflower.models.architecture import Architecture
from wildflower.models.family import make_family
from wildflower.models.placement import chosen, leading
from wildflower.models.traced.own_module import own_module
from wildflower.models.weights import with_weights

pytestmark = pytest.mark.thorough
HALVES = {  # what is kept where every group is cut to a half
    "Cells": {"first": 8, "second": 12, "gru": 6, "lstm": 5, "plain": 8},
    "Ellipsis": {"weight": 8, "second": 12},
    "Aliases": {"first": 8, "second": 12},
    "Shuffled": {"wide": 4, "narrow": 1, "first": 8, "second": 12},
    "Spectra": {"lift": 4, "weight": 4, "first": 8, "second": 12},
    "Bags": {"first": 8, "second": 12},
    "Means": {"first": 8, "second": 12},
    "Masked": {},
    "Named": {},
    "Spare": {"first": 8, "second": 12},
    "Spectral": {},
    "Counted": {"first": 8, "second": 12},
    "NamedAsNodes": {"first": 8, "second": 12},
}


def family_of(name, **more):
    tokens = name in ("Bags", "LastOffset")
    shape = [6] if tokens else [1, 8, 8]
    return make_family({"name": f"own_kinds:{name}", "input_shape": shape, "classes": 7, "tokens": tokens} | more)


def batch(name):
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randint(0, 7, (5, 6), generator=generator)
        if name == "Bags"
        else torch.randn(5, 1, 8, 8, generator=generator)
    )


@pytest.mark.parametrize("name", HALVES)
def test_a_cut_equals_the_whole_with_the_rest_masked(name):
    family = family_of(name)
    arch = Architecture(tuple(max(1, full // 2) for full in family.groups.values()))
    if HALVES[name]:
        assert sorted(arch.widths) == sorted(HALVES[name].values())
    whole = lively(family)
    for select in (leading, chosen(1)):
        placement = family.place(arch, select)
        cut = with_weights(family, arch, placement.gather(whole)).eval()
        masks = {n: torch.zeros_like(v) for n, v in whole.items()}
        placement.add_to(masks, {n: torch.ones_like(v) for n, v in cut.state_dict().items()})
        masked = with_weights(family, family.full(), {n: v * masks[n] for n, v in whole.items()}).eval()
        with torch.no_grad():
            assert torch.allclose(cut(batch(name)), masked(batch(name)), atol=1e-5, rtol=1e-4)
    cut.train()(batch(name)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in cut.parameters())


def test_a_running_mean_of_ones_own_is_moved_as_in_the_module():
    family = family_of("Means")
    weights = lively(family)
    network = with_weights(family, family.full(), {n: v.clone() for n, v in weights.items()}).train()
    module = own_kinds.Means(7).train()
    module.load_state_dict(weights)
    assert torch.equal(network(batch("Means")), module(batch("Means")))
    assert torch.equal(network.state_dict()["mean"], module.mean)
    assert not torch.equal(module.mean, weights["mean"])


@pytest.mark.parametrize("training", [True, False])
def test_a_module_that_drops_in_both_modes_does_so_as_a_graph(training):
    family = family_of("AlwaysDropping")
    weights = lively(family)
    module = own_kinds.AlwaysDropping(7).train(training)
    module.load_state_dict(weights)
    answers = []
    for network in (with_weights(family, family.full(), weights).train(training), module):
        torch.manual_seed(3)
        answers.append(network(batch("AlwaysDropping")))
    assert torch.equal(*answers)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Complex", r"weight is a tensor of complex64, which does not travel: .*torch\.view_as_real"),
        ("Sparse", r"neighbors is a tensor of sparse_coo, which does not travel: .*to_dense\(\)"),
        ("Infinite", "gain has first values that are no finite numbers"),
        ("Double", r"Inputs are torch\.float32: make them what its weights are"),
        ("Assigned", r"an attribute that it changes \(write buffers by self\.mean\.copy_\(\.\.\.\)\)"),
        ("One", "answers with one tensor in a tuple, dict or the like"),
        ("Backwards", r"torch\.arange at own_kinds\.py:\d+ counts examples in fractions, backwards or from below 0"),
        ("Fractions", r"torch\.arange at own_kinds\.py:\d+ counts examples in fractions, backwards or from below 0"),
        ("Imaginary", r"computes with the number 1j, and a graph holds no complex ones"),
        ("LastOffset", "the answers of the module and of its graph differ"),
    ],
)
def test_what_cannot_travel_is_said_before_round_1(name, words):
    with pytest.raises(ValueError, match=words):
        family_of(name)


def test_no_exits_behind_what_is_written_into():
    assert len(family_of("Shifted").groups) > 1
    with pytest.raises(ValueError, match=r"own_kinds:Shifted writes into buffers or parts of tensors.*torch\.cat"):
        family_of("Shifted", early_exits=True)


def test_gradients_of_numbers_of_16_bits_are_scaled_as_such(tmp_path):
    engine, scorer = started(small_config(tmp_path, family="own_kinds:Halved", strategy="wildflower"))
    result = engine.run_round(simulated_grid(), 1, scorer)
    assert {line["outcome"] for line in result.devices} <= {"trained", "nothing fits"}


def test_recipfl_says_that_it_writes_float32(tmp_path):
    keys = {"recipfl.hidden": 8, "recipfl.decoder-hidden": 8, "recipfl.tile": 8, "below-smallest": "smallest"}
    with pytest.raises(
        ValueError, match=r"writes float32, and first\.weight is bfloat16: make the model by \.float\(\)"
    ):
        started(small_config(tmp_path, family="own_kinds:Halved", strategy="recipfl", **keys))


@pytest.mark.parametrize("way", ["matmul", "addmm", "einsum", "columns"])
def test_the_scaler_stands_behind_layers_that_are_written_as_products(way):
    families = [family_of("ByHand", scaler=True, arguments={"way": w}) for w in ("layers", way)]
    arch = families[0].width(0.5)
    weights = families[0].place(arch).gather(lively(families[0]))
    answers = [with_weights(family, arch, dict(weights)).eval()(batch("ByHand")) for family in families]
    assert torch.allclose(*answers, atol=1e-5)


def test_a_cut_with_layers_written_as_products_comes_as_its_own_class():
    family = family_of("Products", scaler=True)
    arch = family.width(0.5)
    network = with_weights(family, arch, family.place(arch).gather(lively(family))).eval()
    found = own_module(family, arch, network)
    assert type(found) is own_kinds.Products
    assert torch.allclose(found(batch("Products")), network(batch("Products")), atol=1e-5)


@pytest.mark.parametrize("strategy", ["fednova", "q-fedavg", "scaffold", "spatl", "lotteryfl", "fedadam", "wildflower"])
def test_what_no_gradient_moves_stays_under_every_kind_of_update(tmp_path, strategy):
    engine, scorer = started(small_config(tmp_path, family="own_kinds:Still", strategy=strategy))
    before = {name: engine.method.weights[name].clone() for name in ("shift", "slope", "second.weight")}
    result = engine.run_round(simulated_grid(), 1, scorer)
    assert {line["outcome"] for line in result.devices} <= {"trained", "nothing fits"}
    same = {name: torch.equal(engine.method.weights[name], value) for name, value in before.items()}
    assert same == {"shift": True, "slope": True, "second.weight": False}
