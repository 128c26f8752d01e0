import math

import pytest
import torch
from torch.nn import functional

from wildflower.models.placement import chosen, leading
from wildflower.models.resnet import ResNet18, ResNet34, ResNet152


def parameters(family, arch):
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in family.build(arch).parameters())


@pytest.mark.parametrize(
    ("family", "expected"), [(ResNet18(), 11_173_962), (ResNet34(), 21_282_122), (ResNet152(), 58_156_618)]
)
def test_parameters(family, expected):
    assert parameters(family, family.full()) == expected


def test_width_cut_of_recipfl():
    family = ResNet18(stage_channels=(12, 25, 51, 102))
    assert parameters(family, family.full()) == 444_218
    # HeteroFL's rounding up gives other widths.
    assert sorted(set(ResNet18().width(0.2).widths)) == [13, 26, 52, 103]


def test_channels_of_every_stage():
    family = ResNet18(stage_channels=(12, 25, 51, 102))
    assert parameters(family, family.full()) == 444_218
    assert ResNet18(stage_channels=(64, 128, 256, 512)).groups == ResNet18().groups
    assert ResNet152(stage_channels=(64, 128, 256, 512), depth=2).groups == ResNet152(depth=2).groups


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stage_channels": (12, 25, 51)}, "stage_channels must be a list of 4 numbers >= 1"),
        ({"stage_channels": (12, 25, 51, 0)}, "stage_channels must be a list of 4 numbers >= 1"),
        ({"stage_channels": 12}, "stage_channels must be a list of 4 numbers >= 1, not 12"),
        ({"stage_channels": (1, 2, 3, 4), "first_channels": 1}, "leave out first_channels"),
    ],
)
def test_impossible_channels_of_stages_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ResNet18(**arguments)


def test_depth_cut_of_recipfl():
    family = ResNet18(depth=1)
    assert parameters(family, family.full()) == 450_890
    blocks = family.blocks(family.full())
    assert [block.name for block in blocks] == ["stem", "stage1_0", "stage1_1", "adapter", "head"]
    # The adapter ends where the whole network does.
    shape = (3, 32, 32)
    for block in blocks[:-1]:
        shape = block.output_shape(shape)
    assert shape == (512, 4, 4)


@pytest.mark.parametrize("depth", [0, 5, 1.0, True])
def test_impossible_depths_are_refused(depth):
    with pytest.raises(ValueError, match=f"depth must be 1 to 4 stages, not {depth}"):
        ResNet18(depth=depth)


def test_an_adapter_goes_without_early_exits():
    with pytest.raises(ValueError, match="early exits go with depth = 4 only"):
        ResNet18(depth=2, exits=(1, 2))


def test_groups():
    assert list(ResNet18().groups)[:4] == ["stage1.stream", "stage1_0.inner1", "stage1_1.inner1", "stage2.stream"]
    bottleneck = ResNet152().groups
    assert len(bottleneck) == 1 + 4 + 2 * (3 + 8 + 36 + 3)
    assert bottleneck["stem"] == 64
    assert bottleneck["stage4.stream"] == 2048
    assert bottleneck["stage3_35.inner2"] == 256


def test_depth_keeps_the_first_blocks():
    family = ResNet34()
    arch = family.architecture(without=[*family.stages["stage1"][1:], *family.stages["stage3"][2:]])
    names = {name.split(".")[0] for name in family.tensors(arch)}
    assert "stage1_0" in names
    assert "stage1_1" not in names
    assert {name for name in names if name.startswith("stage3")} == {"stage3_0", "stage3_1"}
    # The groups of removed blocks have no width, so that equal sub-models are equal architectures.
    widths = dict(zip(family.groups, arch.widths, strict=True))
    assert widths["stage1_1.inner1"] == 0
    assert widths["stage1.stream"] == 64
    assert parameters(family, family.architecture(without=family.removable)) < 5_500_000


