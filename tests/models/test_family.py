import functools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from wildflower.models.architecture import Architecture
from wildflower.models.block_family import BlockFamily
from wildflower.models.choice import Choice
from wildflower.models.family import FAMILIES, make_family
from wildflower.models.placement import chosen, leading, rolling
from wildflower.models.space import Space
from wildflower.models.weights import with_weights

torch.set_num_threads(1)

# Inputs small enough for milliseconds, and each option of the families at least once.
SMALL = [
    {"name": "lenet5", "input_shape": [1, 8, 8]},
    {"name": "lenet5", "input_shape": [3, 32, 32], "classes": 7},
    {"name": "lenet5", "norm": "static", "scaler": True},
    {"name": "lenet5", "input_shape": [1, 12, 12], "exits": [1, 2], "scaler": True},
    {"name": "mlp", "input_shape": [5, 1], "classes": 3, "hidden": [7, 4], "scaler": True},
    {
        "name": "choice",
        "input_shape": [1, 12, 12],
        "classes": 4,
        "scaler": True,
        "members": {
            "large": {"name": "cnn3", "kernel": 5},
            "small": {"name": "lenet5", "conv_channels": [6, 3], "hidden": [84]},
            "deep": {"name": "resnet18", "first_channels": 2, "depth": 2},
        },
    },
    {"name": "resnet18", "input_shape": [3, 8, 8], "first_channels": 4, "depth": 1, "norm": "static"},
    {"name": "densenet121", "input_shape": [3, 8, 8], "growth": 2, "scaler": True},
    {"name": "densenet121", "input_shape": [3, 8, 8], "growth": 2, "exits": [1, 3, 4]},
    {"name": "cnn3", "input_shape": [1, 9, 11], "scaler": True},
    {"name": "cnn3", "input_shape": [1, 8, 8], "kernel": 5},
    {"name": "pfl-cnn", "input_shape": [1, 8, 8], "scaler": True},
    {"name": "cnn3", "input_shape": [2, 9], "exits": [1, 3], "norm": "static", "scaler": True},
    {"name": "cnn10", "input_shape": [1, 8, 8], "exits": list(range(1, 11))},
    {"name": "vgg", "input_shape": [1, 8, 9], "block_channels": [4, 6, 8]},
    {"name": "vgg", "input_shape": [3, 17], "block_channels": [4, 6, 8, 5], "exits": [1, 2, 3], "scaler": True},
    {"name": "resnet18", "input_shape": [3, 8, 8], "norm": "static", "scaler": True},
    {"name": "resnet18", "input_shape": [3, 8, 8], "first_channels": 4, "exits": [1, 2, 3, 4]},
    {"name": "resnet152", "input_shape": [1, 4, 4], "first_channels": 1, "exits": [2, 4]},
    {"name": "resnet34", "input_shape": [1, 8, 8], "classes": 3, "activation": "relu6", "first_channels": 4},
    {"name": "resnet152", "input_shape": [3, 8, 8], "first_channels": 4},
    {"name": "resnet152", "input_shape": [1, 4, 4], "first_channels": 2, "preactivation": True, "scaler": True},
    {"name": "mobilenet-v2", "input_shape": [3, 8, 8], "stage_channels": [8] * 7, "depths": [1, 2]},
    {"name": "mobilenet-v3", "input_shape": [1, 6, 6], "stage_channels": [8] * 6, "depths": [1, 2], "scaler": True},
    {"name": "ofa-resnet50", "input_shape": [3, 8, 8], "first_channels": 8, "extra_depths": [0, 1], "norm": "static"},
    {"name": "vit-tiny", "input_shape": [3, 8, 8], "depth": 3},
    {"name": "vit-tiny", "input_shape": [1, 4, 8], "hidden": 12, "depth": 2, "heads": 2, "mlp": 9, "scaler": True},
    {"name": "bert", "input_shape": [7], "classes": 11, "hidden": 24, "depth": 3, "heads": 4, "mlp": 16},
    {"name": "bert-tiny", "input_shape": [6], "classes": 9},
    {"name": "bert", "input_shape": [5], "classes": 6, "hidden": 6, "depth": 1, "heads": 3, "mlp": 8, "scaler": True},
]


@pytest.mark.parametrize("spec", SMALL, ids=str)
def test_spec_round_trips_through_json(spec):
    family = make_family(spec)
    assert make_family(json.loads(json.dumps(family.spec()))) == family
    for key, value in spec.items():
        if key == "members":
            assert {member: value[member] | spec for member, spec in family.spec()[key].items()} == family.spec()[key]
        else:
            assert family.spec()[key] == value


