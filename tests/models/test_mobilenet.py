import itertools

import numpy as np
import pytest
import torch

from tests.models.whole_space import all_of
from wildflower.models.cost import cost
from wildflower.models.elastic import ElasticSpace, divisible
from wildflower.models.family import make_family
from wildflower.models.mobilenet import MobileNetV2, MobileNetV3
from wildflower.models.ofa_resnet import OfaResNet50

torch.set_num_threads(1)

IMAGENET = {"input_shape": (3, 224, 224), "classes": 1000}


def parameters(family, arch):
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in family.build(arch).parameters())


# Parameters as torchvision prints them; timm prints 25.58 M for resnet50d. Multiplications of torchvision's table: 0.30
# and 0.22 GFLOPS, timm's 4.36 with what follows the norms.
@pytest.mark.parametrize(
    ("family", "count", "millions"),
    [(MobileNetV2, 3_504_872, 300.8), (MobileNetV3, 5_483_032, 216.6), (OfaResNet50, 25_576_264, 4328.8)],
)
def test_published_networks(family, count, millions):
    family = family(**IMAGENET)
    arch = family.plain()
    assert parameters(family, arch) == count
    assert cost(family, arch, batch_size=1, optimizer="sgd").parameters == count
    assert family.inference_macs(arch) / 1e6 == pytest.approx(millions, abs=0.05)


def test_mobilenet_v2_is_a_member_of_its_space_and_resnet50_of_its():
    family = MobileNetV2(**IMAGENET)
    # Depths 2, 3, 4, 3, 3 are options 0, 1, 2, 1, 1; expand ratio 6 is the last option, kernel 3 the first.
    depths = dict(zip((f"stage{stage}.depth" for stage in range(1, 6)), (0, 1, 2, 1, 1), strict=True))
    picks = [
        depths.get(decision.name, 2 if decision.name.endswith("expand") else 0)
        for decision in ElasticSpace.of(family).decisions
    ]
    assert ElasticSpace.of(family).architecture(picks) == family.plain()
    resnet = OfaResNet50(**IMAGENET)
    assert resnet.plain().widths[:3] == (32, 1, 64)


def test_the_size_of_once_for_alls_space():
    # Cai et al., section 3.1: ((3 x 3)^2 + (3 x 3)^3 + (3 x 3)^4)^5.
    assert ElasticSpace.of(MobileNetV3()).size == (9**2 + 9**3 + 9**4) ** 5
    # The last stage of MobileNetV2 is one block, with an expand ratio and a kernel.
    assert ElasticSpace.of(MobileNetV2()).size == (9**2 + 9**3 + 9**4) ** 5 * 9
    by_stage = [sum(3**depth for depth in (base, base + 1, base + 2)) for base in (2, 2, 4, 2)]
    assert ElasticSpace.of(OfaResNet50()).size == 3 * 2 * 3 * 3**4 * int(np.prod(by_stage, dtype=object))


def test_channels_of_once_for_alls_spaces():
    # Widths of ProxylessNAS times 1.3, rounded to multiples of 8.
    family = MobileNetV2(stage_channels=(16, 24, 40, 80, 96, 192, 320), width_multiplier=1.3)
    assert list(family.streams.values()) == [40, 24, 32, 56, 104, 128, 248, 416]
    assert family.groups["features"] == 1664
    resnet = OfaResNet50()
    streams = [
        resnet.groups[name] if width == 1 else resnet.chosen(dict(all_widths(resnet, width))).widths[at]
        for width in (0.65, 0.8, 1)
        for at, name in enumerate(resnet.groups)
        if name.endswith("stream")
    ]
    assert streams == [168, 336, 664, 1328, 208, 408, 816, 1640, 256, 512, 1024, 2048]


def all_widths(family, width):
    for decision in family.decisions:
        yield decision.name, width if decision.name.endswith("width") else decision.options[-1]


@pytest.mark.parametrize(
    ("channels", "expected"), [(16, 16), (1, 8), (18, 24), (19, 24), (41.6, 40), (51.2, 48), (83.2, 80), (20, 24)]
)
def test_rounding_of_channels(channels, expected):
    # 18 would become 16, which is less than 90 % of it.
    assert divisible(channels) == expected


@pytest.mark.parametrize(
    ("side", "strides", "last"),
    [
        (224, (2, 2, 2, 2, 1, 2), 7),
        (64, (1, 2, 2, 2, 1, 2), 4),
        (32, (1, 1, 2, 2, 1, 2), 4),
        (28, (1, 1, 2, 2, 1, 2), 4),
        (8, (1, 1, 1, 1, 1, 2), 4),
        (4, (1, 1, 1, 1, 1, 1), 4),
    ],
)
def test_early_strides_are_dropped_for_small_images(side, strides, last):
    family = MobileNetV3(input_shape=(1, side, side))
    assert family.strides == strides
    shape = family.input_shape
    for block in family.blocks(family.full())[:-1]:
        shape = block.output_shape(shape)
    assert shape == (960, last, last)


