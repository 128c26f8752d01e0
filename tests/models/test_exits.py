import itertools
import json
import math

import numpy as np
import pytest
import torch

from wildflower.models.architecture import Architecture
from wildflower.models.cnn import Cnn3, Cnn10
from wildflower.models.cost import cost
from wildflower.models.family import FAMILIES, make_family
from wildflower.models.lenet import LeNet5
from wildflower.models.resnet import ResNet18, ResNet34, ResNet152
from wildflower.models.vgg import Vgg

torch.set_num_threads(1)

CNN3 = Cnn3(input_shape=(1, 8, 8), exits=(1, 2, 3))
FAMILIES_WITH_EXITS = [
    CNN3,
    Cnn10(input_shape=(2, 8), exits=tuple(range(1, 11))),
    Vgg(input_shape=(1, 16, 16), block_channels=(3, 4, 5, 6), exits=(1, 3)),
    ResNet18(input_shape=(1, 8, 8), first_channels=2, exits=(1, 2, 3, 4), norm="static"),
    ResNet152(input_shape=(1, 8, 8), first_channels=1, exits=(1, 4)),
]


def ids(family):
    return family.name


@pytest.mark.parametrize("family", FAMILIES_WITH_EXITS, ids=ids)
def test_a_sub_model_computes_the_exits_that_it_has(family):
    whole = family.build(family.full()).eval()
    state = whole.state_dict()
    x = torch.rand(2, *family.input_shape)
    logits = whole.exits(x)
    assert len(logits) == len(family.segments) == len(family.exits)
    assert torch.equal(whole(x), logits[-1])
    for exit in range(1, len(logits) + 1):
        arch = family.up_to(exit)
        assert family.exit_of(arch) == exit
        model = family.build(arch).eval()
        model.load_state_dict(family.place(arch).gather(state))
        for found, expected in zip(model.exits(x), logits[:exit], strict=True):
            assert torch.equal(found, expected)
        assert torch.equal(model(x), logits[exit - 1])


@pytest.mark.parametrize("family", FAMILIES_WITH_EXITS, ids=ids)
def test_forward_computes_no_other_head(family):
    model = family.build(family.full())
    heads = list(family.segments)
    computed = []
    for name in heads:
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: computed.append(name))
    model(torch.rand(2, *family.input_shape))
    assert computed == heads[-1:]
    model.exits(torch.rand(2, *family.input_shape))
    assert computed[1:] == heads


@pytest.mark.parametrize("family", FAMILIES_WITH_EXITS, ids=ids)
def test_tensors_up_to_an_exit_are_those_of_its_segments(family):
    names = [set(family.tensors(family.up_to(exit))) for exit in range(1, len(family.segments) + 1)]
    for number, (shallow, deep) in enumerate(itertools.pairwise(names), start=2):
        assert shallow < deep
        assert all(not name.startswith(list(family.segments)[number - 1]) for name in shallow)
    assert [group for groups in family.segments.values() for group in groups] == list(family.groups)


def test_all_exits_are_drawn():
    rng = np.random.default_rng(0)
    assert {CNN3.exit_of(CNN3.sample(rng)) for _ in range(50)} == {1, 2, 3}
    assert CNN3.smallest() == Architecture((1, 0, 0))
    assert CNN3.up_to(2, 0.25) == Architecture((8, 16, 0))


def test_a_family_without_early_exits_has_one():
    family = LeNet5(input_shape=(1, 8, 8))
    assert family.up_to(1) == family.full()
    assert family.exit_of(family.smallest()) == len(family.segments) == 1
    model = family.build(family.full()).eval()
    x = torch.rand(2, 1, 8, 8)
    [only] = model.exits(x)
    assert torch.equal(only, model(x))
    with pytest.raises(ValueError, match="lenet5: exit must be 1, not 2"):
        family.up_to(2)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "choice"])
