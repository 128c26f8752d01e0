"""Modules that are cut by themselves: groups, sub-models, placements."""

import json
from dataclasses import replace
from functools import lru_cache

import numpy as np
import own_traced
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.traced_weights import lively
from wildflower.models.architecture import Architecture
from wildflower.models.cost import cost
from wildflower.models.family import make_family
from wildflower.models.levels import Levels
from wildflower.models.placement import chosen, leading, rolling
from wildflower.models.trace import follow
from wildflower.models.traced.family import Traced, _recorded
from wildflower.models.traced.own_module import own_module
from wildflower.models.weights import with_weights
from wildflower.strategies.noise import Noise

IMAGES = ("Dense", "Residual", "Separable", "Dense2", "Patches", "Gated")
TOKENS = ("Words", "Tied")
EXACT = ("Dense", "Residual", "Dense2", "Words", "Tied", "Gated")  # no norm over what is cut


@lru_cache
def traced(name):
    """Of a module with nothing else said; tracing takes half a second."""
    return family_of(name, keep=[])


def family_of(name, **more):
    if not more:
        return traced(name)
    tokens = name in TOKENS
    shape = [6] if tokens else [1, 8, 8]
    spec = {"name": f"own_traced:{name}", "input_shape": shape, "classes": 7, "tokens": tokens}
    return make_family(spec | more)


def batch(name, size=5):
    generator = torch.Generator().manual_seed(1)
    if name in TOKENS:
        return torch.randint(0, 7, (size, 6), generator=generator)
    return torch.randn(size, 1, 8, 8, generator=generator)


@pytest.mark.parametrize("name", [*IMAGES, *TOKENS])
def test_the_whole_model_is_the_module_to_the_bit(name):
    family = family_of(name)
    assert isinstance(family, Traced)
    module = getattr(own_traced, name)(7)
    weights = lively(family)
    module.load_state_dict(weights, strict=False)
    network = with_weights(family, family.full(), {n: v.clone() for n, v in weights.items()})
    inputs = batch(name)
    for training in (False, True):
        answers = []
        for model in (module, network):
            torch.manual_seed(5)
            answers.append(model.train(training)(inputs))
        assert torch.equal(*answers)
    for answer in answers:
        answer.square().sum().backward()
    theirs = dict(module.named_parameters())
    assert all(torch.equal(parameter.grad, theirs[n].grad) for n, parameter in network.named_parameters())
    assert all(torch.equal(value, module.state_dict()[n]) for n, value in network.state_dict().items())


def test_what_is_drawn_for_an_answer_that_nobody_reads_is_no_difference():
    """GoogLeNet and Inception have such heads while they train, with dropout, and a graph leaves them out."""
    family = family_of("Auxiliary")
    assert "further.weight" not in family.tensors(family.full())


def test_groups_are_those_of_the_network():
    assert dict(family_of("Dense").groups) == {"stem.1": 12, "layers.1": 1, "layers.2": 1}  # which may be left out
    assert dict(family_of("Residual").groups) == {
        "conv1": 8,
        "layer1.0.conv1": 8,
        "layer1.1.conv1": 8,
        "layer2.0.conv1": 12,
        "layer2.0.conv2": 12,
        "layer2.1.conv1": 12,
    }
    assert dict(family_of("Patches").groups)["blocks.0.attention.qkv"] == 4  # heads, and not their channels
    assert dict(family_of("Separable").groups) == {"stem.0": 4, "squeeze": 6}  # of 4 groups each
    assert dict(family_of("Colored").groups) == {"stem": 6}  # and not the three colors, which one gray image is