def test_any_block_but_the_first_of_a_stage_may_be_left_out():
    family = ResNet34(input_shape=(1, 8, 8))
    arch = family.architecture(without=["stage1_1", "stage4_2"])
    names = {name.split(".")[0] for name in family.tensors(arch)}
    assert names == {"stem", "head", *(block for blocks in family.stages.values() for block in blocks)} - {
        "stage1_1",
        "stage4_2",
    }
    assert family.build(arch)(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    with pytest.raises(ValueError, match="has no removable layer 'stage1_0'; did you mean"):
        family.architecture(without=["stage1_0"])
    with pytest.raises(ValueError, match=r"width of stage1_0.inner1 must be 1 to 64, not 0: what follows needs this"):
        family.architecture({"stage1_0.inner1": 0})


def test_the_groups_of_a_bottleneck_are_removed_together():
    family = ResNet152()
    with pytest.raises(ValueError, match=r"widths of stage2_1.inner1, stage2_1.inner2 must all be 0 or none"):
        family.architecture({"stage2_1.inner2": 0})


def test_chosen_channels_of_a_stream_are_the_same_in_every_block_of_its_stage():
    family = ResNet18()
    placement = family.place(family.width(0.5), chosen(11))
    stream = placement.coordinates["stem.conv.weight"][0]
    for name, axis in [
        ("stage1_0.conv1.weight", 1),
        ("stage1_0.conv2.weight", 0),
        ("stage1_1.norm2.running_mean", 0),
        ("stage2_0.shortcut.conv.weight", 1),
    ]:
        assert torch.equal(placement.coordinates[name][axis], stream)
    assert not torch.equal(placement.coordinates["stage1_0.conv1.weight"][0], stream)


@pytest.mark.parametrize("select", [leading, chosen(2)])
def test_a_cut_computes_what_the_whole_computes_with_the_other_channels_silent(select):
    """Zero everything outside the cut: then whole and cut agree, so residuals, shortcuts and the head are aligned."""
    torch.manual_seed(0)
    family = ResNet18(input_shape=(3, 8, 8))
    whole = family.build(family.full()).eval()
    arch = family.architecture({"stage1.stream": 20, "stage1_1.inner1": 7, "stage2.stream": 33, "stage4.stream": 100})
    placement = family.place(arch, select)
    kept = {name: torch.zeros_like(tensor) for name, tensor in whole.state_dict().items()}
    placement.add_to(kept, placement.gather(whole.state_dict()))
    whole.load_state_dict(kept)
    cut = family.build(arch).eval()
    cut.load_state_dict(placement.gather(kept))
    inputs = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(cut(inputs), whole(inputs), rtol=1e-4, atol=1e-4)


def test_convolutions_are_drawn_by_fan_out():
    torch.manual_seed(0)
    weight = ResNet18().build(ResNet18().full()).state_dict()["stage4_0.conv1.weight"]
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (512 * 9)), rel=0.01)


def test_preactivation_as_heterofl_builds_it():
    """The blocks of HeteroFL's code: out = relu(norm1(x)), the projection reads out, convolutions follow norms."""
    torch.manual_seed(0)
    family = ResNet18(input_shape=(3, 8, 8), first_channels=4, preactivation=True)
    network = family.build(family.full()).eval()
    for module in network.modules():
        if hasattr(module, "running_mean"):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    w = network.state_dict()

    def activated(x, norm):
        statistics = w[f"{norm}.running_mean"], w[f"{norm}.running_var"]
        return functional.batch_norm(x, *statistics, w[f"{norm}.weight"], w[f"{norm}.bias"]).relu()

    inputs = torch.randn(5, 3, 8, 8)
    x = functional.conv2d(inputs, w["stem.conv.weight"], padding=1)
    for stage in (1, 2, 3, 4):
        for number in (0, 1):
            block, strided = f"stage{stage}_{number}", stage > 1 and number == 0
            out = activated(x, f"{block}_front.norm1" if strided else f"{block}.norm1")
            if strided:
                x = functional.conv2d(out, w[f"{block}.shortcut.conv.weight"], stride=2)
            out = functional.conv2d(out, w[f"{block}.conv1.weight"], stride=2 if strided else 1, padding=1)
            x = x + functional.conv2d(activated(out, f"{block}.norm2"), w[f"{block}.conv2.weight"], padding=1)
    pooled = activated(x, "final.norm").mean(dim=(2, 3))
    expected = pooled @ w["head.classifier.weight"].T + w["head.classifier.bias"]
    torch.testing.assert_close(network(inputs), expected)


def test_preactivation_has_no_norms_in_shortcuts():
    # 9,600 entries of norms' weights and biases in the post-activation network. Here stem and projections have none
    # (2 x (64 + 896)), a stage's first norm reads the stage before (2 x 448 fewer), and one of 512 stands at the end.
    assert parameters(ResNet18(preactivation=True), ResNet18().full()) == 11_173_962 - 2 * (64 + 896 + 448 - 512)


def test_preactivation_goes_without_exits():
    for arguments in ({"exits": (1, 2)}, {"depth": 2}):
        with pytest.raises(ValueError, match="preactivation goes with one exit and depth = 4 only"):
            ResNet18(preactivation=True, **arguments)