def test_every_family_is_tested():
    # Those of modules that describe no layers have tests of their own.
    assert {spec["name"] for spec in SMALL} == {
        n for n, kind in FAMILIES.items() if issubclass(kind, BlockFamily | Choice)
    }


def example_inputs(family):
    if family.input_dtype == torch.int64:
        return torch.randint(family.classes, (4, *family.input_shape))
    return torch.randn(4, *family.input_shape)


def train_one_step(family, model):
    inputs = example_inputs(family)
    labels = torch.arange(4) % family.classes
    model.train()
    exits = model.exits(inputs)
    assert [logits.shape for logits in exits] == [(4, family.classes)] * len(exits)
    sum(nn.functional.cross_entropy(logits, labels) for logits in exits).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all(), name


@functools.cache
def whole_state(family):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.rand(value.shape, generator=generator) + 1 for name, value in family.initial().items()}


def check_cut(family, arch, select):
    whole = whole_state(family)
    model = family.build(arch)
    state = model.state_dict()

    # What is derived from the description is what PyTorch holds, in its order.
    specs = family.tensors(arch)
    assert {name: (spec.shape, spec.dtype) for name, spec in specs.items()} == {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()
    }
    assert list(specs) == list(state)
    assert set(state) <= set(whole)

    placement = family.place(arch, select)
    cut = placement.gather(whole)
    assert list(cut) == list(state)
    model.load_state_dict(cut, strict=True)

    # Adding back what was gathered hits each coordinate of the sub-model once, and no other.
    totals = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    counts = {name: torch.zeros(tensor.shape, dtype=torch.int64) for name, tensor in whole.items()}
    placement.add_to(totals, cut)
    placement.add_weight(counts, 1)
    for name, total in totals.items():
        assert counts[name].sum() == (cut[name].numel() if name in cut else 0)
        assert torch.equal(total, whole[name] * counts[name])
    return model


def drawn(family, seed):
    """An architecture, of a choice one of any member."""
    rng = np.random.default_rng(seed)
    if not isinstance(family, Choice):
        return family.sample(rng)
    member, own = family.members[int(rng.integers(len(family.members)))]
    return family.of(member, own.sample(rng))


SELECTIONS = [leading, rolling(5), chosen(3)]
DEEP = [spec for spec in SMALL if spec["name"].startswith("resnet") and "exits" not in spec]


@pytest.mark.thorough
@pytest.mark.parametrize("spec", [spec for spec in SMALL if spec not in DEEP], ids=str)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), select=st.sampled_from(SELECTIONS))
def test_sampled_architectures_are_cut_built_and_trained(spec, seed, select):
    family = make_family(spec)
    train_one_step(family, check_cut(family, drawn(family, seed), select))