@settings(max_examples=10, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("select", [leading, rolling(3), chosen(1)])
def test_a_cut_equals_the_whole_with_the_rest_masked(name, select, data):
    family = family_of(name)
    arch = Architecture(tuple(data.draw(st.integers(1, full)) for full in family.groups.values()))
    whole = lively(family)
    placement = family.place(arch, select)
    cut = with_weights(family, arch, placement.gather(whole)).eval()
    masks = {n: torch.zeros_like(v) for n, v in whole.items()}
    placement.add_to(masks, {n: torch.ones_like(v) for n, v in cut.state_dict().items()})
    masked = with_weights(family, family.full(), {n: v * masks[n] for n, v in whole.items()}).eval()
    inputs = batch(name)
    with torch.no_grad():
        assert torch.allclose(cut(inputs), masked(inputs), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [*IMAGES, *TOKENS])
def test_every_sub_model_trains_all_of_its_parameters(name):
    family = family_of(name, norm="static" if name == "Residual" else "batch")
    for arch in (family.smallest(), family.width(0.5), family.full()):
        network = family.build(arch).train()
        network(batch(name)).square().sum().backward()
        assert all(parameter.grad is not None for parameter in network.parameters())
        assert {n: tuple(v.shape) for n, v in network.state_dict().items()} == {
            n: spec.shape for n, spec in family.tensors(arch).items()
        }
        network.eval()(batch(name)[:2])


@pytest.mark.parametrize("name", ["Residual", "Tied"])
def test_a_family_round_trips_through_json_in_any_order_of_keys(name):
    family = family_of(name)
    again = make_family(json.loads(json.dumps(family.spec(), sort_keys=True)))
    assert again == family
    assert list(again.groups) == list(family.groups)
    assert list(again.tensors(again.full())) == list(family.tensors(family.full()))


def test_static_norms_have_no_statistics_and_with_statistics_they_have():
    family = family_of("Residual", norm="static")
    assert not any("running" in name for name in family.tensor_names())
    assert sum("running" in name for name in family.with_statistics.tensor_names()) == 2 * 10
    network = family.build(family.full()).eval()
    inputs = batch("Residual")
    assert torch.equal(network(inputs), network.train()(inputs))


def test_the_scaler_divides_by_the_kept_share():
    family, plain = family_of("Dense", scaler=True), family_of("Dense")
    arch = family.width(0.5)
    weights = family.place(arch).gather(lively(family))
    inputs = batch("Dense")
    scaled, without = (with_weights(f, arch, dict(weights)).eval() for f in (family, plain))
    x = torch.nn.functional.linear(inputs.flatten(1), weights["stem.1.weight"], weights["stem.1.bias"]) / 0.5
    for number in range(3):
        layer = (weights[f"layers.{number}.weight"], weights[f"layers.{number}.bias"])
        x = x + torch.relu(torch.nn.functional.linear(x, *layer) / 0.5)
    answer = torch.nn.functional.linear(x, weights["head.weight"], weights["head.bias"])
    assert torch.allclose(scaled(inputs), answer, atol=1e-5)
    assert not torch.allclose(without(inputs), answer, atol=1e-2)


def test_heads_are_marked_and_ties_have_one_name():
    family = family_of("Residual")
    assert [n for n, spec in family.tensors(family.full()).items() if spec.of_classes] == ["fc.weight", "fc.bias"]
    tied = family_of("Tied")
    assert dict(tied.further_names()) == {"head.weight": "words.weight"}
    assert "head.weight" not in tied.tensor_names()


def test_keep_leaves_channels_whole():
    family = family_of("Residual", keep=["conv1"])
    assert "conv1" not in family.groups
    with pytest.raises(ValueError, match="keep has 'layer9', and the module has no such part; did you mean"):
        family_of("Residual", keep=["layer9"])


def test_levels_by_hand_stay_possible():
    assert isinstance(family_of("Dense", levels=[{"hidden": 4}, {"hidden": 8}]), Levels)


def test_a_cut_costs_less():
    family = family_of("Residual")
    small, large = (cost(family, family.width(w), batch_size=8, optimizer="sgd") for w in (0.25, 1.0))
    assert small.parameters < large.parameters
    assert small.peak_training_memory_bytes < large.peak_training_memory_bytes
    assert large.parameters == sum(p.numel() for p in own_traced.Residual(7).parameters())


@pytest.mark.parametrize("name", [*IMAGES, *TOKENS])
@pytest.mark.parametrize("accumulates", [False, True])
def test_a_price_is_that_of_a_step_that_is_followed(name, accumulates):
    """Memory, operations and convolutions of any widths come from one step, which is played back."""
    family = family_of(name)
    rng = np.random.default_rng(0)
    for arch in (family.smallest(), family.sample(rng), family.full()):
        shape, dtype = family.input_shape, family.input_dtype
        step = follow(lambda: family.build(arch), 6, shape, dtype, 7, accumulates=accumulates)
        found = family.step(arch, 6, accumulates=accumulates)
        assert found.peak_bytes == pytest.approx(step.peak_bytes, rel=0.01)
        assert replace(found, peak_bytes=0) == replace(step, peak_bytes=0)
    assert _recorded(family, (), (), 6, accumulates=accumulates) is not None


@pytest.mark.parametrize("name", ["Residual", "Separable"])
def test_large_batches_are_priced_from_one_step_too(name):
    """Pixels of a batch times those of a kernel are more than the primes that stand for widths."""
    assert _recorded(family_of(name), (), (), 2000, accumulates=False) is not None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ByValue", r"decides by the values of a tensor \(own_traced\.py:\d+: if x\.mean\(\) > 0:\)"),
        ("CountingBatches", r"has a batch norm, norm, with momentum = None, .*: give it a momentum, such as 0\.1"),
        ("OwnBackward", r"own_traced\.Squared, an autograd\.Function"),
        ("TwoInputs", r"takes several inputs .*default, or write a module around it"),
        ("Pair", "answers with 2 tensors in a tuple"),
        (
            "NotABatch",
            r"answers a batch of \d+ with a tensor of \(7,\): it must return one tensor of \(batch, classes\)",
        ),
        ("WithoutGradients", r"has no gradient in the module.*use torch\.no_grad\(\) or detach\(\)"),
        ("BySize", "the answers of the module and of its graph differ"),
        ("ChangesInput", "changes its input in place"),
        ("ReadsAValue", r"operator aten\.item\.default \(own_traced\.py:\d+\).*it reads the value of a tensor"),
        ("Lazy", "has a lazy layer"),
        ("SharesMemory", r"last and head\.weight share memory, and are not one tensor: tie weights by giving a module"),
        (
            "ThreeChannels",
            r"fails on inputs of the task's shape, \(batch, 1, 8, 8\) \(own_traced\.py:\d+: x = self\.stem"
            r"\(images\)\).*Have it take these: its constructor gets `input_shape`",
        ),
        ("MostlyPinned", r"most of its parameters cannot be cut \(first\.weight: it is an input"),
        ("Whole", "most of its parameters cannot be cut"),
    ],
)
def test_what_cannot_be_cut_is_said_with_what_to_do(name, words, capfd):
    with pytest.raises(ValueError, match=words):
        family_of(name)
    assert capfd.readouterr() == ("", "")  # PyTorch prints the graphs that it cannot finish