def test_the_exits_of_every_family_cover_its_groups_in_order(name):
    family = make_family({"name": name})
    assert list(family.segments) == ["head"]
    assert set(family.segments["head"]) == set(family.groups)


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        ((32, 0, 128), r"head is kept without exit2, .* must end at an exit \(exit1, exit2, head\)"),
        ((0, 64, 128), "width of conv1 must be 1 to 32, not 0"),
        ((32, 65, 0), "width of conv2 must be 1 to 64, not 65"),
    ],
)
def test_what_does_not_end_at_an_exit_is_refused(widths, message):
    for use in (CNN3.validate, CNN3.build, CNN3.tensors):
        with pytest.raises(ValueError, match=message):
            use(Architecture(widths))


def test_half_a_segment_is_refused():
    family = Vgg(input_shape=(1, 16, 16), block_channels=(3, 4, 5, 6), exits=(1, 3))
    with pytest.raises(ValueError, match=r"conv1, block2.conv2, block3.conv1, block3.conv2 must all be 0 or none"):
        family.validate(Architecture((3, 3, 4, 4, 5, 5, 0, 0)))
    family = ResNet18(input_shape=(1, 8, 8), exits=(1, 2, 4))
    with pytest.raises(ValueError, match="has no removable layer 'stage1_1'; it has 'exit2', 'head'"):
        family.architecture(without=["stage1_1"])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "cnn3", "exits": [1, 2]}, r"exits must ascend and end with 3, not be \[1, 2\]"),
        ({"name": "cnn3", "exits": [2, 1, 3]}, r"exits must ascend and end with 3, not be \[2, 1, 3\]"),
        ({"name": "vgg", "exits": [1, 1, 3]}, r"exits must ascend and end with 3, not be \[1, 1, 3\]"),
        ({"name": "vgg", "exits": [1, 4]}, r"exits must be a list of numbers out of \[0, 1, 2, 3\], not \(1, 4\)"),
        ({"name": "resnet18", "exits": ["1", 4]}, r"numbers out of \[1, 2, 3, 4\], not \('1', 4\)"),
        ({"name": "resnet18", "exits": [True, 4]}, r"numbers out of \[1, 2, 3, 4\], not \(True, 4\)"),
        ({"name": "cnn10", "exits": 10}, r"exits = 10: must be a list"),
        ({"name": "cnn3", "exits": [1, 3], "kernel": 5}, "early exits go with kernel = 3 only, not 5"),
        ({"name": "pfl-cnn", "exits": [1]}, "family 'pfl-cnn' has no argument 'exits'"),
    ],
)
def test_bad_exits_are_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        make_family(spec)


def test_the_last_part_alone_is_the_default():
    one, default = Cnn3(exits=(3,)), Cnn3()
    assert one.tensors(one.full()) == default.tensors(default.full())
    assert json.loads(json.dumps(one.spec()))["exits"] == [3]


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        # Heads behind 32 x 14 x 14, 64 x 7 x 7 and 128 x 3 x 3; convolutions and norms 384, 18,624 and 74,112.
        (Cnn3(exits=(1, 2, 3)), [63_114, 113_108, 198_750]),
        (
            Cnn10(exits=tuple(range(1, 11))),
            # Convolutions and norms 192, 2 x 2,352, 4,704, 2 x 9,312, 18,624, 3 x 37,056; heads behind 16 x 14 x 14
            # (two), 16 x 7 x 7, 32 x 7 x 7 (two), 32 x 3 x 3 and 64 x 3 x 3 (four).
            [31_562, 65_284, 75_486, 95_880, 120_882, 133_084, 157_478, 200_304, 243_130, 285_956],
        ),
        # Heads of 64, 128, 256 and 512 channels.
        (ResNet18(exits=(1, 2, 3, 4)), [150_474, 677_332, 2_779_614, 11_178_472]),
        (ResNet34(exits=(4,)), [21_282_122]),
    ],
    ids=["cnn3", "cnn10", "resnet18", "resnet34"],
)
def test_parameters_up_to_each_exit(family, expected):
    found = []
    for exit in range(1, len(family.segments) + 1):
        tensors = family.tensors(family.up_to(exit))
        found.append(sum(math.prod(spec.shape) for name, spec in tensors.items() if "running" not in name))
        assert cost(family, family.up_to(exit), batch_size=1, optimizer="sgd").parameters == found[-1]
    assert found == expected
