import json

import pytest
import torch
from torch import nn

from tests.encoders import encoder
from wildflower.models.architecture import Architecture
from wildflower.models.cost import cost
from wildflower.models.family import make_family
from wildflower.models.lenet import LeNet5
from wildflower.models.placement import Axis
from wildflower.models.weights import with_weights
from wildflower.strategies.recipfl.network_graph import graph_of

torch.set_num_threads(1)

MEMBERS = {"large": {"name": "lenet5"}, "small": {"name": "lenet5", "conv_channels": [6, 3], "hidden": [84]}}
SPEC = {"name": "choice", "input_shape": [1, 28, 28], "members": MEMBERS}
CHOICE = make_family(SPEC)
LARGE, SMALL = CHOICE.candidates((1.0,))


def test_a_member_costs_and_computes_what_it_does_alone():
    for member, alone in (("large", LeNet5()), ("small", LeNet5(conv_channels=(6, 3), hidden=(84,)))):
        arch = CHOICE.of(member)
        price = {"batch_size": 32, "optimizer": "sgd"}
        assert cost(CHOICE, arch, **price) == cost(alone, alone.full(), **price)
        torch.manual_seed(1)
        found = CHOICE.build(arch).eval()
        torch.manual_seed(1)
        expected = alone.build(alone.full()).eval()
        inputs = torch.rand(2, 1, 28, 28)
        assert torch.equal(found(inputs), expected(inputs))


def test_names_of_groups_and_tensors_are_the_members():
    assert CHOICE.groups == {
        **{"large.conv1": 6, "large.conv2": 16, "large.fc1": 120, "large.fc2": 84},
        **{"small.conv1": 6, "small.conv2": 3, "small.fc1": 84},
    }
    assert Architecture((6, 16, 120, 84, 0, 0, 0)) == LARGE
    assert Architecture((0, 0, 0, 0, 6, 3, 84)) == SMALL
    assert CHOICE.full() == LARGE
    assert CHOICE.tensors(SMALL)["small.head.fc1.weight"].axes == (Axis("small.fc1"), Axis("small.conv2", 16))
    assert CHOICE.tensors(SMALL)["small.head.classifier.bias"].axes == (Axis("classes"),)
    assert set(CHOICE.initial()) == {*CHOICE.tensors(LARGE), *CHOICE.tensors(SMALL)}
    prefix, family, arch = CHOICE.member_of(SMALL)
    assert (prefix, arch) == ("small.", family.full())


def test_a_member_may_be_cut():
    half = CHOICE.of("large", LeNet5().width(0.5))
    assert half == CHOICE.width(0.5)
    assert CHOICE.place(half).gather(CHOICE.initial())["large.head.fc1.weight"].shape == (60, 128)


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        ((6, 16, 120, 84, 6, 3, 84), "widths of exactly one member, this one of large, small"),
        ((0,) * 7, "widths of exactly one member, this one of none"),
        ((0, 0, 0, 0, 6, 4, 84), "lenet5: width of conv2 must be 1 to 3, not 4"),
        ((6, 16), "choice: 7 widths and 0 kernels"),
    ],
)
def test_impossible_architectures_are_refused(widths, message):
    with pytest.raises(ValueError, match=message):
        CHOICE.build(Architecture(widths))


def test_kernels_of_members_that_are_not_chosen_stay_whole():
    family = make_family(SPEC | {"members": {"elastic": {"name": "cnn3", "kernel": 5}, "fixed": {"name": "cnn3"}}})
    assert family.of("fixed").kernels == (5, 5, 5)
    with pytest.raises(ValueError, match="kernels of elastic, which is not chosen, must be whole"):
        family.validate(Architecture(family.of("fixed").widths, (3, 5, 5)))


def test_channels_whose_number_follows_from_others_are_cut_with_them():
    """A squeeze of MobileNetV3 has 40 of its 40 channels, and 24 behind half of its block."""
    members = {"gated": {"name": "mobilenet-v3"}, "plain": {"name": "mobilenet-v2", "width_multiplier": 0.5}}
    family = make_family({"name": "choice", "input_shape": [1, 28, 28], "members": members})
    half = family.of("gated", dict(family.members)["gated"].width(0.5))
    cut = family.place(half).gather(family.initial())
    assert {name: tuple(value.shape) for name, value in cut.items()} == {
        name: spec.shape for name, spec in family.tensors(half).items()
    }
    assert cut["gated.stage2_0.gate.fc1.weight"].shape == (24, 72, 1, 1)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (None, "members must be like"),
        (["lenet5"], "members must be like"),
        ({"large": "lenet5"}, "members must be like"),
        ({"large": {"name": "lenet5"}}, "two families or more by name, not 1$"),
        (dict(reversed(MEMBERS.items())), "'small' has 5593 parameters and 'large', behind it, 44470"),
        ({**MEMBERS, "twin": MEMBERS["small"]}, "'small' has 5593 parameters and 'twin', behind it, 5593"),
        ({**MEMBERS, "with.dot": {"name": "lenet5"}}, "letters, digits and _, not 'with.dot'"),
        ({**MEMBERS, "exits": {"name": "cnn3", "exits": [1, 3]}}, "'exits' must be a single family with one exit"),
        ({**MEMBERS, "frozen": {"name": "lenet5", "freeze": ["head"]}}, "in freeze of the choice, as frozen.head$"),
        ({**MEMBERS, "nested": {"name": "choice", "members": MEMBERS}}, "'nested' must be a single family"),
        ({**MEMBERS, "third": {"name": "lenet"}}, "no family is named 'lenet'; did you mean 'lenet5'"),
    ],
)
def test_impossible_members_are_refused(members, message):
    with pytest.raises(ValueError, match=message):
        make_family(SPEC | {"members": members})