def test_another_number_of_classes_is_refused():
    with pytest.raises(ValueError, match="answers with 7 numbers per example, and the task has 10 classes"):
        make_family({"name": "own_traced:WrongClasses", "input_shape": [1, 8, 8], "classes": 10})


@pytest.mark.parametrize("classes", [7, 10])
@pytest.mark.parametrize("name", ["passing_on", "not_passing_on"])
def test_a_function_that_passes_arguments_on_is_told_the_number_of_classes(name, classes):
    family = make_family({"name": f"own_traced:{name}", "input_shape": [1, 8, 8], "classes": classes})
    assert family.tensors(family.full())["head.weight"].shape[0] == classes


def test_a_function_that_takes_no_number_of_classes_is_called_without():
    family = make_family({"name": "own_traced:taking_others", "input_shape": [1, 8, 8], "classes": 10})
    assert family.tensors(family.full())["head.weight"].shape[0] == 10


@pytest.mark.parametrize(
    ("name", "as_own"),
    # Of a vision transformer the width of the stream and that of all heads are one attribute, and two sizes.
    [("Dense", True), ("Residual", True), ("Separable", True), ("Dense2", True), ("Patches", False), ("Words", True)],
)
def test_a_cut_comes_as_the_users_own_class_where_that_answers_alike(name, as_own):
    family = family_of(name, scaler=True)
    arch = Architecture(tuple(1 + 3 * full // 4 for full in family.groups.values()))
    network = with_weights(family, arch, family.place(arch).gather(lively(family))).eval()
    found = own_module(family, arch, network)
    assert (found is not None) == as_own
    if found is None:
        return
    assert type(found) is getattr(own_traced, name)
    assert not found.training
    inputs = batch(name)
    with torch.no_grad():
        assert torch.allclose(found(inputs), network(inputs), atol=1e-5, rtol=1e-5)
    found.train()(inputs).sum().backward()
    assert all(parameter.grad is not None for parameter in found.parameters())


def test_attributes_of_a_cut_module_are_its_sizes():
    family = family_of("Residual")
    arch = family.width(0.5)
    network = with_weights(family, arch, family.place(arch).gather(lively(family))).eval()
    found = own_module(family, arch, network)
    assert repr(found.layer2[0].conv1) == "Conv2d(4, 6, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1), bias=False)"
    assert (found.bn1.num_features, found.fc.in_features) == (4, 6)


def test_a_cut_whose_class_is_gone_stays_a_graph():
    family = replace(family_of("Dense"), function="gone:Dense")
    arch = family.width(0.5)
    network = with_weights(family, arch, family.place(arch).gather(lively(family_of("Dense")))).eval()
    assert own_module(family, arch, network) is None


def test_tables_of_embeddings_are_modules_so_that_noise_finds_them():
    family = family_of("Words")
    weights = family.initial()
    noise = Noise(family, weights)
    network = with_weights(family, family.full(), weights).eval()
    inputs = noise.draw(4, torch.Generator().manual_seed(0))
    assert inputs.shape == (4, 6, 8)
    module = own_traced.Words(7).eval()
    module.load_state_dict(weights)
    with torch.no_grad():
        right = module.head(module.lstm(inputs)[0][:, -1])
        assert torch.allclose(noise.reader(network, family.place(family.full()))(inputs), right, atol=1e-6)


def test_embeddings_of_an_image_s_positions_are_no_place_for_noise():
    family = family_of("Placed")
    weights = family.initial()
    noise = Noise(family, weights)
    images = noise.draw(4, torch.Generator().manual_seed(0))
    assert images.shape == (4, 1, 8, 8)
    network = with_weights(family, family.full(), weights).eval()
    module = own_traced.Placed(7).eval()
    module.load_state_dict(weights)
    with torch.no_grad():
        read = noise.reader(network, family.place(family.full()))(images)
        assert torch.allclose(read, module(images), atol=1e-6)


def test_a_frozen_part_of_a_module_of_ones_own_holds_all_that_lies_in_it():
    family = family_of("Adapting", freeze=["stem"])
    frozen = {name for name, spec in family.tensors(family.full()).items() if spec.frozen}
    assert frozen == {f"stem.{part}.{kind}" for part in ("1", "adapter") for kind in ("weight", "bias")}


@pytest.mark.parametrize("order", ["none", "flip", "roll", "sum"])
def test_entries_that_change_places_are_no_classes(order):
    spec = {"name": "own_traced:Ordered", "input_shape": [1, 8, 8], "classes": 7, "arguments": {"order": order}}
    family = make_family(spec)
    of_classes = [name for name, spec in family.tensors(family.full()).items() if spec.of_classes]
    assert of_classes == (["head.weight", "head.bias"] if order == "none" else [])
