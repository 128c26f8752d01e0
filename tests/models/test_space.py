import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.whole_space import all_of
from wildflower.models.architecture import Architecture
from wildflower.models.family import make_family
from wildflower.models.space import Choice, Space

torch.set_num_threads(1)

LENET = make_family({"name": "lenet5"})
VIT = make_family({"name": "vit-tiny", "input_shape": [3, 8, 8], "hidden": 8, "depth": 5, "heads": 2, "mlp": 8})
CNN = make_family({"name": "cnn3", "kernel": 7})
RESNET = make_family({"name": "resnet18", "input_shape": [3, 8, 8]})
SETTING_1 = (0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)


def names(space):
    return [choice.name for choice in space.choices]


def test_removable_layers_are_one_choice_over_all_shares_and_other_groups_over_those_above_0():
    space = Space.of(make_family({"name": "resnet152"}), (0, 0.5, 1))
    shares = {choice.name: choice.shares for choice in space.choices}
    assert shares["stem"] == shares["stage1.stream"] == shares["stage1_0.inner1"] == (0.5, 1)
    assert shares["stage3_7"] == (0, 0.5, 1)
    assert "stage3_7.inner1" not in shares
    # The stem, 4 streams and 2 groups in each of the 4 first blocks; 2 + 7 + 35 + 2 blocks that may go.
    assert space.size == 2**13 * 3**46


def test_kept_channels_are_rounded_up_and_a_removed_layer_has_none():
    space = Space.of(LENET, SETTING_1)
    # 6 channels: ceil(6/16) = ceil(6/8) = 1, ceil(6/4) = 2, 3, 6.
    assert space.options[0] == ((1,), (2,), (3,), (6,))
    assert [len(options) for options in space.options] == [4, 5, 5, 5]
    assert space.size == 500
    assert space.smallest().widths == (1, 1, 8, 6)
    assert space.largest() == LENET.full()
    blocks = Space.of(RESNET, SETTING_1)
    assert blocks.smallest() == RESNET.architecture(
        {group: full // 16 for group, full in RESNET.groups.items()}, without=list(RESNET.removable)
    )


def test_a_share_of_one_third_of_three_is_one_channel():
    assert Space.of(LENET, (0.1, 1), {"fc1": [0.7, 1]}).options[2] == ((84,), (120,))  # 0.7 * 120 = 84.00000000000001


def test_sides_of_elastic_kernels_are_choices():
    family = make_family({"name": "cnn3", "kernel": 5})
    space = Space.of(family, (0.5, 1))
    assert [choice.sides for choice in space.kernels] == [(3, 5)] * 3
    assert space.size == 2**3 * 2**3
    assert space.smallest() == Architecture((16, 32, 64), (3, 3, 3))
    assert space.largest() == family.full()
    assert {space.sample(np.random.default_rng(seed)).kernels for seed in range(60)} == set(
        itertools.product((3, 5), repeat=3)
    )


def test_all_architectures_are_different_and_as_many_as_size_says():
    overrides = {f"stage{stage}_0.inner1": [1] for stage in (1, 2, 3, 4)}
    for space in (Space.of(LENET, SETTING_1), Space.of(RESNET, (0, 0.5, 1), overrides | {"stage1_1": [1]})):
        found = list(all_of(space))
        assert len(set(found)) == len(found) == space.size
        assert found[0] == space.smallest()
        assert found[-1] == space.largest()


@pytest.mark.thorough
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), shares=st.sets(st.floats(0.01, 1), min_size=1, max_size=4))
def test_every_sample_is_valid_and_can_be_placed(seed, shares):
    space = Space.of(RESNET, [0, *sorted(shares)])
    arch = space.sample(np.random.default_rng(seed))
    assert hash(space) == hash(Space.of(RESNET, [0, *sorted(shares)]))
    widths = dict(zip(RESNET.groups, arch.widths, strict=True))
    for choice, options in zip(space.choices, space.options, strict=True):
        assert tuple(widths[group] for group in choice.groups) in options
    whole = RESNET.tensors(RESNET.full())
    with torch.device("meta"):
        state = RESNET.build(arch).state_dict()
    place = RESNET.place(arch).gather({name: torch.zeros(spec.shape) for name, spec in whole.items()})
    assert {name: value.shape for name, value in place.items()} == {name: v.shape for name, v in state.items()}


def test_samples_take_all_options_alike():
    space = Space.of(RESNET, (0, 0.5, 1))
    rng = np.random.default_rng(0)
    at = names(space).index("stage3_1")
    position = list(RESNET.groups).index("stage3_1.inner1")
    drawn = [space.sample(rng).widths[position] for _ in range(900)]
    counts = [drawn.count(width) for (width,) in space.options[at]]
    assert len(counts) == 3
    assert min(counts) > 240
    assert sum(counts) == 900