@pytest.mark.thorough
@pytest.mark.parametrize("select", SELECTIONS)
@pytest.mark.parametrize("spec", DEEP, ids=str)
def test_sampled_resnets_are_cut_built_and_trained(spec, select):
    family = make_family(spec)
    without = [block for blocks in family.stages.values() for block in blocks[2:]]
    rng = np.random.default_rng(0)
    widths = {group: int(rng.integers(1, full + 1)) for group, full in family.groups.items()}
    arch = family.architecture({g: -(-w // 3) for g, w in widths.items()}, without)
    train_one_step(family, check_cut(family, arch, select))


# The spaces of the search's paper, small: ResNets, a transformer of images and one of text, elastic kernels.
SPACES = [
    ({"name": "resnet18", "first_channels": 4, "activation": "relu6", "input_shape": [1, 16, 16]}, 2),
    ({"name": "resnet34", "first_channels": 4, "activation": "relu6", "input_shape": [1, 16, 16]}, 3),
    ({"name": "resnet152", "first_channels": 2, "activation": "relu6", "input_shape": [1, 16, 16]}, 3),
    ({"name": "vit-tiny", "input_shape": [3, 8, 8], "hidden": 12, "depth": 4, "heads": 2, "mlp": 8}, 4),
    ({"name": "bert", "input_shape": [5], "classes": 6, "hidden": 12, "depth": 4, "heads": 2, "mlp": 8}, 4),
    ({"name": "cnn3", "input_shape": [1, 8, 8], "kernel": 5}, 1),
    ({"name": "lenet5", "input_shape": [1, 8, 8]}, 1),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("spec", "max_blocks"), SPACES, ids=[spec["name"] for spec, _ in SPACES])
@settings(max_examples=10, deadline=None, derandomize=True)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), select=st.sampled_from(SELECTIONS))
def test_architectures_of_a_space_are_cut_built_and_trained(spec, max_blocks, data, seed, select):
    family = make_family(spec)
    space = Space.of(family, (0, 0.25, 0.5, 1), min_blocks=data.draw(st.integers(1, max_blocks)))
    train_one_step(family, check_cut(family, space.sample(np.random.default_rng(seed)), select))


def test_a_resnet_without_a_middle_block_is_cut_built_and_trained():
    family = make_family({"name": "resnet34", "first_channels": 4, "activation": "relu6", "input_shape": [1, 16, 16]})
    arch = family.architecture(family.groups, frozenset({"stage3_2"}))
    model = check_cut(family, arch, leading)
    there = {name.partition(".")[0] for name in model.state_dict()}
    assert {"stage3_1", "stage3_3"} <= there
    assert "stage3_2" not in there
    train_one_step(family, model)


@pytest.mark.thorough
@pytest.mark.parametrize("spec", SMALL, ids=str)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_samples_are_valid(spec, seed):
    family = make_family(spec)
    arch = drawn(family, seed)
    family.validate(arch)
    assert Architecture.from_json(json.loads(json.dumps(arch.to_json()))) == arch
    assert arch == drawn(family, seed)


@pytest.mark.thorough
@pytest.mark.parametrize("spec", SMALL, ids=str)
def test_smallest_and_largest_train(spec):
    family = make_family(spec)
    for arch in (family.smallest(), family.largest()):
        train_one_step(family, family.build(arch))
    assert family.largest() == family.full() == family.width(1.0)
    assert all(width <= 1 for width in family.smallest().widths)


@pytest.mark.parametrize("spec", SMALL, ids=str)
def test_state_is_floating_point_and_static_norms_have_no_statistics(spec):
    family = make_family(spec)
    state = family.build(family.full()).state_dict()
    assert all(tensor.is_floating_point() for tensor in state.values())
    without_batch_norm = ("mlp", "pfl-cnn", "vit-tiny", "bert", "bert-tiny")
    normalized = family.norm == "batch" and spec["name"] not in without_batch_norm
    assert any("running_mean" in name for name in state) == normalized


@pytest.mark.parametrize("spec", SMALL, ids=str)
def test_classes_are_never_cut(spec):
    family = make_family(spec)
    specs = family.tensors(family.smallest())
    shapes = [s.shape for s in specs.values() if s.axes[0] is not None and s.axes[0].group == "classes"]
    assert shapes
    assert all(shape[0] == family.classes for shape in shapes)


def test_build_follows_the_seed():
    family = make_family({"name": "lenet5"})
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(family.build(family.full()).state_dict()["head.fc1.weight"])
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def test_build_uses_the_default_device():
    family = make_family({"name": "lenet5"})
    with torch.device("meta"):
        model = family.build(family.full())
    assert all(tensor.is_meta for tensor in model.state_dict().values())


def test_widths_round_up_and_keep_one_channel():
    family = make_family({"name": "lenet5"})
    assert family.width(1 / 16) == Architecture((1, 1, 8, 6))  # 0.375, 1, 7.5, 5.25
    for rate in (0, -0.5, 1.5):
        with pytest.raises(ValueError, match=r"lies in \(0, 1\]"):
            family.width(rate)


def test_running_statistics_are_tracked_without_a_counter():
    family = make_family({"name": "lenet5"})
    model = family.build(family.full())
    norm = model.get_submodule("block1.norm")
    conv = model.get_submodule("block1.conv")
    inputs = torch.randn(16, 1, 28, 28)
    model(inputs)
    # One step of an exponential average with momentum 0.1 from mean 0.
    torch.testing.assert_close(norm.running_mean, 0.1 * conv(inputs).mean((0, 2, 3)))


def test_scaler_divides_by_the_kept_share_in_training_and_in_scoring():
    family = make_family({"name": "lenet5", "norm": "static", "scaler": True})
    model = family.build(family.width(0.5))
    scaler = next(module for module in model.modules() if type(module).__name__ == "Scaler")
    assert scaler.train()(torch.ones(1)).item() == 2.0
    assert scaler.eval()(torch.ones(1)).item() == 2.0


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "lenet"}, "no family is named 'lenet'; did you mean 'lenet5'"),
        ({}, "no family is named None"),
        ({"name": "lenet5", "clases": 10}, "no argument 'clases'; did you mean 'classes'"),
        ({"name": "lenet5", "classes": 0}, "classes must be a number >= 1, not 0"),
        ({"name": "lenet5", "norm": "layer"}, "norm must be 'batch' or 'static', not 'layer'"),
        ({"name": "lenet5", "scaler": 1}, "scaler must be true or false"),
        ({"name": "lenet5", "input_shape": [28, 28]}, r"input_shape must be \(channels, height, width\), not"),
        ({"name": "cnn3", "input_shape": [28]}, r"must be \(channels, height, width\) or \(channels, length\), not"),
        ({"name": "cnn3", "input_shape": [2, 7]}, r"a pooling window of 2 does not fit an input of \(1,\)"),
        ({"name": "lenet5", "input_shape": [1, 0, 28]}, "input_shape must hold sizes >= 1"),
        ({"name": "lenet5", "input_shape": [1, 2, 2]}, "does not fit"),
    ],
)
def test_bad_specs_are_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        make_family(spec)


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        (Architecture((6, 16, 120)), "3 widths, but there are 4: conv1, conv2, fc1, fc2"),
        (Architecture((6, 16, 120, 84), (1,)), "1 kernels, but there are 0"),
        (Architecture((6, 17, 120, 84)), "width of conv2 must be 1 to 16, not 17"),
        (Architecture((6, 16, 0, 84)), "width of fc1 must be 1 to 120, not 0: what follows needs this layer; .* none"),
    ],
)
def test_architectures_out_of_bounds_are_refused(arch, message):
    family = make_family({"name": "lenet5"})
    for use in (family.validate, family.build, family.tensors, family.place):
        with pytest.raises(ValueError, match=message):
            use(arch)
    with pytest.raises(ValueError, match="has no group 'conv3'; did you mean"):
        family.architecture({"conv3": 4})


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"name": "vgg", "block_channels": 5}, "family 'vgg': block_channels = 5: must be a list"),
        (
            {"name": "vgg", "block_channels": [1, {}]},
            r"family 'vgg': block_channels\[1\] = {}: must be a whole number$",
        ),
        ({"name": "lenet5", "input_shape": 8}, "family 'lenet5': input_shape = 8: must be a list"),
        ({"name": "lenet5", "conv_channels": "many"}, "family 'lenet5': conv_channels = 'many': must be a list"),
        ({"name": "lenet5", "input_shape": None}, "family 'lenet5': input_shape = None: must be a list"),
        ({"name": "resnet18", "classes": {}}, "family 'resnet18': classes = {}: must be a whole number$"),
        ({"name": "lenet5", "norm": 3}, "family 'lenet5': norm = 3: must be a text in quotes"),
        ({"name": "choice", "members": {"a": {"name": "vgg", "exits": 2}}}, "family 'vgg': exits = 2: must be a list"),
    ],
)
def test_an_argument_of_another_kind_is_an_error_that_names_it(spec, words):
    with pytest.raises(ValueError, match=words):
        make_family({"input_shape": [3, 32, 32], **spec})


