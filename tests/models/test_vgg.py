import pytest
import torch
from torch import nn

from wildflower.models.cost import cost
from wildflower.models.vgg import Vgg

WIDE = (64, 128, 256, 512)
EXITS = (1, 2, 3)
SVHN = Vgg(exits=EXITS)
STL10 = Vgg(input_shape=(3, 96, 96), block_channels=WIDE, exits=EXITS)
UNIMIB = Vgg(input_shape=(1, 18, 25), block_channels=WIDE, classes=8, exits=EXITS)


def parameters(family, arch):
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in family.build(arch).parameters())


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        (SVHN, [106_922, 349_364, 1_245_886]),
        (STL10, [998_218, 2_253_140, 5_979_486]),
        (UNIMIB, [284_360, 1_182_928, 4_729_048]),
    ],
)
def test_parameters_up_to_each_exit_are_those_of_the_original(family, expected):
    archs = [family.up_to(exit) for exit in (1, 2, 3)]
    assert [parameters(family, arch) for arch in archs] == expected
    assert [cost(family, arch, batch_size=1, optimizer="sgd").parameters for arch in archs] == expected


def test_with_the_final_exit_only_nothing_has_changed():
    family = Vgg()
    assert parameters(family, family.full()) == 1_184_426
    names = [name for name, _ in family.build(family.full()).named_parameters()]
    assert names[:4] == ["block0.conv1.weight", "block0.conv1.bias", "block0.norm1.weight", "block0.norm1.bias"]
    assert names[-2:] == ["head.classifier.weight", "head.classifier.bias"]
    assert set(names) < {name for name, _ in SVHN.build(SVHN.full()).named_parameters()}


def test_signals_go_through_one_dimensional_layers():
    family = Vgg(input_shape=(6, 128), block_channels=(8, 16), classes=12, exits=(0, 1))
    model = family.build(family.full())
    kinds = {type(module) for module in model.modules()}
    assert {nn.Conv1d, nn.MaxPool1d} < kinds
    assert not {nn.Conv2d, nn.MaxPool2d, nn.BatchNorm2d} & kinds
    # Convolutions 6-8-8 and 8-16-16 of length 3, norms, and heads behind 8 x 64 and 16 x 32 values.
    convolutions = (6 * 8 * 3 + 8) + (8 * 8 * 3 + 8) + (8 * 16 * 3 + 16) + (16 * 16 * 3 + 16)
    heads = (8 * 64 * 12 + 12) + (16 * 32 * 12 + 12)
    assert parameters(family, family.full()) == convolutions + 2 * (8 + 8 + 16 + 16) + heads
    assert [logits.shape for logits in model.exits(torch.rand(5, 6, 128))] == [(5, 12), (5, 12)]


def test_norms_of_signals_normalize_over_the_batch_and_all_positions():
    family = Vgg(input_shape=(2, 16), block_channels=(4,))
    norm = family.build(family.full()).get_submodule("block0.norm1")
    x = torch.randn(5, 4, 16)
    torch.testing.assert_close(norm(x), nn.BatchNorm1d(4)(x))
    with pytest.raises(ValueError, match=r"expected \(batch, channels, \*sides\), got \(4,\)"):
        norm(torch.randn(4))


def test_bad_block_channels_are_refused():
    with pytest.raises(ValueError, match=r"block_channels must be a list of numbers >= 1, not \(32, 0\)"):
        Vgg(block_channels=(32, 0))
    with pytest.raises(ValueError, match="does not fit"):
        Vgg(input_shape=(1, 8, 8))