def test_an_entry_that_is_impossible_is_named():
    with pytest.raises(ValueError, match=r"share 0 of conv2: what follows needs this layer.*none"):
        Space.of(LENET, (0.5, 1), {"conv2": [0, 1]})
    with pytest.raises(ValueError, match="no choice named 'conv3'; did you mean"):
        Space.of(LENET, (0.5, 1), {"conv3": [1]})
    with pytest.raises(ValueError, match=r"no choice named 'stage1_1.inner1'"):
        Space.of(RESNET, (0.5, 1), {"stage1_1.inner1": [1]})
    with pytest.raises(ValueError, match=r"shares of conv1 lie in \[0, 1\], not 1.5"):
        Space.of(LENET, (0.5, 1.5))
    with pytest.raises(ValueError, match=r"space: share 0.5 of conv1 is listed twice: leave one out"):
        Space.of(LENET, (0.5, 0.5, 1))
    several = make_family(
        {"name": "choice", "input_shape": [1, 12, 12], "members": {"a": {"name": "cnn3"}, "b": {"name": "lenet5"}}}
    )
    with pytest.raises(
        ValueError, match=r"a search space needs a family that is cut by channel groups.*choice is not one"
    ):
        Space.of(several, (0.5, 1))
    with pytest.raises(ValueError, match="shares of conv1 must ascend and be at least one"):
        Space.of(LENET, (1, 0.5))
    with pytest.raises(ValueError, match="shares of conv1 must ascend and be at least one"):
        Space.of(LENET, (0,))
    with pytest.raises(ValueError, match=r"without: \['conv2', 'fc1', 'fc2'\]"):
        Space(LENET, (Choice("conv1", ("conv1",), (1.0,)),))
    with pytest.raises(ValueError, match="has no group 'conv9'"):
        Space(LENET, (Choice("conv1", ("conv9",), (1.0,)),))


@pytest.mark.parametrize(
    ("family", "overrides", "words"),
    [
        (LENET, {"conv1": [1 / 6, 0.1, 1]}, "shares of conv1 must ascend"),
        (LENET, {"conv1": [0.1, 1 / 6, 1]}, "shares 0.1 and 0.16666666666666666 of conv1 both keep 1 of 6 channels"),
        (LENET, {"conv1": [1e-11, 1]}, "share 1e-11 of conv1 keeps none of the 6 channels of conv1: at least 0.167$"),
        (LENET, {"conv2": []}, "shares of conv2 must ascend and be at least one"),
        (VIT, {"block1": [1e-11, 1]}, "keeps none of the 2 channels of block1.heads: at least 0.5, or 0"),
        (VIT, {"block0.mlp": [0, 1]}, "share 0 of block0.mlp: what follows needs this layer"),
        (VIT, {"block0": [1]}, "no choice named 'block0'; did you mean"),
        (VIT, {"layer*": [1]}, "no choice named 'layer"),
        (VIT, {"block1*": [1], "*1": [1]}, r"both 'block1\*' and '\*1' stand for block1: only one"),
        (CNN, {"conv1.kernel": [3, 4, 5]}, r"sides of kernel conv1 are odd and 3 to 7, not \[3, 4, 5\]"),
        (CNN, {"conv1.kernel": [3.5]}, "sides of kernel conv1 must be whole numbers, not 3.5"),
        (CNN, {"conv1.kernel": [math.inf]}, "sides of kernel conv1 must be whole numbers, not inf"),
        (CNN, {"conv1.kernel": [math.nan]}, "sides of kernel conv1 must be whole numbers, not nan"),
        (CNN, {"conv1.kernel": [5, 3]}, "sides of kernel conv1 must ascend"),
        (CNN, {"conv1.kernel": [9]}, "sides of kernel conv1 are odd and 3 to 7"),
        (CNN, {"conv1.kernels": [3]}, "no choice named 'conv1.kernels'; did you mean 'conv1.kernel'"),
    ],
)
def test_an_entry_for_a_layer_that_is_impossible_is_named(family, overrides, words):
    with pytest.raises(ValueError, match=words):
        Space.of(family, (0, 0.5, 1), overrides)


