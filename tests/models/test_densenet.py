import pytest
import torch

from wildflower.models.composition import Frame, total
from wildflower.models.cost import cost
from wildflower.models.densenet import DenseNet121
from wildflower.models.profile import pieces, profile

torch.set_num_threads(1)
TINY = {"input_shape": (3, 16, 16), "growth": 2}


def parameters(family):
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in family.build(family.full()).parameters())


@pytest.mark.parametrize(("changes", "expected"), [({}, 1_035_268), ({"depth": 1}, 258_484), ({"growth": 6}, 276_484)])
def test_parameters_of_recipfls_models(changes, expected):
    assert parameters(DenseNet121(classes=100, **changes)) == expected


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_every_depth_ends_in_the_same_features(depth):
    family = DenseNet121(depth=depth)
    shape = family.input_shape
    blocks = family.blocks(family.full())
    for block in blocks[:-1]:
        shape = block.output_shape(shape)
    assert shape == (384, 4, 4)
    tiny = DenseNet121(depth=depth, **TINY)
    assert tiny.build(tiny.full())(torch.rand(2, 3, 16, 16)).shape == (2, 10)


def test_a_layer_puts_what_it_makes_behind_what_it_reads():
    family = DenseNet121(**TINY)
    layer = family.build(family.full()).get_submodule("stage1_0").eval()
    inputs = torch.rand(2, 4, 16, 16)
    outputs = layer(inputs)
    assert outputs.shape == (2, 6, 16, 16)
    assert torch.equal(outputs[:, :4], inputs)


def test_the_insides_of_layers_are_cut():
    family = DenseNet121(**TINY)
    arch = family.width(0.5)
    weights = family.place(arch).gather(family.initial())
    assert weights["stage1_0.conv1.weight"].shape == (4, 4, 1, 1)
    assert weights["stage1_0.conv2.weight"].shape == (2, 4, 3, 3)
    model = family.build(arch)
    model.load_state_dict(weights)
    assert model(torch.rand(2, 3, 16, 16)).shape == (2, 10)


def test_the_cost_is_composed_of_its_blocks():
    family = DenseNet121(**TINY)
    whole = cost(family, family.full(), batch_size=8, optimizer="sgd")
    profiles = [profile(piece, 8) for piece in pieces(family, family.full())]
    composed = total(profiles, Frame.of(family, 8, "sgd"))
    assert (whole.parameters, whole.payload_bytes, whole.peak_training_memory_bytes) == (
        composed.parameters,
        composed.payload_bytes,
        composed.peak_training_memory_bytes,
    )


@pytest.mark.parametrize(
    ("changes", "message"), [({"growth": 0}, "growth must be"), ({"depth": 5}, "depth must be 1 to 4")]
)
def test_impossible_arguments_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        DenseNet121(**changes)


def test_early_exits_are_behind_stages_and_leave_the_whole_network_as_it_is():
    """With the exits of DepthFL a device has the stages up to its own, and no transition behind the last."""
    family = DenseNet121(exits=(1, 4), **TINY)
    assert list(family.segments) == ["exit1", "head"]
    names = list(dict.fromkeys(name.partition(".")[0] for name in family.tensors(family.up_to(1))))
    assert names == ["stem", *(f"stage1_{layer}" for layer in range(6)), "exit1"]
    torch.manual_seed(0)
    network, plain = family.build(family.full()).eval(), DenseNet121(**TINY)
    first, last = network.exits(inputs := torch.rand(2, 3, 16, 16))
    alone = plain.build(plain.full()).eval()
    alone.load_state_dict({name: v for name, v in network.state_dict().items() if not name.startswith("exit1.")})
    assert torch.equal(last, alone(inputs))
    shallow = family.build(family.up_to(1)).eval()
    shallow.load_state_dict({name: network.state_dict()[name] for name in shallow.state_dict()})
    assert torch.equal(first, shallow(inputs))