def test_halvings_can_be_set():
    assert MobileNetV3(input_shape=(1, 28, 28), halvings=5).strides == (2, 2, 2, 2, 1, 2)
    assert OfaResNet50(input_shape=(3, 32, 32), halvings=4).strides == (1, 2, 1, 2, 2, 2)
    with pytest.raises(ValueError, match="halvings must be 0 to 5, not 6"):
        MobileNetV3(halvings=6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depths": (4, 2)}, "depths must be ascending whole numbers from 1 to 16"),
        ({"depths": (0, 2)}, "depths must be"),
        ({"kernel_sizes": (3, 4)}, "kernel_sizes must be odd"),
        ({"expand_ratios": ()}, "expand_ratios must be ascending numbers"),
        ({"stage_channels": (8, 8)}, "stage_channels must be a list of 6 numbers"),
        ({"width_multiplier": 0}, "width_multiplier must be above 0"),
        ({"dropout": 1}, "dropout must be 0 to below 1"),
    ],
)
def test_impossible_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        MobileNetV3(**arguments)


def test_a_family_without_the_published_sizes_says_so():
    with pytest.raises(ValueError, match="does not hold the published network"):
        MobileNetV3(expand_ratios=(2, 3)).plain()
    with pytest.raises(ValueError, match="does not hold the published network"):
        MobileNetV2(depths=(1, 2)).plain()
    with pytest.raises(ValueError, match="does not hold the published network"):
        MobileNetV2(expand_ratios=(3, 4)).plain()
    with pytest.raises(ValueError, match=r"ResNet-50 needs 0\.25 among the options"):
        OfaResNet50(expand_ratios=(0.2, 0.35)).plain()


TINY = {"stage_channels": (8, 8, 16, 16, 16, 16), "input_shape": (1, 8, 8), "depths": (1, 2), "dropout": 0.0}


def test_a_sub_network_computes_what_the_full_one_does_with_the_rest_silenced():
    """Independent of placements: what is cut is set to zero in the whole network."""
    torch.manual_seed(0)
    family = MobileNetV3(**TINY, expand_ratios=(3, 6), kernel_sizes=(3, 5))
    weights = family.initial()
    space = ElasticSpace.of(family)
    arch = space.sample(np.random.default_rng(3))
    assert arch != space.largest()
    widths, kernels = (
        dict(zip(family.groups, arch.widths, strict=True)),
        dict(zip(family.kernels, arch.kernels, strict=True)),
    )
    cut = family.build(arch).eval()
    cut.load_state_dict(family.place(arch).gather(weights))
    silenced = {name: value.clone() for name, value in weights.items()}
    for block, side in kernels.items():
        kept = widths[f"{block}.inner"]
        if kept == 0:
            # A block with a shortcut adds nothing: its last norm has weight and bias 0.
            silenced[f"{block}.norm3.weight"].zero_()
            continue
        silenced[f"{block}.project.weight"][:, kept:] = 0
        depthwise = silenced[f"{block}.depthwise.weight"]
        border = (depthwise.shape[-1] - side) // 2
        mask = torch.zeros_like(depthwise)
        mask[:, :, border : depthwise.shape[-1] - border, border : depthwise.shape[-1] - border] = 1
        depthwise *= mask
        if f"{block}.gate.fc1.weight" in silenced:
            silenced[f"{block}.gate.fc1.weight"][:, kept:] = 0
            silenced[f"{block}.gate.fc2.weight"][:, divisible(kept // 4) :] = 0
    whole = family.build(family.full()).eval()
    whole.load_state_dict(silenced)
    inputs = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(cut(inputs), whole(inputs), rtol=1e-4, atol=1e-5)


def test_every_sub_network_of_a_tiny_space_is_listed_once():
    family = make_family({"name": "mobilenet-v2", "stage_channels": [8] * 7, "input_shape": [1, 4, 4],
                          "depths": [1, 2], "expand_ratios": [2], "kernel_sizes": [3, 5]})  # fmt: skip
    space = ElasticSpace.of(family, {f"stage{stage}.depth": (1,) for stage in (3, 4, 5)})
    # Two stages of (2 + 4) choices of kernels, three stages of one block with 2, the last with 2.
    found = list(all_of(space))
    assert len(found) == len(set(found)) == space.size == 6 * 6 * 2**3 * 2
    rng = np.random.default_rng(0)
    assert {space.sample(rng) for _ in range(50)} <= set(found)
    assert space.smallest() in found
    assert space.largest() in found


def test_parts_of_a_space():
    family = MobileNetV3()
    with pytest.raises(ValueError, match=r"no decision 'stage1\.dept'; did you mean 'stage1\.depth'"):
        ElasticSpace.of(family, {"stage1.dept": (2,)})
    with pytest.raises(ValueError, match=r"options of stage1\.depth must ascend and be among \(2, 3, 4\)"):
        ElasticSpace.of(family, {"stage1.depth": (4, 3)})


@pytest.mark.parametrize("family", [MobileNetV2, MobileNetV3])
def test_the_names_are_those_of_the_plain_architecture(family):
    family = family()
    assert list(family.torchvision_names()) != []
    assert set(family.torchvision_names()) == set(family.tensors(family.plain()))


def test_all_kinds_of_norm_and_scaler_are_built():
    for norm, scaler in itertools.product(("batch", "static"), (False, True)):
        family = MobileNetV3(**TINY, norm=norm, scaler=scaler)
        assert family.build(family.full())(torch.randn(2, 1, 8, 8)).shape == (2, 10)
        assert set(family.tensors(family.full())) == set(family.build(family.full()).state_dict())