def test_a_name_with_a_star_stands_for_all_that_have_no_entry_of_their_own():
    space = Space.of(RESNET, (0, 1), {"stage2*": [1], "stage2_1": [0, 0.5], "stage1*.inner1": [0.25]})
    shares = {choice.name: choice.shares for choice in space.choices}
    assert shares["stage2.stream"] == (1,)
    assert shares["stage2_1"] == (0, 0.5)
    assert shares["stage1_0.inner1"] == (0.25,)
    assert shares["stage3_1"] == (0, 1)
    both = {"stage2*": [1], "*.inner1": [0.25]}
    with pytest.raises(ValueError, match=r"stand for stage2_0\.inner1"):
        Space.of(RESNET, (0, 1), both)


def test_a_kernel_and_its_layer_have_names_of_their_own():
    space = Space.of(CNN, (0.5, 1), {"conv1": [1], "conv1.kernel": [3, 7], "conv*.kernel": [5]})
    assert [choice.shares for choice in space.choices] == [(1,), (0.5, 1), (0.5, 1)]
    assert [kernel.sides for kernel in space.kernels] == [(3, 7), (5,), (5,)]


def kept_blocks(arch):
    widths = dict(zip(VIT.groups, arch.widths, strict=True))
    return [block for block in VIT.block_names if widths[f"{block}.heads"]]


def test_blocks_that_must_stay_are_no_matter_of_which():
    free = Space.of(VIT, (0, 0.5, 1))
    space = Space.of(VIT, (0, 0.5, 1), min_blocks=4)
    found = list(all_of(space))
    assert len(found) == len(set(found)) == space.size
    assert set(found) == {arch for arch in all_of(free) if len(kept_blocks(arch)) >= 4}
    assert {tuple(kept_blocks(arch)) for arch in found if len(kept_blocks(arch)) == 4} == {
        tuple(block for block in VIT.block_names if block != missing) for missing in VIT.removable
    }
    assert space.largest() == free.largest()
    assert space.smallest() in found
    assert sum(space.smallest().widths) == min(sum(arch.widths) for arch in found)
    assert Space.of(VIT, (0, 0.5, 1), min_blocks=1) == free
    assert Space.of(VIT, (0, 1), min_blocks=5).size == 1


def test_samples_keep_as_many_blocks_as_must_stay():
    space = Space.of(VIT, (0, 1), min_blocks=4)
    rng = np.random.default_rng(0)
    drawn = [tuple(kept_blocks(space.sample(rng))) for _ in range(400)]
    assert {len(blocks) for blocks in drawn} == {4, 5}
    assert len(set(drawn)) == 5  # all five, or without one of four
    assert min(drawn.count(blocks) for blocks in set(drawn)) > 20


def test_every_stage_of_a_resnet_keeps_as_many():
    space = Space.of(make_family({"name": "resnet34", "input_shape": [3, 8, 8]}), (0, 1), min_blocks=3)
    assert [(floor.name, len(floor.layers), floor.minimum) for floor in space.floors] == [
        ("stage1", 2, 2),
        ("stage2", 3, 2),
        ("stage3", 5, 2),
        ("stage4", 2, 2),
    ]
    # Of 3 blocks 2 or all; of 5 at least 2: 32 - 1 - 5.
    assert space.size == (3 + 1) * (32 - 1 - 5)


@pytest.mark.parametrize(
    ("family", "overrides", "minimum", "words"),
    [
        (VIT, {}, 6, "6 blocks of every stack are to stay, but encoder of vit-tiny has 5"),
        (VIT, {}, 0, "at least 1 block of a stack stays, not 0"),
        (RESNET, {}, 3, "3 blocks of every stack are to stay, but stage1 of resnet18 has 2"),
        (LENET, {}, 2, "lenet5 has no blocks that may be left out"),
        (
            VIT,
            {"block*": [0], "block0.heads": [1], "block0.mlp": [1]},
            3,
            "2 of the removable layers of encoder must stay, but the shares",
        ),
        (VIT, {"block1": [0], "block2": [0]}, 4, "3 of the removable .* but the shares of only 2 are above 0"),
    ],
)
def test_more_blocks_than_there_are_cannot_stay(family, overrides, minimum, words):
    with pytest.raises(ValueError, match=words):
        Space.of(family, (0, 1), overrides, min_blocks=minimum)


def test_picks_below_the_blocks_that_must_stay_are_refused():
    space = Space.of(VIT, (0, 1), min_blocks=4)
    with pytest.raises(ValueError, match="3 of the removable layers of encoder must stay, these picks keep 2"):
        space.architecture([0, 0, 0, 1, 1, 0, 0])


def test_picks_out_of_range_are_refused():
    space = Space.of(LENET, (0.5, 1))
    with pytest.raises(ValueError, match="3 picks, but there are 4 decisions"):
        space.architecture([0, 0, 0])
    with pytest.raises(ValueError, match="pick of fc1 must be 0 to 1, not 2"):
        space.architecture([0, 0, 2, 0])