def test_either_all_members_read_tokens_or_none():
    members = {"large": {"name": "mlp"}, "tokens": encoder(hidden=12, depth=1)}
    with pytest.raises(ValueError, match="either all members read tokens or none, unlike 'tokens'"):
        make_family({"name": "choice", "input_shape": [9], "classes": 3, "members": members})


def test_an_unknown_member_names_the_nearest():
    with pytest.raises(ValueError, match="no member 'smal'; did you mean 'small'"):
        CHOICE.of("smal")


def test_what_is_frozen_travels_with_the_spec():
    members = {"large": {"name": "lenet5"}, "small": {"name": "lenet5", "conv_channels": [6, 3], "hidden": [84]}}
    family = make_family({"name": "choice", "input_shape": [1, 8, 8], "members": members, "freeze": ["large.block1"]})
    assert make_family(family.spec()) == family
    assert family.spec()["freeze"] == ["large.block1"]
    network = family.build(family.full())
    still = {name for name, parameter in network.named_parameters() if not parameter.requires_grad}
    assert still == {f"large.block1.{name}" for name in ("conv.weight", "conv.bias", "norm.weight", "norm.bias")}
    assert still == {name for name, spec in family.tensors(family.full()).items() if spec.frozen}


def test_members_get_running_statistics_together():
    members = {"large": {"name": "cnn3"}, "small": {"name": "lenet5", "conv_channels": [6, 3], "hidden": [84]}}
    static = make_family({"name": "choice", "input_shape": [1, 12, 12], "norm": "static", "members": members})
    tracked = static.with_statistics
    assert tracked == make_family({**static.spec(), "norm": "batch"})
    assert tracked.with_statistics is tracked


ENCODERS = make_family(
    {
        **{"name": "choice", "input_shape": [9], "classes": 3},
        "members": {
            "large": encoder(adapter=2, depth=2, separator=3),
            "small": encoder("distilbert", adapter=2, depth=1, separator=3),
        },
        "freeze": ["large.embeddings", "large.encoder", "small"],
    }
)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"norm": "bacth"}, "norm must be 'batch' or 'static', not 'bacth'"),
        ({"scaler": "no"}, "scaler must be true or false, not 'no'"),
    ],
)
def test_what_members_share_is_checked(wrong, message):
    with pytest.raises(ValueError, match=message):
        make_family(ENCODERS.spec() | wrong)


def test_members_may_read_tokens_and_be_any_modules():
    """RecipFL's BERT and DistilBERT: all but adapters and heads is frozen, and a whole member but for its adapters."""
    assert make_family(json.loads(json.dumps(ENCODERS.spec()))) == ENCODERS
    assert (ENCODERS.input_dtype, ENCODERS.pair_separator) == (torch.int64, 3)
    large, small = ENCODERS.candidates(())
    for arch, heads in (
        (large, {"large.classifier.out_proj.weight", "large.classifier.out_proj.bias"}),
        (small, set()),
    ):
        tensors = ENCODERS.tensors(arch)
        assert {name for name, spec in tensors.items() if not spec.frozen and ".adapter." not in name} == heads
        network = with_weights(ENCODERS, arch, ENCODERS.place(arch).gather(ENCODERS.initial()))
        assert list(network.state_dict()) == list(tensors)
        assert {name: parameter.requires_grad for name, parameter in network.named_parameters()} == {
            name: not spec.frozen for name, spec in tensors.items()
        }
        _, family, own = ENCODERS.member_of(arch)
        assert cost(ENCODERS, arch, batch_size=2, optimizer="sgd") == cost(family, own, batch_size=2, optimizer="sgd")
        tokens = torch.randint(1, 40, (2, 9))
        assert torch.equal(network.eval()(tokens), network.alone(tokens))
        assert {node.tensor for node in graph_of(ENCODERS, arch).tensors} == {
            name for name, spec in tensors.items() if not spec.frozen
        }


def test_a_members_tied_weights_and_buffers_are_its_own():
    """A member of the user's: what stands at two places travels once, and constants stay."""
    members = {"large": {"name": "lenet5"}, "tied": {"name": f"{__name__}:Tied", "levels": [{"width": 5}]}}
    family = make_family(SPEC | {"input_shape": [1, 8, 8], "members": members})
    arch = family.of("tied")
    assert family.further_names() == {"tied.other.weight": "tied.one.weight"}
    assert list(family.tensors(arch)) == ["tied.one.weight", "tied.head.weight", "tied.head.bias"]
    weights = {name: torch.full(spec.shape, 0.5) for name, spec in family.tensors(arch).items()}
    loaded = family.build(arch)
    loaded.load_state_dict(weights)
    inputs = torch.rand(2, 1, 8, 8)
    for network in (loaded, with_weights(family, arch, weights)):
        assert network.alone.module.other.weight is network.alone.module.one.weight
        assert torch.equal(network(inputs), loaded(inputs))


class Tied(nn.Module):
    def __init__(self, classes, width):
        super().__init__()
        self.one, self.other = (nn.Linear(64, 64, bias=False) for _ in range(2))
        self.other.weight = self.one.weight
        self.head = nn.Linear(64, classes)
        self.register_buffer("order", torch.arange(64))

    def forward(self, x):
        return self.head(self.other(self.one(x.flatten(1))[:, self.order].relu()))