def test_a_missing_argument_is_named():
    with pytest.raises(ValueError, match="family 'choice': argument 'input_shape' is missing"):
        make_family({"name": "choice", "members": {}})


@pytest.mark.thorough
@pytest.mark.parametrize("spec", SMALL, ids=str)
def test_models_over_given_weights_are_those_that_are_built_and_share_nothing(spec):
    family = make_family(spec)
    arch = drawn(family, 3)
    torch.manual_seed(4)
    built = family.build(arch).eval()
    weights = {name: value.clone() for name, value in built.state_dict().items()}
    first, second = (
        with_weights(family, arch, {name: value.clone() for name, value in weights.items()}).eval() for _ in range(2)
    )
    inputs = example_inputs(family)
    assert repr(first) == repr(built)
    assert torch.equal(first(inputs), built(inputs))
    parts = set(map(id, first.modules()))
    assert not parts & set(map(id, second.modules()))
    for parameter in first.parameters():
        parameter.data.zero_()
    for module in first.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = 0.75
        module.register_forward_hook(lambda *_: pytest.fail("a hook of another model"))
    assert torch.equal(second(inputs), built(inputs))
    third = with_weights(family, arch, weights).eval()
    assert torch.equal(third(inputs), built(inputs))
    assert 0.75 not in {getattr(module, "momentum", None) for module in third.modules()}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda weights: weights.pop("head.fc1.bias"),
            r"head\.fc1\.bias of .* the shape \(120,\): there is none",
        ),
        (lambda weights: weights.update(more=torch.zeros(1)), "has no tensor more"),
        (
            lambda weights: weights.update({"head.fc1.bias": torch.zeros(121)}),
            r"must have the shape \(120,\): it has the shape \(121,\)",
        ),
    ],
)
def test_weights_of_another_model_are_refused(change, words):
    family = make_family({"name": "lenet5"})
    weights = dict(family.initial())
    change(weights)
    with pytest.raises(ValueError, match=words):
        with_weights(family, family.full(), weights)
